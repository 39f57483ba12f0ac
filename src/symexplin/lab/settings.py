"""One schema for TOML files and flags: dataclasses whose fields are the keys and whose docstrings are the help.

A configuration is a dataclass. Fields that are dataclasses are its tables, the others are its keys. Names are unique
over all tables, so that a flag needs no table's name: `[model] width = 128` is `--width 128`.
"""

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import json
import tomllib
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import tomli_w
from cyclopts import CoercionError, Group, Parameter, Token

from symexplin.validation import did_you_mean

__all__ = [
    *("Key", "Pairs", "config_hash", "from_table", "differences", "dump_toml", "keys", "lines"),
    *("load_toml", "merge", "to_table", "with_flags"),
]

T = TypeVar("T")
Table = dict[str, Any]

# Return a table as TOML, which :func:`load_toml` reads.
dump_toml = tomli_w.dumps

_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", dict: "a table"}


class Key(NamedTuple):
    """One key of a schema; `table` is "" at the top, `kind` its type without None, `default` may be `MISSING`."""

    table: str
    name: str
    kind: Any
    default: Any
    help: str
    choices: tuple[str, ...] | None


@functools.cache
def keys(schema: type, table: str = "") -> tuple[Key, ...]:
    """Return all keys of a schema and of its tables."""
    kinds, texts, found = typing.get_type_hints(schema), _help(schema), list[Key]()
    for field in dataclasses.fields(schema):
        kind = kinds[field.name]
        if dataclasses.is_dataclass(kind):
            found += keys(typing.cast(type, kind), field.name)
        elif not field.metadata.get("derived"):
            if isinstance(kind, types.UnionType):  # X | None: None is the default, which TOML cannot say
                kind = next(k for k in typing.get_args(kind) if k is not types.NoneType)
            made, choices = field.default_factory, field.metadata.get("choices")
            default = field.default if made is dataclasses.MISSING else made()
            found.append(Key(table, field.name, kind, default, texts.get(field.name, ""), choices))
    return tuple(found)


def _help(schema: type) -> dict[str, str]:
    """Return the help of each field from the "Args:" of the docstring; several fields may share an entry."""
    import docstring_parser

    found = docstring_parser.parse(schema.__doc__ or "", docstring_parser.DocstringStyle.GOOGLE)
    texts = {entry.arg_name: " ".join((entry.description or "").split()) for entry in found.params}
    return {name: text.rstrip(".").replace("`", "") for shared, text in texts.items() for name in shared.split(", ")}


def from_table(schema: type[T], table: Mapping[str, Any]) -> T:
    """Return the configuration that a table describes. The schema itself checks values.

    Raises:
        ValueError: an unknown key (with the nearest right one, or its table), a value of a wrong type, a missing key.

    >>> from symexplin.lab.config import ModelConfig
    >>> from_table(ModelConfig, {"widht": 64})
    Traceback (most recent call last):
    ValueError: unknown key 'widht'; did you mean 'width'?
    """
    return _build(schema, table, "", keys(typing.cast(typing.Hashable, schema)))


def _build(schema: type[T], table: Mapping[str, Any], where: str, known: tuple[Key, ...]) -> T:
    own = {key.name: key for key in known if key.table == where}
    tables = {name: kind for name, kind in typing.get_type_hints(schema).items() if dataclasses.is_dataclass(kind)}
    values: Table = {}
    for name, value in table.items():
        if name in own:
            values[name] = _convert(own[name], value)
        elif name not in tables:
            raise ValueError(_unknown(name, where, known, [*own, *tables]))
        elif not isinstance(value, Mapping):
            raise ValueError(f"[{name}] must be a table, got {value!r}")
        else:
            values[name] = _build(typing.cast(type, tables[name]), value, name, known)
    for name, key in own.items():
        if key.default is dataclasses.MISSING and name not in values:
            raise ValueError(f"{name} must be given: {key.help}")
    return schema(**values)


def _unknown(name: str, where: str, known: tuple[Key, ...], here: list[str]) -> str:
    for key in known:
        if key.name == name:
            return f"key {name!r} belongs " + (f"in [{key.table}]" if key.table else "at the top, before all tables")
    hint = did_you_mean(name, here, cutoff=0.4) or f"; known: {', '.join(here)}"
    return f"unknown key {name!r}{f' in [{where}]' if where else ''}{hint}"


