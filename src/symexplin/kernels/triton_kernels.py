"""Triton kernels for the map, its pullback and AdamW (symexplin.transform is the definition).

Each launch covers all matrices of one shape. A program computes a tile of one matrix, a few rows at a time. There are
more tensors than kernel arguments, so a table on the device has a line of addresses per matrix.

The compiler must not contract operations (`enable_fp_fusion=False`, explicit fma). Therefore every launch writes the
same bits for a raw weight.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202, SIM108, SIM300

import torch
import triton
import triton.language as tl

__all__ = ["DTYPES", "pull", "update"]

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

# A line of the table: six addresses, the offsets of the matrix's factors, and its index among all matrices.
_RAW, _WEIGHT, _EXP_AVG, _EXP_AVG_SQ, _GRAD, _OUT, _ROW_AT, _COLUMN_AT, _INDEX = map(tl.constexpr, range(9))
_LINE = tl.constexpr(9)

# expm1(r) = r + r^2 q(r) on |r| <= ln(2)/2 with q minimax of degree 4: error 0.3 units of rounding. Above x = 88.4,
# where 2^k would need k = 128, r goes up to ln(2): error 100 units, within the bound of 360 at x = 88.
_Q0 = tl.constexpr(0.4999999814406793)
_Q1 = tl.constexpr(0.1666654317802212)
_Q2 = tl.constexpr(0.041667201780194375)
_Q3 = tl.constexpr(0.008366580337724139)
_Q4 = tl.constexpr(0.0013882510064773348)
_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
# 1.5 * 2^23 + 127: floats near it are integers whose lowest bits are the exponent bits of 2^k.
_SHIFT = tl.constexpr(12583039.0)
_LOWEST = tl.constexpr(-86.9)  # the lowest x for which 2^k is a normal number


@triton.jit
def _grow(w, kappa):
    """Return x = kappa |w|, expm1(x) and exp(x): with x = k ln2 + r they are 2^k expm1(r) + (2^k - 1) and + 2^k."""
    x = kappa * tl.abs(w)
    y = tl.maximum(x, _LOWEST, propagate_nan=tl.PropagateNan.ALL)
    t = tl.minimum(tl.fma(y, _LOG2E, _SHIFT), _SHIFT + 127.0)
    power = (t.to(tl.int32, bitcast=True) << 23).to(tl.float32, bitcast=True)
    r = tl.fma(t - _SHIFT, -_LN2, y)
    q = tl.fma(tl.fma(tl.fma(tl.fma(r, _Q4, _Q3), r, _Q2), r, _Q1), r, _Q0)
    p = tl.fma(r * r, q, r)
    return x, tl.fma(power, p, power - 1.0), tl.fma(power, p, power)


@triton.jit
def _signed(g, w):
    """Return g sign(w)."""
    return tl.where(w < 0.0, -g, tl.where(w > 0.0, g, 0.0))


@triton.jit
def _path(w, MAGNITUDE: tl.constexpr):
    """Return the factor of lambda."""
    if MAGNITUDE:
        path = tl.abs(w)
    else:
        path = w
    return path


@triton.jit
def _weight(w, kappa, c, lam, MAGNITUDE: tl.constexpr):
    """Return the weight at w."""
    _, F, _ = _grow(w, kappa)
    return tl.fma(lam, _path(w, MAGNITUDE), c * tl.where(w < 0.0, -F, F))


@triton.jit
def _raw_gradient(grown, g, w, c_kappa, lam, MAGNITUDE: tl.constexpr):
    """Return g dw_eff/dw with `grown` = g exp(x); at w = 0 the mean of the one-sided slopes."""
    if MAGNITUDE:
        g = _signed(g, w)
    return tl.fma(grown, c_kappa, g * lam)


@triton.jit
def _difference(x, F, E):
    """Return x exp(x) - expm1(x); below |x| = 1 the sum over k >= 2 of x^k (k - 1)/k!, without cancellation."""
    near = tl.minimum(tl.maximum(x, -1.0), 1.0)
    total = tl.full(x.shape, 11.0 / 479001600.0, tl.float32)
    total = tl.fma(total, near, 10.0 / 39916800.0)
    total = tl.fma(total, near, 9.0 / 3628800.0)
    total = tl.fma(total, near, 8.0 / 362880.0)
    total = tl.fma(total, near, 7.0 / 40320.0)
    total = tl.fma(total, near, 6.0 / 5040.0)
    total = tl.fma(total, near, 5.0 / 720.0)
    total = tl.fma(total, near, 4.0 / 120.0)
    total = tl.fma(total, near, 3.0 / 24.0)
    total = tl.fma(total, near, 2.0 / 6.0)
    total = tl.fma(total, near, 1.0 / 2.0)
    return tl.where(tl.abs(x) < 1.0, total * near * near, x * E - F)


@triton.jit
def _adamw(x, g, m, v, keep, step, gain1, keep1, gain2, keep2, root, eps):
    """Return x, m and v after a step: x keep - step m/(root sqrt(v) + eps)."""
    # As in torch's lerp, start from the nearer end: with a small beta a g much smaller than m still counts.
    m = tl.where(gain1 < 0.5, tl.fma(g - m, gain1, m), tl.fma(m - g, keep1, g))
    v = tl.fma(g * gain2, g, v * keep2)
    return x * keep - m / tl.fma(tl.sqrt(v), root, eps) * step, m, v


@triton.jit
def _bits_of(value, DTYPE: tl.constexpr):
    """Return the bits of `value` rounded to DTYPE, to nearest even; NaN stays NaN."""
    if DTYPE == tl.float32:
        bits = value.to(tl.int32, bitcast=True)
    elif DTYPE == tl.float16:
        bits = value.to(tl.float16).to(tl.int16, bitcast=True)
    else:
        whole = value.to(tl.int32, bitcast=True)
        rounded = (whole + 0x7FFF + ((whole >> 16) & 1)) >> 16
        bits = tl.where(value != value, 0x7FC0, rounded).to(tl.int16)
    return bits


@triton.jit
def _pointer(place, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Read an address from the table; with ALIGNED it is a multiple of 16."""
    found = tl.load(place).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        found = tl.multiple_of(found, 16)
    return found


