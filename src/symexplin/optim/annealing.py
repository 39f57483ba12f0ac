"""Multipliers k(t) of the scales' learning rates, for raw-space optimizers and for converted models."""

import functools
from collections.abc import Mapping
from typing import Any

import torch

from symexplin.checks import LATER, check_whole
from symexplin.functional import anneal

__all__ = ["anneal_scales", "multiplier", "multipliers"]

_anneal = functools.lru_cache(maxsize=64)(anneal)  # all scales of a role have the same k in a step


def multiplier(key: str, group: Mapping[str, Any]) -> float:
    """Return k(t) of the group's key "k_e", "k_l", ... at its number of completed steps."""
    (k0, k1), total = group[key], group["total_steps"]
    if k0 != k1 and total is None:
        raise ValueError(
            'total_steps must be given, the number of optimizer steps of the run, or "later": '
            f"the learning rate of {key[2:]} changes over them"
        )
    if total == LATER:
        if k0 != k1 and group["steps"] > 0:
            raise ValueError(f"total_steps is still {LATER!r}: call set_total_steps(T) before the second step")
        return float(k0)
    return _anneal(group["steps"], total, k0, k1)


def multipliers(group: Mapping[str, Any]) -> dict[str, float]:
    """Return k(t) of every role with a multiplier in the group."""
    return {key[2:]: multiplier(key, group) for key in group if key.startswith("k_")}


def anneal_scales(optimizer: torch.optim.Optimizer, total_steps: int | None = None) -> None:
    """Apply the multipliers of a converted model's scales to `optimizer` (paper, section 4.5).

    During a step each group's learning rate is ``lr * k(t)`` with :func:`symexplin.functional.anneal`. Outside of
    steps it is lr, so any scheduler works. The number of completed steps is a key of the groups, saved in `state_dict`;
    T belongs to the run. Call it once for an optimizer. Hooks are not copied: call it on a copied optimizer too.

    Args:
        optimizer: any torch optimizer over :func:`symexplin.param_groups` of a converted model.
        total_steps: T; needed if a multiplier changes.

    Raises:
        ValueError: no group has multipliers, or one changes and `total_steps` is missing.

    >>> import symexplin as sel
    >>> model = sel.convert(torch.nn.Sequential(torch.nn.Linear(4, 2)))
    >>> optimizer = torch.optim.AdamW(sel.param_groups(model, lr=1e-3))
    >>> sel.anneal_scales(optimizer, total_steps=100)
    """
    total = total_steps if total_steps is None else check_whole("total_steps", total_steps)
    annealed = [group for group in optimizer.param_groups if "k" in group]
    if not annealed:
        raise ValueError("optimizer has no group with multipliers; build it over symexplin.param_groups(model)")
    for group in annealed:
        anneal(0, total, *group["k"])  # raises now, not at a step, for k0 != k1 without total_steps
    outside: list[tuple[dict[str, Any], Any]] = []  # groups in a step with their rates outside of it

    def restore() -> None:
        while outside:
            group, group["lr"] = outside.pop()

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        restore()  # torch runs no post hook after a step that raised
        for group in optimizer.param_groups:
            if "k" in group:
                outside.append((group, group["lr"]))
                group["lr"] = group["lr"] * anneal(group.get("steps", 0), total, *group["k"])

    def after(*_: Any) -> None:
        for group, _rate in outside:
            group["steps"] = group.get("steps", 0) + 1
        restore()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
