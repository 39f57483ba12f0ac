"""The command line: `symexplin demo`."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, NoReturn

__all__ = ["main"]

_INTERRUPTED = 130  # what shells give for a command ended by Ctrl-C


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are raised, so that all errors leave by one door."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0, 2 for a user's error, 130 for Ctrl-C.

    Args:
        argv: the arguments without the program's name; None: those of the process.

    >>> main(["demo", "--steps", "0"])
    2
    """
    traceback = False
    try:
        arguments = _parser().parse_args(argv)
        traceback = arguments.traceback
        _demo(arguments)
    except KeyboardInterrupt:
        print("symexplin: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:  # whoever read the output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError, ModuleNotFoundError) as error:
        if traceback:
            raise
        print(f"symexplin: error: {_message(error)}", file=sys.stderr)
        return 2
    return 0


def _message(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"{error}; the command line needs the extra 'lab': pip install 'symexplin[lab]'"
    return " ".join(str(error).split())


def _parser() -> _Parser:
    parser = _Parser(prog="symexplin", description="Train models in curved weight space.")
    parser.add_argument("--version", action="version", version=f"symexplin {version('symexplin')}")
    parser.add_argument("--traceback", action="store_true", help="show where an error comes from")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    demo = commands.add_parser(
        "demo", help="compare AdamW and SEL on a small language model, in minutes, without a download"
    )
    demo.add_argument("--out", default="runs/demo", help="folder for the results (%(default)s)")
    demo.add_argument("--steps", type=int, help="optimizer steps of each run")
    demo.add_argument("--seed", type=int, help="seed of weights, data order and sample")
    demo.add_argument("--data", help="'stdlib', a text file (documents separated by NUL) or a folder")
    demo.add_argument("--arms", nargs="+", metavar="ARM", help="arms to compare: AdamW and others")
    demo.add_argument("--lrs", nargs="+", type=float, metavar="LR", help="learning rates that every arm trains at")
    return parser


def _demo(arguments: argparse.Namespace) -> None:
    from symexplin.lab.demo import DemoConfig, run_demo

    names = ("steps", "seed", "data", "arms", "lrs")
    given: dict[str, Any] = {name: getattr(arguments, name) for name in names}
    fields: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in given.items() if v is not None}
    run_demo(arguments.out, DemoConfig(**fields), echo=lambda line: print(line, flush=True))


if __name__ == "__main__":
    sys.exit(main())
