"""The map and AdamW on GPUs, in Triton: what cpu.c computes, over tables of addresses.

One launch covers all tensors of a batch. A program looks up which one its tile belongs to, and reads the addresses from
that one's record of the table; those of gradients come in a list of their own. Results do not depend on the order in
which programs run.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202, RET505

import triton
import triton.language as tl

__all__ = [
    "SUMS",
    "norm",
    "product_norm",
    "product_pull",
    "product_push",
    "product_step",
    "product_sums",
    "pull",
    "push",
    "step",
]

# The columns of a tensor's record: addresses (of matrices the fourth is that of raw weights), its index, its entries or
# rows, where it is in scratch memory, and the index of its first tile.
_WEIGHT, _EXP_AVG, _EXP_AVG_SQ, _MASTER, _ITEM, _STOP, _AT, _FIRST = map(tl.constexpr, range(8))
_RECORD, _RAW = tl.constexpr(8), tl.constexpr(3)
# Of matrices also the columns, the first ones among all rows and all columns, and the delta A B with its gradients.
_COLS, _ROW, _COL, _RANK, _A, _B, _BY_A, _BY_B = map(tl.constexpr, range(8, 16))
_MATRIX = tl.constexpr(16)
SUMS = 3  # by row and by column: by c, kappa and lambda
_SUMS = tl.constexpr(SUMS)

_SIGN = tl.constexpr(-0x80000000)
_SHIFT = tl.constexpr(12583038.0)  # 1.5 * 2^23 + 126


# ---- numbers ----


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _flipped(x, w):
    """Return x, with the other sign where w has the sign bit."""
    return _float(_bits(x) ^ (_bits(w) & _SIGN))


@triton.jit
def _rounded(x):
    """Return the bits of the nearest bfloat16, ties to even; NaN gets torch's bits."""
    bits = _bits(x)
    return tl.where(x != x, 0x7FC0, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)


@triton.jit
def _rest_near(x):
    """Return (expm1(x) - x)/x^2 for |x| <= ln(2)/2, so that expm1(x) has an error of 2e-8 before rounding."""
    p = 0.001390129409 * x + 0.00836316214
    p = p * x + 0.04166685362
    p = p * x + 0.1666657719
    return p * x + 0.4999999955


@triton.jit
def _expm1_near(x):
    return (x * x) * _rest_near(x) + x


@triton.jit
def _grow(x):
    """Return half of expm1(x), exp(x) and x exp(x) - expm1(x): products with small numbers must not overflow early."""
    shifted = tl.fma(x, 1.44269504, _SHIFT)
    k = shifted - _SHIFT
    r = (x - k * 0.693359375) + k * 2.12194440e-4
    rest = _rest_near(r)
    p = (r * r) * rest + r
    q = _float((tl.minimum(tl.maximum(_bits(shifted), 0x4B400000), 0x4B4000FF) - 0x4B400000) << 23)
    F, E = q * p + (q - 0.5), q * p + q
    return F, E, tl.where(k == 0.0, (x * x) * (0.5 + 0.5 * rest * (x - 1.0)), x * E - F)  # near 0 no cancellation


@triton.jit
def _log1p(x):
    """Return log(1 + x) for x >= 0, to 2e-7: log(1 + f) + k ln 2, with 1 + f from sqrt(1/2) to sqrt(2)."""
    exponent = (_bits(1.0 + x) - 0x3F3504F3) & -0x800000  # k, in its place
    scale = _float(0x3F800000 - exponent)
    f = x * scale + (scale - 1.0)
    p = -0.101068937 * f + 0.16222579
    p = (p * f - 0.172508297) * f + 0.199001657
    p = (p * f - 0.249699091) * f + 0.333350589
    p = (p * f - 0.500003651) * f + 0.999999945
    return tl.fma(p, f, (exponent >> 23).to(tl.float32) * 0.693147181)  # the same bits in every kernel


@triton.jit
def _direction(g, m, s, lerp_weight, beta2, one_minus_beta2, sqrt_scale, eps, FROM_GRAD: tl.constexpr):
    """Return AdamW's direction times the rate, m/(sqrt_scale sqrt(s) + eps), and the moments, as cpu.c does."""
    m = (g if FROM_GRAD else m) + (g - m) * lerp_weight
    s = s * beta2 + (g * one_minus_beta2) * g
    return m / (sqrt_scale * tl.sqrt_rn(s) + eps), m, s


