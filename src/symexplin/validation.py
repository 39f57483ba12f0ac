"""Checks of arguments; their errors name the argument, its value and the valid range."""

import contextlib
import difflib
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Integral, Real
from typing import Any

__all__ = [
    "check_choice",
    "check_finite",
    "check_flag",
    "check_fraction",
    "check_not_negative",
    "check_positive",
    "check_whole",
    "did_you_mean",
    "naming",
    "plain",
    "warn",
]


def plain(value: Any) -> Any:
    """Return a tensor or array of one element as a Python number, also inside of lists, tuples and mappings.

    Lists and mappings are copied. All else is returned unchanged, also a tensor that requires a gradient.

    >>> import torch
    >>> plain({"betas": [torch.tensor(0.5), 0.75], "lr": torch.tensor([0.25])})
    {'betas': [0.5, 0.75], 'lr': 0.25}
    """
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
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
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, Real) or not holds(float(value)):
        raise ValueError(f"{name} must be {need}, got {value!r}")
    return float(value)


def check_whole(name: str, value: object, minimum: int = 1, maximum: int = 2**63 - 1) -> int:
    """Return `value` if it is a whole number from `minimum` to `maximum`, else raise ValueError."""
    value = plain(value)
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
