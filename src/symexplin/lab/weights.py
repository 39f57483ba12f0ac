"""Weights as safetensors files: those of any model, and those of runs, whose headers tell the model and its map."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from symexplin.config import SELConfig
from symexplin.lab.files import read_json, replacing
from symexplin.lab.model import ModelConfig, Transformer
from symexplin.lab.parallel import placed
from symexplin.modules import convert, fold
from symexplin.validation import naming

__all__ = [
    *("MODEL", "is_raw", "iter_tensors", "load_model", "load_weights"),
    *("map_entry", "read_map", "save_model", "write_tensors"),
]

MODEL, _INDEX = "model.safetensors", "model.safetensors.index.json"
# The entry of a header, JSON of what is known: "config", the shape of the model, and "map", which it was trained with.
# One entry, because safetensors writes several in random order.
_ENTRY = "symexplin"
_TIED = "head.weight"


def iter_tensors(path: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) in the order of the file.

    `path` is a safetensors file, or a folder with `model.safetensors` or with the shards that
    `model.safetensors.index.json` lists. The tensors are views of the mapped file, which may be larger than the memory
    if they are not kept. Pickles are never opened.
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
        raise kind(f"path must be a safetensors file, or a folder with {MODEL} or {_INDEX}, got {str(path)!r}")
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
        found: dict[str, Any] = json.loads((file.metadata() or {}).get(_ENTRY, "{}"))
    return found


def read_map(path: str | Path) -> SELConfig | None:
    """Return the map that the weights at `path` were trained with, None if their header names none."""
    found = _header(path).get("map")
    with naming(f"header of {str(path)!r}: map"):
        return None if found is None else SELConfig.from_dict(found)


def map_entry(curve: SELConfig | None, **others: Any) -> dict[str, str]:
    """Return the entry of a header that :func:`read_map` reads, with `others` beside the map."""
    return {_ENTRY: json.dumps(others | ({} if curve is None else {"map": curve.to_dict()}))}


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


def save_model(
    model: Transformer, path: str | Path, curve: SELConfig | None = None, state: Mapping[str, Tensor] | None = None
) -> None:
    """Write the plain or raw weights of `model` without a tied head, its shape, and `curve`, the map of its training.

    `state` has the whole weights of a sharded model.

    Raises:
        OSError: a full disk, for example; an earlier file stays.
    """
    weights = dict(model.state_dict() if state is None else state)
    if model.config.tie_head:
        del weights[_TIED]
    write_tensors(path, weights, map_entry(curve, config=dataclasses.asdict(model.config)))


def load_model(path: str | Path) -> Transformer:
    """Return the model of :func:`save_model`, plain, on the CPU, in the file's dtype; raw weights are folded.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: a file without the shape of a model, or with tensors that do not fit its shape.
    """
    found, curve = _header(path).get("config"), read_map(path)
    if found is None:
        known = "a model of this version of symexplin, with a config in its header"
        raise ValueError(f"path must be {known}, got {str(path)!r} without one")
    with naming(f"header of {str(path)!r}: config"):
        try:
            config = ModelConfig(**found)
        except TypeError as error:
            raise ValueError(f"is of another version of symexplin: {error}") from None
    tensors = dict(iter_tensors(path))
    model = Transformer(config).to(next(iter(tensors.values())).dtype)
    raw = any(map(is_raw, tensors))
    if raw:
        convert(model, curve)
    load_weights(model, path)
    if raw:
        fold(model)
    return model


def load_weights(model: Transformer, path: str | Path) -> None:
    """Load the weights of :func:`save_model` into a model of the same kind, plain or curved, whole or sharded."""
    own = model.state_dict()
    tensors = {name: placed(tensor, own.get(name, tensor)) for name, tensor in iter_tensors(path)}
    if model.config.tie_head and "embedding.weight" in tensors:
        tensors[_TIED] = tensors["embedding.weight"]
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        first = str(error).splitlines()[1].strip()
        raise ValueError(f"{str(path)!r} does not fit its model: {first}") from None
