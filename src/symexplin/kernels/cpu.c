/* The map, AdamW over it and its inverse on CPUs: a list of matrices is cut into tiles, which threads take one after the
   other. No result depends on how many threads there are: every tile writes its own sums, added afterwards in order. */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "element.h"

/* WIDEST columns keep a tile's factors and sums in the first two caches. TALL rows make partial sums by column 1.2 % of
   a weight, and leave enough tiles for several threads. Starting a thread costs about as much as 2^16 entries. */
enum { WIDEST = 1024, TALL = 256, SUMS = 3, FACTORS = 4, ENTRIES_PER_THREAD = 1 << 16 };
enum { WEIGHT, PULL, UPDATE, INVERT };

/* One matrix; every field has eight bytes: symexplin.kernels.cpu packs them in this order. */
typedef struct {
    int64_t rows, cols, row_at, column_at; /* its size, and where its factors and sums begin */
    float *raw, *exp_avg, *exp_avg_sq;
    void *weight;
    const void *grad;
    float *out; /* PULL: the raw gradient, where it is wanted */
    int64_t weight_half, grad_half; /* bfloat16, not float */
} Part;

/* Along one dimension, of all parts: four rows kappa, c, lambda and c kappa of `length` numbers. */
typedef struct {
    const float *of;
    int64_t length;
} Axis;

typedef struct {
    Axis rows, columns;
} Factors;

/* AdamW as symexplin.optim.adamw has it: lr, decay, beta1, beta2, eps, and 1 - beta^t of both. */
typedef struct {
    double lr, decay, beta1, beta2, eps, correction1, correction2, factor;
} Rates;

typedef struct {
    int part;
    int64_t row, row_end, column, column_end;
    float *column_sums; /* SUMS by the tile's width */
    float *row_sums;    /* SUMS by the tile's height */
    double squares;
    int64_t failed;
} Tile;

typedef struct {
    int task, magnitude, normalize;
    const Part *parts;
    int64_t part_count, tile_count;
    Factors old, new;
    Rates rates;
    Tile *tiles;
    atomic_llong next;
} Call;

typedef struct {
    float kappa, c, lambda, c_kappa;
} RowFactors;

/* A tile's column factors, padded to whole steps with those of the identity. */
typedef struct {
    float kappa[WIDEST], c[WIDEST], lambda[WIDEST], c_kappa[WIDEST];
} ColumnFactors;

static int64_t padded(int64_t count) { return (count + STEP - 1) / STEP * STEP; }

static RowFactors row_factors(Axis axis, int64_t at) {
    const float *f = axis.of + at;
    return (RowFactors){f[0], f[axis.length], f[2 * axis.length], f[3 * axis.length]};
}

static void column_factors(Axis axis, int64_t at, int64_t width, ColumnFactors *out) {
    float *to[FACTORS] = {out->kappa, out->c, out->lambda, out->c_kappa};
    for (int k = 0; k < FACTORS; k++) {
        memcpy(to[k], axis.of + k * axis.length + at, (size_t)width * sizeof(float));
        for (int64_t j = width; j < padded(width); j++) to[k][j] = k != 2;
    }
}

/* ---- rows of a tile: the loops below are where the time goes; all counts are whole steps ---- */

static void widen_row(const uint16_t *from, int64_t count, float *to) {
    for (int64_t j = 0; j < count; j += LANES) store(to + j, widen_half(from + j));
}

static void round_row(const float *from, int64_t count, uint16_t *to) {
    for (int64_t j = 0; j < count; j += LANES) round_half(to + j, load(from + j));
}

/* Sums over a pair of rows: of g sign(w) F, g u, and g w E or, normalized, g sign(w) (x E - F), each times the columns'
   factor; F and E over 2. */
typedef struct {
    V c[PAIR], lambda[PAIR], kappa[PAIR], squares[PAIR];
} RowSums;

