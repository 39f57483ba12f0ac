"""Which parameters are curved, and why: by the type of the module that owns them."""

import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parallel import DataParallel, DistributedDataParallel

from symexplin.checks import as_numbers, check_not_negative
from symexplin.config import SELConfig, check_config
from symexplin.spec import CurvedBase, Spec, is_weight, sides, usual_side
from symexplin.transform import check_invertible

__all__ = [
    *("Rate", "Route", "Routing", "by_name", "check_model", "check_no_decay", "check_values", "is_convertible"),
    *("matching", "rate_of", "routing"),
]

# Patterns of the last part of a module's name.
_HEADS = ("head", "*_head", "classifier", "score", "output")
_ROUTERS = ("router", "*gate")  # beside experts
# Parts of parameters' names that torch.compile, activation checkpointing and FSDP1 add.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}

T = TypeVar("T")
Rate = float | Tensor | Mapping[str, float]  # a number, or numbers by name pattern
_INSIDE = "curved in its module"
_EMBEDDING = "embedding"
_AXES = {
    **{"oi": "matrix, outputs by inputs", "io": "matrix, inputs by outputs", "o": "bias"},
    **{"eoi": "experts, outputs by inputs", "eio": "experts, inputs by outputs", "eo": "expert bias"},
}
_INCLUDED = {2: "oi", 3: "eoi"}  # the axes of included parameters of other modules


@dataclass(frozen=True)
class Route:
    """The decision for one parameter."""

    name: str
    parameter: nn.Parameter = field(repr=False, compare=False)
    position: int  # in named_parameters order: seeds LoRA's A
    curved: bool
    reason: str
    axes: str = ""  # of a parameter that is curved, or would be if it were not frozen; see symexplin.spec
    lr: float | None = None  # None: the optimizer's
    weight_decay: float | None = None

    @property
    def is_weight(self) -> bool:
        """Whether a parameter with axes has rows and columns; biases do not."""
        return is_weight(self.axes)

    def spec(self, config: SELConfig) -> Spec:
        """Return the map of a curved parameter."""
        return Spec.of(tuple(self.parameter.shape), self.axes, config)


