"""Measurements of what the map costs (`benchmarks/README.md`): what `symexplin bench` measures, and how.

The classes need no torch, so that the help comes at once.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from symexplin.lab.config import COMPILE_MODES, ComputeConfig, ModelConfig, RunConfig, TrainConfig, resolve
from symexplin.lab.maps import named_map
from symexplin.presets import PRESETS
from symexplin.validation import check_choice, check_positive, check_whole

__all__ = ["DTYPES", "PARTS", "RESULTS", "BenchConfig", "Case"]

PARTS, DTYPES = ("optimizer", "step"), ("fp32", "bf16")
RESULTS = "results.csv"
_CHOICES = {"parts": PARTS, "dtypes": DTYPES}
_HEAD = 64  # the usual size of an attention head, here the least
_DEVICES = ("auto", "cpu", "cuda")  # bench can measure time and memory on these


class Case(NamedTuple):
    """One part at one size, whose variants take turns; the optimizer's step has neither microbatches nor tokens."""

    part: str
    dtype: str
    width: int
    depth: int
    microbatches: int | None = None
    tokens: int | None = None

    def __str__(self) -> str:
        size = f"{self.part} {self.dtype}: width {self.width}, depth {self.depth}"
        return size if self.tokens is None else f"{size}, {self.tokens:,} tokens in {self.microbatches}"


@dataclass(frozen=True)
class BenchConfig:
    """What to measure, and how often.

    Args:
        parts: "optimizer" (the optimizer step with clipping), "step" (the whole training step).
        widths: of the model.
        depths: of the model.
        microbatches: numbers of parts that the tokens of a step are computed in.
        dtypes: of the parameters, "fp32" or "bf16". With "bf16" the module home and its baseline have fp32 parameters
            under autocast.
        tokens: per optimizer step.
        context: tokens per sequence.
        vocab_size: tokens of the vocabulary.
        preset: the map, one of the paper's or the lab's.
        map: keys of the map to change, such as beta = 5 or e.k = [50, 8].
        repeats: rounds that count. Each variant has one turn per round.
        warmup: rounds before them that do not count.
        fresh: build each variant anew for each of its turns. Models then need not fit into memory side by side.
        memory: measure peak memory. On a CPU each variant takes a few steps in a process of its own.
        device: "auto" (CUDA if there is one), "cpu", "cuda", "cuda:1".
        threads: threads of the CPU. The default is torch's.
        compile: torch.compile the model.
        compile_mode: mode of torch.compile: "default", "reduce-overhead" (CUDA graphs), "max-autotune" or
            "max-autotune-no-cudagraphs".
        recompute: compute each block again in the backward pass instead of keeping its activations.
        step_speedup: the baseline's steps over those of a curved model to the same loss, as comparisons report it.
            Given, rows of curved variants have the speedup in time: step_speedup over the ratio of a step.
    """

    parts: tuple[str, ...] = PARTS
    widths: tuple[int, ...] = (512,)
    depths: tuple[int, ...] = (6,)
    microbatches: tuple[int, ...] = (1,)
    dtypes: tuple[str, ...] = DTYPES
    tokens: int = 8192
    context: int = 512
    vocab_size: int = 8192
    preset: str = field(default="paper", metadata={"choices": tuple(PRESETS)})
    map: dict[str, Any] = field(default_factory=dict)
    repeats: int = 10
    warmup: int = 1
    fresh: bool = False
    memory: bool = True
    device: str = "auto"
    threads: int | None = None
    compile: bool = False
    compile_mode: str = field(default="default", metadata={"choices": COMPILE_MODES})
    recompute: bool = False
    step_speedup: float | None = None

    def __post_init__(self) -> None:
        """Check every case before the first is measured."""
        for name in ("parts", "dtypes", "widths", "depths", "microbatches"):
            values, known = getattr(self, name), _CHOICES.get(name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} must hold at least one entry, and each once, got {values!r}")
            for value in values:
                check_choice(name, value, known) if known else check_whole(name, value)
        for name, least in (("tokens", 1), ("context", 1), ("repeats", 1), ("warmup", 0)):
            check_whole(name, getattr(self, name), minimum=least)
        if self.step_speedup is not None:
            check_positive("step_speedup", self.step_speedup)
        if self.device.partition(":")[0] not in _DEVICES:
            check_choice("device", self.device, _DEVICES)
        for case in self.cases():
            named_map(self.preset, self.map)
            self._sized(case)

    def cases(self) -> Iterator[Case]:
        """Yield the cases in the order of measurement."""
        for part, dtype, width, depth in itertools.product(self.parts, self.dtypes, self.widths, self.depths):
            if part == "optimizer":
                yield Case(part, dtype, width, depth)
            else:
                yield from (Case(part, dtype, width, depth, count, self.tokens) for count in self.microbatches)

    def _sized(self, case: Case) -> RunConfig:
        """Return the training run whose step the case is. A case without tokens gets one sequence."""
        count = case.microbatches or 1
        rows, rest = divmod(case.tokens or self.context, self.context)
        if rest or rows % count:
            wanted = f"a multiple of context x microbatches = {self.context} x {count}"
            raise ValueError(f"tokens must be {wanted}, got {case.tokens}")
        most = max(1, case.width // _HEAD)
        heads = next((heads for heads in range(most, 1, -1) if case.width % (2 * heads) == 0), 1)
        model = ModelConfig(case.width, case.depth, heads, self.vocab_size, self.context)
        compute = ComputeConfig(self.device, self.threads, "off", self.compile, self.compile_mode, self.recompute)
        return RunConfig("", model, TrainConfig(batch_size=rows, accumulation=count), compute=compute)

    def run(self, case: Case) -> RunConfig:
        """Return the training run whose step the case is, with device and threads resolved."""
        return resolve(self._sized(case), self.vocab_size)
