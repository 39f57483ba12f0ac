"""Folders that a command writes, and the records of a run in its own.

One process at a time works in a folder, and its configuration stays the same.
"""

import contextlib
import json
import os
from collections.abc import Collection, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

import filelock

from symexplin.checks import naming
from symexplin.lab.files import damaged, read_json
from symexplin.lab.settings import Schema, from_table, load_toml

__all__ = [
    *("CONFIG", "FACTS", "LOCK", "METRICS", "RESULT", "TIMING", "TOKENIZER", "Recorder"),
    *("check_unused", "claimed", "out_folder", "read_facts", "saved_config"),
]

T = TypeVar("T", bound=Schema)

LOCK = ".lock"
# Files of a run (symexplin.lab.run).
CONFIG, RESULT, TOKENIZER, FACTS = "config.toml", "result.json", "tokenizer.json", "run.json"
METRICS, TIMING = "metrics.jsonl", "timing.jsonl"


def out_folder(out: str | Path) -> Path:
    """Return the path of an output folder, which may be missing; raise ValueError for a file."""
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"out must be a folder, got the file {str(out)!r}")
    return folder


@contextlib.contextmanager
def claimed(out: str | Path, kind: str, marks: Collection[str]) -> Iterator[Path]:
    """Hold the lock of a folder, which is created if it is missing.

    A folder that is empty at the end is removed again. An earlier folder of its `kind` has at least one of the files
    `marks`. Another folder with files is refused with a ValueError, as is one that another process works in.
    """
    if not str(out).strip():
        raise ValueError(f"out must name a folder, got {str(out)!r}")
    folder = out_folder(out)
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    names = sorted({path.name.removesuffix(".tmp") for path in folder.iterdir()} - {LOCK}) if folder.is_dir() else []
    if names and not set(marks) & set(names):
        raise ValueError(f"out must be a new folder or that of an earlier {kind}, got {str(out)!r} with {names[0]!r}")
    folder.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise ValueError(f"out must not be in use, got {str(out)!r}: wait for the process that works in it") from None
    try:
        yield folder
    finally:
        if not names and [path.name for path in folder.iterdir()] == [LOCK]:
            (folder / LOCK).unlink()
            with contextlib.suppress(OSError):  # another process may have written into an outer one
                for path in missing:
                    path.rmdir()
        lock.release()


def check_unused(file: Path, what: str, resume: bool) -> None:
    """Raise ValueError if a `file` shows that its folder has `what`, such as "a run", unless it is to be resumed."""
    if file.exists() and not resume:
        raise ValueError(
            f"out must be a new folder, got {str(file.parent)!r}, which has {what}: add --resume to continue it"
        )


def read_facts(folder: Path) -> dict[str, Any]:
    """Return what the run in a folder was started with, or raise ValueError if its file is damaged."""
    facts = read_json(folder / FACTS)
    for key, kind in (("data", str), ("config", dict), ("provenance", dict)):
        if not isinstance(facts.get(key), kind):
            raise damaged(folder / FACTS, f"{key} is {facts.get(key)!r}")
    return facts


def saved_config(schema: type[T], file: Path) -> T:
    """Return the configuration that a command has written to a file in its folder."""
    with naming(f"{str(file)!r} was edited, or is of another version of symexplin, which can read and resume it"):
        return from_table(schema, load_toml(file))


class Recorder(contextlib.ExitStack):
    """Writes the record of a run.

    Args:
        folder: of the run; None: write nothing, as in all processes but the first.
        tensorboard: write events, too.
        step: completed steps of a resumed run; later events are dropped.
        lengths: bytes of each file that a resumed run keeps, as :meth:`sync` returned them.

    Raises:
        ValueError: a file that is shorter than its length.
    """

    def __init__(
        self,
        folder: Path | None,
        tensorboard: bool = False,
        step: int = 0,
        lengths: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        self._files: dict[str, FileIO] = {}
        self._events: Any = None
        if folder is None:
            return
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(folder / "tensorboard", purge_step=step + 1 if step else None)
            self.callback(self._events.close)
        for name, path in (("metrics", folder / METRICS), ("timing", folder / TIMING)):
            length = lengths[name] if lengths else 0
            file = self._files[name] = self.enter_context(path.open("ab", buffering=0))
            if file.tell() < length:
                raise damaged(path, f"it has {file.tell():,} bytes, and {length:,} were written")
            file.truncate(length)

    def update(self, step: int, record: Mapping[str, float], tokens: int) -> None:
        """Record an update, and the number of tokens so far."""
        self._write("metrics", step=step, **record, tokens=tokens)
        self._plot(step, record)

    def evaluation(self, step: int, loss: float, stats: Mapping[str, float], timing: Mapping[str, float]) -> None:
        """Record the loss of an evaluation, the statistics of the map, and the time."""
        self._write("metrics", step=step, eval_loss=loss, **({"stats": stats} if stats else {}))
        self._write("timing", step=step, **timing)
        self._plot(step, {"eval_loss": loss, **stats, **timing})

    def error(self, step: int, text: str) -> None:
        """Record the error that ended the run."""
        self._write("metrics", step=step, error=text)

    def sync(self) -> dict[str, int]:
        """Flush the files to the disk; return their lengths in bytes."""
        for file in self._files.values():
            os.fsync(file.fileno())
        return {name: os.fstat(file.fileno()).st_size for name, file in self._files.items()}

    def _write(self, name: str, **record: Any) -> None:
        if not self._files:
            return
        left = json.dumps(record, allow_nan=False).encode() + b"\n"
        try:
            while left:  # a full disk may take a part of a line
                left = left[self._files[name].write(left) :]
        except OSError as error:
            error.filename = self._files[name].name
            raise

    def _plot(self, step: int, values: Mapping[str, float]) -> None:
        if self._events is not None:
            for name, value in values.items():
                self._events.add_scalar(name, value, step)
