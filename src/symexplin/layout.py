"""Structured scales as packed panels: the place of each learned vector.

Every pattern of section 4.4 but "elementwise" consists of vectors along the two tensor dimensions and of numbers. They
are packed in

    panel0 (shape[0], P0)    panel1 (P1, shape[1])    scalar (P2,)    full (shape[0], shape[1], P3)

Panels are named by tensor dimension, because "row" and "column" swap in a transposed weight. A bias is 1-D and has only
panel0 and scalar. The elementwise numbers in `full` are sharded as the weight is. The panels of a tensor that is not a
matrix have the dimensions of its rows and columns (:mod:`symexplin.axes`), behind that of the stack if it is one.
"""

import functools
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from symexplin.axes import Axes, axes_of
from symexplin.config import DECAYED_ROLES, SELConfig
from symexplin.transform import Form

__all__ = ["PANELS", "VECTORS", "Layout", "Slot"]

VECTORS = ("panel0", "panel1", "scalar")
PANELS = (*VECTORS, "full")


@dataclass(frozen=True)
class Slot:
    """One learned vector, number, matrix or LoRA factor: `count` columns of a panel, starting at `index`."""

    name: str  # name of the parameter in SELLinear: "e_row", "log_m_column", "a_row" (absorbed), "delta_A"
    role: str  # the configuration key: e, l, m, n, s, delta
    panel: str  # one of PANELS
    index: int
    count: int
    start: float | None  # None: drawn at random (LoRA's A)
    decay: bool
    lr_scale: float  # factor besides k: 1/beta for delta (paper, section 4.2)


@dataclass(frozen=True)
class Layout:
    """The static description of one curved tensor: its shape, its map and the place of every learned scale.

    Args:
        shape: that of the weight or bias.
        letters: its axes (:mod:`symexplin.axes`): "oi" for the weight of `nn.Linear`, "o" for a bias.
        config: the configuration of the model. One that is not resolved gets the numbers of a model that has this
            tensor alone.

    >>> from symexplin.presets import preset
    >>> layout = Layout((3, 2), "oi", preset("paper"))
    >>> [(slot.name, slot.panel, slot.index) for slot in layout.slots][:2]
    [('e_row', 'panel0', 0), ('e_column', 'panel1', 0)]
    """

    shape: tuple[int, ...]
    letters: str
    config: SELConfig
    axes: Axes = field(init=False, repr=False, compare=False)
    form: Form = field(init=False, repr=False, compare=False)  # the fixed part of the map
    matrix: "Layout" = field(init=False, repr=False, compare=False)  # that of one matrix; itself for a matrix or vector
    # Every learned vector in a fixed order: by role, outputs before inputs.
    slots: tuple[Slot, ...] = field(init=False, repr=False, compare=False)
    panel_shapes: dict[str, tuple[int, ...]] = field(init=False, repr=False, compare=False)

    @staticmethod
    def of(shape: tuple[int, ...], letters: str, config: str) -> "Layout":
        """Return the layout of a configuration given as JSON; equal arguments give the same object."""
        return _layout_of(shape, letters, config)

    def __post_init__(self) -> None:
        """Compute the derived fields now: computed lazily, they could be first needed inside torch.compile."""
        axes = axes_of(self.letters)
        sides = axes.matrix_shape(self.shape)
        object.__setattr__(self, "axes", axes)
        object.__setattr__(self, "config", self.config.resolve(max(sides)))
        object.__setattr__(self, "form", Form(self.config.mode, self.beta, self.config.normalize))
        object.__setattr__(self, "slots", self._slots())
        widths = {panel: self.width(panel) for panel in PANELS}
        object.__setattr__(self, "panel_shapes", axes.panel_shapes(self.shape, widths))
        matrix = self if axes.is_matrix else Layout(sides, axes.matrix_letters, self.config)
        object.__setattr__(self, "matrix", matrix)

    @property
    def beta(self) -> float:
        """The reference curvature."""
        return float(self.config.beta)

    def _slots(self) -> tuple[Slot, ...]:
        slots: list[Slot] = []
        used = dict.fromkeys(PANELS, 0)
        for role in self.config.learned_roles:
            stem = "a" if self.is_absorbed(role) else f"log_{role}" if self.is_log(role) else role
            scale = 1.0 / self.beta if role == "delta" else 1.0
            for suffix, panel, count, start in self._drafts(role):
                name = f"{stem}_{suffix}" if suffix else stem
                decay = role in DECAYED_ROLES and not self.is_log(role)
                slots.append(Slot(name, role, panel, used[panel], count, start, decay, scale))
                used[panel] += count
        return tuple(slots)

    def pattern(self, role: str) -> str:
        """Return the pattern of a role's learned numbers in this tensor.

        Every vector pattern of a bias is "row". A bias has no delta. What is learned as its logarithm has the sum of
        its factors' logarithms for their product.
        """
        pattern: str = getattr(self.config, role).pattern
        if not self.axes.columns and pattern not in ("fixed", "global"):
            return "fixed" if role == "delta" else "row"
        return "row_col_add" if pattern == "row_col_mult" and self.is_log(role) else pattern

    def is_absorbed(self, role: str) -> bool:
        """Whether a role's numbers are those of the absorbed curvature, a = ln(kappa)."""
        return role == "m" and self.config.curvature == "absorbed"

    def is_log(self, role: str) -> bool:
        """Whether a role is learned as its logarithm: the absorbed curvature, and scales under transform "exp"."""
        return self.is_absorbed(role) or getattr(self.config, role).transform == "exp"

    def first(self, role: str) -> float:
        """Return the first value of a role; for the absorbed curvature that of kappa."""
        first: float = getattr(self.config, role).first
        return self.beta * first if self.is_absorbed(role) else first

    def _drafts(self, role: str) -> list[tuple[str, str, int, float | None]]:
        """Return (name suffix, panel, count, start) of a role's slots."""
        scale = getattr(self.config, role)
        start = math.log(self.first(role)) if self.is_log(role) else self.first(role)
        rows, columns = ("panel0", "panel1") if self.axes.out_dim == 0 else ("panel1", "panel0")
        pattern = self.pattern(role)
        if pattern == "fixed":  # the delta of a bias
            return []
        if pattern == "global":
            return [("", "scalar", 1, start)]
        if pattern == "elementwise":
            return [("full", "full", 1, start)]
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
        """Return the number of vectors in panel0 or panel1, of entries in scalar or of matrices in full."""
        return sum(slot.count for slot in self.slots if slot.panel == panel)

    def panel_shape(self, panel: str) -> tuple[int, ...]:
        """Return the shape of a panel."""
        return self.panel_shapes[panel]

    def start_panels(self, dtype: torch.dtype, device: torch.device, position: int) -> dict[str, Tensor]:
        """Return the panels with their start values.

        LoRA's A is uniform on +-1/sqrt(rank), as a linear layer's weight (assumption). It is drawn in float64 from a
        generator whose seed combines the configuration's seed and the parameter's `position` in the model.
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
        """Return the slot's part of its panel, which may have leading dimensions."""
        if slot.panel in ("scalar", "full") or not self.axes.columns:
            return panel[..., slot.index]
        return panel.narrow(self.axes.vectors_dim(slot.panel), slot.index, slot.count)

    def by_role(self, role: str) -> list[Slot]:
        """Return the slots of a role, the one of panel0 first."""
        return sorted((slot for slot in self.slots if slot.role == role), key=lambda slot: slot.panel)


@functools.cache
def _layout_of(shape: tuple[int, ...], letters: str, config: str) -> Layout:
    return Layout(shape, letters, SELConfig.from_json(config))
