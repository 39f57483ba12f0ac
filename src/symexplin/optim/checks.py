"""Refuse groups, saved states and parameters that a SEL optimizer does not support; warn if a run has diverged."""

import inspect
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from symexplin.axes import axes_of
from symexplin.config import DECAY_TOWARDS, SELConfig
from symexplin.kernels import is_memory
from symexplin.layout import PANELS
from symexplin.optim.groups import ALIGNED, Group, check_rate, is_curved, layout_of, name_of
from symexplin.optim.parameter import ANCHOR, COUNTS, Moments, ParameterView, moment_key
from symexplin.optim.placement import local
from symexplin.optim.rates import warn_of_scales
from symexplin.optim.schedule import LATER, multiplier
from symexplin.optim.small import BITS, is_small, scale_key, scale_shape
from symexplin.validation import check_choice, check_not_negative, check_positive, check_whole, did_you_mean

__all__ = ["check_arguments", "check_finite", "check_group", "check_overlap", "check_saved"]

State = dict[str, Any]

_KEYS = ("role", "max_grad_norm", "total_steps", "steps")  # keys of every group of a SEL optimizer

# Weights of this size occur only in a diverged run, and lead to gradients that are not finite.
_FAR = 1e6

# Switches of torch's optimizers that SEL optimizers do not have.
_SWITCHES = ("amsgrad", "capturable", "differentiable", "foreach", "fused", "maximize")

# Parts of names added by torch.compile, activation checkpointing and FSDP1 (DDP adds a leading "module").
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def check_group(group: Group, first: Group) -> None:
    """Refuse a group that a SEL optimizer cannot step together with its `first` one, and name the reason."""
    group.setdefault("steps", 0)
    if group["total_steps"] not in (None, LATER):
        check_whole("total_steps", group["total_steps"])
    _check_switches(group)
    if group["max_grad_norm"] is not None:
        check_positive("max_grad_norm", group["max_grad_norm"])
    if group["max_grad_norm"] != first["max_grad_norm"]:
        raise ValueError(
            f"max_grad_norm must be equal in all groups, {first['max_grad_norm']}, got {group['max_grad_norm']}: "
            "one norm of all gradients is clipped"
        )
    check_rate(group["lr"])
    check_not_negative("weight_decay", group["weight_decay"])
    if group.setdefault("moment_bits", BITS[0]) not in BITS:
        raise ValueError(f"moment_bits must be 32 or 8, got {group['moment_bits']!r}")
    check_choice("decay_towards", group.setdefault("decay_towards", DECAY_TOWARDS[0]), DECAY_TOWARDS)
    for i, parameter in enumerate(group["params"]):
        if not parameter.is_floating_point():
            raise ValueError(f"{name_of(group, i)} must be real and floating point, got {parameter.dtype}")
    if not is_curved(group):
        return
    for key in ("config", *ALIGNED):
        if key not in group:
            raise ValueError(f"a curved group needs {key!r}; build it with symexplin.param_groups")
    for key in ALIGNED:
        if len(group[key]) != len(group["params"]):
            raise ValueError(
                f"{key} must have one entry per parameter, got {len(group[key])} for {len(group['params'])}. For an "
                "optimizer over a part of the model, build the groups with symexplin.param_groups(part, whole=model). "
                "Wrappers that divide parameters among processes (ZeroRedundancyOptimizer) are refused; use fully_shard"
            )
    for i, parameter in enumerate(group["params"]):
        letters = axes_of(group["axes"][i]).letters
        if parameter.dim() != len(letters):
            raise ValueError(
                f"{name_of(group, i)} must have one dimension per letter of its axes {letters!r}, got the shape "
                f"{tuple(parameter.shape)}"
            )
    for key in group:
        if key.startswith("k_"):
            multiplier(key, group, 0)
            warn_of_scales(key[2:], max(group[key]) * float(group["lr"]))


