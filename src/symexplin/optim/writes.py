"""Adopt writes into parameters whose raw weight is stored: loaded checkpoints, swapped averages, manual edits.

Every step compares `_version` and the data pointer of these parameters with those after the last step. Edits through
`.data` change neither: `take_over_writes()` compares every element. Parameters without a stored raw weight need none of
this.
"""

from collections.abc import Iterable

import torch

from symexplin.optim.entry import Entry
from symexplin.transform import tolerance

__all__ = ["Writes"]


class Writes:
    """The parameters with stored raw weights as they were after the last step."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, ...]] = {}

    def remember(self, entries: Iterable[Entry]) -> None:
        """Record the present versions and addresses of these parameters."""
        self._seen |= {id(entry.parameter): _look(entry) for entry in entries if entry.is_stored}

    def adopt(self, entries: Iterable[Entry], *, compare_all: bool = False) -> None:
        """Update the raw weights of parameters that were written since :meth:`remember`, or of all that differ.

        Raises:
            ValueError: weights that are not finite, or out of reach of the learned scales.
        """
        for entry in entries:
            if entry.is_stored and (compare_all or self._seen.get(id(entry.parameter)) != _look(entry)):
                _adopt(entry)


def _look(entry: Entry) -> tuple[int, ...]:
    # Of a DTensor, a write into the whole changes its own version, one into the local part that of the part.
    return entry.parameter._version, entry.value._version, entry.value.data_ptr(), entry.value.is_neg()


def _adopt(entry: Entry) -> None:
    changed = _differing(entry)
    if not bool(changed.any()):
        return
    try:
        entry.local_state("raw").copy_(entry.curved_weight().inverse(entry.value, where=changed))
    except ValueError as error:
        raise ValueError(f"{entry.name}: weights written from outside cannot be adopted: {error}") from None


def _differing(entry: Entry) -> torch.Tensor:
    """Return a mask of the elements of a parameter that disagree with its raw weight.

    An element that was not written may differ by the map's error bound: the last step was computed by kernels, or on
    another machine. Rounding is monotonic, so in half precision it lies between the rounded ends.
    """
    curved, actual = entry.curved_weight(), entry.value
    expected = curved.effective()
    slack = 2.0 * tolerance(curved.spec.config.mode, curved.raw, curved.scales())  # both sides were rounded
    low, high = (expected - slack).to(actual.dtype), (expected + slack).to(actual.dtype)
    return ~((low <= actual) & (actual <= high))
