"""Weights as safetensors files: the only reader, and the models of the laboratory with their shape in the header."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from symexplin.config import SELConfig
from symexplin.lab.files import read_json, replacing
from symexplin.lab.model import ModelConfig, Transformer
from symexplin.lab.parallel import placed
from symexplin.validation import naming

__all__ = [
    *("FLOATING", "MAP_KEY", "MODEL", "TRAINED_KEY", "TensorSpec", "iter_tensors", "load_model", "load_state"),
    *("load_weights", "map_in", "model_from", "read_specs", "read_tensors", "save_model", "write_tensors"),
]

# Entries of the header: the shape of a model, the map of raw weights, and the map that plain weights were trained with.
_CONFIG_KEY, MAP_KEY, TRAINED_KEY = "config", "symexplin_map", "symexplin_trained_map"

# The dtypes of plain weights; narrower ones need scales.
FLOATING = frozenset({"F16", "BF16", "F32", "F64"})

MODEL, _INDEX = "model.safetensors", "model.safetensors.index.json"
_TIED = "head.weight"


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor in a header; `dtype` is safetensors' name, such as "F32" or "BF16"."""

    shape: tuple[int, ...]
    dtype: str


def read_specs(path: str | Path) -> tuple[dict[str, TensorSpec], dict[str, str]]:
    """Return the specs of all tensors in the order of the file, and the entries of the header.

    `path` is a safetensors file, or a folder with `model.safetensors` or with the shards that
    `model.safetensors.index.json` lists. Pickles are never opened.
    """
    specs: dict[str, TensorSpec] = {}
    metadata: dict[str, str] = {}
    for part in _parts(Path(path)):
        with _open(part) as file:
            metadata |= file.metadata() or {}
            for name in file.offset_keys():
                view = file.get_slice(name)
                specs[name] = TensorSpec(tuple(view.get_shape()), view.get_dtype())
    return specs, metadata


def iter_tensors(path: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) in the order of the file; `path` is that of :func:`read_specs`.

    The tensors are views of the mapped file. The file may be larger than the memory if they are not kept.
    """
    for part in _parts(Path(path)):
        with _open(part) as file:
            for name in file.offset_keys():
                yield name, file.get_tensor(name)


def read_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return all tensors by name, and the entries of the header; `path` is that of :func:`read_specs`."""
    return dict(iter_tensors(path)), read_specs(path)[1]


def _parts(path: Path) -> list[Path]:
    """Return the files to read."""
    if not path.is_dir():
        return [path]
    if (path / MODEL).exists():
        return [path / MODEL]
    if not (path / _INDEX).exists():
        raise ValueError(f"path must be a safetensors file, or a folder with {MODEL} or {_INDEX}, got {str(path)!r}")
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


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file under a temporary name and rename it, so that `path` is never incomplete.

    The same tensors and entries give the same bytes. The file has the mode of any new file.
    """
    plain = {name: value.detach().contiguous() for name, value in tensors.items()}
    with replacing(path) as temporary:
        temporary.unlink(missing_ok=True)
        temporary.touch()
        mode = temporary.stat().st_mode
        try:
            safetensors.torch.save_file(plain, temporary, dict(metadata) if metadata else None)
        except safetensors.SafetensorError as error:  # which hides a full disk
            raise OSError(f"cannot write {str(path)!r}: {error}") from None
        temporary.chmod(mode)  # safetensors writes files with mode 600
        if metadata:
            _sort_entries(temporary)


def _sort_entries(path: Path) -> None:
    """Sort the entries of a header in place: safetensors writes them in random order."""
    with path.open("rb+") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        file.seek(8)
        file.write(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size))


def save_model(
    model: Transformer,
    path: str | Path,
    metadata: Mapping[str, str] | None = None,
    state: Mapping[str, Tensor] | None = None,
) -> None:
    """Write the weights of `model`, with its :class:`ModelConfig` as JSON under "config" in the header.

    Args:
        model: a tied head is left out.
        path: of the file.
        metadata: further entries of the header.
        state: the whole weights of a sharded model.

    Raises:
        OSError: a full disk, for example; an earlier file stays.

    >>> import tempfile, torch
    >>> model = Transformer(ModelConfig(width=16, depth=1, heads=2, context=8))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_model(model, Path(folder, "model.safetensors"))
    ...     copy = load_model(Path(folder, "model.safetensors"))
    >>> torch.equal(copy.head.weight, model.head.weight)
    True
    """
    weights = dict(model.state_dict() if state is None else state)
    if model.config.tie_head:
        del weights[_TIED]
    write_tensors(path, weights, {**(metadata or {}), _CONFIG_KEY: json.dumps(dataclasses.asdict(model.config))})


def load_model(path: str | Path) -> Transformer:
    """Return a plain model with the weights of :func:`save_model`, on the CPU, in the file's dtype.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: a file without the shape of a model, with raw weights, or with tensors that do not fit its shape.
    """
    tensors, metadata = read_tensors(path)
    if MAP_KEY in metadata:
        raise ValueError(f"{str(path)!r} holds raw weights of a curved model")
    return model_from(path, tensors, metadata)


def model_from(path: str | Path, tensors: dict[str, Tensor], metadata: Mapping[str, str]) -> Transformer:
    """Return the model of the plain tensors and the header of the file at `path`."""
    if _CONFIG_KEY not in metadata:
        raise ValueError(f"path must be a file of save_model, got {str(path)!r}, without a config in its header")
    with naming(f"header of {str(path)!r}: {_CONFIG_KEY}"):
        try:
            config = ModelConfig(**json.loads(metadata[_CONFIG_KEY]))
        except TypeError as error:
            raise ValueError(f"is of another version of symexplin: {error}") from None
    model = Transformer(config)
    dtype = next((tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()), torch.float32)
    _fill(model.to(dtype), tensors, path)
    return model


def load_weights(model: Transformer, path: str | Path) -> None:
    """Load the weights of :func:`save_model` into a model of the same kind, plain or curved, whole or sharded."""
    own = model.state_dict()
    _fill(model, {name: placed(tensor, own.get(name, tensor)) for name, tensor in iter_tensors(path)}, path)


def _fill(model: Transformer, tensors: dict[str, Tensor], path: str | Path) -> None:
    if model.config.tie_head and "embedding.weight" in tensors:
        tensors[_TIED] = tensors["embedding.weight"]
    load_state(model, tensors, path)


def load_state(model: nn.Module, tensors: Mapping[str, Tensor], path: str | Path) -> None:
    """Load the tensors of the file at `path` into a model, or raise ValueError with the first that does not fit."""
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        first = str(error).splitlines()[1].strip()
        raise ValueError(f"{str(path)!r} does not fit its model: {first}") from None


def map_in(path: str | Path, metadata: Mapping[str, str], key: str) -> SELConfig | None:
    """Return the map under MAP_KEY or TRAINED_KEY in the header of the file at `path`, None if there is none."""
    if key not in metadata:
        return None
    with naming(f"header of {str(path)!r}: {key}"):
        return SELConfig.from_dict(json.loads(metadata[key], object_hook=_scale))


def _scale(table: dict[str, Any]) -> dict[str, Any]:
    """Return a table; of a scale of an earlier version, k multiplied the optimizer's rate or peak_lr was the rate."""
    if "peak_lr" not in table:
        return table
    peak = table.pop("peak_lr")
    return table | ({"base_lr": None} if peak is None else {"base_lr": 1.0, "k": peak})
