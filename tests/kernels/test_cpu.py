"""Compiled kernels for CPUs: the map, its derivatives and AdamW against the readable formulas in float64."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from symexplin import transform
from symexplin.config import Scale, SELConfig
from symexplin.coordinates import Coordinates
from symexplin.kernels import cpu
from symexplin.kernels.compiler import find_compiler
from symexplin.kernels.part import Part, Rates
from symexplin.kernels.terms import KERNEL_MODES, Terms, terms_of
from symexplin.layout import PANELS, Layout

FLOAT32_UNIT = 2.0**-24
DENORMAL = 2.0**-149
SHAPES = ((1, 1), (1, 7), (33, 65), (130, 257), (0, 5), (5, 0), (3, 2500), (600, 16), (70,), (0,))
PATTERNS = ("fixed", "global", "row", "column", "row_col_mult")
PLACES = tuple((shape, out_dim) for shape in SHAPES for out_dim in range(len(shape)))
CASES = tuple(itertools.product(KERNEL_MODES, (False, True), ("fixed", "absorbed")))


@pytest.fixture(scope="module")
def kernels() -> cpu.CpuKernels:
    found = cpu.load()
    if found is None:
        pytest.skip("no C compiler")
    return found


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def layout_of(
    mode: str, normalize: bool, curvature: str, pattern: str, shape: tuple[int, ...], out_dim: int = 0
) -> Layout:
    offset = {"row_col_mult": "row_col_add"}.get(pattern, pattern)
    config = SELConfig(
        beta=7.5,
        mode=mode,
        normalize=normalize,
        curvature=curvature,
        e=Scale(pattern, start=1.3),
        l=Scale(pattern, start=0.8),
        m=Scale(pattern, start=0.9),
        n=Scale(offset, start=0.4),
        s=Scale(start=1.1),
    )
    return Layout(shape, out_dim, 7.5, config)


def known_terms(layout: Layout) -> Terms:
    terms = terms_of(layout)
    assert terms is not None
    return terms


def start(layout: Layout, dtype: torch.dtype, spread: float = 0.2) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Raw weights from denormals to kappa|w| of 30, with zeros, and panels around their start."""
    g = generator(len(layout.shape))
    size = torch.rand(layout.shape, generator=g, dtype=torch.float64)
    raw = torch.where(size < 0.4, 10.0 ** (-110.0 * (size - 0.03)), 0.3 * torch.randn(layout.shape, generator=g))
    raw = torch.where(size > 0.95, 30.0 * size / 7.5, raw)
    raw = raw * torch.where(torch.rand(layout.shape, generator=g) < 0.5, -1.0, 1.0)
    raw[size < 0.03] = 0.0
    panels = layout.start_panels(torch.float64, torch.device("cpu"), 0)
    for panel in panels.values():
        panel.mul_(1.0 + spread * torch.rand(panel.shape, generator=g, dtype=torch.float64))
    return raw.to(dtype), tuple(panels[name].to(dtype) for name in PANELS)  # type: ignore[return-value]


def exact(layout: Layout, raw: Tensor, panels: tuple[Tensor, ...]) -> Coordinates:
    return Coordinates(layout, raw.double(), *(panel.double() for panel in panels))


def owed(coordinates: Coordinates, unit: float) -> Tensor:
    """The accuracy owed (symexplin.transform.tolerance) in the units of another dtype, and some denormals."""
    scales = coordinates.scales()
    bound = transform.tolerance(coordinates.layout.form, coordinates.raw, scales)
    return bound * (unit / 2.0**-53) + (64.0 * DENORMAL if unit > 2.0**-30 else 0.0)


@pytest.mark.parametrize(("mode", "normalize", "curvature"), CASES)
def test_weights_are_as_accurate_as_owed(kernels: cpu.CpuKernels, mode: str, normalize: bool, curvature: str) -> None:
    for pattern, (shape, out_dim) in itertools.product(PATTERNS, PLACES):
        layout = layout_of(mode, normalize, curvature, pattern, shape, out_dim)
        raw, panels = start(layout, torch.float32)
        weight = kernels.effective(known_terms(layout), raw, panels, torch.float32)
        truth = exact(layout, raw, panels)
        error = (weight.double() - truth.effective()).abs()
        assert weight.shape == raw.shape
        assert bool((error <= owed(truth, FLOAT32_UNIT)).all()), (pattern, shape, out_dim)


