"""The public functions: types, shapes, errors, reductions, higher derivatives, annealing and automatic beta."""

import itertools
import math

import pytest
import torch

from pairwise import every_pair
from reference import EXPONENTIAL, MODES, READS, evaluate, mp, worst
from symexplin.functional import anneal, auto_beta, beta_for, effective, inverse

VARIANTS = (("fixed", False), ("fixed", True), ("absorbed", False), ("absorbed", True))
SINGLE_ROLES = ("e", "l", "m", "n", "s")
DTYPES = (torch.float32, torch.float64)

every_mode = pytest.mark.parametrize("mode", MODES)


def read(mode, variant, **_):
    """Whether a mode reads how its curvature is given and normalized, or this is the first way."""
    return variant == VARIANTS[0] or "m" in READS[mode]


def draw(shape, low, high, seed=0):
    unit = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return low + (high - low) * unit


def structured(curvature, shapes):
    """Return float64 scales with the shapes given, all requiring gradients; the curvature under its own name."""
    ranges = {"e": (0.6, 1.5), "l": (0.6, 1.5), "m": (0.6, 1.5), "n": (-0.5, 0.5), "s": (0.5, 2.0), "delta": (-1, 1)}
    out = {role: draw(shapes[role], *ranges[role], seed=k) for k, role in enumerate(ranges)}
    if curvature == "absorbed":
        out["beta_tilde"] = 3.0 * out.pop("m")
    return {role: value.requires_grad_() for role, value in out.items()}


# Gradients ------------------------------------------------------------------------------------------------


@every_pair(read, mode=MODES, variant=VARIANTS)
def test_structured_gradients_are_sums_of_elementwise_ones(mode, variant):
    curvature, normalize = variant
    shapes = {"e": (5, 1), "l": (7,), "m": (1, 7), "n": (), "s": (5, 1), "delta": (7,)}
    vectors = structured(curvature, shapes)
    full = {role: v.detach().expand(3, 5, 7).clone().requires_grad_() for role, v in vectors.items()}
    w = draw((5, 7), -1.5, 1.5, seed=9).requires_grad_()  # broadcast over the leading axis of g
    whole = w.detach().expand(3, 5, 7).clone().requires_grad_()
    g = draw((3, 5, 7), -1.0, 1.0, seed=10)
    arguments = {"mode": mode, "beta": 3.0, "curvature": curvature, "normalize": normalize}
    (effective(w, **arguments, **vectors).expand(3, 5, 7) * g).sum().backward()
    (effective(whole, **arguments, **full) * g).sum().backward()
    for a, b in [(w, whole), *((vectors[role], full[role]) for role in vectors)]:
        if a.grad is None:
            assert b.grad is None
            continue
        assert a.grad.shape == a.shape
        torch.testing.assert_close(a.grad, b.grad.sum_to_size(a.shape), rtol=1e-12, atol=1e-12)


def test_raw_weight_may_be_the_one_that_broadcasts():
    w = torch.tensor([0.3, -0.2, 0.1], requires_grad=True)
    e = torch.tensor([[1.0], [2.0]], requires_grad=True)
    value = effective(w, beta=7.5, e=e)
    assert value.shape == (2, 3)
    value.sum().backward()
    assert (w.grad.shape, e.grad.shape) == ((3,), (2, 1))


@every_pair(read, mode=MODES, variant=VARIANTS)
def test_gradcheck_and_gradgradcheck(mode, variant):
    """First and second derivatives against finite differences, on both sides of kappa|w| = 1."""
    curvature, normalize = variant
    shapes = {"e": (2, 1), "l": (4,), "m": (2, 4), "n": (4,), "s": (2, 1), "delta": (2, 4)}
    values = structured(curvature, shapes)
    roles = [r for r in values if r in ("s", "delta") or ("m" if r == "beta_tilde" else r) in READS[mode]]
    w = torch.tensor([[0.05, -0.2, 0.9, -0.5], [-0.07, 0.25, -1.1, 0.6]], dtype=torch.float64, requires_grad=True)

    def run(w, *tensors):
        scales = {role: v.detach() for role, v in values.items()} | dict(zip(roles, tensors, strict=True))
        return effective(w, mode=mode, beta=3.0, curvature=curvature, normalize=normalize, **scales)

    inputs = (w, *(values[role] for role in roles))
    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


