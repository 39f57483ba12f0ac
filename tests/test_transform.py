"""The map and its derivatives keep the accuracy owed, against the paper's formulas in 50-digit arithmetic."""

import itertools
import math

import pytest
import torch

from pairwise import every_pair
from reference import EXPONENTIAL, MODES, READS, Point, evaluate, mp, terms, total, worst
from symexplin.functional import effective
from symexplin.config import MODES as PACKAGE_MODES
from symexplin.transform import Form, Scales, compute_dtype, forward, pullback, tolerance

SHAPE = (12, 14)
DTYPES = (torch.float32, torch.float64)
PATTERNS = ("defaults", "numbers", "row", "column", "product", "sum", "wild")
VARIANTS = (("fixed", False), ("fixed", True), ("absorbed", False), ("absorbed", True))
OFFSETS = (0.0, 0.7, -1.0)


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
    w = signed / torch.as_tensor(kappa, dtype=torch.float64).expand(SHAPE).flatten()[scattered().argsort()]
    w[1], w[1 + len(x)] = 1e-12, -1e-12
    return w[scattered()].reshape(SHAPE).to(dtype)


def scattered():
    return torch.randperm(SHAPE[0] * SHAPE[1], generator=torch.Generator().manual_seed(5))


def scales(pattern, offset, curvature, dtype):
    """Return the keyword arguments of `effective` but mode and normalize; vectors broadcast."""
    generator = torch.Generator().manual_seed(11)

    def draw(shape, low, high):
        unit = torch.rand(shape, generator=generator, dtype=torch.float64)
        return (low + (high - low) * unit).to(dtype)

    rows, columns = (SHAPE[0], 1), SHAPE[1:]

    def positive(low=0.6, high=1.6):
        if pattern in ("row", "column"):
            return draw(rows if pattern == "row" else columns, low, high)
        a, b = draw(rows, low**0.5, high**0.5), draw(columns, low**0.5, high**0.5)
        return a * b if pattern in ("product", "wild") else (a + b) / 2

    beta = 7.5 if pattern in ("defaults", "wild") else 13.1  # 13.1 is not a number of either dtype
    if pattern == "defaults":
        out = {"n": offset}
    elif pattern == "numbers":
        out = {"e": 0.9, "l": 1.1, "m": 0.8, "n": offset}
    else:
        out = {"e": positive(), "l": positive(), "m": positive(), "n": offset * positive()}
    if pattern == "wild":
        out["e"] = draw(SHAPE, -2.0, 2.0)
        out["l"] = draw(SHAPE, -2.0, 2.0) * (draw(columns, 0.0, 1.0) > 0.4)
        out |= {"s": draw(rows, -2.0, 2.0), "delta": draw(SHAPE, -0.5, 0.5)}
    if curvature == "absorbed":
        out["beta_tilde"] = beta * out.pop("m", 1.0)
    return out | {"beta": beta, "curvature": curvature}


def kappa_of(arguments):
    return arguments["beta_tilde"] if "beta_tilde" in arguments else arguments["beta"] * arguments.get("m", 1.0)


def read(mode, variant=VARIANTS[0], offset=0.0, **_):
    """Whether a mode reads the choices that are not the first; the damped one's linear pathway needs n >= 0."""
    if variant != VARIANTS[0] and "m" not in READS[mode]:
        return False
    return offset == 0.0 or ("n" in READS[mode] and (mode != "damped" or offset > 0.0))


def grid(mode, variant, offset, pattern, dtype):
    """Return a case's raw weights and arguments."""
    curvature, normalize = variant
    arguments = scales(pattern, offset, curvature, dtype) | {"mode": mode, "normalize": normalize}
    return raw_weights(arguments["beta"] if mode == "damped" else kappa_of(arguments), dtype), arguments


every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def test_modes_are_the_papers():
    assert tuple(PACKAGE_MODES) == MODES
    for mode, reads in PACKAGE_MODES.items():
        assert {"m" if role == "kappa" else role for role in reads} == set(READS[mode])


@every_dtype
def test_the_grid_covers_what_it_says(dtype):
    w, arguments = grid("mismatch", VARIANTS[0], 0.0, "product", dtype)
    x = (w.double() * kappa_of(arguments).double()).abs()
    assert w.shape == SHAPE
    assert int((w == 0).sum()) == 2
    assert int((w.abs() == torch.tensor(1e-12, dtype=dtype)).sum()) == 2
    assert 59.9 < float(x.max()) <= 60.0
    assert int((w > 0).sum()) == int((w < 0).sum())


