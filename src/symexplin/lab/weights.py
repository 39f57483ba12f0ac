"""Models as files: the plain weights in safetensors, the shape beside them in the header."""

import json
from dataclasses import asdict
from pathlib import Path

import safetensors
import safetensors.torch

from symexplin.lab.files import replace_file
from symexplin.lab.model import ModelConfig, Transformer

__all__ = ["load_model", "save_model"]

_TIED = "head.weight"


def save_model(model: Transformer, path: str | Path) -> None:
    """Write the weights of `model`, with its :class:`ModelConfig` as JSON under "config" in the header.

    >>> import tempfile, torch
    >>> model = Transformer(ModelConfig(width=16, depth=1, heads=2, context=8))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_model(model, Path(folder, "model.safetensors"))
    ...     copy = load_model(Path(folder, "model.safetensors"))
    >>> torch.equal(copy.head.weight, model.head.weight)
    True
    """
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    if model.config.tie_head:
        del state[_TIED]
    replace_file(path, safetensors.torch.save(state, {"config": json.dumps(asdict(model.config))}))


def load_model(path: str | Path) -> Transformer:
    """Return a plain model with the weights that :func:`save_model` wrote, on the CPU.

    Raises:
        ValueError: a file that another program wrote.
    """
    with safetensors.safe_open(path, framework="pt") as file:
        header = file.metadata() or {}
        if "config" not in header:
            raise ValueError(f"path must name a model of save_model, got {str(path)!r}, without a config")
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no iterator)
    model = Transformer(ModelConfig(**json.loads(header["config"])))
    if model.config.tie_head:
        state[_TIED] = state["embedding.weight"]
    model.to(state["embedding.weight"].dtype).load_state_dict(state)
    return model