@triton.jit
def _tile(table, tiles0, tiles1):
    """Return this program's matrix, its line in the table, and the tile's row and column."""
    part, tile = tl.program_id(0) // (tiles0 * tiles1), tl.program_id(0) % (tiles0 * tiles1)
    return part.to(tl.int64), table + part * _LINE, tile // tiles1, tile % tiles1


@triton.jit
def _factors(axis, length, places, inside):
    """Load kappa, c, lambda and c kappa of some rows or columns."""
    axis += places
    return (
        tl.load(axis, mask=inside, other=0.0),
        tl.load(axis + length, mask=inside, other=0.0),
        tl.load(axis + 2 * length, mask=inside, other=0.0),
        tl.load(axis + 3 * length, mask=inside, other=0.0),
    )


@triton.jit
def _row_sum(terms, k, PLACE: tl.constexpr):
    """Return the sums of rows at index PLACE of four, and 0 elsewhere."""
    return tl.where(k == PLACE, tl.sum(terms, axis=1, keep_dims=True), 0.0)


@triton.jit(do_not_specialize=["table", "d0", "length0", "length1", "tiles0", "tiles1"])
def pull(table, rows, columns, row_sums, column_sums, d0, d1, length0, length1, tiles0, tiles1,
         DTYPE: tl.constexpr, MAGNITUDE: tl.constexpr, NORMALIZE: tl.constexpr, OUT: tl.constexpr,
         ALIGNED: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Compute a tile's sums (symexplin.kernels.factors.Sums); with OUT write the raw gradient too.

    Per matrix the sums are (tiles1, d0, 4) over rows, with squares last, and (tiles0, 3, d1) over columns.
    """
    part, line, at0, at1 = _tile(table, tiles0, tiles1)
    raw, grad = _pointer(line + _RAW, tl.float32, ALIGNED), _pointer(line + _GRAD, DTYPE, ALIGNED)
    out, row_at = _pointer(line + _OUT, tl.float32, ALIGNED), tl.load(line + _ROW_AT)
    row_sums += (part * tiles1 + at1) * d0 * 4
    column_sums += (part * tiles0 + at0) * d1 * 3
    j, k = at1 * COLUMNS + tl.arange(0, COLUMNS)[None, :], tl.arange(0, 4)[None, :]
    kappa1, c1, lam1, c_kappa1 = _factors(columns, length1, tl.load(line + _COLUMN_AT) + j, j < d1)
    down_c = tl.zeros((ROWS, COLUMNS), tl.float32)
    down_lam = tl.zeros((ROWS, COLUMNS), tl.float32)
    down_kappa = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, TILE, ROWS):
        i = at0 * TILE + start + tl.arange(0, ROWS)[:, None]
        inside, place = (i < d0) & (j < d1), i.to(tl.int64) * d1 + j
        w = tl.load(raw + place, mask=inside, other=0.0)
        g = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        kappa0, c0, lam0, c_kappa0 = _factors(rows, length0, row_at + i, i < d0)
        x, F, E = _grow(w, kappa0 * kappa1)
        grown, by_c, by_lam = g * E, _signed(g, w) * F, g * _path(w, MAGNITUDE)
        pulled = _raw_gradient(grown, g, w, c_kappa0 * c_kappa1, lam0 * lam1, MAGNITUDE)
        if OUT:
            tl.store(out + place, pulled, mask=inside)
        if NORMALIZE:
            by_kappa, with0, with1 = _signed(g, w) * _difference(x, F, E), c0, c1
        else:
            by_kappa, with0, with1 = grown * w, c_kappa0, c_kappa1
        down_c, down_lam = tl.fma(by_c, c0, down_c), tl.fma(by_lam, lam0, down_lam)
        down_kappa = tl.fma(by_kappa, with0, down_kappa)
        across = _row_sum(by_c * c1, k, 0) + _row_sum(by_lam * lam1, k, 1)
        across += _row_sum(by_kappa * with1, k, 2) + _row_sum(pulled * pulled, k, 3)
        tl.store(row_sums + i.to(tl.int64) * 4 + k, across, mask=i < d0)
    tl.store(column_sums + j, tl.sum(down_c, axis=0, keep_dims=True), mask=j < d1)
    tl.store(column_sums + d1 + j, tl.sum(down_lam, axis=0, keep_dims=True), mask=j < d1)
    tl.store(column_sums + 2 * d1 + j, tl.sum(down_kappa, axis=0, keep_dims=True), mask=j < d1)


@triton.jit(do_not_specialize=["table", "clip", "d0", "length0", "length1", "tiles0", "tiles1", "moved"])
def update(table, rows, columns, new_rows, new_columns, clip, keep, step, gain1, keep1, gain2, keep2, root, eps,
           d0, d1, length0, length1, tiles0, tiles1, moved,
           DTYPE: tl.constexpr, MAGNITUDE: tl.constexpr, WRITE: tl.constexpr, ALIGNED: tl.constexpr,
           TILE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Apply AdamW to a tile's raw weights and write the weights of the new factors; with WRITE only write the weights.

    Gradients are pulled back through the old factors. `moved`, d0 or 0, is the number of rows to write.
    """
    _part, line, at0, at1 = _tile(table, tiles0, tiles1)
    raw, row_at = _pointer(line + _RAW, tl.float32, ALIGNED), tl.load(line + _ROW_AT)
    BITS: tl.constexpr = tl.int32 if DTYPE == tl.float32 else tl.int16
    weight = _pointer(line + _WEIGHT, BITS, ALIGNED)
    j = at1 * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    column_at = tl.load(line + _COLUMN_AT) + j
    new_kappa1, new_c1, new_lam1, _unused = _factors(new_columns, length1, column_at, j < d1)
    if not WRITE:
        grad = _pointer(line + _GRAD, DTYPE, ALIGNED)
        exp_avg = _pointer(line + _EXP_AVG, tl.float32, ALIGNED)
        exp_avg_sq = _pointer(line + _EXP_AVG_SQ, tl.float32, ALIGNED)
        kappa1, _unused, lam1, c_kappa1 = _factors(columns, length1, column_at, j < d1)
        by = 1.0
        if clip is not None:
            by = tl.load(clip)
    for start in range(0, TILE, ROWS):
        i = at0 * TILE + start + tl.arange(0, ROWS)[:, None]
        inside, moves, place = (i < d0) & (j < d1), (i < moved) & (j < d1), i.to(tl.int64) * d1 + j
        w = tl.load(raw + place, mask=inside, other=0.0)
        if not WRITE:
            g = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
            m = tl.load(exp_avg + place, mask=inside, other=0.0)
            v = tl.load(exp_avg_sq + place, mask=inside, other=0.0)
            kappa0, _, lam0, c_kappa0 = _factors(rows, length0, row_at + i, i < d0)
            _, _, E = _grow(w, kappa0 * kappa1)
            pulled = _raw_gradient(g * E, g, w, c_kappa0 * c_kappa1, lam0 * lam1, MAGNITUDE)
            w, m, v = _adamw(w, pulled * by, m, v, keep, step, gain1, keep1, gain2, keep2, root, eps)
            tl.store(exp_avg + place, m, mask=inside)
            tl.store(exp_avg_sq + place, v, mask=inside)
            tl.store(raw + place, w, mask=moves)
        kappa0, c0, lam0, _ = _factors(new_rows, length0, row_at + i, i < d0)
        value = _weight(w, kappa0 * new_kappa1, c0 * new_c1, lam0 * new_lam1, MAGNITUDE)
        tl.store(weight + place, _bits_of(value, DTYPE), mask=moves)
