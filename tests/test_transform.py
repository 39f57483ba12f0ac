"""The map and its derivatives keep the error bound, against the paper's formulas in 50-digit arithmetic."""

import math

import pytest
import torch

from pairwise import every_pair
from reference import DTYPES, MODES, READS, VARIANTS, evaluate, mp, reads, worst
from symexplin.config import MODES as PACKAGE_MODES
from symexplin.derivatives import expm1
from symexplin.functional import effective
from symexplin.modes import DEFINITIONS, Scales
from symexplin.transform import forward, tolerance

SHAPE = (12, 14)
PATTERNS = ("defaults", "numbers", "product", "wild")
SCATTERED = torch.randperm(SHAPE[0] * SHAPE[1], generator=torch.Generator().manual_seed(5))


def magnitudes():
    """Return 84 values of kappa|w|: zero, a place for w = 1e-12, log and linear grids to 60, and around 1."""
    log = torch.logspace(-9, math.log10(60.0), 40, dtype=torch.float64)
    linear = torch.linspace(0.1, 60.0, 34, dtype=torch.float64)
    meeting = torch.tensor([1e-4, 0.29, 0.31, 0.9, 1 - 1e-6, 1.0, 1 + 1e-6, 1.1], dtype=torch.float64)
    return torch.cat([torch.zeros(2, dtype=torch.float64), log, linear, meeting]).clamp(max=60 * (1 - 1e-6))


def raw_weights(kappa, dtype):
    """Return w of SHAPE with kappa|w| on the grid, both signs, scattered over rows and columns."""
    x = magnitudes()
    signed = torch.stack([x, -x]).flatten()
    w = signed / torch.as_tensor(kappa, dtype=torch.float64).expand(SHAPE).flatten()[SCATTERED.argsort()]
    w[1], w[1 + len(x)] = 1e-12, -1e-12
    return w[SCATTERED].reshape(SHAPE).to(dtype)


def scales(pattern, offset, curvature, dtype):
    """Return the keyword arguments of `effective` but mode and normalize; vectors broadcast."""
    generator = torch.Generator().manual_seed(11)

    def draw(shape, low, high):
        unit = torch.rand(shape, generator=generator, dtype=torch.float64)
        return (low + (high - low) * unit).to(dtype)

    rows, columns = (SHAPE[0], 1), SHAPE[1:]
    beta = 7.5 if pattern in ("defaults", "wild") else 13.1  # 13.1 is not a number of either dtype
    if pattern == "defaults":
        out = {"n": offset}
    elif pattern == "numbers":
        out = {"e": 0.9, "l": 1.1, "m": 0.8, "n": offset}
    else:
        out = {role: draw(rows, 0.8, 1.2) * draw(columns, 0.8, 1.3) for role in "elmn"}
        out["n"] = offset * out["n"]
    if pattern == "wild":
        out["e"] = draw(SHAPE, -2.0, 2.0)
        out["l"] = draw(SHAPE, -2.0, 2.0) * (draw(columns, 0.0, 1.0) > 0.4)
        out |= {"s": draw(rows, -2.0, 2.0), "delta": draw(SHAPE, -0.5, 0.5)}
    if curvature == "absorbed":
        out["beta_tilde"] = beta * out.pop("m", 1.0)
    return out | {"beta": beta, "curvature": curvature}


def in_use(mode, variant, offset, **_):
    """Whether a mode reads the choices that are not the first; the damped one's linear pathway needs n >= 0."""
    return reads(mode, variant) and (offset == 0.0 or ("n" in READS[mode] and (mode != "damped" or offset > 0.0)))


def test_modes_are_the_papers():
    assert tuple(PACKAGE_MODES) == tuple(DEFINITIONS) == MODES
    for mode in MODES:
        assert {"m" if role == "kappa" else role for role in PACKAGE_MODES[mode]} == set(READS[mode])


