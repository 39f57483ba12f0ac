"""Structured scales as packed panels: where each learned vector lives, what it expands to, how it is pulled back.

Every pattern of section 3.4 is a few vectors along the two tensor dimensions plus numbers. They are packed in

    panel0 (shape[0], P0)    panel1 (P1, shape[1])    scalar (P2,)

named by tensor dimension, not by "row" and "column": a transposed weight (out_dim = 1) swaps the latter. A
bias, being 1-D, has panel0 and scalar alone.
"""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from symexplin.config import DECAYED_ROLES, SELConfig
from symexplin.inversion import invert
from symexplin.transform import Form, Scales, Value, compute_dtype, forward, pullback

__all__ = ["PANELS", "Coordinates", "Layout", "Slot"]

PANELS = ("panel0", "panel1", "scalar")


@dataclass(frozen=True)
class Slot:
    """One learned vector, number or LoRA factor: `count` columns of a panel from `index` on."""

    name: str  # as the module home names its parameter: "e_row", "m_column", "delta_A"
    role: str  # the configuration key: e, l, m, n, s, delta
    panel: str  # "panel0", "panel1" or "scalar"
    index: int
    count: int
    start: float | None  # None: drawn at random (LoRA's A)
    decay: bool
    lr_scale: float  # on top of k: 1/beta for delta (paper, section 3.2)


@dataclass(frozen=True)
class Layout:
    """The static side of one curved tensor: its shape, its map and the place of every learned scale.

    Args:
        shape: (d0, d1) of a weight or (d0,) of a bias.
        out_dim: which dimension of a weight counts outputs: 0 for `nn.Linear`, 1 for transformers' `Conv1D`.
        beta: the reference curvature (a bias takes its weight's).
        config: the configuration.

    >>> layout = Layout((3, 2), 0, 7.5, SELConfig(beta=7.5))
    >>> [(slot.name, slot.panel, slot.index) for slot in layout.slots][:2]
    [('e_row', 'panel0', 0), ('e_column', 'panel1', 0)]
    """

    shape: tuple[int, ...]
    out_dim: int
    beta: float
    config: SELConfig

    @functools.cached_property
    def form(self) -> Form:
        """The fixed part of the map."""
        return Form(self.config.mode, self.beta, self.config.normalize)

    @functools.cached_property
    def slots(self) -> tuple[Slot, ...]:
        """Every learned vector in a fixed order: by role, then along the outputs, then along the inputs."""
        slots: list[Slot] = []
        used = dict.fromkeys(PANELS, 0)
        for role in self.config.learned_roles:
            stem = "a" if self._is_log(role) else role
            scale = 1.0 / self.beta if role == "delta" else 1.0
            for suffix, panel, count, start in self._drafts(role):
                name = f"{stem}_{suffix}" if suffix else stem
                decay = role in DECAYED_ROLES
                slots.append(Slot(name, role, panel, used[panel], count, start, decay, scale))
                used[panel] += count
        return tuple(slots)

    def pattern(self, role: str) -> str:
        """Return the pattern of a role's learned numbers here.

        Every vector pattern of a bias is "row", and it has no delta. The absorbed curvature is learned as its
        logarithm, where the product of factors is a sum.
        """
        pattern: str = getattr(self.config, role).pattern
        if len(self.shape) == 1 and pattern not in ("fixed", "global"):
            return "fixed" if role == "delta" else "row"
        return "row_col_add" if pattern == "row_col_mult" and self._is_log(role) else pattern

    def _is_log(self, role: str) -> bool:
        return role == "m" and self.config.curvature == "absorbed"

    def _drafts(self, role: str) -> list[tuple[str, str, int, float | None]]:
        """Return (name suffix, panel, count, start) of a role's slots."""
        scale = getattr(self.config, role)
        start = math.log(self.beta * scale.start) if self._is_log(role) else scale.start
        rows, columns = ("panel0", "panel1") if self.out_dim == 0 else ("panel1", "panel0")
        pattern = self.pattern(role)
        if pattern == "fixed":  # the delta of a bias
            return []
        if pattern == "global":
            return [("", "scalar", 1, start)]
        if pattern == "row":
            return [("row", rows, 1, start)]
        if pattern == "column":
            return [("column", columns, 1, start)]
        if pattern == "lora":
            return [("A", rows, scale.rank, None), ("B", columns, scale.rank, 0.0)]
        if pattern == "row_col_add":
            return [("row", rows, 1, start / 2), ("column", columns, 1, start / 2)]
        root = math.sqrt(abs(start))
        return [("row", rows, 1, math.copysign(root, start)), ("column", columns, 1, root)]

    def width(self, panel: str) -> int:
        """Return how many columns (rows for panel1, numbers for scalar) a panel has."""
        return sum(slot.count for slot in self.slots if slot.panel == panel)

    def panel_shape(self, panel: str) -> tuple[int, ...]:
        """Return the shape of a panel."""
        if panel == "scalar":
            return (self.width(panel),)
        if panel == "panel0":
            return (self.shape[0], self.width(panel))
        return (self.width(panel), self.shape[1] if len(self.shape) == 2 else 0)

    def start_panels(self, dtype: torch.dtype, device: torch.device, position: int) -> dict[str, Tensor]:
        """Return the panels at their start.

        LoRA's A is uniform on +-1/sqrt(rank), as a linear layer's weight (assumption), drawn in float64 from a
        generator seeded by the configuration's seed and the parameter's `position` in the model.
        """
        panels = {p: torch.empty(self.panel_shape(p), dtype=dtype, device=device) for p in PANELS}
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + position)
        for slot in self.slots:
            view = self.view(slot, panels[slot.panel])
            if slot.start is None:
                draw = torch.rand(view.shape, generator=generator, dtype=torch.float64)
                view.copy_((2.0 * draw - 1.0) / math.sqrt(slot.count))
            else:
                view.fill_(slot.start)
        return panels

    def view(self, slot: Slot, panel: Tensor) -> Tensor:
        """Return the part of its panel that a slot takes, as it broadcasts against the tensor."""
        if slot.panel == "scalar":
            return panel[slot.index]
        if slot.panel == "panel1":
            return panel[slot.index : slot.index + slot.count]
        if len(self.shape) == 1:
            return panel[:, slot.index]
        return panel[:, slot.index : slot.index + slot.count]

    def by_role(self, role: str) -> list[Slot]:
        """Return the slots of a role, that of panel0 first."""
        return sorted((slot for slot in self.slots if slot.role == role), key=lambda slot: slot.panel)


