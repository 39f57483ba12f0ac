/* The work on one tile of a part, some rows by up to WIDEST columns: pull, update, the weight alone. */
#ifndef SEL_TILE_H
#define SEL_TILE_H

#include "marks.h"
#include "part.h"

/* WIDEST columns keep a tile's column factors and sums in the first two caches. TALL rows make partial sums by column
   1.2 % of a weight, and leave enough tiles for several threads. */
enum { WIDEST = 2048, TALL = 256, SUMS = 3 };

typedef struct {
    int part;
    int64_t row, row_end, column, column_end;
    REAL *column_sums; /* SUMS vectors as wide as the tile, padded */
    REAL *row_sums;    /* SUMS numbers a row */
    double squares;
    int64_t marks[2];
} Tile;

/* What a part's tiles share: its factors by row and column, before and (update) after the panels' step. */
typedef struct {
    Factors rows, columns, new_rows, new_columns;
} Shared;

INLINE int64_t padded(int64_t count) { return (count + STEP - 1) / STEP * STEP; }

/* A stretch of a row in whole steps of REAL: in place if it is that already, else a padded copy. */
static const REAL *row_of(const void *from, int64_t kind, int64_t at, int64_t count, REAL *copy) {
    if (kind == SAME_AS_RAW && count % STEP == 0) return (const REAL *)from + at;
    int64_t whole = count / LANES * LANES;
    memset(copy + whole, 0, (size_t)(padded(count) - whole) * sizeof(REAL));
#ifndef SEL_DOUBLE
    if (kind == BFLOAT16) {
        const uint16_t *half = (const uint16_t *)from + at;
        uint16_t rest[LANES] = {0};
        for (int64_t j = 0; j < whole; j += LANES) store(copy + j, from_bfloat16(half + j));
        memcpy(rest, half + whole, (size_t)(count - whole) * 2);
        if (whole < count) store(copy + whole, from_bfloat16(rest));
        return copy;
    }
#endif
    memcpy(copy, (const REAL *)from + at, (size_t)count * sizeof(REAL));
    return copy;
}

/* Write a stretch of a row that is a copy, or that is to be rounded. */
static void put_row(void *to, int64_t kind, int64_t at, int64_t count, const REAL *from) {
    if (kind == SAME_AS_RAW && from != (const REAL *)to + at)
        memcpy((REAL *)to + at, from, (size_t)count * sizeof(REAL));
#ifndef SEL_DOUBLE
    if (kind == BFLOAT16) {
        uint16_t *half = (uint16_t *)to + at, rest[LANES];
        int64_t whole = count / LANES * LANES;
        for (int64_t j = 0; j < whole; j += LANES) to_bfloat16(half + j, load(from + j));
        if (whole < count) to_bfloat16(rest, load(from + whole));
        memcpy(half + whole, rest, (size_t)(count - whole) * 2);
    }
#endif
}

/* Sum of squares in double: of plain gradients, and where squares leave the range of float. */
static double squares_of(const REAL *x, int64_t count) {
    double sums[STEP] = {0}, total = 0;
    for (int64_t j = 0; j < count; j += STEP)
        for (int lane = 0; lane < STEP; lane++) sums[lane] += (double)x[j + lane] * (double)x[j + lane];
    for (int lane = 0; lane < STEP; lane++) total += sums[lane];
    return total;
}

INLINE Factors from_column(Factors factors, int64_t column) {
    if (!factors.c) return factors;
    return (Factors){factors.kappa + column, factors.c + column, factors.lambda + column, factors.c_kappa + column};
}

/* A pair of rows; the second may be all zeros, which add nothing. */
typedef struct {
    const REAL *g[PAIR], *w[PAIR];
    REAL *out[PAIR]; /* the raw gradients, where they are wanted */
    int64_t ahead;   /* to the next pair */
    REAL kappa[PAIR], c[PAIR], lambda[PAIR], c_kappa[PAIR];
} Rows;

