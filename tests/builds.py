"""The kernels as each compiler makes them for SYMEXPLIN_CPU_TARGET and for plain x86-64, and in an interpreter."""

import ctypes
import functools
import os
import platform
import shutil
import tempfile
from pathlib import Path

import pytest

from symexplin.kernels import cpu, gpu
from symexplin.kernels.compiler import _find, compile_library
from symexplin.kernels.interface import Kernels

TRITON = "triton", "interpreter"
BUILDS = [(command, target) for command in ("gcc", "clang") for target in ("", "x86-64")]


@functools.cache
def library(command: str, target: str) -> Path:
    """Return a compiled library; skip the test where that is impossible."""
    if shutil.which(command) is None or (target and platform.machine() != "x86_64"):
        pytest.skip(f"no {command} for {target or 'this machine'}")
    compiler = _find(command, target or os.environ.get("SYMEXPLIN_CPU_TARGET", ""))
    assert compiler is not None
    path = Path(tempfile.mkdtemp(prefix="symexplin-test-")) / "cpu.so"
    compile_library(compiler, Path(cpu.__file__).with_name("cpu.c"), path)
    return path


@functools.cache
def kernels(command: str, target: str) -> Kernels:
    """Return kernels of one build."""
    if (command, target) == TRITON:
        pytest.importorskip("triton")
        if os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("Triton's interpreter runs where there is no GPU")
        gpu._ROWS, gpu._TILES = 32, 2  # the interpreter takes as long for few rows; sums of more tiles than these
        return gpu.triton_kernels()
    return cpu.kernels_of(ctypes.CDLL(str(library(command, target))), f"{command} {target}")
