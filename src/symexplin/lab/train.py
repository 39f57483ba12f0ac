"""The training loop: the paper's schedule and clipping around either home of the map, or plain AdamW."""

import contextlib
import copy
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

import symexplin as sel
from symexplin.lab.build import build, clear_gradients
from symexplin.lab.checkpoint import State
from symexplin.lab.config import RunConfig, TrainConfig
from symexplin.lab.data.batches import Batch, BatchLoader, Corpus, eval_batches
from symexplin.lab.evaluate import evaluate
from symexplin.lab.maps import map_of
from symexplin.lab.model import Transformer
from symexplin.lab.parallel import ALONE, Ranks
from symexplin.lab.weights import (
    MODEL,
    OPTIMIZER,
    load_optimizer,
    load_weights,
    save_model,
    split_optimizer,
    write_tensors,
)
from symexplin.optim.shard import is_dtensor, local, whole

__all__ = ["NonFiniteError", "Trainer", "lr_factor"]


class NonFiniteError(FloatingPointError):
    """A loss or a gradient is not finite. The message names the step and the layer."""


def lr_factor(step: int, config: TrainConfig) -> float:
    """Return the fraction of the peak learning rate for the update after `step` others (section 5.1).

    (step + 1)/warmup while warming up, 1 right after it, then linearly to `floor` at the end of the schedule.
    """
    warmup = config.warmup_steps or 0
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(config.schedule_steps - warmup, 1)
    return 1.0 - (1.0 - config.floor) * min(progress, 1.0)


