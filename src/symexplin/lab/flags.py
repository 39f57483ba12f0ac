"""Flags of the command line, made from the keys of a configuration (:mod:`symexplin.lab.settings`)."""

import contextlib
import dataclasses
import functools
import inspect
import tomllib
import typing
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, Literal

from cyclopts import CoercionError, Group, Parameter, Token

from symexplin.lab.settings import Key, keys, merge

__all__ = ["Pairs", "with_flags"]


def _whole(kind: Any, tokens: Sequence[Token]) -> Any:
    """Read whole numbers; cyclopts itself would round 1.5."""
    found = []
    for token in tokens:
        try:
            found.append(int(token.value))
        except ValueError:
            raise CoercionError(f"must be a whole number, got {token.value!r}", token=token) from None
    return found[0] if kind is int else tuple(found)


def _assignments(_: Any, tokens: Sequence[Token]) -> dict[str, Any]:
    return functools.reduce(merge, map(_assignment, tokens), {})


def _assignment(token: Token) -> dict[str, Any]:
    """Read KEY=VALUE as TOML does; a value that is not TOML is text."""
    name, equals, value = token.value.partition("=")
    for line in (token.value, f"{name}='{value}'") if equals else ():
        with contextlib.suppress(tomllib.TOMLDecodeError):
            return tomllib.loads(line)
    raise CoercionError(f"must be KEY=VALUE, such as e.k=[50,8], got {token.value!r}", token=token)


_SEVERAL = Parameter(consume_multiple=(1, None))
# The values KEY=VALUE of a flag, as a table.
Pairs = Annotated[
    dict[str, Any] | None,
    _SEVERAL,
    Parameter(
        accepts_keys=False,
        n_tokens=-1,
        converter=_assignments,
        metavar="KEY=VALUE",
        help="keys of the map to change, such as beta=5 or e.k=[50,8]",
    ),
]


def with_flags(command: Callable[..., Any], schema: type, leave_out: Collection[str] = ()) -> Callable[..., Any]:
    """Return `command` with a flag for each key of a schema.

    Args:
        command: takes the flags that a user sets as keywords: keys, and tables of keys.
        schema: a configuration.
        leave_out: keys that get no flag.

    >>> from cyclopts import App
    >>> from symexplin.lab.config import RunConfig
    >>> app = App(default_command=with_flags(lambda **given: given, RunConfig), result_action="return_value")
    >>> app("--data text --width 64 --no-bias")
    {'data': 'text', 'model': {'width': 64, 'bias': False}}
    """
    tables = dict.fromkeys(key.table for key in keys(schema))
    groups = {table: Group.create_ordered(f"Table {table}" if table else "Settings") for table in tables}
    flags = [_flag(key, groups[key.table]) for key in keys(schema) if key.name not in leave_out]
    own = [p for p in inspect.signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD]

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        given: dict[str, Any] = {}
        for key in keys(schema):
            if key.name in kwargs:
                place = given.setdefault(key.table, {}) if key.table else given
                place[key.name] = kwargs.pop(key.name)
        return command(*args, **kwargs, **given)

    run.__signature__ = inspect.Signature([*own, *flags])  # type: ignore[attr-defined]
    return run


def _flag(key: Key, group: Group) -> inspect.Parameter:
    hint, inner = Literal[key.choices] if key.choices else key.kind, typing.get_args(key.kind)
    more = [Parameter(help=key.help, group=group)]
    if typing.get_origin(hint) is dict:
        hint = Pairs
    elif Ellipsis in inner:
        more.append(_SEVERAL)
    if int in (hint, *inner):
        more.append(Parameter(converter=_whole))
    shown = None if key.default in (dataclasses.MISSING, (), {}, "") else key.default
    return inspect.Parameter(key.name, inspect.Parameter.KEYWORD_ONLY, default=shown, annotation=Annotated[hint, *more])
