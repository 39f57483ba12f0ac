"""The matrices of any file of weights that would be curved, and the range of their fresh weights."""

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from symexplin.lab.weights import is_raw, iter_tensors

__all__ = ["curved_matrices", "xavier_bound"]

_FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # narrower numbers need scales
# Last part of the name of an embedding (GPT-2's, Llama's original, T5's, and all that end in "embedding") or a head.
_PLAIN = re.compile(
    r"wte|wpe|shared|relative_attention_bias|embed(_.*)?|.*(_embed|emb|embd|embeddings?)"
    r"|head|.*_head|classifier|score|output"
)


def xavier_bound(shape: Sequence[int]) -> float:
    """Return the bound of Xavier's uniform distribution for a matrix."""
    return math.sqrt(6.0 / sum(shape))


def curved_matrices(path: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Yield every matrix of a file of plain weights that would be curved with its name, one at a time.

    A file has no modules: these are the floating 2-D tensors named `weight`, but for those of modules that are named
    as embeddings and output heads are.

    Raises:
        ValueError: raw weights, or no matrix to curve.
    """
    found = False
    for name, tensor in iter_tensors(path):
        if is_raw(name):
            raise ValueError(f"{str(path)!r} holds raw weights, not plain ones: take the final weights of its run")
        *_, module, local = ("", "", *name.split("."))
        is_matrix = tensor.dim() == 2 and tensor.numel() > 0 and tensor.dtype in _FLOATING
        if is_matrix and local == "weight" and not _PLAIN.fullmatch(module):
            found = True
            yield name, tensor
    if not found:
        kinds = ", ".join(str(kind).removeprefix("torch.") for kind in _FLOATING)
        raise ValueError(f"{str(path)!r} must hold 2-D weights to curve, in one of {kinds}, got none")