typedef struct {
    const float *g[PAIR], *w[PAIR];
    float *out[PAIR];
    int64_t ahead; /* to the next pair */
    RowFactors factors[PAIR];
} Rows;

INLINE void pull_rows(const Rows *rows, int64_t at, int64_t count, int magnitude, int normalize, int out,
                      const ColumnFactors *columns, float *column_sums, RowSums *sums) {
    V kappa0[PAIR], c0[PAIR], lambda0[PAIR], c_kappa0[PAIR];
    RowSums total = *sums;
    EACH kappa0[i] = all(rows->factors[i].kappa), c0[i] = all(rows->factors[i].c);
    EACH lambda0[i] = all(rows->factors[i].lambda), c_kappa0[i] = all(rows->factors[i].c_kappa);
    for (int64_t j = 0; j < count; j += LANES) {
        V kappa1 = load(columns->kappa + at + j), c1 = load(columns->c + at + j), by;
        V lambda1 = load(columns->lambda + at + j), c_kappa1 = load(columns->c_kappa + at + j);
        V g[PAIR], w[PAIR], x[PAIR], F[PAIR], E[PAIR], raw[PAIR], term[PAIR];
        float *down = column_sums + at + j;
        EACH g[i] = load(rows->g[i] + j), w[i] = load(rows->w[i] + j);
        EACH __builtin_prefetch(rows->g[i] + j + rows->ahead), __builtin_prefetch(rows->w[i] + j + rows->ahead);
        EACH x[i] = kappa0[i] * kappa1 * abs_(w[i]);
        grow(x, F, E);
        EACH raw[i] = g[i] * slope(magnitude, w[i], (c_kappa0[i] + c_kappa0[i]) * c_kappa1, lambda0[i] * lambda1, E[i]);
        if (out) EACH store(rows->out[i] + j, raw[i]);
        EACH total.squares[i] = fma_(raw[i], raw[i], total.squares[i]);
        EACH term[i] = with_sign(g[i] * F[i], sign_of(w[i])), total.c[i] = fma_(term[i], c1, total.c[i]);
        by = fma_(term[0], c0[0], load(down)), store(down, fma_(term[1], c0[1], by));
        EACH term[i] = g[i] * path(magnitude, w[i]), total.lambda[i] = fma_(term[i], lambda1, total.lambda[i]);
        by = fma_(term[0], lambda0[0], load(down + WIDEST)), store(down + WIDEST, fma_(term[1], lambda0[1], by));
        if (normalize) EACH term[i] = with_sign(g[i] * difference(x[i], F[i], E[i]), sign_of(w[i]));
        else EACH term[i] = g[i] * w[i] * E[i];
        EACH total.kappa[i] = fma_(term[i], normalize ? c1 : c_kappa1, total.kappa[i]);
        by = fma_(term[0], normalize ? c0[0] : c_kappa0[0], load(down + 2 * WIDEST));
        store(down + 2 * WIDEST, fma_(term[1], normalize ? c0[1] : c_kappa0[1], by));
    }
    *sums = total;
}

/* With constants the compiler makes one copy of the loop for each kind of map. */
NOINLINE void pull_pair(const Call *call, const Rows *rows, int64_t at, int64_t count, int out, const ColumnFactors *columns,
                      float *column_sums, RowSums *sums) {
#define PULL_KIND(MAGNITUDE, NORMALIZE, OUT) pull_rows(rows, at, count, MAGNITUDE, NORMALIZE, OUT, columns, column_sums, sums)
    switch (call->magnitude * 4 + call->normalize * 2 + out) {
        case 0: PULL_KIND(0, 0, 0); break;
        case 1: PULL_KIND(0, 0, 1); break;
        case 2: PULL_KIND(0, 1, 0); break;
        case 3: PULL_KIND(0, 1, 1); break;
        case 4: PULL_KIND(1, 0, 0); break;
        case 5: PULL_KIND(1, 0, 1); break;
        case 6: PULL_KIND(1, 1, 0); break;
        default: PULL_KIND(1, 1, 1);
    }
}

