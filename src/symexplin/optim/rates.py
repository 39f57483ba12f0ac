"""Learning rates of scales: what a group's multipliers k(t) make of each learned number of a panel."""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from symexplin.functional import anneal
from symexplin.layout import Layout, Slot

__all__ = ["LATER", "Number", "count", "multiplier", "multipliers", "panel_decay", "panel_rates", "rate_of"]

LATER = "later"  # total_steps, until set_total_steps
Number = float | Tensor

_SHAPES = {"panel0": (1, -1), "panel1": (-1, 1), "scalar": (-1,)}


def rate_of(group: Mapping[str, Any]) -> Number:
    """Return the group's learning rate: a tensor only where a graph may be captured, else a number."""
    lr: Number = group["lr"]
    return lr if isinstance(lr, Tensor) and group["capturable"] else float(lr)


def count(steps: list[Tensor]) -> None:
    """Add one to every counter."""
    if steps and steps[0].device.type == "cpu":  # a number would be made a tensor for each of them
        torch._foreach_add_(steps, torch.ones((), device=steps[0].device), alpha=1.0)
    elif steps:
        torch._foreach_add_(steps, 1.0)


def multipliers(group: Mapping[str, Any]) -> dict[str, Number]:
    """Return k(t) of every role that the group anneals, after the steps it has counted."""
    return {key[2:]: multiplier(key, group, group["steps"]) for key in group if key.startswith("k_")}


def multiplier(key: str, group: Mapping[str, Any], step: int | Tensor) -> Number:
    """Return k(t) of the group's key "k_e", "k_l", ... after `step` completed steps, on the device if that is."""
    k0, k1 = group[key]
    total = group["total_steps"]
    if k0 != k1 and total is None:
        raise ValueError(f"total_steps must be given: {key[2:]} is annealed from k = {k0:g} to {k1:g}")
    if total == LATER:
        if k0 != k1 and (isinstance(step, Tensor) or step > 0):
            raise ValueError(f"total_steps is still {LATER!r}: call set_total_steps(T) before the second step")
        return float(k0)
    return anneal(step, total, k0, k1)


def panel_rates(layout: Layout, panel: str, k: Mapping[str, Number], like: Tensor) -> Tensor:
    """Return the multiplier of the learning rate of each learned number of a panel, as it broadcasts."""
    masks, _ = _masks(_slots(layout, panel), like.dtype, like.device)
    # Products with numbers launch kernels; a tensor made of numbers would wait for a copy to the device.
    return sum((mask * k[role] for role, mask in masks), torch.zeros((), dtype=like.dtype, device=like.device))


def panel_decay(layout: Layout, panel: str, like: Tensor) -> Tensor:
    """Return 1 for each learned number of a panel that decays, 0 for others, as it broadcasts."""
    return _masks(_slots(layout, panel), like.dtype, like.device)[1]


def _slots(layout: Layout, panel: str) -> tuple[Slot, ...]:
    return tuple(slot for slot in layout.slots if slot.panel == panel)


@functools.cache
def _masks(
    slots: tuple[Slot, ...], dtype: torch.dtype, device: torch.device
) -> tuple[tuple[tuple[str, Tensor], ...], Tensor]:
    shape = _SHAPES[slots[0].panel]

    def spread(values: list[float]) -> Tensor:
        numbers = [value for value, slot in zip(values, slots, strict=True) for _ in range(slot.count)]
        return torch.tensor(numbers, dtype=dtype, device=device).reshape(shape)

    roles = tuple(dict.fromkeys(slot.role for slot in slots))
    masks = tuple((role, spread([slot.lr_scale * (slot.role == role) for slot in slots])) for role in roles)
    return masks, spread([float(slot.decay) for slot in slots])
