"""What is timed: one call of each variant of a case, with what must be put right before it, untimed."""

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from symexplin.coordinates import Coordinates
from symexplin.lab.bench.config import DTYPES, BenchConfig, Case
from symexplin.lab.bench.variants import build_variant, fill_gradients
from symexplin.lab.model import ModelConfig
from symexplin.linear import SELLinear

__all__ = ["PHASES", "Marks", "Work", "make_work", "shapes"]

PHASES = ("forward", "backward", "optimizer")  # of a whole step


class Marks:
    """Where within a call its time goes: the work calls `end(phase)`, which whoever times it sets."""

    end: Callable[[str], object] = staticmethod(lambda _: None)


class Work(NamedTuple):
    """`run` is timed; `prepare` comes before it and is not; `run` says at `marks` when a phase ends, if it has any."""

    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    marks: Marks | None = None


def shapes(width: int) -> list[tuple[int, int]]:
    """Return the distinct shapes (outputs, inputs) of the model's curved matrices.

    >>> shapes(512)
    [(512, 512), (1344, 512), (512, 1344)]
    """
    hidden = ModelConfig(width, heads=1).hidden
    return list(dict.fromkeys([(width, width), (hidden, width), (width, hidden)]))


def make_work(
    name: str, config: BenchConfig, case: Case, device: torch.device, shape: tuple[int, int] | None = None
) -> Work:
    """Return the work of a variant, on a fresh model; of the map alone on a fresh matrix of `shape`."""
    if shape is not None:
        return _map(name, config, case, device, shape)
    return _optimizer(name, config, case, device) if case.part == "optimizer" else _step(name, config, case, device)


def _map(name: str, config: BenchConfig, case: Case, device: torch.device, shape: tuple[int, int]) -> Work:
    """Return the effective weight, its pullback, or to compare one fused AdamW step on the same matrix, all fp32.

    Scales are packed each time, as the module does it; in bf16 the effective weight and its gradient are of that dtype.
    """
    torch.manual_seed(config.seed)
    rows, columns = shape
    layer = SELLinear(columns, rows, bias=False, device=device, config=config.curve(case.width))
    raw, dtype = layer.get_parameter("raw_weight"), DTYPES[case.dtype]
    if name == "adamw":
        optimizer = torch.optim.AdamW([raw], fused=True)
        return Work(optimizer.step, lambda: fill_gradients([raw]))
    grad = torch.rand(shape, device=device, dtype=dtype)

    @torch.no_grad()
    def run() -> object:
        coordinates = Coordinates(layer.weight_layout, *layer.parts())
        return coordinates.effective(dtype) if name == "forward" else coordinates.pullback(grad)

    return Work(run)


def _optimizer(name: str, config: BenchConfig, case: Case, device: torch.device) -> Work:
    """Return the optimizer step, clipping included, from gradients that torch's clipping has not yet scaled."""
    model, step, _ = build_variant(name, config, case, device)
    parameters = list(model.parameters())
    return Work(step, lambda: fill_gradients(parameters))


def _step(name: str, config: BenchConfig, case: Case, device: torch.device) -> Work:
    """Return the whole training step on random tokens: forward and backward over the microbatches, the optimizer."""
    assert case.tokens is not None
    assert case.microbatches is not None
    model, step, autocast = build_variant(name, config, case, device)
    if autocast:  # torch tells of the norms, whose weights stay in float32
        warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    forward: nn.Module = torch.compile(model) if config.compile else model  # type: ignore[assignment]
    size = (case.microbatches, case.tokens // case.microbatches // config.context, config.context + 1)
    tokens = torch.randint(config.vocab_size, size, device=device)
    marks = Marks()

    def run() -> None:
        model.zero_grad(set_to_none=True)
        for part in tokens:
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                loss: Tensor = forward(part[:, :-1], part[:, 1:]) / case.microbatches
            marks.end("forward")
            loss.backward()  # type: ignore[no-untyped-call]
            marks.end("backward")
        step()
        marks.end("optimizer")

    return Work(run, marks=marks)