INLINE void image_at(int magnitude, const V *w, RowFactors row, const ColumnFactors *columns, int64_t at, float *weight) {
    V kappa[PAIR], c[PAIR], lambda[PAIR], value[PAIR];
    EACH kappa[i] = all(row.kappa) * load(columns->kappa + at + i * LANES);
    EACH c[i] = all(row.c) * load(columns->c + at + i * LANES);
    EACH lambda[i] = all(row.lambda) * load(columns->lambda + at + i * LANES);
    image(magnitude, w, c, lambda, kappa, value);
    EACH store(weight + i * LANES, value[i]);
}

INLINE void image_row(const float *w, int64_t at, int64_t count, int magnitude, RowFactors row,
                      const ColumnFactors *columns, float *weight) {
    for (int64_t j = 0; j < count; j += STEP) {
        V x[PAIR];
        EACH x[i] = load(w + j + i * LANES);
        image_at(magnitude, x, row, columns, at + j, weight + j);
    }
}

/* AdamW with its constants merged: the step is m/(root sqrt(v) + eps), both divided by the rate. */
typedef struct {
    float keep, keep1, gain1, keep2, gain2, root, eps, factor;
} Rule;

static Rule rule_of(const Rates *r) {
    double rate = r->lr / r->correction1;
    return (Rule){(float)(1 - r->lr * r->decay), (float)r->beta1,     (float)(1 - r->beta1),
                  (float)r->beta2,               (float)(1 - r->beta2), (float)(1 / (sqrt(r->correction2) * rate)),
                  (float)(r->eps / rate),        (float)r->factor};
}

INLINE void adamw(const Rule *rule, V *x, const V *g, V *m, V *v) {
    /* As torch's lerp, from the nearer end: a small beta loses no g that is small beside m. g^2 alone overflows early. */
    if (rule->gain1 < 0.5f) EACH m[i] = fma_(g[i] - m[i], all(rule->gain1), m[i]);
    else EACH m[i] = fma_(m[i] - g[i], all(rule->keep1), g[i]);
    EACH v[i] = fma_(g[i] * all(rule->gain2), g[i], v[i] * all(rule->keep2));
    EACH x[i] = x[i] * all(rule->keep) - m[i] / fma_(sqrt_(v[i]), all(rule->root), all(rule->eps));
}

/* A row's raw weight w, gradient g and moments m and v; `moved` and `weight` take the new raw weight and weight. */
typedef struct {
    const float *w, *g;
    float *m, *v, *moved, *weight;
    int64_t ahead; /* to the next row */
    RowFactors old, new;
} Row;

INLINE void update_row(const Row *row, int64_t at, int64_t count, int magnitude, const Rule *rule,
                       const ColumnFactors *old, const ColumnFactors *new) {
    V kappa0 = all(row->old.kappa), lambda0 = all(row->old.lambda * rule->factor);
    V c_kappa0 = all(2 * row->old.c_kappa * rule->factor);
    for (int64_t j = 0; j < count; j += STEP) {
        V w[PAIR], g[PAIR], m[PAIR], v[PAIR], x[PAIR], F[PAIR], E[PAIR], lambda[PAIR], c_kappa[PAIR];
        EACH w[i] = load(row->w + j + i * LANES), g[i] = load(row->g + j + i * LANES);
        EACH m[i] = load(row->m + j + i * LANES), v[i] = load(row->v + j + i * LANES);
        EACH {
            int64_t next = j + i * LANES + row->ahead;
            __builtin_prefetch(row->w + next, 1), __builtin_prefetch(row->g + next);
            __builtin_prefetch(row->m + next, 1), __builtin_prefetch(row->v + next, 1);
            __builtin_prefetch(row->weight + next, 1);
        }
        EACH x[i] = kappa0 * load(old->kappa + at + j + i * LANES) * abs_(w[i]);
        grow(x, F, E);
        EACH lambda[i] = lambda0 * load(old->lambda + at + j + i * LANES);
        EACH c_kappa[i] = c_kappa0 * load(old->c_kappa + at + j + i * LANES);
        EACH g[i] = g[i] * slope(magnitude, w[i], c_kappa[i], lambda[i], E[i]);
        adamw(rule, w, g, m, v);
        EACH store(row->m + j + i * LANES, m[i]), store(row->v + j + i * LANES, v[i]);
        EACH store(row->moved + j + i * LANES, w[i]);
        image_at(magnitude, w, row->new, new, at + j, row->weight + j);
    }
}

