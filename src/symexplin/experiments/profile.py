"""Table 11 of the paper for the machine at hand: the time of the parts of a training step."""

import statistics
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.benchmark import timer  # which waits for a GPU

from symexplin.experiments.tables import Panel
from symexplin.lab.build import Built, build, clear_gradients
from symexplin.lab.config import RunConfig, resolve
from symexplin.lab.files import format_columns
from symexplin.lab.provenance import provenance
from symexplin.optim import RawSpaceOptimizer

__all__ = ["profile"]

_VOCABULARY = 8192
_ROUNDS, _WARM_UP = 7, 2
_HEADING = ("milliseconds", "forward", "backward", "optimizer", "step overhead")
# On an H200. The step overhead is that of the paper's method over AdamW.
_PAPER = (
    ("paper, 1024x12: AdamW", "67", "214", "6", ""),
    ("paper, 1024x12: SEL", "68", "209", "15", "+1.7%"),
    ("paper, 3072x36: AdamW", "265", "895", "46", ""),
    ("paper, 3072x36: SEL", "271", "940", "62", "+5.5%"),
)


def profile(panel: Panel) -> Iterator[str]:
    """Yield the lines of the table for a panel: medians over rounds in which the variants take turns."""
    steps = {variant: _Step(panel.config.example(variant)) for variant in panel.config.compare.variants}
    times: dict[str, list[tuple[float, ...]]] = {variant: [] for variant in steps}
    for number in range(_WARM_UP + _ROUNDS):
        for variant, step in steps.items():
            taken = step.take()
            if number >= _WARM_UP:
                times[variant].append(taken)
    medians = {name: [statistics.median(part) for part in zip(*each, strict=True)] for name, each in times.items()}
    base = sum(next(iter(medians.values())))
    rows = [
        (name, *(f"{1e3 * part:,.1f}" for part in parts), f"{100.0 * (sum(parts) / base - 1.0):+.1f}%")
        for name, parts in medians.items()
    ]
    origin = provenance(next(iter(steps.values())).config.compute.device)
    yield f"{panel.name}: {origin['processor']}, threads: {origin['threads']}, torch {origin['torch']}"
    yield format_columns([_HEADING, *rows, *_PAPER])


class _Step:
    """A training step of a run, on random tokens."""

    def __init__(self, config: RunConfig) -> None:
        self.config = resolve(config, _VOCABULARY)
        self._built: Built = build(self.config)
        self._autocast = self.config.compute.autocast == "on"
        self._device = next(self._built.model.parameters()).device
        train, context = self.config.train, self.config.model.context
        shape = (train.batch_size // train.accumulation, context)
        generator = torch.Generator("cpu").manual_seed(0)
        tokens = (
            torch.randint(_VOCABULARY, shape, generator=generator, dtype=torch.int64, device="cpu") for _ in range(2)
        )
        self._inputs = [each.to(self._device) for each in tokens]

    def take(self) -> tuple[float, ...]:
        """Return the seconds of forward, backward and optimizer of one microbatch."""
        model, optimizer = self._built
        train, found = self.config.train, list[Tensor]()
        clear_gradients((p for group in optimizer.param_groups for p in group["params"]), self.config)

        def forward() -> None:
            with warnings.catch_warnings(), torch.autocast(self._device.type, torch.bfloat16, enabled=self._autocast):
                warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")  # of norms
                found.append(model(*self._inputs))

        def update() -> None:
            if not isinstance(optimizer, RawSpaceOptimizer):  # which clips itself
                torch.nn.utils.clip_grad_norm_(model.parameters(), train.max_grad_norm)
            optimizer.step()

        return tuple(map(_timed, (forward, lambda: found[0].backward(), update)))  # type: ignore[no-untyped-call]


def _timed(part: Callable[[], Any]) -> float:
    began = timer()
    part()
    return float(timer() - began)
