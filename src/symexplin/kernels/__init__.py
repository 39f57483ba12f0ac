"""Fast paths of the map and of AdamW over it, behind one dispatch: compiled C on CPUs, Triton on CUDA.

The readable formulas (:mod:`symexplin.transform`) stay the definition; kernels are tested against them, and what no
kernel covers goes through them.
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
    """Use the fastest path there is ("auto") or the readable formulas ("readable") inside a `with` block.

    Outside of any, the environment variable SYMEXPLIN_KERNELS says which; unset is "auto".

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
    """Return the kernels for a device; None: there are none, or they are not wanted.

    They work behind torch's back, so where a mode watches or replaces its operations (fake tensors, tracing, counting)
    the readable formulas run.
    """
    return _load(torch.device(device).type) if is_wanted() else None


def is_wanted() -> bool:
    """Whether fast paths are wanted at all."""
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
    """Return in words what computes the map on a device."""
    backend = backend_for(device)
    return "readable formulas" if backend is None else backend.name
