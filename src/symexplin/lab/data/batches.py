"""The tokens of a prepared folder, and batches of them for training."""

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from symexplin.lab.data.tokenizer import TokenArray, Tokenizer
from symexplin.lab.data.tokens import DATASET, SIDES, TOKENIZER, read_dataset, read_tokens

__all__ = ["BatchLoader", "BatchesAhead", "Corpus", "eval_batches"]

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Corpus:
    """The tokens of the training and of the validation documents; `fingerprint` identifies them and their tokenizer."""

    train: TokenArray
    valid: TokenArray
    tokenizer: Tokenizer
    train_documents: int
    valid_documents: int
    fingerprint: str

    @classmethod
    def load(cls, folder: str | Path, *, verify: bool = True) -> Self:
        """Return the corpus in a prepared folder, mapped into memory; `verify` reads all tokens for their digests."""
        folder = Path(folder)
        dataset = read_dataset(folder)
        try:
            facts = dataset["tokenizer"]
            tokenizer = Tokenizer.load(folder / TOKENIZER, name=facts["name"], end_token=facts["end_token"])
            same = tokenizer.fingerprint == facts["fingerprint"]
            counts, digests, documents = (
                [dataset[side][key] for side in SIDES.values()] for key in ("tokens", "sha256", "documents")
            )
        except (KeyError, TypeError):
            raise ValueError(f"{str(folder / DATASET)!r} is damaged: it does not describe a dataset") from None
        if not same:
            raise ValueError(f"{str(folder / TOKENIZER)!r} is not the tokenizer of the tokens, {tokenizer.name!r}")
        train, valid = (
            read_tokens(folder / f"{side}.npy", count, digest, verify=verify)
            for side, count, digest in zip(SIDES.values(), counts, digests, strict=True)
        )
        whole = hashlib.sha256(" ".join((tokenizer.fingerprint, *digests)).encode()).hexdigest()
        return cls(train, valid, tokenizer, documents[0], documents[1], whole)

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary."""
        return self.tokenizer.vocab_size

    def check_context(self, context: int) -> None:
        """Raise ValueError unless both sides hold a sequence of `context` tokens and the token after it."""
        shortest = min(len(self.train), len(self.valid))
        if shortest <= context:
            raise ValueError(
                f"context must be below {shortest:,}, the tokens on one side of the corpus, got {context}: "
                "shorten it, or give more text"
            )


def _windows(tokens: TokenArray, starts: NDArray[np.int64], context: int) -> Batch:
    rows = torch.from_numpy(tokens[starts[:, None] + np.arange(context + 1)].astype(np.int64))
    return rows[:, :-1], rows[:, 1:]


@dataclass(frozen=True)
class BatchLoader:
    """Random windows of a token array; batch number `step` depends on the seed and on `step` alone.

    All runs with one seed see the same batches in the same order. A resumed run misses none.
    """

    tokens: TokenArray
    context: int
    batch_size: int
    seed: int = 0

    def batch(self, step: int) -> Batch:
        """Return inputs and targets of batch `step`, each int64 (batch_size, context)."""
        random = np.random.default_rng([self.seed, step])
        starts = random.integers(0, len(self.tokens) - self.context, size=self.batch_size)
        return _windows(self.tokens, starts, self.context)


class BatchesAhead:
    """The batches of a loader, in pinned memory on request; a thread reads the next batch while one is used."""

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
    """Return up to `count` fixed batches of evenly spread windows of `tokens`, fewer if they would overlap."""
    windows = min(batch_size * count, (len(tokens) - 1) // context)
    starts = np.linspace(0, len(tokens) - context - 1, windows).astype(np.int64)
    inputs, targets = _windows(tokens, starts, context)
    return list(zip(torch.split(inputs, batch_size), torch.split(targets, batch_size), strict=True))
