"""The folder of a dataset: the names in it, who may work in it, and whether it is the one that was asked for.

dataset.json       counts, digests, configuration: written last    tokenizer.json     of the `tokenizers` library
train.safetensors  the tokens to train on                          valid.safetensors  those held out
.parts/            finished shards while the folder is in the making
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from symexplin.lab.folders import claimed
from symexplin.lab.settings import differences

__all__ = ["DATASET", "PARTS", "TOKENIZER", "check_same", "claimed_dataset", "side_file"]

DATASET, TOKENIZER, PARTS = "dataset.json", "tokenizer.json", ".parts"


def side_file(side: str) -> str:
    """Return the name of the token file of "train" or "valid".

    >>> side_file("train")
    'train.safetensors'
    """
    return f"{side}.safetensors"


@contextlib.contextmanager
def claimed_dataset(out: str | Path, sources: Iterable[str]) -> Iterator[Path]:
    """Hold the lock of a dataset's folder (:func:`symexplin.lab.folders.claimed`), which no source may hold.

    Raises:
        ValueError: a folder inside a source, besides what cannot be claimed.
    """
    for source in sources:
        if source and Path(source).is_dir() and Path(out).resolve().is_relative_to(Path(source).resolve()):
            raise ValueError(f"out must lie outside the sources, got {str(out)!r} in {source!r}")
    with claimed(out, "dataset", {PARTS, DATASET}) as folder:
        yield folder


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