def absolute_terms(layout: Layout, raw: Tensor, panels: tuple[Tensor, ...], g: Tensor) -> list[Tensor]:
    """The sums of absolute values that the derivatives add: no cancellation where everything is positive."""
    found = []
    for mode in ("congruent", "oppose") if layout.config.mode not in ("exp_only", "sinh") else (layout.config.mode,):
        config = SELConfig.from_dict(layout.config.to_dict() | {"mode": mode})
        positive = Layout(layout.shape, layout.out_dim, layout.beta, config)
        coordinates = exact(positive, raw.abs(), panels)
        pulled = coordinates.pullback(g.double().abs())
        found.append([part.abs() for part in (pulled.raw, pulled.panel0, pulled.panel1, pulled.scalar)])
    return [torch.stack(parts).amax(0) for parts in zip(*found, strict=True)]


@pytest.mark.parametrize(("mode", "normalize", "curvature"), CASES)
def test_derivatives_are_as_accurate_as_owed(
    kernels: cpu.CpuKernels, mode: str, normalize: bool, curvature: str
) -> None:
    for pattern, (shape, out_dim) in itertools.product(PATTERNS, PLACES):
        layout = layout_of(mode, normalize, curvature, pattern, shape, out_dim)
        raw, panels = start(layout, torch.float32)
        g = torch.randn(shape, generator=generator(7))
        pulled = kernels.pullback(known_terms(layout), raw, panels, g)
        truth = exact(layout, raw, panels)
        x = (truth.scales().kappa * truth.raw).abs()
        expected = truth.pullback(g.double())
        sizes = absolute_terms(layout, raw, panels, g)
        # One bound an entry for the raw gradient; for sums that of the largest kappa|w|.
        bounds = [2.0 * (8.0 + 4.0 * x)] + 3 * [2.0 * (8.0 + 4.0 * x.max() if x.numel() else x.sum())]
        values = (expected.raw, expected.panel0, expected.panel1, expected.scalar)
        for ours, value, size, bound in zip(pulled, values, sizes, bounds, strict=True):
            assert ours.shape == value.shape
            error = (ours.double() - value).abs()
            assert bool((error <= bound * FLOAT32_UNIT * size + 64.0 * DENORMAL).all()), (pattern, shape, out_dim)


@pytest.mark.parametrize(("mode", "normalize", "curvature"), CASES)
def test_float64_agrees_with_the_readable_formulas(
    kernels: cpu.CpuKernels, mode: str, normalize: bool, curvature: str
) -> None:
    for pattern, shape in itertools.product(("global", "row_col_mult"), ((1, 7), (33, 65), (70,))):
        layout = layout_of(mode, normalize, curvature, pattern, shape)
        raw, panels = start(layout, torch.float64)
        raw = raw.clamp(-1.0, 1.0)
        truth, terms = exact(layout, raw, panels), known_terms(layout)
        g = torch.randn(shape, generator=generator(7), dtype=torch.float64)
        weight = kernels.effective(terms, raw, panels, torch.float64)
        assert bool(((weight - truth.effective()).abs() <= 2.0 * owed(truth, 2.0**-53)).all())
        expected, sizes = truth.pullback(g), absolute_terms(layout, raw, panels, g)
        values = (expected.raw, expected.panel0, expected.panel1, expected.scalar)
        for ours, value, size in zip(kernels.pullback(terms, raw, panels, g), values, sizes, strict=True):
            assert bool(((ours - value).abs() <= 1e-13 * size).all())


