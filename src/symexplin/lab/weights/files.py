"""Weights as files: safetensors read through one door, and the lab's models with their shape in the header."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from symexplin.lab.files import replacing
from symexplin.lab.model import ModelConfig, Transformer
from symexplin.lab.parallel import placed
from symexplin.validation import check_choice, naming

__all__ = [
    "CONFIG_KEY",
    "FLOATING",
    "MAP_KEY",
    "MODEL",
    "TensorSpec",
    "iter_tensors",
    "load_model",
    "load_weights",
    "model_config",
    "read_specs",
    "read_tensors",
    "save_model",
    "write_tensors",
]

# Entries of the header: the shape of a lab model, and the map of a file that holds raw weights.
CONFIG_KEY = "config"
MAP_KEY = "symexplin_map"

# The types whose numbers are the weights themselves: those of 8 bits and fewer come with scales beside them.
FLOATING = frozenset({"F16", "BF16", "F32", "F64"})

_TIED = "head.weight"
MODEL, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLE_PROTOCOLS = range(2, 6)


class TensorSpec(NamedTuple):
    """What a header says of a tensor; `dtype` is safetensors' name, such as "F32" or "BF16"."""

    shape: tuple[int, ...]
    dtype: str


def read_specs(path: str | Path) -> tuple[dict[str, TensorSpec], dict[str, str]]:
    """Return shape and dtype of every tensor, in the order of the file, and the entries of the header.

    Args:
        path: a safetensors file, or a folder with `model.safetensors`, or with the shards that
            `model.safetensors.index.json` lists. Header entries are then those of all shards.

    Raises:
        FileNotFoundError: no such file.
        ValueError: another kind of file (a pickle is never opened), a damaged one, an index that does not fit.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_tensors(Path(folder, "model.safetensors"), {"x": torch.zeros(2, 3)})
    ...     read_specs(folder)
    ({'x': TensorSpec(shape=(2, 3), dtype='F32')}, {})
    """
    specs: dict[str, TensorSpec] = {}
    metadata: dict[str, str] = {}
    for part, wanted in _parts(Path(path)):
        with _open(part) as file:
            metadata |= file.metadata() or {}
            for name in _names(part, file, wanted):
                view = file.get_slice(name)
                specs[name] = TensorSpec(tuple(view.get_shape()), view.get_dtype())
    return specs, metadata


def iter_tensors(path: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) in the order of the file, one at a time; `path` and errors as in :func:`read_specs`.

    The tensors are views of the file's pages, which the system may drop again: a file larger than the memory is
    no obstacle to who keeps none of them.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_tensors(Path(folder, "a"), {"x": torch.ones(2)})
    ...     [(name, tensor.tolist()) for name, tensor in iter_tensors(Path(folder, "a"))]
    [('x', [1.0, 1.0])]
    """
    for part, wanted in _parts(Path(path)):
        with _open(part) as file:
            for name in _names(part, file, wanted):
                yield name, file.get_tensor(name)


def read_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return all tensors by name, on the CPU, and the entries of the header; see :func:`read_specs`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_tensors(Path(folder, "a"), {"x": torch.ones(2)}, {"by": "me"})
    ...     read_tensors(Path(folder, "a"))
    ({'x': tensor([1., 1.])}, {'by': 'me'})
    """
    _, metadata = read_specs(path)
    return dict(iter_tensors(path)), metadata


def _parts(path: Path) -> list[tuple[Path, set[str] | None]]:
    """Return the files to read, each with the tensors to take from it (None: all)."""
    if not path.exists():
        raise FileNotFoundError(f"path must name a safetensors file or folder, got {str(path)!r}, which does not exist")
    if not path.is_dir():
        return [(path, None)]
    if (path / MODEL).exists():
        return [(path / MODEL, None)]
    if not (path / _INDEX).exists():
        found = ", ".join(sorted(p.name for p in path.iterdir())[:5]) or "nothing"
        raise ValueError(f"path must name a file, or a folder with {MODEL} or {_INDEX}; {str(path)!r} has {found}")
    shards: dict[Path, set[str]] = {}
    for name, shard in _weight_map(path / _INDEX).items():
        file = path / shard
        if not file.is_file():
            raise FileNotFoundError(f"{_INDEX} names the shard {shard!r}, which is not in {str(path)!r}")
        shards.setdefault(file, set()).add(name)
    return sorted(shards.items())


def _weight_map(index: Path) -> dict[str, str]:
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        # A name with a folder in it could point anywhere.
        if not found or not all(Path(shard).name == shard for shard in found.values()):
            raise ValueError("weight_map must give a file of the same folder for each tensor")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{str(index)!r} is not an index of shards: {error}") from None
    return dict(found)


@contextlib.contextmanager
def _open(path: Path) -> Iterator[Any]:
    if path.is_dir():
        raise ValueError(f"path must name a safetensors file, got the folder {str(path)!r}")
    try:
        file = safetensors.safe_open(path, framework="pt")
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(f"{str(path)!r} {_diagnosis(path, error)}") from None
    with file:
        yield file


def _diagnosis(path: Path, error: Exception) -> str:
    """Say what a file that safetensors does not read is instead."""
    with path.open("rb") as file:
        head = file.read(8)
    if not head:
        return "is empty, not a safetensors file"
    # A safetensors header of 640 bytes begins with 80 02 too, followed by 00, which is no instruction of a pickle.
    pickled = len(head) > 2 and head[0] == 0x80 and head[1] in _PICKLE_PROTOCOLS and head[2] != 0
    if pickled or head.startswith(b"PK\x03\x04"):
        return (
            "is a pickle, which can run code when loaded; only safetensors files are read: "
            "save it with safetensors.torch.save_file"
        )
    return f"is not a whole safetensors file (truncated, damaged or of another kind): {error}"


