"""Documents: read as a stream from files, folders and datasets, and split into two sides."""

import contextlib
import gzip
import hashlib
import json
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

__all__ = ["Reader", "check_source", "find_source", "hash_document", "hub_file", "split_documents"]

Reader = Callable[[], Iterator[bytes]]  # yields the documents of a source from its start, as often as it is called

_SEPARATOR = "\0"  # ends each document; it does not occur in text
# The paper's corpus. `datasets` runs no scripts anymore: this is the branch that the hub has converted, which may lack
# documents.
_CORPUS, _CORPUS_SPEC = "openwebtext", "hf:Skylion007/openwebtext@refs/convert/parquet"
_CORPUS_DOCUMENTS = 8_013_769
_PARQUET = ".parquet"
_CHUNK = 1 << 20  # characters
# Folders of the standard library that are not its text: installed packages, tests, build leftovers.
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def find_source(name: str, text_key: str, split: str, left_out: list[str]) -> Reader:
    """Return the reader of a source.

    A NUL character separates documents, inside those of datasets and JSON lines too; blank ones are left out.
    `left_out` gets the files of a folder that are not text.
    """
    spec, path = _spec(name), Path(name)
    if re.match("hf:[^:@]", spec):
        rows = _dataset(spec.removeprefix("hf:"), text_key, split)
        if name == _CORPUS and len(rows) < _CORPUS_DOCUMENTS:
            raise ValueError(
                f"{name!r} has {len(rows):,} documents on the hub, not {_CORPUS_DOCUMENTS:,}: give a folder with its "
                "parquet files or texts instead"
            )
        return lambda: _documents(name, _column(rows, text_key))
    if name == "stdlib":
        library = _files(Path(sysconfig.get_path("stdlib")), _NOT_LIBRARY)
        files = [file for file in library if file.suffix == ".py" and _is_text(file)]
    elif name and path.is_dir():
        every = _files(path)
        files = [file for file in every if file.suffix == _PARQUET or _is_text(file)]
        left_out += map(str, sorted({*every} - {*files}))
    elif path.is_file():  # not a pipe, which gives its text once
        files = [path]
    else:
        right = f"'stdlib', an existing file or folder, 'hf:NAME' or {_CORPUS!r}"
        raise FileNotFoundError(f"a source of text must be {right}, got {name!r}")
    for file in files:
        if file.suffix == _PARQUET:
            _check_column(_parquet(file).schema_arrow, text_key, str(file))
    return lambda: _documents(name, _texts(files, text_key))


def _spec(name: str) -> str:
    return _CORPUS_SPEC if name == _CORPUS else name


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


def _texts(files: Iterable[Path], text_key: str) -> Iterator[str]:
    """Yield the texts of files: of parquet, of JSON lines, or what lies between separators."""
    for path in files:
        if path.suffix == _PARQUET:
            for part in _parquet(path).iter_batches(batch_size=256, columns=[text_key]):
                yield from (text or "" for text in part.column(0).to_pylist())
            continue
        with _open(path) as file:
            if Path(path.name.removesuffix(".gz").removesuffix(".xz")).suffix == ".jsonl":
                lines = (pair for pair in enumerate(file, start=1) if pair[1].strip())
                yield from (_of_json(line, text_key, f"{path}:{number}") for number, line in lines)
            else:
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


def _of_json(line: str, text_key: str, place: str) -> str:
    try:
        text: str = json.loads(line)[text_key] or ""  # null is no text
        text.encode()  # nor is a lone surrogate
    except (ValueError, LookupError, TypeError, AttributeError):
        right = f"a JSON object with text under text_key {text_key!r}"
        raise ValueError(f"{place} must be {right}, got {line[:60].strip()}") from None
    return text


# --- datasets and the hub --------------------------------------------------------------------------------------------


def _dataset(spec: str, text_key: str, split: str) -> Any:
    """Return the text column of one split of a dataset of the hub, as a `datasets.Dataset` on the disk."""
    rows = _load(spec, split)
    _check_column(rows.features.arrow_schema, text_key, f"hf:{spec}")
    return rows.select_columns([text_key])


def _load(spec: str, split: str, first: bool = False) -> Any:
    """Return one split of the dataset NAME[:CONFIG][@REVISION], or its `first` row alone."""
    import datasets

    place, _, revision = spec.partition("@")
    name, _, config = place.partition(":")
    try:
        options = {"streaming": True} if first else {}
        rows = datasets.load_dataset(name, config or None, split=split, revision=revision or None, **options)
        return next(iter(rows), {}) if first else rows
    except Exception as error:  # builders raise errors of every kind
        raise ValueError(
            f"source 'hf:{spec}' with split {split!r} cannot be loaded ({_line(error)}): check the name and the "
            "network, or give a local file or folder instead; for a dataset that is a script, try 'hf:NAME@refs/"
            "convert/parquet'"
        ) from None


def _check_column(schema: Any, text_key: str, place: str) -> None:
    """Raise ValueError unless a column of this name has text."""
    if text_key not in schema.names or str(schema.field(text_key).type) not in ("string", "large_string"):
        columns = ", ".join(schema.names)
        raise ValueError(f"text_key must name a column with text in {place!r}, which has {columns}; got {text_key!r}")


def _parquet(path: Path) -> Any:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError:
        raise ValueError(f"{str(path)!r} needs pyarrow: pip install pyarrow") from None
    try:
        return parquet.ParquetFile(path)
    except ArrowInvalid as error:
        raise ValueError(f"{str(path)!r} is damaged, or not parquet: {error}") from None


def check_source(name: str, text_key: str, split: str) -> None:
    """Raise what :func:`find_source` would, without a download: call it before a job is queued.

    Of a dataset on the hub it reads the first row.
    """
    spec = _spec(name)
    if name and Path(name).is_dir():  # to look for text in its files takes long
        return
    if not re.match("hf:[^:@]", spec):
        find_source(name, text_key, split, [])
        return
    first = _load(spec.removeprefix("hf:"), split, first=True)
    if not isinstance(first.get(text_key), str | None) or text_key not in first:
        columns = ", ".join(first)
        raise ValueError(f"text_key must name a column with text in {spec!r}, which has {columns}; got {text_key!r}")


def _column(rows: Any, text_key: str) -> Iterator[str]:
    for part in rows.iter(batch_size=256):  # thirty times as fast as row by row
        yield from (text or "" for text in part[text_key])


def hub_file(repository: str, name: str) -> Path:
    """Return the path of a file of a model on the Hugging Face hub: the cached copy, or a download."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repository, name))
    except Exception as error:  # the client raises errors of several libraries
        raise ValueError(
            f"{name} of {repository!r} cannot be fetched from the Hugging Face hub ({_line(error)}): check the name "
            "and the network, or give the path of a local file"
        ) from None


def _line(error: Exception) -> str:
    """Return the first line of an error's text, with its kind."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


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