NOINLINE void update_one(const Call *call, const Row *row, int64_t at, int64_t count, const Rule *rule,
                         const ColumnFactors *old, const ColumnFactors *new) {
    if (call->magnitude) update_row(row, at, count, 1, rule, old, new);
    else update_row(row, at, count, 0, rule, old, new);
}

/* Raw weights of a row t of the weight; returns whether all of it has one. */
INLINE int invert_row(const float *t, int64_t at, int64_t count, int magnitude, RowFactors row,
                      const ColumnFactors *columns, float *raw) {
    D good = all_double(1), one = all_double(1), zero = all_double(0);
    D kappa0 = all_double(row.kappa), c0 = all_double(row.c), lambda0 = all_double(row.lambda);
    for (int64_t j = 0; j < count; j += LANES / 2) {
        D w = load_double(t + j), tau = (D)((L)w & 0x7fffffffffffffff), sign = (D)((L)w & 0x8000000000000000);
        D kappa = kappa0 * load_double(columns->kappa + at + j), c = c0 * load_double(columns->c + at + j);
        D lambda = lambda0 * load_double(columns->lambda + at + j);
        D least = lambda;
        if (magnitude) least = (D)((L)lambda | 0x8000000000000000); /* -|lambda|: the weaker side */
        D fine = pick_less_double(zero, c, pick_less_double(zero, kappa, one, zero), zero);
        fine = pick_less_double(zero, c * kappa + least, fine, zero);
        good = pick_less_double(tau, all_double(INFINITY), min_double(good, fine), zero);
        if (magnitude) lambda = (D)((L)lambda ^ (L)sign);
        store_double(raw + j, (D)((L)solve(magnitude, tau, c, lambda, kappa) ^ (L)sign));
    }
    double lanes[LANES / 2];
    int all_good = 1;
    memcpy(lanes, &good, sizeof lanes);
    for (int i = 0; i < LANES / 2; i++) all_good &= lanes[i] > 0;
    return all_good;
}

/* The weight from the raw weight, or the raw weight from the weight; returns whether it failed. */
NOINLINE int convert_one(const Call *call, const float *from, int64_t at, int64_t count, RowFactors row,
                         const ColumnFactors *columns, float *to) {
    if (call->task == INVERT && call->magnitude) return !invert_row(from, at, count, 1, row, columns, to);
    if (call->task == INVERT) return !invert_row(from, at, count, 0, row, columns, to);
    if (call->magnitude) image_row(from, at, count, 1, row, columns, to);
    else image_row(from, at, count, 0, row, columns, to);
    return 0;
}

/* ---- tiles ---- */

/* A row of a tile as floats: `count` numbers in place, and what is left of a step, or all of a row of bfloat16, in a
   padded copy. */
typedef struct {
    float copy[WIDEST];
} Buffer;

static int64_t whole_steps(int64_t width) { return width / STEP * STEP; }

