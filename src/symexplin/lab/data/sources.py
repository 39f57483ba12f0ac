"""Where text comes from: documents as bytes, read as a stream from files, folders and datasets."""

import codecs
import contextlib
import difflib
import errno
import gzip
import json
import lzma
import os
import stat
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from symexplin.lab.data.hub import hub_dataset

__all__ = ["SEPARATOR", "SHORTHANDS", "LeftOut", "Source", "find_sources", "iter_documents"]

# Ends each document; it does not occur in text.
SEPARATOR = 0
SHORTHANDS = {
    "openwebtext": "hf:Skylion007/openwebtext",  # the paper's corpus
    "fineweb": "hf:HuggingFaceFW/fineweb:sample-10BT",
}

# Paths in folders that are not read, by the reason.
LeftOut = dict[str, list[str]]
_NOT_TEXT = "binary, or not UTF-8"
_UNREADABLE = "unreadable"
_LINK = "link to a folder, or to nothing"

_END = bytes([SEPARATOR])
_CHUNK = 1 << 20
# Folders of the standard library that are not its text: installed packages, tests, build leftovers.
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_HUB = "hf:"
_RIGHT = "sources must be 'stdlib', an existing file or folder, or 'hf:NAME'"


class Source(NamedTuple):
    """A source of text that exists; the `repr` of its `stamp` changes when the content may have changed."""

    name: str
    stamp: object
    documents: Iterable[bytes]


class _File(NamedTuple):
    """A file, and what changes when it is edited."""

    path: Path
    size: int
    modified: int


class _NotUtf8(ValueError):
    """A file is not UTF-8 text."""


def find_sources(
    names: Iterable[str | Path],
    *,
    text_key: str = "text",
    split: str = "train",
    left_out: LeftOut | None = None,
    cache: Path | None = None,
) -> list[Source]:
    """Return the sources of these names, whose documents can be read once, as a stream.

    Args:
        names: each "stdlib", the Python sources of the running interpreter without its tests; a text file; a .jsonl
            file, with one JSON object per line; a folder, for all UTF-8 files below it in the order of their paths;
            "hf:NAME" or "hf:NAME:CONFIG" for a dataset of the Hugging Face hub or a local folder of one; or a key of
            `SHORTHANDS`. Files may be compressed as .xz or .gz.
        text_key: the key of JSON lines and the column of datasets that hold the text.
        split: of the datasets.
        left_out: gets the paths in folders that are not read. It is complete when the documents have been read.
        cache: where `datasets` keeps its copy of a local folder.

    Raises:
        FileNotFoundError: no such file or folder.
        ValueError: an empty name, or a dataset that cannot be loaded.

    >>> [source.name for source in find_sources(["stdlib"])]
    ['stdlib']
    """
    left_out = {} if left_out is None else left_out
    found = [_source(str(name), text_key, split, left_out, cache) for name in names]
    return [source._replace(documents=_with_text(source)) for source in found]


def iter_documents(
    names: Iterable[str | Path], *, text_key: str = "text", split: str = "train", left_out: LeftOut | None = None
) -> Iterator[bytes]:
    r"""Return an iterator over the documents of all sources, in the order given; it holds one of them in memory.

    A NUL byte separates documents, inside those of datasets and JSON lines too; blank ones are left out.

    Args:
        names, text_key, split, left_out: see :func:`find_sources`, which checks all names at once.

    Raises:
        FileNotFoundError: no such file or folder.
        ValueError: a source without text, a file named as a source that is not UTF-8 or damaged, a line that is not
            JSON or lacks `text_key`, a dataset that cannot be loaded.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a.txt").write_bytes(b"one\0two\0")
    ...     _ = Path(folder, "b.jsonl").write_text('{"text": "three"}\n')
    ...     list(iter_documents([folder]))
    [b'one', b'two', b'three']
    """
    found = find_sources(names, text_key=text_key, split=split, left_out=left_out)
    return chain.from_iterable(source.documents for source in found)


def _source(name: str, text_key: str, split: str, left_out: LeftOut, cache: Path | None) -> Source:
    spec = SHORTHANDS.get(name, name)
    if spec.startswith(_HUB):
        dataset = _dataset(spec.removeprefix(_HUB), text_key, split, cache)
        return Source(name, dataset._fingerprint, _texts(dataset, text_key, f"dataset {name!r}"))
    if spec == "stdlib":
        library = _files(Path(sysconfig.get_path("stdlib")), left_out, _NOT_LIBRARY)
        files = [file for file in library if file.path.suffix == ".py"]
    elif (path := _existing(name)).is_dir():
        files = _files(path, left_out)
    else:
        return Source(name, _stamped(path), _file(path, text_key))
    return Source(name, files, _folder(files, text_key, left_out))


def _with_text(source: Source) -> Iterator[bytes]:
    empty = True
    for document in source.documents:
        if document.strip():
            empty = False
            yield document
    if empty:
        raise ValueError(f"sources must each hold at least one document, got {source.name!r} without any text")


# --- files and folders -----------------------------------------------------------------------------------------------


