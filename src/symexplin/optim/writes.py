"""Adopt writes into parameters whose raw weight is stored: loaded checkpoints, swapped averages, manual edits.

Every step compares `_version` and the data pointer of these parameters with those after the last step. Edits through
`.data` change neither: `take_over_writes()` compares every entry. Parameters without a stored raw weight need none of
this.
"""

from collections.abc import Iterable

import torch

from symexplin.optim.entry import Entry
from symexplin.transform import tolerance

__all__ = ["Writes"]

_ULPS = 2.0  # another machine may round a half-precision weight differently without a write


class Writes:
    """The parameters with stored raw weights as they were after the last step."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, ...]] = {}

    def remember(self, entries: Iterable[Entry]) -> None:
        """Record the present versions and addresses."""
        self._seen = {id(entry.parameter): _look(entry) for entry in entries if entry.is_stored}

    def adopt(self, entries: Iterable[Entry], *, compare_all: bool = False) -> None:
        """Update the raw weights of the entries that were written since :meth:`remember`, or of all that differ.

        Raises:
            ValueError: weights that are not finite, or out of reach of the learned scales.
        """
        for entry in entries:
            if entry.is_stored:
                seen = self._seen.get(id(entry.parameter))
                if compare_all or seen != _look(entry):
                    _adopt(entry, exact=seen is not None)


def _look(entry: Entry) -> tuple[int, ...]:
    # Of a DTensor, a write into the whole changes its own version, one into the local part that of the part.
    return entry.parameter._version, entry.value._version, entry.value.data_ptr()


def _adopt(entry: Entry, exact: bool) -> None:
    changed = _differing(entry, exact)
    if not bool(changed.any()):
        return
    try:
        entry.own("raw").copy_(entry.curved_map().inverse(entry.value, where=changed))
    except ValueError as error:
        raise ValueError(
            f"{entry.name}: weights written from outside cannot be adopted: {error}. Write other weights, or delete "
            "the parameter's state (del optimizer.state[parameter]) so that its scales start anew"
        ) from None


def _differing(entry: Entry, exact: bool) -> torch.Tensor:
    """Return a mask of the entries of a parameter that disagree with its raw weight.

    With `exact`, this process wrote the last values, so they equal the map's bit by bit. After a load, perhaps from
    another machine, an entry may differ by 2 units in the last place and by the map's error bound.
    """
    curved = entry.curved_map()
    if exact:
        return curved.effective(entry.value.dtype) != entry.value
    expected = curved.effective()
    rounded, found = expected.to(entry.value.dtype).to(expected.dtype), entry.value.to(expected.dtype)
    info = torch.finfo(entry.value.dtype)
    exponent = torch.frexp(rounded.abs().clamp(min=info.tiny))[1]
    allowed = _ULPS * torch.ldexp(torch.full_like(rounded, info.eps), exponent - 1)
    allowed = allowed + 2.0 * tolerance(curved.map.form, curved.raw, curved.scales())  # both sides were rounded
    return ~((found - rounded).abs() <= allowed)
