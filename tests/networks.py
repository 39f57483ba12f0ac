"""Small networks that several tests share."""

import torch
from torch import nn

__all__ = ["inputs", "moved", "network"]

inputs = torch.linspace(-1, 1, 60).reshape(5, 12)


def network(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 6)).to(dtype)


def moved(model):
    """Move every parameter a little, so that no scale is at its start."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.data += 0.05 * noise.to(parameter.device)
    return model
