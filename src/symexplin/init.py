"""The paper's initialization of a plain model, before training (section 4.3)."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from symexplin.checks import check_flag, naming
from symexplin.config import SELConfig
from symexplin.routes import check_values, matching, routing
from symexplin.spec import CurvedWeight, Spec
from symexplin.transform import compute_dtype

__all__ = ["init_"]


@torch.no_grad()
def init_(
    model: nn.Module,
    config: SELConfig,
    *,
    xavier: bool = True,
    exclude: Sequence[str] = (),
    generator: torch.Generator | None = None,
) -> nn.Module:
    """Initialize the curved parameters of a plain `model` as the paper does, in place, and return it (section 4.3).

    It replaces every curved weight by a Xavier-uniform one, of standard deviation sqrt(2/(d_in + d_out)); biases keep
    their values. The model's own initialization is lost, such as the smaller residual projections of GPT-2: 0.004
    becomes 0.03 at width 768. For mode "mismatch" every weight and bias t then becomes
    ``mismatch(congruent_inverse(t))``: positive ones keep their value, negative ones lose 2 |L|. So weights have a
    positive mean, and with several wide blocks the hidden states of all positions start alike, unless the norms
    subtract the mean, as nn.LayerNorm does and nn.RMSNorm does not.

    At width 1024 with RMSNorm it raised the final loss of the paper's method by 0.015 with one block (one seed). With
    twelve blocks the method ended 0.76 to 1.04 above AdamW with it (three seeds), and 0.034 below without it (two
    seeds). With nn.LayerNorm no effect of it was detected.
    ``benchmarks/start.py`` shows before training how alike the states of a model of your size are.

    Call it once, before training, and build the optimizer afterwards::

        config = sel.preset("paper")
        sel.init_(model, config)
        optimizer = sel.SELAdamW(model, lr=3e-4, config=config, total_steps=10_000)

    Args:
        model: a plain model; what :func:`symexplin.routing` leaves plain does not change.
        config: the map.
        xavier: replace the weights. False: start from the current ones.
        exclude: name patterns of curved parameters that keep their values, such as ``("*.o.*", "*.down.*")``.
        generator: random generator of the initialization. None: torch's global one.

    Raises:
        ValueError: nothing to curve; a pattern that matches no curved parameter; a frozen layer, as beside LoRA's
            factors; weights that are on the device "meta", not finite or out of the map's reach. The message names the
            parameter.

    >>> config = SELConfig(beta=7.5, mode="mismatch")
    >>> layer = init_(nn.Linear(8, 8), config, generator=torch.Generator().manual_seed(0))
    >>> bool(layer.weight.max() > -layer.weight.min())
    True
    """
    check_flag("xavier", xavier)
    table = routing(model, config)
    if not table.curved:
        raise ValueError(f"model has nothing to curve (initialize a model before `convert`):\n{table}")
    if frozen := [route.name for route in table if route.axes and not route.curved]:
        raise ValueError(f"model must be new, to train from scratch, but its parameter {frozen[0]} is frozen")
    check_values(table)
    kept = matching("exclude", exclude, [route.name for route in table.curved])
    for route in table.curved:
        if route.name in kept:
            continue
        if xavier and route.is_weight:
            for weight in route.parameter if "e" in route.axes else [route.parameter]:
                nn.init.xavier_uniform_(weight, generator=generator)
        if table.config.mode == "mismatch":
            with naming(route.name):
                route.parameter.copy_(_mismatched(route.parameter, route.spec(table.config)))
    return model


def _mismatched(target: Tensor, spec: Spec) -> Tensor:
    """Return ``mismatch(congruent_inverse(target))``, with the first values of the scales and without delta."""
    target = target.detach().to(compute_dtype(target))
    tensors = spec.first_values(target.dtype, target.device, position=0)
    congruent = Spec.of(spec.shape, spec.axes, dataclasses.replace(spec.config, mode="congruent"))
    raw = CurvedWeight(congruent, target, tensors).inverse(target)
    return CurvedWeight(spec, raw, tensors).effective()
