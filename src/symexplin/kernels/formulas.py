"""The formulas of a step as kernels: under torch.compile on accelerators, in small blocks on CPUs without a C compiler.

For torch.compile large tensors are flat aliases and small ones are concatenated, so that one graph serves all of them.
All numbers that change from step to step are one tensor on the device, which is filled without waiting for it. If the
compiler fails, the same functions run eagerly after one warning.
"""

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from symexplin.closed import Closed
from symexplin.config import Scale, SELConfig
from symexplin.curve import Curved, Map
from symexplin.kernels.interface import Curve, FactoredMap, Noise, Rates, Tensors, Vectors
from symexplin.rounding import noise_of, rounded

__all__ = ["FormulaKernels"]

_SMALL = 2**16  # entries: a smaller tensor costs more to launch than to compute
_BLOCK = 2**16  # entries of a block whose temporaries stay in a core's cache

_Call = Callable[[Callable[..., Any]], Callable[..., Any]]
_Lists = Mapping[str, Sequence[Tensor] | None]
_Pieces = Iterator[tuple[dict[str, Tensor], list[int]]]


class FormulaKernels:
    """Kernels for any device, compiled by torch.compile or not."""

    def __init__(self, compiles: bool) -> None:
        self.name = "torch.compile" if compiles else "PyTorch's operations"
        self._call = _compiled if compiles else lambda function: function
        self._pieces = _pieces if compiles else _blocks

    def plan(
        self,
        map: Curve | FactoredMap | None,
        tensors: Tensors,
        vectors: Sequence[Vectors] = (),
        gradients: Sequence[Vectors] = (),
    ) -> "_Closed | _Factored":
        """Return the steps of weights under a map."""
        if isinstance(map, FactoredMap):
            return _Factored(self._call, map, tensors, vectors, gradients)
        return _Closed(self._call, self._pieces, map, tensors)


class _Closed:
    """Steps of weights under a map in closed form, or of plain ones."""

    def __init__(self, call: _Call, pieces: Callable[[_Lists], _Pieces], curve: Curve | None, tensors: Tensors) -> None:
        self._call, self._pieces, self._tensors = call, pieces, tensors
        self._closed = None if curve is None else Closed("exp_only", *curve)

    def pull(self, grads: Sequence[Tensor]) -> Tensor:
        """Return the norm of the raw gradients."""
        run, tensors = self._call(_norm), self._tensors
        pieces = self._pieces({"weight": tensors.weights, "grad": grads, "master": tensors.masters})
        return _total([run(self._closed, **tensors) for tensors, _ in pieces])

    def update(
        self, grads: Sequence[Tensor], rates: Rates, clip: Tensor | None, noise: Sequence[Noise] | None = None
    ) -> None:
        """Apply AdamW to the weights in place."""
        run, (weights, exp_avgs, exp_avg_sqs, masters) = self._call(_update), self._tensors
        numbers = _numbers(rates, clip, weights[0].device)
        written: _Lists = {"weight": weights, "exp_avg": exp_avgs, "exp_avg_sq": exp_avg_sqs, "master": masters}
        bits = None
        if noise is not None:
            lines = zip(weights, noise, strict=True)
            bits = [noise_of(torch.arange(w.numel(), device=w.device), *line) for w, line in lines]
        for tensors, chosen in self._pieces({**written, "grad": grads, "noise": bits}):
            run(self._closed, rates.decay != 0.0, rates.lr != 0.0, numbers, **tensors)
            if len(chosen) > 1:  # aliases were written in place, concatenations were not
                for name, originals in written.items():
                    if originals is not None:
                        parts = [_alias(originals[i]) for i in chosen]
                        torch._foreach_copy_(parts, list(torch.split(tensors[name], [p.numel() for p in parts])))


