"""Multipliers k(t) of the scales' learning rates, for raw-space optimizers and for converted models."""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from symexplin.functional import anneal
from symexplin.layout import Layout, Slot
from symexplin.validation import check_whole

__all__ = ["LATER", "ScaleAnnealing", "anneal_scales", "multiplier", "multipliers", "panel_masks", "panel_rates"]

LATER = "later"  # total_steps before set_total_steps

_ATTRIBUTE = "_symexplin_annealing"


def multipliers(group: Mapping[str, Any]) -> dict[str, float]:
    """Return k(t) of every role with a multiplier in the group, at its number of completed steps."""
    return {key[2:]: multiplier(key, group, group["steps"]) for key in group if key.startswith("k_")}


def multiplier(key: str, group: Mapping[str, Any], step: int) -> float:
    """Return k(t) of the group's key "k_e", "k_l", ... after `step` completed steps."""
    k0, k1 = group[key]
    total = group["total_steps"]
    if k0 != k1 and total is None:
        raise ValueError(
            f'total_steps must be given, a number or "later": {key[2:]} is annealed from k = {k0:g} to {k1:g}'
        )
    if total == LATER:
        if k0 != k1 and step > 0:
            raise ValueError(f"total_steps is still {LATER!r}: call set_total_steps(T) before the second step")
        return float(k0)
    return anneal(step, total, k0, k1)


# For each role, a mask of its numbers in a panel (1; for delta 1/beta); and a mask of the numbers that decay.
Masks = tuple[tuple[tuple[str, Tensor], ...], Tensor]


def panel_rates(masks: Masks, group: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the learning rate and weight decay of each learned number, shaped to broadcast against the panel."""
    of_roles, decays = masks
    k, lr = multipliers(group), float(group["lr"])
    # Products with numbers only launch kernels. A tensor made from numbers would wait for a copy to the device.
    rates = sum((mask * (k[role] * lr) for role, mask in of_roles), torch.zeros_like(decays))
    anchored = group.get("decay_towards") == "initial"  # the scales have no anchor
    return rates, decays * (0.0 if anchored else group["weight_decay"])


def panel_masks(layout: Layout, panel: str, like: Tensor) -> Masks:
    """Return the masks of a panel's roles and of its decay, shaped to broadcast against the panel."""
    columns = (1,) * max(1, len(layout.axes.columns))
    shape = {"panel0": (1, -1), "panel1": (-1, *columns), "scalar": (-1,), "full": (-1,)}[panel]
    return _masks(tuple(slot for slot in layout.slots if slot.panel == panel), shape, like.dtype, like.device)


@functools.cache
def _masks(slots: tuple[Slot, ...], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Masks:
    def spread(values: list[float]) -> Tensor:
        numbers = [value for value, slot in zip(values, slots, strict=True) for _ in range(slot.count)]
        return torch.tensor(numbers, dtype=dtype, device=device).reshape(shape)

    roles = tuple(dict.fromkeys(slot.role for slot in slots))
    masks = tuple((role, spread([slot.lr_scale * (slot.role == role) for slot in slots])) for role in roles)
    return masks, spread([float(slot.decay) for slot in slots])


class ScaleAnnealing:
    """Multiplies each group's learning rate by its k(t) during a step; created by :func:`anneal_scales`."""

    def __init__(self, optimizer: torch.optim.Optimizer, total_steps: int | None) -> None:
        annealed = [group for group in optimizer.param_groups if "k" in group]
        if not annealed:
            raise ValueError("optimizer has no group with multipliers; build it over symexplin.param_groups(model)")
        self._total_steps = None if total_steps is None else check_whole("total_steps", total_steps)
        for group in annealed:
            anneal(0, total_steps, *group["k"])  # raises now, not at a step, for k0 != k1 without total_steps
            group.setdefault("steps", 0)
            group["total_steps"] = total_steps
        earlier = getattr(optimizer, _ATTRIBUTE, None)
        if earlier is not None:
            earlier.remove()
        setattr(optimizer, _ATTRIBUTE, self)
        self._outside: list[tuple[dict[str, Any], Any]] = []
        self._hooks = (
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        )

    def _restore(self) -> None:
        for group, lr in self._outside:
            group["lr"] = lr
        self._outside = []

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._restore()  # after a step that raised
        for group in optimizer.param_groups:
            if "k" in group:
                group.setdefault("steps", 0)  # loaded groups may lack it
                group.setdefault("total_steps", self._total_steps)
                self._outside.append((group, group["lr"]))
                group["lr"] = group["lr"] * anneal(group["steps"], group["total_steps"], *group["k"])
        # torch runs no post hook if the closure raises, so the guard restores the rates.
        guarded = {key: self._guard(value) if key == "closure" else value for key, value in kwargs.items()}
        return tuple(self._guard(value) for value in args), guarded

    def _guard(self, argument: Any) -> Any:
        if not callable(argument) or isinstance(argument, torch.optim.Optimizer):
            return argument

        def closure() -> Any:
            try:
                return argument()
            except BaseException:
                self._restore()
                raise

        return closure

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        self._restore()
        for group in optimizer.param_groups:
            if "k" in group:
                group["steps"] += 1

    def remove(self) -> None:
        """Detach from the optimizer."""
        self._restore()
        for hook in self._hooks:
            hook.remove()


def anneal_scales(optimizer: torch.optim.Optimizer, total_steps: int | None = None) -> ScaleAnnealing:
    """Apply the multipliers of a converted model's scales to `optimizer` (paper, section 4.5).

    During a step each group's learning rate is ``lr * k(t)`` with :func:`symexplin.functional.anneal`. Outside of
    steps it is lr, so any scheduler works. The number of completed steps and T are keys of the groups, saved in
    `state_dict`. Hooks are not copied: call it on a copied optimizer too. A second call replaces the first.

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