@dataclass(frozen=True)
class Routing:
    """The decision for every parameter of a model; prints as a table.

    `config` is the map with the numbers that the model's `width` gives it. The width is the side that occurs most often
    among the matrices that are curved, or would be if they were not frozen; the larger one on a tie. Where there are
    only biases, their lengths count. None: nothing is curved.
    """

    routes: tuple[Route, ...]
    config: SELConfig
    width: int | None

    def __iter__(self) -> Iterator[Route]:
        return iter(self.routes)

    def __len__(self) -> int:
        return len(self.routes)

    @property
    def curved(self) -> tuple[Route, ...]:
        """The curved parameters, in named_parameters order."""
        return tuple(route for route in self.routes if route.curved)

    def __str__(self) -> str:
        word = "mapped" if self.config.mode == "linear" else "curved"
        columns: dict[str, list[Any]] = {
            "parameter": [r.name for r in self.routes],
            "shape": ["x".join(map(str, r.parameter.shape)) or "scalar" for r in self.routes],
            "": [word if r.curved else "plain" for r in self.routes],
            "lr": [r.lr for r in self.routes],
            "decay": [r.weight_decay for r in self.routes],
            "reason": [r.reason for r in self.routes],
        }
        # Rates are shown if there are some.
        shown = {name: values for name, values in columns.items() if any(v is not None for v in values) or not values}
        rows = [tuple(shown), *(tuple(map(_cell, row)) for row in zip(*shown.values(), strict=True))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        inside, total = (sum(r.parameter.numel() for r in routes) for routes in (self.curved, self.routes))
        lines.append(f"{word}: {len(self.curved)} of {len(self.routes)} tensors, {inside:,} of {total:,} numbers")
        lines[-1] += f" ({100.0 * inside / max(total, 1):.1f}%)"
        if self.width is not None:
            lines.append(f"map: {self.config}; width {self.width}")
        return "\n".join(lines)


def _cell(value: object) -> str:
    """Return a cell of the table; "-" stands for the optimizer's rate."""
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def routing(
    model: nn.Module | torch.optim.Optimizer,
    config: SELConfig | None = None,
    *,
    lr: Rate | None = None,
    weight_decay: Rate | None = None,
    no_decay: Sequence[str] | str = (),
    whole: nn.Module | None = None,
) -> Routing:
    """Decide for every parameter of `model` whether it is curved, and give the reason.

    The weights and biases of `nn.Linear` and of transformers' `Conv1D`, the input projections of
    `nn.MultiheadAttention` and experts in one tensor are curved. Plain are embeddings and parameters tied to them,
    the output head, routers of mixtures of experts, norms, convolutions and all else. LoRA's factors under PEFT are
    linear layers and therefore curved. "Optimizer only" is what :func:`symexplin.convert` leaves plain.

    Args:
        model: a module, a part of `whole`, or an optimizer in raw space: the result is then the map that it trains,
            with its present rates, and the other arguments must not be given.
        config: the map. Its `include` and `exclude` patterns of qualified names override these rules.
        lr, weight_decay: a number, or {name pattern: number}: the first pattern that matches a name counts, and every
            name needs one ("*": all others). None: the optimizer's.
        no_decay: name patterns of parameters without weight decay; "vectors" for biases and norms, as in nanoGPT; or
            "usual" for embeddings, too.
        whole: the model that contains `model`. It determines the parameters' names, the width and the decisions.

    Raises:
        ValueError: a pattern matches nothing or is never used, or includes a parameter that is no bias of a layer, no
            matrix and no stack of matrices; `model` is not a part of `whole`, or an optimizer without a map.

    >>> model = nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4))
    >>> print(routing(model))
    parameter  shape          reason
    0.weight   4x8    curved  linear weight
    0.bias     4      curved  linear bias
    1.weight   4      plain   LayerNorm
    1.bias     4      plain   LayerNorm
    curved: 2 of 4 tensors, 36 of 44 numbers (81.8%)
    map: exp_only, beta 0.6629; width 8
    """
    if isinstance(model, torch.optim.Optimizer):
        if no_decay or any(argument is not None for argument in (config, lr, weight_decay, whole)):
            raise ValueError("config, lr, weight_decay, no_decay and whole must not be given with an optimizer")
        return _trained(model)
    check_model(model)
    config = check_config(config)
    whole = model if whole is None else whole
    check_model(whole, "whole")
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in _named_parameters(whole):
        names.setdefault(parameter, []).append(name)
    for name, parameter in model.named_parameters():
        if parameter not in names:
            raise ValueError(f"model must be a part of whole, but its parameter {name!r} is not in whole")
    own = [aliases[0] for aliases in names.values()]
    known = [name for aliases in names.values() for name in aliases]
    _check_patterns("include", config.include, known)
    _check_patterns("exclude", config.exclude, known)
    if not isinstance(no_decay := check_no_decay(no_decay), str):
        _check_patterns("no_decay", no_decay, own)
    rates, decays = _rates("lr", lr, own), _rates("weight_decay", weight_decay, own)
    candidates = _candidates(whole)
    routes = []
    for position, (parameter, (name, *others)) in enumerate(names.items()):
        candidate = candidates[id(parameter)]
        reason, axes = _decide([name, *others], parameter, candidate, config)
        decay = decays[name] if candidate.decays and not _undecayed(name, parameter, candidate, no_decay) else 0.0
        curved = bool(axes) and parameter.requires_grad
        routes.append(Route(name, parameter, position, curved, reason, axes, rates[name], decay))
    width = _width(routes)
    inside = {id(parameter) for parameter in model.parameters()}
    of_model = tuple(route for route in routes if id(route.parameter) in inside)
    return Routing(of_model, config if width is None else check_invertible(config.resolve(width)), width)


def _named_parameters(model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    """Return names and parameters, tied ones with every name, without the parts of names that wrappers add."""
    named = [(name.split("."), parameter) for name, parameter in model.named_parameters(remove_duplicate=False)]
    named = [([part for part in parts if part not in _WRAPPERS], parameter) for parts, parameter in named]
    is_parallel = any(isinstance(module, DataParallel | DistributedDataParallel) for module in model.modules())
    return [(".".join(parts[is_parallel:]), parameter) for parts, parameter in named]  # without "module"


def _trained(optimizer: torch.optim.Optimizer) -> Routing:
    """Return the routing of the map that an optimizer in raw space trains, from its groups."""
    maps = {(group["config"], group["width"]) for group in optimizer.param_groups if group.get("role") == "curved"}
    if len(maps) != 1:
        raise ValueError(
            f"model must be a module or an optimizer that trains one map, got {type(optimizer).__name__} with "
            f"{len(maps)} maps"
        )
    routes: list[Route] = []
    for group in optimizer.param_groups:
        lr, decay = rate_of(group), float(group["weight_decay"])
        for i, (name, parameter) in enumerate(zip(group["param_names"], group["params"], strict=True)):
            axes = group["axes"][i] if "axes" in group else ""
            # A group that was added without positions comes last.
            position = group["position"][i] if "position" in group else len(routes)
            routes.append(Route(name, parameter, position, bool(axes), _AXES.get(axes, ""), axes, lr, decay))
    config, width = maps.pop()
    return Routing(tuple(sorted(routes, key=lambda route: route.position)), SELConfig.from_json(config), width)


def _width(routes: Sequence[Route]) -> int | None:
    """Return the width of :class:`Routing`."""
    if not any(route.curved for route in routes):
        return None
    weights = [side for r in routes if r.is_weight for side in sides(r.axes, r.parameter.shape)]
    return usual_side(weights or [route.parameter.shape[-1] for route in routes if route.axes])


def _decide(aliases: list[str], parameter: Tensor, candidate: "_Candidate", config: SELConfig) -> tuple[str, str]:
    """Return the reason for the decision about a parameter, and the axes of :class:`Route`."""
    included, excluded = (first_match(aliases, patterns) for patterns in (config.include, config.exclude))
    if not parameter.is_floating_point():
        return "not floating point", ""
    if excluded is not None:
        return f"excluded by {excluded!r}", ""
    if not parameter.requires_grad:
        return "frozen", candidate.axes if candidate.curved else ""
    if included is None and not candidate.curved:
        return candidate.reason, ""
    if len(candidate.axes) != max(parameter.dim(), 1):
        raise ValueError(
            f"{aliases[0]} must be a matrix, a stack of matrices or a bias of a linear layer to be curved, got "
            f"{candidate.reason} with shape {tuple(parameter.shape)}"
        )
    reason = candidate.reason if included is None else f"included by {included!r}"
    return reason if candidate.convertible else f"{reason} (optimizer only)", candidate.axes


# ---- the decision by type ----


@dataclass(frozen=True)
class _Candidate:
    """The decision for a parameter by its module's type, before include and exclude patterns."""

    reason: str
    axes: str = ""  # if it is curved or included
    curved: bool = False
    convertible: bool = False
    decays: bool = True  # False for scales of a converted layer that shape the map


def is_convertible(module: nn.Module) -> bool:
    """Whether :func:`symexplin.convert` replaces a module: linear layers of exactly these types.

    >>> is_convertible(nn.Linear(2, 2)), is_convertible(nn.LazyLinear(2))
    (True, False)
    """
    kind = type(module)
    if kind.__name__ == "Conv1D":
        return kind.__module__.startswith("transformers.")
    return kind in (nn.Linear, NonDynamicallyQuantizableLinear)  # the second is nn.MultiheadAttention's out_proj


def _candidates(model: nn.Module) -> dict[int, _Candidate]:
    """Return the decision for every parameter by the module that owns it."""
    reasons = _plain_reasons(model)
    candidates: dict[int, _Candidate] = {}
    # Layers come first: other modules may have aliases of their parameters.
    for module in sorted(model.modules(), key=lambda module: not _linear_axes(module)):
        for local, parameter in module.named_parameters(recurse=False):
            candidates.setdefault(id(parameter), _candidate(module, local, parameter, reasons.get(id(parameter))))
    return candidates


def _candidate(module: nn.Module, local: str, parameter: Tensor, plain_reason: str | None) -> _Candidate:
    kind = type(module).__name__
    if isinstance(module, CurvedBase):
        if local not in (roles := module.sel_roles()):
            return _Candidate(kind)  # left plain when the module was converted
        spec, tensor = roles[local]
        return _Candidate(_INSIDE, "" if is_weight(spec.axes) else "o", decays=tensor is None or tensor.decays)
    reason, axes = _layer(module, local, parameter)
    if reason:
        return _Candidate(plain_reason or reason, axes, plain_reason is None, is_convertible(module))
    return _Candidate(plain_reason or kind, "" if isinstance(module, _ConvNd) else _INCLUDED.get(parameter.dim(), ""))


def _layer(module: nn.Module, local: str, parameter: Tensor) -> tuple[str, str]:
    """Return what a parameter of a layer is and its axes; empty strings for parameters of other modules."""
    if (axes := _linear_axes(module)) and local in ("weight", "bias"):
        return f"{'linear' if axes == 'oi' else 'Conv1D'} {local}", axes if local == "weight" else "o"
    if isinstance(module, nn.MultiheadAttention) and local.endswith(("proj_weight", "proj_bias")):
        return "attention input projection", "oi" if parameter.dim() == 2 else "o"
    if "Experts" in type(module).__name__:
        if parameter.dim() == 3:
            axes = "eio" if getattr(module, "is_transposed", False) else "eoi"
            return _AXES[axes], axes
        if parameter.dim() == 2 and local.endswith("bias"):
            return _AXES["eo"], "eo"
    return "", ""


def _linear_axes(module: nn.Module) -> str:
    """Return the axes of a linear layer's weight; empty for other modules."""
    if isinstance(module, nn.Linear):
        return "oi"
    # transformers' transposed linear layer, without importing transformers
    is_conv1d = any(c.__name__ == "Conv1D" and c.__module__.startswith("transformers.") for c in type(module).__mro__)
    return "io" if is_conv1d else ""


def _plain_reasons(model: nn.Module) -> dict[int, str]:
    """Return the ids of the parameters of embeddings, heads and routers with the reason why they are plain."""
    modules = dict(model.named_modules())  # not get_submodule, which a module called "half" would defeat
    reasons = {id(p): "output head" for head in _heads(modules) for p in head.parameters(recurse=False)}
    for name, module in modules.items():
        if _is_router(name, module, modules[name.rpartition(".")[0]]):
            reasons |= {id(p): "router of a mixture of experts" for p in module.parameters()}
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            reasons |= {id(p): _EMBEDDING for p in module.parameters()}
    return reasons


def _heads(modules: Mapping[str, nn.Module]) -> Sequence[nn.Module]:
    """Return the output heads that the first of four rules finds."""
    # 1. What the model returns. Any module: a wrapper such as DistributedDataParallel lacks the method.
    owners: list[Any] = [m for m in modules.values() if callable(getattr(m, "get_output_embeddings", None))]
    returned = [owner.get_output_embeddings() for owner in owners]
    # An adapter may wrap the head.
    if heads := [part for head in returned if isinstance(head, nn.Module) for part in head.modules()]:
        return heads
    # 2. The last linear layer of every module with a usual name, outside of numbered blocks.
    outside = {name: m for name, m in modules.items() if not any(part.isdigit() for part in name.split("."))}
    usual = [module for name, module in outside.items() if first_match([name.rpartition(".")[2]], _HEADS)]
    layers = [[part for part in module.modules() if isinstance(part, nn.Linear)] for module in usual]
    if any(layers):
        return [parts[-1] for parts in layers if parts]
    # 3. The last linear layer over a vocabulary, outside of numbered blocks.
    sizes = {getattr(getattr(module, "config", None), "vocab_size", None) for module in modules.values()}
    sizes |= {module.num_embeddings for module in modules.values() if isinstance(module, nn.Embedding)}
    linears = [module for module in outside.values() if isinstance(module, nn.Linear)]
    if heads := [module for module in linears if module.in_features < module.out_features in sizes]:
        return heads[-1:]
    # 4. The model's last linear layer, in a Sequential that begins with an embedding.
    last = ["", *(name for name, module in modules.items() if isinstance(module, nn.Linear))][-1]
    chain = modules[last.rpartition(".")[0]]
    first = next(chain.children(), None) if isinstance(chain, nn.Sequential) else None
    return [modules[last]] if isinstance(first, nn.Embedding | nn.EmbeddingBag) else []


def _is_router(name: str, module: nn.Module, parent: nn.Module) -> bool:
    """Whether a module chooses among experts, by the name of its type or by its own name beside experts."""
    if "Router" in type(module).__name__:
        return True
    beside = (*parent._modules.items(), *parent._parameters.items())
    has_experts = any("expert" in f"{local} {type(part).__name__}".lower() for local, part in beside)
    return has_experts and first_match([name.rpartition(".")[2]], _ROUTERS) is not None


# ---- rates and patterns ----


def rate_of(group: Mapping[str, Any]) -> float:
    """Return the present learning rate of the weights of an optimizer's group.

    >>> rate_of({"lr": 1e-3, "lr_factor": 5.0})
    0.005
    """
    return float(group["lr"]) * float(group.get("lr_factor", 1.0))


def first_match(names: Iterable[str], patterns: Iterable[str]) -> str | None:
    """Return the first pattern that matches any of the names.

    >>> first_match(["0.mlp.up"], ["head", "*.mlp.*", "*"])
    '*.mlp.*'
    """
    return next((p for p in patterns for name in names if fnmatch.fnmatchcase(name, p)), None)


def by_name(argument: str, value: T | Mapping[str, T], names: Sequence[str]) -> dict[str, T]:
    """Return the setting of every name: `value`, or that of the first pattern in it which matches the name.

    >>> by_name("lr", {"*.mlp.*": 1e-3, "*": 3e-4}, ["0.mlp.up", "head"])
    {'0.mlp.up': 0.001, 'head': 0.0003}
    """
    if not isinstance(value, Mapping):
        return dict.fromkeys(names, value)
    matches = {name: first_match([name], value) for name in names}
    used = set(matches.values())
    for pattern in value:
        if pattern not in used:
            raise ValueError(f"{argument} pattern {pattern!r} matches no parameter that earlier ones leave: never used")
    for name, pattern in matches.items():
        if pattern is None:
            raise ValueError(f"{argument} must have a pattern for every name, got none for {name!r}: end with '*'")
    return {name: value[pattern] for name, pattern in matches.items() if pattern is not None}


def _rates(argument: str, value: Rate | None, names: Sequence[str]) -> dict[str, float | None]:
    """Return the rate of every name."""
    rates = by_name(argument, as_numbers(value), names)
    return {name: None if rate is None else check_not_negative(argument, rate) for name, rate in rates.items()}


def _undecayed(name: str, parameter: Tensor, candidate: _Candidate, no_decay: Sequence[str] | str) -> bool:
    if not isinstance(no_decay, str):
        return first_match([name], no_decay) is not None
    if candidate.reason == _INSIDE:
        return bool(candidate.axes)  # a bias or one of its scales
    is_undecayed = candidate.axes == "eo" or (no_decay == "usual" and candidate.reason == _EMBEDDING)
    return parameter.dim() < 2 or is_undecayed


def _check_patterns(argument: str, patterns: Iterable[str], names: Sequence[str]) -> None:
    for pattern in patterns:
        if first_match(names, [pattern]) is None:
            raise ValueError(f"{argument} pattern {pattern!r} matches no parameter")


def matching(argument: str, patterns: Sequence[str], names: Iterable[str]) -> set[str]:
    """Return the names that match a pattern (fnmatch); raise ValueError for a pattern that matches none.

    >>> matching("exclude", ["*.o.*"], ["0.q.weight", "0.o.weight"])
    {'0.o.weight'}
    """
    if not isinstance(patterns, list | tuple) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(f"{argument} must be a sequence of name patterns, got {patterns!r}")
    names = list(names)
    _check_patterns(argument, patterns, names)
    return {name for name in names if first_match([name], patterns) is not None}


def check_no_decay(no_decay: Sequence[str] | str) -> tuple[str, ...] | str:
    """Return name patterns of parameters without weight decay, or the word for them."""
    if isinstance(no_decay, str) and no_decay in ("usual", "vectors"):
        return no_decay
    patterns = tuple(no_decay) if isinstance(no_decay, Iterable) else (no_decay,)
    if isinstance(no_decay, str) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(f"no_decay must be a sequence of patterns, 'usual' or 'vectors', got {no_decay!r}")
    return patterns


# ---- checks of models ----


def check_model(model: object, name: str = "model") -> None:
    """Raise ValueError for parameters or anything else that is no module."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name} must be an nn.Module, got {type(model).__name__}")


def check_values(table: Routing) -> None:
    """Raise ValueError if a curved parameter is on the device "meta"."""
    for route in table.curved:
        if route.parameter.is_meta:
            raise ValueError(
                f"model must have its weights, got {route.name} on the device 'meta': call to_empty and initialize it "
                "before"
            )
