"""Triton kernels over the matrices of a class: equal shape, map and types, one launch for all of them.

A program owns a tile of one matrix and walks down its rows a few at a time. Sums over rows and columns go to buffers
of partial sums, one a tile, that `finish` adds in a fixed order: runs repeat bit for bit. Pointers come from tables on
the device (see :mod:`symexplin.kernels.triton_tables`), since there are more tensors than a kernel takes arguments.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped"
# ruff: noqa: ANN001, ANN201, ANN202, SIM102, SIM300

import triton
import triton.language as tl

from symexplin.kernels.triton_adam import adam, add_marks, load_factor, pointer, rated, tally, written
from symexplin.kernels.triton_map import (
    bits_of,
    c_factor,
    curve,
    difference,
    effective,
    factors,
    kappa_factor,
    lam_factor,
    linear_path,
    raw_gradient,
)

__all__ = ["effective_one", "finish_all", "finish_one", "pull_all", "pull_one", "update_all"]


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


@triton.jit
def pull_all(table, grads, row_sums, column_sums, squares, first, d0, d1, across, c, lam, kappa, tiles0, tiles1,
             GRAD: tl.constexpr, SPEC: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
             COLUMNS: tl.constexpr):  # fmt: skip
    """Sum up every tile of the matrices from line `first` of the table on."""
    part = tl.program_id(0) // (tiles0 * tiles1)
    tile = tl.program_id(0) % (tiles0 * tiles1)
    at = table + (first + part) * 18
    raw = pointer(at, tl.float32, ALIGNED)
    grad = pointer(grads + first + part, GRAD, ALIGNED)
    p0, p1, p2 = (pointer(at + 4, tl.float32, False), pointer(at + 5, tl.float32, False),
                  pointer(at + 6, tl.float32, False))  # fmt: skip
    row_sums += part.to(tl.int64) * 4 * tiles1 * d0
    column_sums += part.to(tl.int64) * 3 * tiles0 * d1
    squares += part * tiles0 * tiles1
    _pull(raw, grad, p0, p1, p2, None, row_sums, column_sums, squares, tile, d0, d1, across, c, lam, kappa, tiles1,
          SPEC, TILE, ROWS, COLUMNS)  # fmt: skip


@triton.jit
def pull_one(raw, grad, p0, p1, p2, raw_out, row_sums, column_sums, d0, d1, across, c, lam, kappa, tiles0, tiles1,
             SPEC: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Sum up every tile of one matrix and write its raw gradient."""
    _pull(raw, grad, p0, p1, p2, raw_out, row_sums, column_sums, None, tl.program_id(0), d0, d1, across, c, lam, kappa,
          tiles1, SPEC, TILE, ROWS, COLUMNS)  # fmt: skip


@triton.jit
def _gather(sums, tiles, length, places, inside, AXIS: tl.constexpr, ROLE: tl.constexpr):
    """Add the partial sums of all tiles, first to last."""
    if AXIS == 0:
        sums += places * 4 + ROLE
        length *= 4
    else:
        sums += places + ROLE * length
        length *= 3
    total = tl.zeros(places.shape, tl.float32)
    tile = tl.full((), 0, tl.int32)
    while tile < tiles:
        total += tl.load(sums + tile.to(tl.int64) * length, mask=inside, other=0.0)
        tile += 1
    return total


