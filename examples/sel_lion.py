"""Lion in curved weight space, in one file to copy."""

from collections.abc import Sequence
from typing import Any

import symexplin as sel


class SELLion(sel.RawSpaceOptimizer):
    """Lion (Chen et al. 2023, arXiv 2302.06675) on raw weights, biases, scales and plain parameters."""

    moments = ("exp_avg",)
    elementwise = True

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
        """Update the value and the moment of each leaf in place."""
        beta1, beta2 = group["betas"]
        for leaf in leaves:
            exp_avg = leaf.moments["exp_avg"]
            update = exp_avg.lerp(leaf.grad, 1.0 - beta1).sign_()
            leaf.decay_()
            leaf.value.sub_(update, alpha=leaf.lr)
            exp_avg.lerp_(leaf.grad, 1.0 - beta2)
