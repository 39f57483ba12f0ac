"""The tokens of a prepared folder or of documents in memory, and batches of them for training."""

import hashlib
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from symexplin.lab.data.split import SIDES, cut_in_two, hash_document, split_documents
from symexplin.lab.data.tokenizer import TokenArray, Tokenizer
from symexplin.lab.data.tokens import DATASET, TOKENIZER, read_dataset, read_tokens, token_file
from symexplin.validation import check_whole

__all__ = ["BatchLoader", "BatchesAhead", "Corpus", "eval_batches"]

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Corpus:
    r"""The tokens of the training and of the validation documents; `fingerprint` identifies them and their tokenizer.

    >>> corpus = Corpus.from_documents([b"a lone document is cut in two"])
    >>> corpus.decode(corpus.train), corpus.decode(corpus.valid)
    ('a lone document is cut in tw\x00', 'o\x00')
    """

    train: TokenArray
    valid: TokenArray
    tokenizer: Tokenizer
    train_documents: int
    valid_documents: int
    fingerprint: str

    @classmethod
    def load(cls, folder: str | Path, *, verify: bool = True, progress: bool = True) -> Self:
        """Return the corpus in a folder of :func:`symexplin.lab.data.prepare.prepare`, mapped into memory.

        Args:
            folder: holds dataset.json.
            verify: read all tokens and compare their digests.
            progress: show a bar on a terminal where that takes long.

        Raises:
            FileNotFoundError: no such folder, or a file of it is missing.
            ValueError: a folder that is not prepared, not finished or damaged; tokens of another tokenizer.

        >>> import tempfile
        >>> from symexplin.lab.data.prepare import PrepareConfig, prepare
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "text").write_bytes(b"one" + bytes(1) + b"two")
        ...     _ = prepare(PrepareConfig((f"{folder}/text",), tokenizer="byte"), Path(folder, "tokens"))
        ...     len(Corpus.load(Path(folder, "tokens")).train)
        4
        """
        folder = Path(folder)
        dataset = read_dataset(folder)
        try:
            facts = dataset["tokenizer"]
            tokenizer = Tokenizer.load(folder / TOKENIZER, name=facts["name"], end_token=facts["end_token"])
            same = tokenizer.fingerprint == facts["fingerprint"]
            train, valid = ((s["tokens"], s["sha256"], s["documents"]) for s in (dataset["train"], dataset["valid"]))
        except (KeyError, TypeError):
            raise ValueError(f"{str(folder / DATASET)!r} is damaged: it does not describe a dataset") from None
        if not same:
            raise ValueError(f"{str(folder / TOKENIZER)!r} is not the tokenizer of the tokens, {tokenizer.name!r}")
        return cls(
            read_tokens(token_file(folder, "train"), *train[:2], verify=verify, progress=progress),
            read_tokens(token_file(folder, "valid"), *valid[:2], verify=verify, progress=progress),
            tokenizer,
            train[2],
            valid[2],
            _fingerprint(tokenizer, train[1], valid[1]),
        )

    @classmethod
    def from_documents(cls, documents: Iterable[bytes], valid_fraction: float = 0.05, seed: int = 0) -> Self:
        """Return the byte tokens of `documents` in memory, split as `prepare` splits them.

        Raises:
            ValueError: no document, or a fraction outside [0, 1).
        """
        documents = list(documents)
        hashes = [hash_document(document, seed) for document in documents]
        pairs = list(zip(split_documents(hashes, len(hashes), valid_fraction), documents, strict=True))
        sides = [[document for side, document in pairs if side == wanted] for wanted in SIDES]
        if sum(map(len, sides)) == 1:
            sides = [[part] for part in cut_in_two(documents[0], valid_fraction)]
        tokenizer = Tokenizer.from_name("byte")
        train, valid = map(tokenizer.encode_documents, sides)
        digests = (hashlib.sha256(tokens.data).hexdigest() for tokens in (train, valid))
        return cls(train, valid, tokenizer, len(sides[0]), len(sides[1]), _fingerprint(tokenizer, *digests))

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary."""
        return self.tokenizer.vocab_size

    def check_context(self, context: int) -> None:
        """Raise ValueError unless both sides hold a sequence of `context` tokens and the token after it."""
        for side in (self.train, self.valid):
            _check_length(side, context)

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens; bytes that are not UTF-8 become the replacement character."""
        return self.tokenizer.decode(tokens)


def _fingerprint(tokenizer: Tokenizer, train: str, valid: str) -> str:
    return hashlib.sha256(f"{tokenizer.fingerprint} {train} {valid}".encode()).hexdigest()


def _check_length(tokens: TokenArray, context: int) -> None:
    if len(tokens) <= context:
        raise ValueError(
            f"context must be below {len(tokens):,}, the tokens on one side of the corpus, got {context}: "
            "shorten it, or give more text"
        )


def _windows(tokens: TokenArray, starts: NDArray[np.int64], context: int) -> Batch:
    rows = torch.from_numpy(tokens[starts[:, None] + np.arange(context + 1)].astype(np.int64))
    return rows[:, :-1], rows[:, 1:]


@dataclass(frozen=True)
class BatchLoader:
    """Random windows of a token array; batch number `step` depends on the seed and on `step` alone.

    All runs with one seed see the same batches in the same order. A resumed run misses none.

    Args:
        tokens: unsigned whole numbers, in memory or mapped.
        context: length of a window.
        batch_size: windows per batch.
        seed: whole number >= 0.

    Raises:
        ValueError: a value out of range, too few tokens for one window and the token after it.

    >>> loader = BatchLoader(np.arange(100, dtype=np.uint8), context=4, batch_size=2, seed=0)
    >>> inputs, targets = loader.batch(7)
    >>> bool((targets == inputs + 1).all())
    True
    """

    tokens: TokenArray
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


class BatchesAhead:
    """The batches of a loader; a thread reads the next batch while one is used.

    Args:
        loader: gives the batches.
        pinned: put batches into pinned memory, for copies to a GPU.

    >>> ahead = BatchesAhead(BatchLoader(np.arange(100, dtype=np.uint8), context=4, batch_size=2))
    >>> ahead.batch(7)[0].shape
    torch.Size([2, 4])
    """

    def __init__(self, loader: BatchLoader, *, pinned: bool = False) -> None:
        self._loader, self._pinned = loader, pinned
        self._thread = ThreadPoolExecutor(1, "batches")
        self._next: tuple[int, Future[Batch]] | None = None

    def batch(self, step: int) -> Batch:
        """Return batch `step`, and begin to read the one after it."""
        if self._next is None or self._next[0] != step:
            self._next = step, self._thread.submit(self._read, step)
        found = self._next[1].result()
        self._next = step + 1, self._thread.submit(self._read, step + 1)
        return found

    def _read(self, step: int) -> Batch:
        inputs, targets = self._loader.batch(step)
        if not self._pinned:
            return inputs, targets
        return inputs.contiguous().pin_memory(), targets.contiguous().pin_memory()


def eval_batches(tokens: TokenArray, context: int, batch_size: int, count: int) -> list[Batch]:
    """Return up to `count` fixed batches of evenly spread windows of `tokens`, fewer if they would overlap.

    Raises:
        ValueError: a value out of range, too few tokens for one window and the token after it.

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
