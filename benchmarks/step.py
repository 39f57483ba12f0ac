"""The time of an optimizer step as a multiple of AdamW's, all in one process and in turns.

    python benchmarks/step.py                      # one and two threads, float32 and bfloat16
    python benchmarks/step.py --cases 4x1024 --threads 1 --variants default
    SYMEXPLIN_KERNELS=readable python benchmarks/step.py --cases 4x1024

The baseline is `clip_grad_norm_` and torch's fused AdamW; for bfloat16 parameters AdamW over float32 master copies; for
many small tensors also torch's foreach AdamW. A ratio is the median over rounds of the ratios of neighbouring steps, so
that other work on the machine meets both.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

import symexplin as sel
from symexplin.kernels import describe

Shape = tuple[int, int]
CASES: dict[str, list[Shape]] = {
    "4x1024": [(1024, 1024)] * 4,
    "512x6": [*[(512, 512)] * 4, (2816, 512), (512, 1408)] * 6,  # the matrices of the laboratory's transformer
    "400x16": [(16, 16)] * 400,
}
VARIANTS = {"default": sel.SELConfig(), "frozen": sel.preset("frozen"), "paper": sel.preset("paper")}
SETTINGS = {"lr": 1e-3, "weight_decay": 0.1}
CLIP = 1.0


class Matrices(nn.Module):
    """Linear layers of the given shapes, with gradients."""

    def __init__(self, shapes: Sequence[Shape], dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(cols, rows, bias=False, dtype=dtype) for rows, cols in shapes])
        for parameter in self.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype) * 0.01


def stepper(variant: str, shapes: Sequence[Shape], dtype: torch.dtype) -> Callable[[], object]:
    """Return a function that takes one optimizer step with clipping."""
    model = Matrices(shapes, dtype)
    if variant in VARIANTS:
        optimizer = sel.SELAdamW(model, config=VARIANTS[variant], max_grad_norm=CLIP, total_steps=10**6, **SETTINGS)
        return optimizer.step
    if variant == "masters":
        return master_stepper(list(model.parameters()))
    adamw = torch.optim.AdamW(model.parameters(), fused=variant == "fused", foreach=variant == "foreach", **SETTINGS)

    def step() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        adamw.step()

    return step


def master_stepper(parameters: list[nn.Parameter]) -> Callable[[], object]:
    """Return a step of fused AdamW over float32 copies of half-precision parameters."""
    masters = [nn.Parameter(parameter.detach().float()) for parameter in parameters]
    adamw = torch.optim.AdamW(masters, fused=True, **SETTINGS)

    @torch.no_grad()
    def step() -> None:
        for master, parameter in zip(masters, parameters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        nn.utils.clip_grad_norm_(masters, CLIP)
        adamw.step()
        torch._foreach_copy_(list(parameters), list(masters))

    return step


def seconds(step: Callable[[], object]) -> float:
    """Return the time of one call."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def measure(case: str, dtype: torch.dtype, variants: Sequence[str], rounds: int) -> dict[str, float]:
    """Return the ratio of each variant's step to the baseline's."""
    baseline = "masters" if dtype == torch.bfloat16 else "foreach" if case == "400x16" else "fused"
    steps = {name: stepper(name, CASES[case], dtype) for name in (baseline, *variants)}
    for step in steps.values():
        step()
        step()
    times = [{name: seconds(step) for name, step in steps.items()} for _ in range(rounds)]
    return {name: statistics.median(t[name] / t[baseline] for t in times) for name in variants} | {
        f"{baseline} (ms)": 1e3 * min(t[baseline] for t in times)
    }


def first_step(case: str, rounds: int) -> float:
    """Return the time of the first step of the paper's map, which inverts it, as a multiple of a later step."""
    step = stepper("paper", CASES[case], torch.float32)
    first = seconds(step)
    return first / statistics.median(seconds(step) for _ in range(rounds))


def processor() -> str:
    """Return the name of the processor."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--variants", nargs="+", default=["default", "paper"], choices=VARIANTS)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    print(f"{processor()}; torch {torch.__version__}; {describe('cpu')}")
    for threads in options.threads:
        torch.set_num_threads(threads)
        for case in options.cases:
            for dtype in options.dtypes:
                found: dict[str, float] = measure(case, getattr(torch, dtype), options.variants, options.rounds)
                print(f"{case:7} {dtype:8} {threads} threads ", *(f"{k} {v:.2f}" for k, v in found.items()), flush=True)
    print(f"first step of the paper's map: {first_step('4x1024', options.rounds):.0f} ordinary ones")


if __name__ == "__main__":
    main()
