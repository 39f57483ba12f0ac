"""Build a model and its optimizer from a configuration, with the map in either home or without one."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import symexplin as sel
from symexplin.lab.config import RunConfig
from symexplin.lab.maps import map_of
from symexplin.lab.model import Transformer
from symexplin.lab.parallel import ALONE, Ranks
from symexplin.routes import by_name, matching

__all__ = ["Built", "build", "build_model", "clear_gradients"]

_FUSED = ("cpu", "cuda", "mps", "xpu")  # devices that torch's fused AdamW knows


class Built(NamedTuple):
    """What a run trains."""

    model: Transformer
    optimizer: torch.optim.Optimizer


def build(config: RunConfig, ranks: Ranks = ALONE) -> Built:
    """Return a new model with its optimizer, on the configuration's device.

    The same seed gives the same weights in every home and every process. With `parallel` "fsdp" each process builds the
    whole model on the CPU and then keeps its part.

    >>> type(build(RunConfig("data")).optimizer).__name__
    'SELAdamW'
    """
    train, curve = config.train, map_of(config.sel, config.model.width)
    annealing = config.sel.anneal_steps or train.schedule_steps
    is_sharded = ranks.size > 1 and config.compute.parallel == "fsdp"
    model = build_model(config, "cpu" if is_sharded else None)
    if is_sharded:
        _shard(model, ranks, config.compute.device)
    undecayed: Sequence[str] | str = []
    if config.decays != "all":
        undecayed = "usual" if config.decays == "matrices" else _plain(model)
    lrs = _learning_rates(model, config)
    if curve is None:
        groups: dict[tuple[float | None, float | None], list[Tensor]] = {}
        for route in sel.routing(model, lr=lrs, weight_decay=train.weight_decay, no_decay=undecayed):
            if route.parameter.requires_grad:
                groups.setdefault((route.lr, route.weight_decay), []).append(route.parameter)
        alike = [{"params": params, "lr": lr, "weight_decay": decay} for (lr, decay), params in groups.items()]
        return Built(model, _adamw(model, alike, config))
    if config.sel.home == "module":
        of_roles = sel.param_groups(model, lr=lrs, weight_decay=train.weight_decay, no_decay=undecayed)
        optimizer = _adamw(model, of_roles, config)
        sel.anneal_scales(optimizer, total_steps=annealing)
        return Built(model, optimizer)
    of_parameters = sel.param_groups(model, lr=lrs, weight_decay=train.weight_decay, config=curve, no_decay=undecayed)
    raw_space = sel.SELAdamW(
        of_parameters,
        lr=train.lr,
        betas=train.betas,
        total_steps=annealing,
        max_grad_norm=train.max_grad_norm,
    )
    return Built(model, raw_space)


def build_model(config: RunConfig, device: str | None = None) -> Transformer:
    """Return the fresh model alone: whole, converted if it is the home of the map, on `device` or the config's."""
    curve = map_of(config.sel, config.model.width)
    model = Transformer(config.model, torch.Generator().manual_seed(config.train.seed))
    model.recompute, model.loss_chunk = config.compute.recompute, config.compute.loss_chunk or 0
    place = device or config.compute.device
    if place != "auto":
        model.to(place)
    if curve is not None and config.sel.starts_as == "mismatched":
        sel.init_(model, curve, xavier=False, exclude=config.sel.start_exclude)
    _freeze(model, config)
    if curve is not None and config.sel.home == "module":
        sel.convert(model, curve)
    return model


def _freeze(model: Transformer, config: RunConfig) -> None:
    """Freeze what the configuration says, after the start, which is that of a model in which nothing is frozen."""
    named = dict(model.named_parameters())
    for name in matching("frozen", config.train.frozen, named):
        named[name].requires_grad_(False)


def clear_gradients(parameters: Iterable[Tensor], config: RunConfig) -> None:
    """Clear the gradients of an optimizer's parameters before a step; those of a sharded model may be other tensors.

    CUDA graphs reuse the memory of the gradients that they return. The sum over microbatches has memory of its own.
    """
    summed = config.compute.cuda_graphs and config.train.accumulation > 1
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter) if summed else None


def _learning_rates(model: Transformer, config: RunConfig) -> dict[str, float]:
    """Return the learning rate of each parameter; a raw one has that of its plain name.

    Those without a factor come last, so that the groups' common rate is the run's.
    """
    names = {name: name.replace(".raw_", ".") for name, _ in model.named_parameters()}
    factors: dict[str, float] = by_name("lr_factors", config.train.lr_factors | {"*": 1.0}, list(names.values()))
    ordered = sorted(names, key=lambda name: factors[names[name]] == 1.0)
    return {name: config.train.lr * factors[names[name]] for name in ordered}


def _shard(model: Transformer, ranks: Ranks, device: str) -> None:
    """Shard the parameters of `model`, which is on the CPU, over the processes and their devices, per block."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    for name, parameter in model.named_parameters():
        if not parameter.dim():
            raise ValueError(f"parallel must be 'ddp' for a map that learns single numbers, such as {name}, got 'fsdp'")
    mesh = init_device_mesh(torch.device(device).type, (ranks.size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _plain(model: Transformer) -> list[str]:
    """Return the names of the parameters outside the linears of the blocks: embedding, head and norms."""
    layers = (layer for layer in model.blocks.modules() if not isinstance(layer, nn.RMSNorm | nn.LayerNorm))
    inside = {id(parameter) for layer in layers for parameter in layer.parameters(recurse=False)}
    named = model.named_parameters()
    return [name for name, parameter in named if parameter.requires_grad and id(parameter) not in inside]


def _adamw(model: Transformer, params: Any, config: RunConfig) -> torch.optim.AdamW:
    train, fused = config.train, next(model.parameters()).device.type in _FUSED
    return torch.optim.AdamW(params, lr=train.lr, betas=train.betas, weight_decay=train.weight_decay, fused=fused)
