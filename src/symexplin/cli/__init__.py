"""The command line: `symexplin COMMAND`; what each command takes and does is in :mod:`symexplin.cli.commands`."""

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from symexplin.cli.commands import COMMANDS
from symexplin.cli.manual import DESCRIPTION, EPILOG, PAGES
from symexplin.cli.parser import Parser
from symexplin.lab.launch import Launch, launch, outlived, report_failure

__all__ = ["main"]

# What shells give for a command ended by a signal: 128 + its number; 130 is Ctrl-C.
_SIGNALLED, _INTERRUPTED = 128, 130
# Errors that another process of the job tells of, and those that all have, of which one tells.
_ELSEWHERE, _OF_ALL = "ElsewhereError", {"NonFiniteError", "Stopped", "ChildProcessError"}
# What torch's RuntimeErrors say where the memory of a CPU ends.
_NO_MEMORY = ("DefaultCPUAllocator", "can't allocate memory", "Storage size calculation overflowed")

_PARALLEL = " and ".join(name for name, command in COMMANDS.items() if command.parallel)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0, 2 for a user's error, 128 + its number for a signal.

    Args:
        argv: the arguments without the program's name; None: those of the process.

    >>> main(["demo", "--steps", "0"])
    2
    """
    given = list(sys.argv[1:] if argv is None else argv)
    traceback, started = False, Launch()
    for name in ("stdout", "stderr"):  # closed by who started us
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 (for good)
    try:
        started = launch()
        arguments = make_parser(given).parse_args(given)
        traceback, command = arguments.traceback, COMMANDS[arguments.command]
        if started.size > 1 and not command.parallel:
            raise ValueError(f"torchrun is for {_PARALLEL}, got {arguments.command!r}: run it without")
        command.run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        if started.rank == 0:
            print("symexplin: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:  # whoever read the output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        message, status = _explain(error)
        if message is not None:
            report_failure(f"symexplin: {message}")
        tells = _tells(error, started)
        if message is None or (traceback and tells):
            raise
        if tells:
            own = started.rank and not _kinds(error) & _OF_ALL
            print(f"symexplin: {f'process {started.rank}: ' if own else ''}{message}", file=sys.stderr)
        return status
    return 0


def _kinds(error: Exception) -> set[str]:
    """Return the names of an error's classes: those of the lab are not imported for every command."""
    return {kind.__name__ for kind in type(error).__mro__}


def _tells(error: Exception, started: Launch) -> bool:
    """Whether this process is the one of its job to tell of an error; it may wait for the one that is."""
    kinds = _kinds(error)
    if _ELSEWHERE in kinds:
        outlived(started)
        return False
    if started.size == 1:
        return True
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        from symexplin.lab.parallel import first_to_tell

        return first_to_tell() or not _OF_ALL & kinds
    return started.rank == 0 or outlived(started)  # until they have joined, most likely all fail alike


def _explain(error: Exception) -> tuple[str | None, int]:
    """Return the line that tells a user what went wrong, and the status; None for a defect of the program."""
    text = " ".join(str(error).split())
    kinds = _kinds(error)
    if "Stopped" in kinds:
        return text, _SIGNALLED + int(error.signal)  # type: ignore[attr-defined]
    if isinstance(error, ModuleNotFoundError):
        text += "; the command line needs the extra 'lab': pip install 'symexplin[lab]'"
    elif "OutOfMemoryError" in kinds or any(words in text for words in _NO_MEMORY):
        less = "raise --accumulation (bench: --microbatches), or try --recompute"
        text = f"out of memory: a smaller model, or {less} ({text[:200]})"
    elif any(kind.__module__.startswith(("torch._dynamo", "torch._inductor")) for kind in type(error).__mro__):
        text = f"torch.compile failed: leave out --compile, or remove its cache ({text[:200]})"
    elif isinstance(error, OSError) and error.strerror:
        text = f"{error.filename!r}: {error.strerror}" if error.filename else error.strerror
    elif not isinstance(error, ValueError | OSError) and "NonFiniteError" not in kinds:
        return None, 1
    return f"error: {text}", 2


def make_parser(argv: Sequence[str] | None = None) -> Parser:
    """Return the parser; given the arguments, with the flags of their command alone, which is faster."""
    parser = Parser(prog="symexplin", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"symexplin {version('symexplin')}")
    parser.add_argument("--traceback", action="store_true", help="show where an error comes from")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        parser.commands[name] = commands.add_parser(name, **PAGES[name]._asdict())
        if argv is None or name in argv:
            command.add(parser.commands[name])
    return parser
