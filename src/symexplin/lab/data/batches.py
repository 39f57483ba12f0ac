"""The tokens of a prepared folder, and batches of them for training.

dataset.json          tokenizer, counts, digests and configuration: written last
tokenizer.json        of the `tokenizers` library
train.npy, valid.npy  the tokens, one `numpy` array per side
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from symexplin.lab.data.tokenizer import TokenArray, Tokenizer
from symexplin.lab.files import read_json

__all__ = [
    *("DATASET", "SIDES", "TOKENIZER", "Batch"),
    *("BatchLoader", "Corpus", "eval_batches", "read_dataset", "read_tokens"),
]

DATASET, TOKENIZER = "dataset.json", "tokenizer.json"
SIDES = ("train", "valid")

Batch = tuple[Tensor, Tensor]


def read_dataset(folder: Path) -> dict[str, Any]:
    """Return the content of a finished folder's dataset.json."""
    if not (folder / DATASET).exists():
        made = "a folder that `symexplin prepare SOURCE --out FOLDER` has finished"
        raise FileNotFoundError(f"data must be {made}, got {str(folder)!r} without {DATASET}")
    return read_json(folder / DATASET)


def read_tokens(path: Path, count: int) -> TokenArray:
    """Return the `count` tokens of a file of :func:`write_tokens`, mapped into memory."""
    try:
        tokens = np.load(path, mmap_mode="r").view(np.ndarray)
    except Exception:  # numpy raises errors of many kinds for a damaged header
        tokens = None
    if tokens is None or tokens.shape != (count,):
        raise ValueError(f"{str(path)!r} has not the {count:,} tokens of {DATASET}: prepare the text in a new folder")
    return cast(TokenArray, tokens)


@dataclass(frozen=True)
class Corpus:
    """The tokens of the training and of the validation documents; `fingerprint` identifies them and their tokenizer.

    It is that of dataset.json: the tokens, which nothing changes once they are prepared, are not read for it.
    """

    train: TokenArray
    valid: TokenArray
    tokenizer: Tokenizer
    train_documents: int
    valid_documents: int
    fingerprint: str

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Return the corpus in a prepared folder, mapped into memory."""
        folder = Path(folder)
        dataset = read_dataset(folder)
        try:
            facts, sides = dataset["tokenizer"], [dataset[name] for name in SIDES]
            tokenizer = Tokenizer.load(folder / TOKENIZER, name=facts["name"], end_token=facts["end_token"])
            if tokenizer.fingerprint != facts["fingerprint"]:
                raise ValueError(f"{str(folder / TOKENIZER)!r} is not the tokenizer of the tokens, {tokenizer.name!r}")
            train, valid = (
                read_tokens(folder / f"{name}.npy", side["tokens"]) for name, side in zip(SIDES, sides, strict=True)
            )
            train_documents, valid_documents = (side["documents"] for side in sides)
        except KeyError:
            raise ValueError(f"{str(folder / DATASET)!r} is damaged: it does not describe a dataset") from None
        whole = " ".join((tokenizer.fingerprint, *(side["sha256"] for side in sides)))
        fingerprint = hashlib.sha256(whole.encode()).hexdigest()
        return cls(train, valid, tokenizer, train_documents, valid_documents, fingerprint)

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
    # A copy to a GPU uses pinned memory only if the tensor is contiguous.
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


@dataclass(frozen=True)
class BatchLoader:
    """Random windows of a token array; batch number `step` depends on the seed and on `step` alone.

    All runs with one seed see the same batches in the same order. A resumed run misses none.
    """

    tokens: TokenArray
    context: int
    batch_size: int
    seed: int = 0

    def batch(self, step: int, rows: slice = slice(None)) -> Batch:
        """Return inputs and targets of batch `step`, each int64 (batch_size, context); of these `rows` alone."""
        random = np.random.default_rng([self.seed, step])
        starts = random.integers(0, len(self.tokens) - self.context, size=self.batch_size)
        return _windows(self.tokens, starts[rows], self.context)


def eval_batches(tokens: TokenArray, context: int, batch_size: int, count: int) -> list[Batch]:
    """Return up to `count` fixed batches of evenly spread windows of `tokens`, fewer if they would overlap."""
    windows = min(batch_size * count, (len(tokens) - 1) // context)
    starts = np.linspace(0, len(tokens) - context - 1, windows).astype(np.int64)
    inputs, targets = _windows(tokens, starts, context)
    return list(zip(torch.split(inputs, batch_size), torch.split(targets, batch_size), strict=True))
