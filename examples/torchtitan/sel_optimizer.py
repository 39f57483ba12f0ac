"""SELAdamW as torchtitan's optimizer: a container for its trainer's configuration (written for torchtitan 0.3.0).

    config = llama3_debugmodel()            # any function of a config_registry
    use_sel(config, lr=8e-4)                # before the Trainer is built

See README.md beside this file.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.optimizer import OptimizersContainer

import symexplin as sel


class SELOptimizersContainer(OptimizersContainer):
    """One SELAdamW over the sharded model; checkpoints, schedules and logging are torchtitan's own."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """What SELAdamW needs to know; `param_groups` and `implementation` of the base are not read."""

        total_steps: int
        lr: float = 8e-4
        betas: tuple[float, float] = (0.9, 0.95)
        eps: float = 1e-8
        weight_decay: float = 0.1
        max_grad_norm: float | None = 1.0
        preset: str | None = None  # None: the default map
        no_decay: tuple[str, ...] = ()

    def __init__(self, config: Config, *, model_parts: Sequence[nn.Module]) -> None:
        if len(model_parts) != 1:
            raise ValueError(
                f"model_parts must be one model, got {len(model_parts)}: SELAdamW clips by the norm of all parameters, "
                "which pipeline stages do not have"
            )
        self.model_parts = list(model_parts)
        groups = sel.param_groups(
            model_parts[0],
            lr=config.lr,
            weight_decay=config.weight_decay,
            config=None if config.preset is None else sel.preset(config.preset),
            no_decay=config.no_decay,
        )
        for group in groups:  # checkpoints know the model without its wrappers
            group["params"] = [(canonical_fqn(name), parameter) for name, parameter in group["params"]]
        self.optimizers = [
            sel.SELAdamW(
                groups,
                betas=config.betas,
                eps=config.eps,
                total_steps=config.total_steps,
                max_grad_norm=config.max_grad_norm,
            )
        ]
        everything = [parameter for group in self.optimizers[0].param_groups for parameter in group["params"]]
        self._validate_params(everything)
        self._post_init(everything)


def use_sel(config: Any, **settings: Any) -> None:
    """Give a `Trainer.Config` SELAdamW, the run's number of steps and the clipping that the trainer did so far.

    The trainer would clip gradients of effective weights: its `max_norm` becomes infinite, so that it only measures.
    """
    if config.parallelism.pipeline_parallel_degree > 1:
        raise ValueError(
            f"pipeline_parallel_degree must be 1, got {config.parallelism.pipeline_parallel_degree}: SELAdamW clips "
            "by the norm of all parameters"
        )
    clip = {"max_grad_norm": config.training.max_norm if math.isfinite(config.training.max_norm) else None}
    config.optimizer = SELOptimizersContainer.Config(total_steps=config.training.steps, **{**clip, **settings})
    config.training.max_norm = math.inf
