"""Fused projections: weights whose outputs are those of several matrices, found by usual names.

Muon orthogonalises each matrix by itself. `parts` are the sizes of consecutive blocks of outputs, such as (d, d, d) for
queries, keys and values one behind the other. If they add up to less than all outputs, the blocks repeat: those of each
head in turn.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Parts", "check_parts", "fused_parts", "map_parts"]

Parts = tuple[int, ...]

# Queries, keys and values, by the names in transformers 5.23, timm 1.0 and torch.
_QKV = ("qkv", "qkv_proj", "qkv_linear", "Wqkv", "c_attn", "in_proj", "query_key_value")
# Two halves: gate and input of a gated layer, keys and values.
_HALVES = ("gate_up_proj", "Wi", "w12", "to_kv")
# Types whose queries, keys and values alternate by head, and those that neither rule fits.
_BY_HEAD = ("bloom", "gpt_neox", "gpt_neox_japanese", "persimmon", "minimax")
_OTHER = ("codegen", "falcon", "gpt_bigcode")


def fused_parts(model: nn.Module, name: str, outputs: int, inputs: int) -> Parts:
    """Return the parts of the weight with this qualified name in `model`, or () if it is one matrix.

    >>> block = nn.ModuleDict({"qkv": nn.Linear(8, 24), "gate_up_proj": nn.Linear(8, 12), "up": nn.Linear(8, 24)})
    >>> [fused_parts(block, f"{name}.weight", *layer.weight.shape) for name, layer in block.items()]
    [(8, 8, 8), (6, 6), ()]
    """
    path, _, local = name.rpartition(".")
    leaf = path.rpartition(".")[2] if local == "weight" else local.removesuffix("_weight")
    if leaf in _HALVES and outputs % 2 == 0:
        experts = model.get_submodule(path)
        return (outputs // 2,) * 2 if getattr(experts, "is_concatenated", True) else (1, 1)
    if leaf not in _QKV or (leaf == "in_proj" and local == "weight"):  # a state-space layer's
        return ()
    attention = model.get_submodule(path.rpartition(".")[0])
    if (said := _parts_said(attention, outputs)) is not None:
        return said
    for config in _configs(model, path):
        kind = getattr(config, "model_type", "")
        heads, groups = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
        if kind in _OTHER:
            return ()
        if kind in _BY_HEAD and outputs % (3 * heads) == 0:
            return (outputs // (3 * heads),) * 3
        if groups and groups != heads and outputs % (heads + 2 * groups) == 0:
            size = outputs // (heads + 2 * groups)
            if size == (getattr(config, "head_dim", None) or config.hidden_size // heads):
                return heads * size, groups * size, groups * size
    if outputs == 2 * inputs:  # keys and values: GPT-2's attention to an encoder, GCViT's to global queries
        return (inputs,) * 2
    return (outputs // 3,) * 3 if outputs % 3 == 0 else ()


def _parts_said(attention: nn.Module, outputs: int) -> Parts | None:
    """Return the parts that the attributes of an attention module of timm say, or None if they say nothing.

    >>> attention = nn.Module()
    >>> attention.num_heads, attention.key_dim, attention.val_dim = 4, 16, 32
    >>> _parts_said(attention, 256)
    (16, 16, 32)
    """
    heads, size = getattr(attention, "num_heads", 0), getattr(attention, "embed_dim", 0)
    key, value = getattr(attention, "key_dim", 0), getattr(attention, "val_dim", 0)
    if key and value and outputs == heads * (2 * key + value):  # TinyViT, EfficientFormer: by head
        return key, key, value
    key, value = getattr(attention, "dim_qk", 0), getattr(attention, "dim_v", 0)
    if key and value and outputs == (heads + 1) * key + value:  # LambdaNetworks
        return heads * key, key, value
    if size and outputs == 1 + 2 * size:  # MobileViT v2: one query
        return 1, size, size
    if getattr(attention, "head_first", False) and heads and outputs % (3 * heads) == 0:  # MaxViT, CoAtNet
        return (outputs // (3 * heads),) * 3
    return None


def _configs(model: nn.Module, path: str) -> Iterator[Any]:
    """Yield the nearest configuration with a number of heads around a module."""
    while True:
        config = getattr(model.get_submodule(path), "config", None)
        if hasattr(config, "num_attention_heads"):
            yield config
            return
        if not path:
            return
        path = path.rpartition(".")[0]


def check_parts(name: str, parts: Sequence[int], outputs: int) -> Parts:
    """Return the parts of a weight with this number of outputs, none for one matrix, or raise ValueError."""
    sizes = tuple(parts) if isinstance(parts, Sequence) else (0,)
    if any(not isinstance(size, int) or size < 1 for size in sizes) or (sizes and outputs % sum(sizes)):
        raise ValueError(
            f"split of {name} must be sizes that add up to its {outputs} outputs, or to a divisor, got {parts!r}"
        )
    return sizes


def map_parts(rule: Callable[[Tensor], Tensor], matrices: Tensor, out_dim: int, parts: Parts) -> Tensor:
    """Return the matrices whose parts are what `rule` makes of each part, or of all if there are no parts.

    >>> matrix = torch.tensor([[1.0], [10.0], [20.0], [2.0], [30.0], [40.0]])
    >>> map_parts(lambda part: part / part.sum(), matrix, 0, (1, 2)).T
    tensor([[0.3333, 0.1000, 0.2000, 0.6667, 0.3000, 0.4000]])
    """
    if not parts:
        return rule(matrices)
    dim = matrices.dim() - 2 + out_dim
    before, after = matrices.shape[:dim], matrices.shape[dim + 1 :]
    blocks = torch.split(matrices.reshape(*before, -1, sum(parts), *after), list(parts), dim + 1)
    done = [rule(block.flatten(dim, dim + 1)).reshape(block.shape) for block in blocks]
    return torch.cat(done, dim + 1).reshape(matrices.shape)
