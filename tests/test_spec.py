"""The tensors of every pattern; values, gradients and inverses against the map of single elements."""

import math

import pytest
import torch

import symexplin as sel
from pairwise import every_pair
from states import STATES
from symexplin import transform
from symexplin.config import MODES, PATTERNS
from symexplin.spec import CurvedWeight, Spec

# By axes: the shape of a tensor.
SHAPES = {"o": (3,), "oi": (3, 2), "io": (2, 3), "eo": (5, 3), "eoi": (5, 3, 2), "eio": (5, 2, 3)}
FIRST = {"e": 1.3, "l": 0.9, "m": 0.8, "n": 0.4, "s": -1.1}
WAYS = ("fixed", "absorbed")  # curvature


def start(spec, dtype=torch.float64, position=3):
    return spec.first_values(dtype, torch.device("cpu"), position)


def config_of(mode, pattern, curvature, normalize):
    """All scales have the same pattern, and there is a residual."""
    scales = {role: sel.Scale(pattern, start=first, rank=2) for role, first in FIRST.items()}
    return sel.SELConfig(7.5, mode, curvature, normalize, **scales, delta=sel.Scale("lora", rank=2))


def curved_of(axes, config):
    """Random weights under scales a little above their start, which keeps every map invertible."""
    generator = torch.Generator().manual_seed(0)
    spec = Spec(SHAPES[axes], axes, config)
    tensors = {
        name: value + 0.05 * torch.rand(value.shape, generator=generator, dtype=value.dtype)
        for name, value in start(spec).items()
    }
    return CurvedWeight(spec, 0.3 * torch.randn(spec.shape, generator=generator, dtype=torch.float64), tensors)


# ---- the reference: scales of every element, and the map of single elements, which test_transform has ----


def expand(axes, shape, tensors, stem):
    """Return the tensors of one scale at every index of the weight, in the order of `tensors`."""
    index = torch.meshgrid(*map(torch.arange, shape), indexing="ij")
    stack, rows, columns = ([index[d] for d, axis in enumerate(axes) if axis == letter] for letter in "eoi")
    parts = {key.removeprefix(stem).lstrip("_"): value for key, value in tensors.items() if key.startswith(stem)}
    if "A" in parts:
        a, b = parts["A"], parts["B"].movedim(len(stack), -1)  # the rank comes last
        return [(a[(*stack, *rows)] * b[(*stack, *columns)]).sum(-1)]
    at = {"": stack, "row": [*stack, *rows], "column": [*stack, *columns]}
    return [value[tuple(at[suffix])] for suffix, value in parts.items()]


def reference(curved, raw, tensors):
    """Return the effective weight of every element, differentiable by `raw` and the `tensors`."""
    axes, config = curved.spec.axes, curved.spec.config

    def scale(role):
        absorbed = role == "m" and config.curvature == "absorbed"
        base = {**FIRST, "delta": 0.0}[role] * (7.5 if absorbed else 1.0)
        values = expand(axes, raw.shape, tensors, "a" if absorbed else role)
        pattern = "row" if "i" not in axes and getattr(config, role).learned else getattr(config, role).pattern
        if not values:
            return torch.tensor(base, dtype=torch.float64)
        if pattern == "lora":
            return base * torch.exp(values[0]) if absorbed else base + values[0]
        if absorbed:
            return torch.exp(sum(values))
        return math.prod(values) if pattern == "row_col_mult" else sum(values)

    scales = {role: scale(role) for role in ("e", "l", "n", "s", *(["delta"] if "i" in axes else []))}
    kappa = scale("m") * (1.0 if config.curvature == "absorbed" else 7.5)
    way = {"curvature": "absorbed", "beta_tilde": kappa, "normalize": config.normalize}
    return sel.functional.effective(raw, beta=7.5, mode=config.mode, **way, **scales)


def reads(mode, curvature, normalize, **_):
    """Whether a mode reads how its curvature is given and normalized, or these are the first ways."""
    return "kappa" in MODES[mode] or (curvature, normalize) == ("fixed", False)


