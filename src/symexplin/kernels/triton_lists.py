"""Triton kernels over lists of tiles of tensors of many shapes: panels, plain parameters, norms and marks.

A tile is three numbers on the device: the line of its tensor in the tensors' table, and its place down and across.
A tensor that has not two dimensions is seen as rows of COLUMNS entries, the last of them perhaps short.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202, SIM300

import triton
import triton.language as tl

from symexplin.kernels.triton_adam import adam, add_marks, load_factor, pointer, rated, rates_of, tally, written
from symexplin.kernels.triton_map import bits_of

__all__ = ["mark_tiles", "norms", "square_tiles", "update_panels", "update_tiles"]


@triton.jit
def _bounds(at, ALIGNED: tl.constexpr):
    """Return the number of entries of a tensor and of a row of it."""
    count, width = tl.load(at + 14), tl.load(at + 15)
    if ALIGNED:
        count, width = tl.multiple_of(count, 16), tl.multiple_of(width, 16)
    return count, width


@triton.jit(do_not_specialize=["first"])
def square_tiles(table, grads, tiles, out, first, GRAD: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr,
                 ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Write the sum of the squares of a gradient over each tile, from place `first` on."""
    line = tiles + tl.program_id(0) * 3
    part, row, column = tl.load(line), tl.load(line + 1) * TILE, tl.load(line + 2) * COLUMNS
    count, width = _bounds(table + part * 18, ALIGNED)
    grad = pointer(grads + part, GRAD, ALIGNED)
    columns = column + tl.arange(0, COLUMNS)[None, :]
    squares = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, TILE, ROWS):
        rows = row + start + tl.arange(0, ROWS)[:, None]
        place = rows * width + columns
        g = tl.load(grad + place, mask=(columns < width) & (place < count), other=0.0).to(tl.float32)
        squares = tl.fma(g, g, squares)
    tl.store(out + first + tl.program_id(0), tl.sum(tl.sum(squares, axis=1), axis=0))


@triton.jit
def norms(squares, spans, out, BLOCK: tl.constexpr):
    """Write the root of the sum of each part's squares, which lie from its span's first to before its last place."""
    part = tl.program_id(0)
    place, stop = tl.load(spans + part * 2), tl.load(spans + part * 2 + 1)
    total = tl.zeros((BLOCK,), tl.float32)
    while place < stop:
        places = place + tl.arange(0, BLOCK)
        total += tl.load(squares + places, mask=places < stop, other=0.0)
        place += BLOCK
    tl.store(out + part, tl.sqrt_rn(tl.sum(total, axis=0)))


