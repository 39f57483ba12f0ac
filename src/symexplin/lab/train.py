"""The training loop: the paper's schedule and clipping around any torch optimizer, with a metrics file."""

import functools
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from symexplin.lab.data import BatchLoader, Corpus, eval_batches
from symexplin.lab.evaluate import evaluate
from symexplin.lab.model import Transformer
from symexplin.validation import check_fraction, check_positive, check_whole

__all__ = ["NonFiniteError", "RunResult", "TrainConfig", "lr_factor", "train"]


class NonFiniteError(ArithmeticError):
    """A loss or a gradient that is not finite; the message names the step and the layer."""


@dataclass(frozen=True)
class TrainConfig:
    """How long, on what and how fast to train; the defaults of AdamW are the paper's (section 4.1).

    Args:
        steps: optimizer steps.
        batch_size: sequences an optimizer step, in all.
        accumulation: parts that a batch is computed in; divides `batch_size`.
        lr: peak learning rate.
        warmup_steps: steps of linear warm-up; the linear decay follows.
        floor: fraction of `lr` that the decay ends at.
        weight_decay, betas, max_grad_norm: of AdamW and its clipping.
        eval_every: steps between evaluations; the start and the end are always evaluated.
        eval_batches: batches an evaluation.
        seed: of the order of the data.
        autocast: compute in bfloat16; on CPUs it pays only with AMX.

    Raises:
        ValueError: a value out of range.

    >>> TrainConfig(batch_size=16, accumulation=3)
    Traceback (most recent call last):
    ValueError: accumulation must divide batch_size = 16, got 3
    """

    steps: int = 300
    batch_size: int = 16
    accumulation: int = 1
    lr: float = 3e-3
    warmup_steps: int = 30
    floor: float = 0.0
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    max_grad_norm: float = 1.0
    eval_every: int = 25
    eval_batches: int = 8
    seed: int = 0
    autocast: bool = False

    def __post_init__(self) -> None:
        """Check every field."""
        for name in ("steps", "batch_size", "accumulation", "eval_every", "eval_batches"):
            check_whole(name, getattr(self, name))
        for name in ("warmup_steps", "seed"):
            check_whole(name, getattr(self, name), minimum=0)
        check_positive("lr", self.lr)
        check_positive("max_grad_norm", self.max_grad_norm)
        check_fraction("floor", self.floor)
        check_fraction("weight_decay", self.weight_decay)
        for beta in self.betas:
            check_fraction("betas", beta)
        if self.batch_size % self.accumulation:
            raise ValueError(f"accumulation must divide batch_size = {self.batch_size}, got {self.accumulation}")


@dataclass(frozen=True)
class RunResult:
    """What a finished run leaves: its evaluations (step, nats a token), and its pace without evaluations."""

    evals: list[tuple[int, float]]
    seconds: float
    tokens_per_second: float

    @property
    def final_loss(self) -> float:
        """Evaluation loss after the last step, nats a token."""
        return self.evals[-1][1]


def lr_factor(step: int, config: TrainConfig) -> float:
    """Return the fraction of the peak learning rate for the update after `step` others (section 4.1).

    (step + 1)/warmup while warming up, 1 right after it, then linear towards `floor` at `steps`.

    >>> config = TrainConfig(steps=12, warmup_steps=2)
    >>> [lr_factor(step, config) for step in (0, 1, 2, 7)]
    [0.5, 1.0, 1.0, 0.5]
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(config.steps - config.warmup_steps, 1)
    return 1.0 - (1.0 - config.floor) * min(progress, 1.0)


class _Metrics:
    """A file with one JSON object a line, written line by line: it can be read at any moment."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1, encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, **record: object) -> None:
        self._file.write(json.dumps(record, allow_nan=False) + "\n")


