"""AdamW in curved weight space."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from symexplin.checks import check_not_negative
from symexplin.config import SELConfig
from symexplin.kernels.interface import is_dense, is_memory
from symexplin.optim.batch import ADAMW
from symexplin.optim.entry import Leaf
from symexplin.optim.groups import Group
from symexplin.optim.optimizer import RawSpaceOptimizer
from symexplin.routes import Rate

__all__ = ["SELAdamW"]

_FUSED = ("cpu", "cuda", "mps", "xpu")  # devices that torch's fused AdamW knows


class SELAdamW(RawSpaceOptimizer):
    """AdamW on raw weights and scales, while the model keeps ordinary effective weights (Eq. 7 under AdamW).

    Gradients are pulled back through the map and clipped by one global norm. For every raw weight, raw bias, scale
    and plain parameter x with gradient g::

        x <- x (1 - lr k wd);  m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2
        x <- x - lr k (m/(1 - b1^t)) / (sqrt(v/(1 - b2^t)) + eps)

    k is 1 except for scales (:func:`symexplin.functional.anneal`). The default map stores no raw weight: its state is
    AdamW's, and a step takes the weight from one value to the next in closed form (:mod:`symexplin.closed`). Maps with
    learned scales or a linear pathway store a float32 raw weight, which starts as the inverse of the present weight.
    For half-precision parameters it takes the place of the float32 master copy that the other maps have.

    Args:
        params: a plain model, or its :func:`symexplin.param_groups`.
        lr: learning rate of groups without their own; of a model also {name pattern: rate}, as in
            :func:`symexplin.routing`. Schedulers may change `group["lr"]`.
        weight_decay: as lr.
        betas, eps: as in `torch.optim.AdamW`.
        config: the map of a model, by default `SELConfig()`.
        no_decay: name patterns of a model's parameters without weight decay, "vectors" or "usual", as in
            :func:`symexplin.param_groups`.
        total_steps: T of the annealing, the number of optimizer steps of the run; needed if a multiplier changes.
            "later": :meth:`set_total_steps` must be called before the second step.
        max_grad_norm: clip raw gradients to this global norm; None: do not clip. Clipping the model's `.grad` would
            clip effective gradients. `grad_norm` is the norm of the last step.

    Raises:
        ValueError: a value out of range, no curved group, a multiplier that changes without `total_steps`, or at the
            first step a weight that has no raw weight to be stored.

    >>> import torch
    >>> import symexplin as sel
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    >>> optimizer = sel.SELAdamW(model, lr=1e-3, max_grad_norm=1.0)
    >>> model(torch.ones(2, 4)).sum().backward()
    >>> optimizer.step()
    >>> sorted(optimizer.state[model[0].weight])
    ['exp_avg', 'exp_avg_sq', 'step']
    """

    moments: ClassVar[tuple[str, ...]] = ADAMW

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
    ) -> None:
        rule: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        shared = {"total_steps": total_steps, "max_grad_norm": max_grad_norm}
        super().__init__(params, rule | shared, config, no_decay)

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise ValueError if betas or eps are out of range."""
        check_not_negative("eps", group["eps"])
        betas = group["betas"]
        pair = (
            isinstance(betas, tuple | list) and len(betas) == 2 and all(isinstance(beta, float | int) for beta in betas)
        )
        if not pair or not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {betas!r}")

    def _is_adamw(self) -> bool:
        own = ("rule_", "moment_names", "moments")  # of a subclass or an object
        return all(getattr(type(self), name) is getattr(SELAdamW, name) and name not in vars(self) for name in own)

    def rule_(self, leaves: Sequence[Leaf], group: dict[str, Any]) -> None:
        """Apply torch's fused AdamW to all leaves with equal rates together."""
        _adamw_(leaves, group)


def _adamw_(leaves: Sequence[Leaf], group: Group) -> None:
    """Apply AdamW to leaves of one group in place, to all with equal rates together.

    Torch's fused AdamW for CPUs reads memory in order, whatever strides and shapes say, so it gets only leaves whose
    tensors have the same.
    """
    beta1, beta2 = map(float, group["betas"])
    eps = float(group["eps"])
    alike: dict[Any, list[Leaf]] = {}
    for leaf in leaves:
        fused = leaf.value.device.type in _FUSED and _are_alike(leaf.value, leaf.grad, *leaf.moments.values())
        key = (leaf.lr, leaf.weight_decay, leaf.step, leaf.value.device, leaf.value.dtype, fused)
        alike.setdefault(key, []).append(leaf)
    for (lr, decay, step, _, _, fused), chosen in alike.items():
        values, grads = [leaf.value for leaf in chosen], [leaf.grad for leaf in chosen]
        exp_avgs, exp_avg_sqs = ([leaf.moments[name] for leaf in chosen] for name in ADAMW)
        rates = {"lr": lr, "weight_decay": decay, "beta1": beta1, "beta2": beta2, "eps": eps, "maximize": False}
        if fused:  # torch's functional AdamW takes twice as long, to group many small tensors
            steps = [torch.full((), step, dtype=torch.float32, device=values[0].device)] * len(values)
            torch._fused_adamw_(values, grads, exp_avgs, exp_avg_sqs, [], steps, **rates, amsgrad=False)
        else:
            before = torch.full((len(values),), step - 1.0, dtype=torch.float32, device="cpu")  # torch adds 1
            steps = list(before.unbind())
            adamw(values, grads, exp_avgs, exp_avg_sqs, [], steps, **rates, amsgrad=False, foreach=False)


def _are_alike(first: Tensor, *others: Tensor) -> bool:
    """Whether tensors fill memory without gaps, in the same order."""
    return is_dense(first) and all(
        is_memory(tensor) and tensor.shape == first.shape and tensor.stride() == first.stride()
        for tensor in (first, *others)
    )
