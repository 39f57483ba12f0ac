"""AdamW in curved weight space."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from torch import Tensor

from symexplin.config import DECAY_TOWARDS, SELConfig
from symexplin.optim.batch import Batch, Target
from symexplin.optim.checks import check_arguments
from symexplin.optim.fused import adamw_batches
from symexplin.optim.parameter import ParameterView
from symexplin.optim.raw_space import RawSpaceOptimizer
from symexplin.routes import Rate
from symexplin.validation import check_not_negative

__all__ = ["SELAdamW"]


class SELAdamW(RawSpaceOptimizer):
    """AdamW on raw weights and scales, while the model keeps ordinary effective weights (Eq. 7 under AdamW).

    Gradients are pulled back through the map and clipped by one global norm. For every raw weight, raw bias, scale
    and plain parameter x with gradient g::

        x <- x (1 - lr k wd);  m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2
        x <- x - lr k (m/(1 - b1^t)) / (sqrt(v/(1 - b2^t)) + eps)

    k is 1 except for scales (:func:`symexplin.functional.anneal`). The raw weights start matched to the present
    weights, unless the map says start="mismatched": it changes weights that were just drawn when the optimizer is
    built, and refuses others at the first step. A loaded state replaces the start. Memory beyond AdamW's: none for bf16
    parameters (the raw weight is the fp32 master copy), 4 bytes per fp32 parameter, and less than 1 % for the vectors
    at width 1024.

    Args:
        params: a plain model, or its :func:`symexplin.param_groups`.
        lr: learning rate of groups without their own; of a model also {name pattern: rate}, as in
            :func:`symexplin.routing`. Schedulers may change `group["lr"]`.
        weight_decay: as lr.
        betas, eps: as in `torch.optim.AdamW`.
        config: the map of a model, by default `SELConfig()`.
        no_decay: name patterns of a model's parameters without weight decay.
        total_steps: T of the annealing, the number of optimizer steps of the run; needed if a multiplier changes.
            "later": :meth:`set_total_steps` must be called before the second step.
        decay_towards: "zero", or "initial": weight decay pulls raw weights and plain parameters towards their values
            at the first step, for fine-tuning (with the identity map this is L2-SP, arXiv 1802.01483). Takes 4 bytes
            more per parameter. Scales do not decay then.
        moment_bits: 32, or 8: the moments of weights with more than 16,384 entries as codes of 8 bits with a scale per
            block (arXiv 2110.02861), 2 bytes per parameter instead of 8. Slower, since kernels do not cover it; needs
            the extra "small".
        max_grad_norm: clip raw gradients to this global norm; None: do not clip. Clipping the model's `.grad` would
            clip effective gradients. `grad_norm` is the norm of the last step.
        others: torch's switches (`foreach`, `fused`, `maximize`, ...), which may be off.

    Raises:
        TypeError: an unknown argument.
        ValueError: a switch that is on, a value out of range, no curved group, a multiplier that changes without
            `total_steps`, or a weight that is not finite (at the first step).

    >>> import torch
    >>> import symexplin as sel
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    >>> optimizer = sel.SELAdamW(model, lr=1e-3, max_grad_norm=1.0)
    >>> model(torch.ones(2, 4)).sum().backward()
    >>> optimizer.step()
    """

    moments: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    stacks: ClassVar[bool] = True

    def __init__(
        self,
        params: Any,
        lr: Rate = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: Rate = 0.01,
        *,
        config: SELConfig | None = None,
        no_decay: Sequence[str] = (),
        total_steps: int | str | None = None,
        max_grad_norm: float | None = None,
        decay_towards: str = DECAY_TOWARDS[0],
        moment_bits: int = 32,
        **others: Any,
    ) -> None:
        check_arguments(type(self), others)
        decay = {"weight_decay": weight_decay, "decay_towards": decay_towards}
        rule: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, **decay, "moment_bits": moment_bits}
        run = {"total_steps": total_steps, "max_grad_norm": max_grad_norm}
        super().__init__(params, rule | run, config, no_decay)

    def check_(self, group: dict[str, Any]) -> None:
        """Raise ValueError if betas or eps are out of range."""
        check_not_negative("eps", group["eps"])
        betas = group["betas"]
        pair = (
            isinstance(betas, tuple | list)
            and len(betas) == 2
            and all(isinstance(beta, float | int | Tensor) for beta in betas)
        )
        if not pair or not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {betas!r}")

    def is_adamw_(self, view: ParameterView) -> bool:  # noqa: ARG002
        """Whether AdamW updates all tensors of a parameter: False if a subclass overrides the rule."""
        return type(self).rule_ is SELAdamW.rule_

    def batches_(self, active: Sequence[ParameterView]) -> Iterable[Batch]:
        """Return fast batches of the parameters that kernels cover, and readable ones of the others."""
        fast = list(adamw_batches(view for view in active if self.is_adamw_(view)))
        taken = {view.key for batch in fast for view in batch.views}
        return [*fast, *super().batches_([view for view in active if view.key not in taken])]

    def rule_(self, target: Target, group: dict[str, Any]) -> None:
        """Apply AdamW in place."""
        (beta1, beta2), step = group["betas"], float(target.step)
        exp_avg, exp_avg_sq = target.moment("exp_avg"), target.moment("exp_avg_sq")
        target.decay_()
        exp_avg.lerp_(target.grad, 1.0 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(target.grad, target.grad, value=1.0 - beta2)
        denominator = (exp_avg_sq.sqrt() / (1.0 - beta2**step) ** 0.5).add_(group["eps"])
        target.value.sub_(exp_avg / denominator * (target.lr / (1.0 - beta1**step)))
