"""Refuse groups, saved states and parameters that a SEL optimizer does not support; warn if a run has diverged."""

import dataclasses
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from symexplin.config import SELConfig
from symexplin.optim.annealing import LATER, multipliers
from symexplin.optim.entry import COUNTS, Entry, Moments, moment_key
from symexplin.optim.groups import ALIGNED, Group, config_of, is_curved, map_of, name_of
from symexplin.optim.shard import local
from symexplin.optim.suggest import warn_of_scales
from symexplin.validation import check_flag, check_not_negative, check_positive, check_whole, did_you_mean, warn

__all__ = [
    "argument_names",
    "check_arguments",
    "check_curved",
    "check_finite",
    "check_gradients",
    "check_lists",
    "check_saved",
    "check_settings",
]

State = dict[str, Any]

_KEYS = ("role", "max_grad_norm", "total_steps", "steps")  # keys of every group of a SEL optimizer

_NO_GRADIENT = (
    "no parameter has a gradient at the first step: call backward() before step(). If fully_shard has wrapped the "
    "model since the optimizer was built, it has parameters that the model no longer uses: build it after fully_shard. "
    "Or the optimizer belongs to another model"
)

# Weights of this size occur only in a diverged run, and lead to gradients that are not finite.
_FAR = 1e6

# Switches of torch's optimizers that SEL optimizers do not have.
_SWITCHES = ("amsgrad", "capturable", "differentiable", "maximize")
_KERNELS = ("foreach", "fused")  # choices of an implementation
# What other optimizers, trainers and scripts call the arguments.
_OTHER_NAMES = {
    "max_grad_norm": ("clip", "clip_grad_norm", "clip_norm", "grad_clip", "gradient_clip_val", "max_norm"),
    "lr": ("learning_rate",),
    "weight_decay": ("decay", "wd"),
    "betas": ("beta1", "beta2"),
    "total_steps": ("T", "max_steps", "num_steps", "num_training_steps", "steps"),
}

# Parts of names added by torch.compile, activation checkpointing and FSDP1 (DDP adds a leading "module").
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def check_settings(group: Group, first: Group) -> None:
    """Refuse a group that a SEL optimizer cannot step together with its `first` one, and name the reason."""
    group.setdefault("steps", 0)
    if group["total_steps"] not in (None, LATER):
        check_whole("total_steps", group["total_steps"])
    _check_switches(group)
    if group["max_grad_norm"] is not None:
        try:
            check_positive("max_grad_norm", group["max_grad_norm"])
        except ValueError as error:
            raise ValueError(f"{error}; None: do not clip") from None
    if group["max_grad_norm"] != first["max_grad_norm"]:
        raise ValueError(
            f"max_grad_norm must be equal in all groups, {first['max_grad_norm']}, got {group['max_grad_norm']}: "
            "one norm of all gradients is clipped"
        )
    check_not_negative("lr", group["lr"])
    check_not_negative("weight_decay", group["weight_decay"])
    check_flag("stochastic_rounding", group["stochastic_rounding"])
    for i, parameter in enumerate(group["params"]):
        if not parameter.is_floating_point():
            raise ValueError(f"{name_of(group, i)} must be real and floating point, got {parameter.dtype}")
        if group["stochastic_rounding"] and parameter.dtype == torch.float16:
            raise ValueError(f"stochastic_rounding must be False for float16, got True: {name_of(group, i)} is float16")
    if not is_curved(group):
        if "config" in group:
            raise ValueError("a group with a config must be curved; build it with symexplin.param_groups")
        return
    for key in ALIGNED:
        if len(entries := group.get(key, ())) != len(group["params"]):
            raise ValueError(
                f"{key} must have one entry per parameter, got {len(entries)} for {len(group['params'])}. For an "
                "optimizer over a part of the model, build the groups with symexplin.param_groups(part, whole=model). "
                "Wrappers that divide parameters among processes (ZeroRedundancyOptimizer) are refused; use fully_shard"
            )
    if group["stochastic_rounding"] and not config_of(group).closed:
        raise ValueError(
            "stochastic_rounding must be False for a map that stores raw weights, which keep full precision, got True "
            f"with {config_of(group).describe()}"
        )
    for role in multipliers(group):
        warn_of_scales(role, max(group[f"k_{role}"]) * float(group["lr"]))


