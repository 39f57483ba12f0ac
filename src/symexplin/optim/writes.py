"""Find writes into parameters from outside the optimizer: a loaded checkpoint, swapped averages, a manual edit.

Every step compares `_version` and the data pointer of each watched parameter with those after the last step. On CPUs
it also compares a fixed sample of 64 values, which finds most writes through `.data`. On an accelerator a sample would
wait for the device. Writes through `.data` on an accelerator, or to few entries, need `take_over_writes()`.
"""

import enum
from collections.abc import Iterable

import torch
from torch import Tensor

from symexplin.kernels import is_memory
from symexplin.optim import placement
from symexplin.optim.parameter import ParameterView
from symexplin.transform import tolerance

__all__ = ["Outcome", "Writes", "take_over"]

_SAMPLE = 64
_ULPS = 2.0  # another machine may round a half-precision weight differently without a write
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # compare bits, so that NaN equals itself


class Outcome(enum.IntEnum):
    """The result of taking over a write; the largest over all processes counts."""

    FINE, OUT_OF_REACH, NOT_FINITE = range(3)


class Writes:
    """The watched parameters as they were after the last step; an unknown parameter counts as written."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, int]] = {}
        self._samples: dict[int, Tensor] = {}  # views of the parameters' own memory
        self._found = torch.empty(0, dtype=torch.int8, device="cpu")

    def knows(self, view: ParameterView) -> bool:
        """Whether this process has seen the parameter's values, so that they can be compared bit by bit."""
        return view.key in self._seen

    def remember(self, views: Iterable[ParameterView]) -> None:
        """Record the present values of the watched parameters, and forget all others."""
        seen, samples = {}, {}
        for view in views:
            if not view.watched:
                continue
            seen[view.key] = look = _look(view)
            sample = self._samples.get(view.key) if self._seen.get(view.key, look)[1] == look[1] else None
            sample = _sample(view.value) if sample is None else sample
            if sample is not None:
                samples[view.key] = sample
        self._seen, self._samples = seen, samples
        self._found = self._present()

    def know(self, views: Iterable[ParameterView]) -> None:
        """Record the present values of further parameters."""
        fresh = {view.key: view for view in views}
        self._seen |= {key: _look(view) for key, view in fresh.items()}
        samples = {key: _sample(view.value) for key, view in fresh.items() if key not in self._samples}
        new = {key: sample for key, sample in samples.items() if sample is not None}
        self._samples |= new
        self._found = torch.cat([self._found, *new.values()])

    def noticed(self, views: Iterable[ParameterView]) -> list[ParameterView]:
        """Return the watched parameters with a detectable write since :meth:`remember`."""
        changed: set[int] = set()
        present = self._present()
        if self._samples and not torch.equal(present, self._found):
            sizes = [len(sample) for sample in self._samples.values()]
            pairs = zip(self._samples, torch.split(present, sizes), torch.split(self._found, sizes), strict=True)
            changed = {key for key, now, before in pairs if not torch.equal(now, before)}
        return [v for v in views if v.watched and (v.key in changed or self._seen.get(v.key) != _look(v))]

    def _present(self) -> Tensor:
        """Return the concatenated copies of all samples."""
        return torch.cat([self._found[:0], *self._samples.values()])


def _look(view: ParameterView) -> tuple[int, int]:
    return view.value._version, view.value.data_ptr()


def _sample(value: Tensor) -> Tensor | None:
    """Return a view of the bits of some values spread over a tensor on a CPU.

    >>> _sample(torch.zeros(1000, 3)).shape
    torch.Size([64])
    """
    if not is_memory(value) or not placement.on_host(value) or value.numel() == 0:
        return None
    dense = value.permute(sorted(range(value.dim()), key=value.stride, reverse=True))
    flat = dense.view(-1) if dense.is_contiguous() else dense[(0,) * (value.dim() - 1)]
    every = max(1, len(flat) // _SAMPLE)
    every -= every > 1 and every % 2 == 0  # an odd stride does not hit the same few columns in each row
    return flat[::every][:_SAMPLE].view(_BITS[value.element_size()])


def take_over(view: ParameterView, exact: bool) -> Outcome:
    """Update the raw weight where it disagrees with the parameter's present values, and return the outcome.

    With `exact`, this process wrote the last values, so they must equal the map's bit by bit. After a load, perhaps
    from another machine, an entry may differ by 2 units in the last place and by the map's error bound.
    """
    raw = view.own(view.kind)
    changed = _differing(view, exact)
    if not bool(changed.any()):
        return Outcome.FINE
    found = view.value.to(raw.dtype)
    if not bool(found[changed].isfinite().all()):
        return Outcome.NOT_FINITE
    if not view.curved:
        raw.copy_(torch.where(changed, found, raw))
        return Outcome.FINE
    try:
        raw.copy_(view.coordinates().matched(found, where=changed))
    except ValueError:
        return Outcome.OUT_OF_REACH
    return Outcome.FINE


def _differing(view: ParameterView, exact: bool) -> Tensor:
    """Return a mask of the entries of a parameter that disagree with its raw weight."""
    if exact:
        return view.effective() != view.value
    coordinates = view.coordinates() if view.curved else None
    expected = view.own("plain") if coordinates is None else coordinates.effective()
    rounded, found = expected.to(view.value.dtype).to(expected.dtype), view.value.to(expected.dtype)
    info = torch.finfo(view.value.dtype)
    exponent = torch.frexp(rounded.abs().clamp(min=info.tiny))[1]
    allowed = _ULPS * torch.ldexp(torch.full_like(rounded, info.eps), exponent - 1)
    if coordinates is not None:  # both sides of the comparison were rounded
        allowed = allowed + 2.0 * tolerance(coordinates.layout.form, coordinates.raw, coordinates.scales())
    return ~((found - rounded).abs() <= allowed)
