"""The start of a curved model: matched to its weights, or the paper's mismatched start (section 4.3)."""

import dataclasses
import math

import torch
from torch import Tensor, nn

from symexplin.axes import axes_of
from symexplin.config import SELConfig
from symexplin.coordinates import Coordinates
from symexplin.layout import Layout
from symexplin.routes import Routing, routing
from symexplin.transform import compute_dtype
from symexplin.validation import naming

__all__ = ["check_fresh", "init_", "is_fresh", "start_weight", "stale"]

# A draw rounded to bfloat16 may exceed the bound of the draw by 2^-8 of it.
_ROUNDING = 1.0 + 2.0**-8
# The sum of n symmetric draws exceeds 5.7 times their norm with probability 2 exp(-5.7^2/2) = 2e-7 at most (Hoeffding),
# for any n. In units of the deviation around the mean, a few draws of one sign would exceed it often. The mean of n
# draws from [0, 1] is as seldom more than 5.7/(2 sqrt(n)) from its expectation.
_ERRORS = 5.7


@torch.no_grad()
def start_weight(target: Tensor, layout: Layout) -> Tensor:
    """Return the effective weight at the start for a `target`, in its compute dtype.

    "matched": the target. "mismatched": ``mismatch(congruent_inverse(target))`` elementwise, with the start values of
    the layout's scales and without delta. Positive weights keep their value; negative ones lose 2 |L|.

    >>> layout = Layout((1, 2), "oi", SELConfig(beta=7.5, start="mismatched"))
    >>> start_weight(torch.tensor([[0.05, -0.05]]), layout)
    tensor([[ 0.0500, -0.0397]])
    """
    target = target.detach().to(compute_dtype(target))
    if layout.config.start == "matched":
        return target
    panels = layout.start_panels(target.dtype, target.device, position=0)
    forward = Coordinates(layout, target, **panels)
    config = dataclasses.replace(layout.config, mode="congruent", start="matched")
    congruent = Coordinates(Layout(layout.shape, layout.letters, config), target, **panels)
    return forward._replace(raw=congruent.matched(target)).effective()


@torch.no_grad()
def is_fresh(weight: Tensor, letters: str = "oi") -> bool:
    """Whether a weight may be a fresh uniform draw: within its bound, and mean and mean square within noise of its own.

    The bound is Xavier's, sqrt(6/(d_in + d_out)), or that of `nn.Linear` and convolutions, 1/sqrt(d_in), with the fans
    of the weight's axes (:mod:`symexplin.axes`). Zeros count as fresh: no start changes them. A few weights show
    little, so a trained matrix of 100 numbers may pass.

    >>> is_fresh(nn.Linear(64, 64).weight), is_fresh(torch.eye(64)), is_fresh(0.02 * torch.randn(64, 64))
    (True, False, False)
    """
    if weight.is_meta:
        return False
    w = weight.detach().to(compute_dtype(weight))
    largest, size, square = float(w.abs().max()), math.sqrt(w.numel()), float(w.square().mean())
    if abs(float(w.mean())) > _ERRORS * math.sqrt(square) / size:
        return False
    fans = axes_of(letters).fans(w.shape)
    bounds = (math.sqrt(6.0 / sum(fans)), 1.0 / math.sqrt(fans[1]))
    uniform = (largest <= b * _ROUNDING and abs(square / b**2 - 1.0 / 3.0) <= _ERRORS / (2.0 * size) for b in bounds)
    return largest == 0.0 or any(uniform)


def stale(name: str) -> str:
    """Return the message that refuses the mismatched start for a weight that was not just drawn."""
    return (
        f"start 'mismatched' is for weights that were just drawn: {name} is neither from Xavier's uniform draw nor "
        "from torch's. Use start='matched' for weights that were trained, or that symexplin.init_(model, config) has "
        "drawn and started"
    )


def check_fresh(table: Routing) -> None:
    """Raise ValueError for a mismatched start of matrices that were not just drawn."""
    for route in table.curved if table.config.start == "mismatched" else ():
        if route.is_weight and not is_fresh(route.parameter, route.axes):
            raise ValueError(stale(route.name))


@torch.no_grad()
def init_(
    model: nn.Module, config: SELConfig, *, xavier: bool = True, generator: torch.Generator | None = None
) -> None:
    """Give the curved parameters of a plain `model` the paper's start, in place (section 4.3).

    With `xavier`, weights are drawn anew from Xavier's uniform distribution; biases keep their values. Then, for mode
    "mismatch", weights and biases t become ``mismatch(congruent_inverse(t))``, whatever the configuration's start is.
    The optimizer is then built with start="matched".

    Raises:
        ValueError: nothing to curve, or weights that are not finite or out of the map's reach. The message names the
            parameter.

    >>> layer = nn.Linear(8, 8)
    >>> init_(layer, SELConfig(beta=7.5), generator=torch.Generator().manual_seed(0))
    >>> bool(layer.weight.max() > -layer.weight.min())
    True
    """
    table = routing(model, config)
    if not table.curved:
        raise ValueError(f"model has nothing to curve (a converted one starts by `convert`):\n{table}")
    for route in table.curved:
        for weight in route.parameter if route.axes.startswith("e") else [route.parameter]:
            if xavier and route.is_weight:
                nn.init.xavier_uniform_(weight, generator=generator)
        if table.config.mode == "mismatch":
            with naming(route.name):
                layout = route.layout(dataclasses.replace(table.config, start="mismatched"))
                route.parameter.copy_(start_weight(route.parameter, layout))
