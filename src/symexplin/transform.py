"""The SymExpLin map at given scales: value, error bound and inverse of w_eff = s * mode(w) + delta.

:mod:`symexplin.modes` defines the modes. All functions are pure; only the inverse checks its input.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from symexplin.config import MODES, SELConfig
from symexplin.modes import DEFINITIONS, Scales, Value, not_finite

__all__ = [
    "check_invertible",
    "compute_dtype",
    "forward",
    "invert",
    "tolerance",
    "on_float64_device",
]


# Elements of a block on CPUs: most float64 temporaries fit into a core's cache, and torch splits an operation among
# threads from 32,768 elements up. It does not follow the number of threads: Newton's method stops for a block at a
# time, so an element's last bit may depend on the block.
_BLOCK = 2**16
_BLOCK_OF_ACCELERATORS = 2**24  # bounds the float64 temporaries at some 128 MiB each


def compute_dtype(*values: object) -> torch.dtype:
    """Return float64 if any tensor among `values` is float64, else float32, also for half precision.

    >>> compute_dtype(torch.zeros(2, dtype=torch.bfloat16))
    torch.float32
    """
    has_double = any(isinstance(v, Tensor) and v.dtype == torch.float64 for v in values)
    return torch.float64 if has_double else torch.float32


def on_float64_device(tensor: Tensor) -> Tensor:
    """Return a tensor on the CPU if its device has no float64, else itself.

    >>> on_float64_device(torch.zeros(2, dtype=torch.float32)).device
    device(type='cpu')
    """
    return tensor.cpu() if tensor.device.type == "mps" else tensor


def _is_one(x: Value) -> bool:
    return not isinstance(x, Tensor) and x == 1.0


def forward(mode: str, w: Tensor, scales: Scales) -> Tensor:
    """Return w_eff = s * mode(w) + delta (paper, Eq. 7) in the dtype of `w`.

    >>> w = torch.tensor([-0.1, 0.0, 0.1], dtype=torch.float64)
    >>> forward("mismatch", w, Scales(kappa=7.5, normalizer=7.5))
    tensor([-0.1356,  0.0000,  0.1623], dtype=torch.float64)
    """
    value = DEFINITIONS[mode].value(w, scales)
    if not _is_one(scales.s):
        value = scales.s * value
    return value if scales.delta is None else value + scales.delta


def tolerance(mode: str, w: Tensor, scales: Scales) -> Tensor:
    """Return the error bound of :func:`forward`: (8 + 4 kappa|w|) units of rounding of the sum of absolute terms.

    The terms are |s| times the mode's exponential and linear terms, each for itself, and |delta|.

    >>> w = torch.tensor([0.0, 1.0], dtype=torch.float64)
    >>> tolerance("exp_only", w, Scales()) / 2**-53
    tensor([ 0.0000, 20.6194], dtype=torch.float64)
    """
    unit = torch.finfo(w.dtype).eps / 2.0
    terms = (scales.s * DEFINITIONS[mode].magnitude(w, scales)).abs()
    if scales.delta is not None:
        terms = terms + scales.delta.abs()
    # A relative error of w grows by |w f'/f|, at most 1 + kappa |w|.
    growth = 0.0 if mode == "linear" else (scales.kappa * w).abs()
    return (8.0 + 4.0 * growth) * unit * terms


@torch.no_grad()
def invert(mode: str, t: Tensor, scales: Scales) -> Tensor:
    """Return w with forward(mode, w, scales without delta) = t, solved in float64, in the compute dtype of t.

    Args:
        mode: a name in :data:`symexplin.config.MODES`.
        t: effective weight without delta, any shape.
        scales: numbers or tensors that broadcast against `t`.

    Raises:
        ValueError: `t` is not finite, or the map has no inverse. The message gives the reason and the count.

    >>> scales = Scales(kappa=7.5, normalizer=7.5)
    >>> t = torch.tensor([-1.0, 0.0, 1e-12], dtype=torch.float64)
    >>> forward("congruent", invert("congruent", t, scales), scales)
    tensor([-1.0000e+00,  0.0000e+00,  1.0000e-12], dtype=torch.float64)
    """
    dtype, device = compute_dtype(t), t.device
    t = on_float64_device(t)
    values = [_tensor_of(value, t.device) for value in scales[1:-1]]  # all but the normalizer and delta
    shape = torch.broadcast_shapes(t.shape, *(value.shape for value in values))  # type: ignore[no-untyped-call]
    lists = [t.expand(shape).reshape(-1), *(v if v.dim() == 0 else v.expand(shape).reshape(-1) for v in values)]
    size = _BLOCK if t.device.type == "cpu" else _BLOCK_OF_ACCELERATORS
    out = torch.empty(shape.numel(), dtype=dtype, device=t.device)
    refused: Counter[str] = Counter()
    for start in range(0, len(out), size):
        block = slice(start, start + size)
        target, *parts = ((x[block] if x.dim() else x).double() for x in lists)
        raw, need, count = _solve(mode, target, Scales(scales.normalizer, *parts))
        out[block] = raw
        refused[need] += count
    if bad := +refused:
        need, count = next(iter(bad.items()))
        raise ValueError(f"cannot invert mode={mode!r} for {count} of {len(out)} elements: {need}")
    return out.view(shape).to(device)


def check_invertible(config: SELConfig) -> SELConfig:
    """Return a resolved configuration, to train with.

    Raises:
        ValueError: the map has no inverse with the initial values of its scales.
    """
    for bad, need in _obstacles(config.mode, Scales.of(config)):
        if bad:
            used = [role for role in config.roles if role != "delta"]
            given = ", ".join(f"{role}.start {getattr(config, role).first:g}" for role in used)
            raise ValueError(f"the map of mode {config.mode!r} {need}; it has beta {config.beta:g}, {given}")
    return config


def _tensor_of(value: Value | None, device: torch.device) -> Tensor:
    dtype = value.dtype if isinstance(value, Tensor) else torch.float64  # a number at its exact value
    return torch.as_tensor(value, dtype=dtype, device=device)


def _solve(mode: str, t: Tensor, scales: Scales) -> tuple[Tensor, str, int]:
    """Return the raw weights of one block, the condition that some elements violate, and the number of those."""
    for bad, need in [(not_finite(t), "the weights must be finite"), *_obstacles(mode, scales)]:
        if count := _count(bad, t):
            return t, need, count
    raw = DEFINITIONS[mode].inverse(t / scales.s, scales)
    return raw, "out of reach of the map", _count(not_finite(raw), t)


def _count(bad: Tensor | bool, t: Tensor) -> int:
    """Return the number of elements of `t` for which a condition is true; any() of bytes is fast, of booleans slow."""
    return int(bad.expand_as(t).sum()) if isinstance(bad, Tensor) and bool(bad.view(torch.uint8).any()) else 0


def _obstacles(mode: str, scales: Scales) -> Iterator[tuple[Any, str]]:
    """Yield where numbers or tensors as scales rule an inverse out, whatever the weight, each with what it needs."""
    for role in (*MODES[mode], "s"):
        yield not_finite(getattr(scales, role)), f"{role} must be finite"
    yield scales.s == 0.0, "needs s != 0"
    if "kappa" in MODES[mode]:
        yield scales.kappa <= 0.0, "needs kappa > 0"
    yield from DEFINITIONS[mode].obstacles(scales)
