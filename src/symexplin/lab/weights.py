"""Weights and optimizer states as safetensors files, and trained models from a run, a checkpoint or such a file.

The headers of a run's weights tell the model and its map.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from symexplin.checks import naming
from symexplin.config import SELConfig
from symexplin.lab.checkpoint import newest
from symexplin.lab.data.tokenizer import Tokenizer
from symexplin.lab.files import read_json, replacing
from symexplin.lab.folders import FACTS, TOKENIZER
from symexplin.lab.model import ModelConfig, Transformer
from symexplin.lab.parallel import placed
from symexplin.modules import convert, fold

__all__ = [
    *("MODEL", "OPTIMIZER", "Trained", "find_weights", "is_raw", "iter_tensors"),
    *("load_model", "load_optimizer", "load_trained", "load_weights", "read_map"),
    *("save_model", "split_optimizer", "write_tensors"),
]

MODEL, OPTIMIZER, _INDEX = "model.safetensors", "optimizer.safetensors", "model.safetensors.index.json"
# The entry of a header, JSON of what is known: "config", the shape of the model, and "map", which it was trained with.
# One entry, because safetensors writes several in random order.
_ENTRY = "symexplin"
_TIED = "head.weight"
# State that is sharded as its parameter: the weight's own. Optimizers with scales take those whole, and shard them.
_OF_WEIGHTS = frozenset({"raw", "master", "exp_avg", "exp_avg_sq", "momentum_buffer"})

# --- Any safetensors file --------------------------------------------------------------------------------------------


def iter_tensors(path: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) in the order of the file.

    `path` is a safetensors file, or a folder with `model.safetensors` or with the shards that
    `model.safetensors.index.json` lists. The tensors are views of the files, which may be larger than the memory if
    they are not kept. Pickles are never opened.
    """
    for part in _parts(Path(path)):
        with _open(part) as file:
            for name in file.offset_keys():
                yield name, file.get_tensor(name)


def _parts(path: Path) -> list[Path]:
    """Return the files to read."""
    if path.is_file():
        return [path]
    if (path / MODEL).exists():
        return [path / MODEL]
    if not (path / _INDEX).exists():
        kind = ValueError if path.exists() else FileNotFoundError
        raise kind(f"no weights in {str(path)!r}: give a safetensors file, or a folder with {MODEL} or {_INDEX}")
    return [path / shard for shard in sorted(set(read_json(path / _INDEX)["weight_map"].values()))]


def _open(path: Path) -> Any:
    """Return the open file, which is a context manager."""
    try:
        return safetensors.safe_open(path, framework="pt")
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"{str(path)!r} is not a complete safetensors file: {error}; pickles (.bin, .pt) may run code and are not "
            "read: save their tensors with safetensors.torch.save_file"
        ) from None


def _header(path: str | Path) -> dict[str, Any]:
    with _open(_parts(Path(path))[0]) as file:
        return dict(json.loads((file.metadata() or {}).get(_ENTRY, "{}")))


def read_map(path: str | Path) -> SELConfig | None:
    """Return the map that the weights at `path` were trained with, None if their header names none."""
    table = _header(path).get("map")
    with naming(f"header of {str(path)!r}: map"):
        return None if table is None else SELConfig.from_dict(table)


