"""A linear layer that stores raw weights."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from symexplin.config import SELConfig, check_config
from symexplin.curved import Curve, CurvedModule, curve_, curved_parts, effective_property
from symexplin.layout import Layout

__all__ = ["LINEAR_TYPES", "SELLinear"]

# Classes that compute the same as nn.Linear; the second is MultiheadAttention's out_proj.
LINEAR_TYPES = (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear)


class _CurvedLinear(torch.autograd.Function):
    """x, bias, raw, panels -> x w_eff^T + bias; saves x, raw and panels, and recomputes w_eff in backward."""

    @staticmethod
    def forward(ctx: Any, curve: Curve, x: Tensor, bias: Tensor | None, *parts: Tensor) -> Tensor:
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


class SELLinear(CurvedModule, nn.Linear):
    """A linear layer in curved weight space: ``y = x w_eff(raw_weight)^T + b_eff(raw_bias)`` (paper, Eq. 7).

    Its parameters are `raw_weight`, `raw_bias` and the learned scales (`e_row`, `m_column`, ..., `bias_e_row`).
    `weight` and `bias` are the effective values: computed on access, read-only and differentiable. The input, the raw
    weight and vectors are saved for backward; the effective weight is recomputed. Under autocast the product runs in
    the autocast dtype, the map in float32.

    Args:
        in_features, out_features, bias, device, dtype: as in `nn.Linear`, whose initial weights are the targets.
        config: the map and its start; include and exclude are ignored. The width is the larger of both sizes.

    >>> layer = SELLinear(8, 4)
    >>> layer(torch.zeros(2, 8)).shape, layer.raw_weight.shape
    (torch.Size([2, 4]), torch.Size([4, 8]))
    """

    weight = effective_property("weight")
    bias = effective_property("bias")

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
        plain = nn.Linear(in_features, out_features, bias, device, dtype)
        layouts = {"weight": Layout((out_features, in_features), "oi", config)}
        if bias:
            layouts["bias"] = Layout((out_features,), "o", config)
        parameters = zip(layouts.items(), plain.parameters(), strict=True)
        parts = {name: curved_parts(p, layout, i) for i, ((name, layout), p) in enumerate(parameters)}
        self.__dict__ = curve_(plain, SELLinear, layouts, parts).__dict__

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input w_eff^T + b_eff``."""
        if "weight" not in self.sel_curves:
            return F.linear(input, self.weight, self.bias)
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        bias = self.bias
        product: Tensor = _CurvedLinear.apply(  # type: ignore[no-untyped-call]
            self.sel_curves["weight"], input.to(dtype), None if bias is None else bias.to(dtype), *self.sel_parts()
        )
        return product
