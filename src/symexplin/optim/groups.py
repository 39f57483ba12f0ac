"""Parameter groups: for SELAdamW over a plain model, or for any torch optimizer over a converted one."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from symexplin.config import SELConfig
from symexplin.routes import Rate, Route, Routing, check_model, routing
from symexplin.spec import CurvedBase, Spec

__all__ = ["Group", "config_of", "is_curved", "name_of", "param_groups", "spec_of"]

Group = dict[str, Any]


def param_groups(
    model: nn.Module,
    *,
    lr: Rate | None = None,
    weight_decay: Rate | None = None,
    config: SELConfig | None = None,
    no_decay: Sequence[str] | str = (),
    whole: nn.Module | None = None,
) -> list[Group]:
    """Return the named parameter groups of `model` for an optimizer.

    A plain model gives the groups "curved" and "plain" of :class:`symexplin.SELAdamW`. "curved" contains the map, the
    output dimension of each parameter, and the multipliers ``k_e``, ``k_l``, ... of the learning rate. A converted
    model gives groups for any torch optimizer: one per role ("raw", "plain", "e", "l", ...), each with its multiplier
    ``k``, which :func:`symexplin.anneal_scales` applies. Parameters with another learning rate or decay are in groups
    of their own.

    Args:
        model: the model; frozen parameters are left out.
        lr: peak learning rate, before multipliers; needed if scales are learned. A number, or {name pattern: number}
            as in :func:`symexplin.routing`. All groups of a plain model then have one "lr", that of the last pattern,
            and a key "lr_factor" that the optimizer multiplies, so that one schedule fits all of them.
        weight_decay: decay of raw weights, raw biases, plain parameters and the scales e, l, s; None: the optimizer's.
            m, n and delta have none. A number, or {name pattern: number}.
        config: the map, only for a plain model; a converted model contains it.
        no_decay: name patterns of parameters without weight decay; "vectors" for biases and norms, as in nanoGPT; or
            "usual" for embeddings, too. Their scales do not decay either.
        whole: the model that contains `model`. It determines names and routing. A part may have nothing to curve.

    Raises:
        ValueError: nothing to curve, `config` given for a converted model, a pattern that matches nothing, or the
            errors of :func:`symexplin.routing`.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    >>> [(group["role"], len(group["params"])) for group in param_groups(model, lr=1e-3)]
    [('curved', 2), ('plain', 2)]
    >>> groups = param_groups(model, lr={"1.*": 3e-3, "*": 1e-3})
    >>> [(group["lr"], group["lr_factor"]) for group in groups]
    [(0.001, 1.0), (0.001, 3.0)]
    """
    check_model(model)
    whole = model if whole is None else whole
    check_model(whole, "whole")
    converted = any(isinstance(module, CurvedBase) for module in whole.modules())
    if converted and config is not None:
        raise ValueError("config must be None for a converted model: its layers contain it")
    table = routing(model, config, lr=lr, weight_decay=weight_decay, no_decay=no_decay, whole=whole)
    if not converted and whole is model and not table.curved:
        raise ValueError(f"model has nothing to curve; see print(symexplin.routing(model)):\n{table}")
    roles = _module_roles(model) if converted else {}
    groups: dict[tuple[_Role, Any, Any], Group] = {}
    for route in table:
        if route.parameter.requires_grad:
            role = roles.get(id(route.parameter), _Role("curved" if route.curved else "plain"))
            group = groups.setdefault((role, route.lr, route.weight_decay), {"role": role.name, "params": []})
            _add(group, route)
    finished = [_finish(group, role, rate, decay, table, converted) for (role, rate, decay), group in groups.items()]
    if isinstance(lr, Mapping) and not converted:
        _factor(finished, lr)
    if converted:
        return finished
    # A trainer that logs one rate logs the first group's, which has the most numbers.
    return sorted(
        finished,
        key=lambda group: (not is_curved(group), -_numbers(group)),
    )


def _numbers(group: Group) -> int:
    return sum(parameter.numel() for _, parameter in group["params"])


class _Role(NamedTuple):
    """What a parameter of a model is, and of a scale in a converted one its configuration and what multiplies k."""

    name: str
    config: SELConfig | None = None
    lr_scale: float = 1.0


def _module_roles(model: nn.Module) -> dict[int, _Role]:
    """Return the roles of the parameters of curved layers by their ids."""
    roles: dict[int, _Role] = {}
    for module in model.modules():
        if isinstance(module, CurvedBase):
            for local, (spec, tensor) in module.sel_roles().items():
                role = _Role("raw") if tensor is None else _Role(tensor.role, spec.config, tensor.lr_scale)
                roles[id(getattr(module, local))] = role
    return roles


def _add(group: Group, route: Route) -> None:
    """Add a parameter to a group, and to the group's lists beside its parameters."""
    group["params"].append((route.name, route.parameter))
    aligned: dict[str, Any] = {"position": route.position}
    if is_curved(group):
        aligned |= {"axes": route.axes, "shape": tuple(route.parameter.shape)}
    for key, value in aligned.items():
        group.setdefault(key, []).append(value)


def _finish(group: Group, role: _Role, lr: float | None, decay: float | None, table: Routing, converted: bool) -> Group:
    """Return the group with its map, multipliers, learning rate and decay."""
    if converted:
        del group["position"]
        k = (1.0, 1.0) if role.config is None else getattr(role.config, role.name).multiplier(lr)
        group["k"] = [role.lr_scale * end for end in k]
    elif is_curved(group):
        group |= {"config": table.config.to_json(), "width": table.width}
        group |= {f"k_{scale}": list(k) for scale, k in table.config.multipliers(lr).items()}
    given = {"lr": lr, "weight_decay": decay}
    return group | {key: value for key, value in given.items() if value is not None}


def _factor(groups: Sequence[Group], rates: Mapping[str, float]) -> None:
    """Give all groups the rate of the last pattern, or the largest if that is 0, and their own as a factor."""
    base = list(map(float, rates.values()))[-1] or max(map(float, rates.values())) or 1.0
    for group in groups:
        group |= {"lr": base, "lr_factor": group["lr"] / base}


def is_curved(group: Group) -> bool:
    """Whether the group's parameters are curved."""
    return group.get("role") == "curved"


def config_of(group: Group) -> SELConfig:
    """Return the map of a curved group."""
    return _config_of(group["config"])


@functools.cache
def _config_of(text: str) -> SELConfig:
    return SELConfig.from_json(text)


def spec_of(group: Group, i: int, shape: Sequence[int]) -> Spec:
    """Return the map of a tensor of this shape that is, or is a part of, parameter i of a curved group."""
    return Spec.of(shape, group["axes"][i], config_of(group))


def name_of(group: Group, i: int) -> str:
    """Return the name of parameter i of the group."""
    names = group.get("param_names")
    return str(names[i]) if names else f"parameter {i}"
