"""The learning rate to begin with, and a warning about scales that learn too fast."""

import torch
from torch import nn

from symexplin.config import SELConfig
from symexplin.curve import Curved
from symexplin.optim.shard import whole
from symexplin.routes import check_values, routing
from symexplin.transform import compute_dtype, summed
from symexplin.validation import check_positive, naming, warn

__all__ = ["suggest_lr", "warn_of_scales"]

# At 0.15 a run of 200 steps was chaotic: one unit of rounding grew to 0.4 of the weights (results/log.md, 2026-11-21).
# At the paper's 0.015 it did not.
_CHAOTIC = 0.1


@torch.no_grad()
def suggest_lr(model: nn.Module, config: SELConfig | None = None, *, adamw_lr: float) -> float:
    """Return a learning rate to begin with: AdamW's best one, divided by the map's mean slope over the weights.

    A step of Adam moves a raw weight by about lr, hence the effective one by ``lr |d w_eff / d w|``. The rate
    makes this AdamW's step on average over all curved matrices, or over the biases if only they are curved. It is
    where a sweep begins, and no substitute for one.

    Args:
        model: a plain model, with the weights that training starts from.
        config: the map; None: the default.
        adamw_lr: the best learning rate of AdamW on the same model, batch and number of steps.

    Raises:
        ValueError: nothing to curve, a weight on the device "meta" or without an inverse, or the errors of
            :func:`symexplin.routing`.

    >>> from symexplin.presets import preset
    >>> model = nn.Sequential(nn.Linear(1024, 1024))
    >>> round(suggest_lr(model, preset("exp_only"), adamw_lr=3e-4) / 3e-4, 1)
    0.9
    """
    adamw_lr = check_positive("adamw_lr", adamw_lr)
    table = routing(model, config)
    if not table.curved:
        raise ValueError(f"model has nothing to curve; see print(symexplin.routing(model)):\n{table}")
    check_values(table)
    total, count = 0.0, 0
    for route in [route for route in table.curved if route.parameter.dim() == 2] or table.curved:
        weight, spec = whole(route.parameter), route.map(table.config)
        with naming(route.name):
            weight = weight.to(compute_dtype(weight))
            start = Curved(spec, weight, spec.start(weight.dtype, weight.device, route.position))
            slope = start._replace(raw=start.inverse(weight)).slope()
        total += float(summed(slope.abs().double(), range(slope.dim())))
        count += slope.numel()
    return adamw_lr * count / total


def warn_of_scales(role: str, rate: float) -> None:
    """Warn if the scales of a role learn at a `rate`, k times the learning rate, at which runs were chaotic."""
    if rate >= _CHAOTIC:
        warn(
            f"scale {role} learns at {rate:.3g} at its fastest, k times the learning rate. From {_CHAOTIC:g} on runs "
            f"may be chaotic; the paper's is 0.015. Lower k, or leave base_lr at 3e-4: {role}=Scale(..., k=(50, 8))"
        )
