"""Small networks and maps that several tests share."""

import torch
from torch import nn

import symexplin as sel

__all__ = ["ELEMENTWISE", "EXP", "Experts", "inputs", "moved", "network", "strong"]


def strong(name, **changes):
    """Return a preset with the beta of width 1024, since small networks are nearly linear under that of their own."""
    return sel.preset(name, **{"beta": 7.5, **changes})


# The paper's scales as logarithms.
EXP = strong("paper", **{role: {"transform": "exp"} for role in "elm"})
# A number per weight, as it is and as a logarithm, beside vectors and LoRA factors.
ELEMENTWISE = strong(
    "paper+offset",
    e=sel.Scale("elementwise", k=(50.0, 8.0), transform="exp"),
    l=sel.Scale("elementwise", k=(50.0, 8.0)),
    n=sel.Scale("elementwise"),
)

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
