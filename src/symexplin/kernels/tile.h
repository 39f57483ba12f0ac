/* The work on one tile of a part, some rows by up to WIDEST columns: pull, update, the weight alone. */
#ifndef SEL_TILE_H
#define SEL_TILE_H

#include "marks.h"
#include "part.h"

/* WIDEST columns keep a tile's column factors and sums in the first two caches. TALL rows make partial sums by column
   1.2 % of a weight, and leave enough tiles for several threads. */
enum { WIDEST = 2048, TALL = 256, ROWS_AT_ONCE = 2, SUMS = 3 };

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

/* A stretch of a row as whole vectors of REAL: in place if it is that already, else a padded copy. */
INLINE const REAL *row_of(const void *from, int64_t kind, int64_t at, int64_t count, REAL *copy) {
    if (kind == SAME_AS_RAW && count % LANES == 0) return (const REAL *)from + at;
    int64_t padded = (count + LANES - 1) / LANES * LANES;
#ifndef SEL_DOUBLE
    if (kind == BFLOAT16) {
        const uint16_t *half = (const uint16_t *)from + at;
        int64_t whole = count / LANES * LANES;
        for (int64_t j = 0; j < whole; j += LANES) store(copy + j, from_bfloat16(half + j));
        if (whole == count) return copy;
        uint16_t rest[LANES] = {0};
        memcpy(rest, half + whole, (size_t)(count - whole) * 2);
        store(copy + whole, from_bfloat16(rest));
        return copy;
    }
#endif
    memcpy(copy, (const REAL *)from + at, (size_t)count * sizeof(REAL));
    memset(copy + count, 0, (size_t)(padded - count) * sizeof(REAL));
    return copy;
}

/* Write a stretch of a row that `row_of` gave as a copy, or that is to be rounded. */
INLINE void put_row(void *to, int64_t kind, int64_t at, int64_t count, const REAL *from) {
    if (kind == SAME_AS_RAW && from != (const REAL *)to + at)
        memcpy((REAL *)to + at, from, (size_t)count * sizeof(REAL));
#ifndef SEL_DOUBLE
    if (kind == BFLOAT16) {
        uint16_t *half = (uint16_t *)to + at, rest[LANES];
        int64_t whole = count / LANES * LANES;
        for (int64_t j = 0; j < whole; j += LANES) to_bfloat16(half + j, load(from + j));
        if (whole == count) return;
        to_bfloat16(rest, load(from + whole));
        memcpy(half + whole, rest, (size_t)(count - whole) * 2);
    }
#endif
}

/* Sum of squares in double: of plain gradients, and where squares leave the range of float. */
static double squares_of(const REAL *x, int64_t count) {
    double sums[LANES] = {0}, total = 0;
    for (int64_t j = 0; j < count; j += LANES)
        for (int lane = 0; lane < LANES; lane++) sums[lane] += (double)x[j + lane] * (double)x[j + lane];
    for (int lane = 0; lane < LANES; lane++) total += sums[lane];
    return total;
}

typedef struct {
    const REAL *g[ROWS_AT_ONCE], *w[ROWS_AT_ONCE];
    REAL *out[ROWS_AT_ONCE]; /* the raw gradient, where it is wanted */
    V kappa[ROWS_AT_ONCE], c[ROWS_AT_ONCE], lambda[ROWS_AT_ONCE];
} Rows;

