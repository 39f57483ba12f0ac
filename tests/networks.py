"""Small networks and maps that several tests share."""

import torch
from torch import nn

import symexplin as sel

__all__ = ["SUMS", "Experts", "inputs", "moved", "network", "strong"]


def strong(name, **changes):
    """Return a preset with the beta of width 1024, since small networks are nearly linear under that of their own."""
    return sel.preset(name, **{"beta": 7.5, **changes})


# Scales that are no products of rows and columns, so that no kernel covers the map.
SUMS = strong("paper+offset", e=sel.Scale("row_col_add", k=(50.0, 8.0)), l=sel.Scale("lora", k=(50.0, 8.0), rank=3))

inputs = torch.linspace(-1, 1, 60).reshape(5, 12)


def network(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 6)).to(dtype)


def moved(model):
    """Move every parameter a little, so that no scale has its first value."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.data += 0.05 * noise.to(parameter.device)
    return model


class Experts(nn.Module):
    """Three expert matrices in one tensor, outputs or inputs first."""

    def __init__(self, inputs, outputs, is_transposed=False):
        super().__init__()
        self.is_transposed = is_transposed
        weight = torch.randn(3, outputs, inputs) * 0.2
        self.weight = nn.Parameter(weight.mT.contiguous() if is_transposed else weight)
        self.bias = nn.Parameter(torch.zeros(3, outputs))

    def forward(self, x):
        form = "bi,eio->beo" if self.is_transposed else "bi,eoi->beo"
        return (torch.einsum(form, x, self.weight) + self.bias).mean(1)
