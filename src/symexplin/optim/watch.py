"""Notice writes into parameters from outside the optimizer: a loaded checkpoint, an EMA swap, a manual edit."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from symexplin.coordinates import Coordinates
from symexplin.kernels import backend_for
from symexplin.transform import tolerance

__all__ = ["Watch", "differing"]

_ULPS = 2.0  # recomputing the map elsewhere may round a half-precision weight differently without a write
_ODD = (2_654_435_761, 11_400_714_819_323)  # odd, so that products wrap without losing bits
_BLOCK = 2**20  # entries whose bits are summed at once
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Seen(NamedTuple):
    version: int
    pointer: int
    marks: Tensor  # of several parameters, a row each
    row: int


class _Late(NamedTuple):
    """Codes on their way from the device: of which parameters, and when they will have arrived."""

    keys: list[int]
    codes: Tensor
    arrived: torch.Event | None


class Watch:
    """What every watched parameter looked like after the last step; one that it does not know counts as written.

    `_version` and the data pointer cost nothing but miss writes through `.data`, so sums of all bits are compared too.
    On a CPU the outcome is known at once. On an accelerator nobody waits for it: it is a flag that is read at the next
    step, and until then `held` keeps what was found from being overwritten. So it is with what processes that have
    different parts of a parameter must settle together.
    """

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}
        self._late: list[_Late] = []
        self.held: dict[int, Tensor] = {}

    def knows(self, key: int) -> bool:
        """Whether the parameter's values were seen in this process: then they can be compared bit by bit."""
        return key in self._seen

    def remember(self, values: Mapping[int, Tensor], marks: Mapping[int, tuple[Tensor, int]] | None = None) -> None:
        """Take the present values for known.

        Args:
            values: of parameters, by `id`.
            marks: of those whose marks somebody has computed already, a tensor of marks and the row in it.
        """
        known = marks or {}
        rest = {key: value for key, value in values.items() if key not in known}
        for keys, marks_of_rest in _marks(rest):
            known = {**known, **{key: (marks_of_rest, row) for row, key in enumerate(keys)}}
        for key, value in values.items():
            self._seen[key] = _Seen(value._version, value.data_ptr(), *known[key])

    def written(self, values: Mapping[int, Tensor]) -> set[int]:
        """Return which of the parameters were written since :meth:`remember`, as far as is known without waiting."""
        found: set[int] = set()
        unsure: dict[int, Tensor] = {}
        for key, value in values.items():
            seen = self._seen.get(key)
            if seen is None or seen.version != value._version or seen.pointer != value.data_ptr():
                found.add(key)
            else:
                unsure[key] = value
        for keys, marks in _marks(unsure):
            changed = (marks != self._rows(keys)).any(dim=1)
            if _asynchronous(marks.device):
                self.held |= dict(zip(keys, changed.unbind(), strict=True))
            else:
                found |= {key for key, flag in zip(keys, changed.tolist(), strict=True) if flag}
        return found

    def _rows(self, keys: Sequence[int]) -> Tensor:
        """Return the remembered marks: mostly as they lie."""
        seen = [self._seen[key] for key in keys]
        first = seen[0].marks
        if len(first) == len(seen) and all(s.marks is first and s.row == row for row, s in enumerate(seen)):
            return first
        return torch.stack([s.marks[s.row] for s in seen])

    def hold(self, key: int, device: torch.device) -> None:
        """Keep what was found in the parameter until all processes that have parts of it can act on it."""
        self.held[key] = torch.ones((), dtype=torch.bool, device=device)

    def send(self, keys: list[int], codes: Tensor) -> None:
        """Let the next step know the codes of the parameters, by `id`, that are not 0."""
        arrived = None
        if codes.device.type != "cpu":
            arrived = torch.Event(codes.device)
            codes = codes.to("cpu", non_blocking=True)
            arrived.record()
        self._late.append(_Late(keys, codes, arrived))

    def arrived(self) -> dict[int, int]:
        """Return the codes that were sent in the last step, and hold nothing any more."""
        late, self._late, self.held = self._late, [], {}
        for item in late:
            if item.arrived is not None:
                item.arrived.synchronize()
        return {
            key: int(code) for keys, codes, _ in late for key, code in zip(keys, codes.tolist(), strict=True) if code
        }


def _asynchronous(device: torch.device) -> bool:
    return device.type != "cpu"


def _marks(values: Mapping[int, Tensor]) -> Iterator[tuple[list[int], Tensor]]:
    """Yield the marks of the tensors, a row each, with their keys: device by device."""
    by_device: dict[torch.device, list[int]] = {}
    for key, value in values.items():
        by_device.setdefault(value.device, []).append(key)
    for device, keys in by_device.items():
        kernels, here = backend_for(device), [values[key] for key in keys]
        if kernels is not None and all(kernels.covers(value, value) for value in here):
            yield keys, kernels.marks(here)
        else:
            yield keys, torch.stack([_mark(value) for value in here])


def _mark(value: Tensor) -> Tensor:
    """Return two sums of the bits of all entries, weighted by row and by row and column (:meth:`Backend.marks`).

    The sums wrap around. One changed entry always moves both, swapped entries, rows or columns at least one of them.
    """
    bits = value.detach().view(_BITS[value.element_size()])
    bits = bits if bits.dim() == 2 else bits.reshape(1, -1)
    rows, columns = (2 * torch.arange(size, device=bits.device) + 1 for size in bits.shape)
    first = second = torch.zeros((), dtype=torch.int64, device=bits.device)
    height = max(1, _BLOCK // max(len(columns), 1))
    for some, of_row in zip(
        torch.split(bits, height), torch.split(rows, height), strict=True
    ):  # as int64 they are twice as large
        wide = some.to(torch.int64)
        first = first + (wide.sum(dim=1) * of_row).sum()
        second = second + ((wide * columns).sum(dim=1) * of_row).sum()
    return torch.stack([first * _ODD[0], second * _ODD[1]])


def differing(expected: Tensor, parameter: Tensor, coordinates: Coordinates | None, exact: bool) -> Tensor:
    """Return a mask of the entries of `parameter` that are not the `expected` values.

    When the values were written in this process (`exact`) they are so bit by bit. After a load, perhaps on another
    machine, an entry may differ by 2 units in the last place of the parameter's dtype and by the accuracy of the map.
    """
    found = parameter.detach()
    rounded = expected.to(found.dtype)
    if exact:
        return rounded != found
    rounded, found = rounded.to(expected.dtype), found.to(expected.dtype)
    info = torch.finfo(parameter.dtype)
    exponent = torch.frexp(rounded.abs().clamp(min=info.tiny))[1]
    allowed = _ULPS * torch.ldexp(torch.full_like(rounded, info.eps), exponent - 1)
    if coordinates is not None:  # both sides of the comparison were rounded
        allowed = allowed + 2.0 * tolerance(coordinates.layout.form, coordinates.raw, coordinates.scales())
    return ~((found - rounded).abs() <= allowed)
