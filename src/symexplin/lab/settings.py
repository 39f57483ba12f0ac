"""One schema for TOML files, flags and Python: dataclasses whose fields are the keys and whose docstrings are the help.

A configuration is a dataclass derived from :class:`Schema`. Fields that are dataclasses are its tables, the others are
its keys. The type of a key says what it may be, wherever it is given. Names are unique over all tables, so that a flag
needs no table's name: `[model] width = 128` is `--width 128`.

A configuration is made in one way: the tables of files and flags are merged, and :func:`from_table` checks the result.
"""

import contextlib
import dataclasses
import functools
import inspect
import re
import tomllib
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeGuard, TypeVar

import docstring_parser
import tomli_w
from cyclopts import CoercionError, Group, Parameter, Token

from symexplin.checks import (
    check_choice,
    check_fraction,
    check_not_negative,
    check_positive,
    check_whole,
    did_you_mean,
)

__all__ = [
    *("FLAGS", "Count", "Fraction", "NotNegative", "Pairs", "Positive", "Whole"),
    *("Schema", "differences", "dump_toml", "from_table", "load_toml", "merge", "to_table", "with_flags"),
]

Table = dict[str, Any]

# Return a table as TOML text, for a file that :func:`load_toml` reads.
dump_toml = tomli_w.dumps

# How an application reads flags: a list takes several values, and the last of several flags wins.
FLAGS = Parameter(consume_multiple=(1, None), allow_repeating=True, negative_iterable=())

# --- The types of keys: a Python type, and a check of its values, which gets the key's name -------------------------


def _whole(_: Any, tokens: Sequence[Token]) -> int:
    """Read a flag's whole number; cyclopts itself would round 1.5."""
    try:
        return int(tokens[0].value)
    except ValueError:
        raise CoercionError(f"must be a whole number, got {tokens[0].value!r}", token=tokens[0]) from None


def _pairs(_: Any, tokens: Sequence[Token] | Mapping[str, Any]) -> Table:
    """Read KEY=VALUE as TOML does; a value that is not TOML is text."""
    pairs: Table = {}
    for token in tokens:
        if isinstance(token, str):  # a table, which is how cyclopts reads --map.beta=5
            raise CoercionError(f"{token!r} must follow a space, such as --map beta=5 for --map.beta=5")
        name, equals, value = token.value.partition("=")
        for line in (token.value, f"{name}='{value}'") if equals else ():
            with contextlib.suppress(tomllib.TOMLDecodeError):
                pairs = merge(pairs, tomllib.loads(line))
                break
        else:
            raise CoercionError(f"must be KEY=VALUE as in TOML, got {token.value!r}", token=token)
    return pairs


Count = Annotated[int, check_whole, Parameter(converter=_whole)]  # from 1
Whole = Annotated[int, functools.partial(check_whole, minimum=0), Parameter(converter=_whole)]
Positive = Annotated[float, check_positive]
NotNegative = Annotated[float, check_not_negative]
Fraction = Annotated[float, check_fraction]  # below 1
# A table of any keys: as a flag, KEY=VALUE once or more.
Pairs = Annotated[Table, Parameter(accepts_keys=False, n_tokens=-1, converter=_pairs, metavar="KEY=VALUE")]

_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", dict: "a table"}


def _checked(name: str, kind: Any, value: Any) -> Any:
    """Return the value of a key as its type `kind`: lists become tuples, whole numbers floats.

    Unions are X | None, where None is the default, which TOML cannot express, and a number | words that stand for one.
    """
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        words = next((typing.get_args(kind) for kind in inner if typing.get_origin(kind) is Literal), ())
        if words and isinstance(value, str):
            return check_choice(name, value, words)
        return None if value is None else _checked(name, inner[0], value)
    if origin is Annotated:
        value = _checked(name, inner[0], value)
        for check in inner[1:]:
            if not isinstance(check, Parameter):  # says how the flag is read
                check(name, value)
        return value
    if origin is Literal:
        return check_choice(name, value, inner)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{name} must be a list, got {value!r}")
        if inner[-1] is not Ellipsis and len(value) != len(inner):
            raise ValueError(f"{name} must be a list of {len(inner)}, got {value!r}")
        return tuple(_checked(name, inner[0], entry) for entry in value)
    kind = origin or kind
    if kind is float and type(value) is int:
        with contextlib.suppress(OverflowError):
            value = float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{name} must be {_WORDS[kind]}, got {value!r}")
    return value


# --- Schemas and tables ----------------------------------------------------------------------------------------------


