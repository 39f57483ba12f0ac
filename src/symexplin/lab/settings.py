"""One schema for TOML files and flags: dataclasses whose fields are the keys and whose docstrings are the help.

A configuration is a dataclass; fields that are dataclasses are its tables, the others its keys. Names are unique over
all tables, so that a flag needs no table's name: `[model] width = 128` is `--width 128`.
"""

import dataclasses
import functools
import re
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import tomli_w

from symexplin.validation import check_choice

__all__ = ["Key", "build", "differences", "dump_toml", "keys", "lines", "load_toml", "merge", "nested", "to_table"]

T = TypeVar("T")
Table = dict[str, Any]

_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", dict: "a table"}


class Key(NamedTuple):
    """One key of a schema; `table` is "" at the top, `default` is `dataclasses.MISSING` where a value must be given."""

    table: str
    name: str
    kind: Any
    default: Any
    help: str
    choices: tuple[str, ...] | None


@functools.cache
def keys(schema: type) -> tuple[Key, ...]:
    """Return all keys of a schema, those of its tables too.

    >>> from symexplin.lab.model import ModelConfig
    >>> keys(ModelConfig)[0]
    Key(table='', name='width', kind=<class 'int'>, default=128, help='size of the residual stream', choices=None)
    """
    return tuple(_keys(schema, ""))


def _keys(schema: type, table: str) -> Iterator[Key]:
    hints, texts = typing.get_type_hints(schema), _help(schema)
    for field in dataclasses.fields(schema):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            yield from _keys(typing.cast(type, kind), field.name)
        elif not field.metadata.get("derived"):
            made = field.default_factory
            default = field.default if made is dataclasses.MISSING else made()
            yield Key(table, field.name, kind, default, texts.get(field.name, ""), field.metadata.get("choices"))


def _help(schema: type) -> dict[str, str]:
    """Read the "Args:" of a docstring: entries `name: text` or `one, another: text`, which may go on, indented."""
    _, _, block = (schema.__doc__ or "").partition("Args:\n")
    texts: dict[str, str] = {}
    names: list[str] = []
    for line in block.splitlines():
        if line.strip() and not line.startswith("        "):
            break  # the next section of the docstring
        entry = re.match(r" {8}(\w+(?:, \w+)*): (.*)", line)
        if entry:
            names = entry[1].split(", ")
            texts |= dict.fromkeys(names, entry[2])
        elif line.strip():
            texts |= {name: f"{texts[name]} {line.strip()}" for name in names}
    return {name: text.rstrip(".").replace("`", "") for name, text in texts.items()}


def build(schema: type[T], table: Mapping[str, Any]) -> T:
    """Return the configuration that a table says, checking names and types; the schema itself checks values.

    Raises:
        ValueError: an unknown key (with the nearest right one, or its table), a value of a wrong type, a missing key.

    >>> from symexplin.lab.model import ModelConfig
    >>> build(ModelConfig, {"widht": 64})
    Traceback (most recent call last):
    ValueError: unknown key 'widht'; did you mean 'width'?
    """
    return _build(schema, table, "", keys(typing.cast(typing.Hashable, schema)))


def _build(schema: type[T], table: Mapping[str, Any], where: str, known: tuple[Key, ...]) -> T:
    hints = typing.get_type_hints(schema)
    tables = {f.name for f in dataclasses.fields(schema) if dataclasses.is_dataclass(hints[f.name])}  # type: ignore[arg-type]
    own = {key.name: key for key in known if key.table == where}
    values: Table = {}
    for name, value in table.items():
        if name in tables:
            if not isinstance(value, Mapping):
                raise ValueError(f"[{name}] must be a table, got {value!r}")
            values[name] = _build(hints[name], value, name, known)
        elif name in own:
            values[name] = convert(own[name], value)
        elif isinstance(value, Mapping):
            is_table = {key for key, entry in own.items() if typing.get_origin(entry.kind) is dict}
            raise ValueError(_unknown(name, where, (), sorted(tables | is_table)))
        else:
            raise ValueError(_unknown(name, where, known, [*own, *tables]))
    for name, key in own.items():
        if key.default is dataclasses.MISSING and name not in values:
            raise ValueError(f"{name} must be given: {key.help}")
    return schema(**values)


def _unknown(name: str, where: str, known: tuple[Key, ...], here: list[str]) -> str:
    place = f" in [{where}]" if where else ""
    for key in known:
        if key.name == name and key.table != where:
            return f"key {name!r} belongs " + (f"in [{key.table}]" if key.table else "at the top, before all tables")
    try:
        check_choice("key", name, here)
    except ValueError as error:
        _, found, hint = str(error).partition("; did you mean")
        return f"unknown key {name!r}{place}{found}{hint}" if found else f"unknown key {name!r}{place}; known: {here}"
    raise AssertionError(name)


