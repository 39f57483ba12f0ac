"""What computes the map and AdamW: compiled C on CPUs, Triton on GPUs, or PyTorch's operations.

PyTorch's operations are the definition: everything else is tested against them and only changes the speed.
"""

import contextlib
import contextvars
import os
from collections.abc import Iterator

import torch

from symexplin.checks import check_choice
from symexplin.kernels import cpu, gpu
from symexplin.kernels.interface import Kernels

__all__ = ["CHOICES", "choice", "describe", "kernels_for", "using"]

CHOICES = ("auto", "readable")
_VARIABLE = "SYMEXPLIN_KERNELS"
_choice: contextvars.ContextVar[str | None] = contextvars.ContextVar("choice", default=None)


@contextlib.contextmanager
def using(choice: str) -> Iterator[None]:
    """Choose inside a `with` block what computes the map and AdamW.

    "auto" is C on CPUs and Triton on GPUs, "readable" is PyTorch's operations. Outside of such blocks the environment
    variable SYMEXPLIN_KERNELS chooses; its default is "auto".

    Raises:
        ValueError: an unknown choice.

    >>> with using("readable"):
    ...     describe("cpu")
    "PyTorch's operations"
    """
    token = _choice.set(check_choice("choice", choice, CHOICES))
    try:
        yield
    finally:
        _choice.reset(token)


def choice() -> str:
    """Return the present choice, one of :data:`CHOICES`.

    >>> with using("readable"):
    ...     choice()
    'readable'
    """
    return _choice.get() or check_choice(_VARIABLE, os.environ.get(_VARIABLE) or "auto", CHOICES)


def kernels_for(device: torch.device | str) -> Kernels | None:
    """Return the kernels for a device, or None for PyTorch's operations on whole tensors.

    >>> with using("readable"):
    ...     kernels_for("cpu") is None
    True
    """
    if choice() == "readable" or torch._C._len_torch_dispatch_stack():  # dispatch modes (tracing) do not see kernels
        return None
    device = torch.device(device)
    if device.type == "cpu":
        return cpu.load()
    return gpu.load(device) if device.type == "cuda" else None


def describe(device: torch.device | str) -> str:
    """Return a description of what computes the map and AdamW on a device.

    >>> with using("readable"):
    ...     describe("cpu")
    "PyTorch's operations"
    """
    kernels = kernels_for(device)
    return "PyTorch's operations" if kernels is None else kernels.name
