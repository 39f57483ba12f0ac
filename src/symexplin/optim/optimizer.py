"""The map in the optimizer: the model has ordinary weights at every step, and rules update raw weights."""

import contextlib
import copy
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from symexplin.checks import LATER, as_numbers, check_curved, check_flag, check_group, check_saved, check_whole, warn
from symexplin.config import SELConfig
from symexplin.optim.annealing import multipliers
from symexplin.optim.batch import Batch, Rule
from symexplin.optim.entry import Entry, Leaf, shapes_of
from symexplin.optim.groups import Group, config_of, is_curved, param_groups
from symexplin.optim.packs import Packs
from symexplin.optim.shard import ProcessGroups, any_process, global_norm, local
from symexplin.optim.writes import Writes
from symexplin.routes import rate_of
from symexplin.spec import CurvedWeight

__all__ = ["RawSpaceOptimizer"]

_OWN = ("total_steps", "max_grad_norm")  # settings that a loaded state does not change
# Settings of every optimizer, which a subclass may leave out of its defaults.
_SETTINGS = {"weight_decay": 0.0, "total_steps": None, "max_grad_norm": None}
_NO_GRAPH = (
    "step must be called outside of a CUDA graph: rates and counts are Python numbers, which a graph would repeat"
)
_NO_GRADIENT = (
    "no parameter has a gradient at the first step: build the optimizer after fully_shard, over the model that is "
    "trained, and call backward() before step()"
)
_LOOK_EVERY = 100  # steps between checks of the norm on an accelerator, since each waits for the device