class Coordinates(NamedTuple):
    """A curved tensor seen through its map: a view of the raw weight and panels, owning no storage.

    >>> layout = Layout((3, 2), 0, 7.5, SELConfig(beta=7.5))
    >>> panels = layout.start_panels(torch.float64, torch.device("cpu"), position=0)
    >>> coordinates = Coordinates(layout, torch.zeros(3, 2, dtype=torch.float64), **panels)
    >>> w = torch.tensor([[0.1, -0.2], [0.0, 1e-9], [2.0, -3.0]], dtype=torch.float64)
    >>> torch.allclose(coordinates._replace(raw=coordinates.matched(w)).effective(), w, rtol=1e-14, atol=0)
    True
    """

    layout: Layout
    raw: Tensor
    panel0: Tensor
    panel1: Tensor
    scalar: Tensor

    def scales(self) -> Scales:
        """Expand the panels to the scales of the map, each broadcasting against the raw weight."""
        layout = self.layout
        kappa: Value = layout.beta
        if "m" in layout.config.roles:
            kappa = self._curvature()
        values = {role: self._value(role) for role in ("e", "l", "n", "s") if role in layout.config.roles}
        delta = self._value("delta") if layout.by_role("delta") else None
        return Scales(kappa=kappa, delta=delta if isinstance(delta, Tensor) else None, **values)

    def effective(self) -> Tensor:
        """Return the effective weight (paper, Eq. 7)."""
        return forward(self.layout.form, self.raw, self.scales())

    def matched(self, w: Tensor, where: Tensor | None = None) -> Tensor:
        """Return the raw weight at which this map, with its present scales, is `w`.

        With a mask `where`, only its entries are inverted; the others keep the present raw weight.

        Raises:
            ValueError: an entry to invert is not finite or has no inverse.
        """
        scales = self.scales()
        if scales.delta is not None:
            w = w.to(compute_dtype(w)) - scales.delta
        scales = scales._replace(delta=None)
        if where is None:
            return invert(self.layout.form, w, scales)
        chosen = (v.expand(w.shape)[where] if isinstance(v, Tensor) else v for v in scales)
        raw = self.raw.clone()
        raw[where] = invert(self.layout.form, w[where], Scales(*chosen)).to(raw.dtype)  # type: ignore[arg-type]
        return raw

    def pullback(self, g: Tensor) -> "Coordinates":
        """Return the gradients by raw weight and panels, in the same places, for a gradient `g` of the weight."""
        layout, scales = self.layout, self.scales()
        wanted = frozenset("kappa" if slot.role == "m" else slot.role for slot in layout.slots)
        pulled = pullback(layout.form, self.raw, scales, g, wanted)
        if "kappa" in pulled:
            absorbed = layout.config.curvature == "absorbed"
            pulled["m"] = pulled.pop("kappa") * (scales.kappa if absorbed else layout.beta)
        parts: dict[str, list[Tensor]] = {panel: [] for panel in PANELS}
        for slot in layout.slots:
            part = self._contract(slot, pulled[slot.role])
            parts[slot.panel].append(part.reshape(-1, 1) if part.dim() == 1 and slot.panel == "panel0" else part)
        return Coordinates(
            layout,
            pulled["w"],
            torch.cat(parts["panel0"], dim=1) if parts["panel0"] else torch.zeros_like(self.panel0),
            torch.cat(parts["panel1"], dim=0) if parts["panel1"] else torch.zeros_like(self.panel1),
            torch.stack(parts["scalar"]) if parts["scalar"] else torch.zeros_like(self.scalar),
        )

    def _factors(self, role: str) -> list[Tensor]:
        return [self.layout.view(slot, getattr(self, slot.panel)) for slot in self.layout.by_role(role)]

    def _value(self, role: str) -> Value:
        start: float = getattr(self.layout.config, role).start
        return _combine(self.layout.pattern(role), start, self._factors(role))

    def _curvature(self) -> Value:
        """Return kappa: beta m, or exp(a) (paper, Eq. 3)."""
        layout = self.layout
        pattern, start, factors = layout.pattern("m"), layout.config.m.start, self._factors("m")
        if layout.config.curvature == "absorbed":
            if pattern == "lora":
                return layout.beta * start * torch.exp(factors[0] @ factors[1])
            # exp(a) exp(b), not exp(a + b): one rounding of a sum less in an exponent of the map's exponent.
            return _combine("row_col_mult", layout.beta * start, [torch.exp(f) for f in factors])
        return layout.beta * _combine(pattern, start, factors)

    def _contract(self, slot: Slot, g: Tensor) -> Tensor:
        """Sum a full-size cotangent of the slot's role to the slot's shape."""
        if slot.panel == "scalar":
            return g.sum()
        if g.dim() == 1:
            return g
        pattern, along = self.layout.pattern(slot.role), 1 if slot.panel == "panel0" else 0
        if pattern in ("row_col_mult", "lora"):
            other = self._factors(slot.role)[along]
            if pattern == "lora":
                return g @ other.mT if along == 1 else other.mT @ g
            g = g * other
        return g.sum(dim=along, keepdim=True)


def _combine(pattern: str, start: float, factors: list[Tensor]) -> Value:
    """Return the value of a scale from its factors, that along dimension 0 first."""
    if not factors:
        return start
    if len(factors) == 1:
        return factors[0]
    if pattern == "lora":
        return start + factors[0] @ factors[1]
    return factors[0] + factors[1] if pattern == "row_col_add" else factors[0] * factors[1]
