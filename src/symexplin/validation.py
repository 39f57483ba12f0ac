"""Checks that name the argument, the value found and what would be right."""

import difflib
import math
from collections.abc import Iterable

__all__ = ["check_choice", "check_positive"]


def check_choice(name: str, value: object, choices: Iterable[str]) -> str:
    """Return `value` if it is one of `choices`, else raise ValueError with the nearest right one.

    >>> check_choice("mode", "congrunt", ["mismatch", "congruent"])
    Traceback (most recent call last):
    ValueError: mode must be one of 'mismatch', 'congruent', got 'congrunt'; did you mean 'congruent'?
    """
    known = list(choices)
    if isinstance(value, str) and value in known:
        return value
    near = difflib.get_close_matches(str(value), known, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}{hint}")


def check_positive(name: str, value: object) -> float:
    """Return `value` as a float if it is a positive finite number, else raise ValueError.

    >>> check_positive("beta", 0)
    Traceback (most recent call last):
    ValueError: beta must be a positive finite number, got 0
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value < math.inf:
        raise ValueError(f"{name} must be a positive finite number, got {value!r}")
    return float(value)
