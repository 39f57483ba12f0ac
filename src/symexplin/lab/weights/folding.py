"""Curved and plain weights as files: `invert_file` into raw weights and scales, `fold_file` back.

The files have what :func:`symexplin.convert` and :func:`symexplin.fold` make of a model's `state_dict`, without the
model. A file with raw weights says so in its header: "symexplin_map" is the configuration as JSON.
"""

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
from symexplin.lab.weights.files import MAP_KEY, model_config, read_specs, read_tensors, write_tensors
from symexplin.lab.weights.names import (
    CurvedName,
    curved_names,
    floating_shapes,
    format_names,
    matches,
    name_tensors,
    other_types,
    out_dim_of,
)
from symexplin.layout import Layout
from symexplin.linear import SELLinear
from symexplin.starts import START_RULES
from symexplin.transform import compute_dtype
from symexplin.validation import check_choice, naming

__all__ = ["fold_file", "invert_file"]

Echo = Callable[[str], None]
State = dict[str, Tensor]

# Header entry: types of the weights that were narrower than their raw weights, by layer and then by name.
_TYPES_KEY = "symexplin_types"
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}
_RAW = ("raw_weight", "raw_bias")


class _Largest:
    """The largest difference of a weight over all layers, absolute and relative to the weight, and where."""

    def __init__(self) -> None:
        self.absolute, self.relative = (0.0, ""), (0.0, "")

    def add(self, name: str, found: Tensor, wanted: Tensor) -> None:
        """Take in one tensor."""
        wanted = wanted.double()
        gap = (found.double() - wanted).abs()
        relative = torch.where(wanted == 0, 0.0, gap / wanted.abs())
        self.absolute = max(self.absolute, (float(gap.max()), name))
        self.relative = max(self.relative, (float(relative.max()), name))

    def to_dict(self) -> dict[str, Any]:
        """Return both, with the names of their tensors."""
        pairs = {"absolute": self.absolute, "relative": self.relative}
        return {kind: {"value": value, "tensor": name} for kind, (value, name) in pairs.items()}

    def __str__(self) -> str:
        (absolute, there), (relative, elsewhere) = self.absolute, self.relative
        if not absolute:
            return "no difference"
        return f"largest difference {absolute:.3g} ({there}); relative to its weight {relative:.3g} ({elsewhere})"


