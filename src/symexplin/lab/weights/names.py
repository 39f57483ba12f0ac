"""Which tensors of a bare file are curved: by name and shape, in agreement with :func:`symexplin.routing`.

A file has no modules, so the rules are those of the usual names. They are few, and the table shows what they decide:
`include` and `exclude` correct it.
"""

import fnmatch
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from symexplin.lab.tables import format_columns
from symexplin.lab.weights.files import FLOATING, TensorSpec
from symexplin.plain import GATE_NAMES, HEAD_NAMES, ROUTER_NAMES, STEP_BIASES, ends_like

__all__ = [
    "CurvedName",
    "TensorName",
    "curved_names",
    "floating_shapes",
    "format_names",
    "matches",
    "name_tensors",
    "other_types",
    "out_dim_of",
]

Shape = tuple[int, ...]

# Last part of an embedding's name: GPT-2's, Llama's original, T5's, and whatever ends in "embedding".
_EMBEDDINGS = (
    *("wte", "wpe", "shared", "relative_attention_bias"),
    *("embed", "embed_*", "*_embed", "*emb", "*embd", "*embedding", "*embeddings"),
)
# Heads in files that `routing` finds by the model's own word or its order: Llama's original, BERT's, GPT-2's.
_HEADS = (*HEAD_NAMES, "output", "decoder", "summary")
# transformers' transposed layers, GPT-2's. Other models use the names for nn.Linear, so shapes decide.
_CONV1D = frozenset({"c_attn", "q_attn", "c_proj", "c_fc"})
_WIDENING = ("c_attn", "c_fc")  # have more outputs than inputs


class TensorName(NamedTuple):
    """One tensor of a file and the decision about it."""

    name: str
    shape: Shape
    curved: bool
    reason: str


class CurvedName(NamedTuple):
    """A curved weight, its curved bias if it has one, and the dimension of the weight that counts outputs."""

    weight: str
    bias: str | None
    out_dim: int

    @property
    def layer(self) -> str:
        """The name that both begin with, its dot included; empty for a layer that is the whole model."""
        return self.weight.removesuffix("weight")


