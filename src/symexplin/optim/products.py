"""Learned scales that are products of one number per output and one per input (paper, section 4.4), packed.

For such a map the curvature kappa, the amplitude c and the slope lambda of the linear pathway of an entry are products,
too, of one factor that belongs to its row in memory and one that belongs to its column:

    w_eff = c sign(w) expm1(kappa |w|) + lambda u(w) + A B      u = |w| for mode mismatch, else w

with c = s e exp(-n)/d and lambda = s l/d. Kernels know these factors and nothing of the scales. :class:`PackedScales`
computes the factors from the scales, and the gradients of the scales from a kernel's sums, for all parameters of a
batch at once: a fixed number of operations, whatever their number.
"""

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from symexplin.kernels.interface import Factors, Kernels, Rates, Tensors
from symexplin.modes import exp
from symexplin.optim.batch import ADAMW
from symexplin.optim.entry import Entry, moment_key
from symexplin.spec import ScaleTensor, Spec, dims_of, is_weight, outputs_first, sides, stack_size

__all__ = ["COLUMNS", "ROWS", "PackedScales", "divides", "fixed_factors", "is_product"]

_SIGNS = {"mismatch": 1.0, "congruent": 1.0, "oppose": -1.0, "exp_only": 0.0, "linear": 1.0}  # of lambda
_PRODUCT_PATTERNS = ("fixed", "global", "row", "column", "row_col_mult")
_SUM_PATTERNS = ("fixed", "global", "row", "column", "row_col_add")  # of logarithms, whose exponentials are products
ROWS, COLUMNS = range(2)  # sides of a matrix
_KAPPA, _C, _LAMBDA = range(3)  # kinds of factors
_BY_C, _BY_KAPPA, _BY_LAMBDA = range(3)  # kinds of sums
_MULTIPLIED = {"m": (_KAPPA,), "e": (_C,), "n": (_C,), "l": (_LAMBDA,), "s": (_C, _LAMBDA)}  # by role


@functools.cache
def is_product(spec: Spec) -> bool:
    """Whether kappa, c and lambda are products.

    >>> from symexplin.presets import preset
    >>> [is_product(Spec.of((4, 3), "oi", preset(name))) for name in ("paper", "paper+offset", "absorbed")]
    [True, True, True]
    """
    return spec.config.mode in _SIGNS and all(
        role in _MULTIPLIED
        and spec.pattern(role) in (_SUM_PATTERNS if role == "n" or spec.is_log(role) else _PRODUCT_PATTERNS)
        for role in spec.config.roles
        if role != "delta"
    )


def divides(spec: Spec) -> bool:
    """Whether c and lambda are divided by kappa."""
    return spec.config.normalize and spec.config.mode != "linear"


def fixed_factors(spec: Spec) -> tuple[float, float, float]:
    """Return the numbers in kappa, c and lambda that are not learned.

    If kappa normalizes, c and lambda are still to be divided by it.
    """
    config = spec.config

    def number(role: str, otherwise: float) -> float:
        return spec.first(role) if role in config.roles and not spec.by_role(role) else otherwise

    share = number("s", 1.0)
    linear = share * number("l", 1.0) * _SIGNS[config.mode]
    if config.mode == "linear":  # has no exponential: of another kappa exp(kappa |w|) may be infinite
        return 0.0, 0.0, linear
    kappa = number("m", 1.0) * (1.0 if config.curvature == "absorbed" else spec.beta)
    d = 1.0 if config.normalize else spec.beta
    return kappa, share * number("e", 1.0) * float(exp(-number("n", 0.0))) / d, linear / d


class _Numbers(NamedTuple):
    """The learned numbers of one role along the rows or the columns, as views of all of them and of all gradients."""

    role: str
    side: int
    at: slice  # of the rows or columns that they belong to
    values: Tensor
    gradient: Tensor
    matrices: Tensor | None = None  # where a whole matrix has one number: the place of each row's number, else None
    heights: Tensor | None = None  # of these matrices

    def spread(self, of: Tensor) -> Tensor:
        """Return one value for each row or column."""
        return of if self.matrices is None else of.index_select(0, self.matrices)

    def write(self, operator: Any, a: Tensor, b: Tensor) -> None:
        """Write the gradients of the numbers, the operator of two tensors by row or column, summed over a matrix."""
        if self.heights is None:
            operator(a, b, out=self.gradient)
        else:  # the check of the lengths would wait for the device
            self.gradient.copy_(torch.segment_reduce(operator(a, b), "sum", lengths=self.heights, unsafe=True))


