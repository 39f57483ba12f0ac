"""Compiled kernels for CPUs, for every instruction set: the map, its derivatives, its inverse and AdamW over it."""

import itertools
import math

import pytest
import torch

from cpu_targets import EMULATED, TARGETS, kernels_for
from pairwise import pairwise
from symexplin import transform
from symexplin.config import Scale, SELConfig
from symexplin.coordinates import Coordinates
from symexplin.kernels import KERNEL_MODES, FactoredMap, Matrices, Panels, Rates, cpu, terms_of
from symexplin.kernels.compiler import find_compiler
from symexplin.layout import PANELS, Layout

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C compiler")

UNIT, DENORMAL = 2.0**-24, 2.0**-149
PLACES = [((1, 1), "oi"), ((1, 7), "io"), ((33, 65), "oi"), ((33, 65), "io"), ((130, 257), "oi"), ((0, 5), "oi")]
PLACES += [((5, 0), "io"), ((3, 2500), "oi"), ((600, 16), "io"), ((70,), "o"), ((0,), "o")]
CHOICES = {
    "mode": KERNEL_MODES,
    "normalize": (False, True),
    "curvature": ("fixed", "absorbed", "fixed, exp"),
    "pattern": ("fixed", "global", "row", "column", "row_col_mult"),
    "place": PLACES,
}
CASES = pairwise(**CHOICES)


@pytest.fixture(scope="module", params=[*TARGETS, EMULATED])
def kernels(request):
    return kernels_for(request.param)


def layout_of(mode="mismatch", normalize=False, curvature="fixed", pattern="row_col_mult", place=((33, 65), "oi")):
    curvature, transform = {"fixed, exp": ("fixed", "exp")}.get(curvature, (curvature, "none"))
    offset = {"row_col_mult": "row_col_add"}.get(pattern, pattern)
    scales = {
        role: Scale(pattern, start=value, transform=transform) for role, value in (("e", 1.3), ("l", 0.8), ("m", 0.9))
    }
    rest = {"n": Scale(offset, start=0.4), "s": Scale(start=1.1)}
    config = SELConfig(beta=7.5, mode=mode, normalize=normalize, curvature=curvature, **scales, **rest)
    return Layout(place[0], place[1], config)


def drawn(layout, largest=30.0):
    """Coordinates with raw weights from denormals to kappa |w| of 30, with zeros, and panels around their start."""
    g = torch.Generator().manual_seed(len(layout.shape))
    size = torch.rand(layout.shape, generator=g, dtype=torch.float64)
    raw = torch.where(size < 0.4, 10.0 ** (-110.0 * (size - 0.03)), 0.3 * torch.randn(layout.shape, generator=g))
    raw = torch.where(size > 0.95, largest * size / 7.5, raw)
    raw = raw * torch.where(torch.rand(layout.shape, generator=g) < 0.5, -1.0, 1.0)
    raw[size < 0.03] = 0.0
    panels = layout.start_panels(torch.float32, torch.device("cpu"), 0)
    for panel in panels.values():
        panel.mul_(1.0 + 0.2 * torch.rand(panel.shape, generator=g))
    return Coordinates(layout, raw.float(), **panels)


def doubled(coordinates):
    return Coordinates(coordinates.layout, *(part.double() for part in coordinates[1:]))


def seen(coordinates):
    """The map as kernels take it."""
    terms = terms_of(coordinates.layout)
    panels = Panels(*coordinates[2:4], coordinates.scalar[None], [coordinates.layout.shape[0]])
    return terms, FactoredMap(terms, panels)


def weight_of(kernels, coordinates, dtype=torch.float32):
    weight = torch.empty_like(coordinates.raw, dtype=dtype)
    terms, curve = seen(coordinates)
    kernels.write(terms, Matrices([coordinates.raw], [weight]), curve.factors())
    return weight


def pullback_of(kernels, coordinates, g, weight=None):
    """The gradients by raw weight (not of a known `weight`) and panels, and the square of the former's norm."""
    out = [torch.empty_like(coordinates.raw)] if weight is None else None
    terms, curve = seen(coordinates)
    matrices = Matrices([coordinates.raw], [g if weight is None else weight])
    sums = kernels.pull(terms, matrices, curve.factors(), [g], out)
    panel0, panel1, scalar = curve.gradients(sums)
    return [*(out or ()), panel0, panel1, scalar[0]], sums.squares


def owed(coordinates):
    """The accuracy owed (symexplin.transform.tolerance) in units of float32, and some denormals."""
    bound = transform.tolerance(coordinates.layout.form, coordinates.raw, coordinates.scales())
    return bound * (UNIT / 2.0**-53) + 64.0 * DENORMAL


