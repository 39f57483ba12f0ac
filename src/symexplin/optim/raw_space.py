"""The map in the optimizer: raw weights as optimizer state, ordinary weights in the model at every moment.

One step: notice writes from outside, pull the gradients of the effective weights back to raw space, clip by one
global norm over raw weights, scales and plain parameters, apply a rule to every raw tensor, write the new effective
weights. The rule (AdamW, ...) belongs to the subclass; nothing here knows one. Nothing in a step waits for the device.
"""

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from symexplin.coordinates import Coordinates
from symexplin.optim.checks import check_group, check_saved
from symexplin.optim.entry import FINE, NOT_FINITE, OUT_OF_REACH, Entry
from symexplin.optim.fused import Fused
from symexplin.optim.groups import Group, is_curved
from symexplin.optim.rates import LATER, count, multipliers, rate_of
from symexplin.optim.reduction import UNEVEN, agree, reduce_
from symexplin.optim.target import COUNTS, Target
from symexplin.optim.watch import Watch
from symexplin.validation import check_whole

__all__ = ["RawSpaceOptimizer"]

Pulled = list[tuple[Entry, list[Target]]]
Marks = dict[int, tuple[Tensor, int]]

_NO_GRADIENT = (
    "no parameter has a gradient at the first step: if fully_shard has wrapped the model since symexplin.param_groups, "
    "the groups hold parameters that it no longer uses"
)
_OWN = ("total_steps", "max_grad_norm", "capturable")  # settings that a loaded state leaves alone