class _Table(NamedTuple):
    """Kappa, c and lambda of all rows and of all columns, and views of what belongs to each of the numbers."""

    factors: Factors
    views: list[Tensor]  # (3, n)
    layers: list[tuple[list[Tensor], list[int]]]  # views that do not overlap, and the numbers that multiply them

    @classmethod
    def of(cls, factors: Factors, all_numbers: Sequence[_Numbers]) -> "_Table":
        """Return a table in this memory."""
        views = [factors[numbers.side][:, numbers.at] for numbers in all_numbers]
        layers: list[tuple[list[Tensor], list[int]]] = []
        depths: Counter[tuple[int, int]] = Counter()
        for i, numbers in enumerate(all_numbers):
            for kind in _MULTIPLIED[numbers.role]:
                depth = depths[numbers.side, kind]
                depths[numbers.side, kind] += 1
                if depth == len(layers):
                    layers.append(([], []))
                layers[depth][0].append(views[i][kind])
                layers[depth][1].append(i)
        return cls(factors, views, layers)


class _Place(NamedTuple):
    """A learned tensor of a parameter, and which of the packed numbers it has."""

    entry: Entry
    tensor: ScaleTensor
    key: tuple[str, str]  # its role, and "row", "column" or "global", for a delta its factor


class PackedScales:
    """The learned scales of parameters with one map: all numbers in one tensor, their gradients and moments in others.

    The numbers lie role by role, in a role those of all rows, then of all columns. The states of the parameters have
    views, under the names that the module form uses. Biases come last among the parameters: each is one row, which has
    no number, and its outputs are columns.
    """

    def __init__(self, entries: Sequence[Entry], moments: Sequence[str], kernels: Kernels) -> None:
        self.entries, self.spec = entries, entries[0].spec
        places = sorted(_places(entries), key=lambda place: _order(place.key))
        names = [(place.entry, place.tensor.name) for place in places]
        sizes = [place.entry.local_state(name).numel() for place, (_, name) in zip(places, names, strict=True)]
        device = entries[0].value.device
        self.values = _pack(names, sizes, device)
        self.moments = [
            _pack([(entry, moment_key(name, moment)) for entry, name in names], sizes, device) for moment in moments
        ]
        self.gradient = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        for (entry, name), part in zip(names, torch.split(self.gradient, sizes), strict=True):
            entry.grads[name] = _viewed(entry, name, part)
        alike = self._lay_out(places, sizes)
        if tuple(moments) == ADAMW:
            self._plans = [(tensor, kernels.elementwise(None, self._tensors(flat))) for tensor, flat in alike]

    def _tensors(self, flat: slice) -> Tensors:
        exp_avgs, exp_avg_sqs = ([moment[flat]] for moment in self.moments)
        return Tensors([self.values[flat]], exp_avgs, exp_avg_sqs, grads=[self.gradient[flat]])

    def _lay_out(self, places: Sequence[_Place], sizes: Sequence[int]) -> list[tuple[ScaleTensor, slice]]:
        """Find the rows and columns of every number, and the factors without the learned ones.

        Return one of the scales that have equal rates, and their numbers.
        """
        lengths = [[_length(entry, side) for entry in self.entries] for side in (ROWS, COLUMNS)]
        starts = [list(itertools.accumulate(of, initial=0)) for of in lengths]
        self._starts = starts
        self.counts = starts[ROWS][-1], starts[COLUMNS][-1]
        index = {id(entry): i for i, entry in enumerate(self.entries)}
        self._numbers: list[_Numbers] = []
        ends: dict[str, tuple[ScaleTensor, int, int]] = {}  # by role
        at = 0
        for key, run in itertools.groupby(zip(places, sizes, strict=True), key=lambda item: item[0].key):
            of, counts = zip(*run, strict=True)
            flat = slice(at, at := at + sum(counts))
            ends[key[0]] = of[0].tensor, ends.get(key[0], (None, flat.start))[1], flat.stop
            if key[0] == "delta":
                continue
            side, which = COLUMNS if key[1] == "column" else ROWS, [index[id(place.entry)] for place in of]
            whole = slice(starts[side][which[0]], starts[side][which[-1] + 1])
            numbers = _Numbers(key[0], side, whole, self.values[flat], self.gradient[flat])
            self._numbers.append(_shared(numbers, of) if key[1] == "global" else numbers)
        device = self.values.device
        ones = torch.ones(3, self.counts[1], dtype=torch.float32, device=device)
        fixed = torch.tensor(fixed_factors(self.spec), dtype=torch.float32, device=device)
        fixed = fixed[:, None].repeat(1, self.counts[0])
        self._fixed, self._old, self._new = (
            _Table.of((fixed.clone(), ones.clone()), self._numbers) for _ in ("fixed", "old", "new")
        )
        return [(tensor, slice(start, stop)) for tensor, start, stop in ends.values()]

    def starts(self, side: int, chosen: set[int]) -> Iterator[int]:
        """Yield the first row (0) or column (1) among those of all of every matrix of chosen parameters (their ids)."""
        for entry, start in zip(self.entries, self._starts[side], strict=False):
            if id(entry) not in chosen:
                continue
            count = stack_size(entry.axes, entry.value.shape)
            size = _length(entry, side) // max(1, count)
            yield from (start + k * size for k in range(count))

    def factors(self, *, new: bool = False) -> Factors:
        """Return kappa, c and lambda of all rows and of all columns under the present scales.

        The next call with the same `new` writes to the same memory.
        """
        table = self._new if new else self._old
        rows, columns = table.factors
        torch._foreach_copy_([rows, columns], list(self._fixed.factors))
        self._learned = [numbers.spread(self._multiplier(numbers)) for numbers in self._numbers]
        for views, places in table.layers:
            torch._foreach_mul_(views, [self._learned[i] for i in places])
        if divides(self.spec):
            rows[1:].div_(rows[0])
            columns[1:].div_(columns[0])
        return rows, columns

    def _multiplier(self, numbers: _Numbers) -> Tensor:
        """Return what the numbers multiply."""
        if numbers.role == "n":
            return torch.exp(-numbers.values)
        return torch.exp(numbers.values) if self.spec.is_log(numbers.role) else numbers.values

    def clear(self, active: Tensor | None) -> None:
        """Set the gradients of `active` numbers to zero: those of :meth:`mask_of`, or all."""
        if active is None:
            self.gradient.zero_()
        else:
            self.gradient.masked_fill_(active, 0.0)

    def pull(self, sums: Factors, active: Tensor | None) -> Tensor:
        """Write the gradients of `active` numbers, given a kernel's sums over rows and columns under :meth:`factors`.

        Return their norm. The others may have gradients of this step, of another batch.

        The sums are those of :meth:`symexplin.kernels.interface.ProductPlan.norm`. Where kappa normalizes, the second
        is the derivative with respect to ln kappa with c kappa constant, since that with c constant would cancel.
        """
        with _writing(active, self.gradient):
            self._write_gradients(sums)
        norm: Tensor = torch.linalg.vector_norm(
            self.gradient if active is None else torch.where(active, self.gradient, 0.0)
        )
        return norm

    def _write_gradients(self, sums: Factors) -> None:
        by = [side.to(torch.float32) for side in sums]
        is_divided = divides(self.spec)
        for i, numbers in enumerate(self._numbers):
            role, factors, part = numbers.role, self._old.views[i], by[numbers.side][:, numbers.at]
            if role == "m" and is_divided:
                numbers.write(torch.sub, part[_BY_KAPPA] * factors[_C], part[_BY_LAMBDA] * factors[_LAMBDA])
                if not self.spec.is_log("m"):
                    numbers.gradient.div_(numbers.values)
            elif role == "m":  # kappa/m is what m multiplies
                multiplied = (factors if self.spec.is_log("m") else self._fixed.views[i])[_KAPPA]
                numbers.write(torch.mul, part[_BY_KAPPA] * factors[_C], multiplied)
            elif role == "n":
                numbers.write(torch.mul, part[_BY_C], factors[_C])
                numbers.gradient.neg_()
            else:
                pairs = []
                for kind in _MULTIPLIED[role]:
                    of = part[_BY_C if kind == _C else _BY_LAMBDA]
                    pairs.append((of / factors[_KAPPA] if is_divided else of, self._others(i, kind)))
                if len(pairs) == 1:
                    numbers.write(torch.mul, *pairs[0])
                else:
                    numbers.write(torch.add, *(of * others for of, others in pairs))

    def _others(self, i: int, kind: int) -> Tensor:
        """Return what numbers multiply in a kind of factors of their rows or columns."""
        numbers = self._numbers[i]
        others = [
            (n.at, learned)
            for n, learned in zip(self._numbers, self._learned, strict=True)
            if n.side == numbers.side and kind in _MULTIPLIED[n.role] and n.role != numbers.role
        ]
        if not others:
            return self._fixed.views[i][kind]
        product = self._fixed.factors[numbers.side][kind].clone()
        for at, learned in others:
            product[at].mul_(learned)
        return product[numbers.at]

    def update(self, rates: Rates, clip: Tensor | None, active: Tensor | None) -> None:
        """Apply AdamW to the `active` numbers."""
        with _writing(active, self.values, *self.moments):
            for tensor, plan in self._plans:
                rate = self.entries[0].scale_rate(tensor)
                plan.update(rates._replace(lr=rate, decay=rates.decay if tensor.decays else 0.0), clip)

    def mask_of(self, entries: Sequence[Entry]) -> Tensor:
        """Return which numbers belong to these parameters, as a mask."""
        mask = torch.zeros(self.values.shape, dtype=torch.bool, device="cpu")
        for entry in entries:
            for name in entry.scales:
                first = int(entry.grads[name].storage_offset())
                mask[first : first + entry.grads[name].numel()] = True
        return mask.to(self.values.device)


