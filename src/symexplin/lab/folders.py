"""Folders that a command writes, and the records of a run in its own.

One process at a time works in a folder, and its configuration stays the same.
"""

import contextlib
import json
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import filelock

from symexplin.checks import naming
from symexplin.lab.settings import Schema, from_table, load_toml

__all__ = [
    *("CONFIG", "FACTS", "LOCK", "METRICS", "RESULT", "TIMING", "TOKENIZER", "Recorder"),
    *("check_unused", "claimed", "saved_config"),
]

T = TypeVar("T", bound=Schema)

LOCK = ".lock"
# Files of a run (symexplin.lab.run).
CONFIG, RESULT, TOKENIZER, FACTS = "config.toml", "result.json", "tokenizer.json", "run.json"
METRICS, TIMING = "metrics.jsonl", "timing.jsonl"


@contextlib.contextmanager
def claimed(out: str | Path, kind: str, marks: Collection[str]) -> Iterator[Path]:
    """Hold the lock of a folder, which is created if it is missing.

    A folder that is empty at the end is removed again. An earlier folder of its `kind` has at least one of the files
    `marks`. Another folder with files is refused with a ValueError, as is one that another process works in.
    """
    folder = Path(out)
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
    """

    def __init__(
        self,
        folder: Path | None,
        tensorboard: bool = False,
        step: int = 0,
        lengths: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        self._files: dict[str, BinaryIO] = {}
        self._events: Any = None
        if folder is None:
            return
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(folder / "tensorboard", purge_step=step + 1 if step else None)
            self.callback(self._events.close)
        for name, path in (("metrics", folder / METRICS), ("timing", folder / TIMING)):
            file = self._files[name] = self.enter_context(path.open("ab"))
            length = lengths[name] if lengths else 0
            if file.tell() < length:
                raise ValueError(f"{str(path)!r} has {file.tell():,} bytes, but {length:,} were written")
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
        self._files[name].write(json.dumps(record, allow_nan=False).encode() + b"\n")
        self._files[name].flush()

    def _plot(self, step: int, values: Mapping[str, float]) -> None:
        if self._events is not None:
            for name, value in values.items():
                self._events.add_scalar(name, value, step)
