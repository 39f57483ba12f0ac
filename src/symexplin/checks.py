"""Checks of arguments, groups and saved states; their errors name the argument, its value and what would be right."""

import contextlib
import difflib
import json
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

__all__ = [
    "LATER",
    "as_numbers",
    "check_choice",
    "check_curved",
    "check_finite",
    "check_flag",
    "check_fraction",
    "check_group",
    "check_not_negative",
    "check_positive",
    "check_saved",
    "check_whole",
    "did_you_mean",
    "naming",
    "warn",
]

LATER = "later"  # total_steps before set_total_steps
_ALIGNED = ("axes", "position", "shape")  # lists of a curved group with one entry per parameter
_SWITCHES = ("amsgrad", "capturable", "differentiable", "maximize")  # of torch's optimizers


def as_numbers(value: Any) -> Any:
    """Return a tensor or array of one element as a Python number, also inside of lists, tuples and mappings.

    Lists and mappings are copied. All else is returned unchanged, also a tensor that requires a gradient.

    >>> import torch
    >>> as_numbers({"betas": [torch.tensor(0.5), 0.75], "lr": torch.tensor([0.25])})
    {'betas': [0.5, 0.75], 'lr': 0.25}
    """
    if isinstance(value, Mapping):
        return {key: as_numbers(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(as_numbers, value))
    shape = getattr(value, "shape", None)
    is_number = isinstance(shape, tuple) and math.prod(shape) == 1 and not getattr(value, "requires_grad", False)
    return value.item() if is_number else value


def check_choice(name: str, value: object, choices: Iterable[str]) -> str:
    """Return `value` if it is one of `choices`, else raise ValueError with the nearest choice.

    >>> check_choice("mode", "congrunt", ["mismatch", "congruent"])
    Traceback (most recent call last):
    ValueError: mode must be one of 'mismatch', 'congruent', got 'congrunt'; did you mean 'congruent'?
    """
    known = list(choices)
    if isinstance(value, str) and value in known:
        return value
    hint = did_you_mean(str(value), known)
    raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}{hint}")


