"""The time of an optimizer step, or of a whole training step, as a multiple of AdamW's, in one process and in turns.

    python benchmarks/step.py                      # the optimizer step: one and two threads, float32 and bfloat16
    python benchmarks/step.py --whole 512x6        # forward, backward, clipping and optimizer, and the peak memory

The baseline is `clip_grad_norm_` and torch's fused AdamW; for bfloat16 parameters AdamW over float32 master copies; for
many small tensors also torch's foreach AdamW. A ratio is the median over rounds of the ratios of neighbouring steps, so
that other work on the machine meets both. `--whole` trains the laboratory's transformer with float32 parameters, for
bfloat16 under autocast: AdamW, the default and the paper's map in the optimizer, and the paper's map in the modules.
"""

import argparse
import gc
import multiprocessing
import os
import statistics
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.benchmark import timer

import symexplin as sel
from symexplin.kernels import describe
from symexplin.lab.config import ModelConfig
from symexplin.lab.model import Transformer
from symexplin.lab.provenance import provenance

Step = Callable[[], object]
Shape = tuple[int, int]
CASES: dict[str, list[Shape]] = {
    "4x1024": [(1024, 1024)] * 4,
    "512x6": [*[(512, 512)] * 4, (2816, 512), (512, 1408)] * 6,  # the matrices of the laboratory's transformer
    "400x16": [(16, 16)] * 400,
    "1024x12": [*[(1024, 1024)] * 4, (5632, 1024), (1024, 2816)] * 12,  # for a GPU
}
VARIANTS = {
    "default": sel.SELConfig(),
    "frozen": sel.preset("frozen"),
    "paper": sel.preset("paper"),
    "number": sel.preset("structured_linear", l=sel.Scale("global", k=(50.0, 8.0))),
}
SETTINGS = {"lr": 1e-3, "weight_decay": 0.1}
CLIP, STEPS = 1.0, 10**6
# glibc gives freed tensors back at once, so that the peak of a process is the memory in use.
RETURN_FREED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "0"}


class Matrices(nn.Module):
    """Linear layers of the given shapes, with gradients."""

    def __init__(self, shapes: Sequence[Shape], dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(cols, rows, bias=False) for rows, cols in shapes]).to(device, dtype)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter) * 0.01


def stepper(variant: str, shapes: Sequence[Shape], dtype: torch.dtype, device: str) -> Step:
    """Return a function that takes one optimizer step with clipping."""
    model = Matrices(shapes, dtype, device)
    return master_stepper(list(model.parameters())) if variant == "masters" else optimizer_step(model, variant)


def clipped(model: nn.Module, adamw: torch.optim.Optimizer) -> Step:
    """Return a function that clips the gradients and takes a step."""

    def step() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        adamw.step()

    return step


def master_stepper(parameters: list[nn.Parameter]) -> Step:
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


def seconds(step: Step) -> float:
    """Return the time of one call; the clock waits for a CUDA device."""
    start = timer()
    step()
    return float(timer() - start)


def measure(case: str, dtype: torch.dtype, options: argparse.Namespace) -> dict[str, float]:
    """Return the ratio of each variant's optimizer step to the baseline's."""
    baseline = "masters" if dtype == torch.bfloat16 else "foreach" if case == "400x16" else "fused"
    variants = options.variants or ("default", "paper")
    steps = {name: stepper(name, CASES[case], dtype, options.device) for name in (baseline, *variants)}
    for step in steps.values():
        step()
        step()
    times = [{name: seconds(step) for name, step in steps.items()} for _ in range(options.rounds)]
    return {name: statistics.median(t[name] / t[baseline] for t in times) for name in variants} | {
        f"{baseline} (ms)": 1e3 * min(t[baseline] for t in times)
    }


def optimizer_step(model: nn.Module, variant: str) -> Step:
    """Return a function that clips and takes the optimizer step of a variant, or of torch's AdamW."""
    if variant in VARIANTS:
        return sel.SELAdamW(model, config=VARIANTS[variant], max_grad_norm=CLIP, total_steps=STEPS, **SETTINGS).step
    if variant == "module":
        sel.convert(model, VARIANTS["paper"])
        adamw = torch.optim.AdamW(sel.param_groups(model, **SETTINGS), fused=True)
        sel.anneal_scales(adamw, total_steps=STEPS)
        return clipped(model, adamw)
    form = {"foreach" if variant == "foreach" else "fused": True}
    return clipped(model, torch.optim.AdamW(model.parameters(), **form, **SETTINGS))


