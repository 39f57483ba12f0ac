"""AdamW in curved weight space on GPUs, in Triton: what cpu.c computes, over tables of addresses.

One launch covers all tensors or matrices of a batch. A program looks up which one its tile belongs to, and reads the
addresses from that one's line of the table. Results do not depend on the order in which programs run.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202, RET505, SIM108

import triton
import triton.language as tl

__all__ = ["CLOSED", "FACTORS", "MATRIX", "SUMS", "chain", "move", "norm", "pull", "step", "write_factors"]

# The columns of a line for the closed form. FIRST is the index of the first tile; NOISE has four columns.
CLOSED = ("weight", "exp_avg", "exp_avg_sq", "master", "grad", "size", "first", "noise", "", "", "")
_WEIGHT, _EXP_AVG, _EXP_AVG_SQ, _MASTER, _GRAD, _SIZE, _FIRST, _NOISE = map(tl.constexpr, range(8))
_LINE = tl.constexpr(len(CLOSED))

# The columns of a matrix's line, which begins with the same four. OLD and NEW are factors of rows, then of columns;
# RIGHT and DOWN are sums by row and by column of each tile; FIRST and ENDS are the first tile of the matrix and of its
# rows and columns. VECTORS and GRADIENTS are those of e, l, m (absorbed: a) and n, each of rows and columns.
MATRIX = (
    "weight",
    "exp_avg",
    "exp_avg_sq",
    "raw",
    "grad",
    "rows",
    "cols",
    "first",
    "ends",
    "old",
    "new",
    "right",
    "down",
)
_RAW = tl.constexpr(3)
_ROWS, _COLS, _OF_MATRIX, _ENDS, _OLD, _NEW, _RIGHT, _DOWN, _VECTORS = map(tl.constexpr, range(5, 14))
_GRADIENTS, _MATRIX_LINE = tl.constexpr(len(MATRIX) + 8), tl.constexpr(len(MATRIX) + 16)
FACTORS, SUMS = 4, 3  # of a row or column: kappa, c, lambda and c kappa; see cpu.c
_FACTORS, _SUMS = tl.constexpr(FACTORS), tl.constexpr(SUMS)

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
def _expm1_near(x):
    """Return expm1(x) for |x| <= ln(2)/2, with an error of 2e-8 before rounding."""
    p = 0.001390129409 * x + 0.00836316214
    p = p * x + 0.04166685362
    p = p * x + 0.1666657719
    return (x * x) * (p * x + 0.4999999955) + x


@triton.jit
def _grow(x):
    """Return expm1(x)/2 and exp(x)/2: halved, so that a product with a small number does not overflow early."""
    shifted = tl.fma(x, 1.44269504, _SHIFT)
    k = shifted - _SHIFT
    p = _expm1_near((x - k * 0.693359375) + k * 2.12194440e-4)
    q = _float((tl.minimum(tl.maximum(_bits(shifted), 0x4B400000), 0x4B4000FF) - 0x4B400000) << 23)
    return q * p + (q - 0.5), q * p + q


@triton.jit
def _difference(x, F, E):
    """Return (x exp(x) - expm1(x))/2 for x >= 0 from these halves; below 1 without cancellation."""
    p = 0.0002702958672 * x + 0.001050773849
    p = (p * x + 0.007040225814) * x + 0.03330036595
    p = (p * x + 0.1250053115) * x + 0.333333018
    return tl.where(x < 1.0, (p * x + 0.500000003) * x * x * 0.5, x * E - F)


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
    return p * f + (exponent >> 23).to(tl.float32) * 0.693147181


@triton.jit
def _direction(g, m, s, towards, beta2, gain2, root, eps, FROM_GRAD: tl.constexpr):
    """Return AdamW's direction times the rate, m/(root sqrt(s) + eps), and the moments, as cpu.c does."""
    m = (g if FROM_GRAD else m) + (g - m) * towards
    s = s * beta2 + (g * gain2) * g
    return m / (root * tl.sqrt_rn(s) + eps), m, s


# ---- memory ----


