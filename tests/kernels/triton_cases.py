"""What the Triton kernels are checked on, and the same in float64."""

import functools
import itertools
import math

import torch

from symexplin.config import Scale, SELConfig, preset
from symexplin.coordinates import Coordinates
from symexplin.kernels import KERNEL_MODES, Part, Rates, terms_of
from symexplin.kernels.triton_tables import Shape, Tiles
from symexplin.layout import Layout
from symexplin.transform import pullback, tolerance

UNIT = 2.0**-24
# The interpreter takes 70 ms a program: few of them, of several tiles where that matters.
SMALL = Tiles(Shape(16, 8, 32), Shape(16, 16, 32), Shape(1, 1, 64), Shape(16, 8, 32), Shape(16, 16, 32), 32)
WHOLE = Tiles(Shape(32, 32, 64), Shape(32, 32, 64), Shape(1, 1, 256), block=64)
PATTERNS = (
    {"e": "row_col_mult", "l": "row_col_mult", "m": "row_col_mult"},
    {"e": "row", "l": "column", "m": "global", "n": "row_col_add"},
    {"e": "global", "l": "global", "m": "column", "n": "row"},
    {"e": "column", "l": "row", "m": "row", "n": "global"},
    {"e": "row_col_mult", "l": "fixed", "m": "row_col_mult", "n": "column"},
)


def configs():
    """Yield every mode, normalizer and curvature, with the patterns in turn."""
    turns = itertools.cycle(PATTERNS)
    for mode, normalize, curvature, _ in itertools.product(KERNEL_MODES, (False, True), ("fixed", "absorbed"), (0, 1)):
        patterns = next(turns)
        scales = {role: Scale(p, start=0.1 if role == "n" else 1.25) for role, p in patterns.items()}
        yield SELConfig(beta=7.5, mode=mode, normalize=normalize, curvature=curvature, **scales)
    yield SELConfig(beta=7.5, l=Scale(start=0.5), n=Scale(start=-0.25), m=Scale(start=1.5))


def drawn(layout, device, seed=0):
    """Return a raw weight and panels near their start."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randn(layout.shape, generator=generator) * 0.3
    if raw.numel() > 2:
        raw.view(-1)[1] = 0.0
    panels = layout.start_panels(torch.float32, torch.device("cpu"), 0).values()
    panels = [p * (1 + 0.1 * torch.randn(p.shape, generator=generator)) for p in panels]
    return raw.to(device), [p.to(device) for p in panels]


def double(layout, raw, panels):
    return Coordinates(layout, raw.double().cpu(), *(p.double().cpu() for p in panels))


def error(found, wanted, bound):
    """Return the largest error in units of the bound; entries under the smallest normal number count as right."""
    distance = ((found.double().cpu() - wanted).abs() - 2.0**-126).clamp(min=0.0)
    return float((distance / bound.clamp(min=1e-300)).max()) if distance.numel() else 0.0


def owed(layout, raw, panels):
    coordinates = double(layout, raw, panels)
    return tolerance(layout.form, coordinates.raw, coordinates.scales()) * (UNIT / 2.0**-53)


def absolute(layout, raw, panels, g):
    """Return the sums of the absolute terms of the gradients by raw weight and by each slot."""
    coordinates = double(layout, raw, panels)
    scales, form, w = coordinates.scales(), layout.form, coordinates.raw
    wanted = frozenset("kappa" if slot.role == "m" else slot.role for slot in layout.slots)
    parts = [pullback(form._replace(mode="exp_only" if form.mode != "sinh" else "sinh"), w, scales, g.abs(), wanted)]
    if form.mode in ("mismatch", "congruent", "oppose"):
        bare = scales._replace(e=0.0)
        parts.append(pullback(form, w, bare, g, wanted))
    total = {}
    for part in parts:
        for role, value in part.items():
            total[role] = total.get(role, 0.0) + value.abs().expand(w.shape)
    if "kappa" in total:
        absorbed = layout.config.curvature == "absorbed"
        total["m"] = total.pop("kappa") * (scales.kappa.abs() if absorbed else layout.beta)
    size = Coordinates(layout, w, *(p.double().cpu().abs() for p in panels))
    slots = {slot.name: size._contract(slot, total.get(slot.role, torch.zeros_like(w))) for slot in layout.slots}
    return total["w"], slots


def near(layout, raw, panels, found, g, growth):
    """Assert that gradients differ from float64's by at most 2 tolerances, relative to their absolute terms."""
    wanted = double(layout, raw, panels).pullback(g)
    by_raw, by_slot = absolute(layout, raw, panels, g)
    bound = 2.0 * (8.0 + 4.0 * growth) * UNIT
    if found[0] is not None:
        assert error(found[0], wanted.raw, bound * by_raw) <= 1.0
    for slot in layout.slots:
        one = layout.view(slot, found[1 + ("panel0", "panel1", "scalar").index(slot.panel)])
        other = layout.view(slot, getattr(wanted, slot.panel))
        assert error(one, other, bound * by_slot[slot.name]) <= 1.0, slot


def growth_of(layout, raw, panels):
    coordinates = double(layout, raw, panels)
    return float((coordinates.scales().kappa * coordinates.raw.abs()).max()) if raw.numel() else 0.0