def check_curved(kind: str, params: Sequence[Any]) -> None:
    """Refuse parameters without a curved group, and say what the optimizer called `kind` needs instead."""
    roles = {param.get("role") if isinstance(param, dict) else None for param in params}
    if "curved" in roles:
        return
    if None in roles and any(isinstance(param, dict) for param in params):
        raise ValueError(
            f"params must be the model, got groups of parameters: pass `model`, since {kind} needs the parameters' "
            "names, and decay by name, such as weight_decay={'*bias': 0.0, '*': 0.1}"
        )
    if roles <= {None}:
        raise ValueError(
            f"params must be the model, got parameters: pass `model`, since {kind} needs the parameters' names"
        )
    if roles == {"plain"}:
        raise ValueError("params has no curved group: pass these groups to torch.optim.AdamW")
    raise ValueError(
        "params must be of a plain model, got a converted one: pass its symexplin.param_groups to torch.optim.AdamW"
    )


def _check_switches(settings: Mapping[str, Any]) -> None:
    """Refuse a switch of torch's optimizers that is on, and the choice of an implementation."""
    reasons = {switch: "have no such switch" for switch in _SWITCHES if settings.get(switch)}
    reasons |= {key: "choose their kernels themselves" for key in _KERNELS if settings.get(key) is not None}
    for switch, reason in reasons.items():
        raise ValueError(f"{switch} must be left out, got {settings[switch]!r}: SEL optimizers {reason}")


def check_lists(groups: Sequence[Group], entries: Sequence[Entry]) -> None:
    """Refuse edited lists of parameters, since names, shapes and maps are aligned with them.

    Parameters without an entry may take the places of others, as under FSDP2.
    """
    places = {id(entry.parameter): entry.index for entry in entries}
    for g, group in enumerate(groups):
        params = group["params"]
        lists = [group[key] for key in (*ALIGNED, "param_names") if key in group]
        moved = any(places.get(id(p), i) != i for i, p in enumerate(params))
        if lists and (moved or any(len(aligned) != len(params) for aligned in lists)):
            raise ValueError(
                f"params of group {g} must stay the list that the optimizer was built with, {len(lists[0])} parameters "
                f"in their order, got {len(params)}: names and maps are aligned with it. A parameter with "
                "requires_grad=False may stay in it: it gets no update. add_param_group adds parameters"
            )


def check_gradients(groups: Sequence[Group]) -> None:
    """Warn if no parameter has a gradient at the first step.

    Raises:
        RuntimeError: there are several processes, among whose output a warning would be missed.
    """
    if any(parameter.grad is not None for group in groups for parameter in group["params"]):
        return
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise RuntimeError(_NO_GRADIENT)
    warn(_NO_GRADIENT)


def check_arguments(kind: type, others: Mapping[str, Any]) -> None:
    """Refuse keyword arguments that the constructor of an optimizer does not have; torch's switches may be off."""
    _check_switches(others)
    for name, value in others.items():
        if name not in (*_SWITCHES, *_KERNELS):
            raise TypeError(f"{kind.__name__} has no argument {name!r}{_instead(kind, name, value)}")


def _instead(kind: type, name: str, value: object) -> str:
    """Return the end of an error that says what to pass instead of an unknown argument."""
    if name in {field.name for field in dataclasses.fields(SELConfig)}:
        return f": pass config=symexplin.SELConfig({name}={value!r})"
    if name == "preset":
        return f": pass config=symexplin.preset({value!r})" if isinstance(value, str) else ": pass it as config=..."
    for own, others in _OTHER_NAMES.items():
        if name in others:
            return ": pass betas=(beta1, beta2)" if own == "betas" else f": pass {own}={value!r}"
    return did_you_mean(name, argument_names(kind))


def argument_names(kind: type) -> set[str]:
    """Return the names of the arguments of a class's constructor and of those that it extends."""
    return {name for base in kind.__mro__ for name in inspect.signature(base.__init__).parameters}  # type: ignore[misc]


def check_saved(saved: list[Group], groups: list[Group], state: dict[Any, State], moments: Moments) -> None:
    """Refuse a state_dict that does not fit the optimizer's groups, before anything is loaded."""
    missing = sorted({key for group in saved for key in _KEYS if key not in group})
    if missing:
        raise ValueError(
            f"state_dict is not of this SEL optimizer: its groups have the keys {sorted(set().union(*saved))}. To "
            "continue from AdamW, load it into an AdamW over the same parameters, then call symexplin.from_adamw"
        )
    _check_partition(saved, groups)
    for old, new in zip(saved, groups, strict=True):
        if old["role"] != new["role"]:
            raise ValueError(f"state_dict is of other groups: {old['role']!r} where the optimizer has {new['role']!r}")
        if (was := old.get("stochastic_rounding", new["stochastic_rounding"])) != new["stochastic_rounding"]:
            raise ValueError(
                f"state_dict is of another stochastic_rounding: build the optimizer with stochastic_rounding={was}"
            )
        names = (map(_unwrapped, group.get("param_names") or ()) for group in (old, new))
        for a, b in zip(*names, strict=False):  # some tools, such as torchtitan, save no names
            if a != b:
                raise ValueError(
                    f"state_dict is of other parameters: it has {a} where the optimizer has {b}; if modules were "
                    "renamed, rename them in the param_names of the saved groups"
                )
        if is_curved(new):
            _check_map(old, new)
        for i, key in enumerate(old["params"]):
            if state.get(key):
                _check_state(old, i, tuple(new["params"][i].shape), state[key], moments)