@every_pair(read, mode=MODES, pattern=PATTERNS, variant=VARIANTS, offset=OFFSETS, dtype=DTYPES)
def test_value_is_within_the_accuracy_owed(mode, variant, offset, pattern, dtype):
    w, arguments = grid(mode, variant, offset, pattern, dtype)
    value = effective(w, **arguments)
    assert value.dtype == dtype
    assert value.shape == SHAPE
    units = worst(value, evaluate(w, **arguments))
    assert units <= 1.0


@every_pair(read, mode=MODES, variant=VARIANTS, offset=OFFSETS, pattern=("product", "wild"), dtype=DTYPES)
def test_derivatives_are_within_the_accuracy_owed(mode, variant, offset, pattern, dtype):
    w, arguments = grid(mode, variant, offset, pattern, dtype)
    arguments = {"s": 1.3, "delta": torch.zeros(SHAPE, dtype=dtype)} | arguments
    curved = "m" if variant[0] == "fixed" else "beta_tilde"
    for role in ("e", "l", curved, "n", "s", "delta"):  # full size: nothing is summed
        arguments[role] = torch.as_tensor(arguments[role], dtype=dtype).expand(SHAPE).clone().requires_grad_()
    w.requires_grad_()
    g = torch.rand(SHAPE, dtype=dtype, generator=torch.Generator().manual_seed(3)) + 0.5
    effective(w, **arguments).backward(g)
    want = evaluate(w, **arguments)
    errors = {"w": worst(w.grad, want, "w", g=g)}
    for role in ("e", "l", curved, "n", "s", "delta"):
        gradient = arguments[role].grad
        if role in ("s", "delta") or ("m" if role == curved else role) in READS[mode]:
            errors[role] = worst(gradient, want, role, g=g)
        else:
            assert gradient is None or not gradient.any(), f"mode {mode} does not read {role}"
    assert max(errors.values()) <= 1.0, errors


@pytest.mark.parametrize("curvature", ["fixed", "absorbed"])
@pytest.mark.parametrize("mode", ["exp_only", "sinh", "mismatch"])
def test_normalised_curvature_derivative_survives_cancellation(mode, curvature):
    """At x = 1e-4 in float32 the difference x exp(x) - expm1(x) as written is 1e-3 off."""
    w = torch.tensor([1e-4, -1e-4]) / 7.5
    role, start = ("m", 1.0) if curvature == "fixed" else ("beta_tilde", 7.5)
    k = torch.full((2,), start, requires_grad=True)
    arguments = {"mode": mode, "beta": 7.5, "l": 0.0, "normalize": True, "curvature": curvature, role: k}
    effective(w, **arguments).sum().backward()
    want = evaluate(w, **arguments)
    units = worst(k.grad, want, role)
    assert units <= 1.0
    exact = [float(v) for v in total(want, role)]
    assert k.grad.tolist() == pytest.approx(exact, rel=1e-6)
    x = 7.5 * w
    naive = x.sinh() if mode == "sinh" else torch.expm1(x.abs())
    lead = x * x.cosh() if mode == "sinh" else x.abs() * x.abs().exp()
    scale = 7.5 if curvature == "fixed" else 1.0
    naive_derivative = (lead - naive) / 7.5**2 * scale * (1 if mode == "sinh" else torch.sign(w))
    assert max(abs(a / b - 1) for a, b in zip(naive_derivative.tolist(), exact, strict=True)) > 1e-4


@every_dtype
@pytest.mark.parametrize("mode", ["exp_only", "sinh"])
def test_series_and_closed_form_meet(mode, dtype):
    """Steps of one unit across x = 1, both sides of the branch."""
    step = torch.finfo(dtype).eps
    w = torch.tensor([1 + k * step for k in range(-6, 7)], dtype=dtype)
    kappa = torch.ones_like(w, requires_grad=True)
    arguments = {"mode": mode, "beta": 2.0, "normalize": True, "curvature": "absorbed", "beta_tilde": kappa}
    effective(w, **arguments).sum().backward()
    units = worst(kappa.grad, evaluate(w, **arguments), "beta_tilde")
    assert units <= 1.0
    assert float(kappa.grad.max() / kappa.grad.min()) - 1 < 64 * step


@every_dtype
@pytest.mark.parametrize("mode", MODES)
def test_slope_at_zero_is_the_mean_of_its_sides(mode, dtype):
    """The one-sided slopes are limits of the 50-digit values; both zeros count as zero."""
    rows = [(l, s, n) for l, s in ((1.0, 1.0), (-0.4, 1.7), (0.0, -1.0)) for n in (0.0, 0.7)]
    means = []
    for l, s, n in rows:
        p = Point(*map(mp.mpf, (0, 7.5, 0.9, l, 7.5 * 0.75, n, s, 0.25)))
        value = lambda w, p=p: mp.fsum(terms(mode, False, p._replace(w=w))["value"])  # noqa: E731
        means.append(float(sum(mp.diff(value, 0, direction=side) for side in (1, -1)) / 2))
    l, s, n = torch.tensor(rows, dtype=dtype).T.unsqueeze(2)
    w = torch.tensor([0.0, -0.0], dtype=dtype).repeat(len(rows), 1).requires_grad_()
    delta = torch.full((2,), 0.25, dtype=dtype)
    effective(w, mode=mode, beta=7.5, e=0.9, l=l, m=0.75, n=n, s=s, delta=delta).sum().backward()
    for slopes, mean in zip(w.grad.tolist(), means, strict=True):
        assert slopes == pytest.approx([mean, mean], rel=16 * torch.finfo(dtype).eps)
        assert mode not in EXPONENTIAL or mean != 0.0