def did_you_mean(value: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the end of an error that names the nearest of the `known` words, or "" if none is near.

    >>> did_you_mean("widht", ["width", "depth"]), did_you_mean("x", ["width", "depth"])
    ("; did you mean 'width'?", '')
    """
    near = difflib.get_close_matches(value, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {near[0]!r}?" if near else ""


def check_flag(name: str, value: object) -> bool:
    """Return `value` if it is True or False, else raise ValueError."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def check_positive(name: str, value: object) -> float:
    """Return `value` as a float if it is a positive finite number, else raise ValueError.

    >>> check_positive("beta", 0)
    Traceback (most recent call last):
    ValueError: beta must be a positive finite number, got 0
    """
    return _number(name, value, "a positive finite number", lambda x: 0.0 < x < math.inf)


def check_finite(name: str, value: object) -> float:
    """Return `value` as a float if it is a finite number, else raise ValueError."""
    return _number(name, value, "a finite number", math.isfinite)


def check_not_negative(name: str, value: object) -> float:
    """Return `value` as a float if it is a finite number of at least 0, else raise ValueError."""
    return _number(name, value, "a finite number >= 0", lambda x: 0.0 <= x < math.inf)


def check_fraction(name: str, value: object) -> float:
    """Return `value` as a float if it lies in [0, 1), else raise ValueError."""
    return _number(name, value, "a number in [0, 1)", lambda x: 0.0 <= x < 1.0)


def _number(name: str, value: object, need: str, holds: Callable[[float], bool]) -> float:
    value = as_numbers(value)
    if isinstance(value, bool) or not isinstance(value, Real) or not holds(float(value)):
        raise ValueError(f"{name} must be {need}, got {value!r}")
    return float(value)


def check_whole(name: str, value: object, minimum: int = 1, maximum: int = 2**63 - 1) -> int:
    """Return `value` if it is a whole number from `minimum` to `maximum`, else raise ValueError."""
    value = as_numbers(value)
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < minimum:
        raise ValueError(f"{name} must be a whole number >= {minimum}, got {value!r}")
    if int(value) > maximum:
        raise ValueError(f"{name} must be a whole number <= {maximum}, got {value!r}")
    return int(value)


@contextlib.contextmanager
def naming(name: str) -> Iterator[None]:
    """Put the `name` of a parameter or layer before the message of a ValueError raised inside.

    >>> with naming("blocks.0.q"):
    ...     check_positive("beta", 0)
    Traceback (most recent call last):
    ValueError: blocks.0.q: beta must be a positive finite number, got 0
    """
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def warn(message: str) -> None:
    """Warn, and point at the line that called into this package, also where torch calls it in between."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("symexplin", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def check_curved(params: Sequence[Any]) -> None:
    """Raise ValueError unless some group of `params` is curved."""
    if not any(isinstance(group, Mapping) and group.get("role") == "curved" for group in params):
        kinds = ", ".join(sorted({type(item).__name__ for item in params})) or "nothing"
        raise ValueError(
            "params must be the model itself, since names and module types decide what is curved, or its "
            f"symexplin.param_groups with a curved group, got {kinds}"
        )


def check_group(group: Mapping[str, Any], first: Mapping[str, Any]) -> None:
    """Raise ValueError for a group that a SEL optimizer cannot step together with its `first` one."""
    for switch in _SWITCHES:
        if group.get(switch):
            raise ValueError(f"{switch} must be left out, got {group[switch]!r}: SEL optimizers have no such switch")
    if group["total_steps"] not in (None, LATER):
        check_whole("total_steps", group["total_steps"])
    if group["max_grad_norm"] is not None:
        check_positive("max_grad_norm", group["max_grad_norm"])
    if group["max_grad_norm"] != first["max_grad_norm"]:
        raise ValueError(
            f"max_grad_norm must be equal in all groups, {first['max_grad_norm']}, got {group['max_grad_norm']}"
        )
    for key in ("lr", "lr_factor", "weight_decay"):
        check_not_negative(key, group.get(key, 1.0))
    for key in _ALIGNED if group["role"] == "curved" else ():
        if len(group.get(key, ())) != len(group["params"]):
            raise ValueError(
                f"{key} must have one entry per parameter, as in the groups of symexplin.param_groups, "
                f"got {len(group.get(key, ()))} for {len(group['params'])}"
            )
    for i, parameter in enumerate(group["params"]):
        if not parameter.is_floating_point():
            name = group["param_names"][i] if "param_names" in group else f"parameter {i}"
            raise ValueError(f"{name} must be real and floating point, got {parameter.dtype}")


def check_saved(
    saved: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], shapes: Sequence[Sequence[Mapping[str, Any]]]
) -> None:
    """Raise ValueError for a state_dict that does not fit the groups.

    `shapes` has the shapes of the tensors in the state of each group's parameters.
    """
    if not {"state", "param_groups"} <= saved.keys():
        raise ValueError(f"state_dict must have the keys 'state' and 'param_groups', got {list(saved)[:4]}")
    if any("role" not in group for group in saved["param_groups"]):
        raise ValueError("state_dict must be of a SEL optimizer, got groups without the key 'role'")
    theirs, ours = ([len(group["params"]) for group in of] for of in (saved["param_groups"], groups))
    if theirs != ours:
        raise ValueError(f"state_dict must have groups of {ours} parameters, got {theirs}")
    for old, new, expected in zip(saved["param_groups"], groups, shapes, strict=True):
        _check_same_group(old, new)
        for i, key in enumerate(old["params"]):
            if state := saved["state"].get(key):
                _check_state(_names(new)[i], state, expected[i])


def _names(group: Mapping[str, Any]) -> list[str]:
    """Return the names of a group's parameters."""
    return group.get("param_names") or [f"parameter {i}" for i in range(len(group["params"]))]


def _check_same_group(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    if old["role"] != new["role"]:
        raise ValueError(f"state_dict must have a group of role {new['role']!r} here, got {old['role']!r}")
    if old.get("param_names"):  # some tools save no names
        for was, name in zip(_names(old), _names(new), strict=True):
            if was != name:
                raise ValueError(f"state_dict must have the parameter {name} here, got {was}")
    if new["role"] == "curved":
        saved, present = ({**json.loads(group["config"]), "axes": list(group["axes"])} for group in (old, new))
        for key, value in present.items():
            if saved.get(key) != value:
                raise ValueError(
                    f"state_dict must be of the optimizer's map, with {key} {value!r}, got {saved.get(key)!r}"
                )


def _check_state(name: str, state: Mapping[str, Any], expected: Mapping[str, Sequence[int]]) -> None:
    for key, shape in expected.items():
        value = state.get(key)
        actual = () if isinstance(value, int | float) else getattr(value, "shape", None)  # a count may be a number
        if actual is None or tuple(actual) != tuple(shape):
            found = "none" if actual is None else tuple(actual)
            raise ValueError(
                f"state_dict must have {key!r} of shape {tuple(shape)} in the state of {name}, got {found}"
            )
