"""A linear layer that stores raw weights."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from symexplin.config import SELConfig, check_config
from symexplin.coordinates import Coordinates
from symexplin.layout import PANELS, Layout, Slot
from symexplin.ops import Key, effective_op, key_of, pullback_op
from symexplin.starts import start_weight
from symexplin.transform import compute_dtype

__all__ = ["SELLinear"]


class _Curve(NamedTuple):
    """A map and, where kernels compute it, its key in the graphs of torch.compile."""

    layout: Layout
    key: Key | None

    def coordinates(self, parts: Sequence[Tensor]) -> Coordinates:
        """Return the tensor with its map, in the compute dtype."""
        dtype = compute_dtype(*parts)
        return Coordinates(self.layout, *(part.to(dtype) for part in parts))

    def effective(self, coordinates: Coordinates, dtype: torch.dtype) -> Tensor:
        """Return the effective weight in `dtype`."""
        if self.key is not None and torch.compiler.is_compiling():
            value: Tensor = effective_op(*coordinates[1:], *self.key, dtype)
            return value
        return coordinates.effective(dtype)

    def gradients(self, coordinates: Coordinates, g: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients by `parts` for a gradient `g` of the effective weight."""
        if self.key is not None and torch.compiler.is_compiling():
            pulled: Sequence[Tensor] = pullback_op(*coordinates[1:], g.contiguous(), *self.key)
        else:
            pulled = coordinates.pullback(g)[1:]
        return [grad.to(part.dtype) for grad, part in zip(pulled, parts, strict=True)]


