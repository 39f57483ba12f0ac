"""Layers that store raw weights (the paper's form): :class:`SELLinear`, and :func:`convert` for whole models."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from symexplin.checks import check_flag, naming
from symexplin.closed import Closed
from symexplin.config import SELConfig, check_config
from symexplin.routes import check_model, is_convertible, routing
from symexplin.spec import CurvedBase, CurvedWeight, ScaleTensor, Spec, sides
from symexplin.transform import compute_dtype

__all__ = ["SELLinear", "convert", "fold"]

# The map of one curved parameter, its "raw" and the tensors of its scales.
Start = tuple[Spec, dict[str, nn.Parameter]]


class SELLinear(CurvedBase):
    """A linear layer in curved weight space: ``y = x w_eff(raw_weight)^T + b_eff(raw_bias)`` (paper, Eq. 7).

    It is not an `nn.Linear`. Libraries that look for an `nn.Linear` to overwrite or wrap pass it over: PEFT's
    "all-linear", torchao's `quantize_`, transformers' `_init_weights`. Call :func:`symexplin.fold` before you use them.

    Its parameters are `raw_weight`, `raw_bias` and the learned scales (`e_row`, `m_column`, ..., `bias_e_row`).
    `weight` and `bias` are the effective values: computed on access and differentiable. A write into one is lost, as
    with torch's parametrizations. Backward recomputes the effective weight instead of saving it. Under autocast the
    product runs in the autocast dtype, the map in float32.

    Args:
        in_features, out_features, bias, device, dtype: as in `nn.Linear`, whose initial weights it keeps.
        config: the map; include and exclude are ignored. The width is the larger of both sizes.

    Raises:
        ValueError: bias is not True or False, or config is no SELConfig.

    >>> layer = SELLinear(8, 4)
    >>> layer(torch.zeros(2, 8)).shape, layer.raw_weight.shape
    (torch.Size([2, 4]), torch.Size([4, 8]))
    """

    specs: dict[str, Spec]  # by the name of the plain parameter; a bias that stays plain has none
    plain: nn.Module  # the layer that this one replaces, without its weights
    in_features: int
    out_features: int
    raw_weight: nn.Parameter
    raw_bias: nn.Parameter | None  # the bias itself where it stays plain

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        config: SELConfig | None = None,
    ) -> None:
        plain = nn.Linear(in_features, out_features, check_flag("bias", bias), device, dtype)
        config = dataclasses.replace(check_config(config), include=(), exclude=())
        self.__dict__ = convert(plain, config).__dict__

    @classmethod
    def _replacing(cls, plain: nn.Module, starts: Mapping[int, Start]) -> "SELLinear":
        """Return the layer that replaces `plain` and takes its parameters; `starts` has those of curved ones by id."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.training, layer.specs = plain.training, {}
        for name, parameter in plain._parameters.items():
            if id(parameter) in starts:
                layer.specs[name], parts = starts[id(parameter)]
                for part, value in parts.items():
                    layer.register_parameter(_local(name, part), value)
            else:
                layer.register_parameter(_local(name, "raw"), parameter)
        weight = layer.specs["weight"]
        layer.out_features, layer.in_features = sides(weight.axes, weight.shape)
        plain._parameters.update(dict.fromkeys(plain._parameters))
        layer.__dict__["plain"] = plain  # not as a submodule
        return layer

    @property
    def weight(self) -> Tensor:
        """The effective weight in the dtype of the raw one, computed on access. A write into it is lost."""
        return cast(Tensor, self._effective("weight"))

    @property
    def bias(self) -> Tensor | None:
        """The effective bias in the dtype of the raw one, computed on access. A write into it is lost."""
        return self._effective("bias")

    def _effective(self, name: str) -> Tensor | None:
        if name not in self.specs:
            return self.raw_bias
        spec, parts = self.specs[name], self._parts(name)
        if torch.compiler.is_compiling():  # a compiler chooses by itself what to recompute
            return _curved(spec, parts).effective(parts[0].dtype)
        return cast(Tensor, _Effective.apply(spec, *parts))  # type: ignore[no-untyped-call]

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input w_eff^T + b_eff``."""
        bias, spec = self.bias, self.specs["weight"]
        if torch.compiler.is_compiling():
            return F.linear(input, self.weight if spec.axes == "oi" else self.weight.mT, bias)
        inputs = _cast(input), None if bias is None else _cast(bias), *self._parts("weight")
        return cast(Tensor, _Linear.apply(spec, *inputs))  # type: ignore[no-untyped-call]

    def curved(self, name: str = "weight") -> CurvedWeight:
        """Return the map of a curved parameter at the present raw weight and scales."""
        return _curved(self.specs[name], self._parts(name))

    def sel_roles(self) -> dict[str, tuple[Spec, ScaleTensor | None]]:
        """Return (map, None) for every raw weight and (map, tensor) for every tensor of a scale, by local names."""
        roles: dict[str, tuple[Spec, ScaleTensor | None]] = {}
        for name, spec in self.specs.items():
            roles[_local(name, "raw")] = spec, None
            roles |= {_local(name, tensor.name): (spec, tensor) for tensor in spec.tensors}
        return roles

    def _parts(self, name: str) -> tuple[Tensor, ...]:
        parts = ("raw", *(tensor.name for tensor in self.specs[name].tensors))
        return tuple(getattr(self, _local(name, part)) for part in parts)

    def _folded(self, known: dict[Tensor, nn.Parameter]) -> nn.Module:
        """Return the plain layer with the effective weights; `known` has those of raw ones that were folded before."""
        for name in self.plain._parameters:
            parameter = getattr(self, _local(name, "raw"))
            if name in self.specs:
                if parameter not in known:
                    known[parameter] = nn.Parameter(getattr(self, name), parameter.requires_grad)
                parameter = known[parameter]
            setattr(self.plain, name, parameter)
        return self.plain.train(self.training)

    def extra_repr(self) -> str:
        """Describe the layer as the plain one does, with its map."""
        spec, bias = self.specs["weight"], self.raw_bias is not None
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}"
        return f"{sizes}, mode={spec.config.mode!r}, beta={spec.beta:.4g}"


def _local(name: str, part: str) -> str:
    """Return the local name of a part of a curved parameter.

    >>> _local("weight", "raw"), _local("weight", "e_row"), _local("bias", "raw"), _local("bias", "e_row")
    ('raw_weight', 'e_row', 'raw_bias', 'bias_e_row')
    """
    if part == "raw":
        return f"raw_{name}"
    return part if name == "weight" else f"{name}_{part}"


def _cast(tensor: Tensor) -> Tensor:
    """Return a tensor as autocast takes it into a product: float64 and integers stay what they are."""
    kind = tensor.device.type
    casts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    casts = casts and tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(torch.get_autocast_dtype(kind)) if casts else tensor


def _curved(spec: Spec, parts: Sequence[Tensor]) -> CurvedWeight:
    """Return the map at `parts`, a raw weight and the tensors of its scales, in the compute dtype."""
    dtype = compute_dtype(*parts)
    raw, *tensors = (part.to(dtype) for part in parts)
    return CurvedWeight(spec, raw, dict(zip((tensor.name for tensor in spec.tensors), tensors, strict=True)))


def _vjp(spec: Spec, parts: Sequence[Tensor]) -> tuple[Tensor, Callable[[Tensor], list[Tensor]]]:
    """Return the effective weight in the compute dtype, and the function from its gradient to those of `parts`."""
    curved = _curved(spec, parts)
    if spec.is_closed:  # the slope follows from the weight
        weight = curved.effective()
        return weight, lambda g: [(g * Closed.of(spec.config).slope(weight)).to(parts[0].dtype)]
    weight, by_name = curved.vjp()

    def pull(g: Tensor) -> list[Tensor]:
        raw, tensors = by_name(g)
        return [grad.to(part.dtype) for grad, part in zip((raw, *tensors.values()), parts, strict=True)]

    return weight, pull


class _Effective(torch.autograd.Function):
    """raw, scales -> effective weight in the dtype of raw; saves only its inputs."""

    @staticmethod
    def forward(ctx: Any, spec: Spec, *parts: Tensor) -> Tensor:
        ctx.spec = spec
        ctx.save_for_backward(*parts)
        return _curved(spec, parts).effective(parts[0].dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        _, pull = _vjp(ctx.spec, ctx.saved_tensors)
        return None, *pull(g)


class _Linear(torch.autograd.Function):
    """x, bias, raw, scales -> x w_eff^T + bias; saves x, raw and scales, and computes w_eff again in backward.

    F.linear would keep the effective weight from forward to backward: as much memory as the raw weights once more.
    """

    @staticmethod
    def forward(ctx: Any, spec: Spec, x: Tensor, bias: Tensor | None, *parts: Tensor) -> Tensor:
        ctx.spec = spec
        ctx.save_for_backward(x, *parts)
        weight = _curved(spec, parts).effective(parts[0].dtype)
        return F.linear(x, weight if spec.axes == "oi" else weight.mT, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, *parts = ctx.saved_tensors
        (weight, pull), is_oi = _vjp(ctx.spec, parts), ctx.spec.axes == "oi"
        rows, inputs = g.reshape(-1, g.shape[-1]), x.reshape(-1, x.shape[-1])
        g_x = g @ (weight if is_oi else weight.mT).to(g.dtype) if ctx.needs_input_grad[1] else None
        g_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return None, g_x, g_bias, *pull(rows.mT @ inputs if is_oi else inputs.mT @ rows)


def _start(plain: Tensor, spec: Spec, position: int) -> Start:
    """Return the map of a parameter with its raw weight and its scales at their first values.

    Raises:
        ValueError: a weight is not finite or out of the map's reach.
    """
    if spec.is_closed:
        Closed.of(spec.config)  # raises for scales that no home trains with
    tensors = spec.first_values(plain.dtype, plain.device, position)
    raw = torch.empty_like(plain)
    if not plain.is_meta:
        start = _curved(spec, (plain, *tensors.values()))  # with the scales as stored: half precision rounds them
        raw.copy_(start.inverse(start.raw))
    return spec, {name: nn.Parameter(value) for name, value in {"raw": raw, **tensors}.items()}


def _replace(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Replace layers wherever they are registered in `model`, and return it, or what replaces it."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and child in replacements:
                setattr(parent, name, replacements[child])
    return replacements.get(model, model)


@torch.inference_mode(False)
@torch.no_grad()
def convert(model: nn.Module, config: SELConfig | None = None) -> nn.Module:
    """Replace the linear layers of `model` by :class:`symexplin.SELLinear`, and return it (paper, section 4.2).

    It replaces layers whose type is exactly `nn.Linear`, transformers' `Conv1D`, or that of the output projection of
    `nn.MultiheadAttention`, and whose weight :func:`symexplin.routing` curves. All else stays plain, such as subclasses
    and parameters of other modules. The present weights stay the effective weights, up to rounding. Tied layers stay
    tied. A replaced layer has no weights, and its hooks do not run, until :func:`symexplin.fold` puts it back. If the
    model itself is such a layer, the returned one replaces it.

    Args:
        model: any module.
        config: the map and the choice of parameters (see :func:`symexplin.routing`); default `SELConfig()`.

    Raises:
        ValueError: nothing to replace; weights that are not finite or out of the map's reach. The message names the
            parameter. The model is unchanged.

    >>> model = convert(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    >>> type(model[0]).__name__, type(fold(model)[0]).__name__
    ('SELLinear', 'Linear')
    """
    table = routing(model, config)
    curved = {id(route.parameter) for route in table.curved}
    layers = {m for m in model.modules() if is_convertible(m) and id(m._parameters.get("weight")) in curved}
    # What another module has, too, stays plain, so that it stays tied.
    shared = {id(p) for module in model.modules() if module not in layers for p in module._parameters.values()}
    layers = {layer for layer in layers if id(layer.weight) not in shared}
    if not layers:
        raise ValueError(f"model has no layer to convert; see print(symexplin.routing(model)):\n{table}")
    inside = {id(p) for layer in layers for p in layer._parameters.values()} - shared
    starts: dict[int, Start] = {}  # by the id of the plain parameter: tied ones have one start
    for route in table.curved:
        if id(route.parameter) in inside:
            with naming(route.name):
                starts[id(route.parameter)] = _start(route.parameter, route.spec(table.config), route.position)
    return _replace(model, {layer: SELLinear._replacing(layer, starts) for layer in layers})


@torch.inference_mode(False)
@torch.no_grad()
def fold(model: nn.Module) -> nn.Module:
    """Put back the plain layers that :func:`symexplin.convert` replaced, with the effective weights; return `model`.

    Tied layers stay tied. If the model itself is a :class:`symexplin.SELLinear`, the returned layer replaces it.

    >>> layer = SELLinear(4, 2)
    >>> torch.equal(fold(nn.Sequential(layer))[0].weight, layer.weight)
    True
    """
    check_model(model)
    known: dict[Tensor, nn.Parameter] = {}
    curved = [module for module in model.modules() if isinstance(module, SELLinear)]
    return _replace(model, {layer: layer._folded(known) for layer in curved})
