/* The map, its inverse and AdamW on CPUs. A list of matrices is cut into tiles, which threads process in turn. Results
   do not depend on the number of threads: every tile writes its own sums, which are added in order at the end. */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "element.h"

/* With WIDEST columns a tile's factors and sums fit the second-level cache, and processors prefetch whole rows. With
   TALL rows the partial sums by column are 1.2 % of a weight, and there are enough tiles for several threads. Starting
   a thread costs about as much as 2^16 entries. */
enum { WIDEST = 2048, TALL = 256, SUMS = 3, FACTORS = 4, ENTRIES_PER_THREAD = 1 << 16 };
enum { WEIGHT, PULL, UPDATE, INVERT };

/* One matrix. Every field has eight bytes; symexplin.kernels.cpu packs them in this order. */
typedef struct {
    int64_t rows, cols, row_at, column_at; /* its size, and the offsets of its factors and sums */
    float *raw, *exp_avg, *exp_avg_sq;
    void *weight;
    const void *grad;
    float *out; /* PULL: the raw gradient, or NULL */
    int64_t half; /* weight and gradient are bfloat16, not float */
} Part;

/* The factors of all parts along one dimension: four rows kappa, c, lambda and c kappa of `length` numbers. */
typedef struct {
    const float *of;
    int64_t length;
} Axis;

typedef struct {
    Axis rows, columns;
} Factors;

/* AdamW's numbers as in symexplin.optim.adamw, with corrections 1 - beta^t; `factor` clips the gradient. */
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

