"""What the updating kernels share: pointers from tables, AdamW of one tile, and marks of what was written."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# ruff: noqa: ANN001, ANN201, SIM108, SIM300

import triton
import triton.language as tl

__all__ = ["adam", "add_marks", "load_factor", "pointer", "rated", "rates_of", "tally", "written"]

_A = tl.constexpr(2654435761)
_B = tl.constexpr(11400714819323)


@triton.jit
def pointer(place, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Read a pointer from a table; ALIGNED: the host has seen that it is a multiple of 16."""
    found = tl.load(place).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        found = tl.multiple_of(found, 16)
    return found


@triton.jit
def written(place, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Read a pointer to the bits of a weight."""
    if DTYPE == tl.float32:
        found = pointer(place, tl.int32, ALIGNED)
    else:
        found = pointer(place, tl.int16, ALIGNED)
    return found


@triton.jit
def rated(rates, state):
    """Return a part's row of rates, and 1 where its weight is to be written, else 0."""
    row = rates + tl.load(state) * 34
    keep = tl.load(tl.load(state + 1).to(tl.pointer_type(tl.int8)))
    return row, tl.where(tl.load(row) != 0.0, tl.where(keep == 0, 1, 0), 0)


@triton.jit
def load_factor(factor):
    """Return what gradients are multiplied with."""
    if factor is None:
        by = 1.0
    else:
        by = tl.load(factor)
    return by


@triton.jit
def rates_of(row, CORRECTIONS: tl.constexpr):
    """Return what :func:`adam` needs of a row of rates but for the learning rate: read before a loop, not in it.

    CORRECTIONS: the place of 1 - beta1^t, followed by 1 - beta2^t.
    """
    correction, root = tl.load(row + CORRECTIONS), 1.0 / tl.sqrt(tl.load(row + CORRECTIONS + 1))
    return tl.load(row + 2), tl.load(row + 3), tl.load(row + 4), tl.load(row + 5), correction, root


@triton.jit
def adam(value, exp_avg, exp_avg_sq, x, g, inside, shrink, step, less1, beta2, less2, eps, root):
    """Apply AdamW to a tile x with gradient g and store it with its moments; return the new x.

    In the order of symexplin.optim.adamw, with products by 1/sqrt(1 - beta2^t) and lr/(1 - beta1^t) for quotients.
    """
    m = tl.load(exp_avg, mask=inside, other=0.0)
    v = tl.load(exp_avg_sq, mask=inside, other=0.0)
    # As torch's lerp: from the nearer end, so that a small beta loses no g that is small beside m.
    m = tl.where(less1 < 0.5, tl.fma(g - m, less1, m), tl.fma(m - g, 1.0 - less1, g))
    v = tl.fma(g * less2, g, v * beta2)
    x = x * shrink - m / tl.fma(tl.sqrt(v), root, eps) * step
    tl.store(value, x, mask=inside)
    tl.store(exp_avg, m, mask=inside)
    tl.store(exp_avg_sq, v, mask=inside)
    return x


@triton.jit
def tally(bits, local, down, weighted):
    """Add bits of a few rows to the sums over rows, plain and weighted by the row within the tile.

    Of 16-bit entries all sums over a tile of 128 x 256 fit 32 bits; those of others wrap, as marks do, in 64.
    """
    bits = bits.to(down.dtype)
    return down + bits, weighted + bits * local.to(down.dtype)


@triton.jit
def add_marks(marks, down, weighted, row, column, row_step, column_step, COLUMNS: tl.constexpr):
    """Add a tile's sums to the marks of its tensor.

    The entry at local row a and column b is at row + row_step a and column + column_step a + b of the tensor; one of
    the steps is 0. Integers: in whatever order programs add, the sums are the same.
    """
    columns = tl.arange(0, COLUMNS)[None, :].to(tl.int64)
    of_row = 2 * tl.cast(row, tl.int64) + 1
    weighted = weighted.to(tl.int64)
    by_row = tl.sum(tl.sum(weighted, axis=1), axis=0)
    sums = down.to(tl.int64) * of_row + weighted * (2 * row_step)
    first = tl.sum(tl.sum(sums, axis=1), axis=0)
    by_column = tl.sum(tl.sum(sums * columns, axis=1), axis=0)
    second = first * (2 * tl.cast(column, tl.int64) + 1) + 2 * (column_step * of_row * by_row + by_column)
    tl.atomic_add(marks, first * _A, sem="relaxed")
    tl.atomic_add(marks + 1, second * _B, sem="relaxed")
