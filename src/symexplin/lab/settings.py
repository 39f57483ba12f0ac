"""One schema for TOML files, flags and Python: dataclasses whose fields are the keys and whose docstrings are the help.

A configuration is a dataclass derived from :class:`Schema`. Fields that are dataclasses are its tables, the others are
its keys. The type of a key says what it may be, wherever it is given. Names are unique over all tables, so that a flag
needs no table's name: `[model] width = 128` is `--width 128`.
"""

import contextlib
import dataclasses
import functools
import inspect
import tomllib
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeGuard, TypeVar

import tomli_w
from cyclopts import CoercionError, Group, Parameter, Token

from symexplin.validation import (
    check_choice,
    check_fraction,
    check_not_negative,
    check_positive,
    check_whole,
    did_you_mean,
)

__all__ = [
    *("FLAGS", "Count", "Fraction", "NotNegative", "Pairs", "Positive", "Whole"),
    *("Key", "Schema", "differences", "dump_toml", "from_table", "keys", "lines"),
    *("load_toml", "merge", "to_table", "with_flags"),
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


def _assignments(_: Any, tokens: Any) -> Table:
    return functools.reduce(merge, map(_assignment, _leaves(tokens)), {})


def _leaves(tokens: Any) -> Iterator[Token]:
    """Yield the tokens of ``--map KEY=VALUE ...``, a list, or of ``--map.KEY=VALUE``, tables of lists."""
    if isinstance(tokens, Mapping):
        for part in tokens.values():
            yield from _leaves(part)
    else:
        yield from tokens


def _assignment(token: Token) -> Table:
    """Read KEY=VALUE as TOML does; a value that is not TOML is text."""
    text = f"{'.'.join(token.keys)}={token.value}" if token.keys else token.value
    name, equals, value = text.partition("=")
    for line in (text, f"{name}='{value}'") if equals else ():
        with contextlib.suppress(tomllib.TOMLDecodeError):
            return tomllib.loads(line)
    raise CoercionError(f"must be KEY=VALUE, such as e.k=[50,8], got {token.value!r}", token=token)


Count = Annotated[int, check_whole, Parameter(converter=_whole)]  # from 1
Whole = Annotated[int, functools.partial(check_whole, minimum=0), Parameter(converter=_whole)]
Positive = Annotated[float, check_positive]
NotNegative = Annotated[float, check_not_negative]
Fraction = Annotated[float, check_fraction]  # below 1
# A table of any keys: as a flag, KEY=VALUE once or more.
Pairs = Annotated[Table, Parameter(accepts_keys=False, n_tokens=-1, converter=_assignments, metavar="KEY=VALUE")]

_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", dict: "a table"}


def _checked(name: str, kind: Any, value: Any) -> Any:
    """Return the value of a key as its type `kind`: lists become tuples, whole numbers floats.

    The only unions are X | None: None is the default, which TOML cannot express.
    """
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
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


class Key(NamedTuple):
    """One key of a schema; `table` is "" at the top, `default` may be `MISSING`."""

    table: str
    name: str
    kind: Any
    default: Any
    help: str


def keys(schema: type[Schema], table: str = "") -> list[Key]:
    """Return all keys of a schema and of its tables."""
    texts, found = _help(schema.__doc__ or ""), list[Key]()
    for field in dataclasses.fields(schema):
        if _is_table(field.type):
            found += keys(field.type, field.name)
        elif not field.metadata.get("derived"):
            made = field.default_factory
            default = field.default if made is dataclasses.MISSING else made()
            found.append(Key(table, field.name, field.type, default, texts.get(field.name, "")))
    return found


def _is_table(kind: Any) -> TypeGuard[type[Schema]]:
    return isinstance(kind, type) and issubclass(kind, Schema)


@functools.cache
def _help(docstring: str) -> dict[str, str]:
    """Return the help of each field from the "Args:" of a docstring."""
    import docstring_parser

    found = docstring_parser.parse(docstring, docstring_parser.DocstringStyle.GOOGLE)
    texts = {entry.arg_name: " ".join((entry.description or "").split()) for entry in found.params}
    return {name: text.rstrip(".").replace("`", "") for name, text in texts.items()}


def from_table(schema: type[S], table: Mapping[str, Any]) -> S:
    """Return the configuration that a table describes.

    Raises:
        ValueError: an unknown key (with the nearest right one, or its table), a wrong value, a missing key.

    >>> from symexplin.lab.config import ModelConfig
    >>> from_table(ModelConfig, {"widht": 64})
    Traceback (most recent call last):
    ValueError: unknown key 'widht'; did you mean 'width'?
    """
    return _build(schema, table, "", keys(schema))


def _build(schema: type[S], table: Mapping[str, Any], where: str, known: list[Key]) -> S:
    own = {key.name: key for key in known if key.table == where}
    tables = {field.name: field.type for field in dataclasses.fields(schema) if _is_table(field.type)}
    values: Table = {}
    for name, value in table.items():
        if name in own:
            values[name] = value
        elif name not in tables:
            raise ValueError(_unknown(name, where, known, [*own, *tables]))
        elif not isinstance(value, Mapping):
            raise ValueError(f"[{name}] must be a table, got {value!r}")
        else:
            values[name] = _build(tables[name], value, name, known)
    for name, key in own.items():
        if key.default is dataclasses.MISSING and name not in values:
            raise ValueError(f"{name} must be given: {key.help}")
    return schema(**values)


def _unknown(name: str, where: str, known: list[Key], here: list[str]) -> str:
    for key in known:
        if key.name == name:
            return f"key {name!r} belongs " + (f"in [{key.table}]" if key.table else "at the top, before all tables")
    hint = did_you_mean(name, here, cutoff=0.4) or f"; known: {', '.join(here)}"
    return f"unknown key {name!r}{f' in [{where}]' if where else ''}{hint}"


def to_table(config: Any) -> Table:
    """Return a configuration as the table that :func:`from_table` reads, without keys that are None."""
    fields = (field for field in dataclasses.fields(config) if not field.metadata.get("derived"))
    table: Table = _plain({field.name: getattr(config, field.name) for field in fields})
    return table


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
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
    """Return `base` with the entries of `over`, tables merged key by key."""
    merged = dict(base)
    for key, value in over.items():
        found = merged.get(key)
        merged[key] = merge(found, value) if isinstance(found, Mapping) and isinstance(value, Mapping) else value
    return merged


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return {dotted key: (old, new)} where two tables differ; a missing key counts as None."""
    before, after = dict(_dotted(old)), dict(_dotted(new))
    pairs = {key: (before.get(key), after.get(key)) for key in before | after}
    return {key: (a, b) for key, (a, b) in pairs.items() if a != b}


def lines(table: Mapping[str, Any]) -> list[str]:
    """Return the lines that show a table to a reader, one per table."""
    found: dict[str, list[str]] = {}
    for key, value in _dotted(table):
        place, _, name = key.rpartition(".")
        found.setdefault(f"[{place}] " if place else "", []).append(f"{name} = {value!r}")
    return [place + ", ".join(entries) for place, entries in found.items()]


def _dotted(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def with_flags(
    command: Callable[..., Any], schema: type[Schema], leave_out: Collection[str] = ()
) -> Callable[..., Any]:
    """Return `command` with a flag for every key of a schema except those in `leave_out`.

    The command takes the flags that a user sets as keywords: keys, and tables of keys.

    >>> from cyclopts import App
    >>> from symexplin.lab.config import RunConfig
    >>> app = App(default_command=with_flags(lambda **given: given, RunConfig), result_action="return_value")
    >>> app("--data text --width 64 --no-bias")
    {'data': 'text', 'model': {'width': 64, 'bias': False}}
    """
    own = [p for p in inspect.signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD]
    flagged = [key for key in keys(schema) if key.name not in leave_out]
    groups, flags = dict[str, Group](), []
    for key in flagged:
        if key.table not in groups:
            groups[key.table] = Group.create_ordered(f"Table {key.table}" if key.table else "Settings")
        more = Parameter(help=key.help, group=groups[key.table])
        shown = None if key.default in (dataclasses.MISSING, (), {}, "") else key.default
        keyword = inspect.Parameter.KEYWORD_ONLY
        flags.append(inspect.Parameter(key.name, keyword, default=shown, annotation=Annotated[key.kind, more]))

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        given: Table = {}
        for key in flagged:
            if key.name in kwargs:
                place = given.setdefault(key.table, {}) if key.table else given
                place[key.name] = kwargs.pop(key.name)
        return command(*args, **kwargs, **given)

    run.__signature__ = inspect.Signature([*own, *flags])  # type: ignore[attr-defined]
    return run
