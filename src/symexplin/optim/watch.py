"""Notice writes into parameters from outside the optimizer: a loaded checkpoint, an EMA swap, a manual edit."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from symexplin.coordinates import Coordinates

__all__ = ["Watch", "reinvert"]

_SAMPLE = 64  # entries compared a parameter and step
_ULPS = 2.0  # recomputing the map elsewhere may round differently by this much without a write


class _Seen(NamedTuple):
    version: int
    pointer: int
    sample: Tensor | None


class Watch:
    """What every curved parameter looked like after the last step; a parameter it does not know counts as written.

    `_version` and the data pointer cost nothing but miss writes through `.data`, so a fixed sample of values is
    compared too, with one transfer of flags a device and step.
    """

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    def trust(self, parameter: nn.Parameter) -> None:
        """Take the present values for known: the raw weight was made from them."""
        self._seen[id(parameter)] = _Seen(parameter._version, parameter.data_ptr(), None)

    def remember(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take the present values of all curved parameters for known, after a step wrote them."""
        self._seen = {id(p): _Seen(p._version, p.data_ptr(), _sample(p)) for p in parameters}

    def written(self, parameters: list[nn.Parameter]) -> list[bool]:
        """Return for each parameter whether it may have been written since :meth:`remember`."""
        flags = [self._touched(parameter) for parameter in parameters]
        open_cases = [i for i, touched in enumerate(flags) if not touched]
        differs: dict[torch.device, list[tuple[int, Tensor]]] = {}
        for i in open_cases:
            sample = self._seen[id(parameters[i])].sample
            if sample is not None:
                now = _sample(parameters[i])
                differs.setdefault(now.device, []).append((i, torch.any(now != sample)))
        for cases in differs.values():
            for (i, _), differ in zip(cases, torch.stack([flag for _, flag in cases]).tolist(), strict=True):
                flags[i] = differ
        return flags

    def _touched(self, parameter: nn.Parameter) -> bool:
        seen = self._seen.get(id(parameter))
        return seen is None or (seen.version, seen.pointer) != (parameter._version, parameter.data_ptr())


def _sample(parameter: Tensor) -> Tensor:
    """Return copies of at most `_SAMPLE` entries, the same ones every time, spread over all rows and columns."""
    values = parameter.detach()
    count = min(_SAMPLE, values.numel())
    # A stride coprime to any power of two walks through rows and columns alike.
    flat = torch.arange(count, device=values.device) * 2_654_435_761 % max(values.numel(), 1)
    if values.dim() == 1:
        return values[flat]
    return values[flat // values.shape[1], flat % values.shape[1]]


def reinvert(coordinates: Coordinates, parameter: Tensor, invert: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the raw weight with the entries that differ from `parameter` by more than 2 ulp inverted anew.

    The unit in the last place is that of the parameter's dtype; everywhere else the raw weight keeps its bits.
    """
    expected = coordinates.effective()
    found = parameter.detach().to(expected.dtype)
    rounded = expected.to(parameter.dtype).to(expected.dtype)
    info = torch.finfo(parameter.dtype)
    exponent = torch.frexp(rounded.abs().clamp(min=info.tiny))[1]
    ulp = torch.ldexp(torch.full_like(rounded, info.eps), exponent - 1)
    changed = ~((found - rounded).abs() <= _ULPS * ulp)  # a NaN counts as changed, and the inverse refuses it
    if not bool(changed.any()):
        return coordinates.raw
    return torch.where(changed, invert(found), coordinates.raw)