def _check_switches(settings: Mapping[str, Any]) -> None:
    """Refuse a switch of torch's optimizers that is on."""
    for switch in _SWITCHES:
        if settings.get(switch):
            raise ValueError(f"{switch} must be left out, got {settings[switch]!r}: SEL optimizers have no such switch")


def check_arguments(kind: type, others: Mapping[str, Any]) -> None:
    """Refuse keyword arguments that the constructor of an optimizer does not have; torch's switches may be off."""
    _check_switches(others)
    for name in others.keys() - set(_SWITCHES):
        has = {name for base in kind.__mro__ for name in inspect.signature(base.__init__).parameters}  # type: ignore[misc]
        raise TypeError(f"{kind.__name__} has no argument {name!r}{did_you_mean(name, has)}")


def check_saved(
    saved: list[Group], groups: list[Group], state: dict[Any, State], moments: Moments, by_position: bool
) -> None:
    """Refuse a state_dict that does not fit the optimizer's groups, before anything is loaded.

    With `by_position`, the names of parameters and the name patterns of the configuration may differ.
    """
    for group in filter(is_curved, saved):
        if "beta" in group or not {"config", *ALIGNED} <= group.keys():
            raise ValueError(
                "state_dict is of an earlier version, whose curved groups have other keys. Continue with that version, "
                "or load the model's weights alone, which are ordinary, and start a new optimizer with start='matched'"
            )
    missing = sorted({key for group in saved for key in _KEYS if key not in group})
    if missing and any("scale_step" in values for values in state.values()):
        raise ValueError(
            f"state_dict is of groups built differently, for example with another no_decay: they lack {missing}"
        )
    if missing:
        raise ValueError(
            f"state_dict is not of this SEL optimizer: its groups have the keys {sorted(set().union(*saved))}. To "
            "continue from AdamW, load it into an AdamW over the same parameters, then call symexplin.from_adamw"
        )
    if [len(group["params"]) for group in saved] != [len(group["params"]) for group in groups]:
        _check_curved(saved, groups)
        return  # torch refuses these
    for old, new in zip(saved, groups, strict=True):
        if old["role"] != new["role"]:
            raise ValueError(f"state_dict is of other groups: {old['role']!r} where the optimizer has {new['role']!r}")
        if (was := old.get("moment_bits", BITS[0])) != new["moment_bits"]:
            raise ValueError(f"state_dict has moments of {was} bits: build the optimizer with moment_bits={was}")
        names = (map(_unwrapped, group.get("param_names") or ()) for group in (old, new))
        for a, b in zip(*names, strict=False):  # some tools, such as torchtitan, save no names
            if a != b and not by_position:
                raise ValueError(
                    f"state_dict is of other parameters: it has {a} where the optimizer has {b}; if modules were "
                    "renamed, load_state_dict(..., by_position=True)"
                )
        _check_map(old, new, by_position)
        for i, key in enumerate(old["params"]):
            if state.get(key):
                _check_state(old, i, tuple(new["params"][i].shape), state[key], moments)


def _check_curved(saved: list[Group], groups: list[Group]) -> None:
    """Refuse the state of an optimizer that curved another choice of the same parameters, naming one."""
    there, here = (
        {_unwrapped(name): is_curved(group) for group in side for name in group.get("param_names") or ()}
        for side in (saved, groups)
    )
    for name, curved in there.items():
        if here.get(name, curved) != curved:
            raise ValueError(
                f"state_dict has {name} {'curved' if curved else 'plain'}, and here it is not. Give both optimizers "
                "the same include and exclude; in mode 'power', where matrices that start at 0 stay plain, build the "
                "optimizer before the model's weights are loaded"
            )


def _check_map(old: Group, new: Group, by_position: bool) -> None:
    """Refuse raw weights of another map."""
    if not is_curved(new):
        return
    saved, present = (SELConfig.from_json(group["config"]) for group in (old, new))
    for name, value in present.to_dict().items():
        if name == "start" or (by_position and name in ("include", "exclude")):
            continue
        if (was := saved.to_dict()[name]) != value:
            raise ValueError(f"state_dict is of another map: {name} is {was!r} there, {value!r} in the optimizer")
    for i, (was, value) in enumerate(zip(old["axes"], new["axes"], strict=True)):
        if was != value:
            raise ValueError(f"state_dict is of another map: {name_of(new, i)} has axes {was!r} there, {value!r} here")


