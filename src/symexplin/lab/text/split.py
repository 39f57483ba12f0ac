"""Which documents train a model and which are held out: a rule on their content alone, and two readings to apply it."""

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from symexplin.validation import check_fraction

__all__ = ["SIDES", "TRAIN", "VALID", "Split"]

TRAIN, VALID, _REPEATED = 0, 1, 2
SIDES = {TRAIN: "train", VALID: "valid"}


@dataclass(frozen=True)
class Split:
    r"""A hash, a size and a side of each document of a text; repeated ones count once, so no text is on both sides.

    Held out are the documents with the smallest hashes: all below `valid_fraction` * 2**64, but at least one, and
    never all. A lone document is cut in two.

    >>> documents = [b"one", b"two", b"one", b"three"]
    >>> split = Split.scan(documents)
    >>> list(split.sided(documents))
    [(1, b'one'), (0, b'two'), (0, b'three')]
    """

    hashes: NDArray[np.uint64]
    sizes: NDArray[np.uint64]
    sides: NDArray[np.uint8]
    valid_fraction: float
    seed: int

    @classmethod
    def scan(
        cls,
        documents: Iterable[bytes],
        held_out: Iterable[bytes] = (),
        *,
        valid_fraction: float = 0.05,
        seed: int = 0,
        update: Callable[[int], object] = int,
    ) -> Self:
        """Read `documents` and then `held_out`, which replaces the split by hash if it has documents.

        Args:
            documents: to split, or, with `held_out`, to train on.
            held_out: documents to hold out; `documents` among them do not train.
            valid_fraction: share to hold out, in [0, 1).
            seed: of the hashes.
            update: takes the size of each document read, in bytes.

        Raises:
            ValueError: no document to train on, or a fraction outside [0, 1).
        """
        check_fraction("valid_fraction", valid_fraction)
        hashes, sizes = array("Q"), array("Q")
        given = 0
        for side, side_documents in ((TRAIN, documents), (VALID, held_out)):
            for document in side_documents:
                hashes.append(_hash(document, seed))
                sizes.append(len(document))
                given += side == TRAIN
                update(len(document))
        found = np.frombuffer(hashes, np.uint64) if hashes else np.empty(0, np.uint64)
        sides = _by_hash(found, valid_fraction) if given == len(found) else _by_source(found, given)
        return cls(found, np.frombuffer(sizes, np.uint64), sides, valid_fraction, seed)

    @property
    def digest(self) -> str:
        """What tells another text or another split of it: a sha256."""
        return hashlib.sha256(self.hashes.tobytes() + self.sides.tobytes()).hexdigest()

    @property
    def repeated(self) -> int:
        """Number of documents that do not count."""
        return int((self.sides == _REPEATED).sum())

    def documents(self, side: int) -> int:
        """Return the number of documents of a side."""
        return 1 if self._is_lone else int((self.sides == side).sum())

    def size(self, side: int) -> int:
        """Return the size of a side's text in bytes."""
        if self._is_lone:
            cut = self._cut(int(self.sizes[0]))
            return cut if side == TRAIN else int(self.sizes[0]) - cut
        return int(self.sizes[self.sides == side].sum())

    def sided(self, documents: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
        """Yield (side, document) for the documents that count, in a second reading.

        Args:
            documents: those of :meth:`scan`, the held-out ones after the others.

        Raises:
            ValueError: other documents than in the first reading.
        """
        number = 0
        for number, document in enumerate(documents, start=1):
            if number > len(self.hashes) or _hash(document, self.seed) != int(self.hashes[number - 1]):
                raise ValueError(f"sources must not change while they are read; document {number:,} did")
            side = int(self.sides[number - 1])
            if side == _REPEATED:
                continue
            if self._is_lone:
                cut = self._cut(len(document))
                yield from ((TRAIN, document[:cut]), (VALID, document[cut:]))
            else:
                yield side, document
        if number < len(self.hashes):
            raise ValueError(f"sources must not change while they are read; {len(self.hashes) - number:,} went")

    @property
    def _is_lone(self) -> bool:
        return len(self.sides) - self.repeated == 1

    def _cut(self, size: int) -> int:
        return max(1, round(size * (1 - self.valid_fraction)))


def _hash(document: bytes, seed: int) -> int:
    """Return a number in [0, 2**64) that depends on the content and the seed alone."""
    return int.from_bytes(hashlib.blake2b(document, digest_size=8, key=str(seed).encode()).digest())


def _by_hash(hashes: NDArray[np.uint64], valid_fraction: float) -> NDArray[np.uint8]:
    if not len(hashes):
        raise ValueError("documents must hold at least one, got none")
    first = np.sort(np.unique(hashes, return_index=True)[1])
    sides = np.full(len(hashes), _REPEATED, dtype=np.uint8)
    sides[first] = TRAIN
    if len(first) > 1:
        rank = hashes[first].astype(np.float64) / 2**64
        wanted = int((rank < valid_fraction).sum())
        chosen = np.argsort(rank, kind="stable")[: min(max(wanted, 1), len(first) - 1)]
        sides[first[chosen]] = VALID
    return sides


def _by_source(hashes: NDArray[np.uint64], given: int) -> NDArray[np.uint8]:
    sides = np.full(len(hashes), _REPEATED, dtype=np.uint8)
    _, valid = np.unique(hashes[given:], return_index=True)
    sides[given + valid] = VALID
    _, train = np.unique(hashes[:given], return_index=True)
    sides[train[~np.isin(hashes[train], hashes[given:])]] = TRAIN
    if not (sides == TRAIN).any():
        raise ValueError("sources must hold a document that valid does not hold, got none")
    return sides
