"""Trained models with their tokenizers, from a run's folder, a checkpoint or a file."""

import tempfile
from pathlib import Path
from typing import NamedTuple

from symexplin.lab.checkpoint import is_checkpoint, load_checkpoint, newest
from symexplin.lab.files import read_json
from symexplin.lab.model import Transformer
from symexplin.lab.run import CONFIG, FACTS, MODEL, TOKENIZER
from symexplin.lab.text.tokenizer import Tokenizer
from symexplin.lab.weights.files import MAP_KEY, load_model, read_specs
from symexplin.lab.weights.folding import fold_file

__all__ = ["Trained", "load_trained"]


class Trained(NamedTuple):
    """A plain model with its tokenizer, and the file that the tokenizer is in."""

    model: Transformer
    tokenizer: Tokenizer
    tokenizer_file: Path


def load_trained(path: str | Path) -> Trained:
    """Return the plain model and the tokenizer of a run: its final weights, else those of its newest checkpoint.

    Args:
        path: folder of a run, folder of a checkpoint, or a model.safetensors with tokenizer.json beside it.

    Raises:
        FileNotFoundError, ValueError: nothing there, no weights yet, a damaged checkpoint, no tokenizer.
    """
    file = _weights(Path(path))
    # A checkpoint lies two folders below its run, which has the tokenizer.
    place = next((p for p in (file.parent, file.parent.parent.parent) if (p / TOKENIZER).exists()), None)
    if place is None:
        raise FileNotFoundError(f"no {TOKENIZER} beside {str(file)!r}: copy that of the run or of its data there")
    said = read_json(place / FACTS).get("tokenizer", {}) if (place / FACTS).exists() else {}
    tokenizer = Tokenizer.load(place / TOKENIZER, **said)
    _, metadata = read_specs(file)
    if MAP_KEY not in metadata:
        return Trained(load_model(file), tokenizer, place / TOKENIZER)
    with tempfile.TemporaryDirectory() as folder:
        fold_file(file, Path(folder, MODEL))
        return Trained(load_model(Path(folder, MODEL)), tokenizer, place / TOKENIZER)


def _weights(path: Path) -> Path:
    if not path.exists():
        raise FileNotFoundError(
            f"path must be the folder of a run or a model's file, got {str(path)!r}, which is not there"
        )
    if not path.is_dir():
        return path
    if is_checkpoint(path):
        load_checkpoint(path)
    elif not (path / MODEL).exists() and (checkpoints := newest(path)):
        return _weights(checkpoints[0])
    if not (path / MODEL).exists():
        state = "which has no weights yet" if (path / CONFIG).exists() else "which is none"
        raise ValueError(f"path must be the folder of a run or a model's file, got {str(path)!r}, {state}")
    return path / MODEL
