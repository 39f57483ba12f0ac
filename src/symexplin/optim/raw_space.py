"""The map in the optimizer: raw weights are optimizer state, and the model has ordinary weights at every step.

One step finds writes from outside, pulls the gradients of the effective weights back to raw space, clips them, applies
the subclass's rule (AdamW, ...) to every raw tensor and writes the new effective weights. One global norm over raw
weights, scales and plain parameters is clipped. A step does not wait for the device.
"""

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from symexplin.axes import Axes
from symexplin.config import SELConfig
from symexplin.coordinates import Coordinates
from symexplin.optim import placement
from symexplin.optim.batch import Batch, Target, batch_signature, readable_batches
from symexplin.optim.checks import check_finite, check_group, check_overlap, check_saved
from symexplin.optim.groups import Group, is_curved, param_groups
from symexplin.optim.parameter import COUNTS, ParameterView
from symexplin.optim.reduction import agree, reduce_
from symexplin.optim.schedule import LATER
from symexplin.optim.start import MismatchedStart
from symexplin.optim.summary import summary
from symexplin.optim.writes import Outcome, Writes, take_over
from symexplin.validation import check_whole

__all__ = ["RawSpaceOptimizer"]

_NO_GRADIENT = (
    "no parameter has a gradient at the first step: call backward() before step(). If fully_shard has wrapped the "
    "model since the optimizer was built, it has parameters that the model no longer uses"
)
_OWN = ("total_steps", "max_grad_norm")  # settings that a loaded state does not change
_LOOK_EVERY = 100  # steps between checks of the norm on an accelerator, since each waits for the device


