"""Cross entropy behind an output head whose logits never exist all at once."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

__all__ = ["chunked_loss", "cross_entropy"]

_IGNORED = -100  # target that the loss leaves out, as in torch


def chunked_loss(x: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """Return the mean over targets of -log softmax(x weight^T)[target], in nats and at least float32.

    Each chunk's gradient is computed with its loss, so that no logits are kept and none are computed twice.

    Args:
        x: (tokens, width).
        weight: of the head, (vocabulary, width).
        targets: int64 (tokens,); -100 is left out.
        chunk: tokens whose logits exist at once.

    >>> x, weight, targets = torch.ones(6, 2), torch.ones(4, 2), torch.tensor([0, 1, 2, 3, 3, -100])
    >>> chunked_loss(x, weight, targets, chunk=4)
    tensor(1.3863)
    """
    if torch.is_grad_enabled():
        total: Tensor = _ChunkedLoss.apply(x, weight, targets, chunk)  # type: ignore[no-untyped-call]
    else:
        pieces = zip(torch.split(x, chunk), torch.split(targets, chunk), strict=True)
        total = torch.stack([cross_entropy(functional.linear(a, weight), b, "sum") for a, b in pieces]).sum()
    count = (targets != _IGNORED).sum()
    # Without a target the mean is NaN, as torch's, and the gradients are 0, not 0 times an infinite one.
    return torch.where(count > 0, total / count.clamp(min=1), math.nan)


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Return torch's cross entropy of `logits` (tokens, vocabulary), computed in at least float32.

    >>> cross_entropy(torch.zeros(2, 4, dtype=torch.bfloat16), torch.tensor([1, -100]))
    tensor(1.3863)
    """
    return functional.cross_entropy(_wide(logits), targets, ignore_index=_IGNORED, reduction=reduction)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
        """Sum the losses of all chunks and keep the gradients of that sum: softmax(logits) less one at each target."""
        ctx.dtypes = x.dtype, weight.dtype
        if torch.is_autocast_enabled(x.device.type):
            low = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(low), weight.to(low)
        losses, grads = [], []
        total = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        for piece, target in zip(torch.split(x, chunk), torch.split(targets, chunk), strict=True):
            chances = _wide(functional.linear(piece, weight)).log_softmax(-1)
            losses.append(functional.nll_loss(chances, target, ignore_index=_IGNORED, reduction="sum"))
            chances = chances.exp_()
            kept = (target != _IGNORED).unsqueeze(-1)
            chances.scatter_add_(-1, target.clamp(min=0).unsqueeze(-1), torch.full_like(chances[:, :1], -1.0))
            error = chances.mul_(kept).to(weight.dtype)
            grads.append(error @ weight)
            total += error.T @ piece
        ctx.save_for_backward(torch.cat(grads), total)
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Scale what was kept."""
        x, weight = (kept * grad for kept in ctx.saved_tensors)
        return x.to(ctx.dtypes[0]), weight.to(ctx.dtypes[1]), None, None
