"""The public functions: types, shapes, errors, reductions, higher derivatives, annealing and rules for beta."""

import math

import pytest
import torch

from pairwise import every_pair
from reference import DTYPES, MODES, READS, VARIANTS, evaluate, mp, reads, worst
from symexplin.functional import anneal, beta_for, effective, inverse

SINGLE_ROLES = ("e", "l", "m", "n", "s")


def draw(shape, low, high, seed=0):
    unit = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return low + (high - low) * unit


# Gradients ------------------------------------------------------------------------------------------------


@every_pair(reads, mode=MODES, variant=VARIANTS)
def test_first_and_second_derivatives_and_their_sums_match_finite_differences(mode, variant):
    """Both sides of kappa|w| = 1; each input broadcasts in its own way, so its gradient is a sum."""
    curvature, normalize = variant
    shapes = {"e": (2, 1), "l": (4,), "m": (2, 4), "n": (), "s": (2, 1), "delta": (1, 4)}
    ranges = {"e": (0.6, 1.5), "l": (0.6, 1.5), "m": (0.6, 1.5), "n": (-0.5, 0.5), "s": (0.5, 2.0), "delta": (-1, 1)}
    values = {role: draw(shapes[role], *ranges[role], seed=k) for k, role in enumerate(ranges)}
    if curvature == "absorbed":
        values["beta_tilde"] = 3.0 * values.pop("m")
    roles = [r for r in values if r in ("s", "delta") or ("m" if r == "beta_tilde" else r) in READS[mode]]

    def run(w, *tensors):
        scales = values | dict(zip(roles, tensors, strict=True))
        return effective(w, mode=mode, beta=3.0, curvature=curvature, normalize=normalize, **scales)

    for w, check in (
        ([[0.05, -0.2, 0.9, -0.5], [-0.07, 0.25, -1.1, 0.6]], torch.autograd.gradcheck),
        ([-0.3, 0.7, -0.04, 1.2], torch.autograd.gradgradcheck),
    ):
        inputs = [torch.tensor(w, dtype=torch.float64), *(values[role].clone() for role in roles)]
        assert check(run, [tensor.requires_grad_() for tensor in inputs])


