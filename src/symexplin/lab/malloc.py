"""Memory that a run frees stays its own, for the next step takes as much again."""

import contextlib
import ctypes
import sys

__all__ = ["keep_freed_memory"]

# mallopt's parameters in glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_NEVER = 2**31 - 1


def keep_freed_memory() -> None:
    """Let glibc's malloc keep what this process frees; no effect where malloc is another.

    By default large tensors go back to the system at once, and each page of a new one costs a fault when it is first
    touched: a quarter of a training step on a CPU, where activations are larger than 32 MiB.

    >>> keep_freed_memory()
    """
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # musl has none
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(_MMAP_MAX, 0)
            mallopt(_TRIM_THRESHOLD, _NEVER)
