"""Modules that store raw weights (the paper's form): :class:`SELLinear`, and :func:`convert` for whole models.

A converted module has a class with its curved parameters as read-only properties. It keeps its identity, its hooks and
its attributes, and :func:`fold` gives it its plain class back.
"""

import copy
import dataclasses
import functools
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from symexplin.checks import check_flag, naming
from symexplin.config import SELConfig, check_config
from symexplin.curve import Curved, CurvedBase, Map, ScaleTensor
from symexplin.effective import READ_ONLY, curved_linear, curved_of, effective, read_only
from symexplin.routes import check_model, routing

__all__ = ["CurvedModule", "SELLinear", "convert", "fold"]

_logger = logging.getLogger("symexplin")

# The map of one curved parameter, its "raw" and the tensors of its scales.
RawParameters = tuple[Map, dict[str, nn.Parameter]]
Values = Sequence[tuple[nn.Module, dict[str, Tensor]]]  # modules with values of their curved parameters


class _Calls(threading.local):
    """The running forwards of curved modules with their effective values, of each thread for itself."""

    def __init__(self) -> None:
        self.stack: list[tuple[nn.Module, dict[str, Tensor]]] = []


_calls = _Calls()


class CurvedModule(CurvedBase):
    """Mixin of modules with curved parameters.

    A curved parameter X is a read-only property, computed on access and once per forward. The module's own parameters
    are `raw_X` and the scales `X_e_row`, `X_m_column`, ...; those of `weight` have no prefix.
    """

    sel_plain_type: ClassVar[type[nn.Module]]
    sel_maps: dict[str, Map]  # by the name of the plain parameter

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the plain module returns with the effective weights, each computed once."""
        _calls.stack.append((self, {name: getattr(self, name) for name in self.sel_maps}))
        try:
            return super().forward(*args, **kwargs)
        finally:
            _calls.stack.pop()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter; one that would replace an effective value is refused."""
        if name in self.__dict__.get("sel_maps", ()):
            raise AttributeError(READ_ONLY)
        super().register_parameter(name, param)

    def sel_roles(self) -> dict[str, tuple[Map, ScaleTensor | None]]:
        """Return (map, None) for every raw weight and (map, tensor) for every tensor of a scale, by local names."""
        roles: dict[str, tuple[Map, ScaleTensor | None]] = {}
        for name, spec in self.sel_maps.items():
            roles[_local(name, "raw")] = spec, None
            roles |= {_local(name, tensor.name): (spec, tensor) for tensor in spec.tensors}
        return roles

    def sel_curved(self, name: str = "weight") -> Curved:
        """Return the map of a curved parameter at the present raw weight and scales."""
        return curved_of(self.sel_maps[name], self._parts(name))

    def _parts(self, name: str) -> tuple[Tensor, ...]:
        names = ("raw", *(tensor.name for tensor in self.sel_maps[name].tensors))
        return tuple(cast(Tensor, getattr(self, _local(name, part))) for part in names)

    @torch.no_grad()
    def sel_effective(self) -> dict[str, Tensor]:
        """Return the effective values of the curved parameters by name, in the compute dtype."""
        return {name: self.sel_curved(name).effective() for name in self.sel_maps}

    def extra_repr(self) -> str:
        """Describe the module as the plain one does, with its map."""
        spec = next(iter(self.sel_maps.values()))
        return ", ".join(filter(None, (super().extra_repr(), f"mode={spec.config.mode!r}, beta={spec.beta:.4g}")))


def _local(name: str, part: str) -> str:
    """Return the local name of a part of a curved parameter.

    >>> _local("weight", "raw"), _local("weight", "e_row"), _local("bias", "raw"), _local("bias", "e_row")
    ('raw_weight', 'e_row', 'raw_bias', 'bias_e_row')
    """
    if part == "raw":
        return f"raw_{name}"
    return part if name == "weight" else f"{name}_{part}"


def _redrawing(method: str) -> Any:
    """Return the method that draws new weights as that of the plain module does, and starts from them."""

    @torch.no_grad()
    def reset(self: CurvedModule) -> None:
        plain = fold(copy.deepcopy(self))
        before = {name: value._version for name, value in plain.named_parameters()}
        getattr(plain, method)()
        for path, drawn in plain.named_parameters():
            owner, _, name = path.rpartition(".")
            module: Any = self.get_submodule(owner)
            if drawn._version == before[path]:  # nn.MultiheadAttention leaves the weight of its output projection
                continue
            if isinstance(module, CurvedModule) and name in module.sel_maps:
                for part, value in _raw_parameters(drawn, module.sel_maps[name], 0)[1].items():
                    getattr(module, _local(name, part)).copy_(value)
            else:
                getattr(module, name).copy_(drawn)

    return reset


