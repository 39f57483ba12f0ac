"""Files of weights as models: which tensors a map curves, and raw weights folded to plain ones.

A file of raw weights, as runs of the module home save in their checkpoints, has the map as JSON in its header.

A file has no modules. A skeleton model gets its tensors, and modules of the types that the names and shapes tell. A 2-D
tensor named `weight` stands for an embedding if its name says so, else for a linear layer.
"""

import dataclasses
import fnmatch
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from symexplin.config import SELConfig
from symexplin.lab.weights.files import (
    FLOATING,
    MAP_KEY,
    TensorSpec,
    iter_tensors,
    load_state,
    map_in,
    read_specs,
    read_tensors,
)
from symexplin.modules import convert, fold
from symexplin.routes import Routing, routing

__all__ = ["curved_in", "curved_matrices", "folded"]

State = dict[str, Tensor]

_TRAINED = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_RAW = "raw_"
# Last part of an embedding's name: GPT-2's, Llama's original, T5's, and all that end in "embedding".
_EMBEDDINGS = (
    *("wte", "wpe", "shared", "relative_attention_bias"),
    *("embed", "embed_*", "*_embed", "*emb", "*embd", "*embedding", "*embeddings"),
)
# transformers' transposed layers, GPT-2's. Other models use the names for nn.Linear, so shapes decide.
_CONV1D = ("c_attn", "q_attn", "c_proj", "c_fc")
_WIDENING = ("c_attn", "c_fc")  # have more outputs than inputs


def curved_in(
    path: str | Path, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str], config: SELConfig
) -> Routing:
    """Return the decision for each floating tensor of a file of plain weights; it prints as a table.

    Raises:
        ValueError: raw weights, or no 2-D weight to curve.
    """
    if MAP_KEY in metadata:
        raise ValueError(f"{str(path)!r} holds raw weights, not plain ones: load and fold the model first")
    floating = {name: spec.shape for name, spec in specs.items() if spec.dtype in FLOATING}
    found = routing(_skeleton({name: torch.empty(shape, device="meta") for name, shape in floating.items()}), config)
    if not found.curved:
        kinds = ", ".join(sorted(FLOATING))
        raise ValueError(f"{str(path)!r} must hold 2-D weights to curve, in one of {kinds}, got none")
    return found


def curved_matrices(path: Path) -> Iterator[Tensor]:
    """Yield every curved matrix of a file of plain weights, one at a time."""
    specs, metadata = read_specs(path)
    curved = {route.name for route in curved_in(path, specs, metadata, SELConfig()).curved}
    for name, tensor in iter_tensors(path):
        if name in curved and name.endswith("weight"):
            yield tensor


class NotLinear(nn.Module):
    """A module that has neither a linear layer's nor an embedding's weight; the table shows this name as reason."""

    def get_output_embeddings(self) -> None:
        """Say that heads have the name of one, or map to the vocabulary: a tied head is not in the file."""


class Conv1D(nn.Module):
    """A stand-in for transformers' transposed layer; :func:`symexplin.routing` knows it by its name."""

    __module__ = "transformers.pytorch_utils"


def _skeleton(tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return a model with these tensors as parameters; those that a map cannot take are frozen."""
    model = _module("", tensors)
    modules = {"": model}
    for name, value in tensors.items():
        path, _, local = name.rpartition(".")
        parts = path.split(".") if path else []
        for depth, part in enumerate(parts):
            inner = ".".join(parts[: depth + 1])
            if inner not in modules:
                modules[inner] = _module(f"{inner}.", tensors)
                # Not by add_module, which refuses names such as "half".
                modules[".".join(parts[:depth])]._modules[part] = modules[inner]
        modules[path]._parameters[local] = nn.Parameter(value, requires_grad=value.dtype in _TRAINED)
    return model


def _module(prefix: str, tensors: Mapping[str, Tensor]) -> nn.Module:
    weight = tensors.get(f"{prefix}weight")
    if weight is None or weight.dim() != 2 or weight.numel() == 0:
        return NotLinear()
    leaf, (height, width) = _leaf(f"{prefix}weight"), weight.shape
    if any(fnmatch.fnmatchcase(leaf, pattern) for pattern in _EMBEDDINGS):
        return nn.Embedding(height, width, device="meta")
    if leaf in _CONV1D and _transposed(tensors):
        return Conv1D()
    return nn.Linear(width, height, bias=False, device="meta")


def _transposed(tensors: Mapping[str, Tensor]) -> bool:
    """Whether a layer with more outputs than inputs is stored (inputs, outputs), as in transformers' GPT-2."""
    wide = (value.shape for name, value in tensors.items() if _leaf(name) in _WIDENING and value.dim() == 2)
    return any(shape[1] > shape[0] for shape in wide)


def _leaf(name: str) -> str:
    """Return the last module in the name of a weight, "" for another parameter."""
    path, _, local = name.rpartition(".")
    return path.rpartition(".")[2] if local == "weight" else ""


@torch.no_grad()
def folded(source: str | Path) -> tuple[State, dict[str, str]]:
    """Return the plain weights of a file of raw ones, each `X.raw_weight` as `X.weight`, and the rest of its header."""
    state, metadata = read_tensors(source)
    config = map_in(source, metadata, MAP_KEY)
    split = {name: (name[: -len(local)], local) for name in state for local in [name.rpartition(".")[2]]}
    prefixes = {prefix for prefix, local in split.values() if local.startswith(_RAW)}
    if config is None or not prefixes:
        raise ValueError(f"{str(source)!r} must hold raw weights, and their map as {MAP_KEY!r} in its header")
    outline: State = {}
    for name, value in state.items():
        prefix, local = split[name]
        if local.startswith(_RAW):
            outline[prefix + local.removeprefix(_RAW)] = torch.zeros_like(value)
        elif prefix not in prefixes or local in ("weight", "bias"):  # no scale
            outline[name] = value
    # A pattern may match a tied head alone, which is not in the file.
    include, exclude = (
        tuple(pattern for pattern in patterns if fnmatch.filter(outline, pattern))
        for patterns in (config.include, config.exclude)
    )
    model = convert(_skeleton(outline), dataclasses.replace(config, include=include, exclude=exclude))
    load_state(model, state, source)
    del metadata[MAP_KEY]
    return fold(model).state_dict(), metadata