def _unwrapped(name: str) -> str:
    """Return a parameter's name without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS).removeprefix("module.")


def _check_state(group: Group, i: int, shape: tuple[int, ...], state: State, moments: Moments) -> None:
    tensors = {"raw" if is_curved(group) else "plain": shape}
    shapes: dict[str, tuple[int, ...]] = {"step": ()}
    axes = axes_of(group["axes"][i]) if is_curved(group) else None
    if is_curved(group):
        layout = layout_of(group, i, shape)
        tensors |= {panel: layout.panel_shape(panel) for panel in PANELS if layout.width(panel)}
        shapes |= tensors | ({"scale_step": ()} if len(tensors) > 1 else {})
    if group.get("decay_towards") == "initial":
        shapes[ANCHOR] = shape
    small = is_small(group.get("moment_bits", 32), shape)
    for kind, size in tensors.items():
        if small and kind not in PANELS:
            names = moments(kind, axes if kind == "raw" else None)
            shapes |= {scale_key(moment_key(kind, moment)): scale_shape(shape) for moment in names}
        shapes |= {moment_key(kind, moment): size for moment in moments(kind, axes if kind == "raw" else None)}
    for name, size in shapes.items():
        if name not in state:
            raise ValueError(f"state_dict does not fit {name_of(group, i)}: it has no {name!r}")
        found = () if name in COUNTS else tuple(state[name].shape)  # a count may be a number
        if found != size:
            raise ValueError(f"state_dict does not fit {name_of(group, i)}: {name} must be {size}, got {found}")


def check_overlap(views: Sequence[ParameterView]) -> None:
    """Refuse two parameters that share elements, since each would overwrite the other's."""
    sharing: dict[int, list[ParameterView]] = {}
    for view in views:
        if is_memory(view.value) and view.value.numel():
            sharing.setdefault(view.value.untyped_storage().data_ptr(), []).append(view)
    for storage, chosen in sharing.items():
        if storage == 0 or len(chosen) < 2:
            continue
        size = chosen[0].value.untyped_storage().nbytes()
        owner = torch.full((size,), -1, dtype=torch.int32, device="cpu")
        for i, view in enumerate(chosen):
            value, width = view.value, view.value.element_size()
            strides = [step * width for step in value.stride()]
            bytes_ = owner.as_strided(value.shape, strides, value.storage_offset() * width)
            if (other := int(bytes_.max())) >= 0:
                raise ValueError(
                    f"{view.name} shares elements with {chosen[other].name}: leave one of them out, or tie them by "
                    "making them one parameter"
                )
            bytes_.fill_(i)


def _diverged(views: Sequence[ParameterView]) -> str:
    """Return the name of what is not finite: a weight, a gradient, or the raw gradient of the largest weight."""
    largest = [float(view.value.abs().max()) if view.value.numel() else 0.0 for view in views]
    for view, size in zip(views, largest, strict=True):
        if not math.isfinite(size):
            return view.name
    view = views[largest.index(max(largest))]
    if max(largest) > _FAR:
        return f"the gradient of {view.name}, which has reached {max(largest):.1e},"
    for view in views:
        if view.parameter.grad is not None and not bool(local(view.parameter.grad).isfinite().all()):
            return f"the gradient of {view.name}"
    return "the norm of all gradients"


def check_finite(norm: Tensor, views: Sequence[ParameterView], step: int) -> bool:
    """Return whether the norm of all gradients is finite; if not, warn and name a tensor that has diverged."""
    if bool(norm.isfinite()):
        return True
    warnings.warn(
        f"step {step}: {_diverged(views)} is not finite: the run diverges. Go back to a checkpoint before this step, "
        "and lower the learning rate, lengthen its warm-up or set max_grad_norm",
        stacklevel=6,
    )
    return False
