"""Folders that a command fills: whose they are, and that one process at a time works in them."""

import contextlib
from collections.abc import Collection, Iterator
from pathlib import Path

import filelock

__all__ = ["COMPARE", "COMPARISON", "CONFIG", "FACTS", "LOCK", "SUMMARY", "TOKENIZER", "claimed"]

LOCK = ".lock"
# Files of a run (symexplin.lab.run).
CONFIG, SUMMARY, TOKENIZER, FACTS = "config.toml", "summary.json", "tokenizer.json", "run.json"
# Files of a comparison (symexplin.lab.compare).
COMPARE, COMPARISON = "compare.toml", "comparison.json"


@contextlib.contextmanager
def claimed(out: str | Path, kind: str, marks: Collection[str]) -> Iterator[Path]:
    """Hold the lock of a folder, which is created if missing; this process may claim it again within.

    The system frees the lock when the process ends, however it ends. A folder that is still empty at the end, because
    of a mistake in what was asked for, is removed again.

    Args:
        out: new, empty, or an earlier one of its kind.
        kind: what such a folder is, for messages.
        marks: names of which an earlier one has at least one: what is written into it first.

    Raises:
        ValueError: a file, a folder with other things in it, one that another process works in.
        OSError: a folder that cannot be created or written into.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place, claimed(Path(place, "new"), "run", {"run.json"}) as folder:
    ...     [path.name for path in folder.iterdir()]
    ['.lock']
    """
    if not str(out).strip():
        raise ValueError(f"out must name a folder, got {str(out)!r}")
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"out must be a folder, got the file {str(out)!r}")
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    found = sorted({path.name.removesuffix(".tmp") for path in folder.iterdir()} - {LOCK}) if folder.is_dir() else []
    if found and not set(marks) & set(found):
        raise ValueError(f"out must be a new folder or that of an earlier {kind}, got {str(out)!r} with {found[0]!r}")
    folder.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder / LOCK, timeout=0, is_singleton=True)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise ValueError(f"out must be free, got {str(out)!r}, in which another process works") from None
    except BaseException:
        _remove(missing)
        raise
    try:
        yield folder
    finally:
        if not found and [path.name for path in folder.iterdir()] == [LOCK]:
            (folder / LOCK).unlink()
            _remove(missing)
        lock.release()


def _remove(folders: Collection[Path]) -> None:
    """Remove folders, the inner ones first, as long as they are empty."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()
