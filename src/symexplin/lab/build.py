"""From a configuration to a model with its optimizer, in either home of the map or in none."""

from typing import Any, NamedTuple

import torch

import symexplin as sel
from symexplin.lab.config import RunConfig
from symexplin.lab.maps import map_of
from symexplin.lab.model import Transformer
from symexplin.lab.parallel import ALONE, Ranks, shard

__all__ = ["Built", "build", "build_model"]

_FUSED = ("cpu", "cuda", "mps", "xpu")  # devices that torch's fused AdamW knows


class Built(NamedTuple):
    """What a run trains; `clip` is False where the optimizer clips by itself."""

    model: Transformer
    optimizer: torch.optim.Optimizer
    clip: bool


def build(config: RunConfig, ranks: Ranks = ALONE) -> Built:
    """Return a fresh model with its optimizer, on the configuration's device.

    The same seed gives the same draw of weights in every home and every process. With `parallel` "fsdp" each of the
    `ranks` then keeps its part.

    Raises:
        ValueError: a map that has no inverse at some of the drawn weights, or that cannot be sharded.

    >>> type(build(RunConfig("data")).optimizer).__name__
    'SELAdamW'
    """
    train, curve = config.train, map_of(config.sel, config.model.width)
    if ranks.size > 1 and config.compute.parallel == "fsdp":
        model = build_model(config, device="cpu")  # whole it need not fit on a GPU
        shard(model, ranks, config.compute.device)
    else:
        model = build_model(config)
    if curve is None:
        return Built(model, _adamw(model, model.parameters(), config), clip=True)
    if config.sel.home == "module":
        groups = sel.param_groups(model, lr=train.lr, weight_decay=train.weight_decay)
        optimizer = _adamw(model, groups, config)
        sel.anneal_scales(optimizer, total_steps=train.steps)
        return Built(model, optimizer, clip=True)
    groups = sel.param_groups(model, lr=train.lr, weight_decay=train.weight_decay, config=curve)
    raw_space = sel.SELAdamW(
        groups, lr=train.lr, betas=train.betas, total_steps=train.steps, max_grad_norm=train.max_grad_norm
    )
    return Built(model, raw_space, clip=False)


def build_model(config: RunConfig, device: str | None = None) -> Transformer:
    """Return the fresh model alone: whole, converted if it is the home of the map, on `device` or the configuration's.

    >>> build_model(RunConfig("data")).config.width
    128
    """
    train, curve = config.train, map_of(config.sel, config.model.width)
    model = Transformer(config.model, torch.Generator().manual_seed(train.seed))
    model.recompute, model.loss_chunk = config.compute.recompute, config.compute.loss_chunk or 0
    place = device or config.compute.device
    if place != "auto":
        model.to(place)
    if curve is not None and config.sel.home == "module":
        sel.convert(model, curve, start=config.sel.start)
    elif curve is not None and config.sel.start == "mismatched":
        sel.init_(model, curve, xavier=False)
    return model


def _adamw(model: Transformer, params: Any, config: RunConfig) -> torch.optim.AdamW:
    train, fused = config.train, next(model.parameters()).device.type in _FUSED
    return torch.optim.AdamW(params, lr=train.lr, betas=train.betas, weight_decay=train.weight_decay, fused=fused)
