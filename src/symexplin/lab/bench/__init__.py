"""Measurements of what the map costs (`benchmarks/README.md`): what `symexplin bench` measures, and how."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

import symexplin as sel
from symexplin.lab.config import ComputeConfig, RunConfig, TrainConfig, resolve
from symexplin.lab.maps import LAB_PRESETS, named_map
from symexplin.lab.model import ModelConfig
from symexplin.validation import check_choice, check_whole

__all__ = ["DTYPES", "PARTS", "BenchConfig", "Case", "heads_of", "shapes"]

PARTS = ("map", "optimizer", "step")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_CHOICES: dict[str, tuple[str, ...]] = {"parts": PARTS, "dtypes": tuple(DTYPES)}
_HEAD = 64  # the usual size of an attention head
_DEVICES = ("auto", "cpu", "cuda")  # bench can measure time and memory on these


class Case(NamedTuple):
    """One part at one size, whose variants take turns. Sizes that the part does not have are None."""

    part: str
    dtype: str
    width: int
    depth: int | None = None
    microbatches: int | None = None
    tokens: int | None = None
    shape: tuple[int, int] | None = None

    def __str__(self) -> str:
        size = f"width {self.width}" + ("" if self.depth is None else f", depth {self.depth}")
        if self.tokens is not None:
            size += f", {self.tokens:,} tokens in {self.microbatches}"
        return f"{self.part} {self.dtype}: {size}" + (f", {self.shape[0]}x{self.shape[1]}" if self.shape else "")


def heads_of(width: int) -> int:
    """Return the number of heads of size 64, or of the nearest even size that divides `width`."""
    sizes = [size for size in range(2, width + 1, 2) if width % size == 0]
    return width // min(sizes, key=lambda size: abs(size - _HEAD)) if sizes else 1


def shapes(width: int) -> list[tuple[int, int]]:
    """Return the distinct shapes (outputs, inputs) of the model's curved matrices."""
    hidden = ModelConfig(width, heads=1).hidden
    return list(dict.fromkeys([(width, width), (hidden, width), (width, hidden)]))


@dataclass(frozen=True)
class BenchConfig:
    """What to measure, and how often.

    Args:
        parts: "map" (the map of one weight matrix), "optimizer" (the optimizer step with clipping), "step" (the whole
            training step).
        widths: of the model.
        depths: of the model.
        microbatches: numbers of parts that the tokens of a step are computed in.
        dtypes: of the parameters, "fp32" or "bf16". With "bf16" the module home and its baseline have fp32 parameters
            under autocast.
        tokens: per optimizer step.
        context: tokens per sequence.
        vocab_size: tokens of the vocabulary.
        heads: attention heads. The default gives heads of size 64, or as near to it as the width allows.
        preset: the map, one of the paper's or the lab's.
        map: keys of the map to change, such as beta = 5 or e.k = [50, 8].
        repeats: rounds that count. Each variant has one turn per round.
        warmup: rounds before them that do not count.
        fresh: build each variant anew for each of its turns. Models then need not fit into memory side by side.
        memory: measure peak memory. On a CPU each variant takes a few steps in a process of its own.
        device: "auto" (CUDA if there is one), "cpu", "cuda", "cuda:1".
        threads: threads of the CPU. The default is torch's.
        compile: torch.compile the model.
        recompute: compute each block again in the backward pass instead of keeping its activations.
        loss_chunk: tokens whose logits are held at once in the loss, 0 for all. The default is all unless they take
            more than 256 MiB.
        seed: of weights, tokens and gradients.
    """

    parts: tuple[str, ...] = PARTS
    widths: tuple[int, ...] = (512,)
    depths: tuple[int, ...] = (6,)
    microbatches: tuple[int, ...] = (1,)
    dtypes: tuple[str, ...] = tuple(DTYPES)
    tokens: int = 8192
    context: int = 512
    vocab_size: int = 8192
    heads: int | None = None
    preset: str = field(default="paper", metadata={"choices": LAB_PRESETS})
    map: dict[str, Any] = field(default_factory=dict)
    repeats: int = 10
    warmup: int = 1
    fresh: bool = False
    memory: bool = True
    device: str = "auto"
    threads: int | None = None
    compile: bool = False
    recompute: bool = False
    loss_chunk: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Check every case before the first is measured."""
        for name in ("parts", "dtypes", "widths", "depths", "microbatches"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} must hold at least one entry, and each once, got {values!r}")
            for value in values:
                if name in _CHOICES:
                    check_choice(name, value, _CHOICES[name])
                else:
                    check_whole(name, value)
        for name in ("tokens", "context", "repeats"):
            check_whole(name, getattr(self, name))
        for name in ("warmup", "seed"):
            check_whole(name, getattr(self, name), minimum=0)
        if self.device.partition(":")[0] not in _DEVICES:
            check_choice("device", self.device, _DEVICES)
        for case in self.cases():
            self.curve(case.width)
            self._sized(case)

    def cases(self) -> Iterator[Case]:
        """Yield the cases in the order of measurement."""
        for part, dtype, width in itertools.product(self.parts, self.dtypes, self.widths):
            if part == "map":
                yield from (Case(part, dtype, width, shape=shape) for shape in shapes(width))
            elif part == "optimizer":
                yield from (Case(part, dtype, width, depth) for depth in self.depths)
            else:
                sizes = itertools.product(self.depths, self.microbatches)
                yield from (Case(part, dtype, width, depth, count, self.tokens) for depth, count in sizes)

    def curve(self, width: int) -> sel.SELConfig:
        """Return the map at a width."""
        return named_map(self.preset, self.map, width)

    def _sized(self, case: Case) -> RunConfig:
        """Return the training run whose step the case is. A case without tokens gets one sequence."""
        count, tokens = case.microbatches or 1, case.tokens or self.context
        rows, rest = divmod(tokens, self.context)
        if rest or rows % count:
            raise ValueError(
                f"tokens must be a multiple of context x microbatches = {self.context} x {count}, got {tokens}"
            )
        heads = heads_of(case.width) if self.heads is None else self.heads
        return RunConfig(
            "",
            ModelConfig(case.width, case.depth or 1, heads, self.vocab_size, self.context),
            TrainConfig(batch_size=rows, accumulation=count),
            compute=ComputeConfig(
                self.device, self.threads, "off", self.compile, self.recompute, self.loss_chunk, parallel=None
            ),
        )

    def run(self, case: Case) -> RunConfig:
        """Return the training run whose step the case is, with device, threads and loss_chunk resolved."""
        return resolve(self._sized(case), self.vocab_size)
