"""The inverse keeps the accuracy owed and refuses where there is none."""

import itertools
import math

import pytest
import torch

from pairwise import every_pair
from reference import EXPONENTIAL, MODES, READS, evaluate, worst
from symexplin.functional import effective, inverse
from symexplin.inverse import invert
from symexplin.transform import Form, Scales

XAVIER_BOUND = math.sqrt(6.0 / 2048.0)  # width 1024
BETAS = (1.5, 4.0, 7.5, 15.0, 30.0)
VARIANTS = (("fixed", False), ("fixed", True), ("absorbed", False), ("absorbed", True))
DTYPES = (torch.float32, torch.float64)
OFFSETS = (-2.0, 0.0, 1.0, 6.0)

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def read(mode, variant=VARIANTS[0], **_):
    """Whether a mode reads how its curvature is given and normalized, or this is the first way."""
    return variant == VARIANTS[0] or "m" in READS[mode]


def targets(dtype, low=1e-12, high=100 * XAVIER_BOUND, count=30):
    """Return zero and both signs of a log grid."""
    size = torch.logspace(math.log10(low), math.log10(high), count, dtype=torch.float64)
    return torch.cat([torch.zeros(1, dtype=torch.float64), size, -size]).to(dtype)


def curved(mode, beta, variant):
    """Return the arguments of a mode with kappa = 1.25 beta, so that d = kappa is not d = beta."""
    curvature, normalize = variant
    arguments = {"mode": mode, "normalize": normalize}
    if curvature == "fixed":
        return arguments | {"beta": beta, "curvature": "fixed", "m": 1.25}
    return arguments | {"beta": beta, "curvature": "absorbed", "beta_tilde": 1.25 * beta}


def invertible(mode, kappa, n, e=1.0, l=1.0, beta=7.5):
    """Return the last column of the design's table: whether the map has an elementwise inverse."""
    steep = e * kappa * math.exp(-n)
    return {
        "mismatch": steep > abs(l),
        "congruent": steep > -l,
        "exp_only": e > 0,
        "oppose": steep > l,
        "damped": n >= 0 and beta >= 1,
        "sinh": True,
        "linear": l != 0,
    }[mode]


def miss(raw, t, arguments):
    """Return |f(raw) - t| over the accuracy owed at `raw`, f being exact."""
    return worst(
        t.expand(raw.shape),
        evaluate(raw, **arguments),
        unit=2.0**-24 if raw.dtype.itemsize == 4 else 2.0**-53,
    )


def offsets(mode, beta):
    """Return the offsets that have an inverse, as a column beside a row of targets, and a list of the others."""
    given = OFFSETS if "n" in READS[mode] else (0.0,)
    good = [n for n in given if invertible(mode, 1.25 * beta, n)]
    return torch.tensor(good, dtype=torch.float64).unsqueeze(1), [n for n in given if n not in good]


@every_pair(read, mode=MODES, beta=BETAS, variant=VARIANTS, dtype=DTYPES, iterations=(10, 30))
def test_inverse_is_within_the_accuracy_owed_or_refuses(mode, beta, variant, dtype, iterations):
    t, arguments = targets(dtype), curved(mode, beta, variant)
    good, bad = offsets(mode, beta)
    if len(good):
        raw = inverse(t, n=good, iterations=iterations, **arguments)
        assert raw.dtype == dtype
        assert torch.equal(torch.sign(raw), torch.sign(t).expand(raw.shape))
        units = miss(raw, t, arguments | {"n": good})
        assert units <= 1.0
    for n in bad:
        with pytest.raises(ValueError, match=rf"mode='{mode}' for {len(t)} of {len(t)} elements: needs"):
            inverse(t, n=n, **arguments)


