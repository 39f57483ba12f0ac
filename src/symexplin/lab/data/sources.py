"""Documents: read as a stream from files, folders and datasets, and split into two sides."""

import contextlib
import gzip
import hashlib
import json
import lzma
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
from numpy.typing import NDArray

__all__ = ["SEPARATOR", "Source", "cut_in_two", "find_source", "hash_document", "hub_file", "split_documents"]

SEPARATOR = "\0"  # ends each document; it does not occur in text
_SHORTHANDS = {
    "openwebtext": "hf:Skylion007/openwebtext",  # the paper's corpus
    "fineweb": "hf:HuggingFaceFW/fineweb:sample-10BT",
}

_CHUNK = 1 << 20  # characters
# Folders of the standard library that are not its text: installed packages, tests, build leftovers.
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


class Source(NamedTuple):
    """A source of text that exists; the `repr` of its `stamp` changes when the content may have changed."""

    stamp: object
    documents: Iterator[bytes]


def find_source(name: str, text_key: str, split: str, left_out: list[str]) -> Source:
    """Return the source of this name; its documents can be read once, as a stream.

    A NUL character separates documents, inside those of datasets and JSON lines too; blank ones are left out.
    `left_out` gets the files of folders that are not text; it is complete when the documents have been read.
    """
    spec, path = _SHORTHANDS.get(name, name), Path(name)
    if spec.startswith("hf:"):
        dataset = _dataset(spec.removeprefix("hf:"), text_key, split)
        return Source([name, dataset._fingerprint], _documents(name, _column(dataset, text_key)))
    if spec == "stdlib":
        library = Path(sysconfig.get_path("stdlib"))
        files = [file for file in _files(library, "*.py") if not _NOT_LIBRARY & {*file.relative_to(library).parts}]
    elif name and path.is_dir():
        files = _files(path, "*")
    elif path.is_file():
        return Source(_stamps([path]), _documents(name, _file(path, text_key)))
    else:  # a pipe gives its text once
        right = "'stdlib', an existing file or folder, 'hf:NAME', " + " or ".join(map(repr, _SHORTHANDS))
        raise FileNotFoundError(f"sources must be {right}, got {name!r}")
    return Source(_stamps(files), _documents(name, _folder(files, text_key, left_out)))


def _documents(name: str, texts: Iterable[str]) -> Iterator[bytes]:
    empty = True
    for text in texts:
        for document in text.split(SEPARATOR):
            if document.strip():
                empty = False
                yield document.encode()
    if empty:
        raise ValueError(f"sources must each hold at least one document, got {name!r} without any text")


# --- files and folders -----------------------------------------------------------------------------------------------


def _stamps(files: Iterable[Path]) -> object:
    return [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]


def _files(root: Path, pattern: str) -> list[Path]:
    """Return the files below a folder in the order of their paths; links to folders are not followed."""
    return sorted((path for path in root.rglob(pattern) if path.is_file()), key=Path.as_posix)


def _folder(files: Iterable[Path], text_key: str, left_out: list[str]) -> Iterator[str]:
    for path in files:
        try:
            for _ in _chunks(path):
                pass
        except ValueError:
            left_out.append(str(path))
        else:
            yield from _file(path, text_key)


def _file(path: Path, text_key: str) -> Iterator[str]:
    if Path(path.name.removesuffix(".gz").removesuffix(".xz")).suffix == ".jsonl":
        return _json_lines(path, text_key)
    return _between_separators(_chunks(path))


