"""The time of an optimizer step, or of a whole training step, as a multiple of AdamW's, in one process and in turns.

    python benchmarks/step.py                      # the optimizer step: one and two threads, float32 and bfloat16
    python benchmarks/step.py --check              # the same of every variant with a limit: exit code 1 above one
    python benchmarks/step.py --no-kernels         # every preset without compiled kernels
    python benchmarks/step.py --profile            # where the time of a step goes, on the host and in kernels
    python benchmarks/step.py --whole 512x6        # forward, backward, clipping and optimizer

The baseline is `clip_grad_norm_` and torch's fused AdamW; for bfloat16 parameters AdamW over float32 master copies; for
many small float32 tensors torch's foreach AdamW; for Muon torch.optim.Muon. A ratio is the median over rounds of the
ratios of neighboring steps, so that other work on the machine meets both. `--whole` trains the laboratory's transformer
with float32 parameters, for bfloat16 under autocast: AdamW, the default and the paper's map in the optimizer, and the
paper's map in the modules. `--profile` makes Python itself slower.
"""

import argparse
import cProfile
import csv
import gc
import os
import pstats
import runpy
import statistics
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.benchmark import timer

import symexplin as sel
from symexplin.kernels import choice, describe, using
from symexplin.lab.config import ModelConfig
from symexplin.lab.model import Transformer
from symexplin.lab.provenance import provenance
from symexplin.presets import PRESETS

Step = Callable[[], object]
Shape = tuple[int, int]
CASES: dict[str, list[Shape]] = {
    "4x1024": [(1024, 1024)] * 4,
    "512x6": [*[(512, 512)] * 4, (2816, 512), (512, 1408)] * 6,  # the matrices of the laboratory's transformer
    "400x16": [(16, 16)] * 400,
    "84x16": [(16, 16)] * 84,  # with biases, as a model of small layers
    "4x1000": [(1000, 1000)] * 4,
    "2x4096": [(1024, 4096)] * 2,
    "64x256": [(256, 256)] * 64,
    "1024x12": [*[(1024, 1024)] * 4, (5632, 1024), (1024, 2816)] * 12,  # for a GPU
}
BIASED = ("84x16",)
EXAMPLES = Path(__file__).parents[1] / "examples"
SELLion = runpy.run_path(str(EXAMPLES / "sel_lion.py"))["SELLion"]
SELMuon = runpy.run_path(str(EXAMPLES / "sel_muon.py"))["SELMuon"]
VARIANTS = {
    **{name: (sel.SELAdamW, sel.preset(name)) for name in PRESETS},
    "lion": (SELLion, sel.preset("default")),
    "lion-paper": (SELLion, sel.preset("paper")),
    "muon": (SELMuon, sel.preset("default")),
    "muon-paper": (SELMuon, sel.preset("paper")),
}
# The agreed limits of an optimizer step by kernels on one thread of a CPU, in units of the baseline.
LARGE = {"default": 1.3, "paper": 2.0, "frozen": 2.0, "absorbed": 2.2, "paper+offset": 2.6}
LARGE |= {"structured_linear": 1.6, "one_number": 1.6, "lion": 6.0, "lion-paper": 6.0}
LIMITS = {(case, dtype): LARGE for case in ("4x1024", "512x6") for dtype in ("float32", "bfloat16")}
LIMITS |= {(case, "float32"): LARGE for case in ("4x1000", "2x4096", "64x256")}
LIMITS["400x16", "float32"] = {"default": 1.0, "paper": 1.2}
LIMITS["84x16", "float32"] = {"default": 1.1, "paper": 1.3, "paper+offset": 1.5}
SETTINGS = {"lr": 1e-3, "weight_decay": 0.1}
CLIP, STEPS = 1.0, 10**6


class Matrices(nn.Module):
    """Linear layers of the given shapes, with gradients."""

    def __init__(self, shapes: Sequence[Shape], dtype: torch.dtype, device: str) -> None:
        super().__init__()
        bias = shapes in [CASES[name] for name in BIASED]
        self.layers = nn.ModuleList([nn.Linear(cols, rows, bias) for rows, cols in shapes]).to(device, dtype)
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