def _convert(key: Key, value: Any) -> Any:
    """Return `value` as the type of `key`: lists become tuples, whole numbers floats."""
    origin, inner = typing.get_origin(key.kind), typing.get_args(key.kind)
    if origin is not tuple:
        return _scalar(key.name, origin or key.kind, value)
    if not isinstance(value, list | tuple):
        raise ValueError(f"{key.name} must be a list, got {value!r}")
    if inner[-1] is not Ellipsis and len(value) != len(inner):
        raise ValueError(f"{key.name} must be a list of {len(inner)}, got {value!r}")
    return tuple(_scalar(key.name, inner[0], entry) for entry in value)


def _scalar(name: str, kind: type, value: Any) -> Any:
    if kind is float and type(value) is int:
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{name} must be {_WORDS[kind]}, got {value!r}")
    return value


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


def load_toml(path: str | Path) -> Table:
    """Return the table in a TOML file."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError):
        raise FileNotFoundError(f"config must be an existing TOML file, got {str(path)!r}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"config {path} is not TOML: {error}") from None


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> Table:
    """Return `base` with the entries of `over`, tables merged key by key."""
    merged = dict(base)
    for key, value in over.items():
        found = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(found, Mapping)
        merged[key] = merge(typing.cast(Table, found), value) if both else value
    return merged


def config_hash(config: Mapping[str, Any], weights: str | None = None) -> str:
    """Return 16 digits of the SHA-256 of a run's configuration as canonical JSON, without paths and logging.

    `weights` is the digest of the weights that it starts from, in place of their path.
    """
    kept = {key: value for key, value in config.items() if key not in ("data", "log")}
    kept["train"] = {**config.get("train", {}), "weights": weights}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]


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


def _whole(kind: Any, tokens: Sequence[Token]) -> Any:
    """Read whole numbers; cyclopts itself would round 1.5."""
    found = []
    for token in tokens:
        try:
            found.append(int(token.value))
        except ValueError:
            raise CoercionError(f"must be a whole number, got {token.value!r}", token=token) from None
    return found[0] if kind is int else tuple(found)


def _assignments(_: Any, tokens: Any) -> dict[str, Any]:
    return functools.reduce(merge, map(_assignment, _leaves(tokens)), {})


def _leaves(tokens: Any) -> Iterator[Token]:
    """Yield the tokens of ``--map KEY=VALUE ...``, a list, or of ``--map.KEY=VALUE``, tables of lists."""
    for part in tokens.values() if isinstance(tokens, Mapping) else ():
        yield from _leaves(part)
    yield from () if isinstance(tokens, Mapping) else tokens


def _assignment(token: Token) -> dict[str, Any]:
    """Read KEY=VALUE as TOML does; a value that is not TOML is text."""
    text = f"{'.'.join(token.keys)}={token.value}" if token.keys else token.value
    name, equals, value = text.partition("=")
    for line in (text, f"{name}='{value}'") if equals else ():
        with contextlib.suppress(tomllib.TOMLDecodeError):
            return tomllib.loads(line)
    raise CoercionError(f"must be KEY=VALUE, such as e.k=[50,8], got {token.value!r}", token=token)


_SEVERAL = Parameter(consume_multiple=(1, None))
_PAIRS = Parameter(accepts_keys=False, n_tokens=-1, converter=_assignments, metavar="KEY=VALUE")
_OF_THE_MAP = Parameter(help="keys of the map to change, such as beta=5 or e.k=[50,8]")
# The values KEY=VALUE of a flag, as a table.
Pairs = Annotated[dict[str, Any] | None, _SEVERAL, _PAIRS, _OF_THE_MAP]


def with_flags(command: Callable[..., Any], schema: type, leave_out: Collection[str] = ()) -> Callable[..., Any]:
    """Return `command` with a flag for each key of a schema, but for those to `leave_out`.

    The command takes the flags that a user sets as keywords: keys, and tables of keys.

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
