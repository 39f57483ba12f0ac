"""A small network and its training with SELAdamW, for the tests of the optimizer."""

import torch
from torch import nn

import symexplin as sel

__all__ = ["MATCHED", "assert_same_bits", "backward", "batch", "build", "network", "train"]

# The paper's map with all of its scales, whatever the weights are.
MATCHED = sel.preset("paper", start="matched")


def network(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 20), nn.LayerNorm(20), nn.GELU(), nn.Linear(20, 6)).to(dtype)


def batch(step, dtype=torch.float32):
    return torch.randn(16, 12, generator=torch.Generator().manual_seed(step)).to(dtype)


def backward(model, step):
    parameter = next(model.parameters())
    inputs = batch(step, parameter.dtype).to(parameter.device)
    model(inputs).float().square().mean().backward()


def build(model, config=None, lr=1e-2, **kwargs):
    kwargs = {"total_steps": 100, "max_grad_norm": 1.0} | kwargs
    return sel.SELAdamW(sel.param_groups(model, lr=lr, config=config or MATCHED), **kwargs)


def train(model, optimizer, steps, start=0):
    for step in range(start, start + steps):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    return model


def assert_same_bits(a, b):
    for (name, p), q in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert torch.equal(p, q), name
