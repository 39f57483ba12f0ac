"""The folder of a dataset: the names in it, who may work in it, and whether it is the one that was asked for.

dataset.json       counts, digests, configuration: written last    tokenizer.json     of the `tokenizers` library
train.safetensors  the tokens to train on                          valid.safetensors  those held out
.parts/            finished shards while the folder is in the making
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock

from symexplin.lab.settings import differences
from symexplin.lab.split import SIDES

__all__ = ["DATASET", "PARTS", "TOKENIZER", "check_same", "claimed", "side_file"]

DATASET, TOKENIZER, PARTS = "dataset.json", "tokenizer.json", ".parts"
_LOCK = ".lock"


def side_file(side: str) -> str:
    """Return the name of the token file of "train" or "valid".

    >>> side_file("train")
    'train.safetensors'
    """
    return f"{side}.safetensors"


_OURS = {DATASET, TOKENIZER, PARTS, _LOCK, *map(side_file, SIDES.values())}


@contextlib.contextmanager
def claimed(folder: Path, sources: Iterable[str]) -> Iterator[None]:
    """Hold the lock of the folder, which is created if missing; the system frees it when the process ends.

    Args:
        folder: new or empty, or that of a dataset, finished or not.
        sources: those that are folders must not hold `folder`.

    Raises:
        ValueError: another kind of folder, one inside a source, one that another process works in.
    """
    if not str(folder).strip() or str(folder) == ".":
        raise ValueError(f"out must name a new folder, got {str(folder)!r}")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"out must be a folder, got the file {str(folder)!r}")
    for source in sources:
        if Path(source).is_dir() and folder.resolve().is_relative_to(Path(source).resolve()):
            raise ValueError(f"out must lie outside the sources, got {str(folder)!r} in {source!r}")
    found = {path.name.removesuffix(".tmp") for path in folder.iterdir()} if folder.is_dir() else set()
    begun = {PARTS, DATASET} & found
    foreign = sorted(found - _OURS if begun else found - {_LOCK})
    if foreign:
        raise ValueError(f"out must be a new folder or an earlier dataset's, got {str(folder)!r} with {foreign[0]!r}")
    folder.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder / _LOCK, timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise ValueError(f"out must be free, got {str(folder)!r}, which another process prepares") from None
    try:
        yield
    finally:
        if found <= {_LOCK} and [path.name for path in folder.iterdir()] == [_LOCK]:
            (folder / _LOCK).unlink()  # a mistake in the configuration leaves no trace
            with contextlib.suppress(OSError):
                folder.rmdir()
        lock.release()


def check_same(folder: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raise ValueError unless two tables that describe what is in the folder are equal.

    >>> check_same(Path("data"), {"seed": 0}, {"seed": 1})
    Traceback (most recent call last):
    ValueError: out must be a new folder, got 'data', prepared otherwise: seed was 0, now 1 (give another folder, or \
delete this one)
    """
    different = [f"{key} was {was!r}, now {now!r}" for key, (was, now) in differences(old, new).items()]
    if different:
        raise ValueError(
            f"out must be a new folder, got {str(folder)!r}, prepared otherwise: {'; '.join(different)} (give another "
            "folder, or delete this one)"
        )