class RawSpaceOptimizer(torch.optim.Optimizer):
    """Base of the optimizers that train in curved weight space; subclasses give `moments` and :meth:`rule_`.

    State of a curved parameter: "step", "scale_step", "raw" (fp32; float64 for a float64 parameter), the panels that
    its scales need, and one moment of each name for the raw weight ("exp_avg") and for each panel ("panel0_exp_avg").
    A plain parameter has "step", its moments and, in half precision, "raw", its fp32 master copy.

    Under `fully_shard` (FSDP2) all of them are split as the parameter is, but for panels along the other dimension and
    numbers, which every process has; their gradients and the global norm are summed in one all-reduce a step.
    """

    moments: ClassVar[tuple[str, ...]] = ()

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        rates = {group["lr"] for group in self.param_groups}
        if len(rates) == 1:  # schedulers, such as transformers' polynomial one, take it for the peak
            self.defaults["lr"] = rates.pop()
        if not any(is_curved(group) for group in self.param_groups):
            raise ValueError("params has no curved group; pass symexplin.param_groups(model, ...) of a plain model")
        self._reset_caches()

    def _reset_caches(self) -> None:
        self.grad_norm: Tensor | None = None
        self._entries: dict[int, Entry] = {}
        self._fused: list[Fused] = []
        self._watch = Watch()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._reset_caches()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, checking it as the constructor does: settings, aligned lists, shapes, T of the annealing."""
        super().add_param_group(param_group)
        try:
            check_group(self.param_groups[-1], self.param_groups[0])
            self.check_(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    def set_total_steps(self, total_steps: int, *, restart: bool = False) -> None:
        """Set T of the annealing, for an optimizer made with ``total_steps="later"`` or whose run has changed.

        `restart`: begin the annealing anew, as a second run with a fresh learning-rate schedule does.
        """
        check_whole("total_steps", total_steps)
        for settings in (self.defaults, *self.param_groups):
            settings["total_steps"] = total_steps
        for group in self.param_groups if restart else ():
            group["steps"] *= 0

    def check_(self, group: dict[str, Any]) -> None:
        """Raise ValueError where a setting of the rule is out of range in a group."""

    def moments_(self, kind: str, shape: tuple[int, ...]) -> tuple[str, ...]:  # noqa: ARG002
        """Return the names of the moments of a target of that kind and whole shape."""
        return self.moments

    def rule_(self, target: Target, group: dict[str, Any]) -> None:
        """Update `target.value` in place from `target.grad`; `target.step` counts this update already."""
        raise NotImplementedError

    def fuse_(self, entries: Sequence[Entry], before: Sequence[Fused]) -> list[Fused]:  # noqa: ARG002
        """Return those of the entries that kernels pull back, update and write; `before`: those of the last step."""
        return []

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one optimizer step; return what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        fresh = not any(self.state.values())
        entries = self._unchanged()
        if entries is None:
            self.create_state()
            entries = list(self.entries())
            self._entries = {entry.key: entry for entry in entries}
        looking = not _capturing()  # a graph that is replayed would not look again
        if looking:
            self._take_over(entries)
        else:
            self._watch.held = {}
        active = [entry for entry in entries if entry.parameter.grad is not None]
        self._fused = self.fuse_(active, self._fused)
        pulled = self._pull(active)
        factor = self._clip(entries, pulled)
        if fresh and not active:
            warnings.warn(_NO_GRADIENT, stacklevel=3)
        marks: Marks = {}
        if not (fresh and self._idle()):
            marks = self._update(active, pulled, factor)
            for group in self.param_groups:
                group["steps"] += 1
        if looking:
            self._watch.remember({entry.key: entry.value for entry in entries if entry.watched}, marks)
        return loss

    def _update(self, active: Sequence[Entry], pulled: Pulled, factor: Tensor | None) -> Marks:
        """Apply the rule and write the weights; return where the marks of those are that kernels wrote, by `id`."""
        count([entry.state[key] for entry in active for key in COUNTS if key in entry.state])
        marks: Marks = {}
        for fused in self._fused:
            written = fused.update(factor, self._watch.held)
            marks |= {entry.key: (written, row) for row, entry in enumerate(fused.entries)}
        for entry, targets in pulled:
            for target in targets:
                if factor is not None:  # never in place: it may be p.grad
                    target.grad = target.grad * factor.to(target.grad.device)
                self.rule_(target, entry.group)
            self._write(entry)
        return marks

    def _idle(self) -> bool:
        """Whether this step has nothing to do: torch.distributed.checkpoint takes one to see the state.

        Counting it would shift the annealing and the correction of moments that are still empty.
        """
        norm = self.grad_norm
        return norm is not None and float(norm) == 0.0 and all(float(group["lr"]) == 0.0 for group in self.param_groups)

    def _unchanged(self) -> list[Entry] | None:
        """Return the entries of the last step if all of them serve this one, and no parameter lacks its state."""
        found: list[Entry] = []
        for group in self.param_groups:
            if group["capturable"] != isinstance(group["steps"], Tensor):
                return None
            for i, parameter in enumerate(group["params"]):
                entry, state = self._entries.get(id(parameter)), self.state.get(parameter)
                if entry is not None and state is not None and entry.serves(group, i, state):
                    found.append(entry)
                elif state or parameter.requires_grad:
                    return None
        return found

    def entries(self) -> Iterator[Entry]:
        """Yield every parameter that has state, with its state and place."""
        for group, i in self._indices():
            parameter = group["params"][i]
            if state := self.state.get(parameter):
                entry = self._entries.get(id(parameter))
                if entry is None or not entry.serves(group, i, state):
                    entry = self._entries[id(parameter)] = Entry(group, i, state)
                yield entry

    def coordinates(self) -> Iterator[tuple[str, Coordinates]]:
        """Yield (name, coordinates) of every curved parameter that has state, of the part that lies here."""
        return ((entry.name, entry.coordinates()) for entry in self.entries() if entry.curved)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the groups' count of steps as a number wherever it lies."""
        state = super().state_dict()
        for group in state["param_groups"]:
            group["steps"] = int(group["steps"])
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load, keeping raw weights, panels and moments in their own precision under half-precision parameters.

        As in torch, rates, betas and decay are the saved ones; `total_steps`, `max_grad_norm` and `capturable`, which
        elsewhere belong to the run and not to an optimizer, stay what this one was given.

        Raises:
            ValueError: the state of another optimizer, of other parameters or of another map; nothing is changed.
        """
        state = state_dict["state"]
        check_saved(state_dict["param_groups"], self.param_groups, state, self.moments_)
        keys = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        saved = [state.get(key, {}) for key in keys]
        own = [{key: group[key] for key in _OWN if group[key] != LATER} for group in self.param_groups]
        super().load_state_dict(state_dict)  # casts floating state to the parameter's dtype
        for group, settings in zip(self.param_groups, own, strict=True):
            group.update(settings)
        for (group, i), values in zip(self._indices(), saved, strict=True):
            if not values:
                continue  # no state, no key: trainers load an empty one, then replace the parameters
            entry = Entry(group, i, self.state[group["params"][i]])
            for name, value in values.items():
                if isinstance(value, Tensor):
                    entry.state[name] = entry.adopt(name, value)
        self._entries, self._fused, self._watch = {}, [], Watch()

    def _indices(self) -> Iterator[tuple[Group, int]]:
        for group in self.param_groups:
            for i in range(len(group["params"])):
                yield group, i

    def create_state(self) -> None:
        """Give every trainable parameter its state at the first step, also those without a gradient."""
        errors: dict[int, ValueError] = {}
        made: list[tuple[Entry, int]] = []
        for group, i in self._indices():
            parameter = group["params"][i]
            entry = Entry(group, i, self.state[parameter])
            new = not entry.state and parameter.requires_grad
            try:
                if entry.create_state(self.moments_):
                    self._watch.remember({entry.key: entry.value})
            except ValueError as error:
                errors[id(parameter)] = error
            if new or id(parameter) in errors:
                made.append((entry, NOT_FINITE if id(parameter) in errors else FINE))
        for entry, outcome in agree(made):
            if outcome != FINE:
                raise errors.get(entry.key, ValueError(f"{entry.name}: another process refuses its part"))
        for group in self.param_groups:
            if group["capturable"] != isinstance(group["steps"], Tensor):
                device, steps = group["params"][0].device, float(group["steps"])
                group["steps"] = torch.tensor(steps, device=device) if group["capturable"] else int(steps)

    @torch.no_grad()
    def take_over_writes(self) -> None:
        """Take over what somebody else has written into the parameters since the last step, as each step does first."""
        self._take_over(self.entries())

    def _take_over(self, entries: Iterable[Entry]) -> None:
        late, together = self._watch.arrived(), []
        watched = [entry for entry in entries if entry.watched]
        written = self._watch.written({entry.key: entry.value for entry in watched})
        for entry in watched:
            code, split = late.get(entry.key, 0), entry.placement.group is not None
            if code & UNEVEN:
                raise ValueError(
                    f"{entry.name}: in the last step some processes had a gradient of it and others had none"
                )
            if code or entry.key in written:
                outcome = entry.take_over(self._watch.knows(entry.key))
                if code and split:
                    together.append((entry, outcome))
                elif outcome != FINE and split:
                    self._watch.hold(entry.key, entry.value.device)  # the other processes do not know of it yet
                else:
                    self._settle(entry, outcome)
        for entry, outcome in agree(together):
            self._settle(entry, outcome)

    def _settle(self, entry: Entry, outcome: int) -> None:
        """Deal with a write that could not be taken over."""
        if outcome == NOT_FINITE:
            count = int((~entry.value.isfinite()).sum())
            raise ValueError(
                f"{entry.name}: {count} of {entry.value.numel()} elements written from outside are not finite"
            )
        if outcome == OUT_OF_REACH:
            warnings.warn(
                f"{entry.name}: weights written from outside are out of reach of the learned scales, which start anew; "
                "the weights themselves are taken over",
                stacklevel=5,
            )
            entry.restart(self.moments_)

    def _pull(self, active: Iterable[Entry]) -> Pulled:
        """Pull all gradients back to raw space; return the targets of what kernels do not take."""
        taken = {id(entry) for fused in self._fused for entry in fused.entries}
        for fused in self._fused:
            fused.pull()
        rates = {id(group): (rate_of(group), multipliers(group)) for group in self.param_groups}
        return [(entry, entry.pull(*rates[id(entry.group)])) for entry in active if id(entry) not in taken]

    def _clip(self, entries: list[Entry], pulled: Pulled) -> Tensor | None:
        """Complete the gradients over all processes; return what brings them to max_grad_norm.

        As torch's clip_grad_norm_: max_norm/(norm + 1e-6), at most 1.
        """
        targets = {entry.key: targets for entry, targets in pulled}
        for fused in self._fused:
            targets |= fused.targets
        measures = [tensor for fused in self._fused for tensor in fused.measures()]
        self.grad_norm, late = reduce_(entries, targets, self._watch.held, measures)
        for keys, codes in [*late, *self._own_flags(entries)]:
            self._watch.send(keys, codes)
        max_norm = self.param_groups[0]["max_grad_norm"]
        return None if max_norm is None else torch.clamp(max_norm / (self.grad_norm + 1e-6), max=1.0)

    def _own_flags(self, entries: list[Entry]) -> Iterator[tuple[list[int], Tensor]]:
        """Yield the flags of parameters that lie whole on an accelerator."""
        whole = [entry.key for entry in entries if entry.placement.group is None]
        flags = [(key, self._watch.held[key]) for key in whole if key in self._watch.held]
        for device in {flag.device for _, flag in flags}:
            here = [(key, flag) for key, flag in flags if flag.device == device]
            yield [key for key, _ in here], torch.stack([flag for _, flag in here])

    def _write(self, entry: Entry) -> None:
        """Write the new values into the model; at lr = 0 nothing has moved and its bits stay."""
        lr, keep = rate_of(entry.group), self._watch.held.get(entry.key)
        if isinstance(lr, Tensor):
            still = lr.to(entry.value.device) == 0.0
            keep = still if keep is None else keep | still
        elif lr == 0.0:
            return
        entry.write(keep)


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