class _EffectiveWeight(torch.autograd.Function):
    """raw, panels -> effective weight in their dtype; saves only its inputs."""

    @staticmethod
    def forward(ctx: Any, curve: _Curve, *parts: Tensor) -> Tensor:
        ctx.curve = curve
        ctx.save_for_backward(*parts)
        return curve.effective(curve.coordinates(parts), parts[0].dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        parts = ctx.saved_tensors
        return None, *ctx.curve.gradients(ctx.curve.coordinates(parts), g, parts)


class _CurvedLinear(torch.autograd.Function):
    """x, bias, raw, panels -> x w_eff^T + bias; saves x, raw and panels, and recomputes w_eff in backward."""

    @staticmethod
    def forward(ctx: Any, curve: _Curve, x: Tensor, bias: Tensor | None, *parts: Tensor) -> Tensor:
        ctx.curve = curve
        ctx.save_for_backward(x, *parts)
        return F.linear(x, curve.effective(curve.coordinates(parts), x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (x, *parts), curve = ctx.saved_tensors, ctx.curve
        coordinates = curve.coordinates(parts)
        rows = g.reshape(-1, g.shape[-1])
        g_x = g @ curve.effective(coordinates, g.dtype) if ctx.needs_input_grad[1] else None
        g_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        if not any(ctx.needs_input_grad[3:]):
            return None, g_x, g_bias, *(None for _ in parts)
        return None, g_x, g_bias, *curve.gradients(coordinates, rows.mT @ x.reshape(-1, x.shape[-1]), parts)


class SELLinear(nn.Linear):
    """A linear layer in curved weight space: ``y = x w_eff(raw_weight)^T + b_eff(raw_bias)`` (paper, Eq. 7).

    Its parameters are `raw_weight`, `raw_bias` and the learned scales (`e_row`, `m_column`, ..., `bias_e_row`).
    `weight` and `bias` are the effective values: computed on access, read-only and differentiable. The input, the raw
    weight and vectors are saved for backward; the effective weight is recomputed. Under autocast the product runs in
    the autocast dtype, the map in float32. Hooks and attributes of a replaced layer are lost.

    Args:
        in_features, out_features, bias, device, dtype: as in `nn.Linear`, whose initial weights are the targets.
        config: the map and its start; include and exclude are ignored. The width is the larger of both sizes.

    >>> layer = SELLinear(8, 4)
    >>> layer(torch.zeros(2, 8)).shape, layer.raw_weight.shape
    (torch.Size([2, 4]), torch.Size([4, 8]))
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        config: SELConfig | None = None,
    ) -> None:
        config = check_config(config).resolve(max(in_features, out_features)).check_inverse()
        layouts = [Layout((out_features, in_features), "oi", config)]
        if bias:
            layouts.append(Layout((out_features,), "o", config))
        self._build(nn.Linear(in_features, out_features, bias, device, dtype), layouts, 0)

    @classmethod
    def from_linear(cls, linear: nn.Linear, weight: Layout, bias: Layout | None, position: int) -> "SELLinear":
        """Return the curved layer with the effective values of `linear`, or with their mismatched start."""
        layer = cls.__new__(cls)
        layer._build(linear, [weight] if bias is None else [weight, bias], position)
        return layer

    @torch.no_grad()
    def _build(self, linear: nn.Linear, layouts: list[Layout], position: int) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.linear_type = type(linear)
        self.weight_layout = layouts[0]
        self.bias_layout = layouts[1] if len(layouts) > 1 else None
        self._curves = [_Curve(layout, key_of(layout)) for layout in layouts]
        for offset, (prefix, layout) in enumerate(self._sides()):
            plain = getattr(linear, "bias" if prefix else "weight")
            target = start_weight(plain, layout)
            dtype = compute_dtype(target)
            panels = layout.start_panels(dtype, plain.device, position + offset)
            raw = Coordinates(layout, target, **panels).matched(target)
            self._own("raw_bias" if prefix else "raw_weight", raw.to(plain.dtype), plain.requires_grad)
            for slot in layout.slots:
                value = layout.view(slot, panels[slot.panel]).to(plain.dtype)
                single = slot.count == 1 and slot.panel in ("panel0", "panel1")
                self._own(prefix + slot.name, value.reshape(-1) if single else value)
        if self.bias_layout is None:
            self.register_parameter("raw_bias", None)
        self.train(linear.training)

    def _own(self, name: str, value: Tensor, requires_grad: bool = True) -> None:
        self.register_parameter(name, nn.Parameter(value.clone(), requires_grad=requires_grad))

    def _sides(self) -> list[tuple[str, Layout]]:
        sides = [("", self.weight_layout)]
        return sides if self.bias_layout is None else [*sides, ("bias_", self.bias_layout)]

    def reset_parameters(self) -> None:
        """Draw new weights as `nn.Linear` does, and start from them."""
        raw = cast(Tensor, self.raw_weight)
        fresh = nn.Linear(self.in_features, self.out_features, self.raw_bias is not None, raw.device, raw.dtype)
        other = SELLinear.from_linear(fresh, self.weight_layout, self.bias_layout, 0)
        self.load_state_dict(other.state_dict())

    def sel_roles(self) -> dict[str, Slot | None]:
        """Return the slot of every scale parameter by its local name; None for raw weights and biases."""
        roles: dict[str, Slot | None] = {"raw_weight": None}
        if self.raw_bias is not None:
            roles["raw_bias"] = None
        for prefix, layout in self._sides():
            roles |= {prefix + slot.name: slot for slot in layout.slots}
        return roles

    def parts(self, bias: bool = False) -> tuple[Tensor, ...]:
        """Return (raw, *panels) of the weight or the bias; panels are packed from the parameters."""
        layout, prefix = (self.bias_layout, "bias_") if bias else (self.weight_layout, "")
        assert layout is not None
        raw = cast(Tensor, self.raw_bias if bias else self.raw_weight)
        panels: dict[str, list[Tensor]] = {panel: [] for panel in PANELS}
        for slot in layout.slots:
            value = getattr(self, prefix + slot.name)
            shapes = {"panel0": (-1, slot.count), "panel1": (slot.count, -1), "scalar": (1,), "full": (*value.shape, 1)}
            panels[slot.panel].append(value.reshape(shapes[slot.panel]))
        packed = (
            torch.cat(panels[p], dim=0 if p == "panel1" else -1) if panels[p] else raw.new_empty(layout.panel_shape(p))
            for p in PANELS
        )
        return (raw, *packed)

    @torch.no_grad()
    def effective(self) -> list[Tensor]:
        """Return the effective weight and the bias, if any, in the compute dtype."""
        return [curve.coordinates(self.parts(bool(bias))).effective() for bias, curve in enumerate(self._curves)]

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The effective weight, (out_features, in_features), in the dtype of the raw weight; read-only."""
        value: Tensor = _EffectiveWeight.apply(self._curves[0], *self.parts())  # type: ignore[no-untyped-call]
        return value.to(cast(Tensor, self.raw_weight).dtype)

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        """The effective bias, (out_features,), or None; read-only."""
        if self.bias_layout is None:
            return None
        value: Tensor = _EffectiveWeight.apply(self._curves[1], *self.parts(bias=True))  # type: ignore[no-untyped-call]
        return value.to(cast(Tensor, self.raw_bias).dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input w_eff^T + b_eff``."""
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        bias = self.bias
        product: Tensor = _CurvedLinear.apply(  # type: ignore[no-untyped-call]
            self._curves[0], input.to(dtype), None if bias is None else bias.to(dtype), *self.parts()
        )
        return product

    def extra_repr(self) -> str:
        """Describe the layer as `nn.Linear` does, with its map."""
        layout = self.weight_layout
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias_layout is not None}, "
            f"mode={layout.config.mode!r}, beta={layout.beta:.4g}"
        )

    @torch.no_grad()
    def to_linear(self) -> nn.Linear:
        """Return a plain layer with the effective values, of the class that was converted."""
        raw, bias = cast(Tensor, self.raw_weight), self.bias
        linear = self.linear_type.__new__(self.linear_type)
        nn.Linear.__init__(linear, self.in_features, self.out_features, bias is not None, "meta", raw.dtype)
        linear.weight = nn.Parameter(self.weight, requires_grad=raw.requires_grad)
        if bias is not None:
            linear.bias = nn.Parameter(bias, requires_grad=cast(Tensor, self.raw_bias).requires_grad)
        return linear.train(self.training)
