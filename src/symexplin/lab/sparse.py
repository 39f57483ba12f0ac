"""Sparse weights: what a run does to the matrices of its blocks after each optimizer step."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.prune import L1Unstructured

from symexplin.lab.config import TrainConfig
from symexplin.lab.model import Transformer

__all__ = ["Sparsifier", "matrices", "prune_", "soft_threshold_", "sparsity_at"]

# Gradual pruning begins after the usual warm-up and leaves the last quarter of the steps to recover, with a new mask
# each hundredth of the steps (assumptions: Zhu and Gupta have values of their own for each model).
_BEGIN, _END, _MASKS = 0.1, 0.75, 100


def matrices(model: Transformer) -> list[Tensor]:
    """Return the weights that become sparse: the matrices of the linear layers of the blocks."""
    return [parameter.detach() for parameter in model.blocks.parameters() if parameter.dim() == 2]


@torch.no_grad()
def soft_threshold_(weights: Sequence[Tensor], amount: float, falloff: float = 0.0) -> None:
    """Move all entries towards zero by amount/(1 + falloff |w|), and no further.

    Without falloff the step of an L1 norm, sign(w) max(|w| - amount, 0). With it that of the log-sum penalty, L1 with
    weights renewed at each step (Candes, Wakin and Boyd, arXiv 0711.1612), which pulls less at large entries.

    >>> w = torch.tensor([0.5, -0.75, 0.1])
    >>> soft_threshold_([w], 0.25)
    >>> w.tolist()
    [0.25, -0.5, 0.0]
    """
    for weight in weights:
        size = weight.abs()
        weight.copy_(weight.sign() * (size - amount / (1.0 + falloff * size)).clamp_(min=0.0))


@torch.no_grad()
def prune_(weights: Sequence[Tensor], sparsity: float) -> None:
    """Set the smallest share `sparsity` of all entries together to zero."""
    sizes = torch.cat([weight.abs().flatten() for weight in weights])
    mask = L1Unstructured(amount=sparsity).compute_mask(sizes, torch.ones_like(sizes))  # type: ignore[no-untyped-call]
    for weight, part in zip(weights, mask.split([weight.numel() for weight in weights]), strict=True):
        weight.mul_(part.view_as(weight))


def sparsity_at(progress: float, final: float) -> float:
    """Return the share of zeros at a fraction of the steps: s (1 - (1 - x)^3), x from 0 to 1 while the share grows.

    Zhu and Gupta (arXiv 1710.01878, Eq. 1), from dense weights.

    >>> [round(sparsity_at(progress, 0.8), 3) for progress in (0.1, 0.3, 0.75, 1.0)]
    [0.0, 0.535, 0.8, 0.8]
    """
    x = min(1.0, max(0.0, (progress - _BEGIN) / (_END - _BEGIN)))
    return final * (1.0 - (1.0 - x) ** 3)


class Sparsifier:
    """Decoupled L1, gradual pruning by magnitude, or zeros that stay: after each step, in effective space.

    L1 moves weights towards zero by lr times `l1`, as AdamW's decay is decoupled from the gradient. Pruned weights stay
    zero. Masks follow from the weights alone, so a resumed run has the same.

    Args:
        weights: those of :func:`matrices`.
        train: its `l1`, `sparsity` and `steps`.
        hold: keep the zeros that there are.
    """

    def __init__(self, weights: Sequence[Tensor], train: TrainConfig, *, hold: bool = False) -> None:
        self._weights, self._train, self._hold = weights, train, hold

    @torch.no_grad()
    def before_step(self) -> None:
        """Remember which weights are zero, if these must stay zero."""
        holds = self._hold or self._train.sparsity > 0.0
        self._masks = [weight != 0.0 for weight in self._weights] if holds else []

    @torch.no_grad()
    def after_step(self, step: int, lr: float) -> None:
        """Apply L1 at the rate `lr`, and the masks, after step number `step`, from 1 on."""
        train = self._train
        if train.l1:
            soft_threshold_(self._weights, lr * train.l1, train.l1_falloff)
        for weight, mask in zip(self._weights, self._masks, strict=False):
            weight.mul_(mask)
        if train.sparsity and step % max(1, train.steps // _MASKS) == 0:
            prune_(self._weights, sparsity_at(step / train.steps, train.sparsity))