@triton.jit
def _pointer(place, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the address in the table; with ALIGNED it is a multiple of 16."""
    found = tl.load(place).to(tl.pointer_type(TYPE))
    if ALIGNED:
        found = tl.multiple_of(found, 16)
    return found


@triton.jit
def _read(place, at, inside, HALF: tl.constexpr, ALIGNED: tl.constexpr):
    """Return float32 numbers of the tensor whose address is in the table, from bfloat16 with HALF."""
    if HALF:
        bits = tl.load(_pointer(place, tl.int16, ALIGNED) + at, mask=inside, other=0)
        return _float(bits.to(tl.int32) << 16)
    else:
        return tl.load(_pointer(place, tl.float32, ALIGNED) + at, mask=inside, other=0.0)


@triton.jit
def _write(place, at, inside, x, HALF: tl.constexpr, ALIGNED: tl.constexpr):
    """Write float32 numbers to the tensor whose address is in the table, rounded to bfloat16 with HALF."""
    if HALF:
        tl.store(_pointer(place, tl.int16, ALIGNED) + at, _rounded(x), mask=inside)
    else:
        tl.store(_pointer(place, tl.float32, ALIGNED) + at, x, mask=inside)


@triton.jit
def _vector(place, i, count):
    """Return the places of entries of a vector, and which of them are inside: none if its address is 0."""
    address = tl.load(place)
    return address.to(tl.pointer_type(tl.float32)) + i, i < tl.where(address == 0, 0, count)


@triton.jit
def _read_vector(place, i, count, otherwise):
    at, inside = _vector(place, i, count)
    return tl.load(at, mask=inside, other=otherwise)


@triton.jit
def _write_vector(place, i, count, x):
    at, inside = _vector(place, i, count)
    tl.store(at, x, mask=inside)


# ---- the closed form ----


@triton.jit
def _tile(table, items, TILE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the line of this program's tensor, the places of its tile, and which of them are inside."""
    line = table + tl.load(items + tl.program_id(0)) * _LINE
    size = tl.load(line + _SIZE)
    if ALIGNED:
        size = tl.multiple_of(size, 16)
    at = (tl.program_id(0) - tl.load(line + _FIRST)) * TILE + tl.arange(0, TILE)
    return line, at, at < size


@triton.jit
def _value(line, at, inside, HALF: tl.constexpr, MASTERS: tl.constexpr, ALIGNED: tl.constexpr):
    """Return weights, or their masters, except where a weight is not its rounded master: somebody wrote it."""
    v = _read(line + _WEIGHT, at, inside, HALF, ALIGNED)
    if MASTERS:
        master = _read(line + _MASTER, at, inside, False, ALIGNED)
        v = tl.where(_rounded(master).to(tl.int32) << 16 == _bits(v), master, v)
    return v


@triton.jit
def norm(
    table, items, squares, base, slope,
    PLAIN: tl.constexpr, HALF: tl.constexpr, MASTERS: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the sum of the squares of each tile's raw gradients g (base + slope |v|)."""
    line, at, inside = _tile(table, items, TILE, ALIGNED)
    raw = _read(line + _GRAD, at, inside, HALF, ALIGNED)
    if not PLAIN:
        raw *= base + slope * tl.abs(_value(line, at, inside, HALF, MASTERS, ALIGNED))
    tl.store(squares + tl.program_id(0), tl.sum(raw * raw))


@triton.jit
def _size_near(size, x, c):
    t = (c + size) * _expm1_near(x) + size
    return tl.where(t < 0.0, t * (c / (c + t)), t)


@triton.jit
def _moved(size, x, c):
    """Return the new size, exp(x) (c + size) - c; if it is negative, the weight is on the other side of zero."""
    F, E = _grow(x)
    t = 2.0 * (size * E + c * F)
    t = tl.where(t < 0.0, t * (c / (c + size)) / (2.0 * E), t)
    return tl.where(tl.abs(x) < 0.3, _size_near(size, x, c), t)


@triton.jit
def _rounded_noisily(line, at, v):
    """Return the bits of bfloat16 rounded with noise: a hash of the key and the entry's index in the whole tensor."""
    key, offset = tl.load(line + _NOISE).to(tl.uint32), tl.load(line + _NOISE + 1)
    columns, stride = tl.load(line + _NOISE + 2), tl.load(line + _NOISE + 3)
    index = offset + at // columns * stride + at % columns
    x = index.to(tl.uint32) ^ key ^ ((index >> 32).to(tl.uint32) * 0x9E3779B9)
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    x = (x ^ (x >> 15)) & 0xFFFF
    bits = v.to(tl.uint32, bitcast=True)
    special = (bits & 0x7F800000) == 0x7F800000
    return tl.where(special, _rounded(v), ((bits + x) >> 16).to(tl.int16))


@triton.jit
def step(
    table, items, clip, towards, beta2, gain2, root, eps, keep, decay, kappa, c,
    FROM_GRAD: tl.constexpr, CLIPS: tl.constexpr, DECAYS: tl.constexpr, MOVES: tl.constexpr, PLAIN: tl.constexpr,
    HALF: tl.constexpr, MASTERS: tl.constexpr, NOISE: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Apply AdamW to weights in place."""
    line, at, inside = _tile(table, items, TILE, ALIGNED)
    v = _value(line, at, inside, HALF, MASTERS, ALIGNED)
    g = _read(line + _GRAD, at, inside, HALF, ALIGNED)
    m = _read(line + _EXP_AVG, at, inside, False, ALIGNED)
    s = _read(line + _EXP_AVG_SQ, at, inside, False, ALIGNED)
    if CLIPS:
        g *= tl.load(clip)
    size = tl.abs(v)
    if not PLAIN:
        g *= kappa * (c + size)
    d, m, s = _direction(g, m, s, towards, beta2, gain2, root, eps, FROM_GRAD)
    _write(line + _EXP_AVG, at, inside, m, False, ALIGNED)
    _write(line + _EXP_AVG_SQ, at, inside, s, False, ALIGNED)
    if MOVES:
        if PLAIN:
            v = v * keep - d
        else:
            x = -_flipped(d, v)
            if DECAYS:
                x -= decay * _log1p(size / c)
            v = _flipped(_moved(size, x, c), v)
        if MASTERS:
            _write(line + _MASTER, at, inside, v, False, ALIGNED)
        if NOISE:
            tl.store(_pointer(line + _WEIGHT, tl.int16, ALIGNED) + at, _rounded_noisily(line, at, v), mask=inside)
        else:
            _write(line + _WEIGHT, at, inside, v, HALF, ALIGNED)


# ---- maps of row and column factors: see cpu.c for the formulas ----


@triton.jit
def _side(table, items, BLOCK: tl.constexpr):
    """Return the line of this program's matrix, its dimension, the places of its block, and which are inside."""
    line = table + tl.load(items + tl.program_id(0)) * _MATRIX_LINE
    rows, block = tl.load(line + _ROWS), tl.program_id(0) - tl.load(line + _ENDS)
    of_rows = tl.cdiv(rows, BLOCK)
    dim = (block >= of_rows).to(tl.int32)
    count = tl.where(dim == 1, tl.load(line + _COLS), rows)
    i = (block - dim * of_rows) * BLOCK + tl.arange(0, BLOCK)
    return line, dim, count, i, i < count


@triton.jit
def _axis(line, dim, i, count, kappa, c, lam, ABSORBED: tl.constexpr, NORMALIZE: tl.constexpr):
    """Return m, kappa, c without e, c, lambda without l, and lambda of rows or columns."""
    place = line + _VECTORS + dim
    e, l = _read_vector(place, i, count, 1.0), _read_vector(place + 2, i, count, 1.0)
    if ABSORBED:
        m = tl.exp(_read_vector(place + 4, i, count, 0.0))
    else:
        m = _read_vector(place + 4, i, count, 1.0)
    first = dim == 0
    kappa = m * tl.where(first, kappa, 1.0)
    share = 1.0 / kappa if NORMALIZE else tl.full(kappa.shape, 1.0, tl.float32)
    by_e = share * tl.exp(-_read_vector(place + 6, i, count, 0.0)) * tl.where(first, c, 1.0)
    by_l = share * tl.where(first, lam, 1.0)
    return m, kappa, by_e, by_e * e, by_l, by_l * l


@triton.jit
def write_factors(
    table, items, kappa, c, lam, COLUMN: tl.constexpr, ABSORBED: tl.constexpr, NORMALIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the old or new factors of rows and columns: COLUMN of the table has their address."""
    line, dim, count, i, inside = _side(table, items, BLOCK)
    _m, kappa, _by_e, c, _by_l, lam = _axis(line, dim, i, count, kappa, c, lam, ABSORBED, NORMALIZE)
    to = _pointer(line + COLUMN, tl.float32, False) + dim * _FACTORS * tl.load(line + _ROWS) + i
    tl.store(to, kappa, mask=inside)
    tl.store(to + count, c, mask=inside)
    tl.store(to + 2 * count, lam, mask=inside)
    tl.store(to + 3 * count, c * kappa, mask=inside)


@triton.jit
def _factors(from_, count, i, inside):
    """Return kappa, c, lambda and c kappa of some rows or columns."""
    return (
        tl.load(from_ + i, mask=inside, other=0.0),
        tl.load(from_ + count + i, mask=inside, other=0.0),
        tl.load(from_ + 2 * count + i, mask=inside, other=0.0),
        tl.load(from_ + 3 * count + i, mask=inside, other=0.0),
    )


@triton.jit
def _matrix_tile(table, items, ALIGNED: tl.constexpr, COLS: tl.constexpr):
    """Return the line, rows and columns of this program's matrix, its tile's row and column of tiles, and columns."""
    line = table + tl.load(items + tl.program_id(0)) * _MATRIX_LINE
    rows, cols = tl.load(line + _ROWS), tl.load(line + _COLS)
    if ALIGNED:
        cols = tl.multiple_of(cols, 16)
    tile, across = tl.program_id(0) - tl.load(line + _OF_MATRIX), tl.cdiv(cols, COLS)
    return line, rows, cols, tile // across, tile % across


@triton.jit
def _slope(g, w, E, steep, lam, MAGNITUDE: tl.constexpr):
    """Return g dw_eff/dw; at w = 0 the mean of the one-sided slopes."""
    if MAGNITUDE:
        lam = tl.where(w == 0.0, 0.0, _flipped(lam, w))
    return g * (steep * E + lam)


@triton.jit
def pull(
    table, items, squares, NORMALIZE: tl.constexpr, MAGNITUDE: tl.constexpr, HALF: tl.constexpr,
    ALIGNED: tl.constexpr, TALL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Write the sums of each tile by row and by column, and the sum of the squares of its raw gradients."""
    line, rows, cols, tile0, tile1 = _matrix_tile(table, items, ALIGNED, COLS)
    j = tile1 * COLS + tl.arange(0, COLS)
    inside1 = j < cols
    old = _pointer(line + _OLD, tl.float32, False)
    kappa1, c1, lam1, steep1 = _factors(old + _FACTORS * rows, cols, j, inside1)
    right = _pointer(line + _RIGHT, tl.float32, False) + tile1 * _SUMS * rows
    down0, down1 = tl.zeros([ROWS, COLS], tl.float32), tl.zeros([ROWS, COLS], tl.float32)
    down2, total = tl.zeros([ROWS, COLS], tl.float32), tl.zeros([ROWS, COLS], tl.float32)
    for r in range(0, TALL, ROWS):
        i = tile0 * TALL + r + tl.arange(0, ROWS)
        inside0 = i < rows
        kappa0, c0, lam0, steep0 = _factors(old, rows, i, inside0)
        at, inside = i[:, None] * cols + j[None, :], tl.where(inside0[:, None], inside1[None, :], False)
        g = _read(line + _GRAD, at, inside, HALF, ALIGNED)
        w = _read(line + _RAW, at, inside, False, ALIGNED)
        x = kappa0[:, None] * kappa1[None, :] * tl.abs(w)
        F, E = _grow(x)
        raw = _slope(g, w, E, 2.0 * steep0[:, None] * steep1[None, :], lam0[:, None] * lam1[None, :], MAGNITUDE)
        total += raw * raw
        by_c, by_lam = g * _flipped(F, w), g * (tl.abs(w) if MAGNITUDE else w)
        if NORMALIZE:
            by_kappa, k0, k1 = g * _flipped(_difference(x, F, E), w), c0, c1
        else:
            by_kappa, k0, k1 = g * w * E, steep0, steep1
        down0 += by_c * c0[:, None]
        down1 += by_lam * lam0[:, None]
        down2 += by_kappa * k0[:, None]
        tl.store(right + i, tl.sum(by_c * c1[None, :], 1), mask=inside0)
        tl.store(right + rows + i, tl.sum(by_lam * lam1[None, :], 1), mask=inside0)
        tl.store(right + 2 * rows + i, tl.sum(by_kappa * k1[None, :], 1), mask=inside0)
    down = _pointer(line + _DOWN, tl.float32, False) + tile0 * _SUMS * cols + j
    tl.store(down, tl.sum(down0, 0), mask=inside1)
    tl.store(down + cols, tl.sum(down1, 0), mask=inside1)
    tl.store(down + 2 * cols, tl.sum(down2, 0), mask=inside1)
    tl.store(squares + tl.program_id(0), tl.sum(total))


@triton.jit
def chain(
    table, items, kappa, c, lam, ABSORBED: tl.constexpr, NORMALIZE: tl.constexpr, TALL: tl.constexpr,
    COLS: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the vectors by the chain rule, from the sums of at most MOST tiles."""
    line, dim, count, i, inside = _side(table, items, BLOCK)
    m, own_kappa, by_e, own_c, by_l, own_lam = _axis(line, dim, i, count, kappa, c, lam, ABSORBED, NORMALIZE)
    other = tl.where(dim == 1, tl.load(line + _ROWS), tl.load(line + _COLS))
    tiles = tl.cdiv(other, tl.where(dim == 1, TALL, COLS))
    sums = tl.load(line + _RIGHT + dim).to(tl.pointer_type(tl.float32)) + i
    by_c, by_lam = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    by_kappa = tl.zeros([BLOCK], tl.float32)
    for tile in range(0, MOST):
        there = tl.where(tile < tiles, inside, False)
        by_c += 2.0 * tl.load(sums, mask=there, other=0.0)  # of halves
        by_lam += tl.load(sums + count, mask=there, other=0.0)
        by_kappa += 2.0 * tl.load(sums + 2 * count, mask=there, other=0.0)
        sums += _SUMS * count
    if NORMALIZE:
        by_m = (own_c * by_kappa - own_lam * by_lam) / (1.0 if ABSORBED else m)
    elif ABSORBED:
        by_m = by_kappa * own_c * own_kappa
    else:
        by_m = by_kappa * own_c * tl.where(dim == 1, 1.0, kappa)
    to = line + _GRADIENTS + dim
    _write_vector(to, i, count, by_c * by_e)
    _write_vector(to + 2, i, count, by_lam * by_l)
    _write_vector(to + 4, i, count, by_m)
    _write_vector(to + 6, i, count, -by_c * own_c)


@triton.jit
def move(
    table, items, clip, towards, beta2, gain2, root, eps, keep,
    FROM_GRAD: tl.constexpr, CLIPS: tl.constexpr, MOVES: tl.constexpr, MAGNITUDE: tl.constexpr, HALF: tl.constexpr,
    ALIGNED: tl.constexpr, TALL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Apply AdamW to raw weights and write the weights."""
    line, rows, cols, tile0, tile1 = _matrix_tile(table, items, ALIGNED, COLS)
    j = tile1 * COLS + tl.arange(0, COLS)
    inside1 = j < cols
    # Triton gives a name one type within and before a loop, also the name _.
    old, new = _pointer(line + _OLD, tl.float32, False), _pointer(line + _NEW, tl.float32, False)
    kappa1, _c1, lam1, steep1 = _factors(old + _FACTORS * rows, cols, j, inside1)
    kappa3, c3, lam3, _steep3 = _factors(new + _FACTORS * rows, cols, j, inside1)
    factor = tl.load(clip) if CLIPS else 1.0
    for r in range(0, TALL, ROWS):
        i = tile0 * TALL + r + tl.arange(0, ROWS)
        inside0 = i < rows
        kappa0, _c0, lam0, steep0 = _factors(old, rows, i, inside0)
        at, inside = i[:, None] * cols + j[None, :], tl.where(inside0[:, None], inside1[None, :], False)
        g = _read(line + _GRAD, at, inside, HALF, ALIGNED)
        w = _read(line + _RAW, at, inside, False, ALIGNED)
        m = _read(line + _EXP_AVG, at, inside, False, ALIGNED)
        s = _read(line + _EXP_AVG_SQ, at, inside, False, ALIGNED)
        _F, E = _grow(kappa0[:, None] * kappa1[None, :] * tl.abs(w))
        raw = _slope(g, w, E, 2.0 * steep0[:, None] * steep1[None, :], lam0[:, None] * lam1[None, :], MAGNITUDE)
        d, m, s = _direction(factor * raw, m, s, towards, beta2, gain2, root, eps, FROM_GRAD)
        _write(line + _EXP_AVG, at, inside, m, False, ALIGNED)
        _write(line + _EXP_AVG_SQ, at, inside, s, False, ALIGNED)
        if MOVES:
            w = w * keep - d
            _write(line + _RAW, at, inside, w, False, ALIGNED)
            kappa2, c2, lam2, _steep2 = _factors(new, rows, i, inside0)
            F, _E = _grow(kappa2[:, None] * kappa3[None, :] * tl.abs(w))
            linear = lam2[:, None] * lam3[None, :] * (tl.abs(w) if MAGNITUDE else w)
            v = 2.0 * c2[:, None] * c3[None, :] * _flipped(F, w) + linear
            _write(line + _WEIGHT, at, inside, v, HALF, ALIGNED)
