"""Triton kernels over the matrices of a class: equal shape, map and types, one launch for all of them.

A program owns a tile of one matrix and walks down its rows a few at a time. Sums over rows and columns go to buffers
of partial sums, one a tile, that :mod:`symexplin.kernels.triton_finish` adds. Pointers come from tables on
the device (see :mod:`symexplin.kernels.triton_tables`), since there are more tensors than a kernel takes arguments.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202, SIM300

import triton
import triton.language as tl

from symexplin.kernels.triton_adam import adam, add_marks, load_factor, pointer, rated, rates_of, tally, written
from symexplin.kernels.triton_map import (
    bits_of,
    curve,
    difference,
    effective,
    factors,
    linear_path,
    raw_gradient,
)

__all__ = ["effective_one", "pull_all", "pull_one", "update_all"]


@triton.jit
def _column_factors(p1, across, p2, columns, d1, SPEC: tl.constexpr):
    return factors(1.0, 1.0, 1.0, p1 + columns * SPEC.step, across, p2, columns < d1, 1, SPEC)


@triton.jit
def _row_factors(p0, p2, rows, d0, c, lam, kappa, SPEC: tl.constexpr):
    return factors(c, lam, kappa, p0 + rows.to(tl.int64) * SPEC.width, 1, p2, rows < d0, 0, SPEC)


@triton.jit
def _pull(raw, grad, p0, p1, p2, raw_out, row_sums, column_sums, square, tile, d0, d1, across, c, lam, kappa, tiles1,
          SPEC: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
          COLUMNS: tl.constexpr):  # fmt: skip
    """Sum up one tile, for up to three roles (c, lambda and kappa).

    Sums of rows lie four apart: then each warp stores those of its rows itself. Sums of columns lie by role.
    """
    at0, at1 = tile // tiles1, tile % tiles1
    columns = at1 * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    c1, lam1, kappa1 = _column_factors(p1, across, p2, columns, d1, SPEC)
    down_c = tl.zeros((ROWS, COLUMNS), tl.float32)
    down_l = tl.zeros((ROWS, COLUMNS), tl.float32)
    down_m = tl.zeros((ROWS, COLUMNS), tl.float32)
    squares = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, TILE, ROWS):
        rows = at0 * TILE + start + tl.arange(0, ROWS)[:, None]
        inside = (rows < d0) & (columns < d1)
        place = rows.to(tl.int64) * d1 + columns
        w = tl.load(raw + place, mask=inside, other=0.0)
        g = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        c0, lam0, kappa0 = _row_factors(p0, p2, rows, d0, c, lam, kappa, SPEC)
        whole_c, whole_lam, whole_kappa = c0 * c1, lam0 * lam1, kappa0 * kappa1
        signed, slope, x = curve(w, whole_kappa, SPEC)
        along, pulled = raw_gradient(g, w, whole_c, whole_lam, whole_kappa, slope, SPEC)
        if raw_out is not None:
            tl.store(raw_out + place, pulled, mask=inside)
        if square is not None:
            squares = tl.fma(pulled, pulled, squares)
        sums = row_sums + (at1.to(tl.int64) * d0 + rows) * 4
        if SPEC.e[0] >= 0 or SPEC.e[2] >= 0 or SPEC.n[0] >= 0 or SPEC.n[2] >= 0:
            tl.store(sums, tl.sum(g * signed * c1, axis=1, keep_dims=True), mask=rows < d0)
        if SPEC.e[1] >= 0 or SPEC.n[1] >= 0:
            down_c = tl.fma(g * signed, c0, down_c)
        if SPEC.l[0] >= 0 or SPEC.l[2] >= 0:
            by_l = g * linear_path(w, SPEC) * lam1
            tl.store(sums + 1, tl.sum(by_l, axis=1, keep_dims=True), mask=rows < d0)
        if SPEC.l[1] >= 0:
            down_l = tl.fma(g * linear_path(w, SPEC), lam0, down_l)
        if SPEC.m[0] >= 0 or SPEC.m[1] >= 0 or SPEC.m[2] >= 0:
            # By kappa where d is a number, by ln(kappa) where it is kappa: no division in the loop.
            if SPEC.normalize:
                by_m = whole_c * difference(x, signed, slope, w, SPEC)
                if SPEC.linear != "nothing":
                    by_m = by_m - whole_lam * linear_path(w, SPEC)
                by_m = g * by_m
            else:
                by_m = along * w
            if SPEC.m[0] >= 0 or SPEC.m[2] >= 0:
                across_m = by_m
                if not SPEC.normalize:
                    across_m = by_m * kappa1
                tl.store(sums + 2, tl.sum(across_m, axis=1, keep_dims=True), mask=rows < d0)
            if SPEC.m[1] >= 0:
                if SPEC.normalize:
                    down_m += by_m
                else:
                    down_m = tl.fma(by_m, kappa0, down_m)
    sums = column_sums + at0.to(tl.int64) * 3 * d1 + columns
    if SPEC.e[1] >= 0 or SPEC.n[1] >= 0:
        tl.store(sums, tl.sum(down_c, axis=0, keep_dims=True), mask=columns < d1)
    if SPEC.l[1] >= 0:
        tl.store(sums + d1, tl.sum(down_l, axis=0, keep_dims=True), mask=columns < d1)
    if SPEC.m[1] >= 0:
        tl.store(sums + 2 * d1, tl.sum(down_m, axis=0, keep_dims=True), mask=columns < d1)
    if square is not None:
        tl.store(square + tile, tl.sum(tl.sum(squares, axis=1), axis=0))


@triton.jit(do_not_specialize=["first", "square", "d0", "across", "tiles0", "tiles1"])
def pull_all(table, grads, row_sums, column_sums, squares, first, square, d0, d1, across, c, lam, kappa, tiles0, tiles1,
             GRAD: tl.constexpr, SPEC: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
             COLUMNS: tl.constexpr):  # fmt: skip
    """Sum up every tile of the matrices from line `first` of the table on; `square`: where squares go."""
    part = tl.program_id(0) // (tiles0 * tiles1)
    tile = tl.program_id(0) % (tiles0 * tiles1)
    at = table + (first + part) * 18
    raw = pointer(at, tl.float32, ALIGNED)
    grad = pointer(grads + first + part, GRAD, ALIGNED)
    p0, p1, p2 = (pointer(at + 4, tl.float32, False), pointer(at + 5, tl.float32, False),
                  pointer(at + 6, tl.float32, False))  # fmt: skip
    row_sums += part.to(tl.int64) * 4 * tiles1 * d0
    column_sums += part.to(tl.int64) * 3 * tiles0 * d1
    squares += square + part * tiles0 * tiles1
    _pull(raw, grad, p0, p1, p2, None, row_sums, column_sums, squares, tile, d0, d1, across, c, lam, kappa, tiles1,
          SPEC, TILE, ROWS, COLUMNS)  # fmt: skip


@triton.jit(do_not_specialize=["d0", "across", "tiles1"])
def pull_one(raw, grad, p0, p1, p2, raw_out, row_sums, column_sums, d0, d1, across, c, lam, kappa, tiles1,
             SPEC: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Sum up every tile of one matrix and write its raw gradient."""
    _pull(raw, grad, p0, p1, p2, raw_out, row_sums, column_sums, None, tl.program_id(0), d0, d1, across, c, lam, kappa,
          tiles1, SPEC, TILE, ROWS, COLUMNS)  # fmt: skip