@every_pair(in_use, mode=MODES, pattern=PATTERNS, variant=VARIANTS, offset=(0.0, 0.7, -1.0), dtype=DTYPES)
def test_value_and_derivatives_are_within_the_accuracy_owed(mode, variant, offset, pattern, dtype):
    curvature, normalize = variant
    arguments = scales(pattern, offset, curvature, dtype) | {"mode": mode, "normalize": normalize}
    curved = "m" if curvature == "fixed" else "beta_tilde"
    kappa = arguments["beta"] * arguments.get("m", 1.0) if curved == "m" else arguments["beta_tilde"]
    w = raw_weights(arguments["beta"] if mode == "damped" else kappa, dtype).requires_grad_()
    value = effective(w, **arguments)
    assert (value.dtype, value.shape) == (dtype, SHAPE)
    errors = {"value": worst(value, evaluate(w, **arguments))}

    arguments = {"e": 1.0, "l": 1.0, "m": 1.0, "s": 1.3, "delta": 0.0} | arguments
    if curved != "m":
        del arguments["m"]
    roles = ("e", "l", curved, "n", "s", "delta")
    for role in roles:  # full size: nothing is summed
        arguments[role] = torch.as_tensor(arguments[role], dtype=dtype).expand(SHAPE).clone().requires_grad_()
    g = torch.rand(SHAPE, dtype=dtype, generator=torch.Generator().manual_seed(3)) + 0.5
    effective(w, **arguments).backward(g)
    want = evaluate(w, **arguments)
    errors["w"] = worst(w.grad, want, "w", g=g)
    for role in roles:
        gradient = arguments[role].grad
        if role in ("s", "delta") or ("m" if role == curved else role) in READS[mode]:
            errors[role] = worst(gradient, want, role, g=g)
        else:
            assert gradient is None or not gradient.any(), f"mode {mode} does not read {role}"
    assert max(errors.values()) <= 1.0, errors


@pytest.mark.parametrize(("beta", "n"), [(7.5, 0.0), (7.5, 0.7), (30.0, 1.0), (3.0, 2.5)])
def test_the_damped_derivative_by_n_keeps_its_digits_at_small_weights(beta, n):
    """Its terms are equal to first order, so that the bound relative to their sum would allow any value there."""
    size = torch.logspace(-9, 0, 60)
    w = torch.cat([size, -size])
    offset = torch.full_like(w, n, requires_grad=True)
    effective(w, mode="damped", beta=beta, n=offset).sum().backward()
    for found, element in zip(offset.grad.tolist(), evaluate(w, mode="damped", beta=beta, n=n), strict=True):
        exact = mp.fsum(element["n"])
        assert abs(found - exact) <= 1e-6 * abs(exact)


@pytest.mark.usual_state
def test_the_compiled_exponential_and_its_gradient():
    """Of a branch that is not taken the gradient must be finite as well."""
    x = torch.tensor([-700.0, -30.0, -1.0, -1e-12, 0.0, 0.5, 1.0, 20.0, 30.0, 700.0], dtype=torch.float64)
    value = torch.compile(expm1, backend="aot_eager")(x.requires_grad_())
    value.sum().backward()
    torch.testing.assert_close(value, torch.expm1(x), rtol=1e-15, atol=0)
    torch.testing.assert_close(x.grad, torch.exp(x.detach()), rtol=1e-14, atol=0)


@every_pair(mode=MODES, n=[-0.5, 0.0, 0.7], normalize=[False, True])
def test_tolerance_covers_the_error_of_float32_and_is_what_is_owed(mode, n, normalize):
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(4096, generator=generator)  # up to 4: damped overflows from 9 on where n < 0
    numbers = {"e": -1.3, "l": 0.8, "kappa": 3.1, "n": n, "s": -2.0}
    delta = torch.randn(4096, generator=generator)
    normalizer = None if normalize else 3.0
    tensors = [torch.tensor(v) for v in numbers.values()]
    scales = Scales(normalizer, *tensors, delta)
    exact = Scales(normalizer, *(v.double() for v in tensors), delta.double())
    error = (forward(mode, w, scales) - forward(mode, w.double(), exact)).abs()
    allowed = tolerance(mode, w, scales)
    assert bool((error <= allowed).all())
    as_numbers = tolerance(mode, w, Scales(normalizer, *numbers.values(), delta))
    torch.testing.assert_close(as_numbers, allowed, rtol=1e-4, atol=0)
    if mode == "mismatch" and not normalize:
        x = 3.1 * w.double().abs()
        pathways = 1.3 / 3.0 * math.exp(-n) * torch.expm1(x) + 0.8 / 3.0 * w.double().abs()
        owed = (8 + 4 * x) * 2**-24 * (2.0 * pathways + delta.double().abs())
        torch.testing.assert_close(allowed.double(), owed, rtol=1e-4, atol=0)
