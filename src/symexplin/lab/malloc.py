"""What glibc's malloc does with freed memory: keep it, for speed, or give it back, so that a peak tells the need."""

import contextlib
import ctypes
import sys

__all__ = ["keep_freed_memory", "return_freed_memory"]

# mallopt's parameters in glibc's malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4
_NEVER = 2**31 - 1
_SMALL = 2**16  # bytes; what is larger has pages of its own


def keep_freed_memory() -> None:
    """Let glibc's malloc keep what this process frees; no effect where malloc is another.

    By default large tensors go back to the system at once, and each page of a new one costs a fault when it is first
    touched: a quarter of a training step on a CPU, where activations are larger than 32 MiB. The price is memory: what
    does not fit into a hole that others left is new, a quarter more at the sizes measured (docs/performance.md).

    >>> keep_freed_memory()
    """
    _mallopt({_MMAP_MAX: 0, _TRIM_THRESHOLD: _NEVER})


def return_freed_memory() -> None:
    """Let glibc's malloc give back at once whatever tensor this process frees; no effect where malloc is another.

    The peak of resident memory is then what was held at once. Otherwise it depends on which holes of the heap happen to
    fit: by 5 % between two runs of the same work.

    >>> return_freed_memory()
    """
    _mallopt({_MMAP_THRESHOLD: _SMALL, _TRIM_THRESHOLD: _SMALL, _TOP_PAD: 0})


def _mallopt(parameters: dict[int, int]) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # musl has none
            mallopt = ctypes.CDLL(None).mallopt
            for parameter, value in parameters.items():
                mallopt(parameter, value)