@every_pair(read, mode=MODES, variant=VARIANTS, dtype=DTYPES)
def test_inverse_takes_structured_scales(mode, variant, dtype):
    """Row and column vectors, an overall scale of both signs, and a residual that the caller subtracts."""
    generator = torch.Generator().manual_seed(7)

    def draw(shape, low, high):
        return (low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)).to(dtype)

    t, (curvature, normalize) = targets(dtype)[:60].reshape(6, 10), variant
    kappa = draw((6, 1), 0.8, 1.5) * draw((10,), 0.8, 1.5)
    arguments = {
        "mode": mode,
        "beta": 13.1,
        "curvature": curvature,
        "normalize": normalize,
        "e": draw((6, 1), 0.7, 1.4) * draw((10,), 0.7, 1.4),
        "l": draw((10,), -1.5, 1.5),
        "n": draw((10,), 0.0, 0.7),
        "s": torch.tensor([1.0, -1.0, 0.5, 2.0, -3.0, 1e-3], dtype=dtype).unsqueeze(1),
    } | ({"m": kappa} if curvature == "fixed" else {"beta_tilde": 13.1 * kappa})
    raw = inverse(t, **arguments)
    units = miss(raw, t, arguments)
    assert units <= 1.0
    delta = draw((6, 10), -0.1, 0.1)
    raw = inverse(t - delta, **arguments)
    assert float((effective(raw, delta=delta, **arguments) - t).abs().max()) < 1e4 * torch.finfo(dtype).eps


@every_pair(
    opposed=[("mismatch", 1), ("mismatch", -1), ("congruent", -1), ("oppose", 1)],
    beta=BETAS,
    normalize=[False, True],
    dtype=DTYPES,
)
def test_near_critical_slopes(opposed, beta, normalize, dtype):
    """The exponential slope at 0 is 1.001 times the linear one, which it opposes."""
    (mode, sign), t = opposed, targets(dtype)
    n = torch.tensor([-2.0, 0.0, 1.0], dtype=torch.float64).reshape(3, 1, 1)
    l, s = sign * beta * torch.exp(-n), torch.tensor([[1.0], [-0.6]], dtype=torch.float64)
    arguments = {"mode": mode, "beta": beta, "n": n, "l": l / 1.001, "s": s, "normalize": normalize}
    units = miss(inverse(t, **arguments), t, arguments)
    assert units <= 1.0
    arguments["l"] = l * 1.001
    with pytest.raises(ValueError, match=f"{6 * len(t)} of {6 * len(t)} elements: needs"):
        inverse(t, **arguments)


@pytest.mark.parametrize("mode", MODES)
def test_ten_iterations_are_at_the_fixed_point_and_have_slack(mode):
    """Six are almost enough for the weights of pretrained models, thirty Xavier bounds out."""
    every = targets(torch.float64)
    usual = targets(torch.float64, low=1e-6, high=30 * XAVIER_BOUND)
    for variant, beta in itertools.product(VARIANTS if "m" in READS[mode] else VARIANTS[:1], BETAS):
        arguments = curved(mode, beta, variant) | {"n": offsets(mode, beta)[0]}
        ten, thirty = inverse(every, **arguments), inverse(every, iterations=30, **arguments)
        torch.testing.assert_close(ten, thirty, rtol=2e-14, atol=0.0)
        if mode != "damped":
            six, ten = inverse(usual, iterations=6, **arguments), inverse(usual, **arguments)
            torch.testing.assert_close(six, ten, rtol=1e-9, atol=0.0)


def test_exponential_only_is_its_closed_form():
    t = targets(torch.float64)
    arguments = {"mode": "exp_only", "beta": 7.5, "e": 1.3, "m": 0.9, "n": 0.4, "normalize": True}
    closed = torch.sign(t) * torch.log1p(t.abs() * (6.75 * math.exp(0.4) / 1.3)) / 6.75
    torch.testing.assert_close(inverse(t, **arguments), closed, rtol=1e-14, atol=0.0)


