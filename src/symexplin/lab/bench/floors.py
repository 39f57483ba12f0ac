"""What a step must move and compute at the least, from counts of parameters alone."""

from typing import NamedTuple

import torch

__all__ = ["Bytes", "floor", "map_floor", "matmul_flops", "moved", "peak_flops"]

# Data sheets, dense, fp32 accumulation: device -> FLOP/s by dtype. nvidia.com, H100 and H200 (SXM), A100 (SXM).
_SHEETS = {
    "NVIDIA H200": {"bf16": 989e12, "fp32": 67e12},
    "NVIDIA H100 80GB HBM3": {"bf16": 989e12, "fp32": 67e12},
    "NVIDIA A100-SXM4": {"bf16": 312e12, "fp32": 19.5e12},
}
_SIDES = {"cpu": 1024, "cuda": 8192}  # of the matrices whose product is timed elsewhere


class Bytes(NamedTuple):
    """Bytes a parameter: of curved ones, and of the plain ones, such as embeddings and norms."""

    curved: int
    plain: int

    def total(self, curved: int, plain: int) -> int:
        """Return the bytes for so many parameters.

        >>> Bytes(34, 30).total(10, 1)
        370
        """
        return self.curved * curved + self.plain * plain


# Reads and writes of one parameter: gradient, weight and two moments in fp32 (read 16, written 12).
_UPDATE = 28
_NORM, _CLIP = 4, 8
_STOCK = _NORM + _CLIP + _UPDATE  # torch's clip_grad_norm_ and fused AdamW on fp32 gradients
_UPCAST, _COPY_BACK = 6, 6


def floor(part: str, variant: str, dtype: str, microbatches: int = 1) -> Bytes:
    """Return the fewest bytes that a variant can move for its weights; activations are not counted.

    Part "optimizer" is the optimizer step alone; "step" adds what the microbatches cost: casts of autocast, the map
    in the module, and from the second microbatch on the accumulation. Scale vectors, under 1 %, are left out.

    >>> floor("step", "adamw_autocast", "bf16").curved, floor("step", "sel", "bf16").curved
    (52, 34)
    """
    own = 2 if dtype == "bf16" and variant in ("adamw_master", "sel") else 4  # bytes of a gradient
    if variant == "sel":
        # Pull: raw, gradient. Update: raw, moments, gradient again; write raw, moments, effective weight.
        curved, plain = (4 + own) + (12 + own) + (12 + own), _norm_and_update(own)
    elif variant == "adamw_master":
        curved = plain = _norm_and_update(own)
    else:
        curved = plain = _STOCK
    if part == "optimizer":
        return Bytes(curved, plain)
    again = 3 * own * (microbatches - 1)  # a gradient accumulates: two reads, a write
    return Bytes(curved + again + microbatches * _passes(variant, dtype), plain + again)


def _norm_and_update(own: int) -> int:
    """Clipping within the update: the gradient for the norm; gradient, master, moments; a bf16 weight besides."""
    return own + own + 24 + (2 if own == 2 else 0)


def _passes(variant: str, dtype: str) -> int:
    """Return the bytes that one forward and backward pass moves for a curved weight beside using it."""
    if variant == "module":
        low = 2 if dtype == "bf16" else 4
        return (4 + low) + (low + 4 + 4)  # raw to effective; gradient and raw to the raw gradient
    return 12 if variant == "adamw_autocast" else 0  # 4 to 2 bytes, and the gradient back


def moved(variant: str, dtype: str) -> Bytes:
    """Return the bytes that the optimizer step moves as it is done: of SEL and the stock recipes each pass.

    The stock recipe with masters upcasts (6), takes the norm (4), clips (8), updates (28) and copies back (6).

    >>> moved("adamw_master", "bf16").curved, moved("sel", "bf16").curved, moved("adamw", "fp32").curved
    (52, 34, 40)
    """
    if variant == "adamw_master":
        return Bytes(*2 * (_UPCAST + _STOCK + _COPY_BACK,))
    least = floor("optimizer", variant, dtype)
    if variant == "sel" and dtype == "fp32":  # both passes read the weight instead of computing an exponential
        return least._replace(curved=least.curved + 8)
    return least


def map_floor(variant: str, dtype: str) -> int:
    """Return the bytes a weight of the map alone, or of the AdamW step it is held against.

    >>> [map_floor(variant, "bf16") for variant in ("forward", "backward", "adamw")]
    [6, 10, 28]
    """
    low = 2 if dtype == "bf16" else 4
    return {"adamw": _UPDATE, "forward": 4 + low, "backward": 4 + low + 4}[variant]


def matmul_flops(parameters: int, depth: int, width: int, context: int) -> float:
    """Return the floating-point operations a token of a training step: 6 N + 12 L d T.

    `parameters` are those that are multiplied: a head counts, an embedding that is looked up does not.

    >>> matmul_flops(10, depth=2, width=4, context=8)
    828.0
    """
    return 6.0 * parameters + 12.0 * depth * width * context


def peak_flops(device: torch.device, dtype: str) -> tuple[float, str]:
    """Return the FLOP/s of a device, and whether they are of its "data sheet" or of a "measured matmul"."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for known, rates in _SHEETS.items():
            if name.startswith(known):
                return rates[dtype], "data sheet"
    return _measured(device, dtype), "measured matmul"


def _measured(device: torch.device, dtype: str) -> float:
    """Return the FLOP/s of the best of many products of square matrices."""
    from symexplin.lab.bench.config import DTYPES
    from symexplin.lab.bench.measure import measure
    from symexplin.lab.bench.work import Work

    side = _SIDES.get(device.type, 1024)
    matrix = torch.rand(side, side, dtype=DTYPES[dtype], device=device)
    rounds = list(measure({"matmul": lambda: Work(lambda: matrix @ matrix)}, device, repeats=20))
    return 2e3 * side**3 / min(found["matmul"].ms for found in rounds)
