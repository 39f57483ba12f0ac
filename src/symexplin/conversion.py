"""Convert a whole model to curved modules, and fold it back."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from symexplin.config import SELConfig
from symexplin.curved import CurvedModule, Parts, curve_, curved_parts, curved_type, plain_
from symexplin.layout import Layout
from symexplin.linear import LINEAR_TYPES, SELLinear
from symexplin.routes import routing
from symexplin.starts import check_fresh
from symexplin.validation import naming

__all__ = ["convert", "fold"]

_logger = logging.getLogger("symexplin")

_Values = Sequence[tuple[nn.Module, dict[str, Tensor]]]  # modules with values of their curved parameters


def convert(model: nn.Module, config: SELConfig | None = None) -> nn.Module:
    """Convert the curved layers of `model` to modules with raw weights, in place, and return it (paper, 4.2, 4.3).

    Args:
        model: any module.
        config: the map and the choice of parameters (see :func:`symexplin.routing`); default `SELConfig()`. Its start
            "matched" keeps the present weights as effective weights, up to rounding. "mismatched" (the paper's) makes
            them mismatch(congruent_inverse(present weights)), if these were just drawn.

    Layers keep their identity, hooks and attributes; tied ones stay tied. :class:`symexplin.SELLinear` recomputes its
    effective weight for backward; other modules keep it between forward and backward, as they keep a plain one. The
    largest difference to the present weights is logged (logger "symexplin", level INFO).

    Raises:
        ValueError: weights are not finite or out of the map's reach, or a mismatched start for weights that were not
            just drawn. The message names the layer. The model is unchanged.

    >>> model = convert(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    >>> type(model[0]).__name__, type(fold(model)[0]).__name__
    ('SELLinear', 'Linear')
    """
    table = routing(model, config)
    check_fresh(table)
    routes = {id(route.parameter): route for route in table.curved}
    made: dict[int, Parts] = {}  # by the id of the plain parameter, so that tied ones stay tied
    built: list[tuple[nn.Module, dict[str, Layout], dict[str, Parts]]] = []
    plain: list[tuple[nn.Module, dict[str, Tensor]]] = []
    for module in model.modules():
        found = {name: routes[id(p)] for name, p in module._parameters.items() if id(p) in routes}
        layouts = {name: route.layout(table.config) for name, route in found.items()}
        for name, route in found.items():
            if id(route.parameter) not in made:
                with naming(route.name):
                    made[id(route.parameter)] = curved_parts(route.parameter, layouts[name], route.position)
        if found:
            built.append((module, layouts, {name: made[id(route.parameter)] for name, route in found.items()}))
            plain.append((module, {name: route.parameter for name, route in found.items()}))
    for module, layouts, of_names in built:
        kind = SELLinear if type(module) in LINEAR_TYPES else curved_type(type(module), tuple(layouts))
        curve_(module, kind, layouts, of_names)
    _report("converted", plain)
    return model


def fold(model: nn.Module) -> nn.Module:
    """Make every curved module of `model` a plain one with its effective weights, in place, and return the model.

    Tied layers stay tied. The largest difference between the effective weights, in float32 or float64, and the stored
    ones is logged.

    >>> layer = SELLinear(4, 2)
    >>> torch.equal(fold(nn.Sequential(layer))[0].weight, layer.weight)
    True
    """
    known: dict[int, nn.Parameter] = {}
    curved = [module for module in model.modules() if isinstance(module, CurvedModule)]
    exact = [(module, module.sel_effective()) for module in curved if _logger.isEnabledFor(logging.INFO)]
    for module in curved:
        plain_(module, known)
    _report("folded", exact)
    return model


@torch.no_grad()
def _report(verb: str, before: _Values) -> None:
    """Log the largest difference between the values `before` and the present ones, over all modules."""
    if not before or not _logger.isEnabledFor(logging.INFO):
        return
    largest = 0.0
    for module, values in before:
        now = module.sel_effective() if isinstance(module, CurvedModule) else dict(module.named_parameters())
        for name, value in values.items():
            largest = max(largest, float((value.double() - now[name].double()).abs().max()))
    _logger.info("%s %d layers; largest difference of a weight %.3g", verb, len(before), largest)
