"""The choice of curved parameters, by the type of the module that owns them."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear  # the output projection of nn.MultiheadAttention

from symexplin.config import SELConfig, check_config
from symexplin.curve import CurvedBase, Map, fans, is_weight
from symexplin.heads import plain_parameters
from symexplin.patterns import as_patterns, by_name, check_patterns, first_match
from symexplin.transform import check_invertible
from symexplin.validation import check_not_negative, plain

__all__ = [
    *("Rate", "Route", "Routing", "check_model", "check_no_decay", "check_values", "frozen_layers", "is_convertible"),
    "routing",
]

Rate = float | Tensor | Mapping[str, float]  # a number, or numbers by name pattern
_INSIDE = "curved in its module"
_FROZEN = "frozen"
_EXPERTS = {"eo": "expert bias", "eoi": "experts, outputs by inputs", "eio": "experts, inputs by outputs"}
_AXES = {2: "oi", 3: "eoi"}  # of included parameters of other modules


@dataclass(frozen=True)
class Route:
    """The decision for one parameter."""

    name: str
    parameter: nn.Parameter = field(repr=False, compare=False)
    position: int  # in named_parameters order: seeds LoRA's A
    curved: bool
    reason: str
    axes: str = ""  # of a curved parameter, see symexplin.curve
    lr: float | None = None  # None: the optimizer's
    weight_decay: float | None = None

    @property
    def is_weight(self) -> bool:
        """Whether a curved parameter has rows and columns; biases have not."""
        return is_weight(self.axes)

    def map(self, config: SELConfig) -> Map:
        """Return the map of a curved parameter."""
        return Map.of(tuple(self.parameter.shape), self.axes, config)


@dataclass(frozen=True)
class Routing:
    """The decision for every parameter of a model; prints as a table.

    `config` is the map with the numbers that the model's `width` gives it. The width is the side that occurs most often
    among the matrices that are curved, or would be if they were not frozen; the larger one on a tie. A convolution
    counts by its fans, a depthwise one only if there is nothing else. Where only biases are curved, their weights
    count. None: nothing is curved.
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
        columns: dict[str, list[Any]] = {
            "parameter": [r.name for r in self.routes],
            "shape": ["x".join(map(str, r.parameter.shape)) or "scalar" for r in self.routes],
            "": ["curved" if r.curved else "plain" for r in self.routes],
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
        lines.append(f"curved: {len(self.curved)} of {len(self.routes)} tensors, {inside:,} of {total:,} numbers")
        lines[-1] += f" ({100.0 * inside / max(total, 1):.1f}%)"
        if self.width is not None:
            lines.append(f"map: {self.config.describe()}; width {self.width}")
        return "\n".join(lines)


def _cell(value: object) -> str:
    """Return a cell of the table; "-" stands for the optimizer's rate."""
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class _Candidate:
    """The decision for a parameter by its module's type, before include and exclude patterns."""

    reason: str
    curved: bool = False
    axes: str = ""
    weight: tuple[Tensor, str] | None = None  # a bias's: the weight beside it and its axes
    decays: bool = True  # False for scales of a converted layer that shape the map


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


def check_no_decay(no_decay: Sequence[str] | str) -> tuple[str, ...] | str:
    """Return name patterns of parameters without weight decay, or the word for them."""
    if not isinstance(no_decay, str):
        return as_patterns("no_decay", no_decay or ())
    if no_decay not in ("usual", "vectors"):
        raise ValueError(f"no_decay must be a sequence of patterns, 'usual' or 'vectors', got the string {no_decay!r}")
    return no_decay


def frozen_layers(model: nn.Module) -> list[str]:
    """Return the names of the parameters that would be curved if they were not frozen."""
    candidates = _candidates(model)
    return [name for name, p in model.named_parameters() if not p.requires_grad and candidates[id(p)].curved]


def routing(
    model: nn.Module,
    config: SELConfig | None = None,
    *,
    lr: Rate | None = None,
    weight_decay: Rate | None = None,
    no_decay: Sequence[str] | str = (),
    whole: nn.Module | None = None,
) -> Routing:
    """Decide for every parameter of `model` whether it is curved, and give the reason.

    The weights and biases of `nn.Linear`, of transformers' `Conv1D`, of convolutions, of experts in one tensor and of
    the input projections of `nn.MultiheadAttention` are curved. Plain are: embeddings and parameters tied to them,
    output heads and routers of mixtures of experts (:mod:`symexplin.heads` has their names), step biases of state-space
    models, norms, frozen and non-floating parameters. LoRA's factors under PEFT are linear layers and therefore curved.

    Args:
        model: a module, or a part of `whole`.
        config: the map. Its `include` and `exclude` patterns of qualified names override these rules.
        lr, weight_decay: a number, or {name pattern: number}: the first pattern that matches a name counts, and every
            name needs one ("*": all others). None: the optimizer's.
        no_decay: name patterns of parameters without weight decay; "vectors" for biases and norms, as in nanoGPT; or
            "usual" for embeddings, too.
        whole: the model that contains `model`. It determines the parameters' names, the width and the decisions.

    Raises:
        ValueError: a pattern matches nothing or is never used, or includes a parameter that is no bias of a layer, no
            matrix and no stack of matrices; `model` is not a part of `whole`.

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
    check_model(model)
    config = check_config(config)
    whole = model if whole is None else whole
    check_model(whole, "whole")
    names: dict[int, list[str]] = {}
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for name, parameter in model.named_parameters():
        if id(parameter) not in names:
            raise ValueError(f"model must be a part of whole, but its parameter {name!r} is not in whole")
    own = [aliases[0] for aliases in names.values()]
    known = [name for aliases in names.values() for name in aliases]
    check_patterns("include", config.include, known)
    check_patterns("exclude", config.exclude, known)
    if not isinstance(no_decay := check_no_decay(no_decay), str):
        check_patterns("no_decay", no_decay, own)
    rates, decays = _rates("lr", lr, own), _rates("weight_decay", weight_decay, own)
    candidates = _candidates(whole)
    routes = []
    for position, (name, parameter) in enumerate(whole.named_parameters()):
        candidate = candidates[id(parameter)]
        reason, axes = _decide(names[id(parameter)], parameter, candidate, config)
        decay = decays[name] if candidate.decays and not _undecayed(name, parameter, candidate, no_decay) else 0.0
        routes.append(Route(name, parameter, position, bool(axes), reason, axes, rates[name], decay))
    width = _width(routes, candidates)
    inside = {id(parameter) for parameter in model.parameters()}
    of_model = tuple(route for route in routes if id(route.parameter) in inside)
    return Routing(of_model, config if width is None else check_invertible(config.resolve(width)), width)


def _rates(argument: str, value: Rate | None, names: Sequence[str]) -> dict[str, float | None]:
    """Return the rate of every name."""
    rates = by_name(argument, plain(value), names)
    return {name: None if rate is None else check_not_negative(argument, rate) for name, rate in rates.items()}


def _width(routes: Sequence[Route], candidates: Mapping[int, _Candidate]) -> int | None:
    """Return the width of :class:`Routing`."""
    known = [(route, candidates[id(route.parameter)]) for route in routes]
    tensors: list[tuple[Tensor, str]] = [(route.parameter, route.axes) for route in routes if route.curved]
    if not tensors:
        return None
    tensors += [(route.parameter, c.axes) for route, c in known if route.reason == _FROZEN and c.curved]
    weights = [(weight, axes) for weight, axes in tensors if is_weight(axes)]
    weights = weights or [c.weight for route, c in known if route.curved and c.weight is not None]
    # Each filter of a depthwise convolution reads one channel, so that its fans say nothing of the model's width.
    weights = [(w, axes) for w, axes in weights if "e" in axes or w.dim() == 2 or w.shape[1] > 1] or weights
    counts = Counter(side for weight, axes in weights for side in fans(axes, weight.shape))
    return max(counts, key=lambda side: (counts[side], side)) if counts else None


def _undecayed(name: str, parameter: Tensor, candidate: _Candidate, no_decay: Sequence[str] | str) -> bool:
    if not isinstance(no_decay, str):
        return first_match([name], no_decay) is not None
    if candidate.reason == _INSIDE:
        return bool(candidate.axes)  # a bias or one of its scales
    return parameter.dim() < 2 or candidate.axes == "eo" or (no_decay == "usual" and "embedding" in candidate.reason)


def _decide(aliases: list[str], parameter: Tensor, candidate: _Candidate, config: SELConfig) -> tuple[str, str]:
    """Return the reason for the decision about a parameter, and its axes if it is curved, else ""."""
    included, excluded = (first_match(aliases, patterns) for patterns in (config.include, config.exclude))
    if not parameter.is_floating_point():
        return "not floating point", ""
    if not parameter.requires_grad:
        return _FROZEN, ""
    if excluded is not None:
        return f"excluded by {excluded!r}", ""
    if included is None and not candidate.curved:
        return candidate.reason, ""
    reason = candidate.reason if included is None else f"included by {included!r}"
    axes = candidate.axes or _AXES.get(parameter.dim(), "")
    if len(axes) != max(parameter.dim(), 1):
        raise ValueError(
            f"{aliases[0]} ({reason}) has shape {tuple(parameter.shape)}: weights and biases of linear layers and of "
            "convolutions, matrices and stacks of them can be curved; exclude it, or unflatten the model's parameters"
        )
    if parameter.numel() == 0 or (candidate.weight is not None and candidate.weight[0].numel() == 0):
        return "empty", ""
    return reason, axes


def _candidates(model: nn.Module) -> dict[int, _Candidate]:
    """Return the decision for every parameter by the module that owns it."""
    plain = plain_parameters(model)
    candidates: dict[int, _Candidate] = {}
    for module in model.modules():
        for local, parameter in module.named_parameters(recurse=False):
            key, candidate = id(parameter), _candidate(module, local, parameter)
            if key in plain and candidate.reason != _INSIDE:
                candidate = replace(candidate, reason=plain[key], curved=False)
            # Skip aliases of a layer's weight in other modules.
            if key not in candidates or (candidate.axes and not candidates[key].axes):
                candidates[key] = candidate
    return candidates


def _candidate(module: nn.Module, local: str, parameter: nn.Parameter) -> _Candidate:
    if isinstance(module, CurvedBase):
        if local not in (roles := module.sel_roles()):
            return _Candidate(type(module).__name__)  # left plain when the module was converted
        spec, tensor = roles[local]
        return _Candidate(_INSIDE, axes="" if is_weight(spec.axes) else "o", decays=tensor is None or tensor.decays)
    kind, axes = _layer(module)
    weight = module._parameters.get("weight")
    if kind and local in ("weight", "bias") and weight is not None:
        beside = None if local == "weight" else (weight, axes)
        return _Candidate(f"{kind} {local}", True, axes if local == "weight" else "o", beside)
    if isinstance(module, nn.MultiheadAttention) and local.endswith(("proj_weight", "proj_bias")):
        weight = module.in_proj_weight if module.in_proj_weight is not None else module.q_proj_weight
        axes, beside = ("oi", None) if parameter.dim() == 2 else ("o", (weight, "oi"))
        return _Candidate("attention input projection", True, axes, beside)
    if "Experts" in type(module).__name__ and (axes := _expert_axes(module, local, parameter)):
        return _Candidate(_EXPERTS[axes], True, axes)
    return _Candidate(type(module).__name__)


def _layer(module: nn.Module) -> tuple[str, str]:
    """Return the name of a linear layer or convolution for the reason, and its weight's axes; empty for others."""
    if isinstance(module, nn.Linear):
        return "linear", "oi"
    # transformers' transposed linear layer, without importing transformers
    if any(c.__name__ == "Conv1D" and c.__module__.startswith("transformers.") for c in type(module).__mro__):
        return "Conv1D", "io"
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return "convolution", "oi" + "i" * len(module.kernel_size)
    if isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
        return "transposed convolution", "io" + "i" * len(module.kernel_size)
    return "", ""


def is_convertible(module: nn.Module) -> bool:
    """Whether :func:`symexplin.convert` can replace a module: by its exact type, as others may compute something else.

    >>> is_convertible(nn.Linear(2, 2)), is_convertible(nn.Conv1d(2, 2, 1))
    (True, False)
    """
    kind = type(module)
    if kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers."):
        return True
    return kind in (nn.Linear, NonDynamicallyQuantizableLinear)


def _expert_axes(module: nn.Module, local: str, parameter: nn.Parameter) -> str:
    """Return the axes of the weights or biases of all experts in one tensor, or ""; only a dimension can tell.

    The attribute `is_transposed` says whether inputs come first. Modules of transformers may lack it: there the model's
    width is the number of inputs, or in a `down` projection of outputs, and one weight that is not square tells of all.
    """
    if parameter.dim() == 2 and local.endswith("bias"):
        return "eo"
    if parameter.dim() != 3:
        return ""
    inputs_first = getattr(module, "is_transposed", None)
    if inputs_first is None and type(module).__module__.startswith("transformers."):
        width = getattr(module, "hidden_size", getattr(module, "hidden_dim", None))
        for name, weight in module.named_parameters(recurse=False):
            if weight.dim() == 3 and width in weight.shape[1:] and weight.shape[1] != weight.shape[2]:
                inputs_first = (weight.shape[1] == width) != ("down" in name)
    return "eio" if inputs_first else "eoi"
