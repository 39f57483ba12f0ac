"""Compiles the kernels for devices that are not there and prints what became of each as JSON.

The arguments are those of real launches: so types, alignment of pointers and numbers that Triton makes constants of are
what a device would see.
"""

import json
import re
import subprocess
import sys
import tempfile

import torch
import triton
import triton_checks
from triton.backends.compiler import GPUTarget

from symexplin.kernels import Matrices, Rates, triton_launch

ARCHITECTURES = (80, 90, 100)
found = []


class Offline:
    """Stands for the driver of a device that is not there."""

    def __init__(self, architecture):
        self.architecture = architecture

    def get_current_device(self):
        return self.architecture  # a kernel keeps what it has compiled by device

    def get_current_stream(self, _):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", self.architecture, 32)

    def get_active_torch_device(self):
        return torch.device("cpu")


def usage(kernel):
    """Return the registers and the bytes of local memory (spills) of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack, local = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text).groups()
    return int(registers), int(stack) + int(local)


def widest(kernel, access):
    """Return how many bits one access to global memory, "ld" or "st", has at most."""
    found = re.findall(access + r"\.global(?:\.v(\d))?\.b(\d+)", kernel.asm["ptx"])
    return max(int(count or 1) * int(size) for count, size in found)


def compile_(kernel, programs, *arguments, **constants):
    compiled = kernel.warmup(*arguments, grid=(programs,), **triton_launch.OPTIONS, **constants)
    registers, spilled = usage(compiled)
    found.append(
        {
            "kernel": "write" if constants.get("WRITE") else kernel.fn.__name__,
            "architecture": compiled.metadata.target.arch,
            "aligned": constants["ALIGNED"],
            "registers": registers,
            "spilled": spilled,
            "loads": widest(compiled, "ld"),
            "stores": widest(compiled, "st"),
            "written": 64 if constants.get("WRITE") and constants["DTYPE"] != triton.language.float32 else 128,
            "nan": "max.NaN.f32" in compiled.asm["ptx"],  # the interpreter cannot tell it from max.f32
            "fusible": bool(re.search(r"(mul|add|sub)\.f32", compiled.asm["ptx"])),  # not .rn: ptxas may contract
        }
    )


def step(case, shape, out=False):
    """Compile what a step of one matrix, and a write, would launch."""
    kernels, terms = triton_launch.TritonKernels(), triton_checks.terms_of(case)
    kernels._is_right = lambda *_: True
    raw, grads = torch.zeros(shape), [torch.zeros(shape, dtype=case.dtype)]
    matrices = Matrices([raw], [grads[0].clone()], [raw.clone()], [raw.clone()])
    factors = triton_checks.factors_of(matrices, 1.0, torch.randn, "cpu")
    rates, clip = Rates(0.01, 0.1, 0.9, 0.99, 1e-8, (0.1, 0.1)), None if case.clip is None else torch.tensor(case.clip)
    kernels.pull(terms, matrices, factors, grads, [raw] if out else None)
    kernels.update(terms, matrices, factors, factors, grads, rates, clip)
    kernels.write(terms, matrices, factors)


triton_launch.launch = compile_
cases = triton_checks.CASES
for architecture in ARCHITECTURES:
    triton.runtime.driver.set_active(Offline(architecture))
    step(cases[0], (256, 512))
triton.runtime.driver.set_active(Offline(90))
for case, shape in zip(cases[1:], ((256, 512), (512,), (33, 65), (65, 1), (1, 1)), strict=True):
    step(case, shape, out=True)
sys.stdout.write(json.dumps(found))