def test_weights_are_as_accurate_as_owed(kernels):
    for case in CASES:
        coordinates = drawn(layout_of(*case))
        truth = doubled(coordinates)
        error = (weight_of(kernels, coordinates).double() - truth.effective()).abs()
        assert bool((error <= owed(truth)).all()), case


def absolute_terms(truth, g):
    """The sums of absolute values that the derivatives add: no cancellation where everything is positive."""
    found = []
    mode = truth.layout.config.mode
    for positive in ("exp_only",) if mode == "exp_only" else ("congruent", "oppose"):
        config = SELConfig.from_dict(truth.layout.config.to_dict() | {"mode": positive})
        layout = Layout(truth.layout.shape, truth.layout.letters, config)
        pulled = truth._replace(layout=layout, raw=truth.raw.abs()).pullback(g.double().abs())
        found.append([part.abs() for part in pulled[1:]])
    return [torch.stack(parts).amax(0) for parts in zip(*found, strict=True)]


def check_derivatives(kernels, coordinates, case):
    g = torch.randn(coordinates.raw.shape, generator=torch.Generator().manual_seed(7))
    truth = doubled(coordinates)
    x, expected, sizes = (truth.scales().kappa * truth.raw).abs(), truth.pullback(g.double()), absolute_terms(truth, g)
    # One bound per entry for the raw gradient; for sums that of the largest kappa|w|.
    bounds = [2.0 * (8.0 + 4.0 * x)] + 3 * [2.0 * (8.0 + 4.0 * x.max() if x.numel() else x.sum())]
    for weight in (None, weight_of(kernels, coordinates)):
        pulled, squares = pullback_of(kernels, coordinates, g, weight)
        for ours, value, size, bound in list(
            zip(pulled[::-1], expected[4:0:-1], sizes[3::-1], bounds[::-1], strict=False)
        ):
            error = (ours.double() - value).abs()
            assert bool((error <= bound * UNIT * size + 64.0 * DENORMAL).all()), case
        assert float(squares) == pytest.approx(float(expected.raw.square().sum()), rel=1e-4)


def test_derivatives_are_as_accurate_as_owed(kernels):
    for case in CASES:
        check_derivatives(kernels, drawn(layout_of(*case)), case)


@pytest.mark.parametrize(
    "scales", [{"l": 1e5}, {"e": 0.0, "l": 2.0}, {"e": 0.0, "l": 0.0}, {"e": -1.0, "l": 20.0}], ids=str
)
def test_derivatives_where_weights_do_not_tell_the_exponential(kernels, scales):
    config = SELConfig(
        beta=7.5, mode="congruent", **{role: Scale("column", start=value) for role, value in scales.items()}
    )
    check_derivatives(kernels, drawn(Layout((33, 65), "oi", config)), scales)


def test_inverses_are_as_accurate_as_owed(kernels):
    """At the raw weight returned, the exact map is within the bound of the weight asked for: 40 bounds out, too."""
    for mode, (pattern, place) in itertools.product(KERNEL_MODES, [("row_col_mult", PLACES[3]), ("global", PLACES[9])]):
        coordinates = drawn(layout_of(mode, pattern=pattern, place=place))
        g = torch.Generator().manual_seed(3)
        target = torch.randn(place[0], generator=g) * 10.0 ** (8.0 * torch.rand(place[0], generator=g) - 6.0)
        target.view(-1)[0] = 0.0
        for weight in (target, target.bfloat16()):
            raw = torch.empty_like(target)
            terms, curve = seen(coordinates)
            assert kernels.invert(terms, Matrices([raw], [weight]), curve.factors())
            truth = doubled(coordinates._replace(raw=raw))
            error = (truth.effective() - weight.double()).abs()
            assert bool((error <= owed(truth)).all()), (mode, place)


@pytest.mark.parametrize(
    ("mode", "scales"),
    [("mismatch", {"l": 8.0}), ("congruent", {"l": -8.0}), ("oppose", {"l": 8.0}), ("mismatch", {"e": -1.0})],
)
def test_what_has_no_inverse_is_left_to_the_formulas_which_say_so(kernels, mode, scales):
    config = SELConfig(beta=7.5, mode=mode, **{role: Scale(start=value) for role, value in scales.items()})
    layout = Layout((20, 40), "oi", config)
    coordinates = Coordinates(layout, torch.zeros(20, 40), **layout.start_panels(torch.float32, torch.device("cpu"), 0))
    terms, curve = seen(coordinates._replace(raw=torch.zeros(20, 40)))
    assert not kernels.invert(terms, Matrices([torch.empty(20, 40)], [torch.ones(20, 40)]), curve.factors())
    with pytest.raises(ValueError, match="800 of 800 elements"):
        coordinates.matched(torch.ones(20, 40))