/* A tile's column factors, padded to whole steps with the identity's. */
typedef struct {
    _Alignas(64) float kappa[WIDEST], c[WIDEST], lambda[WIDEST], c_kappa[WIDEST];
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

/* The largest |lambda|/(c kappa) along one dimension of a tile. */
static float flattest(Axis axis, int64_t from, int64_t end) {
    const float *lambda = axis.of + 2 * axis.length, *c_kappa = lambda + axis.length;
    float found = 0;
    for (int64_t i = from; i < end; i++) {
        float here = fabsf(lambda[i] / c_kappa[i]);
        if (here > found || here != here) found = here;
    }
    return found;
}

/* The type of a tile's numbers. The weight minus its linear pathway has an error of 1 + lambda/(c kappa) units of
   rounding, so READ needs a small ratio. A call with `out` may have no valid weight. */
static int as_of(const Call *call, const Part *part, const Tile *tile) {
    enum { MOST = 8 };
    if (part->half) return HALF;
    if (call->normalize || part->out) return FLOAT;
    float rows = flattest(call->old.rows, part->row_at + tile->row, part->row_at + tile->row_end);
    float columns = flattest(call->old.columns, part->column_at + tile->column, part->column_at + tile->column_end);
    return rows * columns <= MOST ? READ : FLOAT;
}

/* ---- rows of a tile: the loops below take most of the time; all counts are whole steps ---- */

/* Sums over a pair of rows of g sign(w) F, g u and g w E, each times the columns' factor; normalized maps have
   g sign(w) (x E - F) as the third. F and E are halved. For READ the first and third are times twice the row's c. */
typedef struct {
    V c[PAIR], lambda[PAIR], kappa[PAIR], squares[PAIR];
} RowSums;

typedef struct {
    const void *g[PAIR];
    const float *w[PAIR], *weight[PAIR]; /* the weight only for READ */
    float *out[PAIR];
    int64_t ahead; /* distance to the next pair */
    RowFactors factors[PAIR];
} Rows;

/* Add terms to the sums of a pair of rows and of the columns. */
INLINE void add_terms(const V *term, V by_column, const V *by_row, V *total, float *down) {
    EACH total[i] = fma_(term[i], by_column, total[i]);
    store(down, fma_(term[1], by_row[1], fma_(term[0], by_row[0], load(down))));
}

INLINE void pull_rows(const Rows *rows, int64_t at, int64_t count, int magnitude, int normalize, int as,
                      const ColumnFactors *columns, float *column_sums, RowSums *sums) {
    V kappa0[PAIR], c0[PAIR], lambda0[PAIR], c_kappa0[PAIR], one[PAIR];
    RowSums total = *sums;
    EACH kappa0[i] = all((float)((as == READ ? 1 : LOG2E) * rows->factors[i].kappa)), c0[i] = all(rows->factors[i].c);
    EACH lambda0[i] = all(rows->factors[i].lambda), c_kappa0[i] = all(rows->factors[i].c_kappa), one[i] = all(1);
    for (int64_t j = 0; j < count; j += LANES) {
        V kappa1 = load(columns->kappa + at + j), c1 = load(columns->c + at + j);
        V lambda1 = load(columns->lambda + at + j), c_kappa1 = load(columns->c_kappa + at + j);
        V g[PAIR], w[PAIR], x[PAIR], F[PAIR], E[PAIR], raw[PAIR], steep[PAIR], lambda[PAIR], term[PAIR];
        float *down = column_sums + at + j;
        EACH g[i] = load_as(as, rows->g[i], j), w[i] = load(rows->w[i] + j), lambda[i] = lambda0[i] * lambda1;
        EACH prefetch_as(as, rows->g[i], j + rows->ahead), prefetch(rows->w[i] + j + rows->ahead);
        if (as == READ) {
            EACH prefetch(rows->weight[i] + j + rows->ahead);
            EACH known(magnitude, w[i], load(rows->weight[i] + j), c0[i] * c1, lambda[i], &F[i], &E[i]);
            EACH steep[i] = kappa0[i] * kappa1, term[i] = g[i] * F[i];
            add_terms(term, one[0], one, total.c, down);
        } else {
            EACH x[i] = kappa0[i] * kappa1 * abs_(w[i]);
            grow(x, F, E);
            EACH steep[i] = (c_kappa0[i] + c_kappa0[i]) * c_kappa1, term[i] = with_sign(g[i] * F[i], sign_of(w[i]));
            add_terms(term, c1, c0, total.c, down);
        }
        EACH raw[i] = g[i] * slope(magnitude, w[i], steep[i], lambda[i], E[i]);
        if (rows->out[0]) EACH store(rows->out[i] + j, raw[i]);
        EACH total.squares[i] = fma_(raw[i], raw[i], total.squares[i]);
        EACH term[i] = g[i] * path(magnitude, w[i]);
        add_terms(term, lambda1, lambda0, total.lambda, down + WIDEST);
        if (normalize) EACH term[i] = with_sign(g[i] * difference(x[i], F[i], E[i]), sign_of(w[i]));
        else EACH term[i] = g[i] * w[i] * E[i];
        if (as == READ) add_terms(term, kappa1, kappa0, total.kappa, down + 2 * WIDEST);
        else add_terms(term, normalize ? c1 : c_kappa1, normalize ? c0 : c_kappa0, total.kappa, down + 2 * WIDEST);
    }
    *sums = total;
}

/* Constant arguments make the compiler specialise the loop for each kind of map and numbers. */
NOINLINE void pull_pair(const Call *call, const Rows *rows, int64_t at, int64_t count, int as, const ColumnFactors *columns,
                        float *column_sums, RowSums *sums) {
#define PULL_KIND(MAGNITUDE, NORMALIZE, AS) pull_rows(rows, at, count, MAGNITUDE, NORMALIZE, AS, columns, column_sums, sums)
    switch (call->magnitude * 5 + (as == READ ? 4 : call->normalize * 2 + as)) {
        case 0: PULL_KIND(0, 0, FLOAT); break;
        case 1: PULL_KIND(0, 0, HALF); break;
        case 2: PULL_KIND(0, 1, FLOAT); break;
        case 3: PULL_KIND(0, 1, HALF); break;
        case 4: PULL_KIND(0, 0, READ); break;
        case 5: PULL_KIND(1, 0, FLOAT); break;
        case 6: PULL_KIND(1, 0, HALF); break;
        case 7: PULL_KIND(1, 1, FLOAT); break;
        case 8: PULL_KIND(1, 1, HALF); break;
        default: PULL_KIND(1, 0, READ);
    }
}

/* The weights of one step's raw weights w. */
INLINE void image_at(int magnitude, const V *w, RowFactors row, const ColumnFactors *columns, int64_t at, V *weight) {
    V y[PAIR], F[PAIR], E[PAIR];
    EACH y[i] = all((float)(LOG2E * row.kappa)) * load(columns->kappa + at + i * LANES) * abs_(w[i]);
    grow(y, F, E);
    EACH F[i] = all(row.c) * load(columns->c + at + i * LANES) * with_sign(F[i] + F[i], sign_of(w[i]));
    EACH weight[i] = fma_(all(row.lambda) * load(columns->lambda + at + i * LANES), path(magnitude, w[i]), F[i]);
}

INLINE void image_row(const float *w, int64_t at, int64_t count, int magnitude, int as, RowFactors row,
                      const ColumnFactors *columns, void *weight) {
    for (int64_t j = 0; j < count; j += STEP) {
        V x[PAIR], value[PAIR];
        EACH x[i] = load(w + j + i * LANES);
        image_at(magnitude, x, row, columns, at + j, value);
        EACH store_as(as, weight, j + i * LANES, value[i]);
    }
}

/* AdamW with merged constants: the step is m/(root sqrt(v) + eps), with root and eps divided by the rate. */
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
    /* As in torch's lerp, from the nearer end: with a small beta a g much smaller than m still counts. g^2 without its
       factor overflows early. */
    if (rule->gain1 < 0.5f) EACH m[i] = fma_(g[i] - m[i], all(rule->gain1), m[i]);
    else EACH m[i] = fma_(m[i] - g[i], all(rule->keep1), g[i]);
    EACH v[i] = fma_(g[i] * all(rule->gain2), g[i], v[i] * all(rule->keep2));
    EACH x[i] = x[i] * all(rule->keep) - m[i] / fma_(sqrt_(v[i]), all(rule->root), all(rule->eps));
}