class Trainer:
    """A run in memory: the model, its optimizer, the data, and `step`, the number of steps taken.

    Batches, learning rates and evaluations are functions of the configuration and the step, so the state to keep is
    that of the model and of the optimizer alone. The configuration is complete (:func:`symexplin.lab.config.resolve`).
    Several processes compute each batch together, and all call every method.
    """

    def __init__(self, config: RunConfig, corpus: Corpus, ranks: Ranks = ALONE) -> None:
        context, train = config.model.context, config.train
        self.config, self._ranks = config, ranks
        with ranks.together():  # an error must reach all processes before the next collective operation
            rows = train.batch_size // train.accumulation
            self._held_out = eval_batches(corpus.valid, context, rows, train.eval_batches * train.accumulation)
            self.model, self.optimizer = build(config, ranks)
        self._device = next(self.model.parameters()).device
        self._loader = BatchLoader(corpus.train, context, train.batch_size, train.seed)
        self._next: tuple[int, list[Batch]] = (-1, [])
        warnings.filterwarnings("ignore", message=r"step \d+: .* is not finite")  # the loop ends with an error
        self._autocast = config.compute.autocast == "on"
        if self._autocast:  # torch tells of the norms, whose weights stay in float32
            warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
        self._peaks = [group["lr"] for group in self.optimizer.param_groups]
        self._sharded = any(is_dtensor(parameter) for parameter in self.model.parameters())
        self._forward: nn.Module = self.model
        if config.compute.compile and self._sharded:
            for block in self.model.blocks:
                block.compile(mode=config.compute.compile_mode)
        elif config.compute.compile:
            self._forward = torch.compile(self.model, mode=config.compute.compile_mode)  # type: ignore[assignment]
        self._trained = self._forward
        if ranks.size > 1 and not self._sharded:
            with warnings.catch_warnings():  # broadcast_buffers has a new name, but not in every supported torch
                warnings.simplefilter("ignore", FutureWarning)
                self._trained = nn.parallel.DistributedDataParallel(
                    self._forward, broadcast_buffers=False, gradient_as_bucket_view=True
                )
        self.step = 0

    def update(self) -> dict[str, float]:
        """Take one optimizer step and return its loss, learning rate and norm of the unclipped gradient.

        It waits for the device once, at the end.
        """
        train = self.config.train
        for group, peak in zip(self.optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * lr_factor(self.step, train)
        clear_gradients((p for group in self.optimizer.param_groups for p in group["params"]), self.config)
        losses, norm = self._backward(), self._step()
        self._next = self.step + 1, self._load(self.step + 1)  # while a GPU computes
        values = torch.stack([*losses, norm.to(losses[0].device, torch.result_type(losses[0], norm))]).tolist()
        loss = sum(self._ranks.gather(sum(values[:-1]))) / self._ranks.size
        self._check_finite(self.step + 1, loss=loss, gradient_norm=values[-1])
        self.step += 1
        return {"loss": loss, "lr": float(self.optimizer.param_groups[0]["lr"]), "grad_norm": values[-1]}

    def _load(self, step: int) -> list[Batch]:
        """Return the microbatches of a step, this process's rows of each; a GPU copies pinned memory directly."""
        size = self._loader.batch_size // self.config.train.accumulation
        rows, batches = self._ranks.rows(size), []
        for start in range(0, self._loader.batch_size, size):
            batch = self._loader.batch(step, slice(start + rows.start, start + rows.stop))
            batches.append((batch[0].pin_memory(), batch[1].pin_memory()) if self._device.type == "cuda" else batch)
        return batches

    def _step(self) -> Tensor:
        """Clip the gradients, take the optimizer's step, and return their norm."""
        if isinstance(self.optimizer, sel.RawSpaceOptimizer):  # which clips raw gradients itself
            self.optimizer.step()
            assert self.optimizer.grad_norm is not None
            return whole(self.optimizer.grad_norm)
        parameters = list(self.model.parameters())
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        nn.utils.clip_grads_with_norm_(parameters, self.config.train.max_grad_norm, norm)
        self.optimizer.step()
        return whole(norm)

    def _backward(self) -> list[Tensor]:
        """Compute the gradients of the next batch, this process's rows of each microbatch, and return their losses."""
        device, losses = self._device, []
        ready, batches = self._next
        batches = batches if ready == self.step else self._load(self.step)
        for place, batch in enumerate(batches, start=1):
            # The last part exchanges whole gradients; sharded ones never wait whole for it.
            waits = place < len(batches) and isinstance(self._trained, nn.parallel.DistributedDataParallel)
            with self._trained.no_sync() if waits else contextlib.nullcontext():  # type: ignore[operator]
                with torch.autocast(device.type, torch.bfloat16, enabled=self._autocast):
                    inputs = (tokens.to(device, non_blocking=tokens.is_pinned()) for tokens in batch)
                    part: Tensor = self._trained(*inputs) / len(batches)
                part.backward()  # type: ignore[no-untyped-call]
            losses.append(part.detach())
        return losses

    def evaluate(self) -> float:
        """Return the mean loss on the held-out batches, in nats per token."""
        loss = evaluate(self._forward, self._held_out, autocast=self._autocast, ranks=self._ranks)
        self._check_finite(self.step, loss=loss)
        return loss

    def stats(self) -> dict[str, float]:
        """Return :func:`symexplin.stats`; empty for ordinary weights, and before the first step of SELAdamW."""
        if self.config.sel.home == "none":
            return {}
        statistics = sel.stats(self.model, self.optimizer)
        self._check_finite(self.step, **statistics)
        return statistics

    def plain_model(self) -> Transformer:
        """Return the whole model with curved layers folded, for the first process; others get the model as it is."""
        model = self._whole_model()
        if self.config.sel.home != "module" or not self._ranks.first:
            return model
        return cast(Transformer, sel.fold(copy.deepcopy(model)))

    def writer(self) -> Callable[[Path], State]:
        """Return a function that writes model and optimizer into a folder and returns values for a checkpoint's state.

        All processes call this, since it gathers what is sharded; the first one calls the function.
        """
        state, rest = split_optimizer(self.optimizer)
        model, tensors = self._whole_model(), self._gathered(state)

        def write(folder: Path) -> State:
            save_model(model, folder / MODEL, map_of(self.config.sel, self.config.model.width))
            write_tensors(folder / OPTIMIZER, tensors)
            return {"optimizer": rest}

        return write

    def _whole_model(self) -> Transformer:
        """Return the model; if it is sharded, a whole copy on the CPU in the first process."""
        if not self._sharded:
            return self.model
        weights = self._gathered(self.model.state_dict())
        if not self._ranks.first:
            return self.model
        with torch.device("meta"):
            model = Transformer(self.config.model)
        if self.config.sel.home == "module":
            sel.convert(model, map_of(self.config.sel, self.config.model.width))
        model.load_state_dict(weights, assign=True)
        return model

    def _gathered(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return whole tensors on the CPU for the first process, gathered one by one; others get none."""
        gathered = {}
        for name, tensor in tensors.items():
            complete = whole(tensor)
            if self._ranks.first:
                gathered[name] = complete.cpu()
        return gathered

    def load(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`writer` wrote."""
        with self._ranks.together():
            load_weights(self.model, folder)
            load_optimizer(self.optimizer, folder, state["optimizer"])
        self.step = state["step"]
        if self.step and self._trained is not self._forward:
            # DDP reorders its buckets after the first backward pass, which changes the rounding of later sums.
            self._backward()
            self.optimizer.zero_grad(set_to_none=True)

    def _check_finite(self, step: int, **values: float) -> None:
        """Raise NonFiniteError if any of `values` is not finite, with the layer where that began."""
        bad = [f"{name.replace('_', ' ')} is {value}" for name, value in values.items() if not math.isfinite(value)]
        if bad:
            raise NonFiniteError(f"step {step}: {', '.join(bad)}; {self._culprit()}")

    def _culprit(self) -> str:
        """Return the layer to blame: the backward pass carries what is not finite from it to all layers before it."""
        named = list(self.model.named_parameters())
        gradients = self._not_finite((name, p.grad) for name, p in named if p.grad is not None)
        if gradients and gradients[-1] != named[-1][0]:
            return f"last layer with a non-finite gradient: {gradients[-1]}"
        if gradients:
            return "all layers have a non-finite gradient"
        weights = self._not_finite((name, parameter.detach()) for name, parameter in named)
        if weights:
            return f"first layer with a non-finite weight: {weights[0]}"
        return "all weights and gradients are finite"

    def _not_finite(self, tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Return the names of tensors that are not finite in any process, in their order."""
        own = [(name, bool(local(tensor).isfinite().all())) for name, tensor in tensors]
        every = self._ranks.gather([is_finite for _, is_finite in own])
        return [name for (name, _), *flags in zip(own, *every, strict=True) if not all(flags)]
