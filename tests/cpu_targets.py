"""Builds of the compiled kernels for processors other than this one, for the tests; one runs in an emulator."""

import ctypes
import functools
import platform
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

from symexplin.kernels import compiler, cpu

__all__ = ["EMULATED", "TARGETS", "EmulatedKernels", "build", "kernels_for"]

# What a build needs of the processor that runs it, by the names of /proc/cpuinfo.
TARGETS = {
    "native": (),
    "haswell": ("avx2", "fma", "bmi2"),
    "skylake-avx512": ("avx512f", "avx512vl", "avx512dq"),
    "znver3": ("avx2", "fma", "bmi2"),
    "x86-64-v2": ("ssse3",),
}
EMULATED = "NEON under an emulator"
_CROSS, _EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64-static"
SOURCE = Path(cpu.__file__).with_name("cpu.c")


@functools.cache
def build(target):
    """Return the library for a target; skip where no compiler here makes one."""
    found = compiler._find("", "" if target == "native" else target)
    if found is None:
        pytest.skip(f"no C compiler that knows -march={target}")
    library = Path(_folder().name) / f"{target}.so"
    compiler.compile_library(found, SOURCE, library)
    return library


@functools.cache
def _folder():
    return tempfile.TemporaryDirectory(prefix="symexplin-tests-")


def kernels_for(target):
    """Return the kernels built for a target; skip where this processor cannot run them."""
    if target == EMULATED:
        return EmulatedKernels()
    missing = [feature for feature in TARGETS[target] if feature not in _features()]
    if missing:
        pytest.skip(f"this processor has no {', '.join(missing)}: {target} cannot run here")
    return cpu.CpuKernels(ctypes.CDLL(str(build(target))), target)


@functools.cache
def _features():
    if platform.machine() != "x86_64":
        return frozenset()
    flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    return frozenset(flags.split())


class EmulatedKernels(cpu.CpuKernels):
    """The kernels compiled for 64-bit ARM, in a process under QEMU (tests/kernels/driver.c)."""

    def __init__(self):
        for tool in (_CROSS, _EMULATOR):
            if shutil.which(tool) is None:
                pytest.skip(f"needs {tool} (Debian: gcc-aarch64-linux-gnu, libc6-dev-arm64-cross, qemu-user-static)")
        self.name, program = EMULATED, Path(_folder().name) / "neon"
        driver = Path(__file__).parent / "kernels" / "driver.c"
        flags = [flag for flag in compiler._FLAGS if flag not in ("-fPIC", "-shared")]
        command = [_CROSS, *flags, "-static", f"-I{SOURCE.parent}", "-o", program, driver, "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True)
        self._process = subprocess.Popen([_EMULATOR, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def _run(self, task, terms, matrices, factors, *, new=None, grads=(), out=None, rates=None, sums=None):
        tensors = {t.data_ptr(): t for group in (*_groups(matrices), grads, out or ()) for t in group if t.numel()}
        places, size = {}, 0
        for address, tensor in tensors.items():
            places[address] = size
            size += -(-tensor.nbytes // 64) * 64
        table = cpu._table(matrices, grads, out or ())
        for i in range(len(table)):
            if i % cpu._FIELDS in cpu._ADDRESSES:
                table[i] = places.get(table[i], -1)
        memory = bytearray(size)
        for address, tensor in tensors.items():
            memory[places[address] : places[address] + tensor.nbytes] = _bytes(tensor)
        lengths = [axis.shape[1] for axis in factors]
        head = (task, terms.magnitude, terms.normalize, len(matrices.raw), torch.get_num_threads(), *lengths)
        axes = [_bytes(axis) for pair in (factors, new or factors) for axis in pair]
        parts = [struct.pack("7q", *head), table.tobytes(), bytes(rates or cpu._Rates()), *axes, struct.pack("q", size)]
        self._process.stdin.write(b"".join([*parts, memory]))
        self._process.stdin.flush()
        (said,) = struct.unpack("q", self._process.stdout.read(8))
        counts = [3 * length for length in lengths] + [len(matrices.raw)]
        for count, total in zip(counts, sums or [None] * 3, strict=True):
            found = self._process.stdout.read(8 * count)
            if total is not None and count:
                total.copy_(torch.frombuffer(bytearray(found), dtype=torch.float64).view(total.shape))
        back = self._process.stdout.read(size)
        for address, tensor in tensors.items():
            piece = bytearray(back[places[address] : places[address] + tensor.nbytes])
            tensor.copy_(torch.frombuffer(piece, dtype=tensor.dtype).view(tensor.shape))
        return said


def _groups(matrices):
    return matrices.raw, matrices.weight, matrices.exp_avg, matrices.exp_avg_sq


def _bytes(tensor):
    return bytes(tensor.contiguous().flatten().view(torch.uint8).numpy()) if tensor.numel() else b""
