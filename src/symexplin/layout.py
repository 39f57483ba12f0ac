"""Structured scales as packed panels: where each learned vector lives.

Every pattern of section 4.4 is a few vectors along the two tensor dimensions plus numbers. They are packed in

    panel0 (shape[0], P0)    panel1 (P1, shape[1])    scalar (P2,)

named by tensor dimension, not by "row" and "column": a transposed weight (out_dim = 1) swaps the latter. A
bias, being 1-D, has panel0 and scalar alone.
"""

import functools
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from symexplin.config import DECAYED_ROLES, SELConfig
from symexplin.transform import Form

__all__ = ["PANELS", "Layout", "Slot"]

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
    lr_scale: float  # on top of k: 1/beta for delta (paper, section 4.2)


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
    form: Form = field(init=False, repr=False, compare=False)  # the fixed part of the map
    # Every learned vector in a fixed order: by role, then along the outputs, then along the inputs.
    slots: tuple[Slot, ...] = field(init=False, repr=False, compare=False)
    panel_shapes: dict[str, tuple[int, ...]] = field(init=False, repr=False, compare=False)

    @staticmethod
    def of(shape: tuple[int, ...], out_dim: int, beta: float, config: str) -> "Layout":
        """Return the layout of a configuration given as JSON; the same one for the same arguments."""
        return _layout_of(shape, out_dim, beta, config)

    def __post_init__(self) -> None:
        """Work out what follows; not when first asked for, which torch.compile may be the first to do."""
        object.__setattr__(self, "form", Form(self.config.mode, self.beta, self.config.normalize))
        object.__setattr__(self, "slots", self._slots())
        object.__setattr__(self, "panel_shapes", {panel: self._panel_shape(panel) for panel in PANELS})

    def _slots(self) -> tuple[Slot, ...]:
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
        return self.panel_shapes[panel]

    def _panel_shape(self, panel: str) -> tuple[int, ...]:
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
        generator = torch.Generator("cpu").manual_seed(self.config.seed * 1_000_003 + position)
        for slot in self.slots:
            view = self.view(slot, panels[slot.panel])
            if slot.start is None:
                draw = torch.rand(view.shape, generator=generator, dtype=torch.float64, device="cpu")
                view.copy_((2.0 * draw - 1.0) / math.sqrt(slot.count))
            else:
                view.fill_(slot.start)
        return panels

    def view(self, slot: Slot, panel: Tensor) -> Tensor:
        """Return the part of its panel that a slot takes; a dimension in front of a panel's own counts tensors."""
        if slot.panel == "scalar":
            return panel[..., slot.index]
        if slot.panel == "panel1":
            return panel[..., slot.index : slot.index + slot.count, :]
        if len(self.shape) == 1:
            return panel[..., slot.index]
        return panel[..., slot.index : slot.index + slot.count]

    def by_role(self, role: str) -> list[Slot]:
        """Return the slots of a role, that of panel0 first."""
        return sorted((slot for slot in self.slots if slot.role == role), key=lambda slot: slot.panel)


@functools.cache
def _layout_of(shape: tuple[int, ...], out_dim: int, beta: float, config: str) -> Layout:
    return Layout(shape, out_dim, beta, SELConfig.from_json(config))
