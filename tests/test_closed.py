"""The closed form of a step against 50 digits, and against the definition of the map."""

import functools
import math
import random

import mpmath
import pytest
import torch

from symexplin.closed import Closed
from symexplin.config import CLOSED_MODES, Scale, SELConfig
from symexplin.derivatives import vjp
from symexplin.modes import Scales
from symexplin.transform import forward

DTYPES = [torch.float32, torch.float64]
WORK = mpmath.mp.clone()
WORK.dps = 50


def random_config(draw: random.Random, mode: str) -> SELConfig:
    """Return fixed scales within and beyond what anybody uses; s and e, which may be negative, share a sign."""
    sign = draw.choice((1.0, -1.0))
    scales = {role: Scale(start=sign * math.exp(draw.uniform(-2, 2))) for role in ("s", "e")}
    return SELConfig(
        mode=mode,
        beta=draw.uniform(1.5, 30.0),
        normalize=draw.random() < 0.5,
        m=Scale(start=draw.uniform(0.5, 2.0)),
        n=Scale(start=draw.uniform(-2.0, 6.0)),
        l=Scale(start=draw.uniform(0.1, 2.0)),
        **scales,
    ).resolve(1024)


def constants(config: SELConfig) -> tuple[float, float]:
    """Return (kappa, c) as the table of the design has them."""
    kappa = config.beta * config.m.start
    d = kappa if config.normalize else config.beta
    s, e, l, n = (getattr(config, role).start for role in "seln")
    return kappa, {"exp_only": s * e * math.exp(-n) / d, "sinh": s / d, "linear": s * l}[config.mode]


def random_points(mode: str, config: SELConfig, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights from 1e-30 to 1e20 and zeros, with raw steps of |kappa step| <= 80.

    A third of the steps is uniform, a third goes down to 1e-12, a third ends near zero, on either side of it.
    """
    kappa, c = constants(config)
    sign = torch.randn(2, count, dtype=torch.float64).sign()
    v = (sign[0] * 10 ** torch.empty(count, dtype=torch.float64).uniform_(-30, 20)).to(dtype)
    v[:3], v[3:6] = 0.0, -0.0
    x = torch.empty(3, count // 3, dtype=torch.float64).uniform_(-1, 1)
    x = torch.cat([80 * x[0], sign[1][: count // 3] * 10 ** (7 * x[1] - 5.1), 10 ** (4 * x[2] - 4)])
    x[2 * count // 3 :] *= sign[1][2 * count // 3 :]
    near = slice(2 * count // 3, count)
    raw = v[near].double() / c
    x[near] = -(1 + x[near]) * (raw.asinh() if mode == "sinh" else raw.sign() * raw.abs().log1p())
    return v, (x.clamp(-80, 80) / kappa).to(dtype)


def reference(mode: str, kappa, c, v, step):
    """Return f(w + step), the slope there over kappa, kappa w, kappa step."""
    x = kappa * step
    if mode == "linear":
        return v + c * step, abs(c), v / c, step
    if mode == "sinh":
        w = WORK.asinh(v / c)
        value = c * WORK.sinh(w + x)
        return value, WORK.sqrt(c * c + value * value), w, x
    w = WORK.sign(v) * WORK.log1p(abs(v) / c)
    value = WORK.sign(w + x) * c * WORK.expm1(abs(w + x))
    return value, c + abs(value), w, x


def allowed(mode: str, value, slope, w, x, unit: float):
    """Return the error bound, (8 + 4 kappa|w'|) units of |f(w')|, and the allowance for the raw weight's rounding.

    A raw weight is made of v by three operations (the quotients by c and kappa, the logarithm), each with a rounding
    of a unit of |w|; kappa, its product with the step, and the sum w + step each round by a unit of |x| or |w| + |x|.
    Three units of |w| + |x|, times the slope f'(w')/kappa, are what the path by way of raw weights itself owes.
    """
    curved = 0.0 if mode == "linear" else abs(w + x)
    return unit * ((8 + 4 * curved) * abs(value) + 3 * (abs(w) + abs(x)) * slope)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", CLOSED_MODES)
def test_single_steps_against_50_digits(mode, dtype):
    torch.manual_seed(1)
    draw, worst = random.Random(1), 0.0
    for _ in range(60):
        config = random_config(draw, mode)
        v, step = random_points(mode, config, 24, dtype)
        kappa, c = map(WORK.mpf, constants(config))
        for value, raw, moved in zip(v.tolist(), step.tolist(), Closed.of(config).move(v, step).tolist(), strict=True):
            expected, *rest = reference(mode, kappa, c, WORK.mpf(value), WORK.mpf(raw))
            assert math.isfinite(moved) == (abs(expected) < torch.finfo(dtype).max)
            if math.isfinite(moved):
                bound = allowed(mode, expected, *rest, torch.finfo(dtype).eps / 2) + torch.finfo(dtype).tiny * 2e-7
                worst = max(worst, float(abs(moved - expected) / bound))
    assert worst <= 1.0, worst


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", CLOSED_MODES)
def test_a_step_of_zero_keeps_the_bits_and_the_inputs_stay(mode, dtype):
    v = torch.tensor([0.0, -0.0, 1e-30, -1e-42, 0.3, -0.7, 1e20, -1e20, math.inf, -math.inf, math.nan], dtype=dtype)
    closed, bits = Closed.of(random_config(random.Random(2), mode)), torch.int32 if dtype == DTYPES[0] else torch.int64
    before = v.clone()
    for zero in (0.0, -0.0):
        assert torch.equal(closed.move(v, torch.full_like(v, zero)).view(bits), v.view(bits))
    step = torch.linspace(-1, 1, len(v), dtype=dtype)
    moved, kept = closed.move(v, step), step.clone()
    assert moved.dtype == dtype
    closed.raw(v), closed.slope(v)
    assert torch.equal(v.view(bits), before.view(bits))
    assert torch.equal(step, kept)


@pytest.mark.parametrize("mode", CLOSED_MODES)
def test_raw_and_slope_agree_with_the_map(mode):
    draw = random.Random(3)
    for _ in range(20):
        config = random_config(draw, mode)
        closed, (kappa, _) = Closed.of(config), constants(config)
        normalizer = None if config.normalize else config.beta
        scales = Scales(normalizer, config.e.start, config.l.start, kappa, config.n.start, config.s.start)
        v = torch.cat([10 ** torch.linspace(-30, 20, 60, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)])
        v = torch.cat([v, -v])
        w = closed.raw(v)
        assert torch.equal(w.signbit(), v.signbit() != (closed.c < 0))
        torch.testing.assert_close(forward(mode, w, scales), v, rtol=1e-13, atol=0.0)
        (slope,) = vjp(functools.partial(forward, mode, scales=scales), w)[1](torch.ones_like(w))
        torch.testing.assert_close(closed.slope(v), slope, rtol=1e-13, atol=0.0)
        # A step far below the rounding of the raw weight still moves a small weight.
        small, tiny = v[:5], torch.full_like(v[:5], 1e-25 / kappa)
        torch.testing.assert_close(closed.move(small, tiny) - small, closed.slope(small) * tiny, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (SELConfig(mode="exp_only", e=Scale(start=-1)), r"positive product, got s.start 1, e.start -1"),
        (SELConfig(mode="sinh", s=Scale(start=0)), r"not be 0, got s.start 0"),
        (SELConfig(mode="linear", l=Scale(start=0)), r"not be 0, got s.start 1, l.start 0"),
    ],
)
def test_maps_without_a_closed_form_are_refused(config, match):
    with pytest.raises(ValueError, match=match):
        Closed.of(config.resolve(1024))