class Schema:
    """Base of a configuration, which checks every key as its type says."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __post_init__(self) -> None:
        """Check every key."""
        for field in dataclasses.fields(self):
            if not _is_table(field.type):
                object.__setattr__(self, field.name, _checked(field.name, field.type, getattr(self, field.name)))


S = TypeVar("S", bound=Schema)
Fields = dict[str, dataclasses.Field[Any]]


def _is_table(kind: Any) -> TypeGuard[type[Schema]]:
    return isinstance(kind, type) and issubclass(kind, Schema)


def _fields(schema: Any) -> Fields:
    """Return the keys and tables that a user may give, by name."""
    return {field.name: field for field in dataclasses.fields(schema) if not field.metadata.get("derived")}


def _tables(schema: type[Schema]) -> dict[str, type[Schema]]:
    """Return the tables of a schema by name, the schema itself as ""."""
    return {"": schema} | {name: field.type for name, field in _fields(schema).items() if _is_table(field.type)}


def _keys(table: type[Schema]) -> Fields:
    return {name: field for name, field in _fields(table).items() if not _is_table(field.type)}


def _places(schema: type[Schema]) -> dict[str, str]:
    """Return the name of the table of each key."""
    return {key: name for name, table in _tables(schema).items() for key in _keys(table)}


def _help(schema: type[Schema]) -> dict[str, str]:
    """Return the help of each key from the "Args:" of a docstring."""
    entries = docstring_parser.parse(schema.__doc__ or "", docstring_parser.DocstringStyle.GOOGLE).params
    texts = {entry.arg_name: " ".join((entry.description or "").split()) for entry in entries}
    return {name: re.sub(r"(?<!\.)\.$|`", "", text) for name, text in texts.items()}


def from_table(schema: type[S], table: Mapping[str, Any], where: str = "") -> S:
    """Return the configuration that a table describes; errors call the table `where`.

    Raises:
        ValueError: an unknown key (with the nearest right one, or its table), a wrong value, a missing key.

    >>> from symexplin.lab.config import ModelConfig
    >>> from_table(ModelConfig, {"widht": 64})
    Traceback (most recent call last):
    ValueError: unknown key 'widht'; did you mean 'width'?
    """
    fields, places, values = _fields(schema), _places(schema), dict(table)
    for name, value in table.items():
        if name not in fields:
            hint = f", which belongs in [{places[name]}]" if name in places else did_you_mean(name, fields)
            raise ValueError(f"unknown key {name!r}{f' in [{where}]' if where else ''}{hint}")
        kind = fields[name].type
        if _is_table(kind):
            if not isinstance(value, Mapping):
                raise ValueError(f"[{name}] must be a table, got {value!r}")
            values[name] = from_table(kind, value, name)
    for name, field in fields.items():
        if name not in values and field.default is field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{name} must be given: {_help(schema)[name]}")
    return schema(**values)


def to_table(config: Schema) -> Table:
    """Return a configuration as the table that :func:`from_table` reads, without keys that are None."""
    table: Table = _plain({name: getattr(config, name) for name in _fields(config)})
    return table


def _plain(value: Any) -> Any:
    if isinstance(value, Schema):
        return to_table(value)
    if isinstance(value, Mapping):
        return {key: _plain(v) for key, v in value.items() if v is not None}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def load_toml(path: str | Path, name: str = "config") -> Table:
    """Return the table in a TOML file; `name` is the argument that names it."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError):
        raise FileNotFoundError(f"{name} must be an existing TOML file, got {str(path)!r}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{name} {path} is not TOML: {error}") from None


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> Table:
    """Return `base` with the entries of `over`, tables merged key by key; a table cannot replace another value."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        if isinstance(value, Mapping) and not isinstance(old, Mapping | None):
            raise ValueError(f"[{key}] must be a table, got {old!r}")
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return {dotted key: (old, new)} where two tables differ; a missing key counts as None."""
    before, after = dict(_dotted(old)), dict(_dotted(new))
    pairs = {key: (before.get(key), after.get(key)) for key in before | after}
    return {key: (a, b) for key, (a, b) in pairs.items() if a != b}


def _dotted(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


# --- Flags -----------------------------------------------------------------------------------------------------------


def with_flags(
    command: Callable[..., Any], schema: type[Schema], leave_out: Collection[str] = ()
) -> Callable[..., Any]:
    """Return `command` with a flag for every key of a schema except those in `leave_out`.

    The first argument of the command becomes the table of what a user sets.

    >>> from cyclopts import App
    >>> from symexplin.lab.config import RunConfig
    >>> app = App(default_command=with_flags(lambda table: table, RunConfig), result_action="return_value")
    >>> app("--data text --width 64 --no-bias --map beta=5")
    {'data': 'text', 'model': {'width': 64, 'bias': False}, 'sel': {'map': {'beta': 5}}}
    """
    places = _places(schema)
    _, *parameters = inspect.signature(command).parameters.values()
    for name, table in _tables(schema).items():
        group, texts = Group.create_ordered(f"Table {name}" if name else "Settings"), _help(table)
        for key in _keys(table).values():
            if key.name not in leave_out:
                kind: Any = Annotated[key.type, Parameter(help=texts.get(key.name, ""), group=group)]
                default = None if key.default in (dataclasses.MISSING, (), "") else key.default
                parameters.append(
                    inspect.Parameter(key.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
                )

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        table: Table = {}
        for key, place in places.items():
            if key in kwargs:
                value = {key: kwargs.pop(key)}
                table = merge(table, {place: value} if place else value)
        return command(table, *args, **kwargs)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run