def test_the_curve_has_no_bend_at_zero():
    w = torch.tensor([0.0, -0.0], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(effective(w, mode="mismatch", beta=7.5).sum(), w, create_graph=True)
    assert torch.autograd.grad(slope.sum(), w)[0].tolist() == [0.0, 0.0]


# Types and shapes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_computed_in_float32(half):
    arguments = {"mode": "mismatch", "beta": 7.5, "n": 0.2}
    w = torch.linspace(-1.0, 1.0, 33).to(half).requires_grad_()
    value = effective(w, **arguments)
    assert worst(value, evaluate(w, **arguments)) <= 1.0
    value.sum().backward()
    raw = inverse(w, **arguments)
    assert worst(w.detach().float(), evaluate(raw, **arguments)) <= 1.0
    assert (value.dtype, w.grad.dtype, raw.dtype, raw.requires_grad) == (torch.float32, half, torch.float32, False)


@every_pair(curvature=["fixed", "absorbed"], dtype=DTYPES, scale_dtype=[torch.bfloat16, *DTYPES])
def test_scales_of_another_dtype_lose_nothing(curvature, dtype, scale_dtype):
    """A scale is used at its exact value, whatever its dtype; the result is float64 if any input is."""
    w = torch.linspace(-4.0, 4.0, 41, dtype=dtype)
    roles = ("e", "l", "n", "s", "delta", "m" if curvature == "fixed" else "beta_tilde")
    scales = {role: torch.linspace(0.7, 0.9 + i / 100, 41).to(scale_dtype) for i, role in enumerate(roles)}
    arguments = {"mode": "congruent", "beta": 13.1, "normalize": True, "curvature": curvature, **scales}
    result = effective(w, **arguments)
    assert result.dtype == (torch.float64 if torch.float64 in (dtype, scale_dtype) else torch.float32)
    assert worst(result, evaluate(w, **arguments)) <= 1.0
    del arguments["delta"]
    raw = inverse(w, **arguments)
    assert raw.dtype == dtype
    assert worst(w, evaluate(raw, **arguments)) <= 1.0


@pytest.mark.parametrize("mode", MODES)
def test_numbers_tensors_and_integers_agree_in_any_shape(mode):
    w = torch.linspace(-1, 1, 9, dtype=torch.float64)
    numbers = dict(zip(SINGLE_ROLES, (2, 3, 1, 1, 2), strict=True))
    integers = effective(w, mode=mode, beta=7, **numbers)
    assert torch.equal(effective(w, mode=mode, beta=7.0, **{r: float(v) for r, v in numbers.items()}), integers)
    tensors = {role: torch.tensor(v, dtype=torch.float64) for role, v in numbers.items()}
    torch.testing.assert_close(effective(w, mode=mode, beta=7, **tensors), integers, rtol=1e-14, atol=0)
    torch.testing.assert_close(inverse(integers, mode=mode, beta=7, **numbers), w, rtol=1e-13, atol=1e-300)
    whole = torch.tensor([1, -1])
    assert torch.equal(effective(whole, mode=mode, beta=2), effective(whole.float(), mode=mode, beta=2))
    for shape in ((), (0,), (1,), (3, 0), (0, 3), (2, 3, 4)):
        value = effective(draw(shape, -1, 1), mode=mode, beta=7.5)
        assert value.shape == inverse(value, mode=mode, beta=7.5).shape == shape


def test_the_default_is_the_exponential_with_slope_one():
    w = torch.linspace(-1, 1, 21, dtype=torch.float64)
    value = torch.sign(w) * (torch.exp(7.5 * w.abs()) - 1) / 7.5
    torch.testing.assert_close(effective(w, beta=7.5), value, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(inverse(value, beta=7.5), w, rtol=1e-13, atol=1e-15)
    with pytest.raises(TypeError, match="beta"):
        effective(w)


# Errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [effective, inverse])
def test_bad_arguments_are_named(function):
    cases = [({"beta": beta}, f"beta must be .* got {beta!r}") for beta in (0, -7.5, math.nan, math.inf, True, None)]
    cases += [
        ({"mode": "mismatched"}, "mode .*'mismatched'.*'mismatch'"),
        ({"curvature": "absorb"}, "curvature .*'absorb'.*'absorbed'"),
        ({"beta_tilde": 7.5}, "beta_tilde .*curvature='fixed' and beta_tilde=a value"),
        ({"curvature": "absorbed"}, "beta_tilde .*curvature='absorbed' and beta_tilde=None"),
        ({"normalize": "no"}, "normalize .*'no'"),
    ]
    for changes, message in cases:
        with pytest.raises(ValueError, match=message):
            function(torch.ones(2), **{"beta": 7.5} | changes)
    for wrong, got in ((None, "NoneType"), ([0.1], "list"), (torch.ones(2, dtype=torch.complex64), "torch.complex64")):
        with pytest.raises(ValueError, match=f"^[wt] must be a tensor of real numbers, got {got}$"):
            function(wrong, beta=7.5)


def test_bad_numbers_of_annealing_and_of_beta_are_named():
    cases = [
        (anneal, (0, None, 50.0, 8.0), "total .* got None"),
        (anneal, (0, -5, 50.0, 8.0), "total .* got -5"),
        (anneal, (-1, 10, 50.0, 8.0), "step .* got -1"),
        (anneal, ("1", 10, 50.0, 8.0), "step .* got '1'"),
        (anneal, (1, math.nan, 50.0, 8.0), "total .* got nan"),
        (anneal, (0, 10, 0.0, 8.0), "k0 .* got 0.0"),
        (anneal, (0, 10, 50.0, math.inf), "k1 .* got inf"),
        (beta_for, (0.0,), "std must be"),
        (beta_for, (0.02, -1), "deviations must be"),
    ]
    for call, arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            call(*arguments)


# Annealing and rules for beta -----------------------------------------------------------------------------


@pytest.mark.parametrize(("k0", "k1"), [(50.0, 8.0), (1e-6, 1e6), (3, 2)])
def test_anneal_follows_its_formula(k0, k1):
    for total in (1, 2, 7, 1000):
        for t in sorted({0, 1, 2, total // 3, total // 2, total - 1, total, total + 1, 10 * total}):
            part = (1 - mp.cos(mp.pi * min(mp.mpf(t) / total, 1))) / 2
            exact = mp.exp(mp.log(mp.mpf(k0)) + mp.log(mp.mpf(k1) / mp.mpf(k0)) * part)
            assert anneal(t, total, k0, k1) == pytest.approx(float(exact), rel=1e-13)
        assert anneal(0, total, k0, k1) == k0
        assert anneal(total, total, k0, k1) == anneal(total + 5, total, k0, k1) == k1
        assert type(anneal(0, total, k0, k1)) is type(anneal(total, total, k0, k1)) is float
    assert anneal(10, None, k0, k0) == anneal(3, 0, k0, float(k0)) == k0  # without change, no total


def test_beta_for_departs_at_the_deviations_asked_for():
    """The curve is 23% above its tangent there: the paper's 7.5 at 1.75 deviations of width 1024."""
    excess = [beta_for(std, z) * std * z for std, z in ((1 / 32, 1.75), (0.5, 1.5), (2.0, 2.0))]
    assert excess == pytest.approx([7.5 * 1.75 / 32] * 3)
    assert math.expm1(excess[0]) / excess[0] == pytest.approx(1.236, abs=1e-3)
    assert beta_for(1 / 32) == 7.5