@pytest.mark.parametrize("mode", KERNEL_MODES)
@pytest.mark.parametrize("kappa", [7.5, -7.5, 0.0])
def test_extremes(kernels: cpu.CpuKernels, mode: str, kappa: float) -> None:
    """Curvature of either sign up to overflow, infinities, NaN and zeros of either sign: as the readable formulas."""
    layout = layout_of(mode, False, "fixed", "global", (1, 64))
    raw = torch.tensor([0.0, 1e-45, 1e-30, 0.1, 2.0, 9.0, 11.0, 11.7, 11.8, 11.88, 11.9, 12.1, 40.0, 1e30, math.inf])
    raw = torch.cat([raw, -raw, torch.tensor([math.nan])])[None]
    panels = start(layout, torch.float32)[1]
    slot = layout.by_role("m")[0]
    panels[2][slot.index] = kappa / layout.beta
    truth = exact(layout, raw, panels)
    form, scales = layout.form, truth.scales()
    with_floats = transform.Scales(*(s if s is None or isinstance(s, float) else float(s) for s in scales))
    expected = transform.forward(form, raw, with_floats)
    weight = kernels.effective(known_terms(layout), raw, panels, torch.float32)
    finite = expected.isfinite()
    assert torch.equal(weight[~finite].nan_to_num(7.0), expected[~finite].nan_to_num(7.0))
    error = (weight.double() - truth.effective()).abs()
    assert bool((error <= owed(truth, FLOAT32_UNIT) + 1e-37)[finite].all())
    assert torch.equal(weight[raw == 0], torch.zeros(2))


def part_of(
    layout: Layout, dtype: torch.dtype, weight_dtype: torch.dtype, kernels: cpu.CpuKernels, lr: float = 0.01
) -> Part:
    raw, panels = start(layout, dtype)
    raw = raw.clamp(-0.5, 0.5)
    g = generator(5)
    tensors = (raw, *panels)

    def draw(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=g, dtype=dtype)

    def number(panel: int) -> tuple[float, ...]:
        return tuple(lr * (2.0 + i) for i in range(layout.width(PANELS[panel])))

    rates = Rates(
        lr,
        0.1,
        0.9,
        0.99,
        1e-8,
        (1 - 0.9**3, 1 - 0.99**3, 1 - 0.9**5, 1 - 0.99**5),
        (number(0), number(1), number(2)),
        tuple(tuple(0.05 * (i % 2) for i in range(layout.width(panel))) for panel in PANELS),
    )
    weight = kernels.effective(known_terms(layout), raw, panels, weight_dtype)
    return Part(
        terms=known_terms(layout),
        raw=raw,
        weight=weight,
        panels=panels,
        moments=tuple((0.1 * draw(t), 0.01 * draw(t).square()) for t in tensors),
        gradients=tuple(torch.empty_like(panel) for panel in panels),  # type: ignore[arg-type]
        grad=draw(raw).to(weight_dtype),
        rates=rates,
    )


def adamw(
    x: Tensor,
    g: Tensor,
    moments: tuple[Tensor, Tensor],
    rates: Rates,
    lr: Tensor | float,
    decay: Tensor | float,
    i: int,
) -> Tensor:
    """One AdamW step in float64, out of place."""
    corrections = [float(c) for c in rates.corrections[i : i + 2]]
    m, v = (moment.double() for moment in moments)
    m = m + (g - m) * (1.0 - rates.beta1)
    v = v * rates.beta2 + (1.0 - rates.beta2) * g * g
    return x.double() * (1.0 - lr * decay) - m / ((v / corrections[1]).sqrt() + rates.eps) * (lr / corrections[0])


SPREAD = ((1, -1), (-1, 1), (-1,))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.float64, 1e-13)])
@pytest.mark.parametrize("mode", KERNEL_MODES)
@pytest.mark.parametrize("shape", [(33, 65), (70,), (3, 2500)])
def test_update_is_adamw_on_the_pulled_gradient(
    kernels: cpu.CpuKernels, dtype: torch.dtype, bound: float, mode: str, shape: tuple[int, ...]
) -> None:
    layout = layout_of(mode, True, "fixed", "row_col_mult" if len(shape) == 2 else "row", shape)
    part = part_of(layout, dtype, dtype, kernels)
    truth = exact(layout, part.raw, part.panels)
    assert part.grad is not None
    assert part.rates is not None
    grad = part.grad.clone()
    pulled = truth.pullback(part.grad.double())
    values = (pulled.raw, pulled.panel0, pulled.panel1, pulled.scalar)
    norms = kernels.pull([part])
    assert norms[0] == pytest.approx(float(pulled.raw.norm()), rel=bound)
    lrs = [part.rates.lr, *(torch.tensor(lr, dtype=torch.float64) for lr in part.rates.panel_lr)]
    decays = [part.rates.decay, *(torch.tensor(decay, dtype=torch.float64) for decay in part.rates.panel_decay)]
    old = (part.raw, *part.panels)
    expected = [adamw(old[0], 0.25 * values[0], part.moments[0], part.rates, lrs[0], decays[0], 0)]
    for i in range(3):
        lr, decay = (spread[i + 1].reshape(SPREAD[i]) for spread in (lrs, decays))
        expected.append(adamw(old[i + 1], 0.25 * values[i + 1], part.moments[i + 1], part.rates, lr, decay, 2))
    marks = kernels.update([part], torch.tensor(0.25, dtype=dtype))
    for ours, value in zip((part.raw, *part.panels), expected, strict=True):
        torch.testing.assert_close(ours.double(), value, rtol=10 * bound, atol=10 * bound)
    weight = kernels.effective(known_terms(layout), part.raw, part.panels, dtype)
    assert torch.equal(weight, part.weight)  # bit for bit: writes from outside are found by comparing
    assert torch.equal(marks, kernels.marks([weight]))
    assert torch.equal(part.grad, grad)