class _Factored:
    """Steps of matrices whose scales are products of vectors."""

    def __init__(
        self,
        call: _Call,
        map: FactoredMap,
        tensors: Tensors,
        vectors: Sequence[Vectors],
        gradients: Sequence[Vectors],
    ) -> None:
        self._call, self._vectors, self._gradients = call, vectors, gradients
        self._maps = [_map_of(map, tuple(vector is not None for vector in line)) for line in vectors]
        self._lists = [[_matrix(tensor) for tensor in line or ()] for line in tensors]

    def pull(self, grads: Sequence[Tensor]) -> Tensor:
        """Return the norm of the raw gradients, and write the gradients of the vectors."""
        self._old = [tuple(None if v is None else v.clone() for v in line) for line in self._vectors]
        run, raws = self._call(_pull_matrix), self._lists[-1]
        found = [run(*line) for line in zip(self._maps, raws, map(_matrix, grads), self._old, strict=True)]
        if into := _learned(self._gradients):
            torch._foreach_copy_(into, _learned([gradients for _, gradients in found]))
        return _total([norm for norm, _ in found])

    def update(
        self,
        grads: Sequence[Tensor],
        rates: Rates,
        clip: Tensor | None,
        noise: Sequence[Noise] | None = None,  # noqa: ARG002
    ) -> None:
        """Apply AdamW to the raw weights and write the weights."""
        run, numbers = self._call(_update_matrix), _numbers(rates, clip, grads[0].device)
        lines = zip(self._maps, map(_matrix, grads), *self._lists, self._old, self._vectors, strict=True)
        for of_matrix, *line in lines:
            run(of_matrix, rates.lr != 0.0, numbers, *line)


def _learned(lines: Sequence[Vectors]) -> list[Tensor]:
    return [vector for line in lines for vector in line if vector is not None]


@functools.cache
def _map_of(map: FactoredMap, learned: tuple[bool, ...]) -> Map:
    """Return the same map for matrices of any shape, so that one compiled graph serves them."""
    scales: dict[str, Any] = {"s": Scale(start=map.s)}
    for i, role in enumerate(("e", "l", "m", "n")):
        rows, columns = learned[2 * i : 2 * i + 2]
        both = "row_col_add" if role == "n" else "row_col_mult"
        pattern = (both if columns else "row") if rows else "column" if columns else "fixed"
        scales[role] = Scale(pattern, start=getattr(map, role))
    curvature = "absorbed" if map.absorbed else "fixed"
    return Map((1, 1), "oi", SELConfig(map.beta, map.mode, curvature, map.normalize, **scales))


# ---- what is compiled ----


def _value(weight: Tensor, master: Tensor | None) -> Tensor:
    """Return the float32 weight; a master copy adopts what was written into the weight from outside."""
    if master is None:
        return weight.float()
    return torch.where(master.to(weight.dtype) == weight, master.float(), weight.float())


def _norm(closed: Closed | None, weight: Tensor, grad: Tensor, master: Tensor | None = None) -> Tensor:
    raw = grad.float()
    if closed is not None:
        raw = raw * closed.slope(_value(weight, master))
    norm: Tensor = torch.linalg.vector_norm(raw)
    return norm


