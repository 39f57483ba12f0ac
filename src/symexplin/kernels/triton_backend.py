"""The map and AdamW over it in Triton: what is launched, with which tables."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from symexplin.kernels import triton_finish as finish
from symexplin.kernels import triton_lists as lists
from symexplin.kernels import triton_matrix as matrix
from symexplin.kernels.part import Number, Part, Rates
from symexplin.kernels.terms import Terms
from symexplin.kernels.triton_sent import capturing, sent
from symexplin.kernels.triton_tables import (
    MarksPlan,
    Matrices,
    Plan,
    Shape,
    Tiles,
    View,
    view_of,
)

__all__ = ["CudaKernels", "launch"]

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_BITS = {4: tl.int32, 2: tl.int16, 8: tl.int64, 1: tl.int8}
OPTIONS = {"num_warps": 4, "maxnreg": 128, "enable_fp_fusion": False}
_PLANS = 8
P = TypeVar("P", Plan, MarksPlan)


def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Start that many programs of a kernel, 16 warps of which fit a multiprocessor, every rounding as written."""
    if programs:
        kernel[(programs,)](*arguments, **(OPTIONS | constants))


def _constants(shape: Shape) -> dict[str, int]:
    return {"TILE": shape.tile, "ROWS": shape.rows, "COLUMNS": shape.columns, "num_warps": shape.warps}