@triton.jit(do_not_specialize=["d0", "across", "tiles1"])
def effective_one(raw, p0, p1, p2, out, d0, d1, across, c, lam, kappa, tiles1, DTYPE: tl.constexpr, SPEC: tl.constexpr,
                  TILE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Write the bits of the effective weight of one matrix."""
    at0, at1 = tl.program_id(0) // tiles1, tl.program_id(0) % tiles1
    columns = at1 * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    c1, lam1, kappa1 = _column_factors(p1, across, p2, columns, d1, SPEC)
    for start in range(0, TILE, ROWS):
        rows = at0 * TILE + start + tl.arange(0, ROWS)[:, None]
        inside = (rows < d0) & (columns < d1)
        place = rows.to(tl.int64) * d1 + columns
        w = tl.load(raw + place, mask=inside, other=0.0)
        c0, lam0, kappa0 = _row_factors(p0, p2, rows, d0, c, lam, kappa, SPEC)
        value = effective(w, c0 * c1, lam0 * lam1, kappa0 * kappa1, SPEC)
        tl.store(out + place, bits_of(value, DTYPE), mask=inside)


@triton.jit(do_not_specialize=["first", "d0", "across", "tiles0", "tiles1"])
def update_all(table, grads, states, rates, factor, marks, first, d0, d1, across, c, lam, kappa, tiles0, tiles1,
               DTYPE: tl.constexpr, SPEC: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
               COLUMNS: tl.constexpr):  # fmt: skip
    """Apply AdamW to raw weights, their gradients taken at the old panels, and write the weights of the new ones."""
    part = tl.program_id(0) // (tiles0 * tiles1)
    tile = tl.program_id(0) % (tiles0 * tiles1)
    at0, at1 = tile // tiles1, tile % tiles1
    at = table + (first + part) * 18
    raw, weight = pointer(at, tl.float32, ALIGNED), written(at + 1, DTYPE, ALIGNED)
    exp_avg, exp_avg_sq = pointer(at + 2, tl.float32, ALIGNED), pointer(at + 3, tl.float32, ALIGNED)
    grad = pointer(grads + first + part, DTYPE, ALIGNED)
    p0, p1, p2 = (pointer(at + 4, tl.float32, False), pointer(at + 5, tl.float32, False),
                  pointer(at + 6, tl.float32, False))  # fmt: skip
    o0, o1, o2 = (pointer(at + 10, tl.float32, False), pointer(at + 11, tl.float32, False),
                  pointer(at + 12, tl.float32, False))  # fmt: skip
    rate, writes = rated(rates, states + (first + part) * 2)
    less1, beta2, less2, eps, correction, root = rates_of(rate, 6)
    lr = tl.load(rate)
    shrink, step, by = 1.0 - lr * tl.load(rate + 1), lr / correction, load_factor(factor)
    columns = at1 * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    c1, lam1, kappa1 = _column_factors(p1, across, p2, columns, d1, SPEC)
    old_c1, old_lam1, old_kappa1 = _column_factors(o1, across, o2, columns, d1, SPEC)
    if DTYPE == tl.float32:
        down, weighted = tl.zeros((ROWS, COLUMNS), tl.int64), tl.zeros((ROWS, COLUMNS), tl.int64)
    else:
        down, weighted = tl.zeros((ROWS, COLUMNS), tl.int32), tl.zeros((ROWS, COLUMNS), tl.int32)
    for start in range(0, TILE, ROWS):
        local = start + tl.arange(0, ROWS)[:, None]
        rows = at0 * TILE + local
        inside = (rows < d0) & (columns < d1)
        place = rows.to(tl.int64) * d1 + columns
        w = tl.load(raw + place, mask=inside, other=0.0)
        g = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        c0, lam0, kappa0 = _row_factors(o0, o2, rows, d0, c, lam, kappa, SPEC)
        old_kappa = kappa0 * old_kappa1
        _, slope, _ = curve(w, old_kappa, SPEC)
        _, pulled = raw_gradient(g, w, c0 * old_c1, lam0 * old_lam1, old_kappa, slope, SPEC)
        w = adam(raw + place, exp_avg + place, exp_avg_sq + place, w, pulled * by, inside, shrink,
                 step, less1, beta2, less2, eps, root)  # fmt: skip
        c0, lam0, kappa0 = _row_factors(p0, p2, rows, d0, c, lam, kappa, SPEC)
        bits = bits_of(effective(w, c0 * c1, lam0 * lam1, kappa0 * kappa1, SPEC), DTYPE)
        tl.store(weight + place, bits, mask=inside & (inside.to(tl.int32) == writes))
        kept = tl.load(weight + place, mask=inside & (inside.to(tl.int32) != writes), other=0)
        down, weighted = tally(tl.where(writes != 0, tl.where(inside, bits, 0), kept), local, down, weighted)
    add_marks(marks + tl.load(at + 13) * 2, down, weighted, at0 * TILE, at1 * COLUMNS, 1, 0, COLUMNS)