def _adam_(numbers: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> Tensor:
    """Update the moments in place, and return AdamW's step without decay."""
    _, gain1, keep2, gain2, root, eps, clip = numbers.unbind()
    grad = grad * clip
    exp_avg.lerp_(grad, gain1)
    exp_avg_sq.mul_(keep2).addcmul_(grad, grad * gain2)
    return exp_avg / (exp_avg_sq.sqrt() * root + eps)


def _update(
    closed: Closed | None,
    decays: bool,
    moves: bool,
    numbers: Tensor,
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    master: Tensor | None = None,
    noise: Tensor | None = None,
) -> None:
    value, grad, decay = _value(weight, master), grad.float(), numbers[0]
    if closed is not None:
        grad = grad * closed.slope(value)
    step = _adam_(numbers, grad, exp_avg, exp_avg_sq)
    if not moves:
        return
    if closed is None:
        value = value * (1.0 - decay) + step
    else:
        value = closed.move(value, step - decay * closed.raw(value) if decays else step)
    if master is not None:
        master.copy_(value)
    weight.copy_(value if noise is None else rounded(value, noise))


def _curved(map: Map, raw: Tensor, vectors: Vectors) -> Curved:
    learned = [vector for vector in vectors if vector is not None]
    return Curved(map, raw, {factor.name: vector for factor, vector in zip(map.factors, learned, strict=True)})


def _pull_matrix(map: Map, raw: Tensor, grad: Tensor, vectors: Vectors) -> tuple[Tensor, Vectors]:
    by_raw, by_name = _curved(map, raw, vectors).pullback(grad.float())
    found = iter(by_name.values())
    return torch.linalg.vector_norm(by_raw), tuple(None if vector is None else next(found) for vector in vectors)


def _update_matrix(
    map: Map,
    moves: bool,
    numbers: Tensor,
    grad: Tensor,
    weight: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    raw: Tensor,
    old: Vectors,
    new: Vectors,
) -> None:
    step = _adam_(numbers, grad.float() * _curved(map, raw, old).slope(), exp_avg, exp_avg_sq)
    if moves:
        raw.copy_(raw * (1.0 - numbers[0]) + step)
        weight.copy_(_curved(map, raw, new).effective())


# ---- how it is called ----


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiled function, which runs eagerly from the first failure of the compiler on."""
    compiled, works = torch.compile(function, dynamic=True), True

    def run(*args: Any, **tensors: Any) -> Any:
        nonlocal works
        if works:
            try:
                return compiled(*args, **tensors)
            except Exception as error:
                # The compiler fails before it runs anything, so nothing has been written.
                works = False
                warnings.warn(
                    f"torch.compile failed ({type(error).__name__}: {str(error).splitlines()[0][:200]}): an optimizer "
                    "step runs PyTorch's operations one by one, which takes longer",
                    stacklevel=2,
                )
        return function(*args, **tensors)

    return run


def _numbers(rates: Rates, clip: Tensor | None, device: torch.device) -> Tensor:
    """Return a step's numbers as a tensor on the device; filling it takes launches, but no wait for a copy.

    The step is exp_avg/(root sqrt(exp_avg_sq) + eps), with root and eps divided by the corrected rate.
    """
    rate = -rates.lr / rates.correction1 or math.inf  # with lr 0 no step is taken
    numbers = (
        *(rates.lr * rates.decay, 1.0 - rates.beta1, rates.beta2, 1.0 - rates.beta2),
        *(1.0 / (math.sqrt(rates.correction2) * rate), rates.eps / rate),
    )
    found = [torch.full((), number, device=device) for number in numbers]
    return torch.stack([*found, torch.ones((), device=device) if clip is None else clip.to(device, torch.float32)])


def _total(norms: Sequence[Tensor]) -> Tensor:
    total: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)))
    return total


def _pieces(lists: _Lists) -> _Pieces:
    """Yield flat tensors of each list by its name, and their indices: large ones alone, small ones concatenated."""
    given = {name: [_alias(tensor) for tensor in tensors] for name, tensors in lists.items() if tensors is not None}
    sizes = [tensor.numel() for tensor in given["weight"]]
    small = [i for i, size in enumerate(sizes) if 0 < size < _SMALL]
    for i in [i for i, size in enumerate(sizes) if size >= _SMALL] + (small if len(small) == 1 else []):
        yield {name: tensors[i] for name, tensors in given.items()}, [i]
    if len(small) > 1:
        yield {name: torch.cat([tensors[i] for i in small]) for name, tensors in given.items()}, small


def _blocks(lists: _Lists) -> _Pieces:
    """Yield what :func:`_pieces` does, each tensor in blocks."""
    given = {name: [_alias(tensor) for tensor in tensors] for name, tensors in lists.items() if tensors is not None}
    for i, weight in enumerate(given["weight"]):
        for start in range(0, weight.numel(), _BLOCK):
            yield {name: tensors[i][start : start + _BLOCK] for name, tensors in given.items()}, [i]


def _alias(tensor: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    """Return a dense tensor's memory, flat or in a shape, as a tensor of its own: Dynamo guards the bases of views."""
    shape = (tensor.numel(),) if shape is None else shape
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(tensor.untyped_storage(), tensor.storage_offset(), shape, (*shape[1:], 1))


def _matrix(tensor: Tensor) -> Tensor:
    return _alias(tensor, (1, tensor.numel()) if tensor.dim() < 2 else tuple(tensor.shape))
