"""The readable formulas behind the interface of kernels: kernels are compared with them, and replaced where wrong."""

from collections.abc import Sequence

import torch
from torch import Tensor

from symexplin.kernels.factors import Factors, Sums, Terms
from symexplin.kernels.interface import Matrices, Rates
from symexplin.transform import Form, Scales, forward, pullback

__all__ = ["Formulas"]


class Formulas:
    """A backend (:class:`symexplin.kernels.interface.Backend`) in torch and float64, for tensors of any dtype."""

    name = "readable formulas"

    def covers(self, raw: Tensor, weight: Tensor) -> bool:
        """Whether tensors of these dtypes can be computed."""
        return raw.is_floating_point() and weight.is_floating_point()

    @torch.no_grad()
    def write(self, terms: Terms, matrices: Matrices, factors: Factors) -> None:
        """Write the weights of the raw weights."""
        for k, (raw, weight) in enumerate(zip(matrices.raw, matrices.weight, strict=True)):
            rows, columns = _factors_of(matrices, factors, k)
            w = raw.double().view(matrices.shapes[k])
            weight.copy_(forward(_form(terms), w, _scales(rows * columns)).view_as(weight))

    @torch.no_grad()
    def pull(
        self,
        terms: Terms,
        matrices: Matrices,
        factors: Factors,
        grads: Sequence[Tensor],
        out: Sequence[Tensor] | None = None,
    ) -> Sums:
        """Return the sums of the pullback of `grads`; write the raw gradients to `out`, where it is given."""
        by_rows, by_columns = ([axis.new_empty(3, 0, dtype=torch.float64)] for axis in factors)
        squares = factors.rows.new_empty(len(grads), dtype=torch.float64)
        for k, (raw, grad) in enumerate(zip(matrices.raw, grads, strict=True)):
            rows, columns = _factors_of(matrices, factors, k)
            w, g = (tensor.double().view(matrices.shapes[k]) for tensor in (raw, grad))
            pulled = _raw_gradient(terms, w, g, rows * columns)
            squares[k] = pulled.square().sum()
            if out is not None:
                out[k].copy_(pulled.view_as(out[k]))
            third = 1 if terms.normalize else 3  # the factor that belongs to the third sum: c or c kappa
            entries = _entries(terms, w, g, rows[0] * columns[0])
            for found, others, dim in ((by_rows, columns, 1), (by_columns, rows, 0)):
                sums = [(x * others[f]).sum(dim) for x, f in zip(entries, (1, 2, third), strict=True)]
                found.append(torch.stack(sums))
        return Sums(torch.cat(by_rows, 1), torch.cat(by_columns, 1), squares)

    @torch.no_grad()
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
        for k, (shape, grad) in enumerate(zip(matrices.shapes, grads, strict=True)):
            state = (matrices.raw[k], matrices.exp_avg[k], matrices.exp_avg_sq[k])
            w, m, v, g = (tensor.double().view(shape) for tensor in (*state, grad))
            rows, columns = _factors_of(matrices, old, k)
            g = _raw_gradient(terms, w, g, rows * columns) * (1.0 if clip is None else clip.double())
            m = m + (g - m) * (1.0 - rates.beta1)
            v = v * rates.beta2 + g * g * (1.0 - rates.beta2)
            step = m / ((v / rates.corrections[1]).sqrt() + rates.eps) * (rates.lr / rates.corrections[0])
            w = w * (1.0 - rates.lr * rates.decay) - step
            for tensor, value in zip(state[0 if rates.lr else 1 :], (w, m, v)[0 if rates.lr else 1 :], strict=True):
                tensor.copy_(value.view_as(tensor))
        if rates.lr:
            self.write(terms, matrices, new)

    def invert(self, *_: object) -> bool:
        """Return False: :mod:`symexplin.inversion` has the inverse."""
        return False


def _factors_of(matrices: Matrices, factors: Factors, k: int) -> tuple[Tensor, Tensor]:
    """Return kappa, c, lambda and c kappa of one matrix along its rows, (4, d0, 1), and columns, (4, 1, d1)."""
    (row, column), (d0, d1) = matrices.offsets[k], matrices.shapes[k]
    rows, columns = factors.rows[:, row : row + d0, None], factors.columns[:, None, column : column + d1]
    return rows.double(), columns.double()


def _form(terms: Terms) -> Form:
    """Return a form whose d is 1; lambda has its sign."""
    return Form("mismatch" if terms.magnitude else "congruent", 1.0)


def _scales(factors: Tensor) -> Scales:
    kappa, c, lam, _ = factors
    return Scales(e=c, l=lam, kappa=kappa)


def _raw_gradient(terms: Terms, w: Tensor, g: Tensor, factors: Tensor) -> Tensor:
    return pullback(_form(terms), w, _scales(factors), g, frozenset())["w"]


def _entries(terms: Terms, w: Tensor, g: Tensor, kappa: Tensor) -> list[Tensor]:
    """Return what the three sums add up, without factors: derivatives by c, lambda and kappa at c = lambda = 1."""
    found = pullback(_form(terms), w, Scales(kappa=kappa), g, frozenset({"e", "l", "kappa"}))
    if terms.normalize:  # with e = d = kappa it is (x exp(x) - expm1(x))/kappa
        form = _form(terms)._replace(normalize=True)
        by_kappa = pullback(form, w, Scales(e=kappa, l=0.0, kappa=kappa), g, frozenset({"kappa"}))
        found["kappa"] = kappa * by_kappa["kappa"]
    return [found["e"], found["l"], found["kappa"]]
