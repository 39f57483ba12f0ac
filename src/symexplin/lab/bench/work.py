"""What is timed: the variants of a case, which take the same step in the stock way and in the curved ways."""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.benchmark import timer

import symexplin as sel
from symexplin.lab.bench import BenchConfig, Case
from symexplin.lab.build import clear_gradients
from symexplin.lab.maps import named_map
from symexplin.lab.model import Transformer
from symexplin.lab.settings import from_table, to_table

__all__ = ["BASELINES", "CURVED", "PHASES", "MasterAdamW", "Work", "build_variant", "make_work", "peak_in_child"]

# Variant -> its baseline, by part and dtype. A step on fp32 parameters is the same in both dtypes.
_FP32 = {"adamw": "adamw", "sel": "adamw", "module": "adamw"}
_BF16 = {"adamw_master": "adamw_master", "sel": "adamw_master"}
BASELINES: dict[tuple[str, str], dict[str, str]] = {
    ("optimizer", "fp32"): _FP32,
    ("optimizer", "bf16"): _BF16,
    ("step", "fp32"): _FP32,
    ("step", "bf16"): {**_BF16, "adamw_autocast": "adamw_master", "module": "adamw_autocast"},
}
CURVED = ("sel", "module")  # variants with the map
PHASES = ("forward", "backward", "optimizer")  # of a whole step
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_SEED = 0  # of the weights
_LR, _DECAY, _MAX_NORM = 3e-4, 0.01, 1.0  # section 5.1
_STEPS = 100_000  # of the annealing: more than any measurement takes
_MEMORY_STEPS = 3  # the first step has no optimizer states beside its activations, later ones have
_SCRIPT = "from symexplin.lab.bench import work; work._print_peak()"
_RETURN_FREED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "0"}


# A model, its optimizer step with clipping, and whether its forward pass is under autocast.
Variant = tuple[nn.Module, Callable[[], object], bool]


@dataclass(frozen=True)
class Work:
    """A timed call, an untimed one before it, and the seconds of its phases, to which `run` adds."""

    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    phases: dict[str, float] = field(default_factory=dict)