class CudaKernels:
    """Kernels for CUDA; nothing in them waits for the device, and no sum depends on the order of programs.

    Two launches a distinct shape pull gradients back, one updates it; plain parameters, panels and norms take one
    launch each. What a captured graph reads is kept as long as this object.
    """

    def __init__(self, tiles: Tiles | None = None) -> None:
        self.name = f"Triton {triton.__version__}"
        self._tiles = tiles or Tiles()
        self._plans: dict[Any, Plan | MarksPlan] = {}
        self._captured: list[Plan | MarksPlan] = []
        self._flags: dict[torch.device, Tensor] = {}

    def covers(self, raw: Tensor, weight: Tensor) -> bool:
        """Whether tensors of these dtypes and memory formats can be computed."""
        return raw.dtype == torch.float32 and weight.dtype in _TYPES and raw.is_contiguous() and weight.is_contiguous()

    @torch.no_grad()
    def effective(self, terms: Terms, raw: Tensor, panels: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Return the effective weight, rounded to `dtype`."""
        out = torch.empty_like(raw, dtype=dtype)
        if raw.numel() == 0:
            return out
        view = view_of(terms, raw, panels)
        shape, tiles0, tiles1 = view.tile(self._tiles.update, self._tiles)
        with _on(raw.device):
            launch(
                matrix.effective_one, tiles0 * tiles1, raw, *_placed(panels, raw), out.view(_integers(dtype)),
                view.d0, view.d1, view.across, *view.numbers, tiles1,
                DTYPE=_TYPES[dtype], SPEC=view.spec, **_constants(shape),
            )  # fmt: skip
        return out

    @torch.no_grad()
    def pullback(
        self, terms: Terms, raw: Tensor, panels: Sequence[Tensor], g: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients by raw weight, panel0, panel1 and scalar for a gradient `g` of the effective weight."""
        raw_out = torch.empty_like(raw)
        if raw.numel() == 0:
            return raw_out, *(torch.zeros_like(panel) for panel in panels)  # type: ignore[return-value]
        out = [torch.empty_like(panel) for panel in panels]
        view = view_of(terms, raw, panels)
        shape, tiles0, tiles1 = view.tile(self._tiles.pull, self._tiles)
        sizes, places = (view.d0, view.d1, view.across, *view.numbers), _placed(panels, raw)
        with _on(raw.device):
            row_sums, column_sums = self._sums(view, 1, raw.device)
            launch(
                matrix.pull_one, tiles0 * tiles1, raw, g.contiguous(), *places, raw_out, row_sums, column_sums, *sizes,
                tiles1, SPEC=view.spec, **_constants(shape),
            )  # fmt: skip
            launch(
                finish.finish_one, self._blocks(view), *places, *_placed(out, raw), row_sums, column_sums, *sizes,
                tiles0, tiles1, SPEC=view.spec, BLOCK=self._tiles.block,
            )  # fmt: skip
        return raw_out, *out  # type: ignore[return-value]

    @torch.no_grad()
    def pull(self, parts: Sequence[Part]) -> Tensor:
        """Write the gradients of all panels; return the norm of each part's raw gradient (of plain parts: of grad)."""
        if not parts:
            return torch.empty(0)
        device, tiles = parts[0].raw.device, self._tiles
        with _on(device):
            plan = self._plan(parts)
            grads, fit, held = self._gradients(plan, parts)
            squares = torch.empty(plan.squares, dtype=torch.float32, device=device)
            if plan.empty:
                torch._foreach_zero_(plan.empty)
            for batch in plan.matrices:
                self._pull(plan, batch, grads, fit, squares)
            for listed in plan.listed:
                launch(
                    lists.square_tiles, len(listed.tiles), plan.table, grads, listed.tiles, squares, listed.squares,
                    GRAD=_TYPES[listed.dtype], ALIGNED=listed.aligned and fit, **_constants(tiles.read),
                )  # fmt: skip
            out = torch.empty(len(parts), dtype=torch.float32, device=device)
            launch(lists.norms, len(parts), squares, plan.spans, out, BLOCK=tiles.block)
        del held
        return out

    def _pull(self, plan: Plan, batch: Matrices, grads: Tensor, fit: bool, squares: Tensor) -> None:
        view = batch.view
        shape, tiles0, tiles1 = view.tile(self._tiles.pull, self._tiles)
        row_sums, column_sums = self._sums(view, batch.parts, grads.device)
        sizes = (view.d0, view.d1, view.across, *view.numbers, tiles0, tiles1)
        launch(
            matrix.pull_all, batch.parts * tiles0 * tiles1, plan.table, grads, row_sums, column_sums,
            squares, batch.first, batch.squares, *sizes,
            GRAD=_TYPES[batch.dtype], SPEC=view.spec, ALIGNED=batch.aligned and fit, **_constants(shape),
        )  # fmt: skip
        launch(
            finish.finish_all, batch.parts * self._blocks(view), plan.table, row_sums, column_sums, batch.first,
            *sizes, SPEC=view.spec, BLOCK=self._tiles.block,
        )  # fmt: skip

    @torch.no_grad()
    def update(self, parts: Sequence[Part], factor: Tensor | None) -> Tensor:
        """Apply AdamW to raw weights, plain values and panels, gradients times `factor`, and write the weights.

        The raw gradient is computed again from the panels before their update; the weights follow from those after it.
        Where the learning rate is 0, weights keep their bits. Returns the :meth:`marks` of the parts' weights
        (of `raw` where there is no weight).
        """
        if not parts:
            return torch.empty(0, 2, dtype=torch.int64)
        device, tiles = parts[0].raw.device, self._tiles
        with _on(device):
            plan = self._plan(parts)
            grads, fit, held = self._gradients(plan, parts)
            states, rates = self._states(plan, parts)
            by = None if factor is None else factor.to(device=device, dtype=torch.float32)
            marks = torch.zeros(len(parts), 2, dtype=torch.int64, device=device)
            launch(
                lists.update_panels, plan.programs, plan.panels, states, rates, by, plan.chunks, BLOCK=4 * tiles.block
            )
            for batch in plan.matrices:
                view = batch.view
                shape, tiles0, tiles1 = view.tile(tiles.update, tiles)
                launch(
                    matrix.update_all, batch.parts * tiles0 * tiles1, plan.table, grads, states, rates, by, marks,
                    batch.first, view.d0, view.d1, view.across, *view.numbers, tiles0, tiles1,
                    DTYPE=_TYPES[batch.dtype], SPEC=view.spec, ALIGNED=batch.aligned and fit, **_constants(shape),
                )  # fmt: skip
            for listed in plan.listed:
                launch(
                    lists.update_tiles, len(listed.tiles), plan.table, grads, states, rates, by, listed.tiles, marks,
                    DTYPE=_TYPES[listed.dtype], MASTER=listed.master, ALIGNED=listed.aligned and fit,
                    **_constants(tiles.listed),
                )  # fmt: skip
        del held
        return marks

    @torch.no_grad()
    def marks(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return (len(tensors), 2) int64, on the tensors' device: sums of the bits of entries, weighted by place."""
        if not tensors:
            return torch.empty(0, 2, dtype=torch.int64)
        device, key = tensors[0].device, ("marks", *map(id, tensors))
        with _on(device):
            found = MarksPlan.signature_of(tensors)
            plan = self._kept(key, device, lambda p: p.signature == found, lambda: MarksPlan(tensors, self._tiles))
            out = torch.zeros(len(tensors), 2, dtype=torch.int64, device=device)
            for size, fit, tiles in plan.listed:
                launch(
                    lists.mark_tiles, len(tiles), plan.table, tiles, out,
                    BITS=_BITS[size], ALIGNED=fit, **_constants(self._tiles.read),
                )  # fmt: skip
        return out

    def _plan(self, parts: Sequence[Part]) -> Plan:
        """Return the tables of a list of parts: those made before for this very list."""
        device = parts[0].raw.device
        return self._kept(id(parts), device, lambda plan: plan.parts is parts, lambda: Plan(parts, self._tiles, device))

    def _kept(self, key: Any, device: torch.device, fits: Callable[[P], bool], make: Callable[[], P]) -> P:
        """Return the plan under that key, made anew where it does not fit."""
        plan: Any = self._plans.get(key)
        if plan is None or not fits(plan):
            if capturing(device):
                raise RuntimeError("a captured step must follow one outside of any capture: take one step before it")
            self._plans.pop(key, None)
            plan = self._plans[key] = make()
            while len(self._plans) > _PLANS:
                self._plans.pop(next(iter(self._plans)))
        if capturing(device):
            self._captured.append(plan)
        return plan  # type: ignore[no-any-return]

    def _gradients(self, plan: Plan, parts: Sequence[Part]) -> tuple[Tensor, bool, list[Tensor]]:
        """Return the table of the gradients' addresses, whether all are multiples of 16, and what must stay alive."""
        held = []
        for i in plan.order:
            part = parts[i]
            if part.grad is None:
                raise ValueError(f"part.grad must be a tensor for every part, got None for part {i}")
            grad, dtype = part.grad, part.raw.dtype if part.weight is None else part.weight.dtype
            held.append(grad if grad.dtype == dtype and grad.is_contiguous() else grad.to(dtype).contiguous())
        addresses = [grad.data_ptr() for grad in held]
        return plan.grads.send(addresses), all(address % 16 == 0 for address in addresses), held

    def _states(self, plan: Plan, parts: Sequence[Part]) -> tuple[Tensor, Tensor]:
        """Return the tables of what each part is told apart from its gradient, and of the rates."""
        device = parts[0].raw.device
        if device not in self._flags:
            self._flags[device] = sent([0, 1], torch.int8, device)
        flags = self._flags[device].data_ptr()
        rows: dict[int, int] = {}
        states: list[int] = []
        numbers: list[Number] = []
        for i in plan.order:
            part = parts[i]
            if part.rates is None:
                raise ValueError(f"part.rates must be given for every part, got None for part {i}")
            if id(part.rates) not in rows:
                rows[id(part.rates)] = len(rows)
                numbers += _row(part.rates)
            keep = part.keep.data_ptr() if isinstance(part.keep, Tensor) else flags + int(part.keep)
            states += (rows[id(part.rates)], keep)
        live = {i: x for i, x in enumerate(numbers) if isinstance(x, Tensor) and x.device == device}
        rates = plan.rates.send([0.0 if i in live else float(x) for i, x in enumerate(numbers)])
        if live:
            found = torch.stack([x.detach().to(torch.float32).reshape(()) for x in live.values()])
            rates = rates.index_copy(0, plan.places.send(list(live)), found)
        return plan.states.send(states), rates

    def _sums(self, view: View, parts: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return buffers for partial sums along rows and along columns."""
        rows, columns = (torch.empty(parts * n, dtype=torch.float32, device=device) for n in view.sums(self._tiles))
        return rows, columns

    def _blocks(self, view: View) -> int:
        block = self._tiles.block
        return -(-view.d0 // block) + -(-view.d1 // block) + 1


def _row(rates: Rates) -> list[Number]:
    """Return the line of the rates' table: see symexplin.kernels.triton_adam."""
    line: list[Number] = [rates.lr, rates.decay, 1.0 - rates.beta1, rates.beta2, 1.0 - rates.beta2, rates.eps]
    line += rates.corrections
    for group in (rates.panel_lr, rates.panel_decay):
        for numbers in group:
            line += [*numbers, *[0.0] * (4 - len(numbers))]
    return line


def _placed(panels: Sequence[Tensor], raw: Tensor) -> Sequence[Tensor]:
    """Return the panels as a kernel takes them: that of a bias lies along the columns."""
    along, across, numbers = (panel.contiguous() for panel in panels)
    return along, along if raw.dim() == 1 else across, numbers


def _integers(dtype: torch.dtype) -> torch.dtype:
    return torch.int32 if dtype == torch.float32 else torch.int16


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