def measure(case: str, dtype: str, variants: Sequence[str], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the ratio of each variant's optimizer step to the baseline's, which takes turns with it."""
    usual = "masters" if dtype == "bfloat16" else "foreach" if case == "400x16" else "fused"
    how = CASES[case], getattr(torch, dtype), options.device
    others: dict[str, Step] = {}
    for variant in variants:
        baseline = "torch.optim.Muon" if variant.startswith("muon") else usual
        other = others[baseline] = others.get(baseline) or stepper(baseline, *how)
        step = stepper(variant, *how)
        for warming in (other, step) * 2:
            warming()
        times = [(seconds(other), seconds(step)) for _ in range(options.rounds)]
        ratio, unit = statistics.median(own / base for base, own in times), 1e3 * min(base for base, _ in times)
        yield {"variant": variant, "ratio": ratio, "baseline": baseline, "baseline_ms": unit}


def profile(case: str, dtype: str, variant: str, options: argparse.Namespace) -> None:
    """Print where the time of a step goes: on the host by file, its calls of torch included, and in kernels."""
    step = stepper(variant, CASES[case], getattr(torch, dtype), options.device)
    for _ in range(3):
        step()
    host, by_kernel = cProfile.Profile(), Counter[str]()
    host.enable()
    for _ in range(options.rounds):
        step()
    host.disable()
    if options.device != "cpu":
        with torch.profiler.profile() as device:
            step()
        by_kernel.update({event.key: event.self_device_time_total / 1e3 for event in device.key_averages()})
    by_file: Counter[str] = Counter()
    for (file, _, name), (_, _, own, _, callers) in pstats.Stats(host).stats.items():  # type: ignore[attr-defined]
        if Path(file).name == "cpu.py" and name == "run":
            by_kernel["C"] = 1e3 * own / options.rounds
        elif file.endswith(".py"):
            by_file[file] += 1e3 * own / options.rounds
        else:  # a function in C counts for the file that calls it
            for (caller, _, _), (_, _, time, _) in callers.items():
                by_file[caller] += 1e3 * time / options.rounds
    print(f"{case} {dtype} {variant}: host {sum(by_file.values()):.2f} ms, kernels {sum(by_kernel.values()):.2f} ms")
    for title, times in (("host", by_file), ("kernels", by_kernel)):
        for where, time in times.most_common(8):
            print(f"    {title:8} {'/'.join(Path(where).parts[-2:])[:60]:60} {time:8.3f} ms", flush=True)


def table(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Print and yield the ratios of the chosen cases, with limits where kernels run on one thread of a CPU."""
    usual = tuple(PRESETS) if options.no_kernels else ("default", "paper")
    for threads in options.threads:
        torch.set_num_threads(threads)
        for case, dtype in ((case, dtype) for case in options.cases for dtype in options.dtypes):
            limits = LIMITS.get((case, dtype), {})
            variants = options.variants or (limits if options.check else usual)
            is_limited = threads == 1 and options.device == "cpu" and not options.no_kernels
            for found in measure(case, dtype, variants, options):
                row = {"case": case, "dtype": dtype, "threads": threads, **found}
                row["limit"] = limit = limits.get(found["variant"]) if is_limited else None
                row["verdict"] = "" if limit is None else "ok" if found["ratio"] <= limit else "OVER"
                line = f"{case:7} {dtype:8} {threads} threads  {found['variant']:17} {found['ratio']:7.2f} x"
                line += f"  {found['baseline']}: {found['baseline_ms']:.2f} ms"
                print(line + (f"  limit {limit} {row['verdict']}" if limit else ""), flush=True)
                yield row


def optimizer_step(model: nn.Module, variant: str) -> Step:
    """Return a function that clips and takes the optimizer step of a variant, or of torch's AdamW."""
    if variant in VARIANTS:
        kind, config = VARIANTS[variant]
        return kind(model, config=config, max_grad_norm=CLIP, total_steps=STEPS, **SETTINGS).step
    if variant == "module":
        sel.convert(model, sel.preset("paper"))
        adamw = torch.optim.AdamW(sel.param_groups(model, **SETTINGS), fused=True)
        sel.anneal_scales(adamw, total_steps=STEPS)
        return clipped(model, adamw)
    if variant == "torch.optim.Muon":
        return clipped(model, torch.optim.Muon(model.parameters(), adjust_lr_fn="match_rms_adamw", **SETTINGS))
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


def in_turns(names: Sequence[str], *how: Any) -> Iterator[tuple[str, str, list[float]]]:
    """Yield each variant and its seconds in each round on a CPU; other work meets all variants."""
    steps = {name: warm(name, *how) for name in names}
    rounds = [[seconds(step) for step in steps.values()] for _ in range(how[-1].rounds)]
    for name, times in zip(names, zip(*rounds, strict=True), strict=True):
        yield name, "", list(times)


def one_by_one(names: Sequence[str], *how: Any) -> Iterator[tuple[str, str, list[float]]]:
    """Yield the same of a GPU, with its peak memory. Nothing else uses it, and it holds one variant at a time."""
    for name in names:
        gc.collect()
        torch.cuda.empty_cache()
        step = warm(name, *how)
        torch.cuda.reset_peak_memory_stats()
        times = [seconds(step) for _ in range(how[-1].rounds)]
        del step
        yield name, f"  {torch.cuda.max_memory_allocated() / 2**20:8,.0f} MiB", times


def whole(size: str, dtype: str, options: argparse.Namespace) -> None:
    """Print time and ratio of the whole training step of each variant, and the speedup in time."""
    names = ("adamw", *(options.variants or ("default", "paper", "module")))
    adamw: list[float] = []
    for name, memory, times in (in_turns if options.device == "cpu" else one_by_one)(names, size, dtype, options):
        adamw = adamw or times
        ratio = statistics.median(own / other for own, other in zip(times, adamw, strict=True))
        line = f"{size} {dtype} {name:8} {1e3 * statistics.median(times):10,.1f} ms  {ratio:.4f} x{memory}"
        if options.step_speedup is not None and name != "adamw":
            line += f"  speedup in time {options.step_speedup / ratio:.2f}"
        print(line, flush=True)


def parse() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--check", action="store_true", help="the variants that have limits; exit code 1 if one is over its limit")
    add("--no-kernels", action="store_true", help="every preset in PyTorch's operations, the least and the most")
    add("--out", type=Path, help="write the optimizer steps to this CSV file")
    add("--cases", nargs="+", choices=CASES)
    add("--variants", nargs="+", choices=[*VARIANTS, "module"], help="module: of a whole step alone")
    add("--threads", nargs="+", type=int, default=[1, 2])
    add("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    add("--rounds", type=int, default=30)
    add("--profile", action="store_true", help="print where the time of a step goes")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--whole", nargs="+", metavar="WIDTHxDEPTH", help="time the whole training step of models of these sizes")
    add("--tokens", type=int, default=8192, help="of a whole step, a multiple of the context")
    add("--context", type=int, default=512)
    add("--vocabulary", type=int, default=8192)
    add("--compile", action="store_true", help="torch.compile the model")
    add("--recompute", action="store_true", help="compute each block again in the backward pass")
    add("--step-speedup", type=float, help="AdamW's steps over the curved model's to the same loss (table 11)")
    options = parser.parse_args()
    options.cases = options.cases or ["4x1024", "512x6", *([] if options.no_kernels else ["400x16"])]
    if options.tokens % options.context:
        parser.error(f"--tokens must be a multiple of --context = {options.context}, got {options.tokens}")
    if options.check and (options.no_kernels or options.device != "cpu" or 1 not in options.threads):
        parser.error("--check has limits for kernels on one thread of a CPU: pass --device cpu and --threads 1")
    return options


def main() -> None:
    """Print the ratios; a check exits with 1 if one is over its limit."""
    options = parse()
    with using("readable" if options.no_kernels else choice()):
        processor, computed_by = provenance(options.device)["processor"], describe(options.device)
        print(f"{processor}; torch {torch.__version__}; {computed_by}; load {os.getloadavg()[0]:.2f}", flush=True)
        if options.whole:
            torch.set_num_threads(options.threads[0])
            for size in options.whole:
                for dtype in options.dtypes:
                    whole(size, dtype, options)
            return
        if options.profile:
            torch.set_num_threads(options.threads[0])
            for case in options.cases:
                for variant in options.variants or ("default", "paper"):
                    profile(case, options.dtypes[0], variant, options)
            return
        rows = list(table(options))
        if not options.check and not options.no_kernels:
            step = stepper("paper", CASES["4x1024"], torch.float32, options.device)
            first, later = seconds(step), statistics.median(seconds(step) for _ in range(options.rounds))
            print(f"first step of the paper's map, which inverts it: {first / later:.0f} ordinary ones")
    ratios, load = [row["ratio"] for row in rows], os.getloadavg()[0]
    print(f"{min(ratios):.2f} to {max(ratios):.2f} x; load {load:.2f}")
    if options.out:
        more = {"processor": processor, "torch": torch.__version__, "kernels": computed_by, "load": load}
        with options.out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*rows[0], *more])
            writer.writeheader()
            writer.writerows(row | more for row in rows)
    sys.exit(options.check and any(row["verdict"] == "OVER" for row in rows))


if __name__ == "__main__":
    main()