typedef struct {
    double sums[PAIR][SUMS], squares;
} Pulled;

/* Raw gradients of a pair of rows or the sum of their squares, and what the rows add to the sums of Sums (part.h), over
   whole(mode) where F or E enters. */
INLINE Pulled pull_rows(const Rows *rows, int mode, int normalize, int out, Factors columns, int64_t wide,
                        REAL *column_sums) {
    const int linear = mode == MISMATCH || mode == CONGRUENT;
    V kappa0[PAIR], c0[PAIR], lambda0[PAIR], c_kappa0[PAIR];
    V by_c0[PAIR] = {{0}}, by_lambda0[PAIR] = {{0}}, by_kappa0[PAIR] = {{0}}, squares[PAIR] = {{0}};
    EACH kappa0[i] = all(rows->kappa[i]), c0[i] = all(rows->c[i]), lambda0[i] = all(rows->lambda[i]);
    EACH c_kappa0[i] = all(rows->c_kappa[i]);
    for (int64_t j = 0; j < wide; j += LANES) {
        V kappa1 = load(columns.kappa + j), c1 = load(columns.c + j), lambda1 = load(columns.lambda + j);
        V c_kappa1 = load(columns.c_kappa + j), g[PAIR], w[PAIR], x[PAIR], F[PAIR], E[PAIR], raw[PAIR], term[PAIR], gw[PAIR];
        EACH g[i] = load(rows->g[i] + j), w[i] = load(rows->w[i] + j);
        EACH __builtin_prefetch(rows->g[i] + j + rows->ahead), __builtin_prefetch(rows->w[i] + j + rows->ahead);
        EACH x[i] = kappa0[i] * kappa1 * abs_(w[i]);
        grow(mode, x, F, E);
        EACH raw[i] = g[i] * slope(mode, w[i], c_kappa0[i] * whole(mode) * c_kappa1, lambda0[i] * lambda1, E[i]);
        if (out) EACH store(rows->out[i] + j, raw[i]);
        else EACH squares[i] = fma_(raw[i], raw[i], squares[i]);
        EACH term[i] = with_sign(g[i] * F[i], sign_bits(w[i])), gw[i] = g[i] * w[i];
        V total = load(column_sums + j);
        EACH by_c0[i] = fma_(term[i], c1, by_c0[i]), total = fma_(term[i], c0[i], total);
        store(column_sums + j, total);
        if (linear) {
            total = load(column_sums + wide + j);
            EACH term[i] = mode == MISMATCH ? with_sign(gw[i], sign_bits(w[i])) : gw[i];
            EACH by_lambda0[i] = fma_(term[i], lambda1, by_lambda0[i]), total = fma_(term[i], lambda0[i], total);
            store(column_sums + wide + j, total);
        }
        total = load(column_sums + 2 * wide + j);
        if (normalize) EACH term[i] = with_sign(g[i] * difference(mode, x[i], F[i], E[i]), sign_bits(w[i]));
        else EACH term[i] = gw[i] * E[i];
        EACH by_kappa0[i] = fma_(term[i], normalize ? c1 : c_kappa1, by_kappa0[i]);
        EACH total = fma_(term[i], normalize ? c0[i] : c_kappa0[i], total);
        store(column_sums + 2 * wide + j, total);
    }
    Pulled pulled = {.squares = out ? 0 : sum_of(squares[0]) + sum_of(squares[1])};
    EACH {
        pulled.sums[i][0] = sum_of(by_c0[i]), pulled.sums[i][2] = sum_of(by_kappa0[i]);
        pulled.sums[i][1] = linear ? sum_of(by_lambda0[i]) : 0;
    }
    return pulled;
}

