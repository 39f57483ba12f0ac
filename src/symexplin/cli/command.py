"""What a command is, and what several have in common."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from symexplin.cli.parser import given

__all__ = ["Arguments", "Command", "configured", "log", "say", "warn"]

T = TypeVar("T")
Arguments = argparse.Namespace


class Command(NamedTuple):
    """One command: what gives its parser its flags, what runs it, and whether several processes may run it together."""

    add: Callable[[argparse.ArgumentParser], None]
    run: Callable[[Arguments], None]
    parallel: bool = False


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


def warn(line: str) -> None:
    """Print a warning to standard error."""
    print(f"symexplin: {line}", file=sys.stderr, flush=True)


def log(line: str) -> None:
    """Print a line of a long job, which goes on when nobody can read it any more."""
    try:
        say(line)
    except OSError:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 (for good)


def configured(arguments: Arguments, schema: type[T], table: dict[str, Any]) -> T:
    """Return the configuration of the run to resume, else the defaults, under the file and the flags given."""
    from symexplin.lab.settings import build, load_toml, merge

    if arguments.config is not None:
        table = merge(table, load_toml(arguments.config))
    return build(schema, merge(table, given(arguments, schema)))