class RawSpaceOptimizer(torch.optim.Optimizer):
    """Base of the optimizers that train in curved weight space; subclasses define `moments` and :meth:`rule_`.

    A step pulls the gradients of the weights back to raw space, clips them by one global norm over raw weights, scales
    and plain parameters, lets the rule update raw values, and writes the new weights into the model. It does not wait
    for the device. :mod:`symexplin.optim.entry` lists the state. Under `fully_shard` (FSDP2) the state is split as the
    parameter is; scales that lack the split dimension are replicated.
    """

    moments: ClassVar[tuple[str, ...]] = ()
    grad_norm: Tensor | None  # of the last step
    _entries: list[Entry]
    _packs: Packs
    _writes: Writes
    _diverged: bool  # and the user has been warned

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        config: SELConfig | None = None,
        no_decay: Sequence[str] = (),
    ) -> None:
        defaults = as_numbers(defaults | {key: value for key, value in _SETTINGS.items() if key not in defaults})
        is_model = isinstance(params, nn.Module)
        if is_model:
            given = {key: defaults[key] for key in ("lr", "weight_decay")}
            params = param_groups(params, **given, config=config, no_decay=no_decay)
        params = list(params) if isinstance(params, Iterable) else [params]
        check_curved(params)
        if not is_model and (config is not None or no_decay):
            raise ValueError("config and no_decay must be given with a model, got groups")
        super().__init__(params, defaults)
        rates = {group["lr"] for group in self.param_groups}
        if len(rates) == 1:  # the peak rate for schedulers such as transformers' polynomial one
            self.defaults["lr"] = rates.pop()
        for key, value in self.defaults.items():
            if isinstance(value, Mapping):  # by name pattern; a group that is added later takes the largest
                self.defaults[key] = max(group[key] for group in self.param_groups)
        self._forget()

    # ---- what a subclass defines ----

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise ValueError if a group has a setting of the rule that is out of range."""

    def moment_names(self, kind: str, axes: str) -> tuple[str, ...]:  # noqa: ARG002
        """Return the names of the moments of a leaf of this kind; `axes` are those of a raw weight, else empty."""
        return self.moments

    def rule_(self, leaves: Sequence[Leaf], group: dict[str, Any]) -> None:
        """Update `leaf.value` in place from `leaf.grad` for leaves of one group."""
        raise NotImplementedError

    # ---- a step ----

    @_disable_dynamo
    @torch.inference_mode(False)
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
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(_NO_GRAPH)
        for group in self.param_groups:
            multipliers(group)  # raises now if T is missing, before anything has changed
        fresh = not any(self.state.values())
        entries = self._current_entries()
        if self.grad_norm is None and all(entry.parameter.grad is None for entry in entries):
            warn(_NO_GRADIENT)  # at the first step since it was built or loaded
        self._writes.adopt(entries)
        active = _active(entries)
        rule = Rule(self.moment_names, self._is_adamw())
        if not self._packs.is_valid(entries, rule):
            self._packs = Packs(entries, rule)
        batches = self._packs.of(active)
        self.grad_norm = norm = _norm(entries, active, batches)
        clip = self._clip(entries, norm)
        if not (fresh and self._is_idle(norm)):
            for batch in batches:
                batch.advance()
                self._update(batch, clip)
                batch.finish()
            for group in self.param_groups:
                group["steps"] += 1
        self._writes.remember(entries)

    def _update(self, batch: Batch, clip: Tensor | None) -> None:
        """Update the scales and weights of a batch."""
        if batch.is_fused:
            batch.update(clip)
            return
        if scales := batch.scale_leaves(clip):
            self.rule_(scales, batch.group)
        for part in batch.parts():
            self.rule_(batch.pull(part, clip), batch.group)
            batch.push(part)

    def _is_adamw(self) -> bool:
        """Whether the rule is AdamW's, so that kernels may take its place."""
        return False

    def _full_precision(self) -> contextlib.ExitStack:
        """Disable autocast during the step."""
        stack = contextlib.ExitStack()
        kinds = {group["params"][0].device.type for group in self.param_groups if group["params"]}
        for kind in kinds - {"meta"}:  # whose parameters an entry refuses
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        return stack

    def _clip(self, entries: Sequence[Entry], norm: Tensor) -> Tensor | None:
        """Return the clipping coefficient of the gradients, max_norm/(norm + 1e-6) and at most 1, as torch does.

        Warns once if the norm is not finite. On an accelerator only every hundredth step checks it.
        """
        max_norm, step = self.param_groups[0]["max_grad_norm"], self._steps() + 1
        if not self._diverged and (norm.device.type == "cpu" or step % _LOOK_EVERY == 0):
            self._diverged = not bool(norm.isfinite())
            if self._diverged:
                warn(f"step {step}: {_not_finite(entries)} is not finite")
        return None if max_norm is None else torch.clamp(max_norm / (norm + 1e-6), max=1.0)

    def _is_idle(self, norm: Tensor) -> bool:
        """Whether all gradients and rates are 0, as in the step of torch.distributed.checkpoint to create the state.

        Counting such a step would shift the annealing and the bias correction of empty moments.
        """
        return all(rate_of(group) == 0.0 for group in self.param_groups) and float(norm) == 0.0

    def _steps(self) -> int:
        return max(int(group["steps"]) for group in self.param_groups)

    # ---- entries and their state ----

    def _current_entries(self) -> list[Entry]:
        """Return every parameter with state, after creating the missing state of trainable ones."""
        parameters = [group["params"][i] for group, i in self._indices() if self._is_trained(group["params"][i])]
        known = len(parameters) == len(self._entries) and all(
            entry.parameter is parameter and entry.is_current(self.state.get(parameter))
            for entry, parameter in zip(self._entries, parameters, strict=True)
        )
        if not known:
            self.create_state()
        return self._entries

    @torch.inference_mode(False)
    @torch.no_grad()
    def create_state(self) -> None:
        """Create the state of every trainable parameter, with or without gradient."""
        for group, i in self._indices():
            parameter = group["params"][i]
            if self._is_trained(parameter):
                entry = Entry(group, i, self.state.get(parameter) or {})
                if not entry.state:
                    self._writes.remember([entry])  # its raw weight will be that of the present weight
                entry.create_state(self.moment_names)
                self.state[parameter] = entry.state
        self._entries = list(self.entries())

    def _is_trained(self, parameter: Tensor) -> bool:
        """Whether a parameter has state. A frozen one that has a gradient counts: layers may be frozen alternately."""
        return bool(parameter.requires_grad or parameter.grad is not None or self.state.get(parameter))

    def entries(self) -> Iterator[Entry]:
        """Yield every parameter with state."""
        for group, i in self._indices():
            if state := self.state.get(group["params"][i]):
                yield Entry(group, i, state)

    def curved(self) -> Iterator[tuple[str, CurvedWeight]]:
        """Yield (name, map) of the local part of every curved parameter with state."""
        return ((entry.name, entry.curved_weight()) for entry in self.entries() if entry.curved)

    def _indices(self) -> Iterator[tuple[Group, int]]:
        for group in self.param_groups:
            for i in range(len(group["params"])):
                yield group, i

    @torch.inference_mode(False)
    @torch.no_grad()
    def take_over_writes(self) -> None:
        """Adopt all writes from outside since the last step into stored raw weights, also those through `.data`.

        Every step adopts the writes that change a parameter's `_version` or address. This method compares every entry,
        and reads the scales of the state again. Maps without a stored raw weight, such as the default, never need it.

        >>> import symexplin as sel
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4))
        >>> optimizer = sel.SELAdamW(sel.param_groups(model, lr=1e-3, config=sel.preset("frozen")))
        >>> optimizer.create_state()
        >>> model[0].weight.data[0, 0] = 0.5
        >>> optimizer.take_over_writes()
        """
        entries = list(self.entries())
        self._writes.adopt(entries, compare_all=True)
        self._writes.remember(entries)
        self._packs = Packs([], Rule(self.moment_names, self._is_adamw()))

    # ---- groups, copies and saved states ----

    def __repr__(self) -> str:
        """Return the map, the groups with their rates and the settings in a few lines.

        >>> import symexplin as sel
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
        >>> sel.SELAdamW(model, lr=1e-3, config=sel.preset("exp_only", m=sel.Scale()), total_steps=100)
        SELAdamW(
          map: exp_only, beta 1.875, e learned (row_col_mult, k 50 to 8); width 64
          curved: 2 tensors, 4,160 numbers, lr 0.001 (e 0.015 to 0.0024), weight_decay 0.01
          plain: 2 tensors, 128 numbers, lr 0.001, weight_decay 0.01
          betas (0.9, 0.999), eps 1e-08, total_steps 100, max_grad_norm None; 0 steps taken
        )
        """
        first = self.param_groups[0]
        settings = {key: first[key] for key in self.defaults if key in first and key not in _SHOWN}
        last = ", ".join(f"{key} {value}" for key, value in settings.items())
        lines = [*_map_lines(self.param_groups), *map(_line, self.param_groups), f"{last}; {self._steps()} steps taken"]
        return "\n".join([f"{type(self).__name__}(", *(f"  {line}" for line in lines), ")"])

    def _forget(self) -> None:
        """Drop what follows from groups and state."""
        self.grad_norm = None
        self._entries = []
        self._packs = Packs([], Rule(self.moment_names, self._is_adamw()))
        self._writes = Writes()
        self._diverged = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a state that was pickled, copied or loaded."""
        super().__setstate__(state)
        self._forget()
        loading = self.__dict__.pop("_loading", None)
        if loading is not None:
            self._restore(*loading)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a copy of a group, after the constructor's checks: settings, aligned lists, shapes, T of the annealing.

        Settings given as tensors or arrays of one element become Python numbers.
        """
        super().add_param_group(copy.copy(param_group))  # not dict(): torch refuses other types
        group = self.param_groups[-1]
        group |= {key: as_numbers(value) for key, value in group.items() if key != "params"}
        group.setdefault("role", "plain")
        group.setdefault("steps", 0)
        try:
            check_group(group, self.param_groups[0])
            multipliers(group)
            self.check_group(group)
        except ValueError:
            self.param_groups.pop()
            raise

    def set_total_steps(self, total_steps: int, *, restart: bool = False) -> None:
        """Set T of the annealing, after ``total_steps="later"`` or for a run of another length.

        `restart` restarts the annealing, for a second run with a new learning-rate schedule.
        """
        total_steps, restart = check_whole("total_steps", total_steps), check_flag("restart", restart)
        for settings in (self.defaults, *self.param_groups):
            settings["total_steps"] = total_steps
        for group in self.param_groups if restart else ():
            group["steps"] = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch does, with rates that a schedule has set to NumPy's numbers as Python's."""
        hook = self.register_state_dict_post_hook(_with_python_numbers, prepend=True)
        try:
            return super().state_dict()
        finally:
            hook.remove()

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled or copied, with tensors of their own in the states."""
        state = defaultdict(dict, {key: _unpacked(state) for key, state in self.state.items()})
        return super().__getstate__() | {"state": state}

    @torch.inference_mode(False)
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; it keeps its precision under half-precision parameters.

        As in torch, learning rates and all settings of the rule come from the saved state. `total_steps` and
        `max_grad_norm` belong to the run and stay unchanged.

        Raises:
            ValueError: the state of another optimizer, of other parameters or of another map. Nothing is changed.
        """

        def check(_: Any, saved: dict[str, Any]) -> None:
            """Check the state after the user's own hooks."""
            shapes = [
                [shapes_of(group, i, self.moment_names) for i in range(len(group["params"]))]
                for group in self.param_groups
            ]
            check_saved(saved, self.param_groups, shapes)
            own = [{key: group[key] for key in _OWN if group[key] != LATER} for group in self.param_groups]
            self._loading = (saved, own)

        hook = self.register_load_state_dict_pre_hook(check)
        try:
            super().load_state_dict(state_dict)  # casts state to the parameter's dtype, which __setstate__ undoes
        finally:
            hook.remove()
            self.__dict__.pop("_loading", None)

    def _restore(self, saved: dict[str, Any], own: Sequence[Group]) -> None:
        """Restore the precision and placement of a loaded state, and the `own` settings of the groups."""
        for group, settings in zip(self.param_groups, own, strict=True):
            group.update(settings, steps=int(group.get("steps", 0)))
        keys = itertools.chain.from_iterable(group["params"] for group in saved["param_groups"])
        for (group, i), key in zip(self._indices(), keys, strict=True):
            if values := saved["state"].get(key):  # may be empty: trainers load one, then replace the parameters
                entry = Entry(group, i, self.state[group["params"][i]])
                entry.state.update({name: entry.loaded(name, value) for name, value in values.items()})
                if not entry.is_half:  # the state of a model that had half precision
                    entry.state.pop("master", None)