@contextlib.contextmanager
def _open(path: Path) -> Iterator[TextIO]:
    openers: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open}
    try:
        with openers.get(path.suffix, open)(path, "rt", encoding="utf-8-sig", newline="\n") as file:
            yield file
    except (UnicodeDecodeError, lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(
            f"{str(path)!r} is not UTF-8 text, or damaged ({error}): convert it, for example with iconv -f latin1 -t "
            "utf-8"
        ) from None


def _chunks(path: Path) -> Iterator[str]:
    with _open(path) as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def _between_separators(chunks: Iterable[str]) -> Iterator[str]:
    pending: list[str] = []
    for chunk in chunks:
        *ended, rest = chunk.split(SEPARATOR)
        for part in ended:
            yield "".join([*pending, part])
            pending = []
        pending.append(rest)
    yield "".join(pending)


def _json_lines(path: Path, text_key: str) -> Iterator[str]:
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                text = json.loads(line)[text_key] if line.strip() else ""
                text = "" if text is None else text
                text.encode()  # a lone surrogate is no text
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                raise ValueError(
                    f"{path}:{number} must be a JSON object with text under text_key {text_key!r}, got "
                    f"{line[:60].strip()}"
                ) from None
            yield text


# --- datasets and the hub --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _loading(what: str) -> Iterator[None]:
    """Turn the errors of the hub's libraries, which are of many kinds, into one line.

    If the hub is out of reach its client uses the cache alone: it would retry for 23 seconds, with warnings.
    """
    import datasets
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except Exception:
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    except Exception as error:
        line = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{what} cannot be loaded ({type(error).__name__}: {line}): check the name and the network, or give a "
            "local file or folder instead"
        ) from None


def _dataset(spec: str, text_key: str, split: str) -> Any:
    """Return one split of a dataset of the hub, as a `datasets.Dataset` on the disk."""
    import datasets

    name, _, config = spec.partition(":")
    with _loading(f"source 'hf:{spec}' with split {split!r}"):
        found = datasets.load_dataset(name, config or None, split=split)
    texts = [name for name, kind in found.features.items() if getattr(kind, "dtype", "") in ("string", "large_string")]
    if text_key not in texts:
        raise ValueError(f"text_key must be a text column of 'hf:{spec}': {', '.join(texts)}; got {text_key!r}")
    return found


def _column(dataset: Any, text_key: str) -> Iterator[str]:
    for batch in dataset.select_columns([text_key]).iter(batch_size=256):
        for text in batch[text_key]:
            yield text or ""


def hub_file(repository: str, name: str) -> Path:
    """Return the path of a file of a model on the Hugging Face hub: the cached copy, or a download."""
    from huggingface_hub import hf_hub_download

    with _loading(f"{name} of {repository!r}"):
        return Path(hf_hub_download(repository, name))


# --- the split: a rule on the content of documents alone -------------------------------------------------------------


def hash_document(document: bytes, seed: int) -> int:
    """Return a number in [0, 2**64) that depends on the content and the seed alone."""
    return int.from_bytes(hashlib.blake2b(document, digest_size=8, key=str(seed).encode()).digest())


def split_documents(
    hashes: Sequence[int] | NDArray[np.uint64], given: int, fraction: float
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the numbers of the documents to train on, and of those held out.

    The first `given` documents are to be split, the others are held out. Without others, those with the smallest hashes
    are held out: all below `fraction` * 2**64, but at least one, and never all. A document that occurs twice counts
    once, so no text is on both sides.
    """
    hashes = np.asarray(hashes, np.uint64)
    train = np.sort(np.unique(hashes[:given], return_index=True)[1])
    if given < len(hashes):
        valid = given + np.sort(np.unique(hashes[given:], return_index=True)[1])
        train = train[~np.isin(hashes[train], hashes[given:])]
        if not len(train):
            raise ValueError("sources must hold a document that valid does not hold, got none")
        return train, valid
    rank = hashes[train].astype(np.float64) / 2**64
    wanted = max(int((rank < fraction).sum()), 1)
    held_out = np.argsort(rank, kind="stable")[: min(wanted, len(train) - 1)]
    return np.delete(train, held_out), np.sort(train[held_out])


def cut_in_two(document: bytes, fraction: float) -> tuple[bytes, bytes]:
    """Return both sides of a corpus of one document."""
    place = max(1, round(len(document) * (1 - fraction)))
    return document[:place], document[place:]
