"""Files of plain weights to raw weights and back, as :func:`symexplin.convert` and :func:`symexplin.fold` do it.

A file of raw weights has the map as JSON under "symexplin_map" in its header.
"""

import fnmatch
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from symexplin.config import SELConfig, check_config
from symexplin.conversion import IDENTITY
from symexplin.coordinates import Coordinates
from symexplin.lab.model import Transformer
from symexplin.lab.weights.files import MAP_KEY, map_in, model_config, read_specs, read_tensors, table_in, write_tensors
from symexplin.lab.weights.names import CurvedName, curved_names, floating_shapes, other_types, out_dim_of, route_names
from symexplin.layout import Layout
from symexplin.linear import SELLinear
from symexplin.starts import START_RULES
from symexplin.transform import compute_dtype
from symexplin.validation import check_choice, naming

__all__ = ["fold_file", "folded", "invert_file"]

Echo = Callable[[str], None]
State = dict[str, Tensor]

# Entry of the header: the dtypes of plain weights that are narrower than their raw weights, by name.
_TYPES_KEY = "symexplin_types"
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}
_RAW = ("raw_weight", "raw_bias")

Difference = tuple[float, str]  # the largest of a weight, and the tensor that it is in


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
    if MAP_KEY in metadata:
        raise ValueError(f"source must hold plain weights, got {str(source)!r} with raw ones: fold it first")
    rules = floating_shapes(specs), config.include, config.exclude
    names = curved_names(*rules)
    if not names:
        raise ValueError(f"source must hold 2-D weights to curve, got none in {str(source)!r}{other_types(specs)}")
    echo(str(route_names(*rules)))
    state, _ = read_tensors(source)
    positions = {name: index for index, name in enumerate(_order(source, state, metadata))}
    largest: Difference = (0.0, "")
    types: dict[str, str] = {}
    for row in names:
        layer = _curve(row, state, config, start, positions[row.weight])
        for name, effective in zip((row.weight, row.layer + "bias"), layer.effective(), strict=False):
            largest = max(largest, _difference(name, effective, state.pop(name)))
            if specs[name].dtype in _DTYPES:
                types[name] = specs[name].dtype
        state |= {row.layer + local: value for local, value in layer.state_dict().items()}
    header = {**metadata, MAP_KEY: config.to_json()}
    write_tensors(target, state, header | ({_TYPES_KEY: json.dumps(types)} if types else {}))
    if types:
        echo(f"{len(types)} tensors of 16 bits became raw weights of 32 bits, as 16 bits would round them")
    if start == "mismatched":
        echo("the mismatched start weakens negative weights, as the paper's does")
    return _report("curved", len(names), sum(row.bias is not None for row in names), largest, echo)


def _difference(name: str, found: Tensor, wanted: Tensor) -> Difference:
    return float((found.double() - wanted.double()).abs().max()), name


def _report(verb: str, matrices: int, biases: int, largest: Difference, echo: Echo) -> dict[str, Any]:
    value, name = largest
    echo(
        f"{matrices} matrices and {biases} biases {verb}; largest difference {value:.3g}{f' ({name})' if value else ''}"
    )
    return {"matrices": matrices, "biases": biases, "largest_difference": value}


def _check_target(target: Path) -> None:
    if os.path.lexists(target):
        raise ValueError(f"target must be a new file, got {str(target)!r}, which exists")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"target must be in an existing folder, got {str(target)!r}")


def _order(source: str | Path, state: Mapping[str, Tensor], metadata: Mapping[str, str]) -> list[str]:
    """Return the names in the order of the parameters of a model of the laboratory, else in that of the file."""
    try:
        config = model_config(source, metadata)
    except ValueError:
        return list(state)
    with torch.device("meta"):
        names = [name for name, _ in Transformer(config).named_parameters()]
    return names if set(names) == set(state) else list(state)


def _curve(row: CurvedName, state: Mapping[str, Tensor], config: SELConfig, start: str, position: int) -> SELLinear:
    """Return the curved layer of a weight and its bias; the identity map carries a plain bias."""
    weight, bias = state[row.weight], state.get(row.layer + "bias")
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != weight.shape[row.out_dim]):
        bias = None
    linear = nn.Linear(1, 1, bias is not None, "meta")
    linear.in_features, linear.out_features = weight.shape[1 - row.out_dim], weight.shape[row.out_dim]
    linear.weight = _widened(weight)
    layout = Layout(tuple(weight.shape), row.out_dim, config.beta_of(*weight.shape), config)
    side = None
    if bias is not None:
        linear.bias = _widened(bias)
        side = _bias_layout(layout, curved=row.bias is not None)
    with naming(row.layer.removesuffix(".") or "model"):
        return SELLinear.from_linear(linear, layout, side, start, position)


