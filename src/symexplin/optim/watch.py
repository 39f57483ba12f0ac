"""Notice writes into parameters from outside the optimizer: a loaded checkpoint, an EMA swap, a manual edit."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from symexplin.coordinates import Coordinates
from symexplin.transform import tolerance

__all__ = ["Watch", "differing"]

_SAMPLE = 64  # entries compared a parameter and step
_ULPS = 2.0  # recomputing the map elsewhere may round a half-precision weight differently without a write
_ODD = (2_654_435_761, 11_400_714_819_323)  # odd, so that products wrap without losing bits
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Seen(NamedTuple):
    version: int
    pointer: int
    mark: Tensor


class Watch:
    """What every watched parameter looked like after the last step; one that it does not know counts as written.

    `_version` and the data pointer cost nothing but miss writes through `.data`, so sums of the bits and a fixed sample
    of them are compared too, with one transfer of flags a device and step.
    """

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    def knows(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter's values were seen in this process: then they can be compared bit by bit."""
        return id(parameter) in self._seen

    def remember(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take the present values for known."""
        self._seen |= {id(p): _Seen(p._version, p.data_ptr(), _mark(p)) for p in parameters}

    def written(self, parameters: list[nn.Parameter]) -> list[bool]:
        """Return for each parameter whether it was written since :meth:`remember`."""
        flags = [self._touched(parameter) for parameter in parameters]
        differs: dict[torch.device, list[tuple[int, Tensor]]] = {}
        for i in (i for i, touched in enumerate(flags) if not touched):
            seen = self._seen[id(parameters[i])].mark
            differs.setdefault(seen.device, []).append((i, torch.any(_mark(parameters[i]) != seen)))
        for cases in differs.values():
            for (i, _), differ in zip(cases, torch.stack([flag for _, flag in cases]).tolist(), strict=True):
                flags[i] = differ
        return flags

    def _touched(self, parameter: nn.Parameter) -> bool:
        seen = self._seen.get(id(parameter))
        return seen is None or (seen.version, seen.pointer) != (parameter._version, parameter.data_ptr())


def _mark(parameter: Tensor) -> Tensor:
    """Return sums of the bits of all entries, weighted by place along each dimension, and the bits of a sample.

    The sums wrap around. One changed entry always moves them, swapped entries, rows or columns too.
    """
    bits = parameter.detach().view(_BITS[parameter.element_size()])
    sums = []
    for dim in range(bits.dim()):
        others = [d for d in range(bits.dim()) if d != dim]
        along = bits.sum(dim=others, dtype=torch.int64) if others else bits.to(torch.int64)
        weight = torch.arange(1, 2 * along.numel(), 2, device=bits.device) * _ODD[dim % len(_ODD)]
        sums.append((along * weight).sum().reshape(1))
    count = min(_SAMPLE, bits.numel())
    flat = torch.arange(count, device=bits.device) * _ODD[0] % max(bits.numel(), 1)
    sample = bits[torch.unravel_index(flat, bits.shape)]
    return torch.cat([*sums, sample.reshape(-1).to(torch.int64)])


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