@triton.jit
def update_tiles(table, grads, states, rates, factor, tiles, marks, DTYPE: tl.constexpr, MASTER: tl.constexpr,
                 ALIGNED: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Apply AdamW to plain values; MASTER: write them, rounded, to a weight apart from them."""
    line = tiles + tl.program_id(0) * 3
    part, row, column = tl.load(line), tl.load(line + 1) * TILE, tl.load(line + 2) * COLUMNS
    at = table + part * 18
    count, width = _bounds(at, ALIGNED)
    value, grad = pointer(at, tl.float32, ALIGNED), pointer(grads + part, DTYPE, ALIGNED)
    weight = written(at + 1, DTYPE, ALIGNED)
    exp_avg, exp_avg_sq = pointer(at + 2, tl.float32, ALIGNED), pointer(at + 3, tl.float32, ALIGNED)
    rate, writes = rated(rates, states + part * 2)
    less1, beta2, less2, eps, correction, root = rates_of(rate, 6)
    lr = tl.load(rate)
    shrink, step, by = 1.0 - lr * tl.load(rate + 1), lr / correction, load_factor(factor)
    columns = column + tl.arange(0, COLUMNS)[None, :]
    if DTYPE == tl.float32:
        down, weighted = tl.zeros((ROWS, COLUMNS), tl.int64), tl.zeros((ROWS, COLUMNS), tl.int64)
    else:
        down, weighted = tl.zeros((ROWS, COLUMNS), tl.int32), tl.zeros((ROWS, COLUMNS), tl.int32)
    for start in range(0, TILE, ROWS):
        local = start + tl.arange(0, ROWS)[:, None]
        place = (row + local) * width + columns
        inside = (columns < width) & (place < count)
        x = tl.load(value + place, mask=inside, other=0.0)
        g = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        x = adam(value + place, exp_avg + place, exp_avg_sq + place, x, g * by, inside, shrink, step, less1,
                 beta2, less2, eps, root)  # fmt: skip
        bits = tl.where(inside, bits_of(x, DTYPE), 0)
        if MASTER:
            tl.store(weight + place, bits, mask=inside & (inside.to(tl.int32) == writes))
            kept = tl.load(weight + place, mask=inside & (inside.to(tl.int32) != writes), other=0)
            bits = tl.where(writes != 0, bits, kept)
        down, weighted = tally(bits, local, down, weighted)
    add_marks(marks + tl.load(at + 13) * 2, down, weighted, row * tl.load(at + 16), row * tl.load(at + 17) + column,
              tl.load(at + 16), tl.load(at + 17), COLUMNS)  # fmt: skip


@triton.jit
def mark_tiles(table, tiles, marks, BITS: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
               COLUMNS: tl.constexpr):  # fmt: skip
    """Add the marks of each tile to those of its tensor."""
    line = tiles + tl.program_id(0) * 3
    part, row, column = tl.load(line), tl.load(line + 1) * TILE, tl.load(line + 2) * COLUMNS
    at = table + part * 18
    count, width = _bounds(at, ALIGNED)
    found = pointer(at, BITS, ALIGNED)
    columns = column + tl.arange(0, COLUMNS)[None, :]
    if BITS == tl.int16:
        down, weighted = tl.zeros((ROWS, COLUMNS), tl.int32), tl.zeros((ROWS, COLUMNS), tl.int32)
    else:
        down, weighted = tl.zeros((ROWS, COLUMNS), tl.int64), tl.zeros((ROWS, COLUMNS), tl.int64)
    for start in range(0, TILE, ROWS):
        local = start + tl.arange(0, ROWS)[:, None]
        place = (row + local) * width + columns
        bits = tl.load(found + place, mask=(columns < width) & (place < count), other=0)
        down, weighted = tally(bits, local, down, weighted)
    add_marks(marks + tl.load(at + 13) * 2, down, weighted, row * tl.load(at + 16), row * tl.load(at + 17) + column,
              tl.load(at + 16), tl.load(at + 17), COLUMNS)  # fmt: skip


@triton.jit
def update_panels(panels, states, rates, factor, chunks, BLOCK: tl.constexpr):
    """Apply AdamW to the panels of all parts, a block of one of them a program, and keep their old values."""
    line = chunks + tl.program_id(0) * 2
    at, start = panels + tl.load(line) * 10, tl.load(line + 1)
    value, old = pointer(at, tl.float32, False), pointer(at + 4, tl.float32, False)
    exp_avg, exp_avg_sq = pointer(at + 1, tl.float32, False), pointer(at + 2, tl.float32, False)
    grad = pointer(at + 3, tl.float32, False)
    places = start + tl.arange(0, BLOCK)
    inside = places < tl.load(at + 5)
    learned = (places // tl.load(at + 6)) % tl.load(at + 7)  # which of the panel's columns
    rate, _ = rated(rates, states + tl.load(at + 9) * 2)
    own = rate + 10 + tl.load(at + 8) + learned
    x = tl.load(value + places, mask=inside, other=0.0)
    tl.store(old + places, x, mask=inside)
    g = tl.load(grad + places, mask=inside, other=0.0) * load_factor(factor)
    less1, beta2, less2, eps, correction, root = rates_of(rate, 8)
    lr, decay = tl.load(own, mask=inside, other=0.0), tl.load(own + 12, mask=inside, other=0.0)
    adam(value + places, exp_avg + places, exp_avg_sq + places, x, g, inside, 1.0 - lr * decay, lr / correction, less1,
         beta2, less2, eps, root)  # fmt: skip