static const float *floats_of(const void *from, int64_t half, int64_t at, int64_t width, Buffer *buffer) {
    if (!half) return (const float *)from + at;
    const uint16_t *bits = (const uint16_t *)from + at;
    uint16_t rest[STEP] = {0};
    int64_t whole = whole_steps(width);
    widen_row(bits, whole, buffer->copy);
    if (whole < width) {
        memcpy(rest, bits + whole, (size_t)(width - whole) * sizeof *rest);
        widen_row(rest, STEP, buffer->copy + whole);
    }
    return buffer->copy;
}

static void put_halves(const float *from, int64_t width, uint16_t *to) {
    uint16_t rest[STEP];
    int64_t whole = whole_steps(width);
    round_row(from, whole, to);
    if (whole == width) return;
    round_row(from + whole, STEP, rest);
    memcpy(to + whole, rest, (size_t)(width - whole) * sizeof *rest);
}

/* The last width % STEP numbers of a row, followed by zeros. */
static const float *rest_of(const float *row, int64_t width, float *rest) {
    int64_t whole = whole_steps(width);
    memset(rest, 0, STEP * sizeof(float));
    memcpy(rest, row + whole, (size_t)(width - whole) * sizeof(float));
    return rest;
}

static void put_rest(float *row, int64_t width, const float *rest) {
    int64_t whole = whole_steps(width);
    memcpy(row + whole, rest, (size_t)(width - whole) * sizeof(float));
}

static void pull_tile(const Call *call, const Part *part, Tile *tile) {
    ColumnFactors columns;
    Buffer halves[PAIR];
    float column_sums[SUMS * WIDEST] = {0}, rest[PAIR][3][STEP];
    int64_t width = tile->column_end - tile->column, whole = whole_steps(width);
    column_factors(call->old.columns, part->column_at + tile->column, width, &columns);
    for (int64_t row = tile->row; row < tile->row_end; row += PAIR) {
        int count = tile->row_end - row < PAIR ? 1 : PAIR;
        Rows rows = {.ahead = PAIR * part->cols}, last = {.ahead = 0};
        RowSums sums = {0};
        for (int i = 0; i < PAIR; i++) {
            int64_t from = i < count ? row + i : row, at = from * part->cols + tile->column;
            rows.w[i] = part->raw + at, rows.g[i] = floats_of(part->grad, part->grad_half, at, width, &halves[i]);
            rows.factors[i] = row_factors(call->old.rows, part->row_at + from);
            rows.out[i] = part->out + (part->out ? at : 0);
            if (i >= count) { /* an odd row has a twin without gradient */
                rows.g[i] = memset(halves[i].copy, 0, sizeof halves[i].copy);
                rows.out[i] = halves[i].copy;
            }
            last.w[i] = rest_of(rows.w[i], width, rest[i][0]), last.g[i] = rest_of(rows.g[i], width, rest[i][1]);
            last.out[i] = rest[i][2], last.factors[i] = rows.factors[i];
        }
        pull_pair(call, &rows, 0, whole, part->out != NULL, &columns, column_sums, &sums);
        if (whole < width) pull_pair(call, &last, whole, STEP, part->out != NULL, &columns, column_sums, &sums);
        for (int i = 0; i < count; i++) {
            float *to = tile->row_sums + (row + i - tile->row) * SUMS;
            to[0] = sum_of(sums.c[i]), to[1] = sum_of(sums.lambda[i]), to[2] = sum_of(sums.kappa[i]);
            tile->squares += (double)sum_of(sums.squares[i]);
            if (part->out && whole < width) put_rest(rows.out[i], width, rest[i][2]);
        }
    }
    for (int k = 0; k < SUMS; k++)
        memcpy(tile->column_sums + k * width, column_sums + k * WIDEST, (size_t)width * sizeof(float));
}