def trainer(variant: str, size: str, dtype: str, options: argparse.Namespace) -> Step:
    """Return a function that takes one training step on random tokens. All variants start from the same weights."""
    width, depth = map(int, size.split("x"))
    torch.manual_seed(0)
    with torch.device(options.device):
        model = Transformer(ModelConfig(width, depth, max(1, width // 64), options.vocabulary, options.context))
        tokens = torch.randint(options.vocabulary, (options.tokens // options.context, options.context + 1))
    model.recompute = options.recompute
    # torch warns about the norms, whose weights stay in float32.
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    update = optimizer_step(model, variant)
    forward: Callable[..., Tensor] = torch.compile(model) if options.compile else model

    def step() -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast(torch.device(options.device).type, torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = forward(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        update()

    return step


def warm(*how: Any) -> Step:
    """Return a training step after two calls, which create the states and compile."""
    if how[-1].compile:
        torch.compiler.reset()  # torch runs one code uncompiled from the eighth model on
    step = trainer(*how)
    step()
    step()
    return step


def peak(*how: Any) -> float:
    """Return the most MiB that a few training steps take on a CPU, of a fresh process (Linux)."""
    torch.set_num_threads(how[-1].threads[0])
    warm(*how)()
    # Not getrusage, which may have the peak of the process that started this one.
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 2**10


def in_turns(names: Sequence[str], *how: Any) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Return the peak memory of each variant, and its seconds in each round; other work meets all variants."""
    peaks = {}
    for name in names:
        with multiprocessing.get_context("spawn").Pool(1) as child:
            peaks[name] = child.apply(peak, (name, *how))
    steps = {name: warm(name, *how) for name in names}
    return peaks, [{name: seconds(step) for name, step in steps.items()} for _ in range(how[-1].rounds)]


def one_by_one(names: Sequence[str], *how: Any) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Return the same of a GPU, which nothing else uses and whose memory holds one variant at a time."""
    peaks, times = {}, {}
    for name in names:
        gc.collect()
        torch.cuda.empty_cache()
        step = warm(name, *how)
        torch.cuda.reset_peak_memory_stats()
        times[name] = [seconds(step) for _ in range(how[-1].rounds)]
        peaks[name] = torch.cuda.max_memory_allocated() / 2**20
        del step
    return peaks, [dict(zip(times, line, strict=True)) for line in zip(*times.values(), strict=True)]


def whole(size: str, dtype: str, options: argparse.Namespace) -> None:
    """Print time, ratio and peak memory of the whole training step of each variant, and the speedup in time."""
    names = ("adamw", *(options.variants or ("default", "paper", "module")))
    peaks, times = (in_turns if options.device == "cpu" else one_by_one)(names, size, dtype, options)
    for name in names:
        ratio = statistics.median(t[name] / t["adamw"] for t in times)
        middle = 1e3 * statistics.median(t[name] for t in times)
        line = f"{size} {dtype} {name:8} {middle:10,.1f} ms  {ratio:.4f} x  {peaks[name]:8,.0f} MiB"
        if options.step_speedup is not None and name != "adamw":
            line += f"  speedup in time {options.step_speedup / ratio:.2f}"
        print(line, flush=True)


def parse() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--cases", nargs="+", default=["4x1024", "512x6", "400x16"], choices=CASES)
    add("--variants", nargs="+", choices=[*VARIANTS, "module"], help="module: of a whole step alone")
    add("--threads", nargs="+", type=int, default=[1, 2])
    add("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    add("--rounds", type=int, default=30)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--whole", nargs="+", metavar="WIDTHxDEPTH", help="time the whole training step of models of these sizes")
    add("--tokens", type=int, default=8192, help="of a whole step, a multiple of the context")
    add("--context", type=int, default=512)
    add("--vocabulary", type=int, default=8192)
    add("--compile", action="store_true", help="torch.compile the model")
    add("--recompute", action="store_true", help="compute each block again in the backward pass")
    add("--step-speedup", type=float, help="AdamW's steps over the curved model's to the same loss (table 11)")
    options = parser.parse_args()
    if options.tokens % options.context:
        parser.error(f"--tokens must be a multiple of --context = {options.context}, got {options.tokens}")
    return options


def main() -> None:
    """Print the ratios."""
    options = parse()
    machine = provenance(options.device)["processor"]
    print(f"{machine}; torch {torch.__version__}; {describe(options.device)}", flush=True)
    if options.whole:
        os.environ.update(RETURN_FREED)  # of the processes that are started, not of this one
        torch.set_num_threads(options.threads[0])
        for size in options.whole:
            for dtype in options.dtypes:
                whole(size, dtype, options)
        return
    for threads in options.threads:
        torch.set_num_threads(threads)
        for case in options.cases:
            for dtype in options.dtypes:
                found: dict[str, float] = measure(case, getattr(torch, dtype), options)
                print(f"{case:7} {dtype:8} {threads} threads ", *(f"{k} {v:.2f}" for k, v in found.items()), flush=True)
    step = stepper("paper", CASES["4x1024"], torch.float32, options.device)
    first, later = seconds(step), statistics.median(seconds(step) for _ in range(options.rounds))
    print(f"first step of the paper's map, which inverts it: {first / later:.0f} ordinary ones")


if __name__ == "__main__":
    main()
