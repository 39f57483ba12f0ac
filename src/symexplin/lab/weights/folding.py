"""Files of plain weights to raw weights and back, as :func:`symexplin.convert` and :func:`symexplin.fold` do it.

A file of raw weights has the map as JSON under "symexplin_map" in its header.

:func:`curved_in` finds the tensors to curve, by :func:`symexplin.routing` of a model with the names and shapes of the
file. A file has no modules. A 2-D tensor named `weight` stands for an embedding if its name says so, else for a linear
layer.
"""

import dataclasses
import fnmatch
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from symexplin.config import SELConfig, check_config
from symexplin.conversion import IDENTITY
from symexplin.lab.model import Transformer
from symexplin.lab.weights.files import (
    FLOATING,
    MAP_KEY,
    TensorSpec,
    map_in,
    model_config,
    read_specs,
    read_tensors,
    table_in,
    write_tensors,
)
from symexplin.layout import Layout
from symexplin.linear import SELLinear
from symexplin.routes import Routing, routing
from symexplin.starts import START_RULES
from symexplin.transform import compute_dtype
from symexplin.validation import check_choice, naming

__all__ = ["curved_in", "fold_file", "folded", "invert_file"]

Echo = Callable[[str], None]
Shapes = Mapping[str, tuple[int, ...]]
State = dict[str, Tensor]
Difference = tuple[float, str]  # the largest of a weight, and the tensor that it is in