def _with_python_numbers(_: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    saved["param_groups"] = as_numbers(saved["param_groups"])
    saved["state"] = {key: _unpacked(state) for key, state in saved["state"].items()}


def _unpacked(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state with a copy of each tensor that is a view: a pickle would have all that the view is of."""
    return {key: value.clone() if _is_view(value) else value for key, value in state.items()}


def _is_view(value: Any) -> bool:
    if not isinstance(value, Tensor):
        return False
    part = local(value)
    return part.untyped_storage().nbytes() > part.numel() * part.element_size()


def _active(entries: Sequence[Entry]) -> list[Entry]:
    """Return the parameters that a step updates, those with a gradient.

    The scales of a split parameter belong to several processes. It is updated in all of them, or in none.
    """
    shared = [entry for entry in entries if entry.scales and entry.shard.mesh is not None]
    flags = any_process([e.parameter.grad is not None for e in shared], [e.shard.mesh for e in shared])
    known = dict(zip(map(id, shared), flags, strict=True))
    return [entry for entry in entries if known.get(id(entry), entry.parameter.grad is not None)]


def _norm(entries: Sequence[Entry], active: Sequence[Entry], batches: Sequence[Batch]) -> Tensor:
    """Return the global norm of the gradients; those of split parameters' scales are summed over processes."""
    # Alike in every process.
    norms: dict[ProcessGroups, list[Tensor]] = {entry.shard.process_groups: [] for entry in entries}
    for batch in batches:
        norms[batch.entries[0].shard.process_groups].append(batch.norm())
    # In the order of the parameters, which is the same in every process.
    shared = [
        (entry.shard.process_groups, shard.process_groups, entry.grads[name])
        for entry in active
        if entry.shard.process_groups
        for name, (_, shard) in entry.scales.items()
    ]
    devices = {group: entry.shard.device_type for entry in entries for group in entry.shard.process_groups}
    return global_norm(norms, shared, devices)


def _not_finite(entries: Sequence[Entry]) -> str:
    """Return the name of the first weight or gradient that is not finite, else of the norm of raw gradients."""
    for entry in entries:
        grad = entry.parameter.grad
        for name, tensor in ((entry.name, entry.value), (f"the gradient of {entry.name}", grad)):
            if tensor is not None and not bool(local(tensor).isfinite().all()):
                return name
    return "the norm of the raw gradients"


_SHOWN = ("lr", "weight_decay")  # settings that lines of their own show


def _map_lines(groups: Sequence[Group]) -> list[str]:
    """Return a line for each map of the groups: its form, its scales and the model's width."""
    curved = filter(is_curved, groups)
    return list(dict.fromkeys(f"map: {config_of(g)}; width {g['width']}" for g in curved))


def _line(group: Group) -> str:
    """Return the line of a group: its size, its rates, and the learning rates of its scales."""
    numbers, rate = sum(parameter.numel() for parameter in group["params"]), rate_of(group)
    scales = []
    for key, k in group.items():
        if key.startswith("k_"):
            first, last = (f"{rate * end:g}" for end in k)
            scales.append(f"{key[2:]} {first}" + (f" to {last}" if last != first else ""))
    lr = f"lr {rate:g}" + (f" ({', '.join(scales)})" if scales else "")
    words = f"{len(group['params'])} tensors, {numbers:,} numbers, {lr}, weight_decay {float(group['weight_decay']):g}"
    is_linear = is_curved(group) and config_of(group).mode == "linear"
    return f"{'mapped' if is_linear else group['role']}: {words}"
