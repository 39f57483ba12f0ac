"""The parser of the command line: flags made from the schemas of configurations, errors raised, help like a manual."""

import argparse
import difflib
import functools
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from symexplin.validation import check_choice

__all__ = ["Parser", "add_keys", "given"]

_METAVARS = {int: "N", float: "X", str: "TEXT"}


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Descriptions as they are written, help texts wrapped."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=100)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are raised, so that all errors leave by one door, and name the nearest right flag."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "allow_abbrev": False, "formatter_class": _Formatter})
        self.commands: dict[str, Parser] = {}

    def error(self, message: str) -> NoReturn:
        """Raise ValueError with the message."""
        raise ValueError(message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None:
            check_choice(
                action.option_strings[0] if action.option_strings else str(action.metavar), value, action.choices
            )

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """Parse, and refuse what no flag takes."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            command = self.commands.get(getattr(found, "command", ""), self)
            flag = unknown[0].partition("=")[0]
            near = difflib.get_close_matches(flag, command._option_string_actions, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else f"; see {command.prog} --help"
            raise ValueError(f"unknown argument {flag!r}{hint}")
        return found


def add_keys(parser: argparse.ArgumentParser, schema: type, leave_out: Sequence[str] = ()) -> None:
    """Give `parser` a flag for every key of a schema (:mod:`symexplin.lab.settings`), grouped by table."""
    from symexplin.lab.settings import keys

    groups: dict[str, argparse._ArgumentGroup] = {}
    for key in keys(schema):
        if key.name in leave_out:
            continue
        if key.table not in groups:
            groups[key.table] = parser.add_argument_group(f"[{key.table}]" if key.table else "settings")
        groups[key.table].add_argument(*_flag(key), **_options(key))


def given(arguments: argparse.Namespace, schema: type) -> dict[str, Any]:
    """Return the values of those keys of a schema that flags set, as the table of a file."""
    from symexplin.lab.settings import keys, merge, nested

    flat = {key.name: getattr(arguments, key.name) for key in keys(schema) if hasattr(arguments, key.name)}
    return nested(schema, {k: functools.reduce(merge, v) if _all_tables(v) else v for k, v in flat.items()})


def _all_tables(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)


def _flag(key: Any) -> list[str]:
    return [f"--{key.name.replace('_', '-')}"]


def _options(key: Any) -> dict[str, Any]:
    """Return what argparse needs to know of a key; a flag that is not given leaves no trace."""
    options: dict[str, Any] = {"dest": key.name, "default": argparse.SUPPRESS, "help": _text(key)}
    kind = key.kind
    if isinstance(kind, types.UnionType):
        kind = next(k for k in typing.get_args(kind) if k is not types.NoneType)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is bool:
        return options | {"action": argparse.BooleanOptionalAction}
    if origin is dict:
        return options | {"action": "extend", "nargs": "+", "type": _assignment, "metavar": "KEY=VALUE"}
    if origin is tuple:
        count = "+" if inner[-1] is Ellipsis else len(inner)
        return options | {"nargs": count, "type": _reader(inner[0]), "metavar": _METAVARS[inner[0]]}
    if key.choices:
        return options | {"choices": key.choices, "metavar": key.name.upper()}
    return options | {"type": _reader(kind), "metavar": _METAVARS[kind]}


def _text(key: Any) -> str:
    """Return the help of a key with its default; argparse reads % as its own."""
    shown = key.default
    if isinstance(shown, tuple):
        shown = " ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in shown)
    elif isinstance(shown, bool):
        shown = "on" if shown else "off"
    elif isinstance(shown, float):
        shown = f"{shown:g}"
    silent = shown in (None, "", {}) or isinstance(shown, type(argparse))
    text = key.help if silent or not isinstance(shown, str | int) else f"{key.help} (default: {shown})"
    return str(text).replace("%", "%%")


def _reader(kind: type) -> Callable[[str], Any]:
    words = {int: "a whole number", float: "a number", str: "a text"}[kind]

    def read(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {words}, got {text!r}") from None

    return read


def _assignment(text: str) -> dict[str, Any]:
    """Read KEY=VALUE as TOML does; a value that is none is a text."""
    import tomllib

    name, equals, value = text.partition("=")
    for candidate in (text, f"{name}='{value}'"):
        try:
            if equals:
                return tomllib.loads(candidate)
        except tomllib.TOMLDecodeError:
            continue
    raise argparse.ArgumentTypeError(f"must be KEY=VALUE, such as e.k=[50,8], got {text!r}")