def test_non_finite_targets_and_scales_are_refused_and_counted():
    """No NaN comes out in silence."""
    for mode, dtype in itertools.product(MODES, DTYPES):
        t = torch.tensor([0.1, math.nan, math.inf, -math.inf, 0.0], dtype=dtype)
        with pytest.raises(ValueError, match=rf"mode='{mode}' for 3 of 5 elements: the weights must be finite"):
            inverse(t, mode=mode, beta=7.5)
        for role in (*READS[mode], "s"):
            with pytest.raises(ValueError, match=rf"mode='{mode}' for 2 of 2 elements"):
                inverse(torch.tensor([0.1, -0.1], dtype=dtype), mode=mode, beta=7.5, **{role: math.nan})


ROWS = torch.tensor([[1.0], [2.0], [3.0], [4.0]])  # of these some are out of the range, by row of (4, 3)


@pytest.mark.parametrize(
    ("mode", "scales", "bad_rows", "need"),
    [
        ("mismatch", {"l": 3.0 * ROWS}, 2, r"e\*kappa\*exp\(-n\) > \|l\|"),  # 7.5 against 3, 6, 9, 12
        ("mismatch", {"l": -3.0 * ROWS}, 2, r"e\*kappa\*exp\(-n\) > \|l\|"),
        ("mismatch", {"n": ROWS - 1.0}, 1, r"e\*kappa\*exp\(-n\) > \|l\|"),  # 7.5 exp(-3) = 0.37
        ("mismatch", {"e": ROWS - 2.0}, 2, "e > 0"),
        ("mismatch", {"l": 7.5}, 4, r"> \|l\|"),  # the limit itself is out
        ("congruent", {"l": -3.0 * ROWS}, 2, r"e\*kappa\*exp\(-n\) > -l"),
        ("congruent", {"e": ROWS - 3.5}, 3, "e >= 0"),
        ("oppose", {"l": 3.0 * ROWS}, 2, r"e\*kappa\*exp\(-n\) > l"),
        ("oppose", {"e": ROWS - 3.5, "l": -9.0}, 3, "e >= 0"),
        ("exp_only", {"e": ROWS - 2.0}, 2, "e > 0"),
        ("linear", {"l": ROWS - 2.0}, 1, "l != 0"),
        ("damped", {"n": 1.5 - ROWS}, 3, "n >= 0"),
        ("damped", {"beta": 0.99}, 4, "beta >= 1, got 0.99"),
    ],
)
def test_refusals_say_why_and_count(mode, scales, bad_rows, need):
    refused(mode, bad_rows, need, **scales)


def refused(mode, bad_rows, need, **scales):
    message = rf"mode='{mode}' for {3 * bad_rows} of 12 elements: needs.*{need}"
    with pytest.raises(ValueError, match=message):
        inverse(torch.full((4, 3), 0.1), **({"mode": mode, "beta": 7.5} | scales))


def test_curvature_must_be_positive():
    for mode in (*EXPONENTIAL, "sinh"):
        refused(mode, 2, "kappa > 0", m=ROWS - 2.0)
        refused(mode, 2, "kappa > 0", curvature="absorbed", beta_tilde=ROWS - 2.0)


def test_overall_scale_must_not_be_zero():
    for mode in MODES:
        refused(mode, 1, "s != 0", s=ROWS - 2.0)


def test_refusals_count_elements_of_the_broadcast_shape():
    with pytest.raises(ValueError, match="for 3 of 6 elements"):
        inverse(torch.ones(3), mode="linear", beta=7.5, l=torch.tensor([[0.0], [1.0]]))


def test_scales_out_of_use_refuse_nothing():
    t = torch.tensor([0.2, -0.1])
    for mode, unused in (("sinh", {"e": -1.0, "n": 9.0}), ("linear", {"m": -1.0}), ("exp_only", {"l": 99.0})):
        arguments = {"mode": mode, "beta": 7.5, **unused}
        units = miss(inverse(t, **arguments), t, arguments)
        assert units <= 1.0


@pytest.mark.parametrize("mode", ["congruent", "oppose"])
def test_without_exponential_the_linear_pathway_is_inverted(mode):
    """e = 0 is allowed where the linear pathway alone has the slope."""
    t = targets(torch.float64)
    arguments = {"mode": mode, "beta": 7.5, "e": 0.0, "l": 1.5 if mode == "congruent" else -1.5}
    units = miss(inverse(t, **arguments), t, arguments)
    assert units <= 1.0