def _existing(name: str) -> Path:
    if not name:
        raise ValueError(f"{_RIGHT}, got ''")
    path = Path(name)
    if not path.exists():
        near = difflib.get_close_matches(name, ["stdlib", *SHORTHANDS], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise FileNotFoundError(f"{_RIGHT}, got {name!r}{hint}")
    if not path.is_dir() and not path.is_file():  # a pipe gives its text once
        raise ValueError(f"{_RIGHT}, got {name!r}, which is neither")
    return path


def _stamped(path: Path) -> _File:
    status = path.stat()
    return _File(path, status.st_size, status.st_mtime_ns)


def _files(root: Path, left_out: LeftOut, without: frozenset[str] = frozenset()) -> list[_File]:
    """Return the files below a folder in the order of their paths; links to folders are not followed."""

    def leave_out(error: OSError) -> None:
        reason = _LINK if error.errno in (errno.ENOENT, errno.ELOOP) else _UNREADABLE
        left_out.setdefault(reason, []).append(str(error.filename))

    found = []
    for folder, folders, names in os.walk(root, onerror=leave_out):
        folders[:] = [name for name in folders if name not in without]
        for path in (Path(folder, name) for name in (*folders, *names)):
            try:
                if stat.S_ISREG(path.stat().st_mode):
                    found.append(_stamped(path))
                elif path.is_symlink():
                    left_out.setdefault(_LINK, []).append(str(path))
            except OSError as error:
                leave_out(error)
    return sorted(found, key=lambda file: file.path.relative_to(root).as_posix())


def _folder(files: Iterable[_File], text_key: str, left_out: LeftOut) -> Iterator[bytes]:
    for file in files:
        try:
            for _ in _utf8(file.path):
                pass
        except (OSError, ValueError) as error:
            reason = _NOT_TEXT if isinstance(error, _NotUtf8) else _UNREADABLE
            left_out.setdefault(reason, []).append(str(file.path))
        else:
            yield from _file(file.path, text_key)


def _file(path: Path, text_key: str) -> Iterator[bytes]:
    json_lines = Path(path.name.removesuffix(".gz").removesuffix(".xz")).suffix == ".jsonl"
    documents = _json_lines(path, text_key) if json_lines else _between_ends(_utf8(path))
    for document in documents:
        yield from document.split(_END)


@contextlib.contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    openers: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open}
    try:
        with cast(BinaryIO, openers.get(path.suffix, open)(path, "rb")) as file:
            yield file
    except (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{str(path)!r} is damaged, or not {path.suffix}: {error}") from None


def _utf8(path: Path) -> Iterator[bytes]:
    """Yield the chunks of a file, which must be UTF-8."""
    decoder, start = codecs.getincrementaldecoder("utf-8")(), 0
    with _open(path) as file:
        for chunk in chain(iter(lambda: file.read(_CHUNK), b""), [b""]):
            held = len(decoder.getstate()[0])
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                raise _NotUtf8(
                    f"{str(path)!r} is not UTF-8 text at byte {start - held + error.start:,}: convert it first, for "
                    "example with iconv -f latin1 -t utf-8"
                ) from None
            start += len(chunk)
            yield chunk


def _between_ends(chunks: Iterable[bytes]) -> Iterator[bytes]:
    pending: list[bytes] = []
    for chunk in chunks:
        *ended, rest = chunk.split(_END)
        for part in ended:
            yield b"".join([*pending, part])
            pending = []
        pending.append(rest)
    yield b"".join(pending)


def _json_lines(path: Path, text_key: str) -> Iterator[bytes]:
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                raise ValueError(f"{place} is not UTF-8: {error.reason} at byte {error.start}") from None
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{place} is not JSON: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{place} must be a JSON object with the key {text_key!r}, got {type(row).__name__}")
            _check_key(text_key, list(row), place)
            yield _encoded(row[text_key], text_key, place)


# --- datasets --------------------------------------------------------------------------------------------------------


def _dataset(spec: str, text_key: str, split: str, cache: Path | None) -> Any:
    if not spec:
        raise ValueError(f"{_RIGHT}, got 'hf:' without a name")
    name, _, config = (spec, "", "") if Path(spec).is_dir() else spec.partition(":")
    dataset = hub_dataset(name, config or None, split, cache)
    _check_key(text_key, dataset.column_names, f"dataset {spec!r}")
    return dataset


def _texts(dataset: Any, text_key: str, place: str) -> Iterator[bytes]:
    for batch in dataset.select_columns([text_key]).iter(batch_size=256):
        for text in batch[text_key]:
            yield from _encoded(text, text_key, place).split(_END)


def _check_key(text_key: str, found: Sequence[str], place: str) -> None:
    if text_key not in found:
        near = difflib.get_close_matches(text_key, found, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"text_key must be a key of {place}: {', '.join(map(repr, found))}; got {text_key!r}{hint}")


def _encoded(text: object, text_key: str, place: str) -> bytes:
    if text is None:  # datasets mark rows without text so
        return b""
    if not isinstance(text, str):
        raise ValueError(f"{place}: {text_key!r} must be a text, got {type(text).__name__}")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{place}: {text_key!r} is not Unicode text: {error.reason}") from None