INLINE double pull_tile(const Part *part, const Shared *shared, Tile *tile, int mode, int normalize, int out) {
    REAL copies[PAIR][2][WIDEST], raw[PAIR][WIDEST];
    int64_t width = tile->column_end - tile->column, wide = padded(width);
    double squares = 0;
    memset(tile->column_sums, 0, (size_t)(SUMS * wide) * sizeof(REAL));
    for (int64_t row = tile->row; row < tile->row_end; row += PAIR) {
        int count = tile->row_end - row < PAIR ? 1 : PAIR;
        Rows rows = {.ahead = PAIR * part->cols};
        for (int i = 0; i < PAIR; i++) {
            int64_t from = i < count ? row + i : row, at = from * part->cols + tile->column;
            rows.g[i] = row_of(part->grad, part->grad_kind, at, width, copies[i][0]);
            rows.w[i] = row_of(part->raw, SAME_AS_RAW, at, width, copies[i][1]);
            rows.out[i] = raw[i];
            rows.kappa[i] = shared->rows.kappa[from], rows.c[i] = shared->rows.c[from];
            rows.lambda[i] = shared->rows.lambda[from], rows.c_kappa[i] = shared->rows.c_kappa[from];
        }
        if (count < PAIR) rows.g[1] = rows.w[1] = memset(copies[1][0], 0, (size_t)wide * sizeof(REAL));
        Pulled pulled = pull_rows(&rows, mode, normalize, out, from_column(shared->columns, tile->column), wide,
                                  tile->column_sums);
        squares += pulled.squares;
        for (int i = 0; i < count; i++) {
            if (out) squares += squares_of(raw[i], wide);
            if (out && part->out) put_row(part->out, SAME_AS_RAW, (row + i) * part->cols + tile->column, width, raw[i]);
            for (int k = 0; k < SUMS; k++)
                tile->row_sums[(row + i - tile->row) * SUMS + k] = (REAL)pulled.sums[i][k];
        }
    }
    return squares;
}

typedef struct {
    V kappa, c, lambda;
} RowFactors;

INLINE RowFactors row_factors(Factors factors, int64_t row) {
    return (RowFactors){all(factors.kappa[row]), all(factors.c[row]), all(factors.lambda[row])};
}

INLINE void image_at(int mode, const V *w, RowFactors row, Factors columns, int64_t j, REAL *weight) {
    V kappa[PAIR], c[PAIR], lambda[PAIR], value[PAIR];
    EACH kappa[i] = row.kappa * load(columns.kappa + j + i * LANES), c[i] = row.c * load(columns.c + j + i * LANES);
    EACH lambda[i] = row.lambda * load(columns.lambda + j + i * LANES);
    image(mode, w, c, lambda, kappa, value);
    EACH store(weight + j + i * LANES, value[i]);
}

/* Turn gradients of a row of the weight into those of the raw weight. */
INLINE void raw_gradient_at(int mode, const V *w, RowFactors row, V c_kappa0, Factors columns, int64_t j, V *g) {
    V x[PAIR], F[PAIR], E[PAIR], c_kappa[PAIR], lambda[PAIR];
    EACH x[i] = row.kappa * load(columns.kappa + j + i * LANES) * abs_(w[i]);
    grow(mode, x, F, E);
    EACH c_kappa[i] = c_kappa0 * load(columns.c_kappa + j + i * LANES);
    EACH lambda[i] = row.lambda * load(columns.lambda + j + i * LANES);
    EACH g[i] = g[i] * slope(mode, w[i], c_kappa[i], lambda[i], E[i]);
}

