"""The mismatched start of an optimizer's weights: made when it is built, undone by a loaded state."""

from collections.abc import Iterable

import torch
from torch import Tensor

from symexplin.config import SELConfig
from symexplin.optim.groups import Group, is_curved
from symexplin.optim.parameter import ParameterView
from symexplin.optim.placement import local, whole
from symexplin.starts import is_fresh, stale, start_weight

__all__ = ["MismatchedStart"]


class MismatchedStart:
    """The weights that were changed in place, with their old values until the first step, or the reason to refuse.

    Trainers load the weights, build the optimizer and load its state in any order, and a resumed run must end in the
    same bits. Weights that were not just drawn are therefore refused at the first step, not when the optimizer is
    built, and a loaded state cancels both the change and the refusal.
    """

    def __init__(self) -> None:
        self._changed: dict[Tensor, Tensor] = {}  # old values of this process's part, by parameter
        self._refusal: str | None = None

    @torch.no_grad()
    def begin(self, groups: Iterable[Group]) -> None:
        """Start the weights of the groups whose map says so, if all of their matrices were just drawn."""
        views = [
            ParameterView(group, i, {})
            for group in groups
            if is_curved(group) and SELConfig.from_json(group["config"]).start == "mismatched"
            for i in range(len(group["params"]))
        ]
        for view in views:
            if view.axes and view.axes.columns and not is_fresh(whole(view.parameter), view.axes.letters):
                self._refusal = stale(view.name)
                return
        for view in views:
            self._changed[view.parameter] = view.value.clone()
            view.value.copy_(start_weight(view.value, view.layout))

    def finish(self) -> None:
        """Refuse weights that were not just drawn at the first step, and forget the old values.

        Raises:
            ValueError: the weights of a mismatched start were not just drawn.
        """
        if self._refusal is not None:
            raise ValueError(self._refusal)
        self._changed.clear()

    @torch.no_grad()
    def undo(self) -> None:
        """Give the weights their old values back, and drop the refusal."""
        for parameter, before in self._changed.items():
            local(parameter).copy_(before)
        self._changed.clear()
        self._refusal = None

    @torch.no_grad()
    def cancel(self, views: Iterable[ParameterView]) -> None:
        """Undo the start of the weights whose raw weights are now those of the old values.

        The weights may have been loaded before the optimizer was built, or after it.
        """
        for view in views:
            if view.parameter in self._changed and "raw" in view.state:
                before, right = self._changed[view.parameter], view.effective()
                if float((right - before).abs().sum()) < float((right - view.value).abs().sum()):
                    view.value.copy_(before)
        self._changed.clear()
        self._refusal = None
