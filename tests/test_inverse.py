"""The inverse keeps the error bound and refuses where there is none."""

import math

import pytest
import torch

from pairwise import every_pair
from reference import DTYPES, EXPONENTIAL, MODES, READS, VARIANTS, evaluate, reads, worst
from symexplin import transform
from symexplin.config import Scale, SELConfig
from symexplin.functional import inverse
from symexplin.transform import check_invertible

BETAS = (1.5, 7.5, 30.0)
OFFSETS = (-2.0, 0.0, 1.0, 6.0)


def targets(dtype, low=1e-30, high=1e20, count=40):
    """Return zero and both signs of a log grid."""
    size = torch.logspace(math.log10(low), math.log10(high), count, dtype=torch.float64)
    return torch.cat([torch.zeros(1, dtype=torch.float64), size, -size]).to(dtype)


def curved(mode, beta, variant):
    """Return the arguments of a mode with kappa = 1.25 beta, so that d = kappa is not d = beta."""
    curvature, normalize = variant
    kappa = {"m": 1.25} if curvature == "fixed" else {"beta_tilde": 1.25 * beta}
    return {"mode": mode, "normalize": normalize, "beta": beta, "curvature": curvature, **kappa}


def offsets(mode, beta):
    """Return the offsets for which f is one-to-one, as a column beside a row of targets, and a list of the others."""
    given = OFFSETS if "n" in READS[mode] else (0.0,)
    limit = {"mismatch": 1.0, "oppose": 1.0}.get(mode, 0.0)  # of e kappa exp(-n), with e = l = 1
    good = [n for n in given if 1.25 * beta * math.exp(-n) > limit and (mode != "damped" or n >= 0.0)]
    return torch.tensor(good, dtype=torch.float64).unsqueeze(1), [n for n in given if n not in good]


def miss(raw, t, arguments):
    """Return |f(raw) - t| over the error bound at `raw`, f being exact."""
    unit = 2.0**-24 if raw.dtype == torch.float32 else 2.0**-53
    return worst(t.expand(raw.shape), evaluate(raw, **arguments), unit=unit)


@every_pair(reads, mode=MODES, beta=BETAS, variant=VARIANTS, dtype=DTYPES)
def test_inverse_is_within_the_accuracy_owed_or_refuses(mode, beta, variant, dtype, monkeypatch):
    monkeypatch.setattr(transform, "_BLOCK", {1.5: 1, 7.5: 35}.get(beta, transform._BLOCK))
    t, arguments = targets(dtype, high=5.4 if (mode, beta) == ("damped", 1.5) else 1e20), curved(mode, beta, variant)
    good, bad = offsets(mode, beta)
    if len(good):
        raw = inverse(t, n=good, **arguments)
        assert raw.dtype == dtype
        assert torch.equal(torch.sign(raw), torch.sign(t).expand(raw.shape))
        assert miss(raw, t, arguments | {"n": good}) <= 1.0
    for n in bad:
        with pytest.raises(ValueError, match=rf"mode='{mode}' for {len(t)} of {len(t)} elements: needs"):
            inverse(t, n=n, **arguments)


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
    assert miss(inverse(t, **arguments), t, arguments) <= 1.0
    arguments["l"] = l * 1.001
    with pytest.raises(ValueError, match=f"{6 * len(t)} of {6 * len(t)} elements: needs"):
        inverse(t, **arguments)


@pytest.mark.parametrize("scales", [{"mode": "congruent", "l": 1.5}, {"mode": "oppose", "l": -1.5}], ids=str)
def test_without_exponential_the_linear_pathway_is_inverted(scales):
    """e = 0 is allowed where the linear pathway alone has the slope."""
    t, arguments = targets(torch.float64, high=4.0), {"beta": 7.5, "e": torch.tensor([[0.0], [1e-9], [1.0]]), **scales}
    assert miss(inverse(t, **arguments), t, arguments) <= 1.0


def test_scales_out_of_use_refuse_nothing():
    t = torch.tensor([0.2, -0.1])
    for mode, unused in (("sinh", {"e": -1.0, "n": 9.0}), ("linear", {"m": -1.0}), ("exp_only", {"l": math.nan})):
        inverse(t, mode=mode, beta=7.5, **unused)


# Refusals -------------------------------------------------------------------------------------------------

ROWS = torch.tensor([[1.0], [2.0], [3.0], [4.0]])  # of these some are out of the range, by row of (4, 3)
MISMATCH = r"needs e > 0 and e\*kappa\*exp\(-n\) > \|l\|"