@contextlib.contextmanager
def _writing(active: Tensor | None, *tensors: Tensor) -> Iterator[None]:
    """Keep all but the `active` numbers (a mask; None: all are) of tensors that are written meanwhile."""
    before = [] if active is None else [tensor.clone() for tensor in tensors]
    yield
    if active is not None:
        for tensor, old in zip(tensors, before, strict=True):
            torch.where(active, tensor, old, out=tensor)


def _places(entries: Sequence[Entry]) -> Iterator[_Place]:
    """Yield the learned tensors of parameters with what they belong to."""
    for entry in entries:
        outputs, inputs = dims_of(entry.axes, "eo"), dims_of(entry.axes, "ei")
        for tensor in entry.spec.tensors:
            if tensor.role == "delta":
                key = tensor.name
            elif tensor.dims == outputs:
                key = "row" if outputs_first(entry.axes) else "column"
            elif is_weight(entry.axes) and tensor.dims == inputs:
                key = "column" if outputs_first(entry.axes) else "row"
            else:
                key = "global"
            yield _Place(entry, tensor, (tensor.role, key))


def _order(key: tuple[str, str]) -> tuple[int, int]:
    """Return where the numbers of a role and a side lie among all."""
    return (*_MULTIPLIED, "delta").index(key[0]), ("global", "row", "column", "delta_A", "delta_B").index(key[1])