def name_tensors(
    shapes: Mapping[str, Shape], include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> tuple[TensorName, ...]:
    """Decide for every tensor whether it is curved, and say why.

    Curved are 2-D tensors named `weight`, with the 1-D `bias` beside them, but for embeddings, output heads and
    routers of mixtures of experts.

    Args:
        shapes: of the floating tensors, in the order of the file; others are not curved.
        include, exclude: patterns (fnmatch) of names against the rules; exclude wins.

    Raises:
        ValueError: a pattern that matches nothing, or asks to curve something else than such a weight or bias.

    >>> for row in name_tensors({"embed.weight": (9, 4), "up.weight": (8, 4), "up.bias": (8,)}):
    ...     print(row.name, row.curved, row.reason)
    embed.weight False embedding
    up.weight True 2-D weight
    up.bias True bias of a curved weight
    """
    for argument, patterns in (("include", include), ("exclude", exclude)):
        for pattern in patterns:
            if not fnmatch.filter(shapes, pattern):
                raise ValueError(f"{argument} pattern {pattern!r} matches no tensor, such as {list(shapes)[:3]}")
    routers = {name for name in shapes if _is_router(name, shapes)}
    weights = {name: _decide(name, shape, include, exclude, routers) for name, shape in shapes.items()}
    return tuple(_decide_bias(row, weights, shapes, include, exclude) for row in weights.values())


def _decide(name: str, shape: Shape, include: Sequence[str], exclude: Sequence[str], routers: set[str]) -> TensorName:
    """Decide about a weight, and about everything else as if it were one."""
    plain = _plain_reason(name, shape, routers)
    if (pattern := matches(name, exclude)) is not None:
        return TensorName(name, shape, False, f"excluded by {pattern!r}")
    if plain is None:
        return TensorName(name, shape, True, "2-D weight")
    pattern = matches(name, include)
    if pattern is None or _is_bias(name, shape):
        return TensorName(name, shape, False, plain)
    if not _is_matrix(name, shape):
        raise ValueError(f"include pattern {pattern!r} asks for {name} of shape {shape}: only 2-D weights are curved")
    return TensorName(name, shape, True, f"included by {pattern!r}")


def _decide_bias(
    row: TensorName,
    weights: Mapping[str, TensorName],
    shapes: Mapping[str, Shape],
    include: Sequence[str],
    exclude: Sequence[str],
) -> TensorName:
    if not _is_bias(row.name, row.shape) or matches(row.name, exclude) is not None:
        return row
    if ends_like(row.name, STEP_BIASES) and matches(row.name, include) is None:
        return row._replace(reason="state-space step bias")
    weight = weights.get(row.name.removesuffix("bias") + "weight")
    if weight is not None and weight.curved and row.shape[0] in shapes[weight.name]:
        return row._replace(curved=True, reason="bias of a curved weight")
    if (pattern := matches(row.name, include)) is not None:
        raise ValueError(f"include pattern {pattern!r} asks for {row.name}, which has no curved weight beside it")
    return row


def _plain_reason(name: str, shape: Shape, routers: set[str]) -> str | None:
    """Return why the rules leave a tensor plain, or None."""
    if not _is_matrix(name, shape):
        return "1-D" if len(shape) == 1 else "empty" if 0 in shape else "not a 2-D weight"
    layer = name.removesuffix("weight").removesuffix(".")
    if matches(layer.rpartition(".")[2], _EMBEDDINGS) is not None:
        return "embedding"
    if ends_like(layer, _HEADS):
        return "output head"
    return "router of a mixture of experts" if name in routers else None


def _is_router(name: str, shapes: Mapping[str, Shape]) -> bool:
    """Whether a weight chooses among experts, by the rule of :func:`symexplin.routing`."""
    layer = name.removesuffix(".weight")
    if ends_like(layer, ROUTER_NAMES):
        return True
    if not ends_like(layer, GATE_NAMES) or not _is_matrix(name, shapes[name]):
        return False
    parent = layer[: layer.rfind(".") + 1]
    if any(other.startswith(f"{parent}experts.") for other in shapes):
        return True
    d_out, d_in = shapes[name]
    beside = (other for other in shapes if other != name and re.fullmatch(re.escape(parent) + r"[^.]+\.weight", other))
    return d_out < d_in and all(shapes[other][:1] != (d_out,) for other in beside)


def _is_matrix(name: str, shape: Shape) -> bool:
    return name.rpartition(".")[2] == "weight" and len(shape) == 2 and 0 not in shape


def _is_bias(name: str, shape: Shape) -> bool:
    return name.rpartition(".")[2] == "bias" and len(shape) == 1


def matches(name: str, patterns: Sequence[str]) -> str | None:
    """Return the first of the patterns that matches a name.

    >>> matches("blocks.0.up.bias", ("*.weight", "*.bias"))
    '*.bias'
    """
    return next((pattern for pattern in patterns if fnmatch.fnmatchcase(name, pattern)), None)


def curved_names(
    shapes: Mapping[str, Shape], include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> list[CurvedName]:
    """Return the curved weights of a file, with their biases and output dimensions; see :func:`name_tensors`.

    >>> curved_names({"h.0.c_fc.weight": (4, 16), "h.0.c_fc.bias": (16,), "wte.weight": (9, 4)})
    [CurvedName(weight='h.0.c_fc.weight', bias='h.0.c_fc.bias', out_dim=1)]
    """
    curved = dict.fromkeys(row.name for row in name_tensors(shapes, include, exclude) if row.curved)
    weights = [name for name in curved if name.rpartition(".")[2] == "weight"]
    biases = [name.removesuffix("weight") + "bias" for name in weights]
    return [
        CurvedName(weight, bias if bias in curved else None, out_dim_of(weight, shapes))
        for weight, bias in zip(weights, biases, strict=True)
    ]


def out_dim_of(weight: str, shapes: Mapping[str, Shape]) -> int:
    """Return which dimension of a weight counts outputs: 1 for transformers' Conv1D, else 0.

    A Conv1D has its name, and the file has one whose outputs outnumber its inputs, stored (inputs, outputs).

    >>> shapes = {"h.0.c_fc.weight": (4, 16), "h.0.c_proj.weight": (4, 4), "h.0.up.weight": (4, 4)}
    >>> [out_dim_of(name, shapes) for name in shapes]
    [1, 1, 0]
    """
    wide = (shape for name, shape in shapes.items() if _leaf(name) in _WIDENING and _is_matrix(name, shape))
    return int(_leaf(weight) in _CONV1D and any(shape[1] > shape[0] for shape in wide))


def _leaf(weight: str) -> str:
    return weight.split(".")[-2] if "." in weight else ""


def floating_shapes(specs: Mapping[str, TensorSpec]) -> dict[str, Shape]:
    """Return the shapes that :func:`curved_names` asks for: those of 16, 32 and 64 bits.

    >>> floating_shapes({"a": TensorSpec((2,), "F32"), "b": TensorSpec((2,), "I64")})
    {'a': (2,)}
    """
    return {name: spec.shape for name, spec in specs.items() if spec.dtype in FLOATING}


def other_types(specs: Mapping[str, TensorSpec]) -> str:
    """Return what to add to "got none" for a file whose matrices are of a type that is never curved.

    >>> other_types({"up.weight": TensorSpec((8, 4), "F8_E4M3")})
    ', but matrices of F8_E4M3: convert them to one of BF16, F16, F32, F64 first'
    """
    matrices = (spec for name, spec in specs.items() if name.endswith("weight") and len(spec.shape) == 2)
    found = ", ".join(sorted({spec.dtype for spec in matrices} - FLOATING))
    return f", but matrices of {found}: convert them to one of {', '.join(sorted(FLOATING))} first" if found else ""


def format_names(rows: Sequence[TensorName]) -> str:
    """Return the decisions as a table in plain text.

    >>> print(format_names(name_tensors({"up.weight": (8, 4), "norm.weight": (4,)})))
    tensor       shape          reason
    up.weight    8x4    curved  2-D weight
    norm.weight  4      plain   1-D
    """
    cells = [("tensor", "shape", "", "reason")]
    cells += [
        (row.name, "x".join(map(str, row.shape)) or "scalar", "curved" if row.curved else "plain", row.reason)
        for row in rows
    ]
    return format_columns(cells, left=4)
