"""Refuse groups and saved states that a SEL optimizer cannot step, before anything has changed."""

from typing import Any

from torch import Tensor

from symexplin.config import SELConfig
from symexplin.layout import PANELS
from symexplin.optim.groups import Group, is_curved, layout_of, name_of
from symexplin.optim.rates import LATER, multiplier
from symexplin.optim.target import Moments, moment_key
from symexplin.validation import check_flag, check_not_negative, check_positive, check_whole

__all__ = ["check_group", "check_saved"]

State = dict[str, Any]

_KEYS = ("role", "max_grad_norm", "total_steps", "steps")  # that every group of a SEL optimizer has

# Parts of names that torch.compile, activation checkpointing and FSDP1 add (DDP adds a leading "module").
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def check_group(group: Group, first: Group) -> None:
    """Refuse a group of a SEL optimizer that cannot be stepped beside the `first` one, naming what is wrong."""
    group.setdefault("steps", 0)
    if group["total_steps"] not in (None, LATER):
        check_whole("total_steps", group["total_steps"])
    check_flag("capturable", group["capturable"])
    if group["max_grad_norm"] is not None:
        check_positive("max_grad_norm", group["max_grad_norm"])
    if group["max_grad_norm"] != first["max_grad_norm"]:
        raise ValueError(
            f"max_grad_norm must be that of all groups, {first['max_grad_norm']}, got {group['max_grad_norm']}: "
            "there is one norm of all gradients"
        )
    check_not_negative("lr", float(group["lr"]) if isinstance(group["lr"], Tensor) else group["lr"])
    check_not_negative("weight_decay", group["weight_decay"])
    for i, parameter in enumerate(group["params"]):
        if not parameter.is_floating_point():
            raise ValueError(f"{name_of(group, i)} must be real and floating point, got {parameter.dtype}")
    if not is_curved(group):
        return
    for key in ("config", "beta", "out_dim", "position", "shape"):
        if key not in group:
            raise ValueError(f"a curved group needs {key!r}; build it with symexplin.param_groups")
    for key in ("beta", "out_dim", "position", "shape"):
        if len(group[key]) != len(group["params"]):
            raise ValueError(
                f"{key} must have one entry a parameter, got {len(group[key])} for {len(group['params'])}: wrappers "
                "that deal parameters out to processes (ZeroRedundancyOptimizer) are not supported; fully_shard is"
            )
    for i, parameter in enumerate(group["params"]):
        if parameter.dim() not in (1, 2):
            raise ValueError(f"{name_of(group, i)} must be 1-D or 2-D in a curved group, got {tuple(parameter.shape)}")
    for key in group:
        if key.startswith("k_"):
            multiplier(key, group, 0)


def check_saved(saved: list[Group], groups: list[Group], state: dict[Any, State], moments: Moments) -> None:
    """Refuse a state_dict that does not fit the optimizer's groups, before anything is loaded."""
    missing = sorted({key for group in saved for key in _KEYS if key not in group})
    if missing and any("scale_step" in values for values in state.values()):
        raise ValueError(
            f"state_dict is of groups made otherwise, with another no_decay for example: they lack {missing}"
        )
    if missing:
        raise ValueError(
            f"state_dict is not of this SEL optimizer: its groups have the keys {sorted(set().union(*saved))}. To "
            "go on from AdamW, load it into that optimizer over the same parameters, then call symexplin.from_adamw"
        )
    if [len(group["params"]) for group in saved] != [len(group["params"]) for group in groups]:
        return  # torch refuses these
    for old, new in zip(saved, groups, strict=True):
        if old["role"] != new["role"]:
            raise ValueError(f"state_dict is of other groups: {old['role']!r} where the optimizer has {new['role']!r}")
        names = (map(_unwrapped, group.get("param_names") or ()) for group in (old, new))
        for a, b in zip(*names, strict=False):  # some tools, torchtitan's among them, save no names
            if a != b:
                raise ValueError(f"state_dict is of other parameters: it has {a} where the optimizer has {b}")
        _check_map(old, new)
        for i, key in enumerate(old["params"]):
            if state.get(key):
                _check_state(old, i, tuple(new["params"][i].shape), state[key], moments)


def _check_map(old: Group, new: Group) -> None:
    """Refuse raw weights that would be read through another map."""
    if not is_curved(new):
        return
    saved, present = (SELConfig.from_json(group["config"]) for group in (old, new))
    for name, value in present.to_dict().items():
        if (was := saved.to_dict()[name]) != value:
            raise ValueError(f"state_dict is of another map: {name} is {was!r} there, {value!r} in the optimizer")
    for name in ("beta", "out_dim"):
        for i, (was, value) in enumerate(zip(old[name], new[name], strict=True)):
            if was != value:
                raise ValueError(
                    f"state_dict is of another map: {name} of {name_of(new, i)} is {was} there, {value} here"
                )


def _unwrapped(name: str) -> str:
    """Return a parameter's name without what wrappers put into it."""
    return ".".join(part for part in name.removeprefix("module.").split(".") if part not in _WRAPPERS)


def _check_state(group: Group, i: int, shape: tuple[int, ...], state: State, moments: Moments) -> None:
    tensors = {"raw" if is_curved(group) else "plain": shape}
    shapes: dict[str, tuple[int, ...]] = {"step": ()}
    if is_curved(group):
        layout = layout_of(group, i, shape)
        tensors |= {panel: layout.panel_shape(panel) for panel in PANELS if layout.width(panel)}
        shapes |= tensors | ({"scale_step": ()} if len(tensors) > 1 else {})
    for kind, size in tensors.items():
        shapes |= {moment_key(kind, moment): size for moment in moments(kind, size)}
    for name, size in shapes.items():
        if name not in state:
            raise ValueError(f"state_dict does not fit {name_of(group, i)}: it has no {name!r}")
        if tuple(state[name].shape) != size:
            raise ValueError(
                f"state_dict does not fit {name_of(group, i)}: {name} must be {size}, got {tuple(state[name].shape)}"
            )