def test_one_weight_that_is_no_number_has_no_inverse(kernels):
    coordinates = drawn(layout_of())
    terms, curve = seen(coordinates)
    for wrong in (math.nan, math.inf):
        target = torch.zeros(33, 65)
        target[20, 64] = wrong
        assert not kernels.invert(terms, Matrices([torch.empty(33, 65)], [target]), curve.factors())


@pytest.mark.parametrize("mode", KERNEL_MODES)
@pytest.mark.parametrize("kappa", [7.5, -7.5, 0.0])
def test_extremes(kernels, mode, kappa):
    """Curvature of either sign up to overflow, NaN and zeros of either sign: as the readable formulas."""
    layout = layout_of(mode, pattern="global", place=((1, 64), "oi"))
    raw = torch.tensor([0.0, 1e-45, 1e-30, 0.1, 2.0, 9.0, 11.0, 11.7, 11.8, 11.88, 11.9, 12.1, 40.0, 1e30])
    raw = torch.cat([raw, -raw, torch.tensor([math.nan])])[None]
    layout = Layout(tuple(raw.shape), "oi"[: raw.dim()], layout.config)
    coordinates = drawn(layout)._replace(raw=raw)
    coordinates.scalar[layout.by_role("m")[0].index] = kappa / layout.beta
    truth = doubled(coordinates)
    scales = transform.Scales(*(s if s is None or isinstance(s, float) else float(s) for s in truth.scales()))
    expected = transform.forward(layout.form, raw, scales)
    weight = weight_of(kernels, coordinates)
    finite = expected.isfinite()
    assert torch.equal(weight[~finite].nan_to_num(7.0), expected[~finite].nan_to_num(7.0))
    assert bool(((weight.double() - truth.effective()).abs() <= owed(truth) + 1e-37)[finite].all())
    assert torch.equal(weight[raw == 0], torch.zeros(2))


RATES = Rates(0.01, 0.1, 0.9, 0.99, 1e-8, (1 - 0.9**3, 1 - 0.99**3))


def updated(kernels, coordinates, new, weight_dtype=torch.float32, rates=RATES, clip=0.25):
    """The tensors of an update: raw, weight, moments, with its gradient first, and what they were before."""
    g = torch.Generator().manual_seed(5)
    raw = coordinates.raw.clamp(-0.5, 0.5)
    grad, m, v = (torch.randn(raw.shape, generator=g) for _ in range(3))
    weight = weight_of(kernels, coordinates._replace(raw=raw), weight_dtype)
    found = [grad.to(weight_dtype), raw, weight, 0.1 * m, 0.01 * v.square()]
    before = [tensor.clone() for tensor in found]
    terms, old = seen(coordinates)
    _, curve = seen(new)
    matrices = Matrices(*([tensor] for tensor in found[1:]))
    kernels.update(terms, matrices, old.factors(), curve.factors(), found[:1], rates, torch.tensor(clip))
    return found, before


@pytest.mark.parametrize("case", pairwise(**CHOICES | {"place": [PLACES[2], PLACES[7], PLACES[9]]}), ids=str)
def test_an_update_is_adamw_on_the_pulled_gradient(kernels, case):
    """The gradient from the old panels, the weight from the new ones."""
    coordinates = drawn(layout_of(*case))
    new = coordinates._replace(**{panel: 1.1 * getattr(coordinates, panel) for panel in PANELS})
    (grad, raw, weight, *moments), before = updated(kernels, coordinates, new)
    old_raw, m, v = (before[i].double() for i in (1, 3, 4))
    g = 0.25 * doubled(coordinates._replace(raw=before[1])).pullback(before[0].double()).raw
    m, v = m + (g - m) * (1.0 - RATES.beta1), v * RATES.beta2 + (1.0 - RATES.beta2) * g * g
    step = m / ((v / RATES.corrections[1]).sqrt() + RATES.eps) * (RATES.lr / RATES.corrections[0])
    expected = old_raw * (1.0 - RATES.lr * RATES.decay) - step
    for ours, value in zip((raw, *moments), (expected, m, v), strict=True):
        torch.testing.assert_close(ours.double(), value, rtol=2e-5, atol=2e-5)
    assert torch.equal(weight, weight_of(kernels, new._replace(raw=raw)))  # bit for bit: writes are found by comparing
    assert torch.equal(grad, before[0])


@pytest.mark.parametrize("shape", [(33, 65), (16, 64), (70,), (3, 2500)])
def test_bfloat16_weights_and_gradients_are_float32_ones_rounded(kernels, shape):
    coordinates = drawn(layout_of("mismatch", place=(shape, "oi"[: len(shape)])))
    (grad, raw, weight, *_), _ = updated(kernels, coordinates, coordinates, torch.bfloat16)
    wide, narrow = (pullback_of(kernels, coordinates, g) for g in (grad.float(), grad))
    assert all(torch.equal(a, b) for a, b in zip((*wide[0], wide[1]), (*narrow[0], narrow[1]), strict=True))
    assert torch.equal(weight, weight_of(kernels, coordinates._replace(raw=raw)).bfloat16())


