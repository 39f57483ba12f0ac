"""Numbers sent to the device without waiting for it.

What a step brings (addresses of gradients, rates, flags) is sent again only when it has changed, through pinned memory.
Under capture of a CUDA graph each call sends its content from memory of its own, which is never written again, to a
table of its own: a replay reads what was captured, whatever steps outside of it do.
"""

from typing import Any

import torch
from torch import Tensor

__all__ = ["Sent", "capturing", "sent"]

_SPARE = 2  # pinned blocks for a captured step, whose pull and update send once each: a capture cannot get any


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _pinned(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")


def sent(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers on a device without waiting for it."""
    return _pinned(values, dtype, device).to(device, non_blocking=True)


class Sent:
    """A table on the device with content from the host.

    >>> Sent(torch.int64, torch.device("cpu")).send([1, 2, 3])
    tensor([1, 2, 3])
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.values: list[Any] = []
        self.table = torch.empty(0, dtype=dtype, device=device)
        self._spare: list[Tensor] = []
        self._captured: list[tuple[Tensor, Tensor]] = []

    def send(self, values: list[Any]) -> Tensor:
        """Return the table with that content, which is sent if it has changed.

        Raises:
            RuntimeError: under capture, without a step outside of it since the last one.
        """
        dtype, device = self.table.dtype, self.table.device
        if capturing(device):
            if not self._spare or self._spare[0].numel() != len(values):
                raise RuntimeError("a captured step must follow one outside of any capture: take one step before it")
            spare, table = self._spare.pop(), torch.empty_like(self.table)
            self._captured.append((spare.copy_(torch.tensor(values, dtype=dtype)), table))
            return table.copy_(spare, non_blocking=True)
        if self._spare and self._spare[0].numel() != len(values):
            self._spare.clear()
        while len(self._spare) < _SPARE:
            self._spare.append(_pinned([0] * len(values), dtype, device))
        if values != self.values:
            if len(values) != len(self.values):
                self.table = torch.empty(len(values), dtype=dtype, device=device)
            # The allocator of pinned memory gives this block away again only after the copy.
            self.table.copy_(_pinned(values, dtype, device), non_blocking=True)
            self.values = values
        return self.table