def convert(key: Key, value: Any) -> Any:
    """Return `value` as the type of `key`, or raise ValueError: lists become tuples, whole numbers floats."""
    kind = key.kind
    if isinstance(kind, types.UnionType):  # X | None: None is the default, which TOML cannot say
        kind = next(k for k in typing.get_args(kind) if k is not types.NoneType)
    if typing.get_origin(kind) is tuple:
        inner = typing.get_args(kind)
        if not isinstance(value, list | tuple):
            raise ValueError(f"{key.name} must be a list, got {value!r}")
        if inner[-1] is not Ellipsis and len(value) != len(inner):
            raise ValueError(f"{key.name} must be a list of {len(inner)}, got {value!r}")
        return tuple(_scalar(key.name, inner[0], entry) for entry in value)
    return _scalar(key.name, typing.get_origin(kind) or kind, value)


def _scalar(name: str, kind: type, value: Any) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{name} must be {_WORDS[kind]}, got {value!r}")
    return dict(value) if isinstance(value, dict) else value


def to_table(config: Any) -> Table:
    """Return a configuration as the table that :func:`build` reads; keys that are None are left out.

    >>> from symexplin.lab.model import ModelConfig
    >>> build(ModelConfig, to_table(ModelConfig(width=64))) == ModelConfig(width=64)
    True
    """
    hints = typing.get_type_hints(type(config))
    table: Table = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(hints[field.name]):
            table[field.name] = to_table(value)
        elif value is not None and not field.metadata.get("derived"):
            table[field.name] = _plain(value)
    return table


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(v) for key, v in value.items() if v is not None}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def nested(schema: type, flat: Mapping[str, Any]) -> Table:
    """Return values by key name, as flags give them, as the table of a file.

    >>> from symexplin.lab.model import ModelConfig
    >>> nested(ModelConfig, {"width": 64})
    {'width': 64}
    """
    table: Table = {}
    for key in keys(schema):
        if key.name in flat:
            place = table.setdefault(key.table, {}) if key.table else table
            place[key.name] = flat[key.name]
    return table


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> Table:
    """Return `base` with the entries of `over`, tables merged key by key.

    >>> merge({"a": 1, "t": {"x": 1, "y": 1}}, {"t": {"y": 2}})
    {'a': 1, 't': {'x': 1, 'y': 2}}
    """
    merged = dict(base)
    for key, value in over.items():
        found = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(found, Mapping)
        merged[key] = merge(typing.cast(Table, found), value) if both else value
    return merged


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Return {dotted key: (old, new)} where two tables differ; a missing key counts as None.

    >>> differences({"a": 1, "t": {"x": 1}}, {"t": {"x": 2}})
    {'a': (1, None), 't.x': (1, 2)}
    """
    found: dict[str, tuple[Any, Any]] = {}
    for key in dict.fromkeys([*old, *new]):
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) or isinstance(b, Mapping):
            found |= differences(a or {}, b or {}, f"{prefix}{key}.")
        elif a != b:
            found[prefix + key] = (a, b)
    return found


def lines(table: Mapping[str, Any], name: str = "") -> list[str]:
    """Return a table to read, one line a table.

    >>> lines({"data": "x", "model": {"width": 64, "depth": 2}})
    ["data = 'x'", '[model] width = 64, depth = 2']
    """
    own = ", ".join(f"{key} = {value!r}" for key, value in table.items() if not isinstance(value, Mapping))
    inner = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    dotted = f"{name}." if name else ""
    found = [f"[{name}] {own}" if name else own] if own else []
    return found + [line for key, value in inner.items() for line in lines(value, dotted + key)]


def load_toml(path: str | Path) -> Table:
    """Return the table in a TOML file.

    Raises:
        FileNotFoundError, ValueError: no such file; not TOML, with the place.
    """
    path = Path(path)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError):
        raise FileNotFoundError(f"config must be an existing TOML file, got {str(path)!r}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from None


def dump_toml(table: Mapping[str, Any]) -> str:
    """Return a table as TOML; :func:`load_toml` reads the same table back.

    >>> print(dump_toml({"data": "x", "model": {"width": 64}}), end="")
    data = "x"
    <BLANKLINE>
    [model]
    width = 64
    """
    return tomli_w.dumps(table)