class RawSpaceOptimizer(torch.optim.Optimizer):
    """Base of the optimizers that train in curved weight space; subclasses define `moments` and :meth:`rule_`.

    State of a curved parameter: "step", "scale_step", "raw" (fp32; float64 for a float64 parameter), the panels of its
    scales, and the moments of the raw weight ("exp_avg") and of each panel ("panel0_exp_avg"). State of a plain
    parameter: "step", its moments and, for half precision, "raw", its fp32 master copy.

    Under `fully_shard` (FSDP2) the state is split as the parameter. Panels along the other dimension and numbers are
    replicated; one all-reduce per step sums their gradients and the global norm.
    """

    moments: ClassVar[tuple[str, ...]] = ()
    stacks: ClassVar[bool] = False  # whether the rule accepts stacks of equal tensors with a leading batch dimension

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        config: SELConfig | None = None,
        no_decay: Sequence[str] = (),
    ) -> None:
        if isinstance(params, nn.Module):
            given = {key: defaults[key] for key in ("lr", "weight_decay")}
            params = param_groups(params, **given, config=config, no_decay=no_decay)
        elif config is not None or no_decay:
            raise ValueError("config and no_decay go with a model; symexplin.param_groups takes them for groups")
        super().__init__(params, defaults)
        rates = {group["lr"] for group in self.param_groups}
        if len(rates) == 1:  # the peak rate for schedulers such as transformers' polynomial one
            self.defaults["lr"] = rates.pop()
        for key, value in self.defaults.items():
            if isinstance(value, Mapping):  # by name pattern; a group that is added later takes the largest
                self.defaults[key] = max(group[key] for group in self.param_groups)
        if not any(is_curved(group) for group in self.param_groups):
            raise ValueError(
                "params has no curved group: pass a plain model itself (not its parameters(), which have no names), or "
                "its symexplin.param_groups; for a converted model torch.optim.AdamW over them"
            )
        self._start = MismatchedStart()
        self._start.begin(self.param_groups)
        self._forget()

    def __repr__(self) -> str:
        """Return the map, the groups with their rates and the settings in a few lines."""
        return summary(type(self).__name__, self.param_groups)

    def _forget(self) -> None:
        """Drop all caches that follow from groups and state."""
        self.grad_norm: Tensor | None = None
        self._views: list[ParameterView] = []
        self._batches: tuple[list[Any], list[Batch]] = ([], [])
        self._writes = Writes()
        self._diverged = False

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled and copied: torch's parts, and a start that is not finished."""
        return super().__getstate__() | {"_start": self._start}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a state that was pickled, copied or loaded."""
        super().__setstate__(state)
        self._start = self.__dict__.get("_start", MismatchedStart())
        self._forget()
        loading = self.__dict__.pop("_loading", None)
        if loading is not None:
            self._adopt(*loading)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with the checks of the constructor: settings, aligned lists, shapes, T of the annealing."""
        super().add_param_group(param_group)
        self.param_groups[-1].setdefault("role", "plain")
        try:
            check_group(self.param_groups[-1], self.param_groups[0])
            self.check_(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise
        if "_start" in self.__dict__:
            self._start.begin(self.param_groups[-1:])

    def set_total_steps(self, total_steps: int, *, restart: bool = False) -> None:
        """Set T of the annealing, after ``total_steps="later"`` or for a run of another length.

        `restart` restarts the annealing, for a second run with a new learning-rate schedule.
        """
        check_whole("total_steps", total_steps)
        for settings in (self.defaults, *self.param_groups):
            settings["total_steps"] = total_steps
        for group in self.param_groups if restart else ():
            group["steps"] = 0

    def check_(self, group: dict[str, Any]) -> None:
        """Raise ValueError if a group has a setting of the rule that is out of range."""

    def moments_(self, kind: str, axes: Axes | None) -> tuple[str, ...]:  # noqa: ARG002
        """Return the names of the moments of a target of this kind; `axes` are those of a raw weight, else None."""
        return self.moments

    def rule_(self, target: Target, group: dict[str, Any]) -> None:
        """Update `target.value` in place from `target.grad`; `target.step` includes this update."""
        raise NotImplementedError

    def batches_(self, active: Sequence[ParameterView]) -> Iterable[Batch]:
        """Return batches of the parameters that have gradients; subclasses add fast ones."""
        return readable_batches(active, self.moments_, self.stacks)

    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one optimizer step; return what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._full_precision():
            self._step()
        return loss

    def _step(self) -> None:
        fresh = not any(self.state.values())
        views = self._ready()
        self._take_over(views)
        active = [view for view in views if view.parameter.grad is not None]
        batches = self._batched(active)
        for batch in batches:
            batch.pull()
        self.grad_norm = reduce_(active, batches)
        clip = self._clip(views)
        if fresh and not active:
            warnings.warn(_NO_GRADIENT, stacklevel=5)
        if not (fresh and self._idle()):
            self._start.finish()
            _count(active)
            for batch in batches:
                batch.update(self.rule_, clip)
            for group in self.param_groups:
                group["steps"] += 1
        self._writes.remember(views)

    def _full_precision(self) -> contextlib.ExitStack:
        """Disable autocast during the step."""
        stack = contextlib.ExitStack()
        kinds = {group["params"][0].device.type for group in self.param_groups}
        if "meta" in kinds:
            raise ValueError(
                "params must be the parameters that are trained, got parameters on the device 'meta': build the "
                "optimizer after to_empty has replaced them and they have their values"
            )
        for kind in kinds:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        return stack

    def _clip(self, views: Sequence[ParameterView]) -> Tensor | None:
        """Return the clipping factor of the gradients, max_norm/(norm + 1e-6) and at most 1, as torch does.

        Warns once if the norm is not finite. On an accelerator only every hundredth step checks it.
        """
        norm, max_norm = self.grad_norm, self.param_groups[0]["max_grad_norm"]
        assert norm is not None
        step = max(group["steps"] for group in self.param_groups) + 1
        if not self._diverged and (placement.on_host(norm) or step % _LOOK_EVERY == 0):
            self._diverged = not check_finite(norm, views, step)
        return None if max_norm is None else torch.clamp(max_norm / (norm + 1e-6), max=1.0)

    def _idle(self) -> bool:
        """Whether all gradients and rates are 0, as in the step of torch.distributed.checkpoint to create the state.

        Counting such a step would shift the annealing and the bias correction of empty moments.
        """
        norm = self.grad_norm
        return norm is not None and float(norm) == 0.0 and all(float(group["lr"]) == 0.0 for group in self.param_groups)

    def _batched(self, active: Sequence[ParameterView]) -> list[Batch]:
        """Return the batches of the last step if they are still valid, else new ones."""
        signature = batch_signature(active)
        if signature != self._batches[0]:
            self._batches = (signature, list(self.batches_(active)))
        return self._batches[1]

    def _ready(self) -> list[ParameterView]:
        """Return every parameter with state, after creating the missing state of trainable ones."""
        views = iter(self._views)
        found = []
        for group, i in self._indices():
            parameter = group["params"][i]
            state = self.state.get(parameter)
            if not state and not parameter.requires_grad:
                continue
            view = next(views, None)
            if view is None or state is None or not view.serves(group, i, state):
                self.create_state()
                return self._views
            found.append(view)
        return found

    def entries(self) -> Iterator[ParameterView]:
        """Yield a view of every parameter with state."""
        for group, i in self._indices():
            if state := self.state.get(group["params"][i]):
                yield ParameterView(group, i, state)

    def coordinates(self) -> Iterator[tuple[str, Coordinates]]:
        """Yield (name, coordinates) of the local part of every curved parameter with state."""
        return ((view.name, view.coordinates()) for view in self.entries() if view.curved)

    def load_state_dict(self, state_dict: dict[str, Any], *, by_position: bool = False) -> None:
        """Load a state; raw weights, panels and moments keep their precision under half-precision parameters.

        As in torch, learning rates and all settings of the rule come from the saved state. `total_steps` and
        `max_grad_norm` belong to the run and stay unchanged.

        Args:
            state_dict: the result of `state_dict()`.
            by_position: ignore the names of parameters, for a model with renamed modules. Shapes and maps are still
                compared.

        Raises:
            ValueError: the state of another optimizer, of other parameters or of another map. Nothing is changed.
        """

        def check(_: Any, found: dict[str, Any]) -> None:
            """Check the state after the user's own hooks."""
            check_saved(found["param_groups"], self.param_groups, found["state"], self.moments_, by_position)
            own = [{key: group[key] for key in _OWN if group[key] != LATER} for group in self.param_groups]
            self._loading = (found, own)

        hook = self.register_load_state_dict_pre_hook(check)
        try:
            super().load_state_dict(state_dict)  # casts state to the parameter's dtype, which __setstate__ undoes
        finally:
            hook.remove()
            self.__dict__.pop("_loading", None)

    def _adopt(self, saved: dict[str, Any], own: Sequence[Group]) -> None:
        """Restore the precision and placement of a loaded state, and the `own` settings of the groups."""
        for group, settings in zip(self.param_groups, own, strict=True):
            group.update(settings, steps=int(group["steps"]))
        keys = itertools.chain.from_iterable(group["params"] for group in saved["param_groups"])
        for (group, i), key in zip(self._indices(), keys, strict=True):
            if values := saved["state"].get(key):  # may be empty: trainers load one, then replace the parameters
                view = ParameterView(group, i, self.state[group["params"][i]])
                view.state.update({name: view.adopt(name, value) for name, value in values.items()})
        if saved["state"]:
            self._start.cancel(self.entries())

    def _indices(self) -> Iterator[tuple[Group, int]]:
        for group in self.param_groups:
            for i in range(len(group["params"])):
                yield group, i

    def create_state(self) -> None:
        """Create the state of every trainable parameter, with or without gradient, and renew all views."""
        errors: dict[int, ValueError] = {}
        made: list[tuple[ParameterView, int]] = []
        fresh: list[ParameterView] = []
        for group, i in self._indices():
            parameter = group["params"][i]
            if not parameter.requires_grad and not self.state.get(parameter):
                continue
            view = ParameterView(group, i, self.state[parameter])
            new = not view.state
            try:
                if view.create_state(self.moments_):
                    fresh.append(view)
            except ValueError as error:
                errors[view.key] = error
            if new or view.key in errors:
                made.append((view, Outcome.NOT_FINITE if view.key in errors else Outcome.FINE))
        for view, outcome in agree(made):
            if outcome != Outcome.FINE:
                raise errors.get(view.key, ValueError(f"{view.name}: another process refuses its part"))
        self._views = list(self.entries())
        check_overlap(self._views)
        self._writes.know(fresh)

    @torch.no_grad()
    def take_over_writes(self) -> None:
        """Match the raw weights to all writes from outside since the last step, also through `.data`.

        Every step does so for the writes that it detects (docs/how-to/weights.md). This method compares every entry.
        With a sharded model every process must call it.

        >>> import symexplin as sel
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4))
        >>> optimizer = sel.SELAdamW(sel.param_groups(model, lr=1e-3, config=sel.preset("frozen")))
        >>> optimizer.create_state()
        >>> model[0].weight.data[0, 0] = 0.5
        >>> optimizer.take_over_writes()
        """
        views = list(self.entries())
        outcomes = [(view, take_over(view, self._writes.knows(view))) for view in views if view.watched]
        for view, outcome in agree(outcomes):
            self._settle(view, outcome)
        self._writes.remember(views)

    def _take_over(self, views: Sequence[ParameterView]) -> None:
        """Take over the detected writes, in each process those into its own part."""
        for view in self._writes.noticed(views):
            exact = self._writes.knows(view)
            outcome = take_over(view, exact)
            if outcome == Outcome.OUT_OF_REACH and view.placement.groups:
                raise ValueError(
                    f"{view.name}: weights written from outside are out of reach of the learned scales, which all "
                    "processes share. Call optimizer.take_over_writes() in every process after the write"
                )
            self._settle(view, outcome)

    def _settle(self, view: ParameterView, outcome: int) -> None:
        """Handle a write that could not be taken over."""
        if outcome == Outcome.NOT_FINITE:
            count = int((~view.value.isfinite()).sum())
            raise ValueError(
                f"{view.name}: {count} of {view.value.numel()} elements written from outside are not finite"
                + ("" if count else " here, but some are in another process")
            )
        if outcome == Outcome.OUT_OF_REACH:
            warnings.warn(
                f"{view.name}: weights written from outside, or loaded in another precision, are out of reach of the "
                "learned scales. The scales start anew; the weights keep their values",
                stacklevel=5,
            )
            view.restart(self.moments_)
            self._batches = ([], [])  # batches have parameters with equal counts


def _count(active: Sequence[ParameterView]) -> None:
    """Add 1 to the numbers of updates of the parameters."""
    counts = [view.state[key] for view in active for key in COUNTS if key in view.state]
    if counts:  # add a tensor: a number would be converted once per count
        torch._foreach_add_(counts, torch.ones((), device="cpu"), alpha=1.0)
