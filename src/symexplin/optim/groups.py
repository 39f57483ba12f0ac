"""Parameter groups of both homes: for SELAdamW over a plain model, for any torch optimizer over a converted one."""

import functools
from typing import Any

from torch import Tensor, nn

from symexplin.config import SELConfig, check_config
from symexplin.coordinates import PANELS, Layout
from symexplin.functional import anneal
from symexplin.linear import SELLinear
from symexplin.routes import Route, routing
from symexplin.validation import check_not_negative

__all__ = ["check_group", "check_saved", "is_curved", "layout_of", "multiplier", "name_of", "param_groups"]

Group = dict[str, Any]


def param_groups(
    model: nn.Module, *, lr: float | None = None, weight_decay: float | None = None, config: SELConfig | None = None
) -> list[Group]:
    """Return the parameter groups of `model`, named, for an optimizer.

    A plain model gives the groups of :class:`symexplin.SELAdamW`: "curved" (with the map, one beta and dimension a
    parameter, and the multipliers ``k_e``, ``k_l``, ... of the learning rate) and "plain". A converted model gives
    groups for any torch optimizer: one a role ("raw", "plain", "e", "l", ...), each with its multiplier ``k``, which
    :func:`symexplin.anneal_scales` applies.

    Args:
        model: the model; frozen parameters are left out.
        lr: peak learning rate of every group (multipliers go on top); needed where a scale sets `peak_lr`.
        weight_decay: decay of raw weights, raw biases, plain parameters and the scales e, l, s; None: the optimizer's.
            m, n and delta have none.
        config: the map, for a plain model; a converted one has it already.

    Raises:
        ValueError: nothing to curve, `config` given for a converted model, or the errors of
            :func:`symexplin.routing`.

    >>> groups = param_groups(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), lr=1e-3)
    >>> [(group["role"], len(group["params"])) for group in groups]
    [('curved', 2), ('plain', 2)]
    """
    if any(isinstance(module, SELLinear) for module in model.modules()):
        if config is not None:
            raise ValueError("config must be None for a converted model: its layers carry their own")
        groups = _module_groups(model, lr)
    else:
        groups = _optimizer_groups(model, lr, check_config(config))
    shared = {"lr": lr, "weight_decay": weight_decay}
    given = {key: value for key, value in shared.items() if value is not None}
    return [{**given, **group} for group in groups]


def _optimizer_groups(model: nn.Module, lr: float | None, config: SELConfig) -> list[Group]:
    table = routing(model, config)
    curved = table.curved
    if not curved:
        raise ValueError(f"model has nothing to curve; see print(symexplin.routing(model)):\n{table}")
    plain = [r for r in table if not r.curved and r.parameter.requires_grad]
    groups = [
        {
            "role": "curved",
            "params": _named(curved),
            "config": config.to_json(),
            "beta": [route.beta for route in curved],
            "out_dim": [route.out_dim for route in curved],
            "position": [route.position for route in curved],
            **{f"k_{role}": list(k) for role, k in config.multipliers(lr).items()},
        }
    ]
    if plain:
        groups.append({"role": "plain", "params": _named(plain)})
    return groups


def _named(routes: list[Route] | tuple[Route, ...]) -> list[tuple[str, nn.Parameter]]:
    return [(route.name, route.parameter) for route in routes]


def _module_groups(model: nn.Module, lr: float | None) -> list[Group]:
    """One group a role; delta, whose rate is divided by beta, one a beta."""
    roles: dict[int, tuple[str, tuple[float, float], bool]] = {}
    for module in model.modules():
        if not isinstance(module, SELLinear):
            continue
        multipliers = module.weight_layout.config.multipliers(lr)
        for local, slot in module.sel_roles().items():
            parameter = getattr(module, local)
            if slot is None:
                roles[id(parameter)] = ("raw", (1.0, 1.0), True)
            else:
                k0, k1 = multipliers[slot.role]
                roles[id(parameter)] = (slot.role, (k0 * slot.lr_scale, k1 * slot.lr_scale), slot.decay)
    groups: dict[object, Group] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        key = roles.get(id(parameter), ("plain", (1.0, 1.0), True))
        role, k, decay = key
        fresh: Group = {"role": role, "params": [], "k": list(k)}
        group = groups.setdefault(key, fresh if decay else {**fresh, "weight_decay": 0.0})
        group["params"].append((name, parameter))
    return list(groups.values())