def test_rounding_to_bfloat16_is_torchs(kernels):
    """Ties, denormals, overflow to infinity, NaN of either sign: all patterns of the upper 18 bits."""
    patterns = (torch.arange(2**18, dtype=torch.int64) << 14).to(torch.int32)
    ties = torch.cat([patterns, patterns + 1, patterns - 1]).view(torch.float32)
    ties = ties[~ties.isinf()]  # of which the map is none
    config = SELConfig(beta=1e-30, mode="congruent", e=Scale(start=0.0), l=Scale(start=1e-30), m=Scale(start=1e-8))
    layout = Layout(tuple(ties.shape), "o", config)
    coordinates = Coordinates(layout, ties, **layout.start_panels(torch.float32, torch.device("cpu"), 0))
    found, expected, nan = weight_of(kernels, coordinates, torch.bfloat16), ties.bfloat16(), ties.isnan()
    assert torch.equal(found[~nan], expected[~nan])
    assert bool(found[nan].isnan().all())


def stack(kernels):
    """Matrices large enough for several tiles and threads, with one map, and what belongs to them."""
    layouts = [layout_of(place=(shape, "oi"[: len(shape)])) for shape in ((600, 300), (40, 5000), (33, 65))]
    found = [drawn(layout, largest=4.0) for layout in layouts]
    panels = Panels(
        *(torch.cat([c.panel0 for c in found]), torch.cat([c.panel1 for c in found], 1)),
        *(torch.stack([c.scalar for c in found]), [c.raw.shape[0] for c in found]),
    )
    g = torch.Generator().manual_seed(1)
    grads, m, v = ([torch.randn(c.raw.shape, generator=g) for c in found] for _ in range(3))
    tensors = grads, [weight_of(kernels, c) for c in found], m, [x.square() for x in v]
    return terms_of(layouts[0]), [c.raw for c in found], tensors, FactoredMap(terms_of(layouts[0]), panels).factors()


@pytest.mark.parametrize("counts", [(1, 2, 5, 5)])
def test_any_number_of_threads_gives_the_same_bits(kernels, counts):
    threads, results = torch.get_num_threads(), []
    try:
        for count in counts:
            torch.set_num_threads(count)
            terms, raw, (grads, weight, m, v), factors = stack(kernels)
            matrices = Matrices(raw, weight, m, v)
            sums = kernels.pull(terms, matrices, factors, grads)
            kernels.update(terms, matrices, factors, factors, grads, RATES, torch.tensor(0.5))
            results.append([*sums, *raw, *weight, *m, *v])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))


def test_matrices_together_are_matrices_alone(kernels):
    terms, raw, (grads, weights, *_), factors = stack(kernels)
    together = kernels.pull(terms, Matrices(raw, weights), factors, grads)
    at0 = at1 = 0
    for i, one in enumerate(raw):
        (d0, d1), own = one.shape, [axis.clone() for axis in factors]
        own = type(factors)(own[0][:, at0 : at0 + d0].contiguous(), own[1][:, at1 : at1 + d1].contiguous())
        alone = kernels.pull(terms, Matrices([one], [weights[i]]), own, [grads[i]])
        assert torch.equal(alone.rows, together.rows[:, at0 : at0 + d0])
        assert torch.equal(alone.columns, together.columns[:, at1 : at1 + d1])
        assert torch.equal(alone.squares, together.squares[i : i + 1])
        at0, at1 = at0 + d0, at1 + d1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_learning_rate_zero_keeps_bits_and_advances_moments(kernels, dtype):
    coordinates = drawn(layout_of())
    coordinates.raw[0, :3] = torch.tensor([-0.0, 0.0, -1.0])
    found, before = updated(kernels, coordinates, coordinates, dtype, RATES._replace(lr=0.0))
    assert all(torch.equal(a.view(torch.int8), b.view(torch.int8)) for a, b in zip(found[:3], before[:3], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(found[3:], before[3:], strict=True))


def test_what_it_covers(kernels):
    single, terms = torch.zeros(4, 6), terms_of(layout_of())
    assert kernels.covers(terms, single, single)
    assert kernels.covers(terms, single, single.bfloat16())
    for raw, weight in [
        *((single.double(), single.double()), (single, single.half()), (single.half(), single.half())),
        *((single.mT, single), (single, single[:, :3]), (single.to("meta"), single)),
    ]:
        assert not kernels.covers(terms, raw, weight)


def test_it_names_the_compiler():
    assert cpu.load().name == f"compiled C ({find_compiler().name})"