/* A row's raw weight w, weight (only for READ), gradient g and moments m and v. `moved` and `weight` get the new raw
   weight and weight. */
typedef struct {
    const float *w, *known;
    const void *g;
    float *m, *v, *moved;
    void *weight;
    int64_t ahead; /* distance to the next row */
    RowFactors old, new;
    Rule rule;
} Row;

/* `row` is passed by value: behind a pointer, stores of floats could alias its floats. */
INLINE void update_row(Row row, int64_t at, int64_t count, int magnitude, int as, const ColumnFactors *old,
                       const ColumnFactors *new) {
    V kappa0 = all((float)((as == READ ? row.rule.factor : LOG2E) * row.old.kappa)), c0 = all(row.old.c);
    V lambda0 = all(row.old.lambda), factor = all(row.rule.factor), c_kappa0 = all(2 * row.old.c_kappa * row.rule.factor);
    for (int64_t j = 0; j < count; j += STEP) {
        V w[PAIR], g[PAIR], m[PAIR], v[PAIR], y[PAIR], F[PAIR], E[PAIR], lambda[PAIR], steep[PAIR], value[PAIR];
        EACH w[i] = load(row.w + j + i * LANES), g[i] = load_as(as, row.g, j + i * LANES);
        EACH m[i] = load(row.m + j + i * LANES), v[i] = load(row.v + j + i * LANES);
        EACH {
            int64_t next = j + i * LANES + row.ahead;
            prefetch(row.w + next), prefetch_as(as, row.g, next), prefetch(row.m + next), prefetch(row.v + next);
        }
        EACH lambda[i] = lambda0 * load(old->lambda + at + j + i * LANES);
        if (as == READ) {
            EACH prefetch(row.known + j + i * LANES + row.ahead);
            EACH known(magnitude, w[i], load(row.known + j + i * LANES), c0 * load(old->c + at + j + i * LANES), lambda[i],
                       &F[i], &E[i]);
            EACH steep[i] = kappa0 * load(old->kappa + at + j + i * LANES);
        } else {
            EACH y[i] = kappa0 * load(old->kappa + at + j + i * LANES) * abs_(w[i]);
            grow(y, F, E);
            EACH steep[i] = c_kappa0 * load(old->c_kappa + at + j + i * LANES);
        }
        EACH g[i] = g[i] * slope(magnitude, w[i], steep[i], lambda[i] * factor, E[i]);
        adamw(&row.rule, w, g, m, v);
        EACH store(row.m + j + i * LANES, m[i]), store(row.v + j + i * LANES, v[i]);
        EACH store(row.moved + j + i * LANES, w[i]);
        image_at(magnitude, w, row.new, new, at + j, value);
        EACH store_as(as, row.weight, j + i * LANES, value[i]);
    }
}

