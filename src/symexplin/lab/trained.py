"""Trained models with their tokenizers, from a run's folder, a checkpoint or a file."""

from pathlib import Path
from typing import NamedTuple

from symexplin.lab.data.tokenizer import Tokenizer
from symexplin.lab.files import read_json
from symexplin.lab.folders import FACTS, TOKENIZER
from symexplin.lab.model import Transformer
from symexplin.lab.weights.plain import find_weights, load_plain

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
    file = find_weights(path)
    # A checkpoint lies two folders below its run, which has the tokenizer.
    place = next((p for p in (file.parent, file.parent.parent.parent) if (p / TOKENIZER).exists()), None)
    if place is None:
        raise FileNotFoundError(f"no {TOKENIZER} beside {str(file)!r}: copy that of the run or of its data there")
    said = read_json(place / FACTS).get("tokenizer", {}) if (place / FACTS).exists() else {}
    tokenizer = Tokenizer.load(place / TOKENIZER, **said)
    return Trained(load_plain(file), tokenizer, place / TOKENIZER)
