"""Multipliers k(t) of the scales' learning rates, for raw-space optimizers and for converted models."""

import functools
from collections.abc import Mapping
from typing import Any

import torch

from symexplin.checks import LATER, check_whole
from symexplin.functional import anneal

__all__ = ["ScaleAnnealing", "anneal_scales", "multiplier", "multipliers"]

_ATTRIBUTE = "_symexplin_annealing"
_anneal = functools.lru_cache(maxsize=64)(anneal)  # all scales of a role have the same k in a step


def multiplier(key: str, group: Mapping[str, Any]) -> float:
    """Return k(t) of the group's key "k_e", "k_l", ... at its number of completed steps."""
    (k0, k1), total = group[key], group["total_steps"]
    if k0 != k1 and total is None:
        raise ValueError(
            'total_steps must be given, the number of optimizer steps of the run, or "later": '
            f"{key[2:]} is annealed from k = {k0:g} to {k1:g}"
        )
    if total == LATER:
        if k0 != k1 and group["steps"] > 0:
            raise ValueError(f"total_steps is still {LATER!r}: call set_total_steps(T) before the second step")
        return float(k0)
    return _anneal(group["steps"], total, k0, k1)


def multipliers(group: Mapping[str, Any]) -> dict[str, float]:
    """Return k(t) of every role with a multiplier in the group."""
    return {key[2:]: multiplier(key, group) for key in group if key.startswith("k_")}


class ScaleAnnealing:
    """Multiplies each group's learning rate by its k(t) during a step; created by :func:`anneal_scales`."""

    def __init__(self, optimizer: torch.optim.Optimizer, total_steps: int | None) -> None:
        self._total_steps = total_steps if total_steps is None else check_whole("total_steps", total_steps)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        annealed = [group for group in optimizer.param_groups if "k" in group]
        if not annealed:
            raise ValueError("optimizer has no group with multipliers; build it over symexplin.param_groups(model)")
        for group in annealed:
            anneal(0, total_steps, *group["k"])  # raises now, not at a step, for k0 != k1 without total_steps
            group.setdefault("steps", 0)
        if earlier := getattr(optimizer, _ATTRIBUTE, None):
            earlier.remove()
        setattr(optimizer, _ATTRIBUTE, self)
        self._outside: list[tuple[dict[str, Any], Any]] = []  # groups in a step with their rates outside of it
        self._hooks = (
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        )

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._restore()  # after a step that raised
        for group in optimizer.param_groups:
            if "k" in group:
                self._outside.append((group, group["lr"]))
                group["lr"] = group["lr"] * anneal(group.get("steps", 0), self._total_steps, *group["k"])
        # torch runs no post hook if the closure raises.
        return tuple(map(self._guarded, args)), {key: self._guarded(value) for key, value in kwargs.items()}

    def _guarded(self, argument: Any) -> Any:
        """Return a closure that restores the rates if it raises; other arguments of a step stay as they are."""
        if not callable(argument):
            return argument

        def closure() -> Any:
            try:
                return argument()
            except BaseException:
                self._restore()
                raise

        return closure

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        for group, _ in self._outside:
            group["steps"] = group.get("steps", 0) + 1  # a loaded group may lack it
        self._restore()

    def _restore(self) -> None:
        while self._outside:
            group, group["lr"] = self._outside.pop()

    def remove(self) -> None:
        """Detach from the optimizer."""
        self._restore()
        for hook in self._hooks:
            hook.remove()


def anneal_scales(optimizer: torch.optim.Optimizer, total_steps: int | None = None) -> ScaleAnnealing:
    """Apply the multipliers of a converted model's scales to `optimizer` (paper, section 4.5).

    During a step each group's learning rate is ``lr * k(t)`` with :func:`symexplin.functional.anneal`. Outside of
    steps it is lr, so any scheduler works. The number of completed steps is a key of the groups, saved in `state_dict`;
    T belongs to the run. Hooks are not copied: call it on a copied optimizer too. A second call replaces the first.

    Args:
        optimizer: any torch optimizer over :func:`symexplin.param_groups` of a converted model.
        total_steps: T; needed if a multiplier changes.

    Raises:
        ValueError: no group has multipliers, or one changes and `total_steps` is missing.

    >>> import symexplin as sel
    >>> model = sel.convert(torch.nn.Sequential(torch.nn.Linear(4, 2)))
    >>> optimizer = torch.optim.AdamW(sel.param_groups(model, lr=1e-3))
    >>> handle = sel.anneal_scales(optimizer, total_steps=100)
    """
    return ScaleAnnealing(optimizer, total_steps)
