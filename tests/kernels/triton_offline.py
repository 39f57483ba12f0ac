"""Compiles the kernels for an H100, without one, and prints what became of each as JSON.

The arguments are those of real launches, so that their types, the pointers' alignment and the numbers that Triton
makes constants of are what a device would see.
"""

import json
import re
import subprocess
import sys
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton_cases import make_part

from symexplin.config import Scale, SELConfig, preset
from symexplin.kernels import triton_backend


class Offline:
    """Stands for the driver of a device that is not there."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, _):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self):
        return torch.device("cpu")


found = {}


def usage(kernel):
    """Return the registers and the bytes of local memory (spills) of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack, local = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text).groups()
    return int(registers), int(stack) + int(local)


def compile_(kernel, programs, *arguments, **constants):
    compiled = kernel.warmup(*arguments, grid=(programs,), **(triton_backend.OPTIONS | constants))
    if compiled.hash not in found:
        registers, spilled = usage(compiled)
        loads = re.findall(r"ld\.global(?:\.v(\d))?\.b(\d+)", compiled.asm["ptx"])
        found[compiled.hash] = {
            "kernel": kernel.fn.__name__,
            "registers": registers,
            "spilled": spilled,
            "widest": max(int(count or 1) * int(size) for count, size in loads),
            "types": sorted(str(value) for value in constants.values() if isinstance(value, triton.language.dtype)),
            "aligned": constants.get("ALIGNED"),
            "nan": "max.NaN.f32" in compiled.asm["ptx"],  # the interpreter cannot tell it from max.f32
            "fusible": bool(re.search(r"(mul|add|sub)\.f32", compiled.asm["ptx"])),  # not .rn: ptxas may contract
        }


def step(parts):
    kernels = triton_backend.CudaKernels()
    kernels.pull(parts)
    kernels.update(parts, torch.ones(()))
    return kernels


def main():
    half, paper = torch.bfloat16, preset("paper")
    shapes = [((256, 512), paper), ((512,), paper), ((512, 256), None), ((512,), None)]
    parts = [make_part(shape, config, half, "cpu", i) for i, (shape, config) in enumerate(shapes)]
    kernels = step(parts)
    kernels.marks([part.weight for part in parts])
    for part in parts[:2]:
        kernels.effective(part.terms, part.raw, part.panels, half)
        kernels.pullback(part.terms, part.raw, part.panels, part.grad)


def others():
    """Compile for other maps, for shapes and types that do not fit vectors, and for one row, column and entry."""
    half, paper = torch.bfloat16, preset("paper")
    numbers = {"e": Scale("global"), "m": Scale("global"), "n": Scale("row_col_add", start=0.0)}
    for config in (
        preset("absorbed"),
        SELConfig(beta=7.5, mode="sinh", normalize=True, m=Scale("row_col_mult")),
        SELConfig(beta=7.5, mode="exp_only", **numbers),
    ):
        step([make_part((256, 512), config, half, "cpu", 0)])
    odd = [((33, 65), torch.float32), ((65, 1), torch.float16), ((1, 1), half)]
    parts = [make_part(shape, paper, dtype, "cpu", i) for i, (shape, dtype) in enumerate(odd)]
    parts += [make_part((33, 65), None, half, "cpu", 4), make_part((33, 64), None, None, "cpu", 5)]
    step(parts).marks([part.raw for part in parts])


triton.runtime.driver.set_active(Offline())
triton_backend.launch = compile_
others() if "others" in sys.argv else main()
sys.stdout.write(json.dumps(list(found.values())))
