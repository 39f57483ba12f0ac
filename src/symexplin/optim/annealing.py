"""Scale annealing for the module home: any torch optimizer, any learning-rate scheduler."""

from typing import Any

import torch

from symexplin.functional import anneal

__all__ = ["ScaleAnnealing", "anneal_scales"]


_ATTRIBUTE = "_symexplin_annealing"


class ScaleAnnealing:
    """Multiplies each group's learning rate by its k(t) for the duration of a step (made by :func:`anneal_scales`)."""

    def __init__(self, optimizer: torch.optim.Optimizer, total_steps: int | None) -> None:
        annealed = [group for group in optimizer.param_groups if "k" in group]
        if not annealed:
            raise ValueError("optimizer has no group with multipliers; build it over symexplin.param_groups(model)")
        self._total_steps = total_steps
        for group in annealed:
            anneal(0, total_steps, *group["k"])  # k0 != k1 without total_steps: an error now, not at a step
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
        self._restore()  # a step that raised has left its rates behind
        for group in optimizer.param_groups:
            if "k" in group:
                group.setdefault("steps", 0)  # loaded groups replace those set up, and may be older
                group.setdefault("total_steps", self._total_steps)
                self._outside.append((group, group["lr"]))
                group["lr"] = group["lr"] * anneal(group["steps"], group["total_steps"], *group["k"])
        # torch runs no hook after a closure that raises: restore on its way out.
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

    During a step each group's learning rate is ``lr * k(t)`` with :func:`symexplin.functional.anneal`; before and
    after it is lr, so any scheduler composes. The count of completed steps and T live in the groups and go
    through `state_dict`. Call it on every optimizer object, a copied one included: hooks are not copied. A second
    call replaces the first.

    Args:
        optimizer: any torch optimizer over :func:`symexplin.param_groups` of a converted model.
        total_steps: T; needed where a multiplier changes.

    Raises:
        ValueError: no group has multipliers, or one changes and `total_steps` is missing.

    >>> import symexplin as sel
    >>> model = sel.convert(torch.nn.Sequential(torch.nn.Linear(4, 2)))
    >>> optimizer = torch.optim.AdamW(sel.param_groups(model, lr=1e-3))
    >>> handle = sel.anneal_scales(optimizer, total_steps=100)
    """
    return ScaleAnnealing(optimizer, total_steps)
