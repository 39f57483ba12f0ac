"""Moments in 8 bits: a code per entry and a scale per block, block-wise dynamic quantisation (arXiv 2110.02861).

torchao's functions map numbers to codes and back. A block has up to 256 entries of one row, so that shards along the
first dimension have whole blocks. Codes and scales are ordinary tensors of the optimizer's state.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["BITS", "decode", "encode", "is_signed", "is_small", "scale_key", "scale_shape"]

BITS = (32, 8)
_BLOCK = 256  # of the paper's and torchao's optimizers
_LEAST = 2**14  # smaller tensors stay in full precision: they save nothing


def is_small(bits: int, shape: Sequence[int]) -> bool:
    """Whether a moment of a weight of this shape has 8 bits."""
    return bits == 8 and len(shape) > 1 and math.prod(shape) > _LEAST


def scale_key(moment: str) -> str:
    """Return the key of a moment's scales in the state."""
    return f"{moment}_scale"


def is_signed(moment: str) -> bool:
    """Whether a moment may be negative: all but averages of squares."""
    return not moment.endswith("_sq")


def scale_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return the shape of the scales of a tensor: rows, blocks of a row.

    >>> scale_shape((3, 16, 3, 3)), scale_shape((3, 1000))
    ((3, 1), (3, 4))
    """
    return shape[0], -(-math.prod(shape[1:]) // _BLOCK)


def encode(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Return the codes of `values`, uint8 of their shape, and the scales of their blocks, float32.

    The code is that of the nearest value. A positive average of squares never becomes 0: the next update would be its
    first moment divided by eps.

    >>> codes, scale = encode(torch.linspace(-1.0, 1.0, 300).reshape(1, 300), signed=True)
    >>> bool((decode(codes, scale, signed=True) - torch.linspace(-1.0, 1.0, 300)).abs().max() < 0.02)
    True
    """
    quantisation = _torchao()
    (rows, blocks), size, width = scale_shape(values.shape), _size(values.shape), math.prod(values.shape[1:])
    padded = torch.nn.functional.pad(values.reshape(rows, width).float(), (0, blocks * size - width))
    scaled, scale = quantisation.scale_tensor(padded, size)
    codes: Tensor = quantisation.quantize_8bit_with_qmap(scaled, _map(signed, values.device))
    if not signed:
        codes = codes.maximum((padded > 0).to(codes.dtype))  # code 1 is the least above 0
    return codes[:, :width].reshape(values.shape), scale.view(rows, blocks)


def decode(codes: Tensor, scale: Tensor, signed: bool) -> Tensor:
    """Return the float32 values of codes and scales."""
    size = _size(codes.shape)
    each = scale.repeat_interleave(size, 1)[:, : math.prod(codes.shape[1:])]
    values: Tensor = _map(signed, codes.device)[codes.int()] * each.reshape(codes.shape)
    return values


def _size(shape: Sequence[int]) -> int:
    """Return the number of entries per block: rows are divided evenly."""
    _, blocks = scale_shape(shape)
    return -(-math.prod(shape[1:]) // max(1, blocks))


@functools.cache
def _map(signed: bool, device: torch.device) -> Tensor:
    """Return the value of every code."""
    return torch.tensor(_torchao().create_dynamic_map(signed), device=device)


def _torchao() -> Any:
    try:
        from torchao.optim import quant_utils  # type: ignore[import-untyped]
    except ImportError:
        raise ModuleNotFoundError("moment_bits=8 needs torchao: pip install 'symexplin[small]'") from None
    return quant_utils
