"""Documents: read as a stream from files, folders and datasets, and split into two sides."""

import contextlib
import gzip
import hashlib
import json
import lzma
import os
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
from numpy.typing import NDArray

from symexplin.lab.data.stdlib import STDLIB, parts_of

__all__ = [
    "SEPARATOR",
    "LeftOut",
    "Source",
    "cut_in_two",
    "find_sources",
    "hash_document",
    "hub_file",
    "split_documents",
]

SEPARATOR = "\0"  # ends each document; it does not occur in text
_SHORTHANDS = {
    "openwebtext": "hf:Skylion007/openwebtext",  # the paper's corpus
    "fineweb": "hf:HuggingFaceFW/fineweb:sample-10BT",
}

LeftOut = dict[str, list[str]]  # paths in folders that are not read, by the reason
_NOT_TEXT, _UNREADABLE, _LINK = "binary, or not UTF-8", "unreadable", "link to a folder, or to nothing"

_CHUNK = 1 << 20  # characters
# Folders of the standard library that are not its text: installed packages, tests, build leftovers.
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


class Source(NamedTuple):
    """A source of text that exists; the `repr` of its `stamp` changes when the content may have changed."""

    name: str
    stamp: object
    documents: Iterator[bytes]


class _NotUtf8Error(ValueError):
    pass


def find_sources(
    names: Iterable[str], text_key: str, split: str, left_out: LeftOut, cache: Path | None = None
) -> list[Source]:
    """Return the sources of these names; the documents of each can be read once, as a stream.

    A NUL character separates documents, inside those of datasets and JSON lines too; blank ones are left out.
    `left_out` gets the paths in folders that are not read; it is complete when the documents have been read. `cache`
    takes the copy that `datasets` makes of a local folder.
    """
    found = []
    for name in names:
        stamp, texts = _source(name, text_key, split, left_out, cache)
        found.append(Source(name, stamp, _documents(name, texts)))
    return found


def _source(
    name: str, text_key: str, split: str, left_out: LeftOut, cache: Path | None
) -> tuple[object, Iterator[str]]:
    spec, path = _SHORTHANDS.get(name, name), Path(name)
    if spec.startswith("hf:"):
        dataset = _dataset(spec.removeprefix("hf:"), text_key, split, cache)
        return dataset._fingerprint, _column(dataset, text_key)
    if spec in STDLIB:
        library = _files(Path(sysconfig.get_path("stdlib")), left_out, _NOT_LIBRARY)
        files = [file for file in library if file.suffix == ".py"]
        return _stamps(files), parts_of(_folder(files, text_key, left_out), spec)
    if name and path.is_dir():
        files = _files(path, left_out)
        return _stamps(files), _folder(files, text_key, left_out)
    if path.is_file():
        return _stamps([path]), _file(path, text_key)
    # A pipe gives its text once.
    known = ", ".join(map(repr, STDLIB))
    right = f"{known}, an existing file or folder, 'hf:NAME', " + " or ".join(map(repr, _SHORTHANDS))
    raise FileNotFoundError(f"sources must be {right}, got {name!r}")


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


def _files(root: Path, left_out: LeftOut, without: frozenset[str] = frozenset()) -> list[Path]:
    """Return the files below a folder in the order of their paths; links to folders are not followed."""

    def unreadable(error: OSError) -> None:
        left_out.setdefault(_UNREADABLE, []).append(str(error.filename))

    found = []
    for folder, folders, names in os.walk(root, onerror=unreadable):
        folders[:] = [name for name in folders if name not in without]
        for path in (Path(folder, name) for name in (*folders, *names)):
            if path.is_file():
                found.append(path)
            elif path.is_symlink():
                left_out.setdefault(_LINK, []).append(str(path))
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _folder(files: Iterable[Path], text_key: str, left_out: LeftOut) -> Iterator[str]:
    for path in files:
        try:
            for _ in _chunks(path):
                pass
        except (OSError, ValueError) as error:
            reason = _NOT_TEXT if isinstance(error, _NotUtf8Error) else _UNREADABLE
            left_out.setdefault(reason, []).append(str(path))
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
    except UnicodeDecodeError:
        raise _NotUtf8Error(
            f"{str(path)!r} is not UTF-8 text: convert it first, for example with iconv -f latin1 -t utf-8"
        ) from None
    except (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{str(path)!r} is damaged, or not {path.suffix}: {error}") from None


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
            if not line.strip():
                continue
            try:
                text = json.loads(line)[text_key]
                if text is not None:
                    text.encode()  # a lone surrogate is no text
                    yield text
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                raise ValueError(
                    f"{path}:{number} must be a JSON object with text under text_key {text_key!r}, got "
                    f"{line[:60].strip()}"
                ) from None


# --- datasets and the hub --------------------------------------------------------------------------------------------


def _dataset(spec: str, text_key: str, split: str, cache: Path | None) -> Any:
    """Return one split of a dataset of the hub, or of a local folder of one, as a `datasets.Dataset` on the disk."""
    import datasets

    folder = Path(spec).expanduser()
    local = bool(spec) and folder.is_dir()
    name, _, config = (str(folder), "", "") if local else spec.partition(":")
    try:
        if any((folder / file).exists() for file in ("state.json", "dataset_dict.json")):
            found = datasets.load_from_disk(name)
            found = found[split] if isinstance(found, dict) else found  # a lone split has no name
        else:
            if not local:
                _spare_retries()
            found = datasets.load_dataset(name, config or None, split=split, cache_dir=cache if local else None)
    except Exception as error:  # builders raise errors of every kind
        raise ValueError(
            f"source 'hf:{spec}' with split {split!r} cannot be loaded ({_line(error)}): check the name and the "
            "network, or give a local file or folder instead"
        ) from None
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

    try:
        _spare_retries()
        return Path(hf_hub_download(repository, name))
    except Exception as error:  # the client raises errors of several libraries
        raise ValueError(
            f"{name} of {repository!r} cannot be fetched from the Hugging Face hub ({_line(error)}): check the name "
            "and the network, or give the path of a local file"
        ) from None


def _spare_retries() -> None:
    """Tell the hub's client to use its cache alone if the hub is out of reach: it would retry for 23 seconds."""
    import datasets
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except Exception:  # the client raises errors of several libraries
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True


def _line(error: Exception) -> str:
    """Return the first line of an error's text, with its kind."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


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
