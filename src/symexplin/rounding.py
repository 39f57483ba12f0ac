"""Stochastic rounding of float32 to bfloat16 with noise from a counter hash.

Adding uniform noise in [0, 2^16) to the bits of a float32 and cutting the low 16 rounds away from zero with the
probability of the part cut off, so the expected bfloat16 is the value. The noise of a weight is a hash of (seed,
parameter, step) and its place in the whole parameter: no generator and no state, and the same bits on one process, on
replicas and on any shards.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["key_of", "noise_of", "round_", "rounded", "span"]

_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9  # 2^32 over the golden ratio
_BLOCK = 2**20  # elements at a time, so that the 64-bit temporaries stay small


def _mix(x: int) -> int:
    """Return a bijective mix of 32 bits (from hash-prospector's list of two-multiplication mixes of low bias)."""
    x ^= x >> 16
    x = x * 0x21F0AAAD & _MASK
    x ^= x >> 15
    x = x * 0x735A2D97 & _MASK
    return x ^ x >> 15


def key_of(seed: int, position: int, step: int) -> int:
    """Return the 32-bit key of one parameter's step."""
    key = _GOLDEN
    for part in (seed, position, step):
        key = _mix((key + _GOLDEN & _MASK) ^ _mix(part & _MASK) ^ part >> 32)
    return key


def noise_of(k: Tensor, key: int, offset: int, cols: int, stride: int) -> Tensor:
    """Return int32 noise in [0, 65536) for elements k of a tensor with the :func:`span` (offset, cols, stride).

    The kernels compute the same.

    >>> noise_of(torch.arange(3), key_of(0, 0, 1), *span((3,), (3,), (0,)))
    tensor([40419,  5019, 17577], dtype=torch.int32)
    """
    place = offset + k // cols * stride + k % cols
    x = (place & _MASK) ^ key ^ ((place >> 32) * _GOLDEN & _MASK)
    x = x ^ x >> 16
    x = x * 0x21F0AAAD & _MASK
    x = x ^ x >> 15
    x = x * 0x735A2D97 & _MASK
    x = x ^ x >> 15
    return (x & 0xFFFF).to(torch.int32)


def rounded(values: Tensor, noise: Tensor) -> Tensor:
    """Return float32 values rounded to bfloat16 with this noise; NaN, infinities and bfloat16's own values stay."""
    truncated = (values.view(torch.int32) + noise >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where(values.isfinite(), truncated, values.to(torch.bfloat16))


def round_(out: Tensor, values: Tensor, key: int, offset: int, cols: int, stride: int) -> None:
    """Round float32 `values` into bfloat16 `out` with the noise of the key and the :func:`span`."""
    flat, target = values.reshape(-1), out.reshape(-1)
    for first in range(0, flat.numel(), _BLOCK):
        part = flat[first : first + _BLOCK]
        k = torch.arange(first, first + part.numel(), dtype=torch.int64, device=part.device)
        target[first : first + _BLOCK] = rounded(part, noise_of(k, key, offset, cols, stride))
    if not out.is_contiguous():
        out.copy_(target.view(out.shape))


def span(local: Sequence[int], whole: Sequence[int], starts: Sequence[int]) -> tuple[int, int, int]:
    """Return (offset, cols, stride) of a shard that begins at `starts` in the whole tensor.

    Element k of the flat shard is element ``offset + k // cols * stride + k % cols`` of the flat whole.

    Raises:
        ValueError: the shard is no series of equal runs at one stride, as when three dimensions are split.

    >>> span((4, 2), (4, 6), (0, 2))
    (2, 2, 6)
    """
    split = [d for d, (part, size) in enumerate(zip(local, whole, strict=True)) if part != size]
    last, outer = split[-1] if split else 0, split[-2] if len(split) > 1 else 0
    if any(size != 1 for size in local[:outer]):
        raise ValueError(
            f"a shard must be equal runs at one stride, as when one dimension is split, got {local} of {whole}"
        )
    offset = sum(start * math.prod(whole[d + 1 :]) for d, start in enumerate(starts))
    return offset, max(1, math.prod(local[last:])), math.prod(whole[last:])
