"""Where text comes from: documents as bytes, read as a stream from files, folders and datasets."""

import codecs
import contextlib
import difflib
import gzip
import json
import lzma
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, cast

from symexplin.lab.text.hub import hub_dataset

__all__ = ["SEPARATOR", "SHORTHANDS", "iter_documents", "load_documents", "stdlib_documents"]

# Ends each document; it does not occur in text.
SEPARATOR = 0
SHORTHANDS = {
    "openwebtext": "hf:Skylion007/openwebtext",  # the paper's corpus
    "fineweb": "hf:HuggingFaceFW/fineweb:sample-10BT",
}

_END = bytes([SEPARATOR])
_CHUNK = 1 << 20
# Folders of the standard library that are not its text: installed packages, tests, build leftovers.
_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_HUB = "hf:"
_RIGHT = "sources must be 'stdlib', an existing file or folder, or 'hf:NAME'"


def iter_documents(
    sources: Iterable[str | Path], *, text_key: str = "text", split: str = "train", skipped: list[Path] | None = None
) -> Iterator[bytes]:
    r"""Return an iterator over the documents of all sources, in the order given; it holds one of them in memory.

    A NUL byte separates documents, inside those of datasets and JSON lines too; blank ones are left out.

    Args:
        sources: each "stdlib" (:func:`stdlib_documents`); a text file; a .jsonl file, with one JSON object a line; a
            folder, for all UTF-8 files below it in the order of their paths; "hf:NAME" or "hf:NAME:CONFIG" for a
            dataset of the Hugging Face hub or a local folder of one; or a key of `SHORTHANDS`. Files may be
            compressed as .xz or .gz.
        text_key: the key of JSON lines and the column of datasets that hold the text.
        split: of the datasets.
        skipped: gets the files in folders that are left out because they are not UTF-8.

    Raises:
        FileNotFoundError: no such file or folder.
        ValueError: a source without text, a file named as a source that is not UTF-8, a damaged file, a line that is
            not JSON or lacks `text_key`, a dataset that cannot be loaded.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a.txt").write_bytes(b"one\0two\0")
    ...     _ = Path(folder, "b.jsonl").write_text('{"text": "three"}\n')
    ...     list(iter_documents([folder]))
    [b'one', b'two', b'three']
    """
    left_out = [] if skipped is None else skipped
    # Names are checked at once.
    found = [(str(source), _source(str(source), text_key, split, left_out)) for source in sources]
    return (document for source, documents in found for document in _with_text(source, documents))


def _with_text(source: str, documents: Iterator[bytes]) -> Iterator[bytes]:
    empty = True
    for document in documents:
        if document.strip():
            empty = False
            yield document
    if empty:
        raise ValueError(f"sources must each hold at least one document, got {source!r} without any text")


def load_documents(source: str | Path) -> list[bytes]:
    """Return the documents of one source of :func:`iter_documents`, in memory.

    >>> len(load_documents("stdlib")) > 100
    True
    """
    return list(iter_documents([source]))


def stdlib_documents() -> Iterator[bytes]:
    """Yield the Python sources of the running interpreter's standard library, in the order of their paths.

    Tests and installed packages are left out, and files that are not UTF-8.

    Raises:
        ValueError: an interpreter that comes without its sources.

    >>> any(b"class OrderedDict" in document for document in stdlib_documents())
    True
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = (path for path in root.rglob("*.py") if _SKIPPED.isdisjoint(path.relative_to(root).parts))
    empty = True
    for path in _in_order(root, paths):
        text = path.read_bytes()
        if text.strip() and _is_utf8([text]):
            empty = False
            yield text
    if empty:
        raise ValueError(
            "source 'stdlib' has no documents: this interpreter has no Python sources; give a path instead"
        )


def _source(source: str, text_key: str, split: str, skipped: list[Path]) -> Iterator[bytes]:
    if source == "stdlib":
        return stdlib_documents()
    source = SHORTHANDS.get(source, source)
    if source.startswith(_HUB):
        return _dataset(source.removeprefix(_HUB), text_key, split)
    if not source:
        raise ValueError(f"{_RIGHT}, got ''")
    path = Path(source)
    if not path.exists():
        near = difflib.get_close_matches(source, ["stdlib", *SHORTHANDS], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise FileNotFoundError(f"{_RIGHT}, got {source!r}{hint}")
    if path.is_dir():
        return _folder(path, text_key, skipped)
    if not path.is_file():  # a pipe gives its text once
        raise ValueError(f"{_RIGHT}, got {source!r}, which is neither")
    return _file(path, text_key)


def _folder(root: Path, text_key: str, skipped: list[Path]) -> Iterator[bytes]:
    for path in _in_order(root, root.rglob("*")):
        if not path.is_file():
            continue
        if _is_json_lines(path) or _is_utf8(_chunks(path)):
            yield from _file(path, text_key)
        else:
            skipped.append(path)


def _in_order(root: Path, paths: Iterable[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: path.relative_to(root).as_posix())


def _is_utf8(chunks: Iterable[bytes]) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for chunk in chunks:
            decoder.decode(chunk)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def _utf8(path: Path) -> Iterator[bytes]:
    """Yield the chunks of a file, which must be UTF-8."""
    decoder, start = codecs.getincrementaldecoder("utf-8")(), 0
    for chunk in chain(_chunks(path), [b""]):
        held = len(decoder.getstate()[0])
        try:
            decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            place = start - held + error.start
            raise ValueError(
                f"{str(path)!r} is not UTF-8 text at byte {place:,}: convert it first, for example with "
                "iconv -f latin1 -t utf-8"
            ) from None
        start += len(chunk)
        yield chunk


def _file(path: Path, text_key: str) -> Iterator[bytes]:
    documents = _json_lines(path, text_key) if _is_json_lines(path) else _between_ends(_utf8(path))
    for document in documents:
        yield from document.split(_END)


def _is_json_lines(path: Path) -> bool:
    return Path(path.name.removesuffix(".gz").removesuffix(".xz")).suffix == ".jsonl"


@contextlib.contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    openers: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open}
    try:
        with cast(BinaryIO, openers.get(path.suffix, open)(path, "rb")) as file:
            yield file
    except (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{str(path)!r} is damaged, or not {path.suffix}: {error}") from None


def _chunks(path: Path) -> Iterator[bytes]:
    with _open(path) as file:
        while chunk := file.read(_CHUNK):
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


def _dataset(spec: str, text_key: str, split: str) -> Iterator[bytes]:
    if not spec:
        raise ValueError(f"{_RIGHT}, got 'hf:' without a name")
    name, _, config = (spec, "", "") if Path(spec).is_dir() else spec.partition(":")
    dataset = hub_dataset(name, config or None, split)
    place = f"dataset {spec!r}"
    _check_key(text_key, dataset.column_names, place)
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