@pytest.mark.parametrize(
    ("mode", "scales", "bad_rows", "need"),
    [
        ("mismatch", {"l": 3.0 * ROWS}, 2, MISMATCH),  # 7.5 against 3, 6, 9, 12
        ("mismatch", {"l": -3.0 * ROWS}, 2, MISMATCH),
        ("mismatch", {"n": ROWS - 1.0}, 1, MISMATCH),  # 7.5 exp(-3) = 0.37
        ("mismatch", {"e": ROWS - 2.0}, 2, MISMATCH),
        ("mismatch", {"l": 7.5}, 4, MISMATCH),  # the limit itself is out
        ("congruent", {"l": -3.0 * ROWS}, 2, r"needs e >= 0 and e\*kappa\*exp\(-n\) > -l"),
        ("congruent", {"e": ROWS - 3.5}, 3, "needs e >= 0"),
        ("oppose", {"l": 3.0 * ROWS}, 2, r"needs e >= 0 and e\*kappa\*exp\(-n\) > l"),
        ("oppose", {"e": ROWS - 3.5, "l": -9.0}, 3, "needs e >= 0"),
        ("exp_only", {"e": ROWS - 2.0}, 2, "needs e > 0"),
        ("linear", {"l": ROWS - 2.0}, 1, "needs l != 0"),
        ("damped", {"n": 1.5 - ROWS}, 3, "needs n >= 0"),
        ("damped", {"beta": 0.99}, 4, "needs beta >= 1"),
        *((mode, {"m": ROWS - 2.0}, 2, "needs kappa > 0") for mode in (*EXPONENTIAL, "sinh")),
        ("sinh", {"curvature": "absorbed", "beta_tilde": ROWS - 2.0}, 2, "needs kappa > 0"),
        *((mode, {"s": ROWS - 2.0}, 1, "needs s != 0") for mode in MODES),
        *((mode, {role: math.nan}, 4, "") for mode in MODES for role in (*READS[mode], "s")),
        ("congruent", {"n": -800.0}, 4, r"exp\(-n\) is out of range"),
    ],
)
def test_refusals_say_why_and_count_in_all_blocks(mode, scales, bad_rows, need, monkeypatch):
    monkeypatch.setattr(transform, "_BLOCK", 3)
    with pytest.raises(ValueError, match=rf"mode='{mode}' for {3 * bad_rows} of 12 elements: {need}") as refusal:
        inverse(torch.full((4, 3), 0.1), **({"mode": mode, "beta": 7.5} | scales))
    assert refusal.value.__context__ is None


@every_pair(mode=MODES, dtype=DTYPES)
def test_targets_that_are_not_finite_are_refused_and_counted(mode, dtype):
    t = torch.tensor([0.1, math.nan, math.inf, -math.inf, 0.0], dtype=dtype)
    with pytest.raises(ValueError, match=rf"mode='{mode}' for 3 of 5 elements: the weights must be finite"):
        inverse(t, mode=mode, beta=7.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"e": Scale(start=0.0)}, r"'mismatch' needs e > 0 .*; it has beta 7\.5, e\.start 0, l\.start 1, m"),
        ({"l": Scale(start=8.0)}, r"needs .*> \|l\|; it has beta 7\.5, .*l\.start 8"),
        ({"beta": 0.5, "mode": "damped"}, r"'damped' needs beta >= 1; it has beta 0\.5, n\.start 0"),
        ({"s": Scale(start=0.0)}, "needs s != 0"),
    ],
)
def test_first_values_without_an_inverse_are_refused_before_training(changes, message):
    with pytest.raises(ValueError, match=message):
        check_invertible(SELConfig(**{"beta": 7.5, "mode": "mismatch"} | changes).resolve(64))
    config = SELConfig(beta=7.5, mode="mismatch", l=Scale(start=7.0)).resolve(64)
    assert check_invertible(config) is config


# The damped mode ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("beta", "high"), [(1.0, 0.999), (1.001, 1.2), (1.5, 5.4), (30.0, 5.4)])
def test_damped_at_the_edge_of_its_range(beta, high, dtype):
    """With beta = 1 and n = 0 the map is sign(w) (1 - exp(-|w|)), which reaches 1 by rounding alone."""
    t, n = targets(dtype, high=high), torch.tensor([[0.0], [1e-12], [0.3], [6.0]], dtype=torch.float64)
    arguments = {"mode": "damped", "beta": beta, "n": n}
    assert miss(inverse(t, **arguments), t, arguments) <= 1.0
    for reached in (1.0 + 1e-6, -1.5, 700.0):
        with pytest.raises(ValueError, match=r"mode='damped' for 2 of 4 elements: out of reach"):
            inverse(torch.tensor([0.5, reached, reached, -0.9], dtype=dtype), mode="damped", beta=1.0)


def test_damped_never_returns_a_weight_that_misses():
    """At beta = 1.001, n = 0 the raw weight of 1.2 is near 183, that of 5.4 near 1690, past the range of exp."""
    with pytest.raises(ValueError, match="for 1 of 2 elements: out of reach"):
        inverse(torch.tensor([5.4, -0.5], dtype=torch.float64), mode="damped", beta=1.001)