def _effective_property(name: str) -> property:
    """Return the read-only property of a curved parameter; it is the parameter of a module that has it plain."""

    def get(self: CurvedModule) -> Tensor | None:
        if name not in self.sel_maps:
            return self._parameters[name]
        if _calls.stack and _calls.stack[-1][0] is self:
            return _calls.stack[-1][1][name]
        return read_only(self.sel_maps[name], self._parts(name))

    def put(self: CurvedModule, value: Any) -> None:
        if name in self.sel_maps:
            raise AttributeError(READ_ONLY)
        self._parameters[name] = value  # a replica of nn.DataParallel has tensors, which nn.Module does not register

    def remove(_: CurvedModule) -> None:
        raise AttributeError(READ_ONLY)

    return property(get, put, remove, f"The effective {name}, in the dtype of the raw one; read-only.")


class SELLinear(CurvedModule, nn.Linear):
    """A linear layer in curved weight space: ``y = x w_eff(raw_weight)^T + b_eff(raw_bias)`` (paper, Eq. 7).

    Its parameters are `raw_weight`, `raw_bias` and the learned scales (`e_row`, `m_column`, ..., `bias_e_row`).
    `weight` and `bias` are the effective values: computed on access, read-only and differentiable. Backward recomputes
    the effective weight instead of saving it. Under autocast the product runs in the autocast dtype, the map in
    float32.

    Args:
        in_features, out_features, bias, device, dtype: as in `nn.Linear`, whose initial weights it keeps.
        config: the map; include and exclude are ignored. The width is the larger of both sizes.

    Raises:
        ValueError: bias is not True or False, or config is no SELConfig.

    >>> layer = SELLinear(8, 4)
    >>> layer(torch.zeros(2, 8)).shape, layer.raw_weight.shape
    (torch.Size([2, 4]), torch.Size([4, 8]))
    """

    sel_plain_type = nn.Linear
    weight = _effective_property("weight")
    bias = _effective_property("bias")
    reset_parameters = _redrawing("reset_parameters")

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

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input w_eff^T + b_eff``."""
        if "weight" not in self.sel_maps:
            return cast(Tensor, super().forward(input))
        maps, parts = self.sel_maps, self._parts("weight")
        bias = effective(maps["bias"], self._parts("bias")) if "bias" in maps else self.bias
        return curved_linear(
            *(maps["weight"], _cast_dtype(parts[0])),
            *(input.to(_cast_dtype(input)), None if bias is None else bias.to(_cast_dtype(bias))),
            parts,
        )


def _cast_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which autocast takes a tensor into a product: float64 and integers stay what they are."""
    kind, dtype = tensor.device.type, tensor.dtype
    casts = tensor.is_floating_point() and dtype != torch.float64 and kind != "meta"  # which autocast does not know
    return torch.get_autocast_dtype(kind) if casts and torch.is_autocast_enabled(kind) else dtype


@functools.cache
def _curved_type(kind: Any, names: tuple[str, ...]) -> type[CurvedModule]:
    """Return the class of modules of a `kind` with these curved parameters; equal arguments give the same class."""
    if kind is nn.Linear:
        return SELLinear
    members: dict[str, Any] = {name: _effective_property(name) for name in names}
    members |= {"__module__": __name__, "__doc__": f"{kind.__name__} with raw weights, see :class:`CurvedModule`."}
    methods = ("reset_parameters", "_reset_parameters")  # the second is that of nn.MultiheadAttention
    members |= {method: _redrawing(method) for method in methods if hasattr(kind, method)}
    return type(f"SEL{kind.__name__}", (_Unnamed, kind), members | {"sel_plain_type": kind})


class _Unnamed(CurvedModule):
    """Base of the classes that :func:`_curved_type` makes; pickles name the kind, as no name here is theirs."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a plain module for its arguments: PEFT makes factors of the type of the layer that they adapt."""
        return cls.sel_plain_type(*args, **kwargs) if args or kwargs else super().__new__(cls)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _empty, (self.sel_plain_type, tuple(self.sel_maps)), dict(self.__dict__)


def _empty(kind: Any, names: tuple[str, ...]) -> nn.Module:
    made: Any = _curved_type(kind, names)
    return cast(nn.Module, made.__new__(made))


@torch.inference_mode(False)
@torch.no_grad()
def _raw_parameters(plain: nn.Parameter, spec: Map, position: int) -> RawParameters:
    """Return the map of a parameter with its raw weight and its scales at their first values.

    Raises:
        ValueError: a weight is not finite or out of the map's reach.
    """
    tensors = spec.start(plain.dtype, plain.device, position)
    raw = torch.empty_like(plain)  # in the same memory format
    if _has_values(plain):
        start = curved_of(spec, (plain, *tensors.values()))  # with the scales as stored: half precision rounds them
        raw.copy_(start.inverse(start.raw))
    return spec, {name: nn.Parameter(value) for name, value in {"raw": raw, **tensors}.items()}


def _has_values(tensor: Tensor) -> bool:
    return not tensor.is_meta and not is_fake(tensor)