def make_part(shape, config, dtype, device, seed, **changes):
    """Return a part in the middle of training; config None: plain values, dtype None: without a weight apart."""
    generator = torch.Generator().manual_seed(seed)
    draw = functools.partial(torch.randn, generator=generator)
    if config is None:
        terms, raw = None, draw(shape).to(device)
        panels = [torch.zeros(n, device=device) for n in ((shape[0], 0), (0, 0), (0,))]
        widths = (0, 0, 0)
        weight = None if dtype is None else raw.to(dtype)
    else:
        layout = Layout(shape, 0, 7.5, config)
        terms, (raw, panels) = terms_of(layout), drawn(layout, device, seed)
        widths = [layout.width(panel) for panel in ("panel0", "panel1", "scalar")]
        weight = double(layout, raw, panels).effective().to(dtype).to(device)
    values = [raw, *panels]
    moments = tuple((0.1 * draw(v.shape).to(device), 0.01 + 0.01 * draw(v.shape).square().to(device)) for v in values)
    rates = Rates(
        1e-2, 0.1, 0.9, 0.99, 1e-8, (0.19, 0.0199, 0.271, 0.0297),
        tuple(tuple(0.01 * (1 + i + j) for j in range(n)) for i, n in enumerate(widths)),
        tuple(tuple(0.1 * j for j in range(n)) for n in widths),
    )  # fmt: skip
    part = Part(
        terms, raw, weight, tuple(panels), moments, tuple(torch.full_like(p, math.nan) for p in panels),
        draw(shape).to(device, dtype or torch.float32), rates, False,
    )  # fmt: skip
    for name, value in changes.items():
        setattr(part, name, value)
    return part


def class_mix(device):
    """Return parts of several classes: two matrices of one class, others alone, biases, plain and empty ones."""
    paper, half = preset("paper"), torch.bfloat16
    offset = SELConfig(beta=7.5, mode="congruent", e=Scale("global"), m=Scale("column"), n=Scale("row"))
    return [
        (preset("paper"), make_part((20, 33), paper, half, device, 1)),
        (None, make_part((9, 40), None, half, device, 2)),
        (paper, make_part((33,), paper, half, device, 3)),
        (paper, make_part((20, 33), paper, half, device, 4)),
        (offset, make_part((17, 16), offset, torch.float32, device, 5)),
        (None, make_part((50,), None, None, device, 6)),
        (paper, make_part((5, 0), paper, half, device, 7)),
        (None, make_part((2, 3, 11), None, torch.float16, device, 8)),
        (paper, make_part((16, 16), paper, torch.float16, device, 9)),
    ]


def copied(part):
    """Return the part's values in float64 on the CPU, to compute the step anew."""
    clone = [v.double().cpu().clone() for v in (part.raw, *part.panels)]
    return clone, [(m.double().cpu().clone(), v.double().cpu().clone()) for m, v in part.moments]


def adamw(value, moments, g, lr, decay, rates, corrections):
    """Apply the rule of symexplin.optim.adamw in place."""
    m, v = moments
    value *= 1.0 - lr * decay
    m.lerp_(g, 1.0 - rates.beta1)
    v.mul_(rates.beta2).addcmul_(g, g, value=1.0 - rates.beta2)
    value -= m / (v.sqrt() / math.sqrt(corrections[1]) + rates.eps) * (lr / corrections[0])


def bits(tensor):
    """Return a tensor's bits as Python's integers, by row."""
    rows = tensor.cpu().reshape(tensor.shape if tensor.dim() == 2 else (1, -1))
    return rows.view(torch.int16 if tensor.element_size() == 2 else torch.int32).tolist()


def marks(tensor):
    """Return a tensor's marks by their definition."""
    sums = [0, 0]
    for i, row in enumerate(bits(tensor)):
        for j, b in enumerate(row):
            sums[0] += b * (2 * i + 1) * 2654435761
            sums[1] += b * (2 * i + 1) * (2 * j + 1) * 11400714819323
    return [(s + 2**63) % 2**64 - 2**63 for s in sums]


def compare(config, part, values, moments, norm, factor):
    """Compare one part after a step with the step in float64."""
    g, rates = part.grad.double().cpu(), part.rates
    corrections = [float(c) for c in rates.corrections]
    if config is None:
        pulled = [g]
    else:
        layout = Layout(tuple(part.raw.shape), 0, 7.5, config)
        coordinates = Coordinates(layout, *values)
        pulled = [coordinates.pullback(g).raw, *(gradient.double().cpu() for gradient in part.gradients)]
        near(layout, values[0], values[1:], (None, *part.gradients), g, growth_of(layout, values[0], values[1:]))
    assert math.isclose(norm, float(pulled[0].norm()), rel_tol=2e-5), (norm, pulled[0].norm())
    adamw(values[0], moments[0], pulled[0] * factor, float(rates.lr), rates.decay, rates, corrections[:2])
    for k, value in enumerate(values[1:] if config is not None else ()):
        spread = (1, -1) if k == 0 else (-1, 1) if k == 1 and value.dim() == 2 else (-1,)
        lr, decay = (
            torch.tensor([float(x) for x in n[k]]).double().reshape(spread) for n in (rates.panel_lr, rates.panel_decay)
        )
        if value.numel():
            adamw(value, moments[1 + k], pulled[1 + k] * factor, lr, decay, rates, corrections[2:])
    wanted = [*values, *itertools.chain(*moments)]
    now = [part.raw, *part.panels, *itertools.chain(*part.moments)]
    for one, other in zip(now, wanted, strict=True):
        torch.testing.assert_close(one.double().cpu(), other.reshape(one.shape), rtol=2e-5, atol=2e-6)
    if config is None and part.weight is not None:
        assert torch.equal(part.weight, part.raw.to(part.weight.dtype))


def as_tensors(rates, device):
    """Return rates as a captured step has them."""
    put = functools.partial(torch.tensor, device=device, dtype=torch.float32)
    panels = tuple(tuple(put(x) for x in group) for group in rates.panel_lr)
    return rates._replace(lr=put(rates.lr), corrections=tuple(put(c) for c in rates.corrections), panel_lr=panels)
