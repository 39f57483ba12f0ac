"""RMSNorm (Zhang and Sennrich 2019) with its own derivative on the CPU, where torch takes it apart into small steps."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

__all__ = ["RMSNorm"]


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension: torch's layer, with its parameters.

    Elsewhere, where it is compiled, and in half precision, which torch sums in float32, it is torch's.

    >>> RMSNorm(2, eps=1e-6)(torch.tensor([3.0, 4.0])) * 12.5**0.5
    tensor([3.0000, 4.0000], grad_fn=<MulBackward0>)
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., size) to the same shape."""
        own = x.device.type == "cpu" and x.dtype == self.weight.dtype and x.dtype in (torch.float32, torch.float64)
        if not own or torch.compiler.is_compiling():
            plain: Tensor = super().forward(x)
            return plain
        normed: Tensor = _Normed.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return normed


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """With r = 1 / sqrt(mean(x^2) + eps): x r weight."""
        length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # one pass, without a tensor of squares
        scale = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """With n = x r and g the gradient: r (g weight - n mean(g weight n)), and the sum of g n."""
        x, weight, scale = ctx.saved_tensors
        unit = x * scale
        along = grad * unit
        with torch.autocast("cpu", enabled=False):  # backward may be called inside of it
            mean = (along @ weight).div_(x.shape[-1]).unsqueeze(-1)
        return (grad * weight).sub_(unit.mul_(mean)).mul_(scale), along.reshape(-1, x.shape[-1]).sum(0), None