def train(
    model: Transformer,
    corpus: Corpus,
    config: TrainConfig,
    optimizer: torch.optim.Optimizer,
    *,
    out_dir: str | Path,
    clip: bool,
    progress: bool = True,
    label: str = "train",
) -> RunResult:
    """Train `model` in place and return its evaluations; `metrics.jsonl` in `out_dir` has every step.

    Each line of that file is the {"step", "loss", "lr", "grad_norm", "tokens", "seconds"} of an update (counted
    from 1), the {"step", "eval_loss", "seconds"} of an evaluation after it, or the {"step", "error"} that ended
    the run.

    Args:
        model: trained on the device where it is.
        corpus: its training side gives the batches, its validation side the evaluations.
        config: the schedule; the learning rates it scales are those of the optimizer's groups.
        optimizer: over the parameters of `model`.
        out_dir: folder of the run, created if missing.
        clip: clip the gradients to `config.max_grad_norm` here; False for an optimizer that does so itself.
        progress: show a bar on a terminal.
        label: name of the run on the bar.

    Raises:
        NonFiniteError: the loss or a gradient is not finite; the step is not taken.
        ValueError: a corpus shorter than one sequence.

    >>> import tempfile
    >>> from symexplin.lab.model import ModelConfig
    >>> model = Transformer(ModelConfig(width=16, depth=1, heads=2, context=8))
    >>> adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    >>> config = TrainConfig(steps=2, batch_size=2, eval_every=1, eval_batches=1)
    >>> corpus = Corpus.from_documents([bytes(range(1, 200))])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = train(model, corpus, config, adamw, out_dir=folder, clip=True)
    >>> [step for step, _ in result.evals]
    [0, 1, 2]
    """
    context = model.config.context
    loader = BatchLoader(corpus.train, context, config.batch_size, config.seed)
    held_out = eval_batches(corpus.valid, context, config.batch_size, config.eval_batches)
    scheduler = LambdaLR(optimizer, functools.partial(lr_factor, config=config))
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    evals: list[tuple[int, float]] = []
    seconds = 0.0
    # disable=None: no bar where standard error is not a terminal.
    bar = tqdm(total=config.steps, desc=label, unit="step", leave=False, disable=None if progress else True)
    with _Metrics(out_dir / "metrics.jsonl") as metrics, bar:
        model.train()
        for step in range(config.steps + 1):
            try:
                if step > 0:
                    start = time.perf_counter()
                    record = _update(model, loader.batch(step - 1), config, optimizer, clip)
                    scheduler.step()
                    seconds += time.perf_counter() - start
                    tokens = step * config.batch_size * context
                    metrics.write(step=step, **record, tokens=tokens, seconds=round(seconds, 3))
                    shown = {"loss": f"{record['loss']:.3f}", "tokens/s": f"{tokens / seconds:,.0f}"}
                    bar.set_postfix(shown, refresh=False)
                    bar.update()
                if step % config.eval_every == 0 or step == config.steps:
                    loss = evaluate(model, held_out, autocast=config.autocast)
                    _check_finite(model, loss=loss)
                    evals.append((step, loss))
                    metrics.write(step=step, eval_loss=loss, seconds=round(seconds, 3))
            except NonFiniteError as error:
                metrics.write(step=step, error=str(error))
                raise NonFiniteError(f"step {step}: {error}") from None
    return RunResult(evals, seconds, config.steps * config.batch_size * context / seconds)


def _update(
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    config: TrainConfig,
    optimizer: torch.optim.Optimizer,
    clip: bool,
) -> dict[str, float]:
    """Take one optimizer step; return the loss, the learning rate and the norm of the unclipped gradient."""
    device = next(model.parameters()).device
    optimizer.zero_grad(set_to_none=True)
    loss = 0.0
    for inputs, targets in zip(*(part.chunk(config.accumulation) for part in batch), strict=True):
        with torch.autocast(device.type, torch.bfloat16, enabled=config.autocast):
            part: Tensor = model(inputs.to(device), targets.to(device)) / config.accumulation
        part.backward()  # type: ignore[no-untyped-call]
        loss += float(part.detach())
    parameters = list(model.parameters())
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    _check_finite(model, loss=loss, gradient_norm=float(norm))
    if clip:
        nn.utils.clip_grads_with_norm_(parameters, config.max_grad_norm, norm)
    optimizer.step()
    # An optimizer that clips itself knows the norm it clipped: that of raw weights and scales.
    norm = getattr(optimizer, "grad_norm", norm)
    return {"loss": loss, "lr": float(optimizer.param_groups[0]["lr"]), "grad_norm": float(norm)}


def _check_finite(model: nn.Module, **values: float) -> None:
    """Raise NonFiniteError if any of `values` is not finite, naming the first layer to blame."""
    bad = [f"{name.replace('_', ' ')} is {value}" for name, value in values.items() if not math.isfinite(value)]
    if not bad:
        return
    named = list(model.named_parameters())
    for what, tensors in (
        ("weight", [p.detach() for _, p in named]),
        ("gradient", [p.grad for _, p in named]),
    ):
        for (name, _), tensor in zip(named, tensors, strict=True):
            if tensor is not None and not tensor.isfinite().all():
                raise NonFiniteError(f"{', '.join(bad)}; first layer with a non-finite {what}: {name}")
    raise NonFiniteError(f"{', '.join(bad)}; all weights and gradients are finite")
