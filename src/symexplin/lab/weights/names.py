"""Which tensors of a file are curved: :func:`symexplin.routing` of a model that has their names and shapes.

A file has no modules. A 2-D tensor named `weight` stands for an embedding if its name says so, else for a linear layer.
"""

import fnmatch
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from symexplin.config import SELConfig
from symexplin.lab.weights.files import FLOATING, TensorSpec
from symexplin.routes import Routing, routing

__all__ = ["CurvedName", "curved_names", "floating_shapes", "other_types", "out_dim_of", "route_names"]

Shape = tuple[int, ...]

# Last part of an embedding's name: GPT-2's, Llama's original, T5's, and all that end in "embedding".
_EMBEDDINGS = (
    *("wte", "wpe", "shared", "relative_attention_bias"),
    *("embed", "embed_*", "*_embed", "*emb", "*embd", "*embedding", "*embeddings"),
)
# transformers' transposed layers, GPT-2's. Other models use the names for nn.Linear, so shapes decide.
_CONV1D = frozenset({"c_attn", "q_attn", "c_proj", "c_fc"})
_WIDENING = ("c_attn", "c_fc")  # have more outputs than inputs


class CurvedName(NamedTuple):
    """A curved weight, its curved bias if it has one, and the dimension of the weight that counts outputs."""

    weight: str
    bias: str | None
    out_dim: int

    @property
    def layer(self) -> str:
        """The prefix of both names with its dot; empty for a layer that is the whole model."""
        return self.weight.removesuffix("weight")


class NotLinear(nn.Module):
    """A module that has neither a linear layer's nor an embedding's weight; the table shows this name as reason."""

    def get_output_embeddings(self) -> None:
        """Say that heads have the name of one, or map to the vocabulary: a tied head is not in the file."""


def route_names(shapes: Mapping[str, Shape], include: Sequence[str] = (), exclude: Sequence[str] = ()) -> Routing:
    """Return the decision for each floating tensor of a file; it prints as a table."""
    found = routing(_skeleton(shapes), SELConfig(include=tuple(include), exclude=tuple(exclude)))
    for route in found.curved:
        if route.name.rpartition(".")[2] not in ("weight", "bias"):
            raise ValueError(f"include must match weights and biases of linear layers, got {route.name!r}")
    return found


def _skeleton(shapes: Mapping[str, Shape]) -> nn.Module:
    """Return a model on the meta device with these parameters; transposed layers are linear layers."""
    model = _module("", shapes)
    modules = {"": model}
    for name in shapes:
        parts = name.split(".")[:-1]
        for depth, part in enumerate(parts):
            path = ".".join(parts[: depth + 1])
            if path not in modules:
                modules[path] = _module(f"{path}.", shapes)
                # Not by add_module, which refuses names such as "half".
                modules[".".join(parts[:depth])]._modules[part] = modules[path]
    for name, shape in shapes.items():
        path, _, local = name.rpartition(".")
        if local not in modules[path]._parameters:
            modules[path]._parameters[local] = nn.Parameter(torch.empty(shape, device="meta"))
    return model


def _module(prefix: str, shapes: Mapping[str, Shape]) -> nn.Module:
    shape = shapes.get(f"{prefix}weight", ())
    if len(shape) != 2 or 0 in shape:
        return NotLinear()
    leaf = prefix.rstrip(".").rpartition(".")[2]
    if any(fnmatch.fnmatchcase(leaf, pattern) for pattern in _EMBEDDINGS):
        return nn.Embedding(*shape, device="meta")
    out_dim = out_dim_of(f"{prefix}weight", shapes)
    bias = shapes.get(f"{prefix}bias") == (shape[out_dim],)
    return nn.Linear(shape[1 - out_dim], shape[out_dim], bias, device="meta")


def curved_names(
    shapes: Mapping[str, Shape], include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> list[CurvedName]:
    """Return the curved weights of a file in its order, with their biases."""
    curved = {route.name for route in route_names(shapes, include, exclude).curved}
    weights = [name for name in shapes if name in curved and name.rpartition(".")[2] == "weight"]
    biases = [name.removesuffix("weight") + "bias" for name in weights]
    return [
        CurvedName(weight, bias if bias in curved else None, out_dim_of(weight, shapes))
        for weight, bias in zip(weights, biases, strict=True)
    ]


def out_dim_of(weight: str, shapes: Mapping[str, Shape]) -> int:
    """Return the dimension of a weight that counts outputs: 1 for transformers' Conv1D, else 0.

    A Conv1D has one of its names, in a file where a layer with more outputs than inputs is stored (inputs, outputs).
    """
    if _leaf(weight) not in _CONV1D:
        return 0
    wide = (shape for name, shape in shapes.items() if _leaf(name) in _WIDENING and len(shape) == 2)
    return int(any(shape[1] > shape[0] for shape in wide))


def _leaf(weight: str) -> str:
    """Return the last module in the name of a weight."""
    path, _, local = weight.rpartition(".")
    return path.rpartition(".")[2] if local == "weight" else ""


def floating_shapes(specs: Mapping[str, TensorSpec]) -> dict[str, Shape]:
    """Return the shapes for :func:`curved_names`: those of tensors of 16, 32 and 64 bits."""
    return {name: spec.shape for name, spec in specs.items() if spec.dtype in FLOATING}


def other_types(specs: Mapping[str, TensorSpec]) -> str:
    """Return an explanation for a file whose matrices have a dtype that is never curved, else ""."""
    matrices = (spec for name, spec in specs.items() if name.endswith("weight") and len(spec.shape) == 2)
    found = ", ".join(sorted({spec.dtype for spec in matrices} - FLOATING))
    return f", but matrices of {found}: convert them to one of {', '.join(sorted(FLOATING))} first" if found else ""
