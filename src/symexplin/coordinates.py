"""The map of one curved tensor: its expanded scales, its effective weight, its inverse and its gradients.

Kernels compute the map where they cover it. Otherwise the readable formulas do, on a CPU in blocks of rows.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from symexplin.inversion import invert
from symexplin.kernels import Backend, FactoredMap, Matrices, Panels, Terms, backend_for, is_memory, terms_of
from symexplin.layout import PANELS, Layout, Slot
from symexplin.transform import Scales, Value, compute_dtype, forward, pullback

__all__ = ["Coordinates"]

# Entries per block: the formulas' temporaries (about ten, in float32) stay in a core's cache.
_BLOCK = 2**15


class Coordinates(NamedTuple):
    """A curved tensor and its map: a view of the raw weight and panels that owns no storage.

    All tensors may have one leading batch dimension for several tensors of one layout. A tensor that is not a matrix or
    vector, such as a convolution's weight, is computed in the form of its matrices (:mod:`symexplin.axes`).

    >>> from symexplin.config import SELConfig
    >>> layout = Layout((3, 2), "oi", SELConfig(beta=7.5))
    >>> panels = layout.start_panels(torch.float64, torch.device("cpu"), position=0)
    >>> coordinates = Coordinates(layout, torch.zeros(3, 2, dtype=torch.float64), **panels)
    >>> w = torch.tensor([[0.1, -0.2], [0.0, 1e-9], [2.0, -3.0]], dtype=torch.float64)
    >>> torch.allclose(coordinates._replace(raw=coordinates.matched(w)).effective(), w, rtol=1e-14, atol=0)
    True
    """

    layout: Layout
    raw: Tensor
    panel0: Tensor
    panel1: Tensor
    scalar: Tensor
    full: Tensor

    def scales(self) -> Scales:
        """Expand the panels to the scales of the map, which broadcast against the raw weight."""
        layout = self.layout
        if layout.matrix is not layout:
            return Scales(*(self._spread(value) for value in self.matrices().scales()))
        kappa: Value = layout.beta
        if "m" in layout.config.roles:
            kappa = self._value("m") if layout.is_absorbed("m") else layout.beta * self._value("m")  # paper, Eq. 4
        values = {role: self._value(role) for role in ("e", "l", "n", "s") if role in layout.config.roles}
        delta = self._value("delta") if layout.by_role("delta") else None
        return Scales(kappa=kappa, delta=delta if isinstance(delta, Tensor) else None, **values)

    def matrices(self) -> "Coordinates":
        """Return the tensor's matrices with their map; a stack's have a leading dimension."""
        layout, axes = self.layout, self.layout.axes
        if layout.matrix is layout:
            return self
        panels = (axes.matrix_panel(panel, getattr(self, panel)) for panel in PANELS)
        return Coordinates(layout.matrix, axes.matrices(self.raw), *panels)

    def _spread(self, value: Any) -> Any:
        """Return a scale of the matrices with the shape of the tensor."""
        if not isinstance(value, Tensor):
            return value
        shape = (*self.matrices().raw.shape[: -len(self.layout.matrix.shape)], *self.layout.matrix.shape)
        return self.layout.axes.tensor(value.expand(shape), self.raw.shape)

    def effective(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the effective weight (paper, Eq. 7) in `dtype`, by default that of the raw weight."""
        dtype = dtype or self.raw.dtype
        if self.layout.matrix is not self.layout:
            return self.layout.axes.tensor(self.matrices().effective(dtype), self.raw.shape)
        if self._is_traced():
            value = forward(self.layout.form, self.raw, self.scales())
            # torch 2.11 compiles a Function whose forward ends with a `to` that changes nothing to gradients of zero.
            return value if value.dtype == dtype else value.to(dtype)
        value = torch.empty_like(self.raw, dtype=dtype)
        if self._is_large_stack():
            for one, of_one in zip(self._unbound(), value.unbind(), strict=True):
                of_one.copy_(one.effective(dtype))
            return value
        if found := self._kernels(value):
            backend, terms, curve = found
            backend.write(terms, Matrices([self.raw], [value]), curve.factors())
            return value
        for rows, block in self._blocks():
            value[rows] = forward(block.layout.form, block.raw, block.scales())
        return value

    def _is_traced(self) -> bool:
        """Whether torch.compile or autograd records operations."""
        recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self[1:])
        return recorded or torch.compiler.is_compiling()

    def _is_large_stack(self) -> bool:
        """Whether the matrices have a leading dimension and are too large for a common computation."""
        return self.raw.dim() > len(self.layout.shape) and self.raw[:1].numel() > _BLOCK // 2

    def _unbound(self) -> list["Coordinates"]:
        """Return the matrices of a stack."""
        return [Coordinates(self.layout, *p) for p in zip(*(t.unbind() for t in self[1:]), strict=True)]

    def _kernels(self, weight: Tensor) -> tuple[Backend, Terms, FactoredMap] | None:
        """Return the kernels for this map between the raw weight and `weight`, or None."""
        terms = terms_of(self.layout)
        backend = None if terms is None else backend_for(self.raw.device)
        if terms is None or backend is None or not backend.covers(terms, self.raw, weight) or not self._is_sound():
            return None
        panels = Panels(self.panel0, self.panel1, self.scalar[None], sizes=[self.layout.shape[0]])
        return backend, terms, FactoredMap(terms, panels)

    def _is_sound(self) -> bool:
        """Whether dtypes and shapes are those of the layout, which kernels assume; the formulas broadcast."""
        shapes = [self.layout.shape, *(self.layout.panel_shape(panel) for panel in PANELS)]
        return all(
            (tensor.dtype, tuple(tensor.shape)) == (self.raw.dtype, shape)
            for tensor, shape in zip(self[1:], shapes, strict=True)
        )

    def _blocks(self) -> Iterator[tuple[slice, "Coordinates"]]:
        """Yield blocks of rows whose temporaries stay in the cache."""
        one = self.raw.dim() == len(self.layout.shape) == 2
        if not one or not is_memory(self.raw) or self.raw.device.type != "cpu":
            yield slice(None), self
            return
        height, width = self.raw.shape
        step = max(1, _BLOCK // max(width, 1))
        for start in range(0, height, step):
            rows = slice(start, min(start + step, height))
            layout = _rows_of(self.layout, rows.stop - start)
            parts = (self.raw[rows], self.panel0[rows], self.panel1, self.scalar, self.full[rows])
            yield rows, Coordinates(layout, *parts)

    def matched(self, w: Tensor, where: Tensor | None = None) -> Tensor:
        """Return the raw weight that this map, with its present scales, takes to `w`.

        With a mask `where`, only its entries are inverted. The others keep the present raw weight.

        Raises:
            ValueError: an entry to invert is not finite or has no inverse.
        """
        if self.layout.matrix is not self.layout:
            axes = self.layout.axes
            masked = None if where is None else axes.matrices(where)
            return axes.tensor(self.matrices().matched(axes.matrices(w), masked), w.shape)
        if self._is_large_stack() and w.shape == self.raw.shape:
            masks: Iterable[Any] = itertools.repeat(None, len(w)) if where is None else where.unbind()
            parts = zip(self._unbound(), w.unbind(), masks, strict=True)
            return torch.stack([one.matched(of_one, mask) for one, of_one, mask in parts])
        if where is not None:
            return self._matched(w, where)
        raw = torch.empty_like(self.raw, dtype=compute_dtype(w))
        if (found := self._replace(raw=raw)._kernels(w)) and w.shape == raw.shape:
            backend, terms, curve = found
            if backend.invert(terms, Matrices([raw], [w]), curve.factors()):
                return raw
        with contextlib.suppress(ValueError):
            for rows, block in self._blocks():
                raw[rows] = block._matched(w[rows])
            return raw
        return self._matched(w)  # raises again, with the count over all rows

    def _matched(self, w: Tensor, where: Tensor | None = None) -> Tensor:
        scales = self.scales()
        if scales.delta is not None:
            w = w.to(compute_dtype(w)) - scales.delta
        scales = scales._replace(delta=None)
        if where is None:
            return invert(self.layout.form, w, scales)
        chosen = (v.expand(w.shape)[where] if isinstance(v, Tensor) else v for v in scales)
        raw = self.raw.clone()
        raw[where] = invert(self.layout.form, w[where], Scales(*chosen)).to(raw.dtype)  # type: ignore[arg-type]
        return raw

    def pullback(self, g: Tensor) -> "Coordinates":
        """Return the gradients by raw weight and panels, as Coordinates, for a gradient `g` of the weight."""
        if self.layout.matrix is not self.layout:
            axes = self.layout.axes
            pulled = self.matrices().pullback(axes.matrices(g))
            panels = (axes.panel(p, getattr(pulled, p), getattr(self, p).shape) for p in PANELS)
            return Coordinates(self.layout, axes.tensor(pulled.raw, self.raw.shape), *panels)
        if self._is_traced():
            return self._pullback(g.to(self.raw.dtype))
        if self._is_large_stack():
            each = [one.pullback(of_one)[1:] for one, of_one in zip(self._unbound(), g.unbind(), strict=True)]
            return Coordinates(self.layout, *map(torch.stack, zip(*each, strict=True)))
        g = g.contiguous()
        if g.shape == self.raw.shape and not g._is_zerotensor() and (found := self._kernels(g)):
            backend, terms, curve = found
            raw = torch.empty_like(self.raw)
            sums = backend.pull(terms, Matrices([self.raw], [g]), curve.factors(), [g], out=[raw])
            panel0, panel1, scalar = curve.gradients(sums)
            return Coordinates(self.layout, raw, panel0, panel1, scalar[0], torch.empty_like(self.full))
        total = Coordinates(self.layout, *(torch.zeros_like(part) for part in self[1:]))
        for rows, block in self._blocks():
            pulled = block._pullback(g[rows].to(self.raw.dtype))
            total.raw[rows], total.panel0[rows], total.full[rows] = pulled.raw, pulled.panel0, pulled.full
            total.panel1.add_(pulled.panel1)
            total.scalar.add_(pulled.scalar)
        return total

    def slope(self) -> Tensor:
        """Return d w_eff / d w at every raw weight."""
        return self.pullback(torch.ones_like(self.raw)).raw

    def _pullback(self, g: Tensor) -> "Coordinates":
        """Pull back through the readable formulas."""
        layout, scales = self.layout, self.scales()
        wanted = frozenset("kappa" if slot.role == "m" else slot.role for slot in layout.slots)
        pulled = pullback(layout.form, self.raw, scales, g, wanted)
        if "kappa" in pulled:
            pulled["m"] = pulled.pop("kappa") * (scales.kappa if layout.is_log("m") else layout.beta)
        for role in ("e", "l"):
            if role in pulled and layout.is_log(role):
                pulled[role] = pulled[role] * getattr(scales, role)
        parts: dict[str, list[Tensor]] = {panel: [] for panel in PANELS}
        for slot in layout.slots:
            parts[slot.panel].append(self._contract(slot, pulled[slot.role]))
        packed = (
            torch.cat(parts[p], -2 if p == "panel1" else -1) if parts[p] else torch.zeros_like(getattr(self, p))
            for p in PANELS
        )
        return Coordinates(layout, pulled["w"], *packed)

    def _factors(self, role: str) -> list[Tensor]:
        """Return the learned factors of a role, shaped to broadcast against the raw weight."""
        found = []
        for slot in self.layout.by_role(role):
            value = self.layout.view(slot, getattr(self, slot.panel))
            found.append(value[(..., *[None] * len(self.layout.shape))] if slot.panel == "scalar" else value)
        return found

    def _value(self, role: str) -> Value:
        """Return a scale, or kappa for the absorbed curvature."""
        pattern, start, factors = self.layout.pattern(role), self.layout.first(role), self._factors(role)
        if not self.layout.is_log(role):
            return _combine(pattern, start, factors)
        if pattern == "lora":
            return start * torch.exp(_product(*factors))
        # exp(a) exp(b), not exp(a + b): avoids the rounding of a sum inside an exponent.
        return _combine("row_col_mult", start, [torch.exp(f) for f in factors])

    def _contract(self, slot: Slot, g: Tensor) -> Tensor:
        """Reduce a full-size cotangent of the slot's role to the slot's shape."""
        dims = len(self.layout.shape)
        if slot.panel == "full":
            return g[..., None]
        if slot.panel == "scalar":
            return g.flatten(-dims).sum(-1, keepdim=True)
        if dims == 1:
            return g[..., None]
        pattern, along = self.layout.pattern(slot.role), 1 if slot.panel == "panel0" else 0
        if pattern in ("row_col_mult", "lora"):
            other = self._factors(slot.role)[along]
            if pattern == "lora":
                return _product(g, other.mT) if along == 1 else _product(other.mT, g)
            g = g * other
        return g.sum(dim=along - 2, keepdim=True)


@functools.lru_cache(maxsize=1024)
def _rows_of(layout: Layout, height: int) -> Layout:
    return dataclasses.replace(layout, shape=(height, *layout.shape[1:]))


def _combine(pattern: str, start: float, factors: list[Tensor]) -> Value:
    """Return the value of a scale from its factors, the one along dimension 0 first."""
    if not factors:
        return start
    if len(factors) == 1:
        return factors[0]
    if pattern == "lora":
        return start + _product(*factors)
    return factors[0] + factors[1] if pattern == "row_col_add" else factors[0] * factors[1]


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return the matrix product in the dtype of its factors, also under autocast."""
    with torch.autocast(a.device.type, enabled=False):
        return a @ b