@torch.no_grad()
def invert_file(
    source: str | Path,
    target: str | Path,
    config: SELConfig | None = None,
    start: str = "matched",
    echo: Echo = lambda _: None,
) -> dict[str, Any]:
    """Write the weights of `source` in curved space: the `state_dict` that :func:`symexplin.convert` would give.

    Each curved `X.weight` becomes `X.raw_weight` and its scales `X.e_row`, ..., each bias beside it `X.raw_bias` and
    `X.bias_e_row`, ...; all else is unchanged. Raw weights and scales are float32, or float64 where the weights are:
    in bfloat16 or float16 they would lose what the weights have, so such files grow. Which tensors are curved
    :func:`symexplin.lab.weights.names.name_tensors` says. LoRA's A depends on a weight's position among the
    parameters: in a lab model as its modules have it, in other files as the tensors follow each other there.

    Args:
        source: a safetensors file or folder of plain weights, see :func:`symexplin.lab.weights.files.read_specs`.
        target: the file to write, a new one in an existing folder.
        config: the map; default `SELConfig()`.
        start: "matched" or "mismatched", see :func:`symexplin.convert`.
        echo: takes the table of decisions and the lines of the report.

    Returns:
        "matrices", "biases" and "numbers" that are curved, "plain" names, the "largest" difference between effective
        weights and those found, "widened" names.

    Raises:
        ValueError: nothing to curve, weights that are curved already, not finite, or out of the map's reach; a target
            that exists.
        FileNotFoundError: no source, or no folder for the target.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_tensors(Path(folder, "plain"), {"up.weight": torch.eye(2)})
    ...     report = invert_file(Path(folder, "plain"), Path(folder, "curved"))
    ...     names = sorted(read_specs(Path(folder, "curved"))[0])
    ...     print(report["matrices"], names[:2])
    1 ['up.e_column', 'up.e_row']
    """
    _check_target(Path(target))
    config = check_config(config)
    check_choice("start", start, START_RULES)
    specs, metadata = read_specs(source)
    if MAP_KEY in metadata:
        raise ValueError(f"source must hold plain weights, got {str(source)!r}, which is curved already: fold it first")
    rules = floating_shapes(specs), config.include, config.exclude
    names = curved_names(*rules)
    if not names:
        raise ValueError(f"source must hold 2-D weights to curve, got none in {str(source)!r}{other_types(specs)}")
    echo(format_names(name_tensors(*rules)))
    state, _ = read_tensors(source)
    positions = {name: index for index, name in enumerate(_order(source, state, metadata))}
    largest, types, numbers = _Largest(), {}, 0
    for row in names:
        layer = _curve(row, state, config, start, positions[row.weight])
        for name, effective in zip((row.weight, row.layer + "bias"), layer.effective(), strict=False):
            plain = state.pop(name)
            largest.add(name, effective, plain)
            numbers += plain.numel()
            if plain.dtype.itemsize < torch.float32.itemsize:
                types[name] = specs[name].dtype
        fresh = {row.layer + local: value for local, value in layer.state_dict().items()}
        if taken := sorted(fresh.keys() & state.keys()):
            raise ValueError(f"source must hold plain weights, got {taken[0]!r} beside {row.weight!r}")
        state |= fresh
    header = {**metadata, MAP_KEY: config.to_json()}
    write_tensors(target, state, header | ({_TYPES_KEY: json.dumps(types)} if types else {}))
    biases, left = sum(row.bias is not None for row in names), [name for name in specs if name in state]
    echo(f"{len(names)} matrices and {biases} biases curved, {numbers:,} numbers: {largest}")
    if start == "mismatched":
        echo("the mismatched start weakens negative weights, on purpose")
    if types:
        echo(f"{len(types)} tensors of 16 bits became raw weights of 32, which 16 would round")
    return {
        "matrices": len(names),
        "biases": biases,
        "numbers": numbers,
        "plain": left,
        "largest": largest.to_dict(),
        "widened": list(types),
    }


def _check_target(target: Path) -> None:
    if os.path.lexists(target):
        what = "is a folder" if target.is_dir() else "exists"
        raise ValueError(f"target must be a new file, got {str(target)!r}, which {what}")
    if not target.parent.is_dir():
        raise FileNotFoundError(
            f"target must be in an existing folder, got {str(target)!r}: there is no folder {str(target.parent)!r}"
        )


def _order(source: str | Path, state: Mapping[str, Tensor], metadata: Mapping[str, str]) -> list[str]:
    """Return the names of parameters in the order of the modules, if the file is of a lab model, else as they come."""
    try:
        config = model_config(source, metadata)
    except ValueError:
        return list(state)
    with torch.device("meta"):
        names = [name for name, _ in Transformer(config).named_parameters()]
    return names if set(names) == set(state) else list(state)


