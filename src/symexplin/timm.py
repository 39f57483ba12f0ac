"""SEL optimizers in timm's optimizer factory, as "seladamw" and "selmuon".

    optimizer = timm.optim.create_optimizer_v2(
        model, "seladamw", lr=1e-3, weight_decay=0.05, max_grad_norm=1.0, param_group_fn=sel.timm.param_groups
    )

Importing this module registers the names.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping
from glob import escape
from typing import Any

from torch import nn

try:
    from timm import optim as factory
    from timm.optim._optim_factory import default_registry  # timm.optim does not export it (1.0.31)
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"symexplin.timm needs {error.name}: pip install 'symexplin[timm]'", name=error.name
    ) from error

from symexplin.config import SELConfig
from symexplin.optim import SELAdamW, SELMuon
from symexplin.optim import param_groups as named_groups
from symexplin.optim.groups import ALIGNED, Group, is_curved
from symexplin.routes import Rate

__all__ = ["param_groups", "register"]

_OPTIMIZERS: dict[str, type[SELAdamW]] = {"seladamw": SELAdamW, "selmuon": SELMuon}


def register() -> None:
    """Add "seladamw" and "selmuon" to timm's optimizers; importing this module does so, a second call does nothing.

    timm passes its `momentum` to "selmuon", which is 0.9 unless given, as it does to its own Muon.

    >>> register()
    >>> factory.list_optimizers("sel*")
    ['seladamw', 'selmuon']
    """
    for name, optimizer in _OPTIMIZERS.items():
        if name not in factory.list_optimizers():
            info = factory.OptimInfo(
                name=name,
                opt_class=functools.partial(_build, name),
                description=f"{optimizer.__name__}: trains in curved weight space (SymExpLin)",
                has_betas=True,
                has_momentum=optimizer is SELMuon,
            )
            default_registry.register(info)


def param_groups(
    model: nn.Module,
    *,
    config: SELConfig | None = None,
    lr: Rate | None = None,
    filter_bias_and_bn: bool = True,
    layer_decay: float | None = None,
) -> list[Group]:
    """Return the named parameter groups of a model, for timm's `param_group_fn`.

    The same parameters have no weight decay, and each has the same factor of its learning rate, as in timm's own
    groups: they are read from these. The decay of the others is the `weight_decay` of `create_optimizer_v2`. Beside a
    `param_group_fn` timm ignores its own `filter_bias_and_bn` and `layer_decay`, so they are given here::

        groups = functools.partial(sel.timm.param_groups, layer_decay=0.75)
        optimizer = create_optimizer_v2(model, "seladamw", lr=1e-3, weight_decay=0.05, param_group_fn=groups)

    Args:
        model: the model; frozen parameters are left out.
        config: the map; None: the default map, `SELConfig()`.
        lr: the learning rate, if not that of `create_optimizer_v2`: a number, or {name pattern: number} as in
            :func:`symexplin.routing`. Needed if scales are learned at a rate of their own.
        filter_bias_and_bn: leave biases and other vectors without weight decay. Parameters in the model's
            `no_weight_decay()` never have it.
        layer_decay: factor of the learning rate per layer, from the last to the first. It is the key "lr_scale" of the
            groups. timm's schedulers apply it, torch's do not.

    Raises:
        ValueError: the errors of :func:`symexplin.param_groups`.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    >>> optimizer = factory.create_optimizer_v2(model, "seladamw", weight_decay=0.05, param_group_fn=param_groups)
    >>> [(group["param_names"], group["weight_decay"]) for group in optimizer.param_groups]
    [(['0.weight'], 0.05), (['0.bias'], 0.0), (['1.weight', '1.bias'], 0.0)]
    """
    options: dict[str, Any] = {
        "weight_decay": 1.0,
        "weight_decay_exclude_1d": filter_bias_and_bn,
        "no_weight_decay_list": getattr(model, "no_weight_decay", set)(),
    }
    if layer_decay is None:
        found = factory.param_groups_weight_decay(model, **options)
    else:
        found = factory.param_groups_layer_decay(model, layer_decay=layer_decay, **options)
    groups_of = {id(parameter): group for group in found for parameter in group["params"]}
    timms = {name: groups_of[id(p)] for name, p in model.named_parameters() if id(p) in groups_of}
    no_decay = [escape(name) for name, group in timms.items() if group["weight_decay"] == 0.0]
    groups = named_groups(model, lr=lr, config=config, no_decay=no_decay)
    return groups if layer_decay is None else [part for group in groups for part in _by_layer(group, timms)]


def _by_layer(group: Group, timms: Mapping[str, Group]) -> Iterator[Group]:
    """Yield the parts of a group whose parameters have the same factor of the learning rate in timm's groups."""
    scales = [timms[name]["lr_scale"] for name, _ in group["params"]]
    for scale in sorted(set(scales)):
        chosen = [i for i, own in enumerate(scales) if own == scale]
        part = {key: [group[key][i] for i in chosen] for key in ("params", *ALIGNED) if key in group}
        yield {**group, **part, "lr_scale": scale}


def _build(name: str, params: Iterable[Any], **settings: Any) -> SELAdamW:
    """Return the optimizer of this name; refuse groups without the names and the map of parameters."""
    groups = list(params)
    if not any(isinstance(group, dict) and is_curved(group) for group in groups):
        raise ValueError(
            "param_group_fn must be given, got parameters without names, from which no curved weights can be chosen: "
            f"create_optimizer_v2(model, {name!r}, ..., param_group_fn=symexplin.timm.param_groups)"
        )
    return _OPTIMIZERS[name](groups, **settings)


register()
