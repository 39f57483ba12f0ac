"""Parameter groups: for SELAdamW over a plain model, or for any torch optimizer over a converted one."""

import fnmatch
import itertools
from collections.abc import Sequence
from typing import Any

from torch import nn

from symexplin.config import SELConfig, check_config
from symexplin.layout import Layout
from symexplin.linear import SELLinear
from symexplin.routes import Route, Routing, check_patterns, names_within, routing

__all__ = ["Group", "is_curved", "layout_of", "name_of", "param_groups"]

Group = dict[str, Any]


def param_groups(
    model: nn.Module,
    *,
    lr: float | None = None,
    weight_decay: float | None = None,
    config: SELConfig | None = None,
    no_decay: Sequence[str] = (),
    whole: nn.Module | None = None,
) -> list[Group]:
    """Return the named parameter groups of `model` for an optimizer.

    A plain model gives the groups "curved" and "plain" of :class:`symexplin.SELAdamW`. "curved" contains the map, the
    beta and output dimension of each parameter, and the multipliers ``k_e``, ``k_l``, ... of the learning rate. A
    converted model gives groups for any torch optimizer: one per role ("raw", "plain", "e", "l", ...), each with its
    multiplier ``k``, which :func:`symexplin.anneal_scales` applies.

    Args:
        model: the model; frozen parameters are left out.
        lr: peak learning rate of every group, before multipliers; needed if a scale sets `peak_lr`.
        weight_decay: decay of raw weights, raw biases, plain parameters and the scales e, l, s; None: the optimizer's.
            m, n and delta have none.
        config: the map, only for a plain model; a converted model contains it.
        no_decay: name patterns of parameters without weight decay, in separate groups. Their scales do not decay
            either.
        whole: the model that contains `model`. It determines names and routing. A part may have nothing to curve.

    Raises:
        ValueError: nothing to curve, `config` given for a converted model, a model under FSDP1, a pattern that
            matches nothing, or the errors of :func:`symexplin.routing`.

    >>> groups = param_groups(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), lr=1e-3)
    >>> [(group["role"], len(group["params"])) for group in groups]
    [('curved', 2), ('plain', 2)]
    """
    if isinstance(no_decay, str):
        raise ValueError(f"no_decay must be a sequence of patterns, got the string {no_decay!r}")
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise ValueError(
            "model must not be wrapped by FullyShardedDataParallel (FSDP1), which flattens parameters: use "
            "torch.distributed.fsdp.fully_shard (FSDP2)"
        )
    whole = model if whole is None else whole
    check_patterns("no_decay", no_decay, [name for name, _ in whole.named_parameters()])
    if any(isinstance(module, SELLinear) for module in whole.modules()):
        if config is not None:
            raise ValueError("config must be None for a converted model: its layers contain it")
        groups = _module_groups(model, lr, no_decay, names_within(model, whole))
    else:
        table = routing(model, config, whole=whole)
        if whole is model and not table.curved:
            raise ValueError(f"model has nothing to curve; see print(symexplin.routing(model)):\n{table}")
        groups = _optimizer_groups(table, lr, check_config(config), no_decay)
    shared = {"lr": lr, "weight_decay": weight_decay}
    given = {key: value for key, value in shared.items() if value is not None}
    return [{**given, **group} for group in groups]


def _optimizer_groups(table: Routing, lr: float | None, config: SELConfig, no_decay: Sequence[str]) -> list[Group]:
    multipliers = {f"k_{role}": list(k) for role, k in config.multipliers(lr).items()}
    groups: list[Group] = []
    for curved, decayed in itertools.product((True, False), (True, False)):
        routes = [
            r
            for r in table
            if r.curved == curved and r.parameter.requires_grad and _matches(r.name, no_decay) != decayed
        ]
        if not routes:
            continue  # torch's distributed checkpoints cannot hold an empty group
        group: Group = {"role": "curved" if curved else "plain", "params": _named(routes)}
        if curved:
            group |= {
                "config": config.to_json(),
                "beta": [route.beta for route in routes],
                "out_dim": [route.out_dim for route in routes],
                "position": [route.position for route in routes],
                "shape": [tuple(route.parameter.shape) for route in routes],
                **multipliers,
            }
        groups.append(group if decayed else {**group, "weight_decay": 0.0})
    return groups


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _named(routes: Sequence[Route]) -> list[tuple[str, nn.Parameter]]:
    return [(route.name, route.parameter) for route in routes]


def _module_groups(model: nn.Module, lr: float | None, no_decay: Sequence[str], names: dict[int, str]) -> list[Group]:
    """Return one group per role; delta, whose rate is divided by beta, has one group per beta."""
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
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        name = names[id(parameter)]
        role, k, decay = roles.get(id(parameter), ("plain", (1.0, 1.0), True))
        decay = decay and not _matches(name, no_decay)
        key = (role, k, decay)
        fresh: Group = {"role": role, "params": [], "k": list(k)}
        group = groups.setdefault(key, fresh if decay else {**fresh, "weight_decay": 0.0})
        group["params"].append((name, parameter))
    return list(groups.values())


def is_curved(group: Group) -> bool:
    """Whether the group's parameters are curved."""
    return group.get("role") == "curved"


def layout_of(group: Group, i: int, shape: tuple[int, ...]) -> Layout:
    """Return the layout of a tensor of this shape under the map of entry i of a curved group."""
    return Layout.of(shape, group["out_dim"][i], group["beta"][i], group["config"])


def name_of(group: Group, i: int) -> str:
    """Return the name of parameter i of the group."""
    names = group.get("param_names")
    return str(names[i]) if names else f"parameter {i}"
