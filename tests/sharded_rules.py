"""SELMuon, and a switch from AdamW to SELAdamW and back, whole and under FSDP2, to be run by `processes.run`."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import symexplin as sel
from sharded import full, make, model_of, optimizer_of, shard, states, steps, weights
from symexplin.optim.migrate import from_adamw, to_adamw
from symexplin.optim.muon import SELMuon

__all__ = ["columns", "rule", "switched"]


def switched(how):
    """Train with AdamW, SELAdamW and AdamW again; return weights and states after each, and moments there and back."""
    model = model_of(torch.float64)
    if how != "whole":
        model = shard(model, how)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    steps(model, adamw, how, torch.float64, 0, 5)
    optimizer = optimizer_of(model, sel.preset("paper"), lr=1e-3)
    from_adamw(optimizer, adamw)
    returned = to_adamw(optimizer)
    moments = [
        (full(adamw.state[p][key]), full(returned.state[p][key]))
        for p in model.parameters()
        for key in ("step", "exp_avg", "exp_avg_sq")
    ]
    after = [states(model, optimizer)]
    steps(model, optimizer, how, torch.float64, 5, 10)
    last = to_adamw(optimizer)
    after += [states(model, last)]
    steps(model, last, how, torch.float64, 10, 15)
    return moments, [*after, weights(model)]


def columns(shards):
    """Take two steps with a weight of three columns, in four processes at most one each; return it and the norm."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 8, bias=False)
    if shards:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        layer.weight = torch.nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(1)]))
    optimizer = sel.SELAdamW(layer, lr=1e-2, max_grad_norm=0.5)
    for step in range(2):
        grad = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        layer.weight.grad = distribute_tensor(grad, mesh, [Shard(1)]) if shards else grad
        optimizer.step()
    return full(layer.weight), float(optimizer.grad_norm)


def rule(how, count, kind=SELMuon, model_of=model_of, dtype=torch.float64):
    """Train; return weights, state, losses and the last norm of the gradient."""
    config = sel.preset("paper+offset" if dtype == torch.float64 else "paper", start="matched")
    model, optimizer = make(how, config, dtype, model_of=model_of, kind=kind, lr=1e-3)
    losses = steps(model, optimizer, how, dtype, 0, count)
    return weights(model), states(model, optimizer), losses, float(optimizer.grad_norm)