@pytest.mark.parametrize("mode", MODES)
def test_reference_derivatives_are_those_of_its_value(mode):
    """The reference itself: its closed-form derivatives against mpmath's differentiation."""
    for w, normalize in itertools.product(("-1.3", "-1e-12", "1e-5", "0.4"), (False, True)):
        p = Point(*map(mp.mpf, (w, "7.5", "0.9", "1.1", "6.1", "0.7", "1.4", "0.2")))
        here = terms(mode, normalize, p)
        for role in Point._fields:
            if role == "beta":
                continue
            value = lambda v, role=role, p=p, normalize=normalize: mp.fsum(  # noqa: E731
                terms(mode, normalize, p._replace(**{role: v}))["value"]
            )
            slope, want = mp.diff(value, getattr(p, role)), mp.fsum(here.get(role, [0]))
            size = mp.fsum(here.get(role, [0]), absolute=True)
            assert abs(slope - want) <= mp.mpf(10) ** -20 * size + mp.mpf(10) ** -28  # delta hides (1e-12)^6.5


@pytest.mark.parametrize("mode", MODES)
def test_pullback_returns_what_is_wanted(mode):
    w = torch.linspace(-1, 1, 5)
    form, values, g = Form(mode, 7.5), Scales(kappa=7.5, n=0.1), torch.ones(5)
    assert set(pullback(form, w, values, g, frozenset())) == {"w"}
    for role in (*PACKAGE_MODES[mode], "s", "delta"):
        pulled = pullback(form, w, values, g, frozenset({role}))
        assert set(pulled) == {"w", role}
        assert all(value.shape == w.shape for value in pulled.values())
    everything = frozenset(PACKAGE_MODES[mode]) | {"s", "delta"}
    assert set(pullback(form, w, values, g, everything)) == everything | {"w"}


def test_forward_is_odd_where_the_mode_is():
    w = torch.linspace(-8, 8, 101, dtype=torch.float64)
    for mode in MODES:
        form, values = Form(mode, 7.5), Scales(kappa=7.5, n=0.7)
        assert torch.equal(forward(form, -w, values), -forward(form, w, values)) == (mode != "mismatch")


def test_compute_dtype_is_float64_if_any_is():
    half, single, double = (torch.ones(1, dtype=d) for d in (torch.bfloat16, torch.float32, torch.float64))
    assert compute_dtype(half, 1.0, None) == compute_dtype(half, single) == torch.float32
    assert compute_dtype(torch.ones(1, dtype=torch.float16)) == compute_dtype() == torch.float32
    assert compute_dtype(half, single, double) == torch.float64


@every_pair(mode=MODES, n=[-0.5, 0.0, 0.7], normalize=[False, True])
def test_tolerance_covers_the_error_of_float32_and_is_what_is_owed(mode, n, normalize):
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(4096, generator=generator)  # up to 4: damped overflows from 9 on where n < 0
    numbers = {"e": -1.3, "l": 0.8, "kappa": 3.1, "n": n, "s": -2.0}
    delta = torch.randn(4096, generator=generator)
    scales = Scales(**{k: torch.tensor(v) for k, v in numbers.items()}, delta=delta)
    exact = Scales(*(v.double() for v in scales))
    form = Form(mode, 3.0, normalize)
    error = (forward(form, w, scales) - forward(form, w.double(), exact)).abs()
    allowed = tolerance(form, w, scales)
    assert bool((error <= allowed).all())
    as_numbers = tolerance(form, w, Scales(**numbers, delta=delta))
    torch.testing.assert_close(as_numbers, allowed, rtol=1e-4, atol=0)
    if mode == "mismatch" and not normalize:
        x = 3.1 * w.double().abs()
        pathways = 1.3 / 3.0 * math.exp(-n) * torch.expm1(x) + 0.8 / 3.0 * w.double().abs()
        owed = (8 + 4 * x) * 2**-24 * (2.0 * pathways + delta.double().abs())
        torch.testing.assert_close(allowed.double(), owed, rtol=1e-4, atol=0)