def bits(tensor: Tensor) -> Tensor:
    sizes = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(sizes[tensor.element_size()])


def snapshot(part: Part) -> list[Tensor]:
    moments = [moment for pair in part.moments for moment in pair]
    weight = [] if part.weight is None else [part.weight]
    return [tensor.clone() for tensor in (part.raw, *weight, *part.panels, *part.gradients, *moments)]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(ours, theirs, strict=True))


def plain_part(shape: tuple[int, ...], dtype: torch.dtype, weight_dtype: torch.dtype | None) -> Part:
    g = generator(3)
    raw = torch.randn(shape, generator=g, dtype=dtype)
    weight = None if weight_dtype is None else raw.to(weight_dtype)
    moments = (0.1 * torch.randn(shape, generator=g, dtype=dtype), torch.rand(shape, generator=g, dtype=dtype))
    rates = Rates(0.01, 0.1, 0.9, 0.99, 1e-8, (0.5, 0.25, 1.0, 1.0))
    empty = (torch.empty(0), torch.empty(0), torch.empty(0))
    grad = torch.randn(shape, generator=g, dtype=dtype).to(weight_dtype or dtype)
    return Part(None, raw, weight, empty, (moments,), empty, grad, rates)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(300, 700), (2500,), (3, 5, 7), (), (0, 3)])