/* One vector of each of a few rows: raw gradient, its square, and what it adds to the sums by row and by column. */
INLINE void pull_rows(const Rows *rows, int count, int mode, int normalize, int sums, int out, Factors columns,
                      int64_t width, int64_t padded, REAL *column_sums, V by_row[][SUMS], V *squares) {
    for (int64_t j = 0; j < width; j += LANES) {
        V kappa1 = load(columns.kappa + j), c1 = load(columns.c + j), lambda1 = load(columns.lambda + j);
        V c_kappa1 = c1 * kappa1, by_c = {0}, by_lambda = {0}, by_kappa = {0};
        if (sums) {
            by_c = load(column_sums + j), by_kappa = load(column_sums + 2 * padded + j);
            if (mode == MISMATCH || mode == CONGRUENT) by_lambda = load(column_sums + padded + j);
        }
#pragma GCC unroll 4
        for (int i = 0; i < count; i++) {
            V g = load(rows->g[i] + j), w = load(rows->w[i] + j);
            I sign = sign_bits(w);
            V x = rows->kappa[i] * kappa1 * abs_(w);
            Growth growth = grow(mode, x);
            V c_kappa0 = rows->c[i] * rows->kappa[i];
            V raw = g * slope(mode, w, c_kappa0 * c_kappa1, rows->lambda[i] * lambda1, growth.E);
            if (out) store(rows->out[i] + j, raw);
            else squares[i] = fma_(raw, raw, squares[i]);
            if (!sums) continue;
            V c = with_sign(g * growth.F, sign), gw = g * w;
            by_row[i][0] = fma_(c, c1, by_row[i][0]), by_c = fma_(c, rows->c[i], by_c);
            if (mode == MISMATCH || mode == CONGRUENT) {
                V lambda = mode == MISMATCH ? with_sign(gw, sign) : gw;
                by_row[i][1] = fma_(lambda, lambda1, by_row[i][1]);
                by_lambda = fma_(lambda, rows->lambda[i], by_lambda);
            }
            if (normalize) {
                V kappa = with_sign(g * difference(mode, x, growth), sign);
                by_row[i][2] = fma_(kappa, c1, by_row[i][2]), by_kappa = fma_(kappa, rows->c[i], by_kappa);
            } else {
                V kappa = gw * growth.E;
                by_row[i][2] = fma_(kappa, c_kappa1, by_row[i][2]), by_kappa = fma_(kappa, c_kappa0, by_kappa);
            }
        }
        if (sums) {
            store(column_sums + j, by_c), store(column_sums + 2 * padded + j, by_kappa);
            if (mode == MISMATCH || mode == CONGRUENT) store(column_sums + padded + j, by_lambda);
        }
    }
}

INLINE Factors from_column(Factors all_columns, int64_t column) {
    return (Factors){all_columns.kappa + column, all_columns.c + column, all_columns.lambda + column};
}

INLINE double pull_tile(const Part *part, const Shared *shared, Tile *tile, int mode, int normalize, int sums, int out) {
    REAL copies[ROWS_AT_ONCE][2][WIDEST], raw[ROWS_AT_ONCE][WIDEST];
    int64_t width = tile->column_end - tile->column, padded = (width + LANES - 1) / LANES * LANES;
    Factors columns = from_column(shared->columns, tile->column);
    double squares = 0;
    if (sums) memset(tile->column_sums, 0, (size_t)(SUMS * padded) * sizeof(REAL));
    for (int64_t row = tile->row; row < tile->row_end; row += ROWS_AT_ONCE) {
        int count = tile->row_end - row < ROWS_AT_ONCE ? (int)(tile->row_end - row) : ROWS_AT_ONCE;
        Rows rows;
        V by_row[ROWS_AT_ONCE][SUMS] = {{{0}}}, square[ROWS_AT_ONCE] = {{0}};
        for (int i = 0; i < count; i++) {
            int64_t at = (row + i) * part->cols + tile->column;
            rows.g[i] = row_of(part->grad, part->grad_kind, at, width, copies[i][0]);
            rows.w[i] = row_of(part->raw, SAME_AS_RAW, at, width, copies[i][1]);
            rows.out[i] = raw[i];
            rows.kappa[i] = all(shared->rows.kappa[row + i]), rows.c[i] = all(shared->rows.c[row + i]);
            rows.lambda[i] = all(shared->rows.lambda[row + i]);
        }
        if (count == ROWS_AT_ONCE)
            pull_rows(&rows, ROWS_AT_ONCE, mode, normalize, sums, out, columns, width, padded, tile->column_sums,
                      by_row, square);
        else
            pull_rows(&rows, 1, mode, normalize, sums, out, columns, width, padded, tile->column_sums, by_row, square);
        for (int i = 0; i < count; i++) {
            squares += out ? squares_of(raw[i], padded) : sum_of(square[i]);
            if (out && part->out) put_row(part->out, SAME_AS_RAW, (row + i) * part->cols + tile->column, width, raw[i]);
            for (int k = 0; sums && k < SUMS; k++)
                tile->row_sums[(row + i - tile->row) * SUMS + k] = (REAL)sum_of(by_row[i][k]);
        }
    }
    return squares;
}