@every_pair(read, mode=MODES, variant=VARIANTS, dtype=DTYPES)
def test_nothing_is_nan_up_to_sixty(mode, variant, dtype):
    """Value, gradients and second derivatives are finite for kappa|w| <= 60, at both zeros and tiny weights too."""
    curvature, normalize = variant
    size = torch.cat([torch.tensor([0.0, 1e-38, 1e-12, 1e-6, 0.04]), torch.linspace(0.1, 7.99, 60)])
    w = torch.cat([size, -size]).to(dtype).requires_grad_()
    scales = {"e": -0.9, "l": 0.0, "m": 1.0, "n": 0.7, "s": -1.5, "delta": 0.1}
    values = {role: torch.full_like(w, v, requires_grad=True) for role, v in scales.items()}
    if curvature == "absorbed":
        values["beta_tilde"] = (7.5 * values.pop("m").detach()).requires_grad_()
    value = effective(w, mode=mode, beta=7.5, curvature=curvature, normalize=normalize, **values)
    inputs = (w, *values.values())
    first = torch.autograd.grad(value.sum(), inputs, create_graph=True, allow_unused=True)
    used = [g for g in first if g is not None]
    second = torch.autograd.grad(sum(g.sum() for g in used), inputs, allow_unused=True)
    for tensor in (value, *used, *(g for g in second if g is not None)):
        assert bool(torch.isfinite(tensor).all())


def test_second_derivative_is_right():
    """d2/dw2 of the exponential pathway is sign(w) (e/d) kappa^2 exp(kappa|w| - n), and 0 at 0."""
    w = torch.tensor([-0.4, 0.0, 0.7], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(effective(w, beta=7.5, e=0.8, n=0.3).sum(), w, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), w)
    exact = [math.copysign(0.8 * 7.5 * math.exp(7.5 * abs(v) - 0.3), v) if v else 0.0 for v in w.tolist()]
    assert bend.tolist() == pytest.approx(exact, rel=1e-13)


def test_a_coordinate_at_zero_moves():
    w = torch.zeros(3, requires_grad=True)
    effective(w, beta=7.5).sum().backward()
    assert w.grad.tolist() == [1.0, 1.0, 1.0]


# Types and shapes -----------------------------------------------------------------------------------------


@every_pair(mode=MODES, half=[torch.bfloat16, torch.float16])
def test_half_precision_weights_are_computed_in_float32(mode, half):
    w = torch.linspace(-1.0, 1.0, 33).to(half).requires_grad_()
    value = effective(w, mode=mode, beta=7.5, n=0.2)
    assert value.dtype == torch.float32
    units = worst(value, evaluate(w, mode=mode, beta=7.5, n=0.2))
    assert units <= 1.0
    value.sum().backward()
    assert w.grad.dtype == half
    t = w.detach()
    raw = inverse(t, mode=mode, beta=7.5, n=0.2)
    assert raw.dtype == torch.float32
    units = worst(t.float(), evaluate(raw, mode=mode, beta=7.5, n=0.2))
    assert units <= 1.0


@every_pair(role=[*SINGLE_ROLES, "beta_tilde", "delta"], dtype=DTYPES, scale_dtype=[torch.bfloat16, *DTYPES])
def test_scales_of_another_dtype_lose_nothing(role, dtype, scale_dtype):
    """A scale is used at its exact value, whatever its dtype; the result is float64 if any input is."""
    w = torch.linspace(-4.0, 4.0, 41, dtype=dtype)
    value = torch.linspace(0.7, 0.9, 41).to(scale_dtype) * (8 if role == "beta_tilde" else 1)
    arguments = {"mode": "congruent", "beta": 13.1, "normalize": True, role: value}
    if role == "beta_tilde":
        arguments["curvature"] = "absorbed"
    result = effective(w, **arguments)
    assert result.dtype == (torch.float64 if torch.float64 in (dtype, scale_dtype) else torch.float32)
    units = worst(result, evaluate(w, **arguments))
    assert units <= 1.0
    if role != "delta":
        raw = inverse(w, **arguments)
        assert raw.dtype == dtype
        units = worst(w, evaluate(raw, **arguments))
        assert units <= 1.0


