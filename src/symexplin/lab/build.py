"""From a configuration to a model with its optimizer, in either home of the map or in none."""

from typing import NamedTuple

import torch

import symexplin as sel
from symexplin.lab.config import RunConfig
from symexplin.lab.maps import map_of
from symexplin.lab.model import Transformer

__all__ = ["Built", "build"]


class Built(NamedTuple):
    """What a run trains; `clip` is False where the optimizer clips by itself."""

    model: Transformer
    optimizer: torch.optim.Optimizer
    clip: bool


def build(config: RunConfig) -> Built:
    """Return a fresh model with its optimizer, on the configuration's device.

    The same seed gives the same draw of weights in every home.

    Raises:
        ValueError: a map that has no inverse at some of the drawn weights.

    >>> type(build(RunConfig("data")).optimizer).__name__
    'SELAdamW'
    """
    train, curve = config.train, map_of(config.sel, config.model.width)
    model = Transformer(config.model, torch.Generator().manual_seed(train.seed))
    model.recompute, model.loss_chunk = config.compute.recompute, config.compute.loss_chunk or 0
    if config.compute.device != "auto":
        model.to(config.compute.device)
    if curve is None:
        return Built(model, _adamw(model.parameters(), config), clip=True)
    if config.sel.home == "module":
        sel.convert(model, curve, start=config.sel.start)
        optimizer = _adamw(sel.param_groups(model, lr=train.lr, weight_decay=train.weight_decay), config)
        sel.anneal_scales(optimizer, total_steps=train.steps)
        return Built(model, optimizer, clip=True)
    if config.sel.start == "mismatched":
        sel.init_(model, curve, xavier=False)
    groups = sel.param_groups(model, lr=train.lr, weight_decay=train.weight_decay, config=curve)
    raw_space = sel.SELAdamW(
        groups, lr=train.lr, betas=train.betas, total_steps=train.steps, max_grad_norm=train.max_grad_norm
    )
    return Built(model, raw_space, clip=False)


def _adamw(params: object, config: RunConfig) -> torch.optim.AdamW:
    train = config.train
    return torch.optim.AdamW(params, lr=train.lr, betas=train.betas, weight_decay=train.weight_decay)  # type: ignore[arg-type]
