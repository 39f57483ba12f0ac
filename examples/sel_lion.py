"""Lion in curved weight space, in one file to copy."""

from collections.abc import Sequence
from typing import Any

import torch

import symexplin as sel


class SELLion(sel.RawSpaceOptimizer):
    """Lion (Chen et al. 2023, arXiv 2302.06675) on raw weights, biases, scales and plain parameters."""

    moments = ("exp_avg",)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.01,
        *,
        config: sel.SELConfig | None = None,
        total_steps: int | str | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        rule = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, rule | {"total_steps": total_steps, "max_grad_norm": max_grad_norm}, config)

    def rule_(self, leaves: Sequence[sel.Leaf], group: dict[str, Any]) -> None:
        """Update the values and moments of the leaves in place, of all with one learning rate together."""
        beta1, beta2 = group["betas"]
        for lr in {leaf.lr for leaf in leaves}:
            alike = [leaf for leaf in leaves if leaf.lr == lr]
            values, grads = [leaf.value for leaf in alike], [leaf.grad for leaf in alike]
            exp_avgs = [leaf.moments["exp_avg"] for leaf in alike]
            updates = torch._foreach_lerp(exp_avgs, grads, 1.0 - beta1)
            torch._foreach_sign_(updates)
            torch._foreach_mul_(values, [1.0 - lr * leaf.weight_decay for leaf in alike])
            torch._foreach_sub_(values, updates, alpha=lr)
            torch._foreach_lerp_(exp_avgs, grads, 1.0 - beta2)
