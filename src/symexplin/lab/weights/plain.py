"""Plain weights of a run, a checkpoint or a file: where they lie, and a model that starts from them."""

import dataclasses
import hashlib
import tempfile
from pathlib import Path
from typing import Any

from symexplin.lab.checkpoint import is_checkpoint, load_checkpoint, newest
from symexplin.lab.folders import CONFIG
from symexplin.lab.model import ModelConfig, Transformer
from symexplin.lab.weights.files import MAP_KEY, MODEL, load_model, read_specs
from symexplin.lab.weights.folding import fold_file

__all__ = ["digest_of", "find_weights", "load_plain", "start_from"]


def find_weights(path: str | Path, name: str = "path") -> Path:
    """Return the file of weights that a path means: the final ones of a run, else those of its newest checkpoint.

    Args:
        path: folder of a run, folder of a checkpoint, or a safetensors file.
        name: of the argument, for messages.

    Raises:
        FileNotFoundError, ValueError: nothing there, no weights yet, a damaged checkpoint.

    >>> find_weights("no/such/run")
    Traceback (most recent call last):
    FileNotFoundError: path must be the folder of a run or a model's file, got 'no/such/run', which is not there
    """
    path = Path(path)
    wanted = f"{name} must be the folder of a run or a model's file, got {str(path)!r}"
    if not path.exists():
        raise FileNotFoundError(f"{wanted}, which is not there")
    if not path.is_dir():
        return path
    if is_checkpoint(path):
        load_checkpoint(path)
    elif not (path / MODEL).exists() and (checkpoints := newest(path)):
        return find_weights(checkpoints[0], name)
    if not (path / MODEL).exists():
        state = "which has no weights yet" if (path / CONFIG).exists() else "which is none"
        raise ValueError(f"{wanted}, {state}")
    return path / MODEL


def load_plain(file: Path) -> Transformer:
    """Return the plain model in a safetensors file; raw weights of a curved one are folded."""
    _, metadata = read_specs(file)
    if MAP_KEY not in metadata:
        return load_model(file)
    with tempfile.TemporaryDirectory() as folder:
        fold_file(file, Path(folder, MODEL))
        return load_model(Path(folder, MODEL))


def start_from(model: Transformer, path: str | Path) -> None:
    """Give a plain `model` the weights at `path`, of a model of its shape; the context may be another.

    Raises:
        FileNotFoundError, ValueError: no weights there, or those of another shape.

    >>> import tempfile
    >>> from symexplin.lab.weights.files import save_model
    >>> first, second = (Transformer(ModelConfig(width=16, depth=1, heads=2)) for _ in range(2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_model(first, Path(folder, MODEL))
    ...     start_from(second, folder)
    >>> bool((first.head.weight == second.head.weight).all())
    True
    """
    source = load_plain(find_weights(path, "weights"))
    wanted, found = _shape(model.config), _shape(source.config)
    odd = [key for key in wanted if found[key] != wanted[key]]
    if odd:
        here, there = (", ".join(f"{key} {shape[key]}" for key in odd) for shape in (wanted, found))
        raise ValueError(f"weights must be those of a model with {here}, got {str(path)!r} of one with {there}")
    model.load_state_dict(source.state_dict())


def _shape(config: ModelConfig) -> dict[str, Any]:
    """Return what decides the shapes of the weights."""
    table = dataclasses.asdict(config)
    return {key: value for key, value in table.items() if key not in ("context", "init")}


def digest_of(path: str | Path) -> str:
    """Return the SHA-256 of the file that the key `weights` of a run means."""
    with find_weights(path, "weights").open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
