"""The map in a module: a linear layer that stores raw weights, and the way there and back for a whole model."""

import logging
import warnings
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from symexplin.config import Scale, SELConfig
from symexplin.coordinates import PANELS, Coordinates, Layout, Slot
from symexplin.functional import auto_beta
from symexplin.routing import Route, routing
from symexplin.starts import START_RULES, start_weight
from symexplin.transform import compute_dtype
from symexplin.validation import check_choice

__all__ = ["SELLinear", "convert", "fold"]

_logger = logging.getLogger("symexplin")

# A bias that stays plain beside a curved weight is carried by the identity map.
_IDENTITY = SELConfig(mode="linear", l=Scale(), s=Scale())


class _EffectiveWeight(torch.autograd.Function):
    """raw, panels -> effective weight; saves its inputs alone."""

    @staticmethod
    def forward(ctx: Any, layout: Layout, *parts: Tensor) -> Tensor:
        ctx.layout = layout
        ctx.save_for_backward(*parts)
        return _coordinates(layout, parts).effective()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        parts = ctx.saved_tensors
        return None, *_gradients(_coordinates(ctx.layout, parts), g, parts)


class _CurvedLinear(torch.autograd.Function):
    """x, bias, raw, panels -> x w_eff^T + bias; saves x, raw and panels, and computes w_eff again in backward."""

    @staticmethod
    def forward(ctx: Any, layout: Layout, x: Tensor, bias: Tensor | None, *parts: Tensor) -> Tensor:
        ctx.layout = layout
        ctx.save_for_backward(x, *parts)
        return F.linear(x, _coordinates(layout, parts).effective().to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, *parts = ctx.saved_tensors
        coordinates = _coordinates(ctx.layout, parts)
        rows = g.reshape(-1, g.shape[-1])
        g_x = g @ coordinates.effective().to(g.dtype) if ctx.needs_input_grad[1] else None
        g_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        if not any(ctx.needs_input_grad[3:]):
            return None, g_x, g_bias, None, None, None, None
        return None, g_x, g_bias, *_gradients(coordinates, rows.mT @ x.reshape(-1, x.shape[-1]), parts)


def _coordinates(layout: Layout, parts: Any) -> Coordinates:
    dtype = compute_dtype(*parts)
    return Coordinates(layout, *(part.to(dtype) for part in parts))


def _gradients(coordinates: Coordinates, g: Tensor, parts: Any) -> list[Tensor]:
    pulled = coordinates.pullback(g.to(coordinates.raw.dtype))
    return [grad.to(part.dtype) for grad, part in zip(pulled[1:], parts, strict=True)]


class SELLinear(nn.Linear):
    """A linear layer in curved weight space: ``y = x w_eff(raw_weight)^T + b_eff(raw_bias)`` (paper, Eq. 7).

    Its parameters are `raw_weight`, `raw_bias` and the learned scales (`e_row`, `m_column`, ..., `bias_e_row`);
    `weight` and `bias` are read-only views of the effective values, differentiable. Backward keeps the input, the
    raw weight and vectors, never the effective weight. Under autocast the product runs in the autocast dtype, the
    map in float32. Hooks and attributes of a layer it replaces are not carried over.

    Args:
        in_features, out_features, bias, device, dtype: as in `nn.Linear`, whose initial weights are the targets.
        config: the map; its include and exclude are not read here.
        start: "matched" or "mismatched", see :func:`convert`.

    >>> layer = SELLinear(8, 4)
    >>> layer(torch.zeros(2, 8)).shape, layer.raw_weight.shape
    (torch.Size([2, 4]), torch.Size([4, 8]))
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        config: SELConfig | None = None,
        start: str = "matched",
    ) -> None:
        config = config or SELConfig()
        beta = auto_beta(out_features, in_features) if isinstance(config.beta, str) else config.beta
        layouts = [Layout((out_features, in_features), 0, beta, config)]
        if bias:
            layouts.append(Layout((out_features,), 0, beta, config))
        self._build(nn.Linear(in_features, out_features, bias, device, dtype), layouts, start, 0)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, weight: Layout, bias: Layout | None, start: str, position: int
    ) -> "SELLinear":
        """Return the curved layer whose effective values are those of `linear` (or their mismatched start)."""
        layer = cls.__new__(cls)
        layer._build(linear, [weight] if bias is None else [weight, bias], start, position)
        return layer

    @torch.no_grad()
    def _build(self, linear: nn.Linear, layouts: list[Layout], start: str, position: int) -> None:
        nn.Module.__init__(self)
        check_choice("start", start, START_RULES)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.linear_type = type(linear)
        self.weight_layout = layouts[0]
        self.bias_layout = layouts[1] if len(layouts) > 1 else None
        for offset, (prefix, layout) in enumerate(self._sides()):
            plain = getattr(linear, "bias" if prefix else "weight")
            target = start_weight(plain, layout, start)
            dtype = compute_dtype(target)
            panels = layout.start_panels(dtype, plain.device, position + offset)
            raw = Coordinates(layout, target, **panels).matched(target)
            self._own("raw_bias" if prefix else "raw_weight", raw.to(plain.dtype), plain.requires_grad)
            for slot in layout.slots:
                value = layout.view(slot, panels[slot.panel]).to(plain.dtype)
                single = slot.count == 1 and slot.panel != "scalar"
                self._own(prefix + slot.name, value.reshape(-1) if single else value)
        if self.bias_layout is None:
            self.register_parameter("raw_bias", None)
        self.train(linear.training)

    def _own(self, name: str, value: Tensor, requires_grad: bool = True) -> None:
        self.register_parameter(name, nn.Parameter(value.clone(), requires_grad=requires_grad))

    def _sides(self) -> list[tuple[str, Layout]]:
        sides = [("", self.weight_layout)]
        return sides if self.bias_layout is None else [*sides, ("bias_", self.bias_layout)]

    def reset_parameters(self) -> None:
        """Draw new weights as `nn.Linear` does and start matched from them."""
        raw = cast(Tensor, self.raw_weight)
        fresh = nn.Linear(self.in_features, self.out_features, self.raw_bias is not None, raw.device, raw.dtype)
        other = SELLinear.from_linear(fresh, self.weight_layout, self.bias_layout, "matched", 0)
        self.load_state_dict(other.state_dict())

    def sel_roles(self) -> dict[str, Slot | None]:
        """Return the slot of every scale parameter by its local name; None for raw weights and biases."""
        roles: dict[str, Slot | None] = {"raw_weight": None}
        if self.raw_bias is not None:
            roles["raw_bias"] = None
        for prefix, layout in self._sides():
            roles |= {prefix + slot.name: slot for slot in layout.slots}
        return roles

    def parts(self, bias: bool = False) -> tuple[Tensor, ...]:
        """Return (raw, panel0, panel1, scalar) of the weight or of the bias, the panels packed from parameters."""
        layout, prefix = (self.bias_layout, "bias_") if bias else (self.weight_layout, "")
        assert layout is not None
        raw = cast(Tensor, self.raw_bias if bias else self.raw_weight)
        panels: dict[str, list[Tensor]] = {panel: [] for panel in PANELS}
        for slot in layout.slots:
            value = getattr(self, prefix + slot.name)
            shape = {"panel0": (-1, slot.count), "panel1": (slot.count, -1), "scalar": (1,)}[slot.panel]
            panels[slot.panel].append(value.reshape(shape))
        dims = {"panel0": 1, "panel1": 0, "scalar": 0}
        packed = (
            torch.cat(panels[p], dim=dims[p]) if panels[p] else raw.new_empty(layout.panel_shape(p)) for p in PANELS
        )
        return (raw, *packed)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The effective weight, (out_features, in_features), in the dtype of the raw weight; read-only."""
        value: Tensor = _EffectiveWeight.apply(self.weight_layout, *self.parts())  # type: ignore[no-untyped-call]
        return value.to(cast(Tensor, self.raw_weight).dtype)

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        """The effective bias, (out_features,), or None; read-only."""
        if self.bias_layout is None:
            return None
        value: Tensor = _EffectiveWeight.apply(self.bias_layout, *self.parts(bias=True))  # type: ignore[no-untyped-call]
        return value.to(cast(Tensor, self.raw_bias).dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input w_eff^T + b_eff``."""
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        bias = self.bias
        product: Tensor = _CurvedLinear.apply(  # type: ignore[no-untyped-call]
            self.weight_layout, input.to(dtype), None if bias is None else bias.to(dtype), *self.parts()
        )
        return product

    def extra_repr(self) -> str:
        """Describe the layer as `nn.Linear` does, and its map."""
        layout = self.weight_layout
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias_layout is not None}, "
            f"mode={layout.config.mode!r}, beta={layout.beta:.4g}"
        )

    @torch.no_grad()
    def to_linear(self) -> nn.Linear:
        """Return the plain layer with the effective values, of the class that was converted."""
        raw = cast(Tensor, self.raw_weight)
        linear = self.linear_type.__new__(self.linear_type)
        nn.Linear.__init__(linear, self.in_features, self.out_features, self.bias is not None, "meta", raw.dtype)
        linear.weight = nn.Parameter(self.weight, requires_grad=raw.requires_grad)
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias, requires_grad=cast(Tensor, self.raw_bias).requires_grad)
        return linear.train(self.training)


def convert(model: nn.Module, config: SELConfig | None = None, start: str = "matched") -> nn.Module:
    """Put the linear layers of `model` in curved weight space, in place, and return it (paper, sections 3.2, 3.3).

    Args:
        model: any module; a bare `nn.Linear` cannot change in place, so use what is returned.
        config: the map and the parameters it takes (see :func:`symexplin.routing`); default `SELConfig()`.
        start: "matched": effective weights equal the weights found, to rounding. "mismatched" (the paper's, for
            mode "mismatch" alone): they become mismatch(congruent_inverse(weights found)).

    Tied layers stay tied; curved parameters of other modules than `nn.Linear` stay plain, with a warning. The
    largest difference to the weights found is logged (logger "symexplin", level INFO).

    Raises:
        ValueError: weights that are not finite or that the map cannot reach, naming the layer; the model is then
            unchanged.

    >>> model = convert(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    >>> type(model[0]).__name__, type(fold(model)[0]).__name__
    ('SELLinear', 'Linear')
    """
    config = config or SELConfig()
    check_choice("start", start, START_RULES)
    routes = {id(route.parameter): route for route in routing(model, config).curved}
    fresh: dict[int, SELLinear] = {}
    built: dict[int, nn.Module] = {}
    taken: set[int] = set()
    for name, module in model.named_modules():
        if not _convertible(module) or id(module.weight) not in routes:
            continue
        layer = _curve(name or "model", cast(nn.Linear, module), routes, config, start)
        taken |= {id(p) for p in module.parameters(recurse=False)}
        twin = fresh.setdefault(id(module.weight), layer)
        if twin is not layer:
            _share(layer, twin)
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

    Returns the model (a bare SELLinear cannot change in place, so use what is returned). Tied layers stay tied.
    The largest difference between the effective weights in float32 or float64 and those stored is logged.

    >>> layer = SELLinear(4, 2)
    >>> torch.equal(fold(nn.Sequential(layer))[0].weight, layer.weight)
    True
    """
    built: dict[int, nn.Module] = {}
    weights: dict[int, nn.Linear] = {}
    for module in model.modules():
        if isinstance(module, SELLinear):
            linear = module.to_linear()
            twin = weights.setdefault(id(module.raw_weight), linear)
            if twin is not linear:
                linear.weight = twin.weight
            built[id(module)] = linear
    _report("folded", built, model)
    return _replace(model, built)


def _convertible(module: nn.Module) -> bool:
    """Whether a module does just what nn.Linear does (MultiheadAttention's out_proj is such a subclass)."""
    return type(module) in (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear)


def _curve(name: str, module: nn.Linear, routes: dict[int, Route], config: SELConfig, start: str) -> SELLinear:
    weight = routes[id(module.weight)]
    bias = None
    if module.bias is not None:
        route = routes.get(id(module.bias))
        bias = route.layout(config) if route else Layout(tuple(module.bias.shape), 0, 1.0, _IDENTITY)
    try:
        return SELLinear.from_linear(module, weight.layout(config), bias, start, weight.position)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _share(layer: SELLinear, twin: SELLinear) -> None:
    """Tie the weight side of two curved layers whose plain weights were one parameter."""
    names = ["raw_weight", *(slot.name for slot in layer.weight_layout.slots)]
    for name in names:
        layer.register_parameter(name, getattr(twin, name))


def _replace(model: nn.Module, built: dict[int, nn.Module]) -> nn.Module:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if id(child) in built:
                setattr(parent, name, built[id(child)])
    return built.get(id(model), model)


@torch.no_grad()
def _report(verb: str, built: dict[int, nn.Module], model: nn.Module) -> None:
    """Log the largest difference between effective and plain values over all replaced layers."""
    if not built or not _logger.isEnabledFor(logging.INFO):
        return
    largest = 0.0
    for old in model.modules():
        new = built.get(id(old))
        if new is not None:
            for a, b in zip(_values(old), _values(new), strict=True):
                largest = max(largest, float((a.double() - b.double()).abs().max()))
    _logger.info("%s %d layers; largest difference of a weight %.3g", verb, len(built), largest)


def _values(module: nn.Module) -> Iterator[Tensor]:
    if isinstance(module, SELLinear):
        for bias in (False, True)[: 1 if module.bias_layout is None else 2]:
            layout = module.bias_layout if bias else module.weight_layout
            yield _coordinates(cast(Layout, layout), module.parts(bias)).effective()
    else:
        yield from (p for p in (module.weight, module.bias) if isinstance(p, Tensor))
