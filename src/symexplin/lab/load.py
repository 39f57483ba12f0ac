"""Trained models: from the folder of a run, a checkpoint, or a safetensors file."""

import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from symexplin.config import SELConfig
from symexplin.lab.checkpoint import is_checkpoint, load_checkpoint, newest_intact
from symexplin.lab.data.tokenizer import Tokenizer
from symexplin.lab.files import file_digest, read_json
from symexplin.lab.folders import FACTS, RESULT, TOKENIZER
from symexplin.lab.model import Transformer
from symexplin.lab.weights import MODEL, load_model, read_map
from symexplin.validation import naming

__all__ = ["Trained", "digest_of", "find_weights", "load_trained", "start_from"]

Echo = Callable[[str], None]


class Trained(NamedTuple):
    """A plain model, its tokenizer, and the map that it was trained with; None for ordinary weights."""

    model: Transformer
    tokenizer: Tokenizer
    map: SELConfig | None


def load_trained(path: str | Path, echo: Echo = warnings.warn) -> Trained:
    """Return the model of a run, a checkpoint, or a model.safetensors with tokenizer.json beside it.

    `echo` receives a warning for each damaged checkpoint that is passed over.
    """
    file = find_weights(path, echo=echo)
    # A checkpoint is two folders below its run, which has the tokenizer.
    place = next((p for p in (file.parent, file.parent.parent.parent) if (p / TOKENIZER).exists()), None)
    if place is None:
        raise FileNotFoundError(f"no {TOKENIZER} beside {str(file)!r}: copy that of the run or of its data there")
    options = read_json(place / FACTS).get("tokenizer", {}) if (place / FACTS).exists() else {}
    return Trained(load_model(file), Tokenizer.load(place / TOKENIZER, **options), read_map(file))


def find_weights(path: str | Path, name: str = "path", echo: Echo = warnings.warn) -> Path:
    """Return the file with the final weights of a run, else with those of its newest intact checkpoint.

    `path` may also be a checkpoint or a safetensors file. Messages call it `name`.
    """
    path = Path(path)
    if not path.exists():
        wanted = f"{name} must be the folder of a run or a model's file"
        raise FileNotFoundError(f"{wanted}, got {str(path)!r}, which does not exist")
    if not path.is_dir():
        return path
    if is_checkpoint(path):
        load_checkpoint(path)
    if (path / MODEL).exists() and not _is_damaged(path, echo):
        return path / MODEL
    found = newest_intact(path, echo)
    if found is None:
        raise ValueError(f"{name} must be a run with weights or a model's file, got {str(path)!r} without weights")
    return found[0] / MODEL


def _is_damaged(run: Path, echo: Echo) -> bool:
    """Whether the final weights of a run are not those that it has written."""
    digest = read_json(run / RESULT).get("sha256") if (run / RESULT).exists() else None
    damaged = digest is not None and digest != file_digest(run / MODEL)
    if damaged:
        echo(f"warning: {run / MODEL} is damaged, it does not match its digest: taking the newest checkpoint instead")
    return damaged


def start_from(model: Transformer, path: str | Path) -> None:
    """Load the weights at `path` into a plain model of the same shape; the context may differ."""
    with naming("weights"):
        source = load_model(find_weights(path, "weights"))
    there, here = (dataclasses.asdict(each.config) for each in (source, model))
    for key in here:
        if there[key] != here[key] and key not in ("context", "init", "qk_gain", "embedding_std"):
            raise ValueError(f"weights must be of a model with {key} {here[key]}, got {str(path)!r} with {there[key]}")
    model.load_state_dict(source.state_dict())


def digest_of(path: str | Path) -> str:
    """Return the SHA-256 of the weights that a run starts from; `path` is that of :func:`start_from`."""
    return file_digest(find_weights(path, "weights"))
