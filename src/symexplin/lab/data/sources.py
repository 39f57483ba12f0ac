"""Documents: read as a stream from files, folders and datasets, and split into two sides."""

import contextlib
import gzip
import hashlib
import lzma
import os
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from symexplin.checks import naming

__all__ = ["Reader", "find_source", "hash_document", "split_documents"]

Reader = Callable[[], Iterator[bytes]]  # yields the documents of a source from its start, as often as it is called

_SEPARATOR = "\0"  # ends each document; it does not occur in text
# The paper's corpus. `datasets` runs no scripts anymore: this is the branch that the hub has converted, which may lack
# documents.
_CORPUS, _CORPUS_SPEC = "openwebtext", "hf:Skylion007/openwebtext@refs/convert/parquet"
_CORPUS_DOCUMENTS = 8_013_769
_TABLES = {".parquet": "parquet", ".jsonl": "json"}  # what `datasets` calls files with rows
_CHUNK = 1 << 20  # characters
# Folders of the standard library that are not its text: installed packages, tests, build leftovers.
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def find_source(name: str, text_key: str, split: str, left_out: list[str]) -> Reader:
    """Return the reader of a source.

    A NUL character separates documents, inside those of datasets and JSON lines too; blank ones are left out.
    `left_out` gets the files of a folder that are not text.
    """
    spec, path = _CORPUS_SPEC if name == _CORPUS else name, Path(name)
    if re.match("hf:[^:@]", spec):
        place, _, revision = spec.removeprefix("hf:").partition("@")
        dataset, _, config = place.partition(":")
        rows = _load(name, dataset, config or None, split=split, revision=revision or None)
        if name == _CORPUS and len(rows) < _CORPUS_DOCUMENTS:
            raise ValueError(
                f"{name!r} has {len(rows):,} documents on the hub, not {_CORPUS_DOCUMENTS:,}: give a folder with its "
                "parquet files or texts instead"
            )
        return lambda: _documents(name, _column(rows, text_key, name))
    if name == "stdlib":
        library = _files(Path(sysconfig.get_path("stdlib")), _NOT_LIBRARY)
        files = [file for file in library if file.suffix == ".py" and _is_text(file)]
    elif name and path.is_dir():
        every = _files(path)
        files = [file for file in every if _table(file) or _is_text(file)]
        left_out += map(str, sorted({*every} - {*files}))
    elif path.is_file():  # not a pipe, which gives its text once
        files = [path]
    else:
        right = f"'stdlib', an existing file or folder, 'hf:NAME' or {_CORPUS!r}"
        raise FileNotFoundError(f"a source of text must be {right}, got {name!r}")
    return lambda: _documents(name, _texts(files, text_key))


def _documents(name: str, texts: Iterable[str]) -> Iterator[bytes]:
    empty = True
    for text in texts:
        for document in text.split(_SEPARATOR):
            if document.strip():
                empty = False
                yield document.encode()
    if empty:
        raise ValueError(f"a source of text must have at least one document, got {name!r} without text")


# --- files and folders -----------------------------------------------------------------------------------------------


def _files(root: Path, without: frozenset[str] = frozenset()) -> list[Path]:
    """Return the files below a folder in the order of their paths; links to folders are not followed."""
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in without]
        files += [path for name in names if (path := Path(folder, name)).is_file()]
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def _is_text(path: Path) -> bool:
    """Whether a file is readable UTF-8 text to its end."""
    try:
        with _open(path) as file:
            while file.read(_CHUNK):
                pass
    except (OSError, ValueError):
        return False
    return True


@contextlib.contextmanager
def _open(path: Path) -> Iterator[TextIO]:
    openers: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open}
    try:
        with openers.get(path.suffix, open)(path, "rt", encoding="utf-8-sig", newline="\n") as file:
            yield file
    except UnicodeDecodeError:
        raise ValueError(
            f"{str(path)!r} is not UTF-8 text: convert it first, for example with iconv -f latin1 -t utf-8"
        ) from None
    except (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{str(path)!r} is damaged, or not {path.suffix}: {error}") from None


def _table(path: Path) -> str | None:
    """Return what `datasets` calls the format of a file with rows; None for text."""
    return _TABLES.get(Path(path.name.removesuffix(".gz").removesuffix(".xz")).suffix)


def _texts(files: Iterable[Path], text_key: str) -> Iterator[str]:
    """Yield the texts of files: a column of their rows, or what lies between separators."""
    for path in files:
        if kind := _table(path):
            rows = _load(str(path), kind, data_files=str(path), split="train", streaming=True)
            yield from _column(rows, text_key, str(path))
        else:
            with _open(path) as file:
                yield from _between_separators(file)


def _between_separators(file: TextIO) -> Iterator[str]:
    pending: list[str] = []
    while chunk := file.read(_CHUNK):
        first, *others = chunk.split(_SEPARATOR)
        pending.append(first)
        for other in others:
            yield "".join(pending)
            pending = [other]
    yield "".join(pending)


def _load(place: str, *names: str | None, **options: Any) -> Any:
    """Return one split of a dataset."""
    import datasets

    with naming(place):
        try:
            return datasets.load_dataset(*names, **options)
        except StopIteration:
            raise ValueError("it has no rows") from None


def _column(rows: Any, text_key: str, place: str) -> Iterator[str]:
    """Yield the texts of a column of a dataset; a row without one is empty."""
    if text_key in (rows.column_names or ()):
        rows = rows.select_columns([text_key])
    with naming(place):
        for part in rows.iter(batch_size=256):  # thirty times as fast as row by row
            texts = part.get(text_key, [...])
            if not all(isinstance(text, str | None) for text in texts):
                raise ValueError(f"text_key must name a column with text, got {text_key!r}")
            yield from (text or "" for text in texts)


# --- the split: a rule on the content of documents alone -------------------------------------------------------------


def hash_document(document: bytes, seed: int) -> int:
    """Return a number in [0, 2**64) that depends on the content and the seed alone."""
    return int.from_bytes(hashlib.blake2b(document, digest_size=8, key=str(seed).encode()).digest())


def split_documents(hashes: NDArray[np.uint64], given: int, fraction: float) -> NDArray[np.int8]:
    """Return the side of each document: 0 to train on, 1 held out, -1 for repeated ones, which are on no side.

    The first `given` documents are to be split, the others are held out. Without others, those with the smallest hashes
    are held out: all below `fraction` * 2**64, but at least one, and never all. No text is on both sides.
    """
    train = np.unique(hashes[:given], return_index=True)[1]  # in the order of the hashes
    if given < len(hashes):
        valid = given + np.unique(hashes[given:], return_index=True)[1]
        train = train[~np.isin(hashes[train], hashes[valid])]
        if not len(train):
            raise ValueError("sources must hold a document that valid does not hold, got none")
    else:
        wanted = max(int((hashes[train] / 2.0**64 < fraction).sum()), 1)
        valid, train = np.split(train, [min(wanted, len(train) - 1)])
    sides = np.full(len(hashes), -1, np.int8)
    sides[train], sides[valid] = 0, 1
    return sides
