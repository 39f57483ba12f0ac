"""Launch the Triton kernels over lists of matrices, without waiting for the device."""

import functools
import importlib.util
import logging
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from symexplin.kernels.factors import Factors, Sums, Terms
from symexplin.kernels.interface import Matrices, Rates, is_memory
from symexplin.transform import Form, Scales, forward

__all__ = ["OPTIONS", "Shape", "Tiles", "TritonKernels", "launch", "load"]

_log = logging.getLogger("symexplin")
# 16 warps fit a multiprocessor; no contraction of operations.
OPTIONS = {"maxnreg": 128, "enable_fp_fusion": False}
_SCRATCH = 2**24  # partial sums of one launch, in numbers: 64 MiB
# The tolerance relative to the largest entry. Sums of a few hundred entries have errors of about 1e-6.
_AGREEMENT = 2e-5
_WRONG = (
    "symexplin does not use its Triton kernels on {device}: {reason}. The readable formulas run there instead, and an "
    "optimizer step moves about ten times as many bytes. Set SYMEXPLIN_KERNELS=readable to choose the formulas"
)


class Shape(NamedTuple):
    """A program's tile of `tile` rows and `columns` columns, computed `rows` at a time, and its number of warps."""

    tile: int
    rows: int
    columns: int
    warps: int


class Tiles(NamedTuple):
    """The tiles. They are fixed, because they determine the order of sums. `flat` is for matrices of one row."""

    pull: Shape = Shape(128, 4, 256, warps=4)  # one row per warp keeps its sum in the warp
    update: Shape = Shape(64, 4, 256, warps=8)
    flat: Shape = Shape(1, 1, 1024, warps=8)


class Batch(NamedTuple):
    """Matrices of one shape for one launch; `table` has a line per matrix (symexplin.kernels.triton_kernels)."""

    table: Tensor
    d0: int
    d1: int
    tiles0: int
    tiles1: int
    constants: dict[str, Any]


