"""Name patterns (fnmatch) of parameters: which names match, and settings by pattern."""

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

__all__ = ["as_patterns", "by_name", "check_patterns", "first_match"]

T = TypeVar("T")


def first_match(names: Iterable[str], patterns: Iterable[str]) -> str | None:
    """Return the first pattern that matches any of the names.

    >>> first_match(["0.mlp.up"], ["head", "*.mlp.*", "*"])
    '*.mlp.*'
    """
    return next((p for p in patterns for name in names if fnmatch.fnmatchcase(name, p)), None)


def as_patterns(argument: str, patterns: Iterable[str]) -> tuple[str, ...]:
    """Return the patterns as a tuple; raise ValueError if one of them is not a string."""
    sequence = tuple(patterns) if isinstance(patterns, Iterable) else (patterns,)
    if not all(isinstance(pattern, str) for pattern in sequence):
        raise ValueError(f"{argument} must have names or patterns of parameters, got {patterns!r}")
    return sequence


def check_patterns(argument: str, patterns: Iterable[str], names: Sequence[str]) -> tuple[str, ...]:
    """Return the patterns as a tuple; raise ValueError, too, if one matches none of the `names`."""
    sequence = as_patterns(argument, patterns)
    for pattern in sequence:
        if first_match(names, [pattern]) is None:
            raise ValueError(
                f"{argument} pattern {pattern!r} matches no parameter; names are, for example, {list(names[:3])}"
            )
    return sequence


def by_name(argument: str, value: T | Mapping[str, T], names: Sequence[str]) -> dict[str, T]:
    """Return the setting of every name: `value`, or that of the first pattern in it which matches the name.

    Raises:
        ValueError: a list, a pattern that matches no name or only those of earlier ones, or a name without a pattern.

    >>> by_name("lr", {"*.mlp.*": 1e-3, "*": 3e-4}, ["0.mlp.up", "head"])
    {'0.mlp.up': 0.001, 'head': 0.0003}
    """
    if isinstance(value, list | tuple | set | str):
        raise ValueError(f"{argument} must be a number, or {{name pattern: number}}, got {value!r}")
    if not isinstance(value, Mapping):
        return dict.fromkeys(names, value)
    check_patterns(argument, value, names)
    matches = {name: first_match([name], value) for name in names}
    for name, pattern in matches.items():
        if pattern is None:
            raise ValueError(f"{argument} must have a pattern for every name, got none for {name!r}: end with '*'")
    for pattern in value.keys() - set(matches.values()):
        raise ValueError(
            f"{argument} pattern {pattern!r} is never used, because an earlier one matches the same names: put it first"
        )
    return {name: value[pattern] for name, pattern in matches.items() if pattern is not None}
