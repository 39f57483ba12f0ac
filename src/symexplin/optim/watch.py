"""Notice writes into parameters from outside the optimizer: a loaded checkpoint, an EMA swap, a manual edit."""

import functools
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from symexplin.coordinates import Coordinates
from symexplin.optim.placement import local
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


class _Late(NamedTuple):
    """Codes on their way from the device: of which parameters, and when they will have arrived."""

    keys: list[int]
    codes: Tensor
    arrived: torch.Event | None


class Watch:
    """What every watched parameter looked like after the last step; one that it does not know counts as written.

    `_version` and the data pointer cost nothing but miss writes through `.data`, so sums of the bits and a fixed sample
    of them are compared too. On a CPU the outcome is known at once. On an accelerator nobody waits for it: it is a flag
    that is read at the next step, and until then `held` keeps what was found from being overwritten. So it is with
    what processes that have different parts of a parameter must settle together.
    """

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}
        self._late: list[_Late] = []
        self.held: dict[int, Tensor] = {}

    def knows(self, parameter: Tensor) -> bool:
        """Whether the parameter's values were seen in this process: then they can be compared bit by bit."""
        return id(parameter) in self._seen

    def remember(self, parameters: Iterable[Tensor]) -> None:
        """Take the present values for known."""
        for p in parameters:
            value = local(p.detach())
            self._seen[id(p)] = _Seen(value._version, value.data_ptr(), _mark(value))

    def written(self, parameter: Tensor) -> bool:
        """Return whether the parameter was written since :meth:`remember`, as far as is known without waiting."""
        seen, value = self._seen.get(id(parameter)), local(parameter.detach())
        if seen is None or (seen.version, seen.pointer) != (value._version, value.data_ptr()):
            return True
        flag = torch.any(_mark(value) != seen.mark)
        if not _asynchronous(value.device):
            return bool(flag)
        self.held[id(parameter)] = flag
        return False

    def hold(self, parameter: Tensor) -> None:
        """Keep what was found in the parameter until all processes that have parts of it can act on it."""
        value = local(parameter.detach())
        self.held[id(parameter)] = torch.ones((), dtype=torch.bool, device=value.device)

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


def _mark(parameter: Tensor) -> Tensor:
    """Return sums of the bits of all entries, weighted by place along each dimension, and the bits of a sample.

    The sums wrap around. One changed entry always moves them, swapped entries, rows or columns too.
    """
    bits = parameter.detach().view(_BITS[parameter.element_size()])
    weights, sample = _places(bits.shape, bits.device)
    sums = []
    for dim, weight in enumerate(weights):
        others = [d for d in range(bits.dim()) if d != dim]
        along = bits.sum(dim=others, dtype=torch.int64) if others else bits.to(torch.int64)
        sums.append((along * weight).sum().reshape(1))
    return torch.cat([*sums, bits[sample].reshape(-1).to(torch.int64)])


@functools.lru_cache(maxsize=1024)
def _places(shape: torch.Size, device: torch.device) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Return the weights of the places along each dimension and the indices of the sample."""
    weights = [(2 * torch.arange(n, device=device) + 1) * _ODD[dim % len(_ODD)] for dim, n in enumerate(shape)]
    flat = torch.arange(min(_SAMPLE, shape.numel()), device=device) * _ODD[0] % max(shape.numel(), 1)
    return weights, torch.unravel_index(flat, shape)


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