static void update_tile(const Call *call, const Part *part, const Tile *tile) {
    ColumnFactors old, new;
    Buffer halves, moved, weights;
    float rest[6][STEP];
    Rule rule = rule_of(&call->rates);
    int64_t width = tile->column_end - tile->column, whole = whole_steps(width);
    int moves = call->rates.lr != 0;
    column_factors(call->old.columns, part->column_at + tile->column, width, &old);
    column_factors(call->new.columns, part->column_at + tile->column, width, &new);
    for (int64_t i = tile->row; i < tile->row_end; i++) {
        int64_t at = i * part->cols + tile->column;
        float *raw = part->raw + at, *m = part->exp_avg + at, *v = part->exp_avg_sq + at;
        Row row = {.w = raw, .m = m, .v = v, .ahead = part->cols};
        row.g = floats_of(part->grad, part->grad_half, at, width, &halves);
        row.moved = moves ? raw : moved.copy; /* at rate 0 moments go on, and weights keep their bits */
        row.weight = moves && !part->weight_half ? (float *)part->weight + at : weights.copy;
        row.old = row_factors(call->old.rows, part->row_at + i), row.new = row_factors(call->new.rows, part->row_at + i);
        update_one(call, &row, 0, whole, &rule, &old, &new);
        if (whole < width) {
            Row last = {.w = rest_of(raw, width, rest[0]), .g = rest_of(row.g, width, rest[1]), .old = row.old, .new = row.new};
            last.m = (float *)rest_of(m, width, rest[2]), last.v = (float *)rest_of(v, width, rest[3]);
            last.moved = rest[4], last.weight = rest[5];
            update_one(call, &last, whole, STEP, &rule, &old, &new);
            put_rest(m, width, last.m), put_rest(v, width, last.v);
            put_rest(row.moved, width, last.moved), put_rest(row.weight, width, last.weight);
        }
        if (moves && part->weight_half) put_halves(weights.copy, width, (uint16_t *)part->weight + at);
    }
}

static void convert_tile(const Call *call, const Part *part, Tile *tile) {
    ColumnFactors columns;
    Buffer halves;
    float rest[2][STEP];
    int64_t width = tile->column_end - tile->column, whole = whole_steps(width), invert = call->task == INVERT;
    column_factors(call->old.columns, part->column_at + tile->column, width, &columns);
    for (int64_t i = tile->row; i < tile->row_end; i++) {
        int64_t at = i * part->cols + tile->column;
        RowFactors row = row_factors(call->old.rows, part->row_at + i);
        const float *from = invert ? floats_of(part->weight, part->weight_half, at, width, &halves) : part->raw + at;
        float *to = invert ? part->raw + at : part->weight_half ? halves.copy : (float *)part->weight + at;
        tile->failed += convert_one(call, from, 0, whole, row, &columns, to);
        if (whole < width) {
            tile->failed += convert_one(call, rest_of(from, width, rest[0]), whole, STEP, row, &columns, rest[1]);
            put_rest(to, width, rest[1]);
        }
        if (!invert && part->weight_half) put_halves(halves.copy, width, (uint16_t *)part->weight + at);
    }
}

static void *take_tiles(void *argument) {
    Call *call = argument;
    for (;;) {
        int64_t next = atomic_fetch_add(&call->next, 1);
        if (next >= call->tile_count) return NULL;
        Tile *tile = &call->tiles[next];
        const Part *part = &call->parts[tile->part];
        if (call->task == PULL) pull_tile(call, part, tile);
        else if (call->task == UPDATE) update_tile(call, part, tile);
        else convert_tile(call, part, tile);
    }
}

static void run_threads(Call *call, int64_t count) {
    pthread_t threads[count > 1 ? count : 1];
    int64_t started = 0;
    while (started < count - 1 && pthread_create(&threads[started], NULL, take_tiles, call) == 0) started++;
    take_tiles(call);
    while (started > 0) pthread_join(threads[--started], NULL);
}

/* ---- a call ---- */

static int64_t pieces(int64_t count, int64_t most) { return count <= most ? 1 : (count + most - 1) / most; }