@every_mode
def test_numbers_tensors_and_integers_agree(mode):
    """An integer number is a number; a 0-dim tensor is a number that can learn."""
    w = torch.linspace(-1, 1, 9, dtype=torch.float64)
    floats = effective(w, mode=mode, beta=7.0, e=2.0, l=3.0, m=1.0, n=1.0, s=2.0)
    integers = effective(w, mode=mode, beta=7, e=2, l=3, m=1, n=1, s=2)
    tensors = {r: torch.tensor(v, dtype=torch.float64) for r, v in zip(SINGLE_ROLES, (2, 3, 1, 1, 2), strict=True)}
    assert torch.equal(floats, integers)
    torch.testing.assert_close(effective(w, mode=mode, beta=7, **tensors), floats, rtol=1e-14, atol=0)
    raw = inverse(floats, mode=mode, beta=7, e=2, l=3, m=1, n=1, s=2)
    torch.testing.assert_close(raw, w, rtol=1e-13, atol=1e-300)


def test_integer_weights_become_float32():
    assert torch.equal(effective(torch.tensor([1, -1]), beta=2), effective(torch.tensor([1.0, -1.0]), beta=2.0))


@every_mode
def test_any_shape(mode):
    for shape in ((), (0,), (1,), (3, 0), (2, 3), (2, 3, 4)):
        value = effective(draw(shape, -1, 1), mode=mode, beta=7.5)
        assert value.shape == inverse(value, mode=mode, beta=7.5).shape == shape


def test_result_has_the_broadcast_shape():
    w = torch.ones(4, 1)
    assert effective(w, beta=7.5, l=torch.ones(3)).shape == (4, 3)
    assert effective(w, beta=7.5, delta=torch.ones(2, 1, 3)).shape == (2, 4, 3)
    assert inverse(w, beta=7.5, n=torch.zeros(3)).shape == (4, 3)


def test_inverse_records_no_graph_and_inputs_are_left_alone():
    t = torch.tensor([0.3, -0.2], requires_grad=True)
    e = torch.ones(2, requires_grad=True)
    assert not inverse(t, beta=7.5, e=e).requires_grad
    assert effective(t, beta=7.5, e=e).requires_grad
    assert t.tolist() == torch.tensor([0.3, -0.2]).tolist()


def test_defaults_are_the_papers():
    """Mismatch both ways, unit scales, fixed curvature, d = beta."""
    w = torch.linspace(-1, 1, 21, dtype=torch.float64)
    paper = torch.sign(w) * ((torch.exp(7.5 * w.abs()) - 1) / 7.5 + w / 7.5)
    torch.testing.assert_close(effective(w, beta=7.5), paper, rtol=1e-13, atol=1e-15)
    back = effective(inverse(w, beta=7.5), beta=7.5)
    torch.testing.assert_close(back, w, rtol=1e-14, atol=0)


def test_absorbed_is_fixed_with_kappa_given():
    w = draw((50,), -2, 2)
    for mode, normalize in itertools.product((*EXPONENTIAL, "sinh"), (False, True)):
        fixed = effective(w, mode=mode, beta=8.0, m=0.75, normalize=normalize)
        absorbed = effective(w, mode=mode, beta=8.0, curvature="absorbed", beta_tilde=6.0, normalize=normalize)
        assert torch.equal(fixed, absorbed)


# Errors ---------------------------------------------------------------------------------------------------

both = pytest.mark.parametrize("function", [effective, inverse])


@both
def test_beta_must_be_a_positive_finite_number(function):
    for beta in (0, 0.0, -7.5, math.nan, math.inf, -math.inf, True, "7.5", None):
        with pytest.raises(ValueError, match=rf"beta must be .* got {beta!r}"):
            function(torch.ones(2), beta=beta)


@both
def test_unknown_choices_name_the_nearest(function):
    for argument, wrong, near in (("mode", "mismatched", "mismatch"), ("curvature", "absorb", "absorbed")):
        with pytest.raises(ValueError, match=rf"{argument} .*'{wrong}'.*'{near}'"):
            function(torch.ones(2), **({"beta": 7.5} | {argument: wrong}))


@both
def test_misplaced_beta_tilde(function):
    with pytest.raises(ValueError, match=r"beta_tilde .*curvature='fixed' and beta_tilde=a value"):
        function(torch.ones(2), beta=7.5, beta_tilde=7.5)
    with pytest.raises(ValueError, match=r"beta_tilde .*curvature='absorbed' and beta_tilde=None"):
        function(torch.ones(2), beta=7.5, curvature="absorbed")