NOINLINE void update_one(const Call *call, const Row *row, int64_t at, int64_t count, int as, const ColumnFactors *old,
                         const ColumnFactors *new) {
#define UPDATE_KIND(MAGNITUDE, AS) update_row(*row, at, count, MAGNITUDE, AS, old, new)
    switch (call->magnitude * 3 + as) {
        case FLOAT: UPDATE_KIND(0, FLOAT); break;
        case HALF: UPDATE_KIND(0, HALF); break;
        case READ: UPDATE_KIND(0, READ); break;
        case 3 + FLOAT: UPDATE_KIND(1, FLOAT); break;
        case 3 + HALF: UPDATE_KIND(1, HALF); break;
        default: UPDATE_KIND(1, READ);
    }
}

/* Raw weights of a row t of the weight; returns whether all entries have one. */
INLINE int invert_row(const void *t, int64_t at, int64_t count, int magnitude, int as, RowFactors row,
                      const ColumnFactors *columns, float *raw) {
    D good = all_double(1), one = all_double(1), zero = all_double(0);
    D kappa0 = all_double(row.kappa), c0 = all_double(row.c), lambda0 = all_double(row.lambda);
    float lanes[LANES];
    for (int64_t j = 0; j < count; j += LANES / 2) {
        if (j % LANES == 0) store(lanes, load_as(as, t, j));
        D w = load_double(lanes + j % LANES), tau = (D)((L)w & 0x7fffffffffffffff), sign = (D)((L)w & 0x8000000000000000);
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
    double all_lanes[LANES / 2];
    int all_good = 1;
    memcpy(all_lanes, &good, sizeof all_lanes);
    for (int i = 0; i < LANES / 2; i++) all_good &= all_lanes[i] > 0;
    return all_good;
}

/* The weight from the raw weight, or the raw weight from the weight; returns whether it failed. */
NOINLINE int convert_one(const Call *call, const void *from, int64_t at, int64_t count, int as, RowFactors row,
                         const ColumnFactors *columns, void *to) {
#define CONVERT_KIND(MAGNITUDE, AS) \
    if (call->task == INVERT) return !invert_row(from, at, count, MAGNITUDE, AS, row, columns, to); \
    image_row(from, at, count, MAGNITUDE, AS, row, columns, to)
    if (call->magnitude && as == HALF) { CONVERT_KIND(1, HALF); }
    else if (call->magnitude) { CONVERT_KIND(1, FLOAT); }
    else if (as == HALF) { CONVERT_KIND(0, HALF); }
    else { CONVERT_KIND(0, FLOAT); }
    return 0;
}

/* ---- tiles ---- */

/* The rest of a row after whole steps, padded to one step. */
typedef struct {
    _Alignas(64) char bytes[STEP * sizeof(float)];
} Rest;

static int64_t whole_steps(int64_t width) { return width / STEP * STEP; }

static int64_t size_as(int as) { return as == HALF ? 2 : 4; }

static const void *at_as(int as, const void *p, int64_t at) { return (const char *)p + at * size_as(as); }

/* The last width % STEP numbers of a row, followed by zeros. */
static void *rest_of(int as, const void *row, int64_t width, Rest *rest) {
    int64_t whole = whole_steps(width);
    memset(rest, 0, sizeof *rest);
    return memcpy(rest, at_as(as, row, whole), (size_t)((width - whole) * size_as(as)));
}

static void put_rest(int as, void *row, int64_t width, const void *rest) {
    int64_t whole = whole_steps(width);
    memcpy((char *)row + whole * size_as(as), rest, (size_t)((width - whole) * size_as(as)));
}

/* The columns that do not fill a step. */
static void pull_rest(const Call *call, const Rows *rows, int64_t width, int as, const ColumnFactors *columns,
                      float *column_sums, RowSums *sums) {
    Rest g[PAIR], w[PAIR], weight[PAIR], out[PAIR];
    Rows last = *rows;
    last.ahead = 0;
    for (int i = 0; i < PAIR; i++) {
        last.g[i] = rest_of(as, rows->g[i], width, &g[i]), last.w[i] = rest_of(FLOAT, rows->w[i], width, &w[i]);
        if (rows->out[i]) last.out[i] = (float *)out[i].bytes;
        if (as == READ) last.weight[i] = rest_of(FLOAT, rows->weight[i], width, &weight[i]);
    }
    pull_pair(call, &last, whole_steps(width), STEP, as, columns, column_sums, sums);
    for (int i = 0; i < PAIR; i++)
        if (rows->out[i]) put_rest(FLOAT, rows->out[i], width, out[i].bytes);
}

static void pull_tile(const Call *call, const Part *part, Tile *tile) {
    ColumnFactors columns;
    static const float no_gradient[WIDEST];
    _Alignas(64) float column_sums[SUMS * WIDEST] = {0}, unused[WIDEST];
    int64_t width = tile->column_end - tile->column, whole = whole_steps(width);
    int as = as_of(call, part, tile);
    column_factors(call->old.columns, part->column_at + tile->column, width, &columns);
    for (int64_t row = tile->row; row < tile->row_end; row += PAIR) {
        int count = tile->row_end - row < PAIR ? 1 : PAIR;
        Rows rows = {.ahead = PAIR * part->cols};
        RowSums sums = {0};
        for (int i = 0; i < PAIR; i++) { /* a last odd row is paired with itself, without gradient */
            int64_t from = i < count ? row + i : row, at = from * part->cols + tile->column;
            rows.w[i] = part->raw + at, rows.g[i] = i < count ? at_as(as, part->grad, at) : no_gradient;
            if (part->out) rows.out[i] = i < count ? part->out + at : unused;
            if (as == READ) rows.weight[i] = (const float *)part->weight + at;
            rows.factors[i] = row_factors(call->old.rows, part->row_at + from);
        }
        pull_pair(call, &rows, 0, whole, as, &columns, column_sums, &sums);
        if (whole < width) pull_rest(call, &rows, width, as, &columns, column_sums, &sums);
        for (int i = 0; i < count; i++) {
            float *to = tile->row_sums + (row + i - tile->row) * SUMS, unit = as == READ ? 2 * rows.factors[i].c : 1;
            to[0] = sum_of(sums.c[i]) / unit, to[1] = sum_of(sums.lambda[i]), to[2] = sum_of(sums.kappa[i]) / unit;
            tile->squares += (double)sum_of(sums.squares[i]);
        }
    }
    for (int k = 0; k < SUMS; k++)
        for (int64_t j = 0; j < width; j++)
            tile->column_sums[k * width + j] = column_sums[k * WIDEST + j] / (as == READ && k != 1 ? 2 * columns.c[j] : 1);
}

static void update_rest(const Call *call, const Row *row, int64_t width, int as, const ColumnFactors *old,
                        const ColumnFactors *new) {
    Rest w, g, m, v, moved, weight, given;
    Row last = *row;
    last.ahead = 0;
    last.w = rest_of(FLOAT, row->w, width, &w), last.g = rest_of(as, row->g, width, &g);
    last.m = rest_of(FLOAT, row->m, width, &m), last.v = rest_of(FLOAT, row->v, width, &v);
    last.moved = (float *)moved.bytes, last.weight = weight.bytes;
    if (as == READ) last.known = rest_of(FLOAT, row->known, width, &given);
    update_one(call, &last, whole_steps(width), STEP, as, old, new);
    put_rest(FLOAT, row->m, width, &m), put_rest(FLOAT, row->v, width, &v);
    put_rest(FLOAT, row->moved, width, &moved), put_rest(as, row->weight, width, &weight);
}

static void update_tile(const Call *call, const Part *part, const Tile *tile) {
    ColumnFactors old, new;
    _Alignas(64) float unmoved[WIDEST], unwritten[WIDEST];
    Row row = {.ahead = 2 * part->cols, .rule = rule_of(&call->rates)};
    int64_t width = tile->column_end - tile->column, whole = whole_steps(width);
    int moves = call->rates.lr != 0; /* with lr 0 only moments change */
    int as = as_of(call, part, tile);
    column_factors(call->old.columns, part->column_at + tile->column, width, &old);
    column_factors(call->new.columns, part->column_at + tile->column, width, &new);
    for (int64_t i = tile->row; i < tile->row_end; i++) {
        int64_t at = i * part->cols + tile->column;
        row.w = part->raw + at, row.m = part->exp_avg + at, row.v = part->exp_avg_sq + at;
        row.g = at_as(as, part->grad, at), row.known = (const float *)part->weight + at;
        row.moved = moves ? part->raw + at : unmoved;
        row.weight = moves ? (void *)at_as(as, part->weight, at) : unwritten;
        row.old = row_factors(call->old.rows, part->row_at + i), row.new = row_factors(call->new.rows, part->row_at + i);
        update_one(call, &row, 0, whole, as, &old, &new);
        if (whole < width) update_rest(call, &row, width, as, &old, &new);
    }
}

static void convert_tile(const Call *call, const Part *part, Tile *tile) {
    ColumnFactors columns;
    Rest given, made;
    int64_t width = tile->column_end - tile->column, whole = whole_steps(width);
    int as = part->half ? HALF : FLOAT, invert = call->task == INVERT, as_from = invert ? as : FLOAT;
    column_factors(call->old.columns, part->column_at + tile->column, width, &columns);
    for (int64_t i = tile->row; i < tile->row_end; i++) {
        int64_t at = i * part->cols + tile->column;
        RowFactors row = row_factors(call->old.rows, part->row_at + i);
        void *weight = (void *)at_as(as, part->weight, at), *raw = part->raw + at;
        void *from = invert ? weight : raw, *to = invert ? raw : weight;
        tile->failed += convert_one(call, from, 0, whole, as, row, &columns, to);
        if (whole < width) {
            tile->failed += convert_one(call, rest_of(as_from, from, width, &given), whole, STEP, as, row, &columns, &made);
            put_rest(invert ? FLOAT : as, to, width, &made);
        }
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

/* Add the tiles' sums to those of rows, (SUMS, row_length), and columns, and their squares to those of the part. */
static void add_up(const Call *call, double *row_sums, double *column_sums, double *squares) {
    for (int64_t t = 0; t < call->tile_count; t++) {
        const Tile *tile = &call->tiles[t];
        const Part *part = &call->parts[tile->part];
        int64_t width = tile->column_end - tile->column;
        for (int k = 0; k < SUMS; k++) {
            double scale = k == 1 ? 1 : 2; /* F and E are halved */
            double *by_row = row_sums + k * call->old.rows.length + part->row_at;
            double *by_column = column_sums + k * call->old.columns.length + part->column_at + tile->column;
            for (int64_t i = tile->row; i < tile->row_end; i++)
                by_row[i] += scale * (double)tile->row_sums[(i - tile->row) * SUMS + k];
            for (int64_t j = 0; j < width; j++) by_column[j] += scale * (double)tile->column_sums[k * width + j];
        }
        squares[tile->part] += tile->squares;
    }
}

/* Run a task for all parts, which have one kind of map. Returns 0, -1 without memory, or the number of row segments
   without an inverse. `squares` has one number per part. */
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

/* The size of Part, which symexplin.kernels.cpu checks. */
int64_t sel_part_size(void) { return (int64_t)sizeof(Part); }