@every_pair(reads, axes=SHAPES, mode=MODES, pattern=PATTERNS, curvature=WAYS, normalize=[False, True])
def test_values_gradients_and_inverse_are_those_of_single_elements(
    axes, mode, pattern, curvature, normalize, monkeypatch
):
    monkeypatch.setattr(transform, "_BLOCK", 5)  # elements that are inverted at a time
    curved = curved_of(axes, config_of(mode, pattern, curvature, normalize))
    raw = curved.raw.clone().requires_grad_()
    tensors = {name: value.clone().requires_grad_() for name, value in curved.tensors.items()}
    value = reference(curved, raw, tensors)
    torch.testing.assert_close(curved.effective(), value.detach(), rtol=1e-12, atol=1e-14)
    assert curved.effective(torch.bfloat16).equal(curved.effective().bfloat16())

    g = torch.randn(raw.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (slope,) = torch.autograd.grad(value.sum(), raw, retain_graph=True)
    value.backward(g)
    by_raw, by_tensor = curved.vjp()[1](g)
    torch.testing.assert_close(curved.slope(), slope, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(by_raw, raw.grad, rtol=1e-11, atol=1e-13)
    assert list(by_tensor) == [tensor.name for tensor in curved.spec.tensors]
    assert all(tensor.decays == (tensor.role in ("e", "l", "s")) for tensor in curved.spec.tensors)
    for name, grad in by_tensor.items():
        torch.testing.assert_close(grad, tensors[name].grad, rtol=1e-11, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")

    fixed = CurvedWeight(
        Spec(raw.shape, axes, config_of(mode, "fixed", curvature, normalize)), curved.raw, start(curved.spec)
    )
    at_start = curved._replace(tensors=start(curved.spec)).effective()
    torch.testing.assert_close(at_start, fixed.effective(), rtol=1e-13, atol=1e-15)

    w = value.detach()
    inverse = curved._replace(raw=torch.zeros_like(w)).inverse(w)
    torch.testing.assert_close(inverse, curved.raw, rtol=1e-12, atol=1e-14)
    masked = curved._replace(raw=torch.full_like(w, 9.0)).inverse(w, where=w > 0.1)
    torch.testing.assert_close(masked, torch.where(w > 0.1, curved.raw, 9.0), rtol=1e-12, atol=1e-14)


def test_a_product_of_low_rank_factors_is_exact_for_every_matmul_precision_and_under_autocast():
    """ "medium" multiplies matrices of this size in bfloat16 on CPUs that can."""
    spec = Spec((64, 64), "oi", sel.SELConfig(7.5, delta=sel.Scale("lora", rank=64)))
    a, b, g = torch.randn(3, 64, 64, generator=torch.Generator().manual_seed(0)).unbind()
    curved = CurvedWeight(spec, torch.zeros(64, 64), {"delta_A": a, "delta_B": b})
    with STATES["medium"](), torch.autocast("cpu", torch.bfloat16):
        products = [curved.effective(), *curved.vjp()[1](g)[1].values()]
    expected = (a.double() @ b.double(), g.double() @ b.double().T, a.double().T @ g.double())
    torch.testing.assert_close(products, [value.float() for value in expected], rtol=1e-6, atol=1e-6)


# ---- first values ----


def test_lora_is_drawn_whole_from_a_generator_of_its_own():
    """The draw depends on seed and position alone, and not on the dtype."""

    def draw(seed, position, dtype=torch.float64):
        spec = Spec((50, 30), "oi", sel.SELConfig(seed=seed, delta=sel.Scale("lora", rank=4)))
        return start(spec, dtype, position)["delta_A"]

    state = torch.random.get_rng_state()
    first = draw(0, 0)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(first.float(), draw(0, 0, torch.float32))
    assert not any(torch.equal(first, other) for other in (draw(1, 0), draw(0, 1)))
    assert first.abs().max() <= 0.5 < 1.02 * first.abs().max()  # uniform on +-1/sqrt(4)
    assert abs(float(first.mean())) < 0.1


@pytest.mark.parametrize("axes", ["", "i", "oie", "oii", "oi"])
def test_other_axes_are_refused(axes):
    with pytest.raises(ValueError, match=r"axes must be one of .* a letter per dimension"):
        Spec((2,) * (len(axes) if axes != "oi" else 3), axes, sel.SELConfig())