def test_iterations_must_be_positive():
    for iterations in (0, -1):
        with pytest.raises(ValueError, match=f"iterations .* got {iterations}"):
            inverse(torch.ones(2), beta=7.5, iterations=iterations)


def test_beta_has_no_default():
    with pytest.raises(TypeError, match="beta"):
        effective(torch.ones(2))


# Annealing and automatic beta -----------------------------------------------------------------------------


@pytest.mark.parametrize(("k0", "k1"), [(50.0, 8.0), (0.01, 0.5), (1e-6, 1e6), (3, 2)])
def test_anneal_follows_its_formula(k0, k1):
    for total in (1, 2, 7, 1000):
        for t in sorted({0, 1, 2, total // 3, total // 2, total - 1, total, total + 1, 10 * total}):
            part = (1 - mp.cos(mp.pi * min(mp.mpf(t) / total, 1))) / 2
            exact = mp.exp(mp.log(mp.mpf(k0)) + mp.log(mp.mpf(k1) / mp.mpf(k0)) * part)
            assert anneal(t, total, k0, k1) == pytest.approx(float(exact), rel=1e-13)
        assert anneal(0, total, k0, k1) == k0
        assert anneal(total, total, k0, k1) == anneal(total + 5, total, k0, k1) == k1
        assert type(anneal(0, total, k0, k1)) is type(anneal(total, total, k0, k1)) is float


@pytest.mark.parametrize(("k0", "k1"), [(50.0, 8.0), (0.01, 0.5)])
def test_anneal_is_monotone_and_geometric_in_the_middle(k0, k1):
    values = [anneal(t, 500, k0, k1) for t in range(600)]
    falls = k0 > k1
    assert values == sorted(values, reverse=falls)
    assert len(set(values)) > 500
    assert values[250] == pytest.approx(math.sqrt(k0 * k1), rel=1e-14)
    for t in range(500):  # symmetric about the middle in the logarithm
        assert values[t] * values[500 - t] == pytest.approx(k0 * k1, rel=1e-13)


def test_anneal_without_change_needs_no_total():
    assert [anneal(t, None, 8.0, 8) for t in (0, 10)] == [8.0, 8.0]
    assert anneal(3, 0, 1, 1) == 1.0


def test_anneal_refuses_and_names_what():
    for arguments, message in (
        ((0, None, 50.0, 8.0), "total .* got None"),
        ((0, 0, 50.0, 8.0), "total .* got 0"),
        ((0, -5, 50.0, 8.0), "total .* got -5"),
        ((-1, 10, 50.0, 8.0), "step .* got -1"),
        ((0, 10, 0.0, 8.0), "k0 .* got 0.0"),
        ((0, 10, 50.0, -8.0), "k1 .* got -8.0"),
        ((0, 10, math.nan, 8.0), "k0 .* got nan"),
        ((0, 10, 50.0, math.inf), "k1 .* got inf"),
        ((0, 10, True, 8.0), "k0 .* got True"),
    ):
        with pytest.raises(ValueError, match=message):
            anneal(*arguments)


def test_auto_beta_meets_the_papers_numbers():
    widths = {64: 1.875, 256: 3.75, 1024: 7.5, 2048: 13.06, 3072: 18.06, 8192: 39.59}
    assert {w: auto_beta(w) for w in widths} == pytest.approx(widths, abs=0.005)
    assert 12 <= auto_beta(2048) <= 15
    assert 17.5 <= auto_beta(3072) <= 20
    betas = [auto_beta(w) for w in range(1, 5000, 37)]
    assert betas == sorted(betas)
    for bad in (0, -4, True, math.inf, None):
        with pytest.raises(ValueError, match=f"width .* got {bad}"):
            auto_beta(bad)


def test_beta_for_departs_at_the_deviations_asked_for():
    """The curve is 23 % above its tangent there: the paper's 7.5 at 1.75 deviations of width 1024."""
    excess = [beta_for(std, z) * std * z for std, z in ((1 / 32, 1.75), (0.5, 1.5), (2.0, 2.0))]
    assert excess == pytest.approx([7.5 * 1.75 / 32] * 3)
    assert math.expm1(excess[0]) / excess[0] == pytest.approx(1.236, abs=1e-3)
    assert beta_for(1 / 32) == 7.5
    with pytest.raises(ValueError, match="std must be"):
        beta_for(0.0)
    with pytest.raises(ValueError, match="deviations must be"):
        beta_for(0.02, -1)
