"""Queries and keys that start small and train slowly: a change to try before any curve."""

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from glob import escape
from typing import Any

import torch
from torch import Tensor, nn

from symexplin.routes import Route, check_values, routing
from symexplin.validation import check_positive, warn

__all__ = ["scale_qk_"]

# Names of separate projections, which lie side by side in a module.
_PAIRS = (
    *(("q_proj", "k_proj"), ("q", "k"), ("query", "key"), ("wq", "wk"), ("to_q", "to_k"), ("c_q", "c_k")),
    *(("q_lin", "k_lin"), ("query_proj", "key_proj"), ("linear_q", "linear_k")),
)
# Names of weights that hold keys and values, and in most models queries, too.
_FUSED = (
    *("qkv", "qkv_proj", "to_qkv", "c_attn", "query_key_value", "Wqkv", "att_proj", "kv_proj", "kv_b_proj"),
    "in_proj_weight",
)
# Modules with all queries first, then all keys, then all values.
_CONSECUTIVE = {
    *("torch.MultiheadAttention", "timm.layers.attention.Attention", "transformers.GPT2Attention"),
    *("transformers.ModernBertAttention", "transformers.MptAttention", "transformers.Phi3Attention"),
}
# Modules with queries, keys and values of the first head, then of the second.
_BY_HEAD = {f"transformers.{name}Attention" for name in ("Bloom", "GPTNeoX", "Persimmon")}
_BIASES = 5.0  # their learning rate in units of the model's


@torch.no_grad()
def scale_qk_(model: nn.Module, factor: float = 0.05, *, lr: float | None = None) -> dict[str, float]:
    """Multiply the initial weights of all queries and keys by `factor`, in place, and return learning rates by name.

    The rates are those of QK-bias AdamW: ``factor * lr`` for the weights of queries and keys, ``5 * lr`` for the biases
    of linear layers, and lr for everything else. They are for `lr` of :class:`symexplin.SELAdamW` and of
    :func:`symexplin.param_groups`, which also makes groups for torch.optim.AdamW. With one layer of width 1024,
    QK-norm and biases, all this lowered AdamW's loss by 0.198, and ``factor=0.1`` without the rates by 0.06. QK-norm
    cancels the scale of queries and keys. Without it, the same rates raised the loss of a small Llama by 0.19. A second
    call multiplies the weights once more.

    Args:
        model: a new model, before training, `symexplin.convert` and `fully_shard`.
        factor: 0.05 in our runs with the rates, 0.1 without.
        lr: the learning rate. None: scale the weights alone and return nothing. Fused projections need this, as one
            weight has one rate.

    Warns:
        UserWarning: with `lr`, no norm beside the projections.

    Raises:
        ValueError: no queries and keys were found, a fused projection whose rows are not known or with `lr`, or weights
            on the device "meta". The message names the parameter, and no weight has changed.

    >>> import symexplin as sel
    >>> names = ("q_proj", "k_proj", "v_proj", "o_proj")
    >>> model = nn.ModuleDict({name: nn.Linear(4, 4) for name in names} | {"q_norm": nn.RMSNorm(2)})
    >>> sel.scale_qk_(model, lr=0.1)["q_proj.weight"]
    0.005000000000000001
    """
    factor = check_positive("factor", factor)
    if lr is not None:
        lr = check_positive("lr", lr)
    table = routing(model)
    check_values(table)
    modules = dict(model.named_modules())
    weights = {route.name: route for route in table.curved if route.is_weight}
    separate, fused = list(_separate(weights)), list(_fused(modules, weights.values()))
    if not separate and not fused:
        names = ", ".join(f"{query} and {key}" for query, key in _PAIRS)
        raise ValueError(
            f"model must have trainable projections of queries and keys, found none: looked for {names}, and for "
            f"{', '.join(_FUSED)}"
        )
    if lr is not None and fused:
        raise ValueError(
            f"lr must be left out for {fused[0][0].name}, which holds queries, keys and values: one weight has one "
            "rate. scale_qk_(model, 0.1) scales the initial queries and keys alone"
        )
    alone = (name for name in separate if not any(map(_is_qk_norm, _owner(modules, name)._modules)))
    if lr is not None and (first := next(alone, None)) is not None:
        warn(
            f"no QK-norm lies beside {first}. Without QK-norm these rates made a small Llama worse, by 0.19 nats: "
            "build the model again and leave out scale_qk_, unless the model's code normalizes queries and keys"
        )
    for part in [*(weights[name].parameter for name in separate), *(part for _, part in fused)]:
        part.mul_(factor)
    if lr is None:
        return {}
    biases = [route.name for route in table.curved if not route.is_weight]
    rates = dict.fromkeys(map(escape, separate), factor * lr) | dict.fromkeys(map(escape, biases), _BIASES * lr)
    return rates | {"*": lr}


def _is_qk_norm(name: str) -> bool:
    """Return whether a module's name is that of a norm of queries or keys, not of the attention's input."""
    return "norm" in name and bool({"q", "k"} & {*name.lower()})


def _owner(modules: Mapping[str, nn.Module], name: str) -> nn.Module:
    """Return the module that holds the layer of a weight, or the weight itself if its own name says what it is."""
    path, _, local = name.rpartition(".")
    return modules[path.rpartition(".")[0] if local == "weight" else path]


def _separate(names: Collection[str]) -> Iterator[str]:
    """Yield the names of the weights that queries or keys have for themselves."""
    for name in names:
        for (query, key), end in itertools.product(_PAIRS, (".weight", "_weight")):
            prefix, middle, rest = f".{name}".rpartition(f".{query}{end}")
            beside = f"{prefix}.{key}{end}".removeprefix(".")
            if middle and not rest and beside in names:
                yield from (name, beside)


def _fused(modules: Mapping[str, nn.Module], routes: Iterable[Route]) -> Iterator[tuple[Route, Tensor]]:
    """Yield each weight that queries and keys share with values, and its part for queries and keys."""
    for route in routes:
        layer = route.name.removesuffix(".weight").rpartition(".")[2]
        if layer in _FUSED:
            yield route, _part(route, layer, _owner(modules, route.name))


def _part(route: Route, layer: str, owner: nn.Module) -> Tensor:
    """Return the view of the queries and keys in the weight of a fused `layer` of the module `owner`."""
    weight, dim = route.parameter, route.axes.index("o")
    outputs, inputs = weight.shape[dim], weight.shape[1 - dim]
    kind = type(owner)
    root = kind.__module__.partition(".")[0]
    kinds = {f"{root}.{kind.__name__}", f"{kind.__module__}.{kind.__name__}"}
    settings: Any = owner
    values = outputs // 3
    if hasattr(owner, "num_key_value_heads"):
        values = settings.num_key_value_heads * settings.head_dim
    if kinds & _BY_HEAD:
        size = getattr(owner, "head_dim", None) or settings.head_size
        return weight.view(-1, 3, size, inputs)[:, :2]
    own = layer == "c_attn" and root != "transformers"  # nanoGPT and what follows it
    if (own or kinds & _CONSECUTIVE) and (outputs == 3 * inputs or values != outputs // 3):
        return weight.narrow(dim, 0, outputs - values)
    raise ValueError(
        f"{route.name} holds queries, keys and values, and which of its rows are which is not known for a "
        f"{kind.__name__}: scale them in your model's own code"
    )