# Entry of the header: the dtypes of plain weights that are narrower than their raw weights, by name.
_TYPES_KEY = "symexplin_types"
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}
_WEIGHT, _BIAS = "raw_weight", "raw_bias"
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
        ValueError: raw weights, no 2-D weight to curve, a pattern for other tensors than weights and biases.
    """
    if MAP_KEY in metadata:
        raise ValueError(f"{str(path)!r} holds raw weights, not plain ones: fold it first")
    shapes = _ordered({name: spec.shape for name, spec in specs.items() if spec.dtype in FLOATING}, metadata)
    found = routing(_skeleton(shapes), config)
    for route in found.curved:
        if route.name.rpartition(".")[2] not in ("weight", "bias"):
            raise ValueError(f"include must match weights and biases of linear layers, got {route.name!r}")
    if not found.curved:
        matrices = (spec for name, spec in specs.items() if name.endswith("weight") and len(spec.shape) == 2)
        narrow = ", ".join(sorted({spec.dtype for spec in matrices} - FLOATING))
        hint = f", but matrices of {narrow}: convert them to one of {', '.join(sorted(FLOATING))} first"
        raise ValueError(f"{str(path)!r} must hold 2-D weights to curve, got none{hint if narrow else ''}")
    return Routing(tuple(dataclasses.replace(route, out_dim=_out_dim(route.name, shapes)) for route in found))


def _ordered(shapes: Shapes, metadata: Mapping[str, str]) -> Shapes:
    """Return the shapes in the order of the parameters of a model of the laboratory, else in that of the file."""
    try:
        config = model_config("", metadata)
    except ValueError:
        return shapes
    with torch.device("meta"):
        names = [name for name, _ in Transformer(config).named_parameters()]
    return {name: shapes[name] for name in names} if set(names) == set(shapes) else shapes


class NotLinear(nn.Module):
    """A module that has neither a linear layer's nor an embedding's weight; the table shows this name as reason."""

    def get_output_embeddings(self) -> None:
        """Say that heads have the name of one, or map to the vocabulary: a tied head is not in the file."""


def _skeleton(shapes: Shapes) -> nn.Module:
    """Return a model on the meta device with these parameters; transposed layers are linear layers."""
    model = _module("", shapes)
    modules = {"": model}
    for name, shape in shapes.items():
        path, _, local = name.rpartition(".")
        parts = path.split(".") if path else []
        for depth, part in enumerate(parts):
            inner = ".".join(parts[: depth + 1])
            if inner not in modules:
                modules[inner] = _module(f"{inner}.", shapes)
                # Not by add_module, which refuses names such as "half".
                modules[".".join(parts[:depth])]._modules[part] = modules[inner]
        modules[path]._parameters[local] = nn.Parameter(torch.empty(shape, device="meta"))
    return model


def _module(prefix: str, shapes: Shapes) -> nn.Module:
    name = f"{prefix}weight"
    shape = shapes.get(name, ())
    if len(shape) != 2 or 0 in shape:
        return NotLinear()
    if any(fnmatch.fnmatchcase(_leaf(name), pattern) for pattern in _EMBEDDINGS):
        return nn.Embedding(*shape, device="meta")
    out_dim = _out_dim(name, shapes)
    return nn.Linear(shape[1 - out_dim], shape[out_dim], bias=False, device="meta")


def _out_dim(name: str, shapes: Shapes) -> int:
    """Return the dimension of a parameter that counts outputs: 1 for the weight of transformers' Conv1D, else 0.

    A Conv1D has one of its names, in a file where a layer with more outputs than inputs is stored (inputs, outputs).
    """
    if _leaf(name) not in _CONV1D:
        return 0
    wide = (shape for other, shape in shapes.items() if _leaf(other) in _WIDENING and len(shape) == 2)
    return int(any(shape[1] > shape[0] for shape in wide))


def _leaf(name: str) -> str:
    """Return the last module in the name of a weight, "" for another parameter."""
    path, _, local = name.rpartition(".")
    return path.rpartition(".")[2] if local == "weight" else ""


@torch.no_grad()
def invert_file(
    source: str | Path,
    target: str | Path,
    config: SELConfig | None = None,
    start: str = "matched",
    echo: Echo = lambda _: None,
) -> dict[str, Any]:
    """Write the raw weights and scales of `source`: the `state_dict` that :func:`symexplin.convert` would give.

    Each curved `X.weight` becomes `X.raw_weight` and its scales `X.e_row`, ..., its bias `X.raw_bias` and
    `X.bias_e_row`, ...; other tensors stay. Raw weights and scales are float32, or float64 where the weights are:
    16 bits would round them. LoRA's A depends on the position of a weight: in a model of the laboratory among its
    parameters, else in the file.
    """
    _check_target(Path(target))
    config = check_config(config)
    check_choice("start", start, START_RULES)
    specs, metadata = read_specs(source)
    routes = curved_in(source, specs, metadata, config)
    echo(str(routes))
    state, _ = read_tensors(source)
    curved = {route.name: route for route in routes.curved}
    weights = [name for name in curved if name.endswith("weight")]
    largest: Difference = (0.0, "")
    types: dict[str, str] = {}
    for name in weights:
        layer = name.removesuffix("weight")
        bias = layer + "bias"
        plain = [state.pop(each) for each in (name, bias) if each in state]
        layout = curved[name].layout(config)
        with naming(layer.removesuffix(".") or "model"):
            made = _curve(plain, layout, _bias_layout(layout, bias in curved), start, curved[name].position)
        for each, value, effective in zip((name, bias), plain, made.effective(), strict=False):
            largest = max(largest, _difference(each, effective, value))
            if specs[each].dtype in _DTYPES:
                types[each] = specs[each].dtype
        state |= {layer + local: value for local, value in made.state_dict().items()}
    header = {**metadata, MAP_KEY: config.to_json()}
    write_tensors(target, state, header | ({_TYPES_KEY: json.dumps(types)} if types else {}))
    if types:
        echo(f"{len(types)} tensors of 16 bits became raw weights of 32 bits, as 16 bits would round them")
    if start == "mismatched":
        echo("the mismatched start weakens negative weights, as the paper's does")
    return _report("curved", len(weights), len(curved) - len(weights), largest, echo)


def _curve(plain: list[Tensor], layout: Layout, bias: Layout, start: str, position: int) -> SELLinear:
    """Return the curved layer of a weight and its bias, if it has one."""
    linear = nn.Linear(1, 1, False, "meta")
    values = [nn.Parameter(value.to(compute_dtype(value)), requires_grad=False) for value in plain]
    linear.weight = values[0]
    if len(values) == 1:
        return SELLinear.from_linear(linear, layout, None, start, position)
    linear.bias = values[1]
    return SELLinear.from_linear(linear, layout, bias, start, position)


def _bias_layout(weight: Layout, curved: bool) -> Layout:
    """Return the layout of the bias beside a weight; a plain bias has the identity map."""
    shape = (weight.shape[weight.out_dim],)
    return Layout(shape, 0, weight.beta, weight.config) if curved else Layout(shape, 0, 1.0, IDENTITY)


def _difference(name: str, found: Tensor, wanted: Tensor) -> Difference:
    return float((found.double() - wanted.double()).abs().max()), name


def _report(verb: str, matrices: int, biases: int, largest: Difference, echo: Echo) -> dict[str, Any]:
    value, name = largest
    echo(
        f"{matrices} matrices and {biases} biases {verb}; largest difference {value:.3g}{f' ({name})' if value else ''}"
    )
    return {"matrices": matrices, "biases": biases, "largest_difference": value}


def _check_target(target: Path) -> None:
    """Refuse a place that cannot be written, before the work."""
    if os.path.lexists(target):
        raise ValueError(f"target must be a new file, got {str(target)!r}, which exists")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"target must be in an existing folder, got {str(target)!r}")


@torch.no_grad()
def fold_file(source: str | Path, target: str | Path, echo: Echo = lambda _: None) -> dict[str, Any]:
    """Write the effective weights of `source`, a file of :func:`invert_file` or of a model with curved layers.

    Each `X.raw_weight` with its scales becomes `X.weight` in the dtype of the plain weight. Other tensors stay, and the
    map leaves the header. The largest difference is between the weights written and the effective ones in float32 or
    float64.
    """
    _check_target(Path(target))
    plain, metadata, counts = folded(source)
    write_tensors(target, plain, metadata)
    return _report("folded", *counts, echo)


@torch.no_grad()
def folded(source: str | Path) -> tuple[State, dict[str, str], tuple[int, int, Difference]]:
    """Return the tensors and the header that :func:`fold_file` writes, and its counts and largest difference."""
    state, metadata = read_tensors(source)
    config = map_in(source, metadata, MAP_KEY)
    layers: dict[str, State] = {}
    for name, value in state.items():
        path, dot, local = name.rpartition(".")
        layers.setdefault(path + dot, {})[local] = value
    shapes = {layer + "weight": tuple(own[_WEIGHT].shape) for layer, own in layers.items() if _WEIGHT in own}
    if config is None or not shapes:
        raise ValueError(f"{str(source)!r} must hold raw weights, and their map as {MAP_KEY!r} in its header")
    types = table_in(metadata, _TYPES_KEY)
    largest: Difference = (0.0, "")
    plain: State = {}
    biases = 0
    for layer, own in layers.items():
        if _WEIGHT not in own:
            plain |= {layer + local: value for local, value in own.items()}
            continue
        with naming(f"{str(source)!r}: {layer}{_WEIGHT}"):
            effective = _fold(layer, own, _out_dim(layer + "weight", shapes), config)
        biases += len(effective) - 1
        for local, value in zip(("weight", "bias"), effective, strict=False):
            name = layer + local
            plain[name] = value.to(_DTYPES[types[name]] if name in types else own[f"raw_{local}"].dtype)
            largest = max(largest, _difference(name, plain[name], value))
    entries = {key: text for key, text in metadata.items() if key not in (MAP_KEY, _TYPES_KEY)}
    return plain, entries, (len(shapes), biases, largest)


def _fold(layer: str, own: State, out_dim: int, config: SELConfig) -> list[Tensor]:
    """Return the effective weight of a layer, and its bias if it has one."""
    shape = tuple(own[_WEIGHT].shape)
    if len(shape) != 2:
        raise ValueError(f"must have two dimensions, got shape {shape}")
    layout = Layout(shape, out_dim, config.beta_of(*shape), config)
    bias = _bias_layout(layout, curved=True)
    excluded = any(fnmatch.fnmatchcase(layer + "bias", pattern) for pattern in config.exclude)
    if excluded or (bias.slots and not any(name.startswith("bias_") for name in own)):
        bias = _bias_layout(layout, curved=False)
    made = _curve([torch.zeros_like(own[name]) for name in (_WEIGHT, _BIAS) if name in own], layout, bias, "matched", 0)
    try:
        made.load_state_dict(own)
    except RuntimeError as error:
        raise ValueError(f"does not fit the map in the header: {str(error).splitlines()[1].strip()}") from None
    return made.effective()