def check_group(group: Group) -> None:
    """Refuse a group of a SEL optimizer that cannot be stepped, naming what is wrong."""
    group.setdefault("steps", 0)
    check_not_negative("lr", float(group["lr"]) if isinstance(group["lr"], Tensor) else group["lr"])
    check_not_negative("weight_decay", group["weight_decay"])
    for i, parameter in enumerate(group["params"]):
        if not parameter.is_floating_point():
            raise ValueError(f"{name_of(group, i)} must be real and floating point, got {parameter.dtype}")
    if not is_curved(group):
        return
    for key in ("config", "beta", "out_dim", "position"):
        if key not in group:
            raise ValueError(f"a curved group needs {key!r}; build it with symexplin.param_groups")
    for key in ("beta", "out_dim", "position"):
        if len(group[key]) != len(group["params"]):
            raise ValueError(f"{key} must have one entry a parameter, got {len(group[key])}")
    for i, parameter in enumerate(group["params"]):
        if parameter.dim() not in (1, 2):
            raise ValueError(f"{name_of(group, i)} must be 1-D or 2-D in a curved group, got {tuple(parameter.shape)}")
    for key in group:
        if key.startswith("k_"):
            multiplier(key, group, 0)


def check_saved(saved: list[Group], groups: list[Group], state: dict[Any, dict[str, Any]], names: set[str]) -> None:
    """Refuse a state_dict that does not fit the optimizer's groups, before anything is loaded.

    `names` are those that the state of every parameter must have, such as "step" and the moments.
    """
    if [len(group["params"]) for group in saved] != [len(group["params"]) for group in groups]:
        return  # torch refuses these
    for old, new in zip(saved, groups, strict=True):
        if old.get("role") != new.get("role") or not {"max_grad_norm", "total_steps", "steps"} <= set(old):
            raise ValueError(f"state_dict is not of this SEL optimizer: its group has the keys {sorted(old)}")
        if old.get("param_names") != new.get("param_names"):
            pairs = zip(old.get("param_names") or [], new.get("param_names") or [], strict=False)
            first = next(((a, b) for a, b in pairs if a != b), ("unnamed parameters", "named ones"))
            raise ValueError(f"state_dict is of other parameters: it has {first[0]} where the optimizer has {first[1]}")
        for i, key in enumerate(old["params"]):
            if state.get(key):
                _check_state(old, i, new["params"][i], state[key], names)


def _check_state(group: Group, i: int, parameter: Tensor, state: dict[str, Any], names: set[str]) -> None:
    shapes = {"step": ()} | {name: tuple(parameter.shape) for name in names - {"step"}}
    if is_curved(group):
        layout = layout_of(group, i, parameter)
        shapes["raw"] = layout.shape
        for panel in (panel for panel in PANELS if layout.width(panel)):
            shapes[panel] = layout.panel_shape(panel)
            shapes |= {f"{panel}_{name}": layout.panel_shape(panel) for name in names - {"step"}}
    for name, shape in shapes.items():
        if name not in state:
            raise ValueError(f"state_dict does not fit {name_of(group, i)}: it has no {name!r}")
        if tuple(state[name].shape) != shape:
            raise ValueError(
                f"state_dict does not fit {name_of(group, i)}: {name} must be {shape}, got {tuple(state[name].shape)}"
            )


def is_curved(group: Group) -> bool:
    """Whether the group's parameters are curved."""
    return group.get("role") == "curved"


def layout_of(group: Group, i: int, parameter: Tensor) -> Layout:
    """Return the layout of `parameter` under the map of the curved group's entry number i."""
    return _cached_layout(tuple(parameter.shape), group["out_dim"][i], group["beta"][i], group["config"])


@functools.cache
def _cached_layout(shape: tuple[int, ...], out_dim: int, beta: float, config: str) -> Layout:
    return Layout(shape, out_dim, beta, SELConfig.from_json(config))


def name_of(group: Group, i: int) -> str:
    """Return the name of the group's parameter number i."""
    names = group.get("param_names")
    return str(names[i]) if names else f"parameter {i}"


def multiplier(key: str, group: Group, step: int) -> float:
    """Return k(t) of the group's key "k_e", "k_l", ... after `step` completed steps."""
    k0, k1 = group[key]
    if k0 != k1 and group["total_steps"] is None:
        raise ValueError(f"total_steps must be given: {key[2:]} is annealed from k = {k0:g} to {k1:g}")
    return anneal(step, group["total_steps"], k0, k1)
