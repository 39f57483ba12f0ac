"""Convert a whole model to curved modules, and fold it back."""

import logging
import warnings
from typing import cast

import torch
from torch import Tensor, nn

from symexplin.config import SELConfig
from symexplin.layout import Layout
from symexplin.linear import SELLinear
from symexplin.routes import Route, routing
from symexplin.starts import check_fresh
from symexplin.validation import naming

__all__ = ["IDENTITY", "convert", "fold"]

_logger = logging.getLogger("symexplin")

# A plain bias beside a curved weight has the identity map.
IDENTITY = SELConfig(mode="linear", beta=1.0)


def convert(model: nn.Module, config: SELConfig | None = None) -> nn.Module:
    """Convert the linear layers of `model` to curved ones, in place, and return it (paper, sections 4.2, 4.3).

    Args:
        model: any module. A bare `nn.Linear` cannot change in place: use the returned layer.
        config: the map and the choice of parameters (see :func:`symexplin.routing`); default `SELConfig()`. Its start
            "matched" keeps the present weights as effective weights, up to rounding. "mismatched" (the paper's) makes
            them mismatch(congruent_inverse(present weights)), if these were just drawn.

    Tied layers stay tied. Parameters that :func:`symexplin.routing` curves outside of `nn.Linear` stay plain, with a
    warning. The largest difference to the present weights is logged (logger "symexplin", level INFO).

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
    fresh: dict[int, SELLinear] = {}
    built: dict[int, nn.Module] = {}
    taken: set[int] = set()
    for name, module in model.named_modules():
        if not _convertible(module) or id(module.weight) not in routes:
            continue
        layer = _curve(name or "model", cast(nn.Linear, module), routes, table.config)
        taken |= {id(p) for p in module.parameters(recurse=False)}
        for plain, bias in ((module.weight, False), (module.bias, True)):
            if isinstance(plain, Tensor) and (twin := fresh.setdefault(id(plain), layer)) is not layer:
                _share(layer, twin, bias)
        built[id(module)] = layer
    left = [route.name for key, route in routes.items() if key not in taken]
    if left:
        shown = ", ".join(left[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
        warnings.warn(
            f"convert leaves {shown} plain: only nn.Linear has a curved module; SELAdamW curves them",
            stacklevel=2,
        )
    _report("converted", built, model)
    return _replace(model, built)


def fold(model: nn.Module) -> nn.Module:
    """Replace every :class:`SELLinear` of `model` by a plain layer with its effective weights, in place.

    Returns the model. A bare SELLinear cannot change in place: use the returned layer. Tied layers stay tied.
    The largest difference between the effective weights, in float32 or float64, and the stored ones is logged.

    >>> layer = SELLinear(4, 2)
    >>> torch.equal(fold(nn.Sequential(layer))[0].weight, layer.weight)
    True
    """
    built: dict[int, nn.Module] = {}
    first: dict[int, nn.Parameter] = {}
    for module in model.modules():
        if isinstance(module, SELLinear):
            linear = module.to_linear()
            linear.weight = first.setdefault(id(module.raw_weight), cast(nn.Parameter, linear.weight))
            if linear.bias is not None:
                linear.bias = first.setdefault(id(module.raw_bias), linear.bias)
            built[id(module)] = linear
    _report("folded", built, model)
    return _replace(model, built)


def _convertible(module: nn.Module) -> bool:
    """Whether a module computes the same as nn.Linear; MultiheadAttention's out_proj is such a subclass."""
    return type(module) in (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear)


def _curve(name: str, module: nn.Linear, routes: dict[int, Route], config: SELConfig) -> SELLinear:
    weight = routes[id(module.weight)]
    bias = None
    if module.bias is not None:
        route = routes.get(id(module.bias))
        bias = route.layout(config) if route else Layout(tuple(module.bias.shape), "o", IDENTITY)
    with naming(name):
        return SELLinear.from_linear(module, weight.layout(config), bias, weight.position)


def _share(layer: SELLinear, twin: SELLinear, bias: bool) -> None:
    """Tie the weights, or biases, of two curved layers whose plain ones were one parameter."""
    layout, prefix = (twin.bias_layout, "bias_") if bias else (twin.weight_layout, "")
    for name in ["raw_bias" if bias else "raw_weight", *(prefix + slot.name for slot in cast(Layout, layout).slots)]:
        layer.register_parameter(name, getattr(twin, name))


def _replace(model: nn.Module, built: dict[int, nn.Module]) -> nn.Module:
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):  # named_children leaves out shared modules
            if child is not None and id(child) in built:
                setattr(parent, name, built[id(child)])
    return built.get(id(model), model)


@torch.no_grad()
def _report(verb: str, built: dict[int, nn.Module], model: nn.Module) -> None:
    """Log the largest difference between old and new values over all replaced layers."""
    if not built or not _logger.isEnabledFor(logging.INFO):
        return
    largest = 0.0
    for old in model.modules():
        new = built.get(id(old))
        if new is not None:
            for a, b in zip(_values(old), _values(new), strict=True):
                largest = max(largest, float((a.double() - b.double()).abs().max()))
    _logger.info("%s %d layers; largest difference of a weight %.3g", verb, len(built), largest)


def _values(module: nn.Module) -> list[Tensor]:
    if isinstance(module, SELLinear):
        return module.effective()
    return [p for p in (module.weight, module.bias) if isinstance(p, Tensor)]