/* AdamW on raw values and the weight that follows from them; `factor` multiplies gradients. */
INLINE void update_tile(const Part *part, const Shared *shared, Tile *tile, int mode, REAL factor) {
    REAL copies[5][WIDEST], unused[WIDEST];
    int64_t width = tile->column_end - tile->column;
    int moves = part->lr != 0, writes = moves && !part->keep && part->weight_kind != NOTHING;
    int in_place = width % LANES == 0;
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
        REAL *weight = writes && in_place && part->weight_kind == SAME_AS_RAW ? (REAL *)part->weight + at : copies[4];
        V kappa0, c0, lambda0, new_kappa0, new_c0, new_lambda0;
        if (mode != PLAIN) {
            kappa0 = all(shared->rows.kappa[row]), new_kappa0 = all(shared->new_rows.kappa[row]);
            c0 = all(shared->rows.c[row]), new_c0 = all(shared->new_rows.c[row]);
            lambda0 = all(shared->rows.lambda[row]), new_lambda0 = all(shared->new_rows.lambda[row]);
        }
        for (int64_t j = 0; j < width; j += LANES) {
            V x = load(w + j), gradient = load(g + j), first = load(m + j), second = load(v + j);
            if (mode != PLAIN) {
                V kappa1 = load(columns.kappa + j), c1 = load(columns.c + j);
                V E = grow(mode, kappa0 * kappa1 * abs_(x)).E;
                V c_kappa = (c0 * kappa0) * (c1 * kappa1);
                gradient = gradient * slope(mode, x, c_kappa, lambda0 * load(columns.lambda + j), E);
            }
            x = adamw(&rule, x, gradient * factor, &first, &second);
            store(m + j, first), store(v + j, second), store(moved + j, x);
            if (mode != PLAIN)
                x = image(mode, x, new_c0 * load(new_columns.c + j), new_lambda0 * load(new_columns.lambda + j),
                          new_kappa0 * load(new_columns.kappa + j));
            store(weight + j, x);
        }
        put_row(part->exp_avg, SAME_AS_RAW, at, width, m), put_row(part->exp_avg_sq, SAME_AS_RAW, at, width, v);
        if (moves) put_row(part->raw, SAME_AS_RAW, at, width, moved);
        if (writes) put_row(part->weight, part->weight_kind, at, width, weight);
        int64_t kind = part->weight_kind == NOTHING ? SAME_AS_RAW : part->weight_kind;
        const char *marked = part->weight_kind == NOTHING ? (const char *)part->raw : (const char *)part->weight;
        int64_t size = kind == BFLOAT16 ? 2 : (int64_t)sizeof(REAL);
        add_marks(marked + at * size, size, width, row, tile->column, tile->marks);
    }
}

INLINE void weight_tile(const Part *part, const Shared *shared, const Tile *tile, int mode) {
    REAL copies[2][WIDEST];
    int64_t width = tile->column_end - tile->column;
    int in_place = width % LANES == 0 && part->weight_kind == SAME_AS_RAW;
    Factors columns = from_column(shared->columns, tile->column);
    for (int64_t row = tile->row; row < tile->row_end; row++) {
        int64_t at = row * part->cols + tile->column;
        const REAL *w = row_of(part->raw, SAME_AS_RAW, at, width, copies[0]);
        REAL *weight = in_place ? (REAL *)part->weight + at : copies[1];
        V kappa0 = all(shared->rows.kappa[row]), c0 = all(shared->rows.c[row]), lambda0 = all(shared->rows.lambda[row]);
        for (int64_t j = 0; j < width; j += LANES)
            store(weight + j, image(mode, load(w + j), c0 * load(columns.c + j), lambda0 * load(columns.lambda + j),
                                    kappa0 * load(columns.kappa + j)));
        put_row(part->weight, part->weight_kind, at, width, weight);
    }
}

#endif
