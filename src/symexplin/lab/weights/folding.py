"""Files of plain weights to raw weights and back, by :func:`symexplin.convert` and :func:`symexplin.fold`.

A file of raw weights has the map as JSON under "symexplin_map" in its header.

A file has no modules. A skeleton model gets its tensors, and modules of the types that the names and shapes tell. A 2-D
tensor named `weight` stands for an embedding if its name says so, else for a linear layer.
"""

import dataclasses
import fnmatch
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from symexplin.config import SELConfig, check_config
from symexplin.lab.files import check_new
from symexplin.lab.weights.files import (
    FLOATING,
    MAP_KEY,
    TensorSpec,
    iter_tensors,
    load_state,
    map_in,
    read_specs,
    read_tensors,
    write_tensors,
)
from symexplin.modules import CurvedModule, convert, fold
from symexplin.routes import Routing, routing
from symexplin.transform import compute_dtype

__all__ = ["curved_in", "curved_matrices", "fold_file", "folded", "invert_file"]

Echo = Callable[[str], None]
State = dict[str, Tensor]
Layers = dict[str, dict[str, Tensor]]  # the effective values of each layer, in the compute dtype

# Entry of the header: the dtypes of plain weights that are narrower than their raw weights, by name.
_TYPES_KEY = "symexplin_types"
_NARROW = {"BF16": torch.bfloat16, "F16": torch.float16}
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
        raise ValueError(f"{str(path)!r} holds raw weights, not plain ones: fold it first")
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
        trained = value.dtype in (*_NARROW.values(), torch.float32, torch.float64)
        modules[path]._parameters[local] = nn.Parameter(value, requires_grad=trained)
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
def invert_file(
    source: str | Path,
    target: str | Path,
    config: SELConfig | None = None,
    echo: Echo = lambda _: None,
) -> dict[str, Any]:
    """Write the raw weights and scales of `source`: the `state_dict` that :func:`symexplin.convert` would give.

    Each curved `X.weight` becomes `X.raw_weight` and its scales `X.e_row`, ..., its bias
    `X.raw_bias` and `X.bias_e_row`, ...; other tensors stay. Raw weights and scales are float32, or float64 where the
    weights are: 16 bits would round them. LoRA's A depends on the position of a weight in the file.
    """
    check_new("target", target)
    config = check_config(config)
    specs, metadata = read_specs(source)
    routes = curved_in(source, specs, metadata, config)
    echo(str(routes))
    plain, _ = read_tensors(source)
    wide = {route.name: plain[route.name].to(compute_dtype(plain[route.name])) for route in routes.curved}
    model = convert(_skeleton(plain | wide), config)
    types = {name: specs[name].dtype for name in wide if specs[name].dtype in _NARROW}
    write_tensors(
        target, model.state_dict(), metadata | {MAP_KEY: routes.config.to_json(), _TYPES_KEY: json.dumps(types)}
    )
    return _report("curved", _layers(model), plain, echo)


def _layers(model: nn.Module) -> Layers:
    named = model.named_modules()
    return {name: module.sel_effective() for name, module in named if isinstance(module, CurvedModule)}


def _report(verb: str, layers: Layers, plain: State, echo: Echo) -> dict[str, Any]:
    """Tell the largest difference between the effective weights of layers and plain ones."""
    gaps = []
    for path, values in layers.items():
        for local, value in values.items():
            gaps.append(float((value.double() - plain[f"{path}.{local}".lstrip(".")].double()).abs().max()))
    echo(f"{len(layers)} layers {verb}; largest difference {max(gaps):.3g}")
    return {"layers": len(layers), "largest_difference": max(gaps)}


@torch.no_grad()
def fold_file(source: str | Path, target: str | Path, echo: Echo = lambda _: None) -> dict[str, Any]:
    """Write the effective weights of `source`, a file of :func:`invert_file` or of a model with curved layers.

    Each `X.raw_weight` with its scales becomes `X.weight` in the dtype of the plain weight. Other tensors stay, and the
    map leaves the header. The largest difference is between the weights written and the effective ones in float32 or
    float64.
    """
    check_new("target", target)
    plain, metadata, layers = folded(source)
    write_tensors(target, plain, metadata)
    return _report("folded", layers, plain, echo)


@torch.no_grad()
def folded(source: str | Path) -> tuple[State, dict[str, str], Layers]:
    """Return the tensors and the header that :func:`fold_file` writes, and the curved layers by name."""
    state, metadata = read_tensors(source)
    config = map_in(source, metadata, MAP_KEY)
    split = {name: (name[: -len(local)], local) for name in state for local in [name.rpartition(".")[2]]}
    prefixes = {prefix for prefix, local in split.values() if local.startswith(_RAW)}
    if config is None or not prefixes:
        raise ValueError(f"{str(source)!r} must hold raw weights, and their map as {MAP_KEY!r} in its header")
    if config.beta == "auto":
        raise ValueError(f"{str(source)!r} is of an earlier version, with a beta per matrix: fold it with that version")
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
    layers, plain = _layers(model), fold(model).state_dict()
    for name, kind in json.loads(metadata.pop(_TYPES_KEY, "{}")).items():
        plain[name] = plain[name].to(_NARROW[kind])
    del metadata[MAP_KEY]
    return plain, metadata, layers
