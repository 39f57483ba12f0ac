"""The split of documents into a training side and a held-out side: a rule on their content alone."""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from symexplin.validation import check_fraction

__all__ = ["REPEATED", "SIDES", "TRAIN", "VALID", "cut_in_two", "hash_document", "split_documents"]

TRAIN, VALID, REPEATED = 0, 1, 2
SIDES = {TRAIN: "train", VALID: "valid"}


def hash_document(document: bytes, seed: int) -> int:
    """Return a number in [0, 2**64) that depends on the content and the seed alone."""
    return int.from_bytes(hashlib.blake2b(document, digest_size=8, key=str(seed).encode()).digest())


def split_documents(hashes: Sequence[int] | NDArray[np.uint64], given: int, fraction: float) -> NDArray[np.uint8]:
    """Return the side of each document: TRAIN, VALID, or REPEATED for one that does not count.

    Without held-out documents, those with the smallest hashes are held out: all below `fraction` * 2**64, but at least
    one, and never all. A document that occurs twice counts once, so no text is on both sides.

    Args:
        hashes: of the documents to split, then of the documents that are held out, if any.
        given: number of the documents to split.
        fraction: share to hold out, in [0, 1).

    Raises:
        ValueError: no document, none left to train on, or a fraction outside [0, 1).

    >>> split_documents([7 << 60, 9 << 60, 7 << 60, 1 << 60], 4, fraction=0.05).tolist()
    [0, 0, 2, 1]
    >>> split_documents([7, 9, 7, 9], 3, fraction=0.05).tolist()
    [0, 2, 2, 1]
    """
    check_fraction("valid_fraction", fraction)
    hashes = np.asarray(hashes, np.uint64)
    if not len(hashes):
        raise ValueError("documents must hold at least one, got none")
    sides = np.full(len(hashes), REPEATED, np.uint8)
    train = np.sort(np.unique(hashes[:given], return_index=True)[1])
    if given == len(hashes):
        rank = hashes[train].astype(np.float64) / 2**64
        wanted = max(int((rank < fraction).sum()), 1)
        sides[train] = TRAIN
        sides[train[np.argsort(rank, kind="stable")[: min(wanted, len(train) - 1)]]] = VALID
        return sides
    sides[given + np.unique(hashes[given:], return_index=True)[1]] = VALID
    sides[train[~np.isin(hashes[train], hashes[given:])]] = TRAIN
    if not (sides == TRAIN).any():
        raise ValueError("sources must hold a document that valid does not hold, got none")
    return sides


def cut_in_two(document: bytes, fraction: float) -> tuple[bytes, bytes]:
    """Return both sides of a corpus of one document.

    >>> cut_in_two(b"0123456789", 0.2)
    (b'01234567', b'89')
    """
    place = max(1, round(len(document) * (1 - fraction)))
    return document[:place], document[place:]