def _curve_(module: nn.Module, made: Mapping[str, RawParameters]) -> nn.Module:
    """Replace parameters of `module` by their raw weights and scales, in place, and return it."""
    own: dict[str, nn.Parameter | None] = {}
    for name, parameter in module._parameters.items():
        if name in made:
            own |= {_local(name, part): value for part, value in made[name][1].items()}
        else:
            own[name] = parameter
    kind: Any = type(module)
    module.__class__ = _curved_type(kind, tuple(made))
    module.__dict__ |= {"_parameters": own, "sel_maps": {name: spec for name, (spec, _) in made.items()}}
    return module


@torch.inference_mode(False)
@torch.no_grad()
def _plain_(module: CurvedModule, known: dict[int, nn.Parameter]) -> nn.Module:
    """Replace the raw weights and scales of `module` by its effective weights, in place, and return it.

    `known` has the plain parameters of raw ones that were folded before, by their ids: tied ones stay tied.
    """
    roles = module.sel_roles()
    own: dict[str, nn.Parameter | None] = {}
    for local, parameter in module._parameters.items():
        if local not in roles:
            own[local] = parameter
        elif parameter is not None and roles[local][1] is None:
            name = local.removeprefix("raw_")
            if id(parameter) not in known:
                value = torch.empty_like(parameter).copy_(getattr(module, name))  # in the same memory format
                known[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
            own[name] = known[id(parameter)]
    plain: nn.Module = module
    plain.__class__ = module.sel_plain_type
    plain.__dict__["_parameters"] = own
    del plain.__dict__["sel_maps"]
    return plain


def convert(model: nn.Module, config: SELConfig | None = None) -> nn.Module:
    """Convert the curved layers of `model` to modules with raw weights, in place, and return it (paper, section 4.2).

    The present weights stay the effective weights, up to rounding. Layers keep their identity, hooks and attributes;
    tied ones stay tied. :class:`symexplin.SELLinear` recomputes its effective weight for backward; other modules keep
    it between forward and backward. The largest change of a weight is logged (logger "symexplin", level INFO).

    Args:
        model: any module.
        config: the map and the choice of parameters (see :func:`symexplin.routing`); default `SELConfig()`.

    Raises:
        ValueError: nothing to curve, in a model that is not converted; weights that are not finite or out of the map's
            reach. The message names the layer. The model is unchanged.

    >>> model = convert(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    >>> type(model[0]).__name__, type(fold(model)[0]).__name__
    ('SELLinear', 'Linear')
    """
    table = routing(model, config)
    if not table.curved and not any(isinstance(module, CurvedModule) for module in model.modules()):
        raise ValueError(f"model has nothing to curve; see print(symexplin.routing(model)):\n{table}")
    made: dict[int, RawParameters] = {}  # by the id of the plain parameter, so that tied ones stay tied
    for route in table.curved:
        with naming(route.name):
            made[id(route.parameter)] = _raw_parameters(route.parameter, route.map(table.config), route.position)
    plain: list[tuple[nn.Module, dict[str, Tensor]]] = []
    for module in model.modules():
        parameters = {name: p for name, p in module._parameters.items() if id(p) in made}
        if parameters:
            plain.append((module, cast(dict[str, Tensor], parameters)))
            _curve_(module, {name: made[id(p)] for name, p in parameters.items()})
    _report("converted", plain)
    return model


def fold(model: nn.Module) -> nn.Module:
    """Make every curved module of `model` a plain one with its effective weights, in place, and return the model.

    Tied layers stay tied. The largest difference between the effective weights, in float32 or float64, and the stored
    ones is logged.

    Raises:
        ValueError: a raw weight or a scale is no parameter any more, because it was parametrized or pruned. The model
            is unchanged.

    >>> layer = SELLinear(4, 2)
    >>> torch.equal(fold(nn.Sequential(layer))[0].weight, layer.weight)
    True
    """
    check_model(model)
    known: dict[int, nn.Parameter] = {}
    curved = []
    for path, module in model.named_modules():
        if isinstance(module, CurvedModule):
            curved.append(module)
            for local in module.sel_roles():
                if local not in module._parameters:
                    raise ValueError(
                        f"model must have the parameter {f'{path}.{local}'.lstrip('.')!r}, which was parametrized or "
                        "pruned: undo it first, as torch.nn.utils.parametrize.remove_parametrizations does"
                    )
    exact = [(module, module.sel_effective()) for module in curved if _logger.isEnabledFor(logging.INFO)]
    for module in curved:
        _plain_(module, known)
    _report("folded", exact)
    return model


@torch.no_grad()
def _report(verb: str, before: Values) -> None:
    """Log the largest difference between the values `before` and the present ones, over all modules."""
    if not before or not _logger.isEnabledFor(logging.INFO):
        return
    largest = 0.0
    for module, values in before:
        for name, value in values.items():
            if _has_values(value):
                largest = max(largest, float((value.double() - getattr(module, name).double()).abs().max()))
    _logger.info("%s %d layers; largest difference of a weight %.3g", verb, len(before), largest)