def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Launch a kernel with the given number of programs."""
    with torch.cuda.device(arguments[0].get_device()):  # -1, for a CPU, has no effect
        kernel[(programs,)](*arguments, **OPTIONS, **constants)


class TritonKernels:
    """Triton kernels for contiguous float32 tensors; weights and gradients may be bfloat16 or float16.

    At the first use of a kind of map on a device they are compared with the readable formulas. If they disagree, they
    are not used on that device.
    """

    def __init__(self, tiles: Tiles | None = None) -> None:
        import triton

        from symexplin.kernels import triton_kernels

        self.name = f"Triton {triton.__version__}"
        self.tiles = tiles or Tiles()
        self._kernels = triton_kernels
        self._met: set[tuple[object, ...]] = set()
        self._wrong: set[torch.device] = set()

    def covers(self, terms: Terms, raw: Tensor, weight: Tensor) -> bool:
        """Whether the kernels support tensors of these types, dtypes and memory formats and agree with the formulas."""
        return (
            (is_memory(raw) and raw.dtype == torch.float32)
            and (is_memory(weight) and weight.dtype in self._kernels.DTYPES)
            and (raw.device == weight.device and raw.is_contiguous() and weight.is_contiguous())
            and self._is_right(terms, weight.dtype, raw.device)
        )

    def _is_right(self, terms: Terms, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether the kernels agree with the formulas for this kind of map; compared once, with one warning if not."""
        kind = (device, dtype, terms.magnitude, terms.normalize, terms.flat)
        if device not in self._wrong and kind not in self._met:
            self._met.add(kind)
            reason = _disagreement(self, terms, dtype, device)
            if reason is not None:
                self._wrong.add(device)
                warnings.warn(_WRONG.format(device=device, reason=reason), stacklevel=4)
        return device not in self._wrong

    def write(self, terms: Terms, matrices: Matrices, factors: Factors) -> None:
        """Write the weights of the raw weights."""
        self._update(terms, matrices, factors, factors, (), [0.0] * 8, None, moves=True, WRITE=True)

    def pull(
        self,
        terms: Terms,
        matrices: Matrices,
        factors: Factors,
        grads: Sequence[Tensor],
        out: Sequence[Tensor] | None = None,
    ) -> Sums:
        """Return the sums of the pullback of `grads`; write the raw gradients to `out`, if given."""
        device, lengths = factors.rows.device, [axis.shape[1] for axis in factors]
        zeros = functools.partial(torch.zeros, dtype=torch.float64, device=device)
        sums = Sums(zeros(3, lengths[0]), zeros(3, lengths[1]), zeros(len(grads)))
        for table, d0, d1, tiles0, tiles1, constants in self._batches(matrices, self.tiles.pull, device, grads, out):
            shapes = (len(table), tiles1, d0, 4), (len(table), tiles0, 3, d1)
            by_row, by_column = (torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes)
            launch(
                self._kernels.pull, len(table) * tiles0 * tiles1,
                table, *factors, by_row, by_column, d0, d1, *lengths, tiles0, tiles1,
                MAGNITUDE=terms.magnitude, NORMALIZE=terms.normalize, OUT=bool(out), **constants,
            )  # fmt: skip
            row_at, column_at, index = table.mT[6:]
            *across, squares = by_row.sum(1, dtype=torch.float64).unbind(2)
            down = by_column.sum(1, dtype=torch.float64).unbind(1)
            for total, at, found in ((sums.rows, row_at, across), (sums.columns, column_at, down)):
                places = (at[:, None] + torch.arange(found[0].shape[1], device=device)).flatten()
                total.index_copy_(1, places, torch.stack([one.flatten() for one in found]))
            sums.squares.index_copy_(0, index, squares.sum(1))
        return sums

    def update(
        self,
        terms: Terms,
        matrices: Matrices,
        old: Factors,
        new: Factors,
        grads: Sequence[Tensor],
        rates: Rates,
        clip: Tensor | None,
    ) -> None:
        """Apply AdamW to the raw weights and write the weights."""
        lr, decay, beta1, beta2, eps, (correction1, correction2) = rates
        shrink, root = 1.0 - lr * decay, 1.0 / math.sqrt(correction2)
        rule = [shrink, lr / correction1, 1.0 - beta1, beta1, 1.0 - beta2, beta2, root, eps]
        clip = None if clip is None else clip.to(old.rows.device, torch.float32)
        self._update(terms, matrices, old, new, grads, rule, clip, moves=lr != 0.0, WRITE=False)

    def invert(self, *_: object) -> bool:
        """Return False: the readable formulas invert."""
        return False

    def _update(
        self,
        terms: Terms,
        matrices: Matrices,
        old: Factors,
        new: Factors,
        grads: Sequence[Tensor],
        rule: Sequence[float],
        clip: Tensor | None,
        moves: bool,
        **kind: bool,
    ) -> None:
        device, lengths = old.rows.device, [axis.shape[1] for axis in old]
        for table, d0, d1, tiles0, tiles1, constants in self._batches(matrices, self.tiles.update, device, grads):
            launch(
                self._kernels.update, len(table) * tiles0 * tiles1,
                table, *old, *new, clip, *rule, d0, d1, *lengths, tiles0, tiles1, d0 if moves else 0,
                MAGNITUDE=terms.magnitude, **kind, **constants,
            )  # fmt: skip

    def _batches(
        self,
        matrices: Matrices,
        tile: Shape,
        device: torch.device,
        grads: Sequence[Tensor],
        out: Sequence[Tensor] | None = None,
    ) -> Iterator[Batch]:
        """Yield the matrices by shape and alignment, with one table of addresses for all of them."""
        tensors = (matrices.raw, matrices.weight, matrices.exp_avg, matrices.exp_avg_sq, grads, out or ())
        addresses = [[one.data_ptr() for one in kind] or [0] * len(matrices.raw) for kind in tensors]
        groups: dict[tuple[int, int, bool], list[tuple[int, ...]]] = {}
        for k, ((d0, d1), at, offsets) in enumerate(
            zip(matrices.shapes, zip(*addresses, strict=True), matrices.offsets, strict=True)
        ):
            if d0 and d1:
                aligned = d1 % 16 == 0 and all(address % 16 == 0 for address in at)
                groups.setdefault((d0, d1, aligned), []).append((*at, *offsets, k))
        lines = [line for group in groups.values() for line in group]
        # A copy from pageable memory would block the host. Torch reuses pinned memory only after the copy.
        table = torch.tensor(lines, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)
        begin = 0
        for (d0, d1, aligned), group in groups.items():
            shape = self.tiles.flat if d0 == 1 else tile
            tiles0, tiles1 = -(-d0 // shape.tile), -(-d1 // shape.columns)
            constants = {"TILE": shape.tile, "ROWS": shape.rows, "COLUMNS": shape.columns, "num_warps": shape.warps}
            constants |= {"DTYPE": self._kernels.DTYPES[matrices.weight[0].dtype], "ALIGNED": aligned}
            most = max(1, _SCRATCH // (4 * tiles1 * d0 + 3 * tiles0 * d1))
            for part in torch.split(table[begin : begin + len(group)], most):
                yield Batch(part, d0, d1, tiles0, tiles1, constants)
            begin += len(group)


def _disagreement(kernels: TritonKernels, terms: Terms, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why the kernels cannot be used, or None, by a comparison on two matrices of two tiles in each direction.

    The second matrix has small raw weights, for which expm1 is more accurate than exp - 1.
    """
    pull, update, flat = kernels.tiles
    d0 = 1 if terms.flat else max(pull.tile, update.tile) + 5
    d1 = (flat.columns if terms.flat else max(pull.columns, update.columns)) + 16

    def wave(*shape: int, pace: float) -> Tensor:
        return torch.sin(pace * torch.arange(1, 1 + math.prod(shape), dtype=torch.float64, device=device)).view(shape)

    def axis(length: int, pace: float) -> Tensor:
        of = 1.5 + 0.1 * wave(3, 2 * length, pace=pace)
        return torch.cat([of, of[:1] * of[1:2]]).float()

    old, new = (Factors(axis(d0, pace), axis(d1, pace + 0.1)) for pace in (0.7, 0.9))
    raw, exp_avg, grad = (wave(2, d0, d1, pace=pace).float() for pace in (1.1, 1.2, 1.3))
    raw[1] *= 1e-4
    exp_avg_sq, grad, clip = 0.1 + exp_avg.square(), (1.0 + grad).to(dtype), torch.tensor(0.5, device=device)
    rates = Rates(0.01, 0.1, 0.9, 0.99, 1e-8, (0.19, 0.0199))
    wanted = _reference(terms, (raw, exp_avg, exp_avg_sq, grad), (old, new), rates, clip)
    weight, gradient = torch.zeros_like(raw, dtype=dtype), torch.zeros_like(raw)
    matrices, grads = Matrices(*(list(tensor) for tensor in (raw, weight, exp_avg, exp_avg_sq))), list(grad)
    try:
        kernels.write(terms, matrices, old)
        found = {"write": [weight.clone()]}
        found["pull"] = [*kernels.pull(terms, matrices, old, grads)[:2]]
        found["pull"] += [kernels.pull(terms, matrices, old, grads, list(gradient)).squares, gradient]
        kernels.update(terms, matrices, old, new, grads, rates, clip)
        found["update"] = [raw, exp_avg, exp_avg_sq, weight]
        for name, tensors in found.items():
            for one, other in zip(tensors, wanted[name], strict=True):
                share = max(_AGREEMENT, torch.finfo(one.dtype).eps)
                if not bool((one - other).abs().max() <= share * other.abs().max()):
                    return f"the kernel `{name}` gives wrong results"
    except Exception as error:  # any failure to compile or launch a kernel
        return f"they fail with {type(error).__name__}: {error}"
    return None


def _reference(
    terms: Terms, tensors: Sequence[Tensor], factors: Sequence[Factors], rates: Rates, clip: Tensor
) -> dict[str, list[Tensor]]:
    """Return the exact results of each kernel, by torch's autograd through the readable formula in float64."""
    raw, exp_avg, exp_avg_sq, grad = (tensor.double() for tensor in tensors)
    d0, d1 = raw.shape[1:]

    def weight(w: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Map w with kappa, c (normalized: c kappa) and lambda of rows (3, 2, d0, 1) and columns (3, 2, 1, d1)."""
        kappa, c, lam = rows * columns
        scales = Scales(e=c / kappa if terms.normalize else c, l=lam, kappa=kappa)
        return forward(Form("mismatch" if terms.magnitude else "congruent", 1.0), w, scales)

    def of(factors: Factors) -> list[Tensor]:
        rows, columns = (axis.double().view(4, 2, -1) for axis in factors)
        chosen = [0, 3 if terms.normalize else 1, 2]
        return [rows[chosen][..., None], columns[chosen][..., None, :]]

    with torch.enable_grad():
        leaves = [tensor.requires_grad_() for tensor in (raw, *of(factors[0]))]
        before = weight(*leaves)
        by_raw, by_rows, by_columns = torch.autograd.grad(before, leaves, grad)
    sums = []
    for axis, by, length in ((factors[0].rows, by_rows, d0), (factors[0].columns, by_columns, d1)):
        kappa, c = axis[:2].double()
        by_kappa, by_c, by_lam = by.reshape(3, 2 * length)
        scale = kappa if terms.normalize else torch.ones_like(kappa)  # by c kappa, and by ln(kappa) at constant c kappa
        sums.append(torch.stack([by_c * scale, by_lam, by_kappa * scale / c]))
    g, (correction1, correction2) = by_raw * clip, rates.corrections
    m = exp_avg + (g - exp_avg) * (1.0 - rates.beta1)
    v = exp_avg_sq * rates.beta2 + g * g * (1.0 - rates.beta2)
    w = raw.detach() * (1.0 - rates.lr * rates.decay)
    w = w - m / ((v / correction2).sqrt() + rates.eps) * (rates.lr / correction1)
    return {
        "write": [before.detach()],
        "pull": [*sums, by_raw.square().sum((1, 2)), by_raw],
        "update": [w, m, v, weight(w, *of(factors[1]))],
    }


def load() -> TritonKernels | None:
    """Return the kernels for CUDA, or None if they cannot run; the log has the reason.

    They need Triton and an NVIDIA device of compute capability 8.0 or higher, for bfloat16 arithmetic.
    """
    reason = None
    if importlib.util.find_spec("triton") is None:
        reason = "triton is not installed"
    elif torch.version.hip is not None or not torch.cuda.is_available():
        reason = "there is no NVIDIA device"
    elif torch.cuda.get_device_capability() < (8, 0):
        reason = f"the device has compute capability {torch.cuda.get_device_capability()}, not (8, 0)"
    if reason is not None:
        _log.info("no kernels for CUDA: %s", reason)
        return None
    return TritonKernels()
