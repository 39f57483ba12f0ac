"""What computes the map and AdamW: compiled C on CPUs, `torch.compile` on accelerators, or PyTorch's operations.

PyTorch's operations are the definition: everything else is tested against them and only changes the speed.
"""

import contextlib
import contextvars
import os
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from symexplin.kernels.cpu import CpuKernels, FactoredMap, Plan, Rates, Vectors, load
from symexplin.validation import check_choice

__all__ = [
    "CHOICES",
    "CpuKernels",
    "FactoredMap",
    "Plan",
    "Rates",
    "Vectors",
    "choice",
    "cpu_kernels",
    "describe",
    "is_memory",
    "is_wanted",
    "using",
]

CHOICES = ("auto", "compiled", "readable")
_VARIABLE = "SYMEXPLIN_KERNELS"
_choice: contextvars.ContextVar[str | None] = contextvars.ContextVar("choice", default=None)


@contextlib.contextmanager
def using(choice: str) -> Iterator[None]:
    """Choose inside a `with` block what computes the map and AdamW.

    "auto" is C on CPUs and `torch.compile` on accelerators, "compiled" is `torch.compile` everywhere, "readable" is
    PyTorch's operations. Outside of such blocks the environment variable SYMEXPLIN_KERNELS chooses; its default is
    "auto".

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

    >>> with using("compiled"):
    ...     choice()
    'compiled'
    """
    return _choice.get() or check_choice(_VARIABLE, os.environ.get(_VARIABLE) or "auto", CHOICES)


def is_wanted() -> bool:
    """Whether a fast path is chosen and may run: torch's dispatch modes (fake tensors, tracing) do not see kernels.

    >>> with using("readable"):
    ...     is_wanted()
    False
    """
    return not torch._C._len_torch_dispatch_stack() and choice() != "readable"


def is_memory(tensor: Tensor) -> bool:
    """Whether kernels may read a tensor's memory; subclasses may have no address or other semantics.

    >>> is_memory(torch.ones(2))
    True
    """
    return type(tensor) in (Tensor, nn.Parameter)


def cpu_kernels() -> CpuKernels | None:
    """Return the compiled C kernels, or None if they are not chosen, must not run or cannot be had.

    >>> with using("readable"):
    ...     cpu_kernels() is None
    True
    """
    return load() if is_wanted() and choice() == "auto" else None


def describe(device: torch.device | str) -> str:
    """Return a description of what computes the map and AdamW on a device.

    >>> with using("compiled"):
    ...     describe("cpu")
    'torch.compile'
    """
    kernels = cpu_kernels() if torch.device(device).type == "cpu" else None
    if kernels is not None:
        return kernels.name
    compiled = choice() == "compiled" or (choice() == "auto" and torch.device(device).type != "cpu")
    return "torch.compile" if compiled and is_wanted() else "PyTorch's operations"