/* AdamW on raw values and the weight that follows from them; `factor` multiplies gradients. */
INLINE void update_tile(const Part *part, const Shared *shared, Tile *tile, int mode, REAL factor) {
    REAL copies[5][WIDEST], unused[WIDEST];
    int64_t width = tile->column_end - tile->column;
    int moves = part->lr != 0, writes = moves && !part->keep && part->weight_kind != NOTHING;
    int in_place = width % STEP == 0;
    int64_t kind = part->weight_kind == NOTHING ? SAME_AS_RAW : part->weight_kind;
    int64_t size = kind == BFLOAT16 ? 2 : (int64_t)sizeof(REAL);
    const char *marked = part->weight_kind == NOTHING ? (const char *)part->raw : (const char *)part->weight;
    Factors columns = from_column(shared->columns, tile->column);
    Factors new_columns = from_column(shared->new_columns, tile->column);
    Rule rule = rule_of(part->lr, part->decay, part, part->corrections);
    for (int64_t row = tile->row; row < tile->row_end; row++) {
        int64_t at = row * part->cols + tile->column;
        const REAL *g = row_of(part->grad, part->grad_kind, at, width, copies[0]);
        const REAL *w = row_of(part->raw, SAME_AS_RAW, at, width, copies[1]);
        REAL *m = (REAL *)row_of(part->exp_avg, SAME_AS_RAW, at, width, copies[2]);
        REAL *v = (REAL *)row_of(part->exp_avg_sq, SAME_AS_RAW, at, width, copies[3]);
        REAL *moved = !moves ? unused : in_place ? part->raw + at : copies[1];
        REAL *weight = writes && in_place && kind == SAME_AS_RAW ? (REAL *)part->weight + at : copies[4];
        RowFactors old, new;
        V c_kappa;
        if (mode != PLAIN) {
            old = row_factors(shared->rows, row), new = row_factors(shared->new_rows, row);
            c_kappa = all(shared->rows.c_kappa[row] * whole(mode) * factor), old.lambda *= factor;
        }
        for (int64_t j = 0; j < width; j += STEP) {
            V x[PAIR], gradient[PAIR], first[PAIR], second[PAIR];
            EACH x[i] = load(w + j + i * LANES), gradient[i] = load(g + j + i * LANES);
            EACH first[i] = load(m + j + i * LANES), second[i] = load(v + j + i * LANES);
            EACH {
                int64_t next = j + i * LANES + part->cols;
                __builtin_prefetch(w + next, 1), __builtin_prefetch(g + next);
                __builtin_prefetch(m + next, 1), __builtin_prefetch(v + next, 1);
                __builtin_prefetch(weight + next, 1);
            }
            if (mode != PLAIN) raw_gradient_at(mode, x, old, c_kappa, columns, j, gradient);
            else EACH gradient[i] = gradient[i] * factor;
            adamw(&rule, x, gradient, first, second);
            EACH store(m + j + i * LANES, first[i]), store(v + j + i * LANES, second[i]);
            EACH store(moved + j + i * LANES, x[i]);
            if (mode != PLAIN) image_at(mode, x, new, new_columns, j, weight);
            else EACH store(weight + j + i * LANES, x[i]);
        }
        put_row(part->exp_avg, SAME_AS_RAW, at, width, m), put_row(part->exp_avg_sq, SAME_AS_RAW, at, width, v);
        if (moves) put_row(part->raw, SAME_AS_RAW, at, width, moved);
        if (writes) put_row(part->weight, kind, at, width, weight);
        add_marks(marked + at * size, size, width, row, tile->column, tile->marks);
    }
}

INLINE void weight_tile(const Part *part, const Shared *shared, const Tile *tile, int mode) {
    REAL copies[2][WIDEST];
    int64_t width = tile->column_end - tile->column;
    int in_place = width % STEP == 0 && part->weight_kind == SAME_AS_RAW;
    Factors columns = from_column(shared->columns, tile->column);
    for (int64_t row = tile->row; row < tile->row_end; row++) {
        int64_t at = row * part->cols + tile->column;
        const REAL *w = row_of(part->raw, SAME_AS_RAW, at, width, copies[0]);
        REAL *weight = in_place ? (REAL *)part->weight + at : copies[1];
        RowFactors factors = row_factors(shared->rows, row);
        for (int64_t j = 0; j < width; j += STEP) {
            V x[PAIR];
            EACH x[i] = load(w + j + i * LANES);
            image_at(mode, x, factors, columns, j, weight);
        }
        put_row(part->weight, part->weight_kind, at, width, weight);
    }
}

#endif
