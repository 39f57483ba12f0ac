"""Parameter groups for both homes of the map: SELAdamW over a plain model, any torch optimizer over a converted one."""

from typing import Any

from torch import nn

from symexplin.config import SELConfig, check_config
from symexplin.linear import SELLinear
from symexplin.routing import Route, routing

__all__ = ["param_groups"]

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
    >>> [(group["role"], group["param_names"] if "param_names" in group else len(group["params"])) for group in groups]
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