@every_dtype
@pytest.mark.parametrize(("beta", "high"), [(1.0, 0.999), (1.001, 1.03), (1.5, 5.4), (30.0, 5.4)])
def test_damped_at_the_edge_of_its_range(beta, high, dtype):
    """With beta = 1 and n = 0 the map is sign(w) (1 - exp(-|w|)), which stays below 1."""
    t, n = targets(dtype, high=high), torch.tensor([[0.0], [1e-12], [0.3], [6.0]], dtype=torch.float64)
    arguments = {"mode": "damped", "beta": beta, "n": n}
    units = miss(inverse(t, **arguments), t, arguments)
    assert units <= 1.0


def test_damped_without_growth_is_bounded():
    for reached, dtype in itertools.product((1.0, -1.0, 1.5, 700.0), DTYPES):
        t = torch.tensor([0.5, reached, reached, -0.9], dtype=dtype)
        with pytest.raises(ValueError, match=r"mode='damped' for 2 of 4 elements: .*bounded by 1"):
            inverse(t, mode="damped", beta=1.0)


@pytest.mark.parametrize("reached", [1.2, 5.4])
def test_damped_never_returns_a_weight_that_misses(reached):
    """At beta = 1.001, n = 0 the raw weight of 1.2 is near 183, that of 5.4 near 1690, past the range of exp."""
    t = torch.tensor([reached, -0.5], dtype=torch.float64)
    arguments = {"mode": "damped", "beta": 1.001}
    try:
        raw = inverse(t, **arguments)
    except ValueError as refusal:
        assert "for 1 of 2 elements" in str(refusal)  # noqa: PT017
        assert reached > 2.0
    else:
        units = miss(raw, t, arguments)
        assert units <= 1.0
        assert bool(torch.isfinite(effective(raw, **arguments)).all())


@every_dtype
def test_weights_far_out_and_tiny(dtype):
    t = targets(dtype, low=1e-30, high=1e20)
    for mode in MODES:
        arguments = {"mode": mode, "beta": 7.5, "n": 0.1}
        units = miss(inverse(t, **arguments), t, arguments)
        assert units <= 1.0


def test_invert_works_in_float64_whatever_it_is_given():
    t = torch.tensor([0.3, -2.0], dtype=torch.bfloat16)
    raw = invert(Form("mismatch", 7.5), t, Scales(kappa=7.5))
    assert raw.dtype == torch.float32
    assert torch.equal(raw, invert(Form("mismatch", 7.5), t.double(), Scales(kappa=7.5)).float())
    assert inverse(torch.zeros(0, 3), beta=7.5).shape == (0, 3)
    assert inverse(torch.tensor(0.5), beta=7.5).shape == ()


@every_dtype
def test_mismatched_start(dtype):
    """The paper: on Xavier-uniform targets positive weights are exact, negative ones 75-80 % as large."""
    generator = torch.Generator().manual_seed(0)
    t = ((2 * torch.rand(20_000, generator=generator, dtype=torch.float64) - 1) * XAVIER_BOUND).to(dtype)
    start = effective(inverse(t, mode="congruent", beta=7.5), mode="mismatch", beta=7.5)
    positive, ratio = t > 0, start / t
    within = torch.finfo(dtype).eps / 2 * (16 + 8 * 7.5 * XAVIER_BOUND)  # forward's and inverse's bound
    assert float((ratio[positive] - 1).abs().max()) <= within
    negative = ratio[~positive].double()
    assert float(negative.min()) == pytest.approx(6.5 / 8.5, abs=1e-4)  # slopes (1 - 1/beta)/(1 + 1/beta) at 0
    assert 0.764 < float(negative.min()) < float(negative.max()) < 0.80
    assert 0.77 < float(negative.mean()) < 0.79