# ---- memory ----


@triton.jit
def _pointer(place, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the address in the table; with ALIGNED it is a multiple of 16."""
    pointer = tl.load(place).to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _read(place, at, inside, BF16: tl.constexpr, ALIGNED: tl.constexpr):
    """Return float32 numbers of the tensor whose address is in the table, from bfloat16 with BF16."""
    if BF16:
        bits = tl.load(_pointer(place, tl.int16, ALIGNED) + at, mask=inside, other=0)
        return _float(bits.to(tl.int32) << 16)
    else:
        return tl.load(_pointer(place, tl.float32, ALIGNED) + at, mask=inside, other=0.0)


@triton.jit
def _write(place, at, inside, x, BF16: tl.constexpr, ALIGNED: tl.constexpr):
    """Write float32 numbers to the tensor whose address is in the table, rounded to bfloat16 with BF16."""
    if BF16:
        tl.store(_pointer(place, tl.int16, ALIGNED) + at, _rounded(x), mask=inside)
    else:
        tl.store(_pointer(place, tl.float32, ALIGNED) + at, x, mask=inside)


# ---- the closed form ----


@triton.jit
def _tile(table, tiles, TILE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return this program's record, its tensor, its tile's places there and in scratch memory, and which are inside."""
    record = table + tl.load(tiles + tl.program_id(0)) * _RECORD
    stop, at = tl.load(record + _STOP), tl.load(record + _AT)
    if ALIGNED:
        stop, at = tl.multiple_of(stop, 16), tl.multiple_of(at, 16)
    n = (tl.program_id(0) - tl.load(record + _FIRST)) * TILE + tl.arange(0, TILE)
    return record, tl.load(record + _ITEM), n, at + n, n < stop


@triton.jit
def _value(record, at, inside, BF16: tl.constexpr, MASTERS: tl.constexpr, ALIGNED: tl.constexpr):
    """Return weights, or their masters, except where a weight is not its rounded master: somebody wrote it."""
    v = _read(record + _WEIGHT, at, inside, BF16, ALIGNED)
    if MASTERS:
        master = _read(record + _MASTER, at, inside, False, ALIGNED)
        v = tl.where(_rounded(master).to(tl.int32) << 16 == _bits(v), master, v)
    return v


@triton.jit
def norm(
    table, tiles, grads, squares, base, slope,
    PLAIN: tl.constexpr, BF16: tl.constexpr, MASTERS: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the sum of the squares of each tile's raw gradients g (base + slope |v|)."""
    record, item, at, _scratch, inside = _tile(table, tiles, TILE, ALIGNED)
    raw = _read(grads + item, at, inside, BF16, ALIGNED)
    if not PLAIN:
        raw *= base + slope * tl.abs(_value(record, at, inside, BF16, MASTERS, ALIGNED))
    tl.store(squares + tl.program_id(0), tl.sum(raw * raw))


@triton.jit
def _size_near(size, x, c):
    t = (c + size) * _expm1_near(x) + size
    return tl.where(t < 0.0, t * (c / (c + t)), t)


@triton.jit
def _moved(size, x, c):
    """Return the new size, exp(x) (c + size) - c; if it is negative, the weight is on the other side of zero."""
    F, E, _D = _grow(x)
    t = 2.0 * (size * E + c * F)
    t = tl.where(t < 0.0, t * (c / (c + size)) / (2.0 * E), t)
    return tl.where(tl.abs(x) < 0.3, _size_near(size, x, c), t)


@triton.jit
def _write_weights(
    record, at, inside, v, BF16: tl.constexpr, MASTERS: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """Write weights and their masters."""
    if MASTERS:
        _write(record + _MASTER, at, inside, v, False, ALIGNED)
    _write(record + _WEIGHT, at, inside, v, BF16, ALIGNED)


@triton.jit
def step(
    table, tiles, grads, clip, lerp_weight, beta2, one_minus_beta2, sqrt_scale, eps, one_minus_decay, decay,
    kappa, c,
    FROM_GRAD: tl.constexpr, CLIPS: tl.constexpr, DECAYS: tl.constexpr, MOVES: tl.constexpr, PLAIN: tl.constexpr,
    BF16: tl.constexpr, MASTERS: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Apply AdamW to weights in place."""
    record, item, at, _scratch, inside = _tile(table, tiles, TILE, ALIGNED)
    v = _value(record, at, inside, BF16, MASTERS, ALIGNED)
    g = _read(grads + item, at, inside, BF16, ALIGNED)
    m = _read(record + _EXP_AVG, at, inside, False, ALIGNED)
    s = _read(record + _EXP_AVG_SQ, at, inside, False, ALIGNED)
    if CLIPS:
        g *= tl.load(clip)
    size = tl.abs(v)
    if not PLAIN:
        g *= kappa * (c + size)
    d, m, s = _direction(g, m, s, lerp_weight, beta2, one_minus_beta2, sqrt_scale, eps, FROM_GRAD)
    _write(record + _EXP_AVG, at, inside, m, False, ALIGNED)
    _write(record + _EXP_AVG_SQ, at, inside, s, False, ALIGNED)
    if MOVES:
        if PLAIN:
            v = v * one_minus_decay - d
        else:
            x = -_flipped(d, v)
            if DECAYS:
                x -= decay * _log1p(size / c)
            v = _flipped(_moved(size, x, c), v)
        _write_weights(record, at, inside, v, BF16, MASTERS, ALIGNED)


@triton.jit
def _raw_of(v, kappa, c):
    return _flipped(_log1p(tl.abs(v) / c) / kappa, v)


@triton.jit
def pull(
    table, tiles, grads, values, raw_grads, clip, kappa, c,
    CLIPS: tl.constexpr, BF16: tl.constexpr, MASTERS: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write raw weights, and their gradients times `clip`, to scratch memory."""
    record, item, at, scratch, inside = _tile(table, tiles, TILE, ALIGNED)
    v = _value(record, at, inside, BF16, MASTERS, ALIGNED)
    g = _read(grads + item, at, inside, BF16, ALIGNED)
    if CLIPS:
        g *= tl.load(clip)
    tl.store(values + scratch, _raw_of(v, kappa, c), mask=inside)
    tl.store(raw_grads + scratch, g * (kappa * (c + tl.abs(v))), mask=inside)


@triton.jit
def push(
    table, tiles, values, kappa, c,
    BF16: tl.constexpr, MASTERS: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the weights of new raw weights, by their differences from those of `pull`."""
    record, _item, at, scratch, inside = _tile(table, tiles, TILE, ALIGNED)
    v = _value(record, at, inside, BF16, MASTERS, ALIGNED)
    after = tl.load(values + scratch, mask=inside, other=0.0)
    v = _flipped(_moved(tl.abs(v), kappa * _flipped(after - _raw_of(v, kappa, c), v), c), v)
    _write_weights(record, at, inside, v, BF16, MASTERS, ALIGNED)


# ---- maps of row and column factors: see cpu.c for the formulas ----


@triton.jit
def _matrix_tile(table, tiles, ALIGNED: tl.constexpr, TALL: tl.constexpr, COLS: tl.constexpr):
    """Return this program's record, the columns, the tile's first row, the rows, and the tile's columns inside."""
    record = table + tl.load(tiles + tl.program_id(0)) * _MATRIX
    cols, tile = tl.load(record + _COLS), tl.program_id(0) - tl.load(record + _FIRST)
    if ALIGNED:
        cols = tl.multiple_of(cols, 16)
    across = tl.cdiv(cols, COLS)
    j = tile % across * COLS + tl.arange(0, COLS)
    return record, cols, tile // across * TALL, tl.load(record + _STOP), j, j < cols


@triton.jit
def _factors(side, all, first, i, inside):
    """Return kappa, c and lambda of some rows or columns."""
    at = side + tl.load(first) + i
    return (
        tl.load(at, mask=inside, other=0.0),
        tl.load(at + all, mask=inside, other=0.0),
        tl.load(at + 2 * all, mask=inside, other=0.0),
    )


@triton.jit
def _outer(rows, columns):
    return rows[:, None] * columns[None, :]


@triton.jit
def _raw_grads(
    record, grad, kappa0, c0, lam0, kappa1, c1, lam1, at, inside,
    MISMATCH: tl.constexpr, BF16: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Return raw gradients, gradients, raw weights, and the halves of :func:`_grow` at kappa |w|."""
    g = _read(grad, at, inside, BF16, ALIGNED)
    w = _read(record + _RAW, at, inside, False, ALIGNED)
    kappa, lam = _outer(kappa0, kappa1), _outer(lam0, lam1)
    x = kappa * tl.abs(w)
    F, E, D = _grow(x)
    if MISMATCH:  # at w = 0 the mean of the one-sided slopes
        lam = tl.where(w == 0.0, 0.0, _flipped(lam, w))
    return g * (_outer(2.0 * c0, c1) * kappa * E + lam), g, w, F, E, D


@triton.jit
def _delta(record):
    """Return the rank and the addresses of A and B."""
    return tl.load(record + _RANK), _pointer(record + _A, tl.float32, False), _pointer(record + _B, tl.float32, False)


@triton.jit
def _effective(
    record, of_rows, all_rows, kappa1, c1, lam1, w, cols, i, j, inside0, inside1,
    MISMATCH: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """Return the weights of raw ones, with A B."""
    kappa0, c0, lam0 = _factors(of_rows, all_rows, record + _ROW, i, inside0)
    F, _E, _D = _grow(_outer(kappa0, kappa1) * tl.abs(w))
    v = _outer(2.0 * c0, c1) * _flipped(F, w) + _outer(lam0, lam1) * (tl.abs(w) if MISMATCH else w)
    if DELTA:
        rank, a, b = _delta(record)
        for k in range(0, rank):
            of_a = tl.load(a + i * rank + k, mask=inside0, other=0.0)
            v += _outer(of_a, tl.load(b + k * cols + j, mask=inside1, other=0.0))
    return v


@triton.jit
def product_norm(
    table, tiles, grads, squares, partial, of_rows, of_columns, all_rows, all_columns, kinds,
    MISMATCH: tl.constexpr, NORMALIZED: tl.constexpr, DELTA: tl.constexpr, BF16: tl.constexpr, ALIGNED: tl.constexpr,
    TALL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Write the sum of the squares of each tile's raw gradients, and `kinds` of sums by row, then by column.

    These are the three of the factors and with DELTA those of A and of B, g B^T and A^T g.
    """
    record, cols, first, stop, j, inside1 = _matrix_tile(table, tiles, ALIGNED, TALL, COLS)
    grad = grads + tl.load(record + _ITEM)
    # Triton gives a name one type within and before a loop, also the name _.
    kappa1, c1, lam1 = _factors(of_columns, all_columns, record + _COL, j, inside1)
    own = partial + tl.program_id(0).to(tl.int64) * (kinds * (TALL + COLS))
    right, down = own + tl.arange(0, ROWS), own + kinds * TALL + tl.arange(0, COLS)
    down0, down1 = tl.zeros([ROWS, COLS], tl.float32), tl.zeros([ROWS, COLS], tl.float32)
    down2, total = tl.zeros([ROWS, COLS], tl.float32), tl.zeros([ROWS, COLS], tl.float32)
    other1 = c1 if NORMALIZED else c1 * kappa1
    for r in range(0, TALL, ROWS):
        i = first + r + tl.arange(0, ROWS)
        inside0 = i < stop
        kappa0, c0, lam0 = _factors(of_rows, all_rows, record + _ROW, i, inside0)
        at, inside = i[:, None] * cols + j[None, :], inside0[:, None] & inside1[None, :]
        raw, g, w, F, E, D = _raw_grads(
            record, grad, kappa0, c0, lam0, kappa1, c1, lam1, at, inside, MISMATCH, BF16, ALIGNED,
        )  # fmt: skip
        total += raw * raw
        by_c, by_kappa = g * _flipped(F, w), g * (_flipped(D, w) if NORMALIZED else w * E)
        other0 = c0 if NORMALIZED else c0 * kappa0
        by_lam = g * (tl.abs(w) if MISMATCH else w)
        down0 += by_c * (2.0 * c0)[:, None]
        down1 += by_kappa * (2.0 * other0)[:, None]
        down2 += by_lam * lam0[:, None]
        tl.store(right + r, 2.0 * tl.sum(by_c * c1[None, :], 1))
        tl.store(right + TALL + r, 2.0 * tl.sum(by_kappa * other1[None, :], 1))
        tl.store(right + 2 * TALL + r, tl.sum(by_lam * lam1[None, :], 1))
    tl.store(down, tl.sum(down0, 0))
    tl.store(down + COLS, tl.sum(down1, 0))
    tl.store(down + 2 * COLS, tl.sum(down2, 0))
    tl.store(squares + tl.program_id(0), tl.sum(total))
    if DELTA:
        rank, a, b = _delta(record)
        for k in range(0, rank):
            of_b, by_b = tl.load(b + k * cols + j, mask=inside1, other=0.0), tl.zeros([ROWS, COLS], tl.float32)
            for r in range(0, TALL, ROWS):
                i = first + r + tl.arange(0, ROWS)
                inside0 = i < stop
                at, inside = i[:, None] * cols + j[None, :], inside0[:, None] & inside1[None, :]
                g = _read(grad, at, inside, BF16, ALIGNED)
                by_b += g * tl.load(a + i * rank + k, mask=inside0, other=0.0)[:, None]
                tl.store(right + (_SUMS + k) * TALL + r, tl.sum(g * of_b[None, :], 1))
            tl.store(down + (_SUMS + k) * COLS, tl.sum(by_b, 0))


@triton.jit
def _added(sums, size, count, SIZE: tl.constexpr, TILES: tl.constexpr):
    """Return the sums of `count` tiles, at distances of `size` numbers."""
    i = tl.arange(0, SIZE)
    total = tl.zeros([SIZE], tl.float32)
    for first in range(0, count, TILES):
        tile = first + tl.arange(0, TILES)
        total += tl.sum(tl.load(sums + tile[:, None] * size + i[None, :], mask=(tile < count)[:, None], other=0.0), 0)
    return total


@triton.jit
def product_sums(
    table, tiles, partial, by_rows, by_columns, all_rows, all_columns, kinds,
    DELTA: tl.constexpr, TALL: tl.constexpr, COLS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Add the sums of tiles of whole matrices: programs of the first tiles in a row or a column do so."""
    record, cols, first, rows, j, inside1 = _matrix_tile(table, tiles, False, TALL, COLS)
    across, size = tl.cdiv(cols, COLS), kinds * (TALL + COLS)
    tile, i = tl.program_id(0) - tl.load(record + _FIRST), first + tl.arange(0, TALL)
    own, inside0 = partial + tl.program_id(0).to(tl.int64) * size, i < rows
    if tile % across == 0:
        to = by_rows + tl.load(record + _ROW) + i
        for k in range(0, _SUMS):
            tl.store(to + k * all_rows, _added(own + k * TALL, size, across, TALL, TILES), mask=inside0)
        if DELTA:
            to = _pointer(record + _BY_A, tl.float32, False) + i * tl.load(record + _RANK)
            for k in range(0, tl.load(record + _RANK)):
                tl.store(to + k, _added(own + (_SUMS + k) * TALL, size, across, TALL, TILES), mask=inside0)
    if tile < across:
        own, row, count = own + kinds * TALL, size * across, tl.cdiv(rows, TALL)
        to = by_columns + tl.load(record + _COL) + j
        for k in range(0, _SUMS):
            tl.store(to + k * all_columns, _added(own + k * COLS, row, count, COLS, TILES), mask=inside1)
        if DELTA:
            to = _pointer(record + _BY_B, tl.float32, False) + j
            for k in range(0, tl.load(record + _RANK)):
                tl.store(to + k * cols, _added(own + (_SUMS + k) * COLS, row, count, COLS, TILES), mask=inside1)


@triton.jit
def product_pull(
    table, tiles, grads, raw_grads, clip, of_rows, of_columns, all_rows, all_columns,
    CLIPS: tl.constexpr, MISMATCH: tl.constexpr, BF16: tl.constexpr, ALIGNED: tl.constexpr, TALL: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Write raw gradients times `clip` to scratch memory."""
    record, cols, first, stop, j, inside1 = _matrix_tile(table, tiles, ALIGNED, TALL, COLS)
    scratch, grad = tl.load(record + _AT), grads + tl.load(record + _ITEM)
    if ALIGNED:
        scratch = tl.multiple_of(scratch, 16)
    clip_coef = tl.load(clip) if CLIPS else 1.0
    kappa1, c1, lam1 = _factors(of_columns, all_columns, record + _COL, j, inside1)
    for r in range(0, TALL, ROWS):
        i = first + r + tl.arange(0, ROWS)
        inside0 = i < stop
        kappa0, c0, lam0 = _factors(of_rows, all_rows, record + _ROW, i, inside0)
        at, inside = i[:, None] * cols + j[None, :], inside0[:, None] & inside1[None, :]
        raw, _g, _w, _F, _E, _D = _raw_grads(
            record, grad, kappa0, c0, lam0, kappa1, c1, lam1, at, inside, MISMATCH, BF16, ALIGNED,
        )  # fmt: skip
        tl.store(raw_grads + scratch + at, clip_coef * raw, mask=inside)


@triton.jit
def product_push(
    table, tiles, of_rows, of_columns, all_rows, all_columns,
    MISMATCH: tl.constexpr, DELTA: tl.constexpr, BF16: tl.constexpr, ALIGNED: tl.constexpr, TALL: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Write the weights of raw ones."""
    record, cols, first, stop, j, inside1 = _matrix_tile(table, tiles, ALIGNED, TALL, COLS)
    kappa1, c1, lam1 = _factors(of_columns, all_columns, record + _COL, j, inside1)
    for r in range(0, TALL, ROWS):
        i = first + r + tl.arange(0, ROWS)
        inside0 = i < stop
        at, inside = i[:, None] * cols + j[None, :], inside0[:, None] & inside1[None, :]
        w = _read(record + _RAW, at, inside, False, ALIGNED)
        v = _effective(
            record, of_rows, all_rows, kappa1, c1, lam1, w, cols, i, j, inside0, inside1, MISMATCH, DELTA,
        )  # fmt: skip
        _write(record + _WEIGHT, at, inside, v, BF16, ALIGNED)


@triton.jit
def product_step(
    table, tiles, grads, clip, old_rows, old_columns, new_rows, new_columns, all_rows, all_columns,
    lerp_weight, beta2, one_minus_beta2, sqrt_scale, eps, one_minus_decay,
    FROM_GRAD: tl.constexpr, CLIPS: tl.constexpr, MOVES: tl.constexpr, MISMATCH: tl.constexpr, DELTA: tl.constexpr,
    BF16: tl.constexpr, ALIGNED: tl.constexpr, TALL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Apply AdamW to raw weights and write the weights under new factors."""
    record, cols, first, stop, j, inside1 = _matrix_tile(table, tiles, ALIGNED, TALL, COLS)
    grad = grads + tl.load(record + _ITEM)
    clip_coef = tl.load(clip) if CLIPS else 1.0
    kappa1, c1, lam1 = _factors(old_columns, all_columns, record + _COL, j, inside1)
    kappa2, c2, lam2 = _factors(new_columns, all_columns, record + _COL, j, inside1)
    for r in range(0, TALL, ROWS):
        i = first + r + tl.arange(0, ROWS)
        inside0 = i < stop
        kappa0, c0, lam0 = _factors(old_rows, all_rows, record + _ROW, i, inside0)
        at, inside = i[:, None] * cols + j[None, :], inside0[:, None] & inside1[None, :]
        raw, _g, w, _F, _E, _D = _raw_grads(
            record, grad, kappa0, c0, lam0, kappa1, c1, lam1, at, inside, MISMATCH, BF16, ALIGNED,
        )  # fmt: skip
        m = _read(record + _EXP_AVG, at, inside, False, ALIGNED)
        s = _read(record + _EXP_AVG_SQ, at, inside, False, ALIGNED)
        d, m, s = _direction(clip_coef * raw, m, s, lerp_weight, beta2, one_minus_beta2, sqrt_scale, eps, FROM_GRAD)
        _write(record + _EXP_AVG, at, inside, m, False, ALIGNED)
        _write(record + _EXP_AVG_SQ, at, inside, s, False, ALIGNED)
        if MOVES:
            w = w * one_minus_decay - d
            _write(record + _RAW, at, inside, w, False, ALIGNED)
            v = _effective(
                record, new_rows, all_rows, kappa2, c2, lam2, w, cols, i, j, inside0, inside1, MISMATCH, DELTA,
            )  # fmt: skip
            _write(record + _WEIGHT, at, inside, v, BF16, ALIGNED)
