"""Kernels for the map and for AdamW over it: compiled C on CPUs, Triton on CUDA.

The readable formulas (:mod:`symexplin.transform`) are the definition. Kernels are tested against them; the formulas
compute what no kernel covers.
"""

import contextlib
import contextvars
import functools
import os
from collections.abc import Iterator

import torch

from symexplin.kernels.factors import KERNEL_MODES, FactoredMap, Factors, Panels, Terms, terms_of
from symexplin.kernels.interface import Backend, Matrices, Rates, is_memory
from symexplin.validation import check_choice

__all__ = [
    "CHOICES",
    "KERNEL_MODES",
    "Backend",
    "FactoredMap",
    "Factors",
    "Matrices",
    "Panels",
    "Rates",
    "Terms",
    "backend_for",
    "describe",
    "is_memory",
    "is_wanted",
    "terms_of",
    "using",
]

CHOICES = ("auto", "readable")
_VARIABLE = "SYMEXPLIN_KERNELS"
_choice: contextvars.ContextVar[str | None] = contextvars.ContextVar("choice", default=None)


@contextlib.contextmanager
def using(choice: str) -> Iterator[None]:
    """Use the fastest path ("auto") or the readable formulas ("readable") inside a `with` block.

    Outside of such blocks the environment variable SYMEXPLIN_KERNELS chooses; its default is "auto".

    >>> with using("readable"):
    ...     describe("cpu")
    'readable formulas'
    """
    token = _choice.set(check_choice("choice", choice, CHOICES))
    try:
        yield
    finally:
        _choice.reset(token)


def backend_for(device: torch.device | str) -> Backend | None:
    """Return the kernels for a device, or None if there are none or they are switched off.

    Torch's dispatch modes (fake tensors, tracing, counting) do not see kernels, so the readable formulas run there.
    """
    return _load(torch.device(device).type) if is_wanted() else None


def is_wanted() -> bool:
    """Whether kernels are switched on and no dispatch mode of torch is active."""
    if torch._C._len_torch_dispatch_stack():
        return False
    choice = _choice.get() or check_choice(_VARIABLE, os.environ.get(_VARIABLE) or "auto", CHOICES)
    return choice != "readable"


@functools.cache
def _load(kind: str) -> Backend | None:
    if kind == "cpu":
        from symexplin.kernels import cpu

        return cpu.load()
    if kind == "cuda":
        from symexplin.kernels import triton_launch

        return triton_launch.load()
    return None


def describe(device: torch.device | str) -> str:
    """Return a description of what computes the map on a device."""
    backend = backend_for(device)
    return "readable formulas" if backend is None else backend.name