def is_raw(name: str) -> bool:
    """Return whether a tensor of this name holds raw weights of a curved layer."""
    return name.rpartition(".")[2].startswith("raw_")


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor], entries: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file under a temporary name and rename it; `entries` are those of its header.

    The same tensors and at most one entry give the same bytes. The file has the mode of any new file.
    """
    plain = {name: value.detach().contiguous() for name, value in tensors.items()}
    with replacing(path) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode
        try:
            safetensors.torch.save_file(plain, temporary, dict(entries) if entries else None)
        except safetensors.SafetensorError as error:  # which hides a full disk
            raise OSError(f"cannot write {str(path)!r}: {error}") from None
        temporary.chmod(mode)  # safetensors writes files with mode 600


# --- Models of the laboratory -----------------------------------------------------------------------------------------


def save_model(model: Transformer, path: str | Path, curve: SELConfig | None = None) -> None:
    """Write the plain or raw weights of `model` without a tied head, its shape, and `curve`, the map of its training.

    Raises:
        OSError: a full disk, for example; an earlier file stays.
    """
    write_tensors(path, _untied(model), {_ENTRY: json.dumps(_about(model, curve))})


def _about(model: Transformer, curve: SELConfig | None) -> dict[str, Any]:
    shape = {"config": dataclasses.asdict(model.config)}
    return shape if curve is None else shape | {"map": curve.to_dict()}


def _untied(model: Transformer) -> dict[str, Tensor]:
    tied = {_TIED} if model.config.tie_head else set()
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


def load_model(path: str | Path) -> Transformer:
    """Return the model of :func:`save_model`, plain, on the CPU, in the file's dtype; raw weights are folded.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: a file without the shape of a model, or with tensors that do not fit its shape.
    """
    config, curve = _model_config(path), read_map(path)
    tensors = dict(iter_tensors(path))
    model = Transformer(config).to(next(iter(tensors.values())).dtype)
    raw = any(map(is_raw, tensors))
    if raw:
        convert(model, curve)
    load_weights(model, path)
    if raw:
        fold(model)
    return model


def _model_config(path: str | Path) -> ModelConfig:
    """Return the shape of the model in a file of :func:`save_model`."""
    shape = _header(path).get("config")
    if shape is None:
        raise ValueError(f"{str(path)!r} has no config in its header: give a model of this version of symexplin")
    with naming(f"header of {str(path)!r}: config"):
        try:
            return ModelConfig(**shape)
        except TypeError as error:
            raise ValueError(f"is of another version of symexplin: {error}") from None


def load_weights(model: Transformer, path: str | Path) -> None:
    """Load the weights in a file or a checkpoint into a model of the same kind, plain or curved, whole or sharded."""
    own = model.state_dict()
    tensors = {name: placed(tensor, own.get(name, tensor)) for name, tensor in iter_tensors(path)}
    if model.config.tie_head and "embedding.weight" in tensors:
        tensors[_TIED] = tensors["embedding.weight"]
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        first = str(error).splitlines()[1].strip()
        raise ValueError(f"{str(path)!r} does not fit its model: {first}") from None


class Trained(NamedTuple):
    """A plain model, and its tokenizer."""

    model: Transformer
    tokenizer: Tokenizer


def load_trained(path: str | Path) -> Trained:
    """Return the model of a run, a checkpoint, or a model.safetensors with tokenizer.json beside it."""
    file = find_weights(path)
    # A checkpoint is two folders below its run, which has the tokenizer.
    place = next((parent for parent in file.parents[:3] if (parent / TOKENIZER).exists()), None)
    if place is None:
        raise FileNotFoundError(f"no {TOKENIZER} beside {str(file)!r}: copy that of the run or of its data there")
    options = read_json(place / FACTS).get("tokenizer", {}) if (place / FACTS).exists() else {}
    return Trained(load_model(file), Tokenizer.load(place / TOKENIZER, **options))


def find_weights(path: str | Path) -> Path:
    """Return the file with the final weights of a run, else that of its newest checkpoint.

    `path` may also be a checkpoint or a safetensors file.
    """
    path = Path(path)
    if not path.exists():
        wanted = "model must be the folder of a run or a model's file"
        raise FileNotFoundError(f"{wanted}, got {str(path)!r}, which does not exist")
    if not path.is_dir():
        return path
    for place in (path, *newest(path)):
        if (place / MODEL).exists():
            return place / MODEL
    raise ValueError(f"model must be a run with weights or a model's file, got {str(path)!r} without weights")


# --- The state of an optimizer ----------------------------------------------------------------------------------------


def split_optimizer(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of an optimizer's state by name, for the file OPTIMIZER, and the rest as plain values."""
    whole = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    plain: dict[str, dict[str, Any]] = {}
    for index, state in whole["state"].items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{key}"] = value
            else:
                plain.setdefault(str(index), {})[key] = value
    return tensors, {"groups": whole["param_groups"], "plain": plain}


def load_optimizer(optimizer: torch.optim.Optimizer, folder: Path, saved: Mapping[str, Any]) -> None:
    """Load the state of :func:`split_optimizer` from a checkpoint; sharded parameters take their part of it."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Any]] = {int(index): dict(values) for index, values in saved["plain"].items()}
    for name, tensor in iter_tensors(folder / OPTIMIZER):
        index, _, key = name.partition(".")
        value = placed(tensor, parameters[int(index)]) if key in _OF_WEIGHTS else tensor
        # A copy: tensors of mapped files are not aligned as kernels need them.
        state.setdefault(int(index), {})[key] = value.clone()
    optimizer.load_state_dict({"state": state, "param_groups": saved["groups"]})
