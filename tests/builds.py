"""The kernels for each instruction set that this processor has, and in an interpreter."""

import ctypes
import functools
import os

import pytest
import torch

from symexplin.kernels import cpu, gpu
from symexplin.kernels.interface import Kernels

TRITON = "triton"
CAPABILITIES = ("DEFAULT", "AVX2", "AVX512")  # names of torch's, each of which has those before
NEEDS_C = pytest.mark.skipif(cpu.load() is None, reason="needs the C kernels")


@functools.cache
def kernels(build: str) -> Kernels:
    """Return kernels of one build; skip the test where they do not run."""
    if build == TRITON:
        pytest.importorskip("triton")
        if os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("Triton's interpreter runs where there is no GPU")
        gpu._ROWS, gpu._TILES = 32, 2  # the interpreter takes as long for few rows; sums of more tiles than these
        return gpu.triton_kernels()
    here = torch.backends.cpu.get_cpu_capability()
    if build != here and (here not in CAPABILITIES or CAPABILITIES.index(build) > CAPABILITIES.index(here)):
        pytest.skip(f"this processor has {here}")
    if not cpu.path_of(build).exists():
        pytest.skip("the package was built without C kernels")
    return cpu.kernels_of(ctypes.CDLL(str(cpu.path_of(build))), build)