class MasterAdamW:
    """The stock recipe for bf16 parameters: upcast the gradients, clip, fused AdamW on fp32 masters, copy back.

    The upcast gradients live only during the step, which is the least memory that the recipe can take.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = _LR, weight_decay: float = _DECAY) -> None:
        self.parameters = list(parameters)
        self.masters = [parameter.detach().float() for parameter in self.parameters]
        self.adamw = torch.optim.AdamW(self.masters, lr=lr, weight_decay=weight_decay, fused=True)

    @torch.no_grad()
    def step(self) -> None:
        """Take one step from the gradients of the parameters."""
        upcast = [torch.empty_like(master) for master in self.masters]
        torch._foreach_copy_(upcast, [parameter.grad for parameter in self.parameters])  # type: ignore[misc]
        for master, grad in zip(self.masters, upcast, strict=True):
            master.grad = grad
        nn.utils.clip_grad_norm_(self.masters, _MAX_NORM)
        self.adamw.step()
        torch._foreach_copy_(self.parameters, self.masters)  # type: ignore[arg-type]
        self.adamw.zero_grad(set_to_none=True)


def build_variant(name: str, config: BenchConfig, case: Case, device: torch.device) -> Variant:
    """Return a fresh variant of a case. All variants of a case start from the same plain weights."""
    autocast = case.dtype == "bf16" and name in ("adamw_autocast", "module")
    run = config.run(case)
    torch.manual_seed(_SEED)
    with device:  # billions of weights take minutes to draw on a CPU
        model = Transformer(run.model)
    model.recompute, model.loss_chunk = run.compute.recompute, run.compute.loss_chunk or 0
    model.to(torch.float32 if autocast else _DTYPES[case.dtype])
    if name == "adamw_master":
        return model, MasterAdamW(model.parameters()).step, autocast
    curve = named_map(config.preset, config.map)
    if name == "sel":
        groups = sel.param_groups(model, lr=_LR, weight_decay=_DECAY, config=curve)
        return model, sel.SELAdamW(groups, total_steps=_STEPS, max_grad_norm=_MAX_NORM).step, autocast
    if name == "module":
        sel.convert(model, curve)
        optimizer = torch.optim.AdamW(sel.param_groups(model, lr=_LR, weight_decay=_DECAY), fused=True)
        sel.anneal_scales(optimizer, total_steps=_STEPS)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, weight_decay=_DECAY, fused=True)

    def step() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), _MAX_NORM)
        optimizer.step()

    return model, step, autocast


def _fill_gradients(parameters: Iterable[Tensor]) -> None:
    """Give every parameter a random gradient whose norm is far above the clipping threshold."""
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter).uniform_(-0.01, 0.01)


def make_work(name: str, config: BenchConfig, case: Case, device: torch.device) -> Work:
    """Return the work of a variant, on a fresh model."""
    if case.part == "step":
        return _step(name, config, case, device)
    model, step, _ = build_variant(name, config, case, device)
    parameters = list(model.parameters())
    return Work(step, lambda: _fill_gradients(parameters))


def _step(name: str, config: BenchConfig, case: Case, device: torch.device) -> Work:
    """Return the whole training step on random tokens: forward and backward over the microbatches, the optimizer.

    On CUDA the end of each phase waits for the device.
    """
    count, settings = case.microbatches or 1, config.run(case)
    model, step, autocast = build_variant(name, config, case, device)
    if autocast:  # torch warns about the norms, whose weights stay in float32
        warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    forward: nn.Module = model
    if config.compile:
        forward = torch.compile(model, mode=config.compile_mode)  # type: ignore[assignment]
    size = (count, config.tokens // count // config.context, config.context + 1)
    tokens = torch.randint(config.vocab_size, size, device=device)
    phases = dict.fromkeys(PHASES, 0.0)

    def run() -> None:
        moments = [timer()]

        def end(phase: str) -> None:
            moments.append(timer())
            phases[phase] += moments[-1] - moments[-2]

        clear_gradients(model.parameters(), settings)
        for part in tokens:
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                loss: Tensor = forward(part[:, :-1], part[:, 1:]) / count
            end("forward")
            loss.backward()  # type: ignore[no-untyped-call]
            end("backward")
        step()
        end("optimizer")

    return Work(run, phases=phases)


def peak_in_child(name: str, config: BenchConfig, case: Case) -> int:
    """Return the most bytes that a fresh process has resident while it takes a few steps of a variant.

    They include Python, torch and the model's building. glibc returns every freed tensor to the system at once there,
    so that the peak is the memory in use.
    """
    given = json.dumps({"name": name, "config": to_table(config), "case": case})
    command, environment = [sys.executable, "-c", _SCRIPT], {**os.environ, **_RETURN_FREED}
    found = subprocess.run(command, input=given, capture_output=True, text=True, check=False, env=environment)
    if found.returncode:
        ended = f"its process ended with {found.returncode}, most likely as memory ran out (try --no-memory)"
        raise ChildProcessError((found.stderr.strip().splitlines() or [ended])[-1])
    return int(found.stdout.split()[-1])


def _print_peak() -> None:
    """Print the peak of this process after a few steps of the variant that standard input names."""
    given = json.load(sys.stdin)
    config, case = from_table(BenchConfig, given["config"]), Case(*given["case"])
    torch.set_num_threads(config.run(case).compute.threads or 1)
    work = make_work(given["name"], config, case, torch.device("cpu"))
    for _ in range(_MEMORY_STEPS):
        work.run()
    sys.stdout.write(f"{_high_water()}\n")


def _high_water() -> int:
    """Return the peak of this process in bytes, on Linux alone. There getrusage may return that of the parent."""
    return 1024 * int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