def test_plain_values_follow_adamw(kernels: cpu.CpuKernels, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    part = plain_part(shape, dtype, None)
    assert part.grad is not None
    assert part.rates is not None
    expected = adamw(part.raw, part.grad.double(), part.moments[0], part.rates, 0.01, 0.1, 0)
    unit = torch.finfo(dtype).eps
    assert kernels.pull([part])[0] == pytest.approx(float(part.grad.double().norm()), rel=4 * unit)
    marks = kernels.update([part], None)
    torch.testing.assert_close(part.raw.double(), expected, rtol=8 * unit, atol=8 * unit)
    assert torch.equal(marks, kernels.marks([part.raw]))


@pytest.mark.parametrize("shape", [(33, 65), (16, 64), (70,), (3, 2500)])
def test_bfloat16_weights_are_the_rounded_float32_ones(kernels: cpu.CpuKernels, shape: tuple[int, ...]) -> None:
    layout = layout_of("mismatch", False, "fixed", "row_col_mult", shape)
    part = part_of(layout, torch.float32, torch.bfloat16, kernels)
    assert part.grad is not None
    wide = kernels.pullback(known_terms(layout), part.raw, part.panels, part.grad.float())
    narrow = kernels.pullback(known_terms(layout), part.raw, part.panels, part.grad)
    assert same(list(wide), list(narrow))
    kernels.pull([part])
    marks = kernels.update([part], None)
    rounded = kernels.effective(known_terms(layout), part.raw, part.panels, torch.float32).bfloat16()
    assert torch.equal(part.weight, rounded)
    assert torch.equal(kernels.effective(known_terms(layout), part.raw, part.panels, torch.bfloat16), rounded)
    assert torch.equal(marks, kernels.marks([rounded]))
    plain = plain_part(shape, torch.float32, torch.bfloat16)
    kernels.update([plain], None)
    assert torch.equal(plain.weight, plain.raw.bfloat16())


def test_rounding_to_bfloat16_is_torchs(kernels: cpu.CpuKernels) -> None:
    """Ties, denormals, overflow to infinity, NaN of either sign: all patterns of the upper 18 bits."""
    patterns = (torch.arange(2**18, dtype=torch.int64) << 14).to(torch.int32)
    ties = torch.cat([patterns, patterns + 1, patterns - 1]).view(torch.float32)
    part = plain_part(tuple(ties.shape), torch.float32, torch.bfloat16)
    part.raw.copy_(ties)
    for tensor in (part.grad, *part.moments[0]):
        assert tensor is not None
        tensor.zero_()
    part.rates = Rates(1e-30, 0.0, 0.9, 0.99, 1.0, (1.0, 1.0, 1.0, 1.0))
    kernels.update([part], None)
    assert part.weight is not None
    expected, nan = ties.bfloat16(), ties.isnan()
    assert torch.equal(bits(part.weight)[~nan], bits(expected)[~nan])
    assert bool(part.weight[nan].isnan().all())


def everything(kernels: cpu.CpuKernels) -> list[Part]:
    """Parts of all kinds, large enough for several tiles and threads."""
    shapes = ((600, 300), (40, 5000), (33, 65), (70,))
    patterns = ("row_col_mult", "row_col_mult", "global", "row")
    curved = [
        part_of(layout_of(mode, True, "absorbed", pattern, shape), torch.float32, dtype, kernels)
        for mode, dtype in (("mismatch", torch.float32), ("oppose", torch.bfloat16), ("sinh", torch.float32))
        for shape, pattern in zip(shapes, patterns, strict=True)
    ]
    double = part_of(layout_of("mismatch", False, "fixed", "row", (33, 65)), torch.float64, torch.float64, kernels)
    return [*curved, double, plain_part((500, 300), torch.float32, None)]


def test_any_number_of_threads_gives_the_same_bits(kernels: cpu.CpuKernels) -> None:
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5, 5):
            torch.set_num_threads(count)
            parts = everything(kernels)
            norms = kernels.pull(parts)
            marks = kernels.update(parts, torch.tensor(0.5))
            weights = [part.raw if part.weight is None else part.weight for part in parts]
            assert torch.equal(marks, kernels.marks(weights))
            results.append([norms, marks, *(tensor for part in parts for tensor in snapshot(part))])
    finally:
        torch.set_num_threads(threads)
    assert all(same(results[0], other) for other in results[1:])


def test_parts_together_are_parts_alone(kernels: cpu.CpuKernels) -> None:
    together, alone = everything(kernels), everything(kernels)
    norms = kernels.pull(together)
    kernels.update(together, None)
    assert same([norms], [torch.cat([kernels.pull([part]) for part in alone])])
    for part in alone:
        kernels.update([part], None)
    for ours, theirs in zip(together, alone, strict=True):
        assert same(snapshot(ours), snapshot(theirs))


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_learning_rate_zero_keeps_bits_and_advances_moments(kernels: cpu.CpuKernels, weight_dtype: torch.dtype) -> None:
    layout = layout_of("mismatch", False, "fixed", "row_col_mult", (33, 65))
    part = part_of(layout, torch.float32, weight_dtype, kernels, lr=0.0)
    assert part.weight is not None
    part.raw[0, :3] = torch.tensor([-0.0, 0.0, -1.0])
    part.weight.copy_(torch.randn(33, 65, generator=generator(1)))
    plain = plain_part((33, 65), torch.float32, weight_dtype)
    assert plain.rates is not None
    plain.rates = plain.rates._replace(lr=0.0)
    before, moment = snapshot(part), plain.moments[0][1].clone()
    kernels.pull([part, plain])
    marks = kernels.update([part, plain], None)
    assert torch.equal(marks, kernels.marks([part.weight, plain.weight]))  # type: ignore[list-item]
    after = snapshot(part)
    assert same(after[:5], before[:5])  # raw, weight, panels
    assert not any(torch.equal(a, b) for a, b in zip(after[8:14], before[8:14], strict=True))
    assert not torch.equal(plain.moments[0][1], moment)


def test_a_kept_weight_stays_while_its_raw_weight_moves(kernels: cpu.CpuKernels) -> None:
    layout = layout_of("mismatch", False, "fixed", "row_col_mult", (33, 65))
    part, other = (part_of(layout, torch.float32, torch.float32, kernels) for _ in range(2))
    assert part.weight is not None
    before = part.weight.clone()
    part.keep = torch.tensor(True)
    for each in (part, other):
        kernels.pull([each])
    marks = kernels.update([part], None)
    kernels.update([other], None)
    assert torch.equal(part.weight, before)
    assert torch.equal(marks, kernels.marks([before]))
    assert torch.equal(part.raw, other.raw)
    assert not torch.equal(before, other.weight)  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", [1e25, 1e-25, 0.0, math.inf, math.nan])
