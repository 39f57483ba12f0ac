"""The start of a curved model: matched to its weights, or the paper's mismatched start (section 4.3)."""

import dataclasses

import torch
from torch import Tensor, nn

from symexplin.config import START_RULES, SELConfig, check_config
from symexplin.coordinates import Coordinates
from symexplin.layout import Layout
from symexplin.routes import routing
from symexplin.transform import compute_dtype
from symexplin.validation import check_choice, naming

__all__ = ["START_RULES", "init_", "start_weight"]


@torch.no_grad()
def start_weight(target: Tensor, layout: Layout, start: str) -> Tensor:
    """Return the effective weight at the start for a `target`, in its compute dtype.

    "matched": the target. "mismatched": ``mismatch(congruent_inverse(target))`` elementwise, with the start values of
    the layout's scales and without delta. Positive weights keep their value; negative ones lose 2 |L|.

    Raises:
        ValueError: "mismatched" for another mode than "mismatch".

    >>> layout = Layout((1, 2), 0, 7.5, SELConfig(beta=7.5))
    >>> start_weight(torch.tensor([[0.05, -0.05]]), layout, "mismatched")
    tensor([[ 0.0500, -0.0397]])
    """
    check_choice("start", start, START_RULES)
    target = target.detach().to(compute_dtype(target))
    if start == "matched":
        return target
    if layout.config.mode != "mismatch":
        raise ValueError(f"start 'mismatched' is for mode='mismatch' alone, got mode={layout.config.mode!r}")
    panels = layout.start_panels(target.dtype, target.device, position=0)
    forward = Coordinates(layout, target, **panels)
    config = dataclasses.replace(layout.config, mode="congruent")
    congruent = Coordinates(Layout(layout.shape, layout.out_dim, layout.beta, config), target, **panels)
    return forward._replace(raw=congruent.matched(target)).effective()


@torch.no_grad()
def init_(
    model: nn.Module, config: SELConfig, *, xavier: bool = True, generator: torch.Generator | None = None
) -> None:
    """Give the curved parameters of a plain `model` the paper's start, in place (section 4.3).

    With `xavier`, weights are drawn anew from Xavier's uniform distribution; biases keep their values. Then, for mode
    "mismatch", weights and biases t become ``mismatch(congruent_inverse(t))``. Call it before the optimizer is built.

    Raises:
        ValueError: nothing to curve, or weights that are not finite or out of the map's reach. The message names the
            parameter.

    >>> layer = nn.Linear(8, 8)
    >>> init_(layer, SELConfig(beta=7.5), generator=torch.Generator().manual_seed(0))
    >>> bool(layer.weight.max() > -layer.weight.min())
    True
    """
    config = check_config(config)
    table = routing(model, config)
    if not table.curved:
        raise ValueError(f"model has nothing to curve (a converted one starts by `convert`):\n{table}")
    for route in table.curved:
        if xavier and route.parameter.dim() == 2:
            nn.init.xavier_uniform_(route.parameter, generator=generator)
        if config.mode == "mismatch":
            with naming(route.name):
                route.parameter.copy_(start_weight(route.parameter, route.layout(config), "mismatched"))
