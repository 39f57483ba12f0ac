"""Token files: safetensors with one tensor, written as a stream and read through the page cache."""

import hashlib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from tqdm import tqdm

from symexplin.lab.files import replacing
from symexplin.lab.text.tokenizer import TokenArray, Tokenizer, token_dtype

__all__ = ["TokenFile", "TokenHeader", "open_tokens", "write_tokens"]

_FORMAT, _VERSION = "symexplin tokens", 1
_DTYPES: dict[str, np.dtype[np.unsignedinteger[Any]]] = {
    "U8": np.dtype(np.uint8),
    "U16": np.dtype(np.uint16),
    "U32": np.dtype(np.uint32),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LENGTH = 8  # bytes of the header's length, in front of it
_LONGEST_HEADER = 1 << 20
_CHUNK = 1 << 24
_BAR_FROM = 1 << 30


class TokenHeader(NamedTuple):
    """What a token file says of itself: its tokenizer, its counts, and the sha256 of its tokens' bytes."""

    tokenizer: str
    tokenizer_fingerprint: str
    vocab_size: int
    documents: int
    tokens: int
    text_bytes: int
    sha256: str


class TokenFile(NamedTuple):
    """The tokens of a file, read-only and mapped into memory, and its header."""

    tokens: TokenArray
    header: TokenHeader


def write_tokens(
    path: str | Path,
    arrays: Iterable[TokenArray],
    tokenizer: Tokenizer,
    *,
    documents: int,
    text_bytes: int,
) -> TokenHeader:
    """Write `arrays` one after another as one token file, without holding more than one of them.

    Args:
        path: of the file, which appears when it is whole.
        arrays: tokens of `tokenizer`, in the dtype of its vocabulary.
        tokenizer: the header tells its name, fingerprint and size.
        documents: number of documents in the tokens.
        text_bytes: size of their text.

    Raises:
        OSError: the disk is full, ...; nothing is left behind.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path, byte = Path(folder, "t.safetensors"), Tokenizer.from_name("byte")
    ...     _ = write_tokens(path, [byte.encode_documents([b"ab"])], byte, documents=1, text_bytes=2)
    ...     print(open_tokens(path).tokens, open_tokens(path).header.documents)
    [97 98  0] 1
    """
    dtype = token_dtype(tokenizer.vocab_size)
    header = TokenHeader(
        tokenizer.name, tokenizer.fingerprint, tokenizer.vocab_size, documents, 2**63, text_bytes, "0" * 64
    )
    room = len(_encode(header, dtype))  # of a header with the longest count
    digest, tokens = hashlib.sha256(), 0
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(bytes(room))
        for array in arrays:
            data = np.ascontiguousarray(array, dtype=dtype.newbyteorder("<")).data
            file.write(data)
            digest.update(data)
            tokens += len(array)
        header = header._replace(tokens=tokens, sha256=digest.hexdigest())
        file.seek(0)
        file.write(_encode(header, dtype, room))
    return header


def _encode(header: TokenHeader, dtype: np.dtype[np.unsignedinteger[Any]], room: int = 0) -> bytes:
    """Return the head of a safetensors file, filled up with spaces so that the tokens are aligned."""
    metadata = {"format": _FORMAT, "version": str(_VERSION)} | {k: str(v) for k, v in header._asdict().items()}
    tensor = {
        "dtype": _NAMES[dtype],
        "shape": [header.tokens],
        "data_offsets": [0, header.tokens * dtype.itemsize],
    }
    text = json.dumps({"__metadata__": metadata, "tokens": tensor}).encode()
    length = max(room - _LENGTH, math.ceil(len(text) / 8) * 8)
    return length.to_bytes(_LENGTH, "little") + text.ljust(length)


def open_tokens(
    path: str | Path, *, tokenizer: Tokenizer | None = None, verify: bool = True, progress: bool = True
) -> TokenFile:
    """Return the tokens of a file of :func:`write_tokens`, mapped into memory and read-only.

    Args:
        path: of the file.
        tokenizer: the one that the file must be of.
        verify: read the whole file and compare its sha256.
        progress: show a bar on a terminal where that takes more than a second or two.

    Raises:
        FileNotFoundError: no such file.
        ValueError: another kind of file, a truncated or damaged one, one of another tokenizer or newer version.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no token file at {str(path)!r}")
    start, table = _read_head(path)
    header, dtype = _parse(path, table)
    expected, found = start + header.tokens * dtype.itemsize, path.stat().st_size
    if found != expected:
        raise ValueError(f"{str(path)!r} is damaged: {found:,} bytes long, where its header says {expected:,}")
    if tokenizer is not None and header.tokenizer_fingerprint != tokenizer.fingerprint:
        raise ValueError(
            f"{str(path)!r} has tokens of another tokenizer: {header.tokenizer!r} "
            f"({header.tokenizer_fingerprint[:12]}), not {tokenizer.name!r} ({tokenizer.fingerprint[:12]})"
        )
    if verify and _digest(path, start, progress) != header.sha256:
        raise ValueError(f"{str(path)!r} is damaged: its tokens are not those that were written (sha256)")
    if not header.tokens:  # nothing can be mapped
        return TokenFile(cast(TokenArray, np.empty(0, dtype)), header)
    mapped = np.memmap(path, dtype.newbyteorder("<"), "r", offset=start, shape=(header.tokens,))
    return TokenFile(cast(TokenArray, mapped.view(np.ndarray)), header)


def _read_head(path: Path) -> tuple[int, dict[str, object]]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH), "little")
        text = file.read(length) if length <= _LONGEST_HEADER else b""
    try:
        table = json.loads(text)
    except (ValueError, RecursionError):
        table = None
    if not isinstance(table, dict):
        raise ValueError(f"{str(path)!r} is not a token file: it does not begin as a safetensors file")
    return _LENGTH + length, table


def _parse(path: Path, table: dict[str, object]) -> tuple[TokenHeader, np.dtype[np.unsignedinteger[Any]]]:
    metadata = table.get("__metadata__")
    if not isinstance(metadata, dict) or metadata.get("format") != _FORMAT:
        raise ValueError(f"{str(path)!r} is not a token file: a safetensors file without the format {_FORMAT!r}")
    if metadata.get("version") != str(_VERSION):
        raise ValueError(
            f"{str(path)!r} is of version {metadata.get('version')!r} of the format, and this program reads "
            f"{_VERSION}: use a newer one, or prepare the data again"
        )
    try:
        values = {name: kind(metadata[name]) for name, kind in TokenHeader.__annotations__.items()}
        header = TokenHeader(**values)
        tensor = cast(dict[str, object], table["tokens"])
        dtype = _DTYPES[cast(str, tensor["dtype"])]
        whole = tensor["shape"] == [header.tokens] and tensor["data_offsets"] == [0, header.tokens * dtype.itemsize]
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole or dtype != token_dtype(header.vocab_size):
        raise ValueError(f"{str(path)!r} is damaged: its header does not fit together")
    return header, dtype


def _digest(path: Path, start: int, progress: bool) -> str:
    digest = hashlib.sha256()
    size = path.stat().st_size - start
    # disable=None: no bar where standard error is not a terminal.
    disable = None if progress and size >= _BAR_FROM else True
    with (
        path.open("rb") as file,
        tqdm(total=size, desc=f"verify {path.name}", unit="B", unit_scale=True, leave=False, disable=disable) as bar,
    ):
        file.seek(start)
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            bar.update(len(chunk))
    return digest.hexdigest()
