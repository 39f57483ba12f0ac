"""Triton kernels that make gradients of panels from the partial sums of a pull, added in a fixed order.

Sums over the entries of rows give the factors along the rows, those of columns the factors along the columns, and sums
of the former the numbers (the chain rule with c, lambda and kappa as products of one factor along each dimension).
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202, SIM102

import triton
import triton.language as tl

from symexplin.kernels.triton_adam import pointer
from symexplin.kernels.triton_map import c_factor, kappa_factor, lam_factor

__all__ = ["finish_all", "finish_one"]


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


@triton.jit(do_not_specialize=["first", "d0", "across", "tiles0", "tiles1"])
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


@triton.jit(do_not_specialize=["d0", "across", "tiles0", "tiles1"])
def finish_one(p0, p1, p2, g0, g1, g2, row_sums, column_sums, d0, d1, across, c, lam, kappa, tiles0, tiles1,
               SPEC: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Make gradients of the panels from the sums of :func:`pull_one`."""
    _finish(p0, p1, p2, g0, g1, g2, row_sums, column_sums, tl.program_id(0), d0, d1, across,
            c, lam, kappa, tiles0, tiles1, SPEC, BLOCK)  # fmt: skip