def _length(entry: Entry, side: int) -> int:
    """Return the number of rows or of columns of all matrices of a parameter; a bias is one row."""
    outputs, inputs = sides(entry.axes, entry.value.shape)
    rows, columns = (outputs, inputs) if outputs_first(entry.axes) else (inputs, outputs)
    return stack_size(entry.axes, entry.value.shape) * (columns if side == COLUMNS else rows)


def _pack(names: Sequence[tuple[Entry, str]], sizes: Sequence[int], device: torch.device) -> Tensor:
    """Return one tensor with the values of tensors of states, which become views of it."""
    packed = torch.empty(sum(sizes), dtype=torch.float32, device=device)
    for (entry, name), part in zip(names, torch.split(packed, list(sizes)), strict=True):
        own = entry.local_state(name)
        entry.put(name, _viewed(entry, name, part).copy_(own))
    return packed


def _viewed(entry: Entry, name: str, part: Tensor) -> Tensor:
    """Return packed numbers with the shape of a tensor of the state.

    The factors of a delta lie in the order of memory of their matrix, as kernels take them.
    """
    shape = entry.local_state(name).shape
    is_turned = name.startswith("delta") and not outputs_first(entry.axes)
    return part.view(*shape[:-2], shape[-1], shape[-2]).mT if is_turned else part.view(shape)


def _shared(numbers: _Numbers, places: Sequence[_Place]) -> _Numbers:
    """Return the numbers of whole matrices with the rows that share each."""
    each = []
    for place in places:
        stack = stack_size(place.entry.axes, place.entry.value.shape)
        each += [_length(place.entry, ROWS) // max(1, stack)] * stack
    device = numbers.values.device
    heights = torch.tensor(each, dtype=torch.int64, device="cpu")
    matrices = torch.arange(len(each), dtype=torch.int32, device="cpu").repeat_interleave(heights)
    return numbers._replace(matrices=matrices.to(device), heights=heights.to(device))