@triton.jit
def _finish_axis(p, g, p2, sums, tiles, length, block, stride, c, lam, kappa, AXIS: tl.constexpr,
                 STEP: tl.constexpr, SPEC: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Write the gradients of all factors along an axis, for one block of places."""
    places = block * BLOCK + tl.arange(0, BLOCK)
    inside = places < length
    p += places.to(tl.int64) * STEP
    g += places.to(tl.int64) * STEP
    whole = kappa_factor(kappa, p, stride, p2, inside, AXIS, -1, SPEC)
    if SPEC.e[AXIS] >= 0 or SPEC.n[AXIS] >= 0:
        total = _gather(sums, tiles, length, places, inside, AXIS, 0)
        if SPEC.e[AXIS] >= 0:
            others = c_factor(c, whole, p, stride, p2, inside, AXIS, AXIS, SPEC)
            tl.store(g + SPEC.e[AXIS] * stride, others * total, mask=inside)
        if SPEC.n[AXIS] >= 0:
            every = c_factor(c, whole, p, stride, p2, inside, AXIS, -1, SPEC)
            tl.store(g + SPEC.n[AXIS] * stride, -every * total, mask=inside)
    if SPEC.l[AXIS] >= 0:
        total = _gather(sums, tiles, length, places, inside, AXIS, 1)
        others = lam_factor(lam, whole, p, stride, p2, inside, AXIS, AXIS, SPEC)
        tl.store(g + SPEC.l[AXIS] * stride, others * total, mask=inside)
    if SPEC.m[AXIS] >= 0:
        total = _gather(sums, tiles, length, places, inside, AXIS, 2)
        if SPEC.normalize:
            if not SPEC.absorbed:
                total = total / tl.load(p + SPEC.m[AXIS] * stride, mask=inside, other=1.0)
        elif SPEC.absorbed:
            total = total * whole
        else:
            total = total * kappa_factor(kappa, p, stride, p2, inside, AXIS, AXIS, SPEC)
        tl.store(g + SPEC.m[AXIS] * stride, total, mask=inside)


@triton.jit
def _finish_numbers(p0, p2, g2, sums, tiles, d0, c, lam, kappa, SPEC: tl.constexpr, BLOCK: tl.constexpr):
    """Write the gradients of the learned numbers: sums over all rows."""
    of_e = tl.zeros((BLOCK,), tl.float32)
    of_n = tl.zeros((BLOCK,), tl.float32)
    of_l = tl.zeros((BLOCK,), tl.float32)
    of_m = tl.zeros((BLOCK,), tl.float32)
    start = tl.full((), 0, tl.int32)
    while start < d0:
        places = start + tl.arange(0, BLOCK)
        inside = places < d0
        p = p0 + places.to(tl.int64) * SPEC.width
        whole = kappa_factor(kappa, p, 1, p2, inside, 0, -1, SPEC)
        if SPEC.e[2] >= 0 or SPEC.n[2] >= 0:
            total = _gather(sums, tiles, d0, places, inside, 0, 0)
            of_e = tl.fma(total, c_factor(c, whole, p, 1, p2, inside, 0, 2, SPEC), of_e)
            of_n = tl.fma(total, c_factor(c, whole, p, 1, p2, inside, 0, -1, SPEC), of_n)
        if SPEC.l[2] >= 0:
            total = _gather(sums, tiles, d0, places, inside, 0, 1)
            of_l = tl.fma(total, lam_factor(lam, whole, p, 1, p2, inside, 0, 2, SPEC), of_l)
        if SPEC.m[2] >= 0:
            total = _gather(sums, tiles, d0, places, inside, 0, 2)
            if SPEC.normalize:
                of_m += total
            elif SPEC.absorbed:
                of_m = tl.fma(total, whole, of_m)
            else:
                of_m = tl.fma(total, kappa_factor(kappa, p, 1, p2, inside, 0, 2, SPEC), of_m)
        start += BLOCK
    if SPEC.e[2] >= 0:
        tl.store(g2 + SPEC.e[2], tl.sum(of_e, axis=0))
    if SPEC.n[2] >= 0:
        tl.store(g2 + SPEC.n[2], -tl.sum(of_n, axis=0))
    if SPEC.l[2] >= 0:
        tl.store(g2 + SPEC.l[2], tl.sum(of_l, axis=0))
    if SPEC.m[2] >= 0:
        total = tl.sum(of_m, axis=0)
        if SPEC.normalize:
            if not SPEC.absorbed:
                total = total / tl.load(p2 + SPEC.m[2])
        tl.store(g2 + SPEC.m[2], total)


@triton.jit
def _finish(p0, p1, p2, g0, g1, g2, row_sums, column_sums, block, d0, d1, across, c, lam,
            kappa, tiles0, tiles1, SPEC: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    blocks0, blocks1 = tl.cdiv(d0, BLOCK), tl.cdiv(d1, BLOCK)
    if block < blocks0:
        _finish_axis(p0, g0, p2, row_sums, tiles1, d0, block, 1, c, lam, kappa, 0, SPEC.width, SPEC, BLOCK)
    elif block < blocks0 + blocks1:
        _finish_axis(p1, g1, p2, column_sums, tiles0, d1, block - blocks0, across, 1.0, 1.0, 1.0, 1,
                     SPEC.step, SPEC, BLOCK)  # fmt: skip
    else:
        _finish_numbers(p0, p2, g2, row_sums, tiles1, d0, c, lam, kappa, SPEC, BLOCK)


@triton.jit
def finish_all(table, row_sums, column_sums, first, d0, d1, across, c, lam, kappa, tiles0, tiles1,
               SPEC: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Make gradients of the panels from the sums of :func:`pull_all`."""
    blocks = tl.cdiv(d0, BLOCK) + tl.cdiv(d1, BLOCK) + 1
    part = tl.program_id(0) // blocks
    at = table + (first + part) * 18
    p0, p1, p2 = (pointer(at + 4, tl.float32, False), pointer(at + 5, tl.float32, False),
                  pointer(at + 6, tl.float32, False))  # fmt: skip
    g0, g1, g2 = (pointer(at + 7, tl.float32, False), pointer(at + 8, tl.float32, False),
                  pointer(at + 9, tl.float32, False))  # fmt: skip
    row_sums += part.to(tl.int64) * 4 * tiles1 * d0
    column_sums += part.to(tl.int64) * 3 * tiles0 * d1
    _finish(p0, p1, p2, g0, g1, g2, row_sums, column_sums, tl.program_id(0) % blocks, d0, d1,
            across, c, lam, kappa, tiles0, tiles1, SPEC, BLOCK)  # fmt: skip


@triton.jit
def finish_one(p0, p1, p2, g0, g1, g2, row_sums, column_sums, d0, d1, across, c, lam, kappa, tiles0, tiles1,
               SPEC: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Make gradients of the panels from the sums of :func:`pull_one`."""
    _finish(p0, p1, p2, g0, g1, g2, row_sums, column_sums, tl.program_id(0), d0, d1, across,
            c, lam, kappa, tiles0, tiles1, SPEC, BLOCK)  # fmt: skip


@triton.jit
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


@triton.jit
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
    by = load_factor(factor)
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
        w = adam(raw + place, exp_avg + place, exp_avg_sq + place, w, pulled * by, inside, rate, rate + 6,
                 tl.load(rate), tl.load(rate + 1))  # fmt: skip
        c0, lam0, kappa0 = _row_factors(p0, p2, rows, d0, c, lam, kappa, SPEC)
        bits = bits_of(effective(w, c0 * c1, lam0 * lam1, kappa0 * kappa1, SPEC), DTYPE)
        tl.store(weight + place, bits, mask=inside & writes)
        kept = tl.load(weight + place, mask=inside & (writes == 0), other=0)
        down, weighted = tally(tl.where(writes, tl.where(inside, bits, 0), kept), local, down, weighted)
    add_marks(marks + tl.load(at + 13) * 2, down, weighted, at0 * TILE, at1 * COLUMNS, 1, 0, COLUMNS)