def _names(path: Path, file: Any, wanted: set[str] | None) -> list[str]:
    names: list[str] = file.offset_keys()
    if wanted is None:
        return names
    missing = sorted(wanted - set(names))
    if missing:
        raise ValueError(f"the index gives {missing[0]!r} to {str(path)!r}, which does not have it")
    return [name for name in names if name in wanted]


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file beside `path` and move it there in one step, so that no reader finds half a file.

    The same tensors and entries give the same bytes, and the file has the mode of any new file.

    Raises:
        OSError: the disk is full, ...; nothing is left behind.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_tensors(Path(folder, "a.safetensors"), {"x": torch.ones(2)})
    ...     [path.name for path in Path(folder).iterdir()]
    ['a.safetensors']
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
        temporary.chmod(mode)  # safetensors makes files for their owner alone
        if metadata:
            _sort_entries(temporary)


def _sort_entries(path: Path) -> None:
    """Sort the entries of a header in place: safetensors writes them in another order each time."""
    with path.open("rb+") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size)
        if len(text) > size:
            raise OSError(f"cannot sort the header of {str(path)!r}: it would have {len(text)} bytes, not {size}")
        file.seek(8)
        file.write(text)


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
        metadata: more entries of the header.
        state: the weights, if the model itself has parts of them alone.

    Raises:
        ValueError: an entry "config" among `metadata`.
        OSError: the disk is full, ...; the file is then the old one.

    >>> import tempfile, torch
    >>> model = Transformer(ModelConfig(width=16, depth=1, heads=2, context=8))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_model(model, Path(folder, "model.safetensors"))
    ...     copy = load_model(Path(folder, "model.safetensors"))
    >>> torch.equal(copy.head.weight, model.head.weight)
    True
    """
    extra = dict(metadata or {})
    if CONFIG_KEY in extra:
        raise ValueError(f"metadata must leave {CONFIG_KEY!r} to the shape of the model, got {extra[CONFIG_KEY]!r}")
    weights = dict(model.state_dict() if state is None else state)
    if model.config.tie_head:
        del weights[_TIED]
    write_tensors(path, weights, {CONFIG_KEY: json.dumps(dataclasses.asdict(model.config)), **extra})


def load_model(path: str | Path) -> Transformer:
    """Return a plain model with the weights that :func:`save_model` wrote, on the CPU, in the file's dtype.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a file of another program, one with raw weights, or one whose tensors do not fit its shape; the
            message names file and tensor.
    """
    specs, metadata = read_specs(path)
    where = f"{str(path)!r}"
    if MAP_KEY in metadata:
        raise ValueError(f"{where} holds raw weights of a curved model: fold it first")
    config = model_config(path, metadata)
    _check_specs(where, specs, config)
    state = dict(iter_tensors(path))
    model = Transformer(config).to(state["embedding.weight"].dtype)
    _fill(model, state)
    return model


def load_weights(model: Transformer, path: str | Path) -> None:
    """Load what :func:`save_model` wrote of a model like `model`, plain or curved, into it, sharded as it is.

    Raises:
        RuntimeError: tensors of another model, as from `load_state_dict`.

    >>> import tempfile
    >>> first, second = (Transformer(ModelConfig(width=16, depth=1, heads=2, context=8)) for _ in range(2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_model(first, Path(folder, MODEL))
    ...     load_weights(second, Path(folder, MODEL))
    >>> torch.equal(first.head.weight, second.head.weight)
    True
    """
    own = model.state_dict()
    _fill(model, {name: placed(tensor, own.get(name, tensor)) for name, tensor in iter_tensors(path)})


def _fill(model: Transformer, state: dict[str, Tensor]) -> None:
    if model.config.tie_head:
        state[_TIED] = state["embedding.weight"]
    model.load_state_dict(state)


def model_config(path: str | Path, metadata: Mapping[str, str]) -> ModelConfig:
    """Return the shape that :func:`save_model` put into a header; `path` is for the message.

    Raises:
        ValueError: no such entry, or one that is not a :class:`ModelConfig`.
    """
    where = repr(str(path))
    if CONFIG_KEY not in metadata:
        raise ValueError(f"path must name a model of save_model, got {where}, without a config in its header")
    with naming(f"config in the header of {where}"):
        try:
            found = json.loads(metadata[CONFIG_KEY])
        except ValueError as error:
            raise ValueError(f"not JSON: {error}") from None
        if not isinstance(found, dict):
            raise ValueError(f"must be a JSON object, got {found!r}")
        for key in found:
            check_choice("key", key, [field.name for field in dataclasses.fields(ModelConfig)])
        return ModelConfig(**found)


def _check_specs(where: str, specs: Mapping[str, TensorSpec], config: ModelConfig) -> None:
    with torch.device("meta"):  # shapes without memory
        wanted = {name: tuple(value.shape) for name, value in Transformer(config).state_dict().items()}
    if config.tie_head:
        del wanted[_TIED]
    for name, shape in wanted.items():
        if name not in specs:
            raise ValueError(f"{where} lacks the tensor {name!r} of shape {shape}")
        if specs[name].shape != shape:
            raise ValueError(f"{where}: tensor {name!r} must have shape {shape}, got {specs[name].shape}")
        if specs[name].dtype not in FLOATING:
            raise ValueError(f"{where}: tensor {name!r} must be of {sorted(FLOATING)}, got {specs[name].dtype}")
    for name in specs:
        if name not in wanted:
            raise ValueError(f"{where} has the tensor {name!r}, which a model of its config does not have")
