"""The formulas of a step as kernels: under torch.compile on accelerators, in small blocks on CPUs without a C compiler.

For torch.compile large tensors are flat aliases and small ones are concatenated, so that one graph serves all of them.
All numbers that change from step to step are one tensor on the device, which is filled without waiting for it. If the
compiler fails, the same functions run eagerly after one warning.
"""

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from symexplin.closed import Closed
from symexplin.kernels.interface import Curve, FactoredMap, Noise, Rates, Vectors
from symexplin.rounding import noise, rounded
from symexplin.transform import Form, Scales, pullback
from symexplin.transform import forward as effective

__all__ = ["FormulaKernels"]

_SMALL = 2**16  # entries: a smaller tensor costs more to launch than to compute
_BLOCK = 2**15  # entries of a block whose temporaries stay in a core's cache
_ROLES = ("e", "l", "m", "n")

_Lists = dict[str, Sequence[Tensor] | None]


class FormulaKernels:
    """Kernels for any device, compiled by torch.compile or not."""

    def __init__(self, compiles: bool) -> None:
        self._compiles = compiles
        self.name = "torch.compile" if compiles else "PyTorch's operations"

    def _call(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return _compiled(function) if self._compiles else function

    def _pieces(self, lists: "_Lists") -> Iterator[tuple[dict[str, Tensor], list[int]]]:
        return _pieces(lists) if self._compiles else _blocks(lists)

    def norm(
        self, weights: Sequence[Tensor], grads: Sequence[Tensor], masters: Sequence[Tensor] | None, curve: Curve | None
    ) -> Tensor:
        """Return the norm of the raw gradients."""
        closed = None if curve is None else Closed("exp_only", *curve)
        run, lists = self._call(_norm), _Lists(weight=weights, grad=grads, master=masters)
        return _total([run(closed, **tensors) for tensors, _ in self._pieces(lists)])

    def update(
        self,
        weights: Sequence[Tensor],
        grads: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        masters: Sequence[Tensor] | None,
        curve: Curve | None,
        rates: Rates,
        clip: Tensor | None,
        noise: Sequence[Noise] | None,
    ) -> None:
        """Apply AdamW to the weights in place, masters first where there are some."""
        closed = None if curve is None else Closed("exp_only", *curve)
        numbers = _numbers(rates, clip, weights[0].device)
        places = None if noise is None else [_places(w, n) for w, n in zip(weights, noise, strict=True)]
        written: _Lists = {"weight": weights, "exp_avg": exp_avgs, "exp_avg_sq": exp_avg_sqs, "master": masters}
        run = self._call(_update)
        for tensors, chosen in self._pieces({**written, "grad": grads, "places": places}):
            run(closed, rates.decay != 0.0, rates.lr != 0.0, numbers, **tensors)
            if len(chosen) > 1:  # aliases were written in place, concatenations were not
                for name, originals in written.items():
                    if originals is not None:
                        _copy_back(tensors[name], [originals[i] for i in chosen])

    def plan(
        self,
        map: FactoredMap,
        raws: Sequence[Tensor],
        weights: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        vectors: Sequence[Vectors],
    ) -> "_Plan":
        """Return a step of these matrices."""
        return _Plan(self._call, map, raws, weights, exp_avgs, exp_avg_sqs, vectors)


class _Plan:
    """A step of matrices whose scales are products of vectors."""

    def __init__(self, call: Callable[..., Any], map: FactoredMap, *tensors: Any) -> None:
        self._call, self._map = call, map
        self._raws, self._weights, self._exp_avgs, self._exp_avg_sqs, self._vectors = tensors

    def pull(self, grads: Sequence[Tensor]) -> tuple[Tensor, list[Vectors]]:
        """Return the norm of the raw gradients and the gradients of the vectors."""
        self._grads = grads
        self._old = [tuple(None if v is None else v.clone() for v in vectors) for vectors in self._vectors]
        run, matrices = self._call(_pull_matrix), (self._matrices(self._raws), self._matrices(grads))
        found = [run(self._map, *args) for args in zip(*matrices, self._old, strict=True)]
        return _total([norm for norm, _ in found]), [vectors for _, vectors in found]

    def update(self, rates: Rates, clip: Tensor | None) -> None:
        """Apply AdamW to the raw weights and write the weights."""
        numbers, run = _numbers(rates, clip, self._raws[0].device), self._call(_update_matrix)
        lists = (self._raws, self._weights, self._grads, self._exp_avgs, self._exp_avg_sqs)
        matrices = [self._matrices(tensors) for tensors in lists]
        for *args, old, new in zip(*matrices, self._old, self._vectors, strict=True):
            run(self._map, rates.lr != 0.0, numbers, *args, old, new)

    def _matrices(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [_alias(t, (1, t.numel()) if t.dim() < 2 else (t.shape[0], t.shape[1])) for t in tensors]


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
    places: Tensor | None = None,
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
    if places is None:
        weight.copy_(value)
    else:
        weight.copy_(rounded(value, places))


def _scales(map: FactoredMap, vectors: Vectors) -> Scales:
    """Return the scales of a matrix."""
    values: dict[str, Any] = {}
    for i, role in enumerate(_ROLES):
        rows, columns = vectors[2 * i : 2 * i + 2]
        value: Any = getattr(map, role)
        for vector in (None if rows is None else rows[:, None], None if columns is None else columns[None, :]):
            if vector is not None:
                vector = torch.exp(vector) if role == "m" and map.absorbed else vector
                value = value + vector if role == "n" else value * vector
        values[role] = value
    kappa = values.pop("m") * (1.0 if map.absorbed else map.beta)
    return Scales(kappa=kappa, s=map.s, **values)


def _pull_matrix(map: FactoredMap, raw: Tensor, grad: Tensor, vectors: Vectors) -> tuple[Tensor, Vectors]:
    scales = _scales(map, vectors)
    roles = [role for i, role in enumerate(("e", "l", "kappa", "n")) if vectors[2 * i : 2 * i + 2] != (None, None)]
    pulled = pullback(Form(map.mode, map.beta, map.normalize), raw, scales, grad.float(), frozenset(roles))
    found: list[Tensor | None] = []
    for i, role in enumerate(("e", "l", "kappa", "n")):
        rows, columns = vectors[2 * i : 2 * i + 2]
        for dim, own, other in ((1, rows, columns), (0, columns, rows)):
            if own is None:
                found.append(None)
                continue
            if role == "kappa" and map.absorbed:
                total = pulled[role] * scales.kappa
            elif role == "n":
                total = pulled[role]
            else:
                total = pulled[role] * (map.beta * map.m if role == "kappa" else getattr(map, role))
                if other is not None:
                    total = total * (other[:, None] if dim == 0 else other[None, :])
            found.append(total.sum(dim))
    return torch.linalg.vector_norm(pulled["w"]), tuple(found)


def _update_matrix(
    map: FactoredMap,
    moves: bool,
    numbers: Tensor,
    raw: Tensor,
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    old: Vectors,
    new: Vectors,
) -> None:
    form = Form(map.mode, map.beta, map.normalize)
    grad = pullback(form, raw, _scales(map, old), grad.float(), frozenset())["w"]
    step = _adam_(numbers, grad, exp_avg, exp_avg_sq)
    if moves:
        raw.copy_(raw * (1.0 - numbers[0]) + step)
        weight.copy_(effective(form, raw, _scales(map, new)))


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


def _places(weight: Tensor, found: Noise) -> Tensor:
    """Return the noise of stochastic rounding of a weight, flat."""
    key, offset, cols, stride = found
    k = torch.arange(weight.numel(), device=weight.device)
    return noise(key, offset + k // cols * stride + k % cols)


def _pieces(lists: _Lists) -> Iterator[tuple[dict[str, Tensor], list[int]]]:
    """Yield flat tensors of each list by its name, and their indices: large ones alone, small ones concatenated."""
    given = {name: tensors for name, tensors in lists.items() if tensors is not None}
    sizes = [tensor.numel() for tensor in given["weight"]]
    small = [i for i, size in enumerate(sizes) if 0 < size < _SMALL]
    large = [i for i, size in enumerate(sizes) if size >= _SMALL]
    for i in large + (small if len(small) == 1 else []):
        yield {name: _alias(tensors[i], (sizes[i],)) for name, tensors in given.items()}, [i]
    if len(small) > 1:
        flat = {name: [_alias(tensors[i], (sizes[i],)) for i in small] for name, tensors in given.items()}
        yield {name: torch.cat(parts) for name, parts in flat.items()}, small


def _blocks(lists: _Lists) -> Iterator[tuple[dict[str, Tensor], list[int]]]:
    """Yield what :func:`_pieces` does, each tensor in blocks."""
    given = {name: tensors for name, tensors in lists.items() if tensors is not None}
    for i, weight in enumerate(given["weight"]):
        flat = {name: _alias(tensors[i], (weight.numel(),)) for name, tensors in given.items()}
        for start in range(0, weight.numel(), _BLOCK):
            yield {name: tensor[start : start + _BLOCK] for name, tensor in flat.items()}, [i]


def _alias(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a dense tensor's memory in another shape, as a tensor of its own: Dynamo guards the bases of views."""
    stride = (1,) if len(shape) == 1 else (shape[1], 1)
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(tensor.untyped_storage(), tensor.storage_offset(), shape, stride)


def _copy_back(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write the parts of a concatenation into the memory of the tensors that it was made of."""
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    torch._foreach_copy_([_alias(tensor, (tensor.numel(),)) for tensor in tensors], list(parts))