def _bias_layout(weight: Layout, curved: bool) -> Layout:
    shape = (weight.shape[weight.out_dim],)
    return Layout(shape, 0, weight.beta, weight.config) if curved else Layout(shape, 0, 1.0, IDENTITY)


def _widened(plain: Tensor) -> nn.Parameter:
    return nn.Parameter(plain.to(compute_dtype(plain)), requires_grad=False)


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
    where = repr(str(source))
    config = map_in(source, metadata, MAP_KEY)
    if config is None:
        raise ValueError(f"source must hold raw weights and {MAP_KEY!r} in its header, got {where} without it")
    types = table_in(metadata, _TYPES_KEY)
    layers = [name.removesuffix(_RAW[0]) for name in state if name.rpartition(".")[2] == _RAW[0]]
    shapes = {layer + "weight": tuple(state[layer + _RAW[0]].shape) for layer in layers}
    around = {name: tuple(value.shape) for name, value in state.items()} | shapes
    largest: Difference = (0.0, "")
    plain: State = {}
    with naming(where):
        for weight, shape in shapes.items():
            if len(shape) != 2:
                raise ValueError(f"the raw weight of {weight!r} must have two dimensions, got shape {shape}")
            layout = Layout(shape, out_dim_of(weight, around), config.beta_of(*shape), config)
            for name, effective, dtype in _fold(weight.removesuffix("weight"), layout, state):
                plain[name] = effective.to(_DTYPES[types[name]] if name in types else dtype)
                largest = max(largest, _difference(name, plain[name], effective))
        _check_rest(layers, state)
    entries = {key: text for key, text in metadata.items() if key not in (MAP_KEY, _TYPES_KEY)}
    return {**state, **plain}, entries, (len(layers), len(plain) - len(layers), largest)


def _fold(layer: str, layout: Layout, state: State) -> Iterator[tuple[str, Tensor, torch.dtype]]:
    """Take the tensors of a layer out of `state`; yield plain names, effective values and dtypes of the raw ones."""
    raw = state.pop(layer + _RAW[0])
    yield layer + "weight", _effective(layout, layer, raw, state), raw.dtype
    if (raw_bias := state.pop(layer + _RAW[1], None)) is not None:
        side, prefix = _bias_layout(layout, curved=True), layer + "bias_"
        slots = [prefix + slot.name for slot in side.slots]
        excluded = any(fnmatch.fnmatchcase(layer + "bias", pattern) for pattern in layout.config.exclude)
        if excluded or (slots and not any(name in state for name in slots)):
            side = _bias_layout(layout, curved=False)
        yield layer + "bias", _effective(side, prefix, raw_bias, state), raw_bias.dtype


def _effective(layout: Layout, prefix: str, raw: Tensor, state: State) -> Tensor:
    """Return the effective value of a raw tensor, and take its scales out of `state`."""
    if tuple(raw.shape) != layout.shape:
        raise ValueError(f"{prefix!r} must have a raw bias of shape {layout.shape}, got {tuple(raw.shape)}")
    panels = layout.start_panels(compute_dtype(raw), raw.device, position=0)
    for slot in layout.slots:
        view, name = layout.view(slot, panels[slot.panel]), prefix + slot.name
        if name not in state or state[name].numel() != view.numel():
            found = f"shape {tuple(state[name].shape)}" if name in state else "none"
            raise ValueError(f"the map in the header needs {view.numel()} numbers in {name!r}, got {found}")
        view.copy_(state.pop(name).reshape(view.shape))
    return Coordinates(layout, raw.to(compute_dtype(raw)), **panels).effective()


def _check_rest(layers: list[str], state: State) -> None:
    """Refuse tensors of curved layers that the map does not explain: they would be lost, or be in the way."""
    if not layers:
        raise ValueError("source must hold raw weights, got a map in the header and no raw weights")
    known = set(layers)
    for name in state:
        path, dot, local = name.rpartition(".")
        if local in _RAW or path + dot in known:
            raise ValueError(f"the map in the header does not explain the tensor {name!r}")
