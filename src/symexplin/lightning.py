"""SEL optimizers in a LightningModule: total steps and clipping taken over from the Trainer.

Nothing of Lightning is imported: trainers of `lightning.pytorch` and of `pytorch_lightning` are read by attribute.
"""

import functools
import math
import warnings
from typing import Any

import torch

from symexplin.optim import RawSpaceOptimizer
from symexplin.validation import check_whole

__all__ = ["setup"]

# Strategies that hand the optimizer one flat vector for many parameters, which has no rows and columns to curve.
_FLAT = {
    "FSDPStrategy": "'fsdp' flattens parameters; use ModelParallelStrategy (fully_shard)",
    "DeepSpeedStrategy": "DeepSpeed flattens parameters; use 'ddp' or ModelParallelStrategy (fully_shard)",
}
_SCHEDULER = "GradientAccumulationScheduler"


def setup(trainer: Any, *, total_steps: int | None = None) -> dict[str, Any]:
    """Return `total_steps` and `max_grad_norm` for a SEL optimizer, which clips in the Trainer's place.

    Call it in `configure_optimizers`. The Trainer's own clipping would clip effective gradients before the optimizer
    sees them. So the optimizer takes its `gradient_clip_val`, to clip raw ones, and the module's
    `configure_gradient_clipping` leaves such an optimizer alone from now on; any other is clipped as always.

    Args:
        trainer: the module's Trainer, of `lightning.pytorch` or `pytorch_lightning`.
        total_steps: T of the annealing; None: the Trainer's `estimated_stepping_batches`, which counts
            `accumulate_grad_batches` and `max_steps`, or None where it sees no end.

    Returns:
        Keyword arguments of :class:`symexplin.SELAdamW` and its siblings.

    Raises:
        ValueError: clipping by value; a strategy that flattens parameters (FSDP 1, DeepSpeed); no `total_steps` where
            the Trainer cannot count: manual optimization, a `GradientAccumulationScheduler`.

    Example::

        def configure_optimizers(self):
            groups = sel.param_groups(self, lr=3e-4, config=sel.preset("paper"))
            return sel.SELAdamW(groups, **sel.lightning.setup(self.trainer))

    >>> from types import SimpleNamespace
    >>> trainer = SimpleNamespace(
    ...     strategy=None, estimated_stepping_batches=100, gradient_clip_val=1.0, gradient_clip_algorithm=None
    ... )
    >>> setup(trainer)
    {'total_steps': 100, 'max_grad_norm': 1.0}
    """
    for kind in type(trainer.strategy).__mro__:
        if kind.__name__ in _FLAT:
            raise ValueError(f"strategy must leave parameters their shapes: {_FLAT[kind.__name__]}")
    if total_steps is None:
        _check_countable(trainer)
        estimate = trainer.estimated_stepping_batches
        total_steps = int(estimate) if 0 < estimate < math.inf else None  # -1 where the data have no length
    else:
        check_whole("total_steps", total_steps)
    return {"total_steps": total_steps, "max_grad_norm": _take_clipping(trainer)}


def _check_countable(trainer: Any) -> None:
    """Refuse what makes the Trainer's estimate of the number of steps wrong."""
    why = None
    if not getattr(getattr(trainer, "lightning_module", None), "automatic_optimization", True):
        why = "under manual optimization the module itself decides when to step"
    for callback in getattr(trainer, "callbacks", ()):
        scheduled = any(kind.__name__ == _SCHEDULER for kind in type(callback).__mro__)
        if scheduled and set(callback.scheduling.values()) != {1}:
            why = f"the Trainer's estimate leaves out the {_SCHEDULER}"
    if why is not None:
        raise ValueError(f"total_steps must be given, the number of optimizer steps, got None: {why}")


def _take_clipping(trainer: Any) -> float | None:
    """Return the Trainer's clipping norm, and keep it from clipping what the optimizer clips."""
    norm = float(trainer.gradient_clip_val) if trainer.gradient_clip_val else None
    if norm is not None:
        algorithm = getattr(trainer.gradient_clip_algorithm, "value", trainer.gradient_clip_algorithm)
        if algorithm not in (None, "norm"):
            raise ValueError(f"gradient_clip_algorithm must be 'norm': raw gradients have one, got {algorithm!r}")
    module = getattr(trainer, "lightning_module", None)
    if module is None:
        return norm
    hook = type(module).configure_gradient_clipping
    if hook.__module__.partition(".")[0] in ("lightning", "pytorch_lightning"):
        module.configure_gradient_clipping = functools.partial(_configure_gradient_clipping, module)
    else:
        warnings.warn(
            f"{hook.__qualname__} is still called, before the optimizer clips raw gradients to {norm}: what the hook "
            "clips itself are effective ones",
            stacklevel=3,
        )
    return norm


def _configure_gradient_clipping(
    module: Any,
    optimizer: torch.optim.Optimizer,
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: str | None = None,
) -> None:
    """Clip as the module's class does, but leave an optimizer alone that clips raw gradients itself."""
    if not isinstance(optimizer, RawSpaceOptimizer):
        type(module).configure_gradient_clipping(module, optimizer, gradient_clip_val, gradient_clip_algorithm)
