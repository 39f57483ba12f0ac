"""Text for the lab: documents, their split into training and validation, byte tokens and batches."""

import hashlib
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from symexplin.validation import check_fraction, check_whole

__all__ = [
    "BatchLoader",
    "Corpus",
    "Tokens",
    "eval_batches",
    "file_documents",
    "load_documents",
    "stdlib_documents",
]

Tokens = NDArray[np.uint8]
Batch = tuple[Tensor, Tensor]

# Ends each document; it does not occur in text.
SEPARATOR = 0
# Folders of the standard library that are not its text: installed packages, tests, build leftovers.
_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def stdlib_documents() -> list[bytes]:
    """Return the Python sources of the running interpreter's standard library, in the order of their paths.

    Tests and installed packages are left out, and files that are not UTF-8.

    Raises:
        ValueError: an interpreter that comes without its sources.

    >>> any(b"class OrderedDict" in document for document in stdlib_documents())
    True
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = (path for path in root.rglob("*.py") if _SKIPPED.isdisjoint(path.relative_to(root).parts))
    documents = _read_texts(root, paths)
    if not documents:
        raise ValueError("data 'stdlib' has no documents: this interpreter has no Python sources; give a path instead")
    return documents


def file_documents(path: str | Path) -> list[bytes]:
    r"""Return the documents of a file, separated by NUL bytes, or of all UTF-8 files below a folder.

    Raises:
        FileNotFoundError: no such file or folder.
        ValueError: nothing in it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "text")
    ...     _ = path.write_bytes(b"one\0two\0")
    ...     file_documents(path)
    [b'one', b'two']
    """
    if not str(path):
        raise ValueError("data must be 'stdlib' or an existing file or folder, got ''")
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"data must be 'stdlib' or an existing file or folder, got {str(path)!r}")
    files = [p for p in path.rglob("*") if p.is_file()] if path.is_dir() else None
    texts = [path.read_bytes()] if files is None else _read_texts(path, files)
    documents = [document for text in texts for document in text.split(bytes([SEPARATOR])) if document.strip()]
    if not documents:
        raise ValueError(f"data must hold at least one document, got {str(path)!r} without any text")
    return documents


def load_documents(data: str) -> list[bytes]:
    """Return :func:`stdlib_documents` for "stdlib", else :func:`file_documents` of that path.

    >>> len(load_documents("stdlib")) > 100
    True
    """
    return stdlib_documents() if data == "stdlib" else file_documents(data)


def _read_texts(root: Path, paths: Iterable[Path]) -> list[bytes]:
    texts = []
    for path in sorted(paths, key=lambda p: p.relative_to(root).as_posix()):
        text = path.read_bytes()
        try:
            text.decode("utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            texts.append(text)
    return texts


@dataclass(frozen=True)
class Corpus:
    r"""Byte tokens of the training and of the validation documents, each document ended by a zero byte.

    >>> corpus = Corpus.from_documents([b"a lone document is cut in two"])
    >>> corpus.decode(corpus.train), corpus.decode(corpus.valid)
    ('a lone document is cut in tw\x00', 'o\x00')
    """

    train: Tokens
    valid: Tokens
    train_documents: int
    valid_documents: int
    vocab_size: int = 256

    @classmethod
    def from_documents(cls, documents: Sequence[bytes], valid_fraction: float = 0.05, seed: int = 0) -> Self:
        """Split `documents` by a hash of their content, so that no text is on both sides.

        Repeated documents count once. At least one document goes to each side; a lone one is cut in two.

        Raises:
            ValueError: no document, or a fraction outside [0, 1).
        """
        check_fraction("valid_fraction", valid_fraction)
        unique = list(dict.fromkeys(documents))
        if not unique:
            raise ValueError("documents must hold at least one, got none")
        if len(unique) == 1:
            cut = max(1, round(len(unique[0]) * (1 - valid_fraction)))
            train, valid = [unique[0][:cut]], [unique[0][cut:]]
        else:
            rank = {document: _hash(document, seed) for document in unique}
            wanted = sum(r < valid_fraction for r in rank.values())
            chosen = set(sorted(unique, key=rank.__getitem__)[: min(max(wanted, 1), len(unique) - 1)])
            train, valid = [d for d in unique if d not in chosen], [d for d in unique if d in chosen]
        return cls(_tokens(train), _tokens(valid), len(train), len(valid))

    def check_context(self, context: int) -> None:
        """Raise ValueError unless both sides hold a sequence of `context` tokens and the token after it."""
        for side in (self.train, self.valid):
            _check_length(side, context)

    @staticmethod
    def decode(tokens: Iterable[int]) -> str:
        """Return the text of byte tokens; what is not UTF-8 becomes the replacement character."""
        return bytes(int(token) for token in tokens).decode("utf-8", errors="replace")


def _hash(document: bytes, seed: int) -> float:
    """Return a number in [0, 1) that depends on the content and the seed alone."""
    digest = hashlib.blake2b(document, digest_size=8, key=str(seed).encode()).digest()
    return int.from_bytes(digest) / 2**64


def _tokens(documents: Sequence[bytes]) -> Tokens:
    end = bytes([SEPARATOR])
    return np.frombuffer(b"".join(document + end for document in documents), dtype=np.uint8)


def _check_length(tokens: Tokens, context: int) -> None:
    if len(tokens) <= context:
        raise ValueError(
            f"context must be below {len(tokens):,}, the tokens on one side of the corpus, got {context}: "
            "shorten it, or give more text"
        )


def _windows(tokens: Tokens, starts: NDArray[np.int64], context: int) -> Batch:
    rows = torch.from_numpy(tokens[starts[:, None] + np.arange(context + 1)].astype(np.int64))
    return rows[:, :-1], rows[:, 1:]


@dataclass(frozen=True)
class BatchLoader:
    """Random windows of a token array; batch number `step` depends on the seed and on `step` alone.

    So every run with one seed sees the same batches in the same order, and one that resumes misses none.

    Args:
        tokens: uint8 tokens.
        context: length of a window.
        batch_size: windows a batch.
        seed: whole number >= 0.

    Raises:
        ValueError: a value out of range, tokens that do not fill one window and its next token.

    >>> loader = BatchLoader(np.arange(100, dtype=np.uint8), context=4, batch_size=2, seed=0)
    >>> inputs, targets = loader.batch(7)
    >>> bool((targets == inputs + 1).all())
    True
    """

    tokens: Tokens
    context: int
    batch_size: int
    seed: int = 0

    def __post_init__(self) -> None:
        """Check every field."""
        check_whole("context", self.context)
        check_whole("batch_size", self.batch_size)
        check_whole("seed", self.seed, minimum=0)
        _check_length(self.tokens, self.context)

    def batch(self, step: int) -> Batch:
        """Return inputs and targets of batch `step`, each int64 (batch_size, context)."""
        random = np.random.default_rng([self.seed, step])
        starts = random.integers(0, len(self.tokens) - self.context, size=self.batch_size)
        return _windows(self.tokens, starts, self.context)


def eval_batches(tokens: Tokens, context: int, batch_size: int, count: int) -> list[Batch]:
    """Return up to `count` fixed batches of evenly spread windows of `tokens`, fewer if they would overlap.

    Raises:
        ValueError: a value out of range, tokens that do not fill one window and its next token.

    >>> [inputs.shape for inputs, _ in eval_batches(np.zeros(100, dtype=np.uint8), 10, 4, count=5)]
    [torch.Size([4, 10]), torch.Size([4, 10]), torch.Size([1, 10])]
    """
    for name, value in (("context", context), ("batch_size", batch_size), ("count", count)):
        check_whole(name, value)
    _check_length(tokens, context)
    windows = min(batch_size * count, (len(tokens) - 1) // context)
    starts = np.linspace(0, len(tokens) - context - 1, windows).astype(np.int64)
    inputs, targets = _windows(tokens, starts, context)
    return list(zip(torch.split(inputs, batch_size), torch.split(targets, batch_size), strict=True))
