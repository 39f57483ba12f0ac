"""The training loop: the paper's schedule and clipping around either home of the map, or plain AdamW."""

import copy
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

import symexplin as sel
from symexplin.lab.build import build
from symexplin.lab.checkpoint import load_optimizer, save_optimizer
from symexplin.lab.config import RunConfig, TrainConfig
from symexplin.lab.evaluate import evaluate
from symexplin.lab.maps import map_of
from symexplin.lab.model import Transformer
from symexplin.lab.text.corpus import BatchLoader, Corpus, eval_batches
from symexplin.lab.weights.files import MAP_KEY, MODEL, load_weights, save_model

__all__ = ["NonFiniteError", "Trainer", "lr_factor"]


class NonFiniteError(ArithmeticError):
    """A loss or a gradient that is not finite; the message names the step and the layer."""


def lr_factor(step: int, config: TrainConfig) -> float:
    """Return the fraction of the peak learning rate for the update after `step` others (section 4.1).

    (step + 1)/warmup while warming up, 1 right after it, then linear towards `floor` at `steps`.

    >>> config = TrainConfig(steps=12, warmup_steps=2)
    >>> [lr_factor(step, config) for step in (0, 1, 2, 7)]
    [0.5, 1.0, 1.0, 0.5]
    """
    warmup = config.warmup_steps or 0
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(config.steps - warmup, 1)
    return 1.0 - (1.0 - config.floor) * min(progress, 1.0)


class Trainer:
    """A run in memory: the model, its optimizer, the data, and the number of `step`s taken.

    Batches, learning rates and evaluations are functions of the configuration and the step, so the state to keep is
    that of the model and of the optimizer alone.

    Args:
        config: complete (:func:`symexplin.lab.config.resolve`).
        corpus: its training side gives the batches, its validation side the evaluations.

    Raises:
        ValueError: a corpus shorter than one sequence.

    >>> from symexplin.lab.model import ModelConfig
    >>> config = RunConfig("", ModelConfig(width=16, depth=1, heads=2, context=8))
    >>> trainer = Trainer(config, Corpus.from_documents([bytes(range(1, 200))]))
    >>> sorted(trainer.update()), trainer.step
    (['grad_norm', 'loss', 'lr'], 1)
    """

    def __init__(self, config: RunConfig, corpus: Corpus) -> None:
        context, train = config.model.context, config.train
        self.config = config
        self._loader = BatchLoader(corpus.train, context, train.batch_size, train.seed)
        self._held_out = eval_batches(
            corpus.valid, context, train.batch_size // train.accumulation, train.eval_batches * train.accumulation
        )
        self.model, self.optimizer, self._clip = build(config)
        if self._autocast:  # torch tells of the norms, whose weights stay in float32
            warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
        self._peaks = [group["lr"] for group in self.optimizer.param_groups]
        self._forward: nn.Module = self.model
        if config.compute.compile:
            self._forward = torch.compile(self.model)  # type: ignore[assignment]
        self.step = 0

    @property
    def _autocast(self) -> bool:
        return self.config.compute.autocast == "on"

    def update(self) -> dict[str, float]:
        """Take one optimizer step and return its loss, learning rate and norm of the unclipped gradient.

        Raises:
            NonFiniteError: the loss or a gradient is not finite; the step is not taken.
        """
        train = self.config.train
        for group, peak in zip(self.optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * lr_factor(self.step, train)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._backward(self._loader.batch(self.step))
        parameters = list(self.model.parameters())
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        self._check_finite(self.step + 1, loss=loss, gradient_norm=float(norm))
        if self._clip:
            nn.utils.clip_grads_with_norm_(parameters, train.max_grad_norm, norm)
        self.optimizer.step()
        self.step += 1
        # An optimizer that clips itself knows the norm it clipped: that of raw weights and scales.
        norm = getattr(self.optimizer, "grad_norm", norm)
        return {"loss": loss, "lr": float(self.optimizer.param_groups[0]["lr"]), "grad_norm": float(norm)}

    def _backward(self, batch: tuple[Tensor, Tensor]) -> float:
        device, accumulation = next(self.model.parameters()).device, self.config.train.accumulation
        loss = 0.0
        for inputs, targets in zip(*(part.chunk(accumulation) for part in batch), strict=True):
            with torch.autocast(device.type, torch.bfloat16, enabled=self._autocast):
                part: Tensor = self._forward(inputs.to(device), targets.to(device)) / accumulation
            part.backward()  # type: ignore[no-untyped-call]
            loss += float(part.detach())
        return loss

    def evaluate(self) -> float:
        """Return the mean loss on the held-out batches, nats a token.

        Raises:
            NonFiniteError: it is not finite.
        """
        loss = evaluate(self._forward, self._held_out, autocast=self._autocast)
        self._check_finite(self.step, loss=loss)
        return loss

    def stats(self) -> dict[str, float]:
        """Return :func:`symexplin.stats`; empty for ordinary weights, and before the first step of SELAdamW.

        Raises:
            NonFiniteError: a number that is not finite.
        """
        if self.config.sel.home == "none":
            return {}
        found = sel.stats(self.model, self.optimizer)
        self._check_finite(self.step, **found)
        return found

    def plain_model(self) -> Transformer:
        """Return the model, with curved layers folded in a copy."""
        if self.config.sel.home != "module":
            return self.model
        return cast(Transformer, sel.fold(copy.deepcopy(self.model)))

    def save(self, folder: Path) -> dict[str, Any]:
        """Write model and optimizer into `folder` and return the plain values that belong to them."""
        curve = map_of(self.config.sel, self.config.model.width)
        curved = {MAP_KEY: curve.to_json()} if curve and self.config.sel.home == "module" else {}
        save_model(self.model, folder / MODEL, curved)
        return {"optimizer": save_optimizer(self.optimizer, folder)}

    def load(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`save` wrote."""
        load_weights(self.model, folder / MODEL)
        load_optimizer(self.optimizer, folder, state["optimizer"])
        self.step = state["step"]

    def _check_finite(self, step: int, **values: float) -> None:
        """Raise NonFiniteError if any of `values` is not finite, naming the first layer to blame."""
        bad = [f"{name.replace('_', ' ')} is {value}" for name, value in values.items() if not math.isfinite(value)]
        if bad:
            raise NonFiniteError(f"step {step}: {', '.join(bad)}; {_culprit(self.model)}")


def _culprit(model: nn.Module) -> str:
    for what in ("weight", "gradient"):
        for name, parameter in model.named_parameters():
            tensor = parameter.detach() if what == "weight" else parameter.grad
            if tensor is not None and not tensor.isfinite().all():
                return f"first layer with a non-finite {what}: {name}"
    return "all weights and gradients are finite"
