"""SEL optimizers in a LightningModule: total steps and clipping taken over from the Trainer.

Nothing of Lightning is imported: trainers of `lightning.pytorch` and of `pytorch_lightning` are read by attribute.
"""

import math
import warnings
from typing import Any

from symexplin.validation import check_whole

__all__ = ["setup"]

# Strategies that hand the optimizer one flat vector for many parameters, which has no rows and columns to curve.
_FLAT = {
    "FSDPStrategy": "'fsdp' flattens parameters; use ModelParallelStrategy (fully_shard)",
    "DeepSpeedStrategy": "DeepSpeed flattens parameters; use 'ddp' or ModelParallelStrategy (fully_shard)",
}
_MOVED = "_symexplin_max_grad_norm"


def setup(trainer: Any, *, total_steps: int | None = None) -> dict[str, Any]:
    """Return `total_steps` and `max_grad_norm` for a SEL optimizer, and take clipping over from the Trainer.

    Call it in `configure_optimizers`. The Trainer's own clipping would clip effective gradients before the optimizer
    sees them; so its `gradient_clip_val` moves to the optimizer, which clips raw ones, and is None afterwards.

    Args:
        trainer: the module's Trainer, of `lightning.pytorch` or `pytorch_lightning`.
        total_steps: T of the annealing; None: the Trainer's `estimated_stepping_batches`, which counts accumulation
            and `max_steps`, or None where it sees no end.

    Returns:
        Keyword arguments of :class:`symexplin.SELAdamW` and its siblings.

    Raises:
        ValueError: clipping by value, or a strategy that flattens parameters (FSDP 1, DeepSpeed).

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
    >>> trainer.gradient_clip_val is None
    True
    """
    for kind in type(trainer.strategy).__mro__:
        if kind.__name__ in _FLAT:
            raise ValueError(f"strategy must leave parameters their shapes: {_FLAT[kind.__name__]}")
    if total_steps is None:
        estimate = trainer.estimated_stepping_batches
        total_steps = int(estimate) if 0 < estimate < math.inf else None  # -1 where the data have no length
    else:
        check_whole("total_steps", total_steps)
    return {"total_steps": total_steps, "max_grad_norm": _take_clipping(trainer)}


def _take_clipping(trainer: Any) -> float | None:
    """Return the Trainer's clipping norm, which it no longer applies; the same at a second fit."""
    if trainer.gradient_clip_val:
        algorithm = getattr(trainer.gradient_clip_algorithm, "value", trainer.gradient_clip_algorithm)
        if algorithm not in (None, "norm"):
            raise ValueError(f"gradient_clip_algorithm must be 'norm': raw gradients have one, got {algorithm!r}")
        setattr(trainer, _MOVED, float(trainer.gradient_clip_val))
        trainer.gradient_clip_val = None
    hook = getattr(type(getattr(trainer, "lightning_module", None)), "configure_gradient_clipping", None)
    if hook is not None and hook.__module__.partition(".")[0] not in ("lightning", "pytorch_lightning"):
        warnings.warn(
            f"{hook.__qualname__} is called with gradient_clip_val=None: the optimizer clips raw gradients; what the "
            "hook clips itself are effective ones",
            stacklevel=3,
        )
    return getattr(trainer, _MOVED, None)