def test_norms_of_extreme_gradients(kernels: cpu.CpuKernels, scale: float) -> None:
    """Squares that leave float32, infinities and NaN."""
    layout = layout_of("mismatch", False, "fixed", "row_col_mult", (300, 65))
    part = part_of(layout, torch.float32, torch.float32, kernels)
    plain = plain_part((300, 65), torch.float32, None)
    for each in (part, plain):
        assert each.grad is not None
        if math.isfinite(scale):
            each.grad.mul_(scale)
        else:
            each.grad[150, 3] = scale
    norms = kernels.pull([part, plain])
    expected = exact(layout, part.raw, part.panels).pullback(part.grad.double()).raw.norm()  # type: ignore[union-attr]
    assert norms.tolist() == pytest.approx(
        [float(expected), float(plain.grad.double().norm())],  # type: ignore[union-attr]
        rel=1e-6,
        abs=0.0,
        nan_ok=True,
    )


def marks_by_hand(tensor: Tensor) -> list[int]:
    """The marks in Python's integers."""
    rows = bits(tensor if tensor.dim() == 2 else tensor.reshape(1, -1)).tolist()
    first = sum(b * (2 * i + 1) * 2654435761 for i, row in enumerate(rows) for b in row)
    second = sum(
        b * (2 * i + 1) * (2 * j + 1) * 11400714819323 for i, row in enumerate(rows) for j, b in enumerate(row)
    )
    return [(n + 2**63) % 2**64 - 2**63 for n in (first, second)]


def test_marks_are_exact_for_every_size_of_entry(kernels: cpu.CpuKernels) -> None:
    shapes = ((33, 65), (3, 2500), (300, 7), (70,), (), (2, 3, 5), (0, 4))
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    tensors = [
        torch.randn(shape, generator=generator(1), dtype=torch.float64).to(dtype)
        for shape in shapes
        for dtype in dtypes
    ]
    tensors.append(tensors[0].mT)
    tensors.append(torch.full((2, 20000), -32768, dtype=torch.int16))  # the largest sums
    assert kernels.marks(tensors).tolist() == [marks_by_hand(tensor) for tensor in tensors]
    assert kernels.marks([]).shape == (0, 2)


def test_it_names_the_compiler(kernels: cpu.CpuKernels) -> None:
    found = find_compiler()
    assert found is not None
    assert kernels.name == f"compiled C ({found.name})"


def test_what_it_covers(kernels: cpu.CpuKernels) -> None:
    single, double = torch.zeros(4, 6), torch.zeros(4, 6, dtype=torch.float64)
    assert kernels.covers(single, single)
    assert kernels.covers(single, single.bfloat16())
    assert kernels.covers(double, double)
    assert not kernels.covers(double, single)
    assert not kernels.covers(single, single.half())
    assert not kernels.covers(single.half(), single.half())
    assert not kernels.covers(single.mT, single)
    assert not kernels.covers(single, single[:, :3])
    assert not kernels.covers(single.to("meta"), single)


def test_gradients_in_other_memory_formats(kernels: cpu.CpuKernels) -> None:
    layout = layout_of("mismatch", False, "fixed", "row_col_mult", (33, 65))
    part, other = (part_of(layout, torch.float32, torch.float32, kernels) for _ in range(2))
    assert other.grad is not None
    other.grad = other.grad.mT.contiguous().mT
    assert torch.equal(kernels.pull([part]), kernels.pull([other]))
    kernels.update([part], None)
    kernels.update([other], None)
    assert same(snapshot(part), snapshot(other))


def test_parts_that_lack_something_are_named(kernels: cpu.CpuKernels) -> None:
    part = plain_part((2, 2), torch.float32, None)
    part.grad = None
    with pytest.raises(ValueError, match="grad of a part"):
        kernels.pull([part])
    part = plain_part((2, 2), torch.float32, None)
    part.rates = None
    with pytest.raises(ValueError, match="rates of a part"):
        kernels.update([part], None)
