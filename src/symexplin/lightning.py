"""SEL optimizers in a LightningModule: total steps and clipping come from the Trainer.

Lightning is not imported. Trainers of `lightning.pytorch` and `pytorch_lightning` are read by attribute.
"""

import functools
import math
from typing import Any

import torch

from symexplin.optim import RawSpaceOptimizer
from symexplin.validation import check_whole, warn

__all__ = ["setup"]

_FLAT = {"FSDPStrategy", "DeepSpeedStrategy"}  # flatten many parameters to one vector, without rows and columns
_SCHEDULER = "GradientAccumulationScheduler"


def setup(trainer: Any, *, total_steps: int | None = None) -> dict[str, Any]:
    """Return `total_steps` and `max_grad_norm` for a SEL optimizer, which then clips instead of the Trainer.

    Call it in `configure_optimizers`. The Trainer would clip effective gradients. Therefore the optimizer gets its
    `gradient_clip_val` and clips raw gradients. The module's `configure_gradient_clipping` then skips SEL optimizers;
    other optimizers are clipped as before.

    Args:
        trainer: the module's Trainer, of `lightning.pytorch` or `pytorch_lightning`.
        total_steps: T of the annealing. None: the Trainer's `estimated_stepping_batches`, which takes account of
            `accumulate_grad_batches` and `max_steps`. A Trainer without an end gives None.

    Returns:
        Keyword arguments of :class:`symexplin.SELAdamW` or :class:`symexplin.SELMuon`.

    Raises:
        ValueError: clipping by value; a strategy that flattens parameters (FSDP 1, DeepSpeed); no `total_steps` under
            manual optimization or a `GradientAccumulationScheduler`, where the Trainer cannot estimate it.

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
    if flat := _FLAT & _type_names(trainer.strategy):
        raise ValueError(
            f"strategy must leave parameters their shapes, got {flat.pop()}: use 'ddp' or ModelParallelStrategy "
            "(fully_shard)"
        )
    if total_steps is None:
        _check_countable(trainer)
        estimate = trainer.estimated_stepping_batches
        total_steps = int(estimate) if 0 < estimate < math.inf else None  # -1 for data without a length
    else:
        check_whole("total_steps", total_steps)
    return {"total_steps": total_steps, "max_grad_norm": _take_clipping(trainer)}


def _check_countable(trainer: Any) -> None:
    """Refuse settings under which the Trainer's estimate of the number of steps is wrong."""
    why = None
    if not getattr(getattr(trainer, "lightning_module", None), "automatic_optimization", True):
        why = "under manual optimization the module decides when to step"
    for callback in getattr(trainer, "callbacks", ()):
        if _SCHEDULER in _type_names(callback) and set(callback.scheduling.values()) != {1}:
            why = f"the Trainer's estimate ignores the {_SCHEDULER}"
    if why is not None:
        raise ValueError(f"total_steps must be given as the number of optimizer steps, got None: {why}")


def _type_names(value: object) -> set[str]:
    return {kind.__name__ for kind in type(value).__mro__}


def _take_clipping(trainer: Any) -> float | None:
    """Return the Trainer's clipping norm, and switch the Trainer's clipping off for SEL optimizers."""
    norm = float(trainer.gradient_clip_val) if trainer.gradient_clip_val else None
    if norm is not None:
        algorithm = getattr(trainer.gradient_clip_algorithm, "value", trainer.gradient_clip_algorithm)
        if algorithm not in (None, "norm"):
            raise ValueError(f"gradient_clip_algorithm must be 'norm', got {algorithm!r}")
    module = getattr(trainer, "lightning_module", None)
    if module is None:
        return norm
    hook = type(module).configure_gradient_clipping
    if hook.__module__.partition(".")[0] in ("lightning", "pytorch_lightning"):
        module.configure_gradient_clipping = functools.partial(_configure_gradient_clipping, module)
    else:
        warn(
            f"{hook.__qualname__} is still called before the optimizer clips raw gradients to {norm}: clipping in "
            "the hook clips effective gradients"
        )
    return norm


def _configure_gradient_clipping(
    module: Any,
    optimizer: torch.optim.Optimizer,
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: str | None = None,
) -> None:
    """Clip as the module's class does, but not under an optimizer that clips raw gradients itself."""
    if not isinstance(optimizer, RawSpaceOptimizer):
        type(module).configure_gradient_clipping(module, optimizer, gradient_clip_val, gradient_clip_algorithm)