static void cut(const Call *call, Tile *tiles, float *scratch) {
    for (int64_t index = 0; index < call->part_count; index++) {
        const Part *part = &call->parts[index];
        int64_t across = pieces(part->cols, WIDEST), down = pieces(part->rows, TALL);
        int64_t height = (part->rows + down - 1) / down, width = padded((part->cols + across - 1) / across);
        for (int64_t t = 0; t < across * down; t++) {
            int64_t row = t / across * height, column = t % across * width;
            int64_t row_end = row + height < part->rows ? row + height : part->rows;
            int64_t column_end = column + width < part->cols ? column + width : part->cols;
            if (row > row_end) row = row_end;
            if (column > column_end) column = column_end;
            *tiles = (Tile){.part = (int)index, .row = row, .row_end = row_end, .column = column, .column_end = column_end};
            if (call->task == PULL) {
                tiles->column_sums = scratch, scratch += SUMS * (column_end - column);
                tiles->row_sums = scratch, scratch += SUMS * (row_end - row);
            }
            tiles++;
        }
    }
}

/* Add the tiles' sums to those of their rows, (SUMS, row_length), and columns, and squares to those of their part. */
static void add_up(const Call *call, double *row_sums, double *column_sums, double *squares) {
    for (int64_t t = 0; t < call->tile_count; t++) {
        const Tile *tile = &call->tiles[t];
        const Part *part = &call->parts[tile->part];
        int64_t width = tile->column_end - tile->column;
        for (int k = 0; k < SUMS; k++) {
            double scale = k == 1 ? 1 : 2; /* F and E are over 2 */
            double *by_row = row_sums + k * call->old.rows.length + part->row_at;
            double *by_column = column_sums + k * call->old.columns.length + part->column_at + tile->column;
            for (int64_t i = tile->row; i < tile->row_end; i++)
                by_row[i] += scale * (double)tile->row_sums[(i - tile->row) * SUMS + k];
            for (int64_t j = 0; j < width; j++) by_column[j] += scale * (double)tile->column_sums[k * width + j];
        }
        squares[tile->part] += tile->squares;
    }
}

/* Do a task for all parts, which have factors of one kind of map. Returns 0; -1 where there is no memory for it; or how
   many stretches of rows an inverse has failed on. `squares` has a number per part. */
int64_t sel_run(int task, int magnitude, int normalize, const Part *parts, int64_t part_count, int64_t threads,
                const Factors *old, const Factors *new, const Rates *rates, double *row_sums, double *column_sums,
                double *squares) {
    Call call = {.task = task, .magnitude = magnitude, .normalize = normalize, .parts = parts, .part_count = part_count};
    int64_t numbers = 0, entries = 0, failed = 0;
    call.old = *old, call.new = *new, call.rates = *rates;
    for (int64_t i = 0; i < part_count; i++) {
        int64_t across = pieces(parts[i].cols, WIDEST), down = pieces(parts[i].rows, TALL);
        call.tile_count += across * down;
        numbers += SUMS * (down * parts[i].cols + across * parts[i].rows);
        entries += parts[i].rows * parts[i].cols;
    }
    call.tiles = malloc((size_t)(call.tile_count + 1) * sizeof(Tile));
    float *scratch = malloc((size_t)((task == PULL ? numbers : 0) + 1) * sizeof(float));
    if (call.tiles && scratch) {
        cut(&call, call.tiles, scratch);
        atomic_init(&call.next, 0);
        int64_t useful = entries / ENTRIES_PER_THREAD + 1;
        run_threads(&call, threads < useful ? threads : useful);
        if (task == PULL) add_up(&call, row_sums, column_sums, squares);
        for (int64_t t = 0; t < call.tile_count; t++) failed += call.tiles[t].failed;
    } else {
        failed = -1;
    }
    free(call.tiles), free(scratch);
    return failed;
}

/* The size that symexplin.kernels.cpu must agree on. */
int64_t sel_part_size(void) { return (int64_t)sizeof(Part); }