def _curve(row: CurvedName, state: Mapping[str, Tensor], config: SELConfig, start: str, position: int) -> SELLinear:
    """Return the curved layer of one weight and what bias there is, which the identity map carries if it is plain."""
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
    """Write the effective weights of `source`, a file of :func:`invert_file` or of a model in its module home.

    Each `X.raw_weight` with its scales becomes `X.weight` again, in the type the plain weight had; all else is
    unchanged, and the map leaves the header.

    Args:
        source: a file with "symexplin_map" in its header.
        target: the file to write, a new one in an existing folder.
        echo: takes the lines of the report.

    Returns:
        "matrices" and "biases" that were curved, and the "largest" difference between effective weights, in float32 or
        float64, and those stored.

    Raises:
        ValueError: no map, or one that does not fit the tensors, naming file and tensor; a target that exists.
        FileNotFoundError: no source, or no folder for the target.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_tensors(Path(folder, "plain"), {"up.weight": torch.eye(2)})
    ...     _ = invert_file(Path(folder, "plain"), Path(folder, "curved"))
    ...     _ = fold_file(Path(folder, "curved"), Path(folder, "folded"))
    ...     torch.allclose(read_tensors(Path(folder, "folded"))[0]["up.weight"], torch.eye(2))
    True
    """
    _check_target(Path(target))
    state, metadata = read_tensors(source)
    where = repr(str(source))
    if MAP_KEY not in metadata:
        raise ValueError(f"source must hold raw weights and {MAP_KEY!r} in its header, got {where} without it")
    with naming(f"header of {where}"):
        config = SELConfig.from_dict(_table(MAP_KEY, metadata.pop(MAP_KEY)))
        types = _table(_TYPES_KEY, metadata.pop(_TYPES_KEY, "{}"))
    layers = [name.removesuffix(_RAW[0]) for name in state if name.rpartition(".")[2] == _RAW[0]]
    shapes = {layer + "weight": tuple(state[layer + _RAW[0]].shape) for layer in layers}
    if odd := next((name for name, shape in shapes.items() if len(shape) != 2), None):
        raise ValueError(f"{where}: the raw weight of {odd!r} must have two dimensions, got shape {shapes[odd]}")
    largest, plain = _Largest(), {}
    around = {name: tuple(value.shape) for name, value in state.items()} | shapes
    for weight, shape in shapes.items():
        layer, out_dim = weight.removesuffix("weight"), out_dim_of(weight, around)
        layout = Layout(shape, out_dim, config.beta_of(*shape), config)
        with naming(where):
            for name, effective, dtype in _fold(layer, layout, state):
                plain[name] = effective.to(_dtype(types[name]) if name in types else dtype)
                largest.add(name, plain[name], effective)
    _check_rest(where, layers, state)
    write_tensors(target, {**state, **plain}, metadata)
    report = {"matrices": len(layers), "biases": len(plain) - len(layers), "largest": largest.to_dict()}
    rounded = f"; rounded to the file's type: {largest}" if largest.absolute[0] else ""
    echo(f"{report['matrices']} matrices and {report['biases']} biases folded{rounded}")
    return report


def _table(key: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{key} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{key} must be a JSON object, got {found!r}")
    return found


def _dtype(name: object) -> torch.dtype:
    return _DTYPES[check_choice(_TYPES_KEY, name, _DTYPES)]


def _fold(layer: str, layout: Layout, state: State) -> Iterator[tuple[str, Tensor, torch.dtype]]:
    """Take a layer's tensors out of `state`; yield plain name, effective value and the type of the raw one."""
    raw = state.pop(layer + _RAW[0])
    yield layer + "weight", _effective(layout, layer, raw, state), raw.dtype
    if (raw_bias := state.pop(layer + _RAW[1], None)) is not None:
        side, prefix = _bias_layout(layout, curved=True), layer + "bias_"
        slots = [prefix + slot.name for slot in side.slots]
        excluded = matches(layer + "bias", layout.config.exclude) is not None
        if excluded or (slots and not any(name in state for name in slots)):
            side = _bias_layout(layout, curved=False)
        yield layer + "bias", _effective(side, prefix, raw_bias, state), raw_bias.dtype


def _effective(layout: Layout, prefix: str, raw: Tensor, state: State) -> Tensor:
    """Return the effective value of one raw tensor, in its compute dtype, and take its scales out of `state`."""
    if tuple(raw.shape) != layout.shape:
        raise ValueError(f"bias of {prefix!r} must have shape {layout.shape}, got {tuple(raw.shape)}")
    panels = layout.start_panels(compute_dtype(raw), raw.device, position=0)
    for slot in layout.slots:
        view, name = layout.view(slot, panels[slot.panel]), prefix + slot.name
        if name not in state or state[name].numel() != view.numel():
            found = f"shape {tuple(state[name].shape)}" if name in state else "none"
            raise ValueError(f"the map in the header asks for {view.numel()} numbers in {name!r}, got {found}")
        view.copy_(state.pop(name).reshape(view.shape))
    return Coordinates(layout, raw.to(compute_dtype(raw)), **panels).effective()


def _check_rest(where: str, layers: list[str], state: State) -> None:
    """Refuse what would be lost or be in the way: the remains of layers that the map does not explain."""
    if not layers:
        raise ValueError(f"source must hold raw weights, got {where} with a map and none of them")
    known = set(layers)
    for name in state:
        path, dot, local = name.rpartition(".")
        if local in _RAW or path + dot in known:
            raise ValueError(f"{where} has the tensor {name!r}, which the map in its header does not explain")