def _check_partition(saved: list[Group], groups: list[Group]) -> None:
    """Refuse another number of groups or of their parameters, and name a parameter that is elsewhere."""
    theirs, ours = ([len(group["params"]) for group in of] for of in (saved, groups))
    if theirs == ours:
        return
    had, has = f"groups of {theirs} parameters", f"of {ours}"
    if len(theirs) != len(ours):
        had, has = f"{len(theirs)} group{'s' * (len(theirs) > 1)}", f"{len(ours)}"
    there, here = (
        {_unwrapped(name): (g, group["role"]) for g, group in enumerate(of) for name in group.get("param_names") or ()}
        for of in (saved, groups)
    )
    reason = "lr, weight_decay or no_decay by name differ"
    if not there or not here:  # some tools, such as torchtitan, save no names
        reason += ", or the model"
    elif single := [name for name in (*there, *here) if name not in there or name not in here]:
        reason = f"only the {'state_dict' if single[0] in there else 'optimizer'} has {single[0]}"
    else:
        name = next(name for name in here if there[name] != here[name])
        was, now = there[name][1], here[name][1]
        reason = f"{reason}, such as for {name}" if was == now else f"{name} is {was} there, {now} in the optimizer"
    raise ValueError(f"state_dict has {had}, this optimizer {has}: {reason}")


def _check_map(old: Group, new: Group) -> None:
    saved, present = ({**config_of(g).to_dict(), "axes": list(g["axes"])} for g in (old, new))
    for name in ("mode", *present):
        if saved[name] != present[name]:
            raise ValueError(
                f"state_dict is of another map: {name} is {saved[name]!r} there, {present[name]!r} in the optimizer"
            )


def _unwrapped(name: str) -> str:
    """Return a parameter's name without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS).removeprefix("module.")


def _check_state(group: Group, i: int, shape: tuple[int, ...], state: State, moments: Moments) -> None:
    """Refuse the state of a parameter that lacks a tensor, or has one of another shape."""
    shapes: dict[str, Sequence[int]] = {"step": ()}
    if is_curved(group):
        tensors = {tensor.name: tensor.shape for tensor in map_of(group, i, shape).tensors}
        shapes |= (
            tensors | ({"scale_step": ()} if tensors else {}) | ({} if config_of(group).closed else {"raw": shape})
        )
        shapes |= {moment_key(key, name): size for key, size in tensors.items() for name in moments("scale", "")}
    for name in moments("raw", group["axes"][i]) if is_curved(group) else moments("plain", ""):
        shapes[name] = shape
    for name, size in shapes.items():
        if name not in state:
            raise ValueError(f"state_dict does not fit {name_of(group, i)}: it has no {name!r}")
        actual = () if name in COUNTS else tuple(state[name].shape)  # a count may be a number
        if actual != tuple(size):
            raise ValueError(f"state_dict does not fit {name_of(group, i)}: {name} must be {tuple(size)}, got {actual}")


def _diverged(entries: Sequence[Entry]) -> str:
    """Return the name of what is not finite: a weight, a gradient, or the raw gradient of the largest weight."""
    largest = [float(entry.value.abs().max()) if entry.value.numel() else 0.0 for entry in entries]
    for entry, size in zip(entries, largest, strict=True):
        if not math.isfinite(size):
            return entry.name
    entry = entries[largest.index(max(largest))]
    if max(largest) > _FAR:
        return f"the gradient of {entry.name}, which has reached {max(largest):.1e},"
    for entry in entries:
        if entry.parameter.grad is not None and not bool(local(entry.parameter.grad).isfinite().all()):
            return f"the gradient of {entry.name}"
    return "the norm of all gradients"


def check_finite(norm: Tensor, entries: Sequence[Entry], step: int) -> bool:
    """Return whether the norm of all gradients is finite; if not, warn and name a tensor that has diverged."""
    if bool(norm.isfinite()):
        return True
    warn(
        f"step {step}: {_diverged(entries)} is not finite: the run diverges. Go back to a checkpoint before this step, "
        "and lower the learning rate, lengthen its warm-up or set max_grad_norm"
    )
    return False
