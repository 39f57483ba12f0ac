/* The map, and AdamW in closed form, on CPUs: plain loops, which the compiler turns into vector instructions.

   Results do not depend on the number of threads: work is cut into fixed tiles, whose sums are added in order.
   `omp simd` says that a loop's pointers do not overlap; a sum that it names has one partial sum per lane. */
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline))

typedef const float *restrict In;
typedef float *restrict Out;
#define ARRAY _Alignas(64) float /* a vector in one cache line */

/* ---- what Python passes, in the order of symexplin.kernels.cpu ---- */

/* Rows `start` to `stop` of a matrix, or entries of a tensor, and where they are in scratch memory. */
typedef struct {
    int64_t item, start, stop, at;
} Task;

/* `row` and `col` are its first ones among those of all matrices, which have factors and sums in common arrays. */
typedef struct {
    int64_t rows, cols, row, col, rank;
    float *raw, *exp_avg, *exp_avg_sq;
    char *weight;
    const float *a, *b; /* of the delta A B, with their gradients */
    float *by_a, *by_b;
} Matrix;

/* AdamW's direction times the rate is m/(sqrt_scale sqrt(s) + eps), and `decay` is lr wd. In the closed form raw
   gradients are g (base + slope |v|). */
typedef struct {
    float from_grad, lerp_weight, beta2, one_minus_beta2, sqrt_scale, eps, clip, one_minus_decay, decay;
    float base, slope, c, inverse, kappa;
} Step;

typedef struct {
    int64_t kind, count, bf16; /* count: tasks; bf16: weights and gradients are bfloat16 */
    const Task *tasks;
    double *squares; /* of each task's raw gradients, for norms; zeros before */
    float *scratch, *values; /* raw gradients, or for norms sums by column; raw weights of the closed form */
    Step step;
    void *const *grads;
    /* Of the closed form, with or without masters. */
    int64_t plain, moves; /* moves: lr is not 0 */
    void *const *weights;
    float *const *exp_avgs, *const *exp_avg_sqs, *const *masters;
    /* Of products: factors of all rows and columns, and sums by row and column, kind by kind. */
    const Matrix *matrices;
    int64_t exponential, mismatch, normalized, all_rows, all_columns;
    const float *of_rows, *of_columns, *new_rows, *new_columns; /* new: after an update of the scales */
    double *by_rows, *by_columns;
    _Atomic int64_t next; /* task; the operator ++ is atomic */
} Call;

enum { NORM, STEP, PULL, PUSH, PRODUCT }; /* kinds: those of products come after PRODUCT */
/* Arrays of a block of entries fit the first-level cache, as do those of a row's strips: the longer ones of sums, whose
   ends take time, and the shorter ones between which later entries are fetched into the second-level cache. AHEAD: how
   many entries later; for sums, two rows. PAD makes the addresses of sums differ modulo 4096. */
enum { BLOCK = 256, BAND = 4, PAD = 48, SUM_STRIP = 1024, STRIP = 128, AHEAD = 2048 };
const int64_t sel_pad = PAD;
const char sel_digest[] = DIGEST; /* of this file, from hatch_build.py */

INLINE uint32_t bits_of(float x) { return ((union { float x; uint32_t bits; }){x}).bits; }
INLINE float from_bits(uint32_t bits) { return ((union { uint32_t bits; float x; }){bits}).x; }
INLINE float flipped(float x, float w) { return from_bits(bits_of(x) ^ (bits_of(w) & 0x80000000u)); }

/* The number of a bfloat16. */
INLINE float widened(const void *p, int64_t at) { return from_bits((uint32_t)((const uint16_t *)p)[at] << 16); }

/* The nearest bfloat16, ties to even; NaN gets torch's bits. */
INLINE uint16_t rounded(float x) {
    uint32_t bits = bits_of(x);
    return (uint16_t)(x != x ? 0x7fc0u : (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

/* (expm1(x) - x)/x^2 for |x| <= ln(2)/2, and from it expm1(x), with an error of 2e-8 before rounding. */
INLINE float rest_near(float x) {
    float p = 0.001390129409f * x + 0.00836316214f;
    p = p * x + 0.04166685362f;
    p = p * x + 0.1666657719f;
    return p * x + 0.4999999955f;
}
INLINE float expm1_near(float x) { return (x * x) * rest_near(x) + x; }

/* F = expm1(x) and E = exp(x), halved so that a product with a small number does not overflow early. x = r + k ln 2:
   adding SHIFT rounds to the integer k, with the bits of 2^(k - 1)'s exponent at the low end. Where k ln 2 would be
   rounded, it has two parts, the first one exact. D, if wanted, is (x exp(x) - expm1(x))/2, near 0 without the
   difference of equal terms. */
INLINE void grow(float x, float *F, float *E, float *D) {
    const float SHIFT = 0x1.8p23f + 126;
    float shifted = x * 1.44269504f + SHIFT, k = shifted - SHIFT;
#ifdef FP_FAST_FMAF
    float r = fmaf(-k, 0.693147181f, x);
#else
    float r = (x - k * 0.693359375f) + k * 2.12194440e-4f;
#endif
    float rest = rest_near(r), p = (r * r) * rest + r;
    int32_t bits = (int32_t)bits_of(shifted), zero = 0x4b400000, infinite = 0x4b4000ff;
    float q = from_bits((uint32_t)(bits < zero ? zero : bits > infinite ? infinite : bits) << 23);
    *F = q * p + (q - 0.5f), *E = q * p + q;
    if (D) *D = k == 0 ? (x * x) * (0.5f + 0.5f * rest * (x - 1)) : x * *E - *F;
}

/* log(1 + x) = log(1 + f) + k ln 2 for x >= 0, with 1 + f from sqrt(1/2) to sqrt(2), to 2e-7. */
INLINE float log1p_of(float x) {
    uint32_t exponent = (bits_of(1 + x) - 0x3f3504f3u) & 0xff800000u; /* k, in its place */
    float scale = from_bits(0x3f800000u - exponent), f = x * scale + (scale - 1);
    float p = -0.101068937f * f + 0.16222579f;
    p = (p * f - 0.172508297f) * f + 0.199001657f;
    p = (p * f - 0.249699091f) * f + 0.333350589f;
    p = (p * f - 0.500003651f) * f + 0.999999945f;
    return p * f + (float)((int32_t)exponent >> 23) * 0.693147181f;
}

/* Move the moments. As torch's lerp does, from the nearer end: with a small beta a g much smaller than m still counts.
   g^2 without 1 - beta2 overflows early. */
INLINE float direction(Step k, float g, float *m, float *s) {
    *m = (k.from_grad != 0 ? g : *m) + (g - *m) * k.lerp_weight;
    *s = *s * k.beta2 + (g * k.one_minus_beta2) * g;
    return *m / (k.sqrt_scale * sqrtf(*s) + k.eps);
}

/* ---- element by element: the closed form, and plain tensors ---- */

static void copy_in(int64_t bf16, const void *from, int64_t at, int64_t count, Out to) {
    if (!bf16) memcpy(to, (const float *)from + at, (size_t)count * sizeof(float));
    for (int64_t i = 0; bf16 && i < count; i++) to[i] = widened(from, at + i);
}

/* Weights, or their masters, except where a weight is not its rounded master: somebody wrote it. */
static void copy_weights(const Call *x, int64_t item, int64_t at, int64_t count, Out to) {
    if (!x->masters) copy_in(x->bf16, x->weights[item], at, count, to);
    for (int64_t i = 0; x->masters && i < count; i++) {
        float w = widened(x->weights[item], at + i), master = x->masters[item][at + i];
        to[i] = (uint32_t)rounded(master) << 16 == bits_of(w) ? master : w;
    }
}

static void write_weights(const Call *x, int64_t item, int64_t at, int64_t count, In from) {
    uint16_t *restrict halves = (uint16_t *)x->weights[item] + at;
    if (!x->bf16) memcpy((float *)x->weights[item] + at, from, (size_t)count * sizeof(float));
    if (x->masters) memcpy(x->masters[item] + at, from, (size_t)count * sizeof(float));
    for (int64_t i = 0; x->bf16 && i < count; i++) halves[i] = rounded(from[i]);
}

/* The sum of the squares of raw gradients. */
NOINLINE double norm_block(const Call *x, int64_t item, int64_t at, int64_t count) {
    ARRAY copied_v[BLOCK] = {0}, copied_g[BLOCK];
    float base = x->step.base, slope = x->step.slope, sum = 0;
    const float *v = x->bf16 || x->plain ? copied_v : (float *)x->weights[item] + at;
    const float *g = x->bf16 ? copied_g : (float *)x->grads[item] + at;
    if (x->bf16) copy_in(1, x->grads[item], at, count, copied_g);
    if (x->bf16 && !x->plain) copy_weights(x, item, at, count, copied_v);
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; i++) {
        float raw = g[i] * (base + slope * fabsf(v[i]));
        sum += raw * raw;
    }
    return (double)sum;
}

/* The following functions step a whole block, so that an entry gets the same bits wherever its block begins. */
NOINLINE void step_plain(Step k, Out v, In g, Out m, Out s) {
    for (int i = 0; i < BLOCK; i++) v[i] = v[i] * k.one_minus_decay - direction(k, g[i] * k.base, &m[i], &s[i]);
}

/* exp(x) multiplies c + |v|. Returns whether an |x| is too large for expm1_near. */
NOINLINE int find_exponents(Step k, In v, In g, Out m, Out s, Out x) {
    int far = 0;
    for (int i = 0; i < BLOCK; i++) {
        float size = fabsf(v[i]);
        x[i] = -flipped(direction(k, g[i] * (k.base + k.slope * size), &m[i], &s[i]), v[i]);
        if (k.decay != 0) x[i] -= k.decay * log1p_of(size * k.inverse);
        far |= !(fabsf(x[i]) < 0.3f);
    }
    return far;
}

/* The new size t; if negative, it is t c/(c + t) on the other side of zero, where c + t = exp(x) (c + |v|). */
INLINE float size_near(float c, float size, float x) {
    float F = expm1_near(x), t = (c + size) * F + size, other = t * (c / (c + t));
    return t < 0 ? other : t;
}

NOINLINE void move_near(float c, Out v, In x) {
    for (int i = 0; i < BLOCK; i++) v[i] = flipped(size_near(c, fabsf(v[i]), x[i]), v[i]);
}

NOINLINE void move_far(float c, Out v, In x) {
    for (int i = 0; i < BLOCK; i++) {
        float size = fabsf(v[i]), F, E;
        grow(x[i], &F, &E, NULL);
        float t = 2 * (size * E + c * F), other = t * (c / (c + size)) / (2 * E); /* no difference of large numbers */
        t = t < 0 ? other : t;
        v[i] = flipped(fabsf(x[i]) < 0.3f ? size_near(c, size, x[i]) : t, v[i]);
    }
}

static void step_block(const Call *x, int64_t item, int64_t at, int64_t count) {
    const Step k = x->step;
    ARRAY copies[4][BLOCK], exponents[BLOCK];
    float *m = x->exp_avgs[item] + at, *s = x->exp_avg_sqs[item] + at;
    int whole = count == BLOCK, direct = whole && !x->bf16;
    float *v = direct && x->moves ? (float *)x->weights[item] + at : copies[0];
    float *g = direct ? (float *)x->grads[item] + at : copies[1];
    if (!whole) memset(copies, 0, sizeof copies);
    if (v == copies[0]) copy_weights(x, item, at, count, v);
    if (g == copies[1]) copy_in(x->bf16, x->grads[item], at, count, g);
    if (!whole) copy_in(0, m, 0, count, copies[2]), copy_in(0, s, 0, count, copies[3]), m = copies[2], s = copies[3];
    if (x->plain) step_plain(k, v, g, m, s);
    else if (find_exponents(k, v, g, m, s, exponents)) move_far(k.c, v, exponents);
    else move_near(k.c, v, exponents);
    if (v == copies[0] && x->moves) write_weights(x, item, at, count, v);
    if (!whole) copy_in(0, m, 0, count, x->exp_avgs[item] + at), copy_in(0, s, 0, count, x->exp_avg_sqs[item] + at);
}

/* Whole blocks, so that a weight that a rule leaves alone gives the same raw weight twice. */
NOINLINE void find_raws(Step k, In v, Out w) {
    for (int i = 0; i < BLOCK; i++) w[i] = flipped(log1p_of(fabsf(v[i]) * k.inverse) / k.kappa, v[i]);
}

static void pull_block(const Call *x, int64_t item, int64_t at, int64_t count, Out value, Out out) {
    ARRAY v[BLOCK] = {0}, g[BLOCK], w[BLOCK];
    copy_weights(x, item, at, count, v);
    copy_in(x->bf16, x->grads[item], at, count, g);
    find_raws(x->step, v, w);
    for (int64_t i = 0; i < count; i++) value[i] = w[i], out[i] = g[i] * (x->step.base + x->step.slope * fabsf(v[i]));
}

static void push_block(const Call *x, int64_t item, int64_t at, int64_t count, In value) {
    ARRAY v[BLOCK] = {0}, w[BLOCK], exponents[BLOCK] = {0};
    int far = 0;
    copy_weights(x, item, at, count, v);
    find_raws(x->step, v, w);
    for (int64_t i = 0; i < count; i++) {
        exponents[i] = x->step.kappa * flipped(value[i] - w[i], v[i]);
        far |= !(fabsf(exponents[i]) < 0.3f);
    }
    if (far) move_far(x->step.c, v, exponents);
    else move_near(x->step.c, v, exponents);
    write_weights(x, item, at, count, v);
}

static void closed_task(const Call *x, Task task, int64_t index) {
    float *scratch = x->scratch + task.at - task.start, *values = x->values + task.at - task.start;
    for (int64_t at = task.start; at < task.stop; at += BLOCK) {
        int64_t count = at + BLOCK < task.stop ? BLOCK : task.stop - at;
        if (x->kind == STEP) step_block(x, task.item, at, count);
        else if (x->kind == NORM) x->squares[index] += norm_block(x, task.item, at, count);
        else if (x->kind == PULL) pull_block(x, task.item, at, count, values + at, scratch + at);
        else push_block(x, task.item, at, count, values + at);
    }
}

/* ---- maps whose kappa, c and lambda are products of a row's and a column's factor ---- */

/* w_eff = c_i c_j sign(w) expm1(kappa_i kappa_j |w|) + lambda_i lambda_j u(w) + A B; u(w) is |w| with `mismatch`, else
   w; without `exponential`, c is 0. With x = kappa_i kappa_j |w|, sums over a row or column are of g sign(w) expm1(x)
   times the other dimension's c, of g w exp(x) times its c kappa or, with `normalized`, g sign(w) (x exp(x) - expm1(x))
   times its c, and of g u(w) times its lambda. */
enum { KAPPA, C, LAMBDA, FACTORS }; /* kinds of factors */
enum { BY_C, BY_KAPPA, BY_LAMBDA, SUMS }; /* kinds of sums */

/* Into the second-level cache: the first one allows few outstanding lines, and the loops would wait. */
INLINE void prefetch(const void *p, int64_t ahead, int64_t count, int64_t size) {
    for (int64_t i = 0; i < count * size; i += 64) __builtin_prefetch((const char *)p + ahead * size + i, 0, 2);
}

/* The factors of one row, and those of the columns of a strip. */
typedef struct {
    float kappa, c, lambda;
    In kappas, cs, lambdas;
} Factors;

INLINE Factors factors_of(const Call *call, const Matrix *x, In of_rows, In of_columns, int64_t i, int64_t from) {
    const float *row = of_rows + x->row + i, *column = of_columns + x->col + from;
    const int64_t high = call->all_rows, wide = call->all_columns;
    return (Factors){row[0], row[high], row[2 * high], column, column + wide, column + 2 * wide};
}

INLINE uint32_t signs_of(const Call *call) { return call->mismatch ? 0x80000000u : 0; }

/* u(w), and the slope of the linear pathway: at w = 0 the mean of the one-sided slopes. */
INLINE float linear_of(uint32_t signs, float w) { return from_bits(bits_of(w) & ~signs); }
INLINE float linear_slope(uint32_t signs, float lambda, float w) {
    return from_bits(w == 0 && signs ? 0 : bits_of(lambda) ^ (bits_of(w) & signs));
}

/* Each of the following loops over a strip is short, since a processor looks ahead of one exponential, root or division
   only so far: all of them in one loop take 50% longer. Functions ending in _of are compiled for each constant.
   A Factors as an argument would wait for its copy on the stack. */

/* F, E and with D also D, as `grow` has them. */
NOINLINE void exponentials(int64_t count, const Factors *factors, In w, Out F, Out E, Out D) {
    const Factors f = *factors;
    if (D) {
#pragma omp simd
        for (int64_t j = 0; j < count; j++) grow(f.kappa * f.kappas[j] * fabsf(w[j]), &F[j], &E[j], &D[j]);
        return;
    }
#pragma omp simd
    for (int64_t j = 0; j < count; j++) grow(f.kappa * f.kappas[j] * fabsf(w[j]), &F[j], &E[j], NULL);
}

INLINE void pull_of(int exponential, int64_t count, Factors f, float scale, uint32_t signs, In w, In g, Out raw) {
    const float of_row = 2 * f.c * f.kappa;
#pragma omp simd
    for (int64_t j = 0; j < count; j++) {
        float F, E, slope = linear_slope(signs, f.lambda * f.lambdas[j], w[j]);
        if (exponential) {
            grow(f.kappa * f.kappas[j] * fabsf(w[j]), &F, &E, NULL);
            slope += of_row * (f.cs[j] * f.kappas[j]) * E;
        }
        raw[j] = g[j] * scale * slope;
    }
}

/* Raw gradients, times the clipping coefficient. */
NOINLINE void pull_strip(const Call *x, int64_t count, const Factors *f, In w, In g, Out raw) {
    if (x->exponential) pull_of(1, count, *f, x->step.clip, signs_of(x), w, g, raw);
    else pull_of(0, count, *f, x->step.clip, signs_of(x), w, g, raw);
}

/* `next` may be w. */
NOINLINE void adamw(int64_t count, Step k, In raw, const float *w, Out m, Out s, float *next) {
#pragma omp simd
    for (int64_t j = 0; j < count; j++) next[j] = w[j] * k.one_minus_decay - direction(k, raw[j], &m[j], &s[j]);
}

INLINE void push_of(int exponential, int64_t count, Factors f, uint32_t signs, In w, Out v) {
#pragma omp simd
    for (int64_t j = 0; j < count; j++) {
        float F, E, sum = f.lambda * f.lambdas[j] * linear_of(signs, w[j]);
        if (exponential) {
            grow(f.kappa * f.kappas[j] * fabsf(w[j]), &F, &E, NULL);
            sum += 2 * f.c * f.cs[j] * flipped(F, w[j]);
        }
        v[j] = sum;
    }
}

NOINLINE void push_strip(const Call *x, int64_t count, const Factors *f, In w, Out v) {
    if (x->exponential) push_of(1, count, *f, signs_of(x), w, v);
    else push_of(0, count, *f, signs_of(x), w, v);
}

/* Add A B of one row, four ranks at once. */
NOINLINE void add_delta(int64_t count, const Matrix *x, int64_t i, int64_t from, Out v) {
    const float *a = x->a + i * x->rank;
    for (int64_t r = 0; r < x->rank; r += 4) {
        const float *b[4];
        float of[4];
        for (int64_t k = 0; k < 4; k++) {
            int64_t rank = r + k < x->rank ? r + k : r;
            b[k] = x->b + rank * x->cols + from, of[k] = r + k < x->rank ? a[rank] : 0;
        }
#pragma omp simd
        for (int64_t j = 0; j < count; j++)
            v[j] += (of[0] * b[0][j] + of[1] * b[1][j]) + (of[2] * b[2][j] + of[3] * b[3][j]);
    }
}

typedef struct {
    float of[SUMS + 1]; /* the last is of the squares of raw gradients */
} Sums;

typedef struct {
    float *by_c, *by_kappa, *by_lambda;
} Down;

INLINE Sums sums_of(int exponential, int normalized, int64_t n, Factors f, uint32_t signs, In w, In g, In F, In E, In D,
                    Down to) {
    float s0 = 0, s1 = 0, s2 = 0, s3 = 0, ck = f.c * f.kappa, by = normalized ? f.c : ck;
    float *restrict d0 = to.by_c, *restrict d1 = to.by_kappa, *restrict d2 = to.by_lambda;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
    for (int64_t j = 0; j < n; j++) {
        float lambda = f.lambdas[j], by_lambda = g[j] * linear_of(signs, w[j]);
        float slope = linear_slope(signs, f.lambda * lambda, w[j]);
        if (exponential) { /* F and E are halves */
            float kappa = f.kappas[j], c = f.cs[j], other = normalized ? c : c * kappa;
            float signed_g = flipped(g[j], w[j]), by_c = signed_g * F[j], by_kappa = g[j] * w[j] * E[j];
            if (normalized) by_kappa = signed_g * D[j];
            slope += 2 * ck * (c * kappa) * E[j];
            s0 += by_c * c, s1 += by_kappa * other;
            d0[j] += by_c * (2 * f.c), d1[j] += by_kappa * (2 * by);
        }
        float raw = g[j] * slope;
        s2 += by_lambda * lambda, s3 += raw * raw;
        d2[j] += by_lambda * f.lambda;
    }
    return (Sums){{2 * s0, 2 * s1, s2, s3}};
}

/* The sums over a strip of one row; those by column are added to `down`. */
NOINLINE Sums sums_strip(const Call *x, int64_t count, const Factors *f, In w, In g, In F, In E, In D, Down down) {
    if (!x->exponential) return sums_of(0, 0, count, *f, signs_of(x), w, g, F, E, D, down);
    if (x->normalized) return sums_of(1, 1, count, *f, signs_of(x), w, g, F, E, D, down);
    return sums_of(1, 0, count, *f, signs_of(x), w, g, F, E, D, down);
}

/* A strip's sums by column stay in the first-level cache for all rows. */
static void norm_rows(const Call *call, const Matrix *x, Task task, int64_t index) {
    const int64_t wide = x->cols + PAD, size = call->bf16 ? 2 : 4;
    ARRAY F[SUM_STRIP], E[SUM_STRIP], D[SUM_STRIP], copied[SUM_STRIP];
    for (int64_t from = 0; from < x->cols; from += SUM_STRIP) {
        const int64_t count = from + SUM_STRIP < x->cols ? SUM_STRIP : x->cols - from;
        float *sums_down = call->scratch + task.at + from;
        const Down down = {sums_down, sums_down + wide, sums_down + 2 * wide};
        for (int64_t i = task.start; i < task.stop; i++) {
            const int64_t at = i * x->cols + from;
            const Factors f = factors_of(call, x, call->of_rows, call->of_columns, i, from);
            const char *grad = (const char *)call->grads[task.item] + at * size;
            const float *w = x->raw + at, *g = call->bf16 ? copied : (const float *)grad;
            if (call->bf16) copy_in(1, grad, 0, count, copied);
            for (int64_t j = 0; j < count; j += STRIP) {
                const int64_t part = j + STRIP < count ? STRIP : count - j;
                const Factors of_part = factors_of(call, x, call->of_rows, call->of_columns, i, from + j);
                prefetch(w + j, 2 * x->cols, part, 4);
                float *wanted = call->normalized ? D + j : NULL;
                if (call->exponential) exponentials(part, &of_part, w + j, F + j, E + j, wanted);
                prefetch(grad + j * size, 2 * x->cols, part, size);
            }
            Sums sums = sums_strip(call, count, &f, w, g, F, E, D, down);
            for (int k = 0; k < SUMS; k++) call->by_rows[k * call->all_rows + x->row + i] += (double)sums.of[k];
            call->squares[index] += (double)sums.of[SUMS];
        }
    }
}

/* Write the weights of one row's strip, whose raw ones are `w`. */
static void write_strip(const Call *call, const Matrix *x, const Factors *f, int64_t i, int64_t from, int64_t n, In w) {
    const int64_t at = i * x->cols + from;
    ARRAY copied[STRIP];
    float *v = call->bf16 ? copied : (float *)x->weight + at;
    push_strip(call, n, f, w, v);
    if (x->rank) add_delta(n, x, i, from, v);
    for (int64_t j = 0; call->bf16 && j < n; j++) ((uint16_t *)x->weight)[at + j] = rounded(v[j]);
}

static void update_row(const Call *call, const Matrix *x, Task task, int64_t i) {
    const int64_t size = call->bf16 ? 2 : 4;
    ARRAY raw[STRIP], copied[STRIP], unused[STRIP];
    for (int64_t from = 0; from < x->cols; from += STRIP) {
        const Factors f = factors_of(call, x, call->of_rows, call->of_columns, i, from);
        const Factors n = factors_of(call, x, call->new_rows, call->new_columns, i, from);
        const int64_t count = from + STRIP < x->cols ? STRIP : x->cols - from, at = i * x->cols + from;
        const char *grad = (const char *)call->grads[task.item] + at * size;
        float *w = x->raw + at, *m = x->exp_avg + at, *s = x->exp_avg_sq + at;
        const float *g = call->bf16 ? copied : (const float *)grad;
        if (call->bf16) copy_in(1, grad, 0, count, copied);
        prefetch(w, AHEAD, count, 4);
        prefetch(grad, AHEAD, count, size);
        pull_strip(call, count, &f, w, g, raw);
        prefetch(m, AHEAD, count, 4);
        prefetch(s, AHEAD, count, 4);
        adamw(count, call->step, raw, w, m, s, call->moves ? w : unused);
        prefetch(x->weight + at * size, AHEAD, count, size);
        if (call->moves) write_strip(call, x, &n, i, from, count, w);
    }
}

static void pull_row(const Call *call, const Matrix *x, Task task, int64_t i) {
    Out out = call->scratch + task.at + (i - task.start) * x->cols;
    ARRAY g[STRIP];
    for (int64_t from = 0; from < x->cols; from += STRIP) {
        const Factors f = factors_of(call, x, call->of_rows, call->of_columns, i, from);
        const int64_t count = from + STRIP < x->cols ? STRIP : x->cols - from, at = i * x->cols + from;
        copy_in(call->bf16, call->grads[task.item], at, count, g);
        pull_strip(call, count, &f, x->raw + at, g, out + from);
    }
}

static void push_row(const Call *call, const Matrix *x, int64_t i) {
    for (int64_t from = 0; from < x->cols; from += STRIP) {
        const Factors f = factors_of(call, x, call->of_rows, call->of_columns, i, from);
        const int64_t count = from + STRIP < x->cols ? STRIP : x->cols - from;
        write_strip(call, x, &f, i, from, count, x->raw + i * x->cols + from);
    }
}

typedef struct {
    float of[BAND];
} Band;

/* The products of rows of g with one of B, and what they add to a gradient of B. */
NOINLINE Band delta_sums(int64_t count, const float *a, In b, In g0, In g1, In g2, In g3, Out down) {
    float a0 = a[0], a1 = a[1], a2 = a[2], a3 = a[3], s0 = 0, s1 = 0, s2 = 0, s3 = 0;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
    for (int64_t j = 0; j < count; j++) {
        s0 += g0[j] * b[j], s1 += g1[j] * b[j], s2 += g2[j] * b[j], s3 += g3[j] * b[j];
        down[j] += a0 * g0[j] + a1 * g1[j] + (a2 * g2[j] + a3 * g3[j]);
    }
    return (Band){{s0, s1, s2, s3}};
}

/* Add to the gradients of A's rows, g B^T, and to the part of B's gradient from the rows of a task, A^T g. A strip of
   columns stays in the first-level cache for all rows. */
static void delta_rows(const Call *call, const Matrix *x, Task task) {
    ARRAY copied[BAND][SUM_STRIP];
    const float *g[BAND];
    const int64_t cols = x->cols, rank = x->rank;
    for (int64_t from = 0; from < cols; from += SUM_STRIP) {
        int64_t count = from + SUM_STRIP < cols ? SUM_STRIP : cols - from;
        for (int64_t i = task.start; i < task.stop; i += BAND) {
            int64_t rows = i + BAND < task.stop ? BAND : task.stop - i;
            if (rows < BAND) memset(copied, 0, sizeof copied);
            for (int64_t k = 0; k < BAND; k++) {
                const int64_t at = (i + k) * cols + from;
                g[k] = call->bf16 || k >= rows ? copied[k] : (const float *)call->grads[task.item] + at;
                if (call->bf16 && k < rows) copy_in(1, call->grads[task.item], at, count, copied[k]);
            }
            for (int64_t r = 0; r < rank; r++) {
                float a[BAND] = {0};
                for (int64_t k = 0; k < rows; k++) a[k] = x->a[(i + k) * rank + r];
                float *down = call->scratch + task.at + (SUMS + r) * (cols + PAD) + from;
                Band sums = delta_sums(count, a, x->b + r * cols + from, g[0], g[1], g[2], g[3], down);
                for (int64_t k = 0; k < rows; k++) x->by_a[(i + k) * rank + r] += sums.of[k];
            }
        }
    }
}

NOINLINE void product_task(const Call *call, Task task, int64_t index) {
    const Matrix *x = &call->matrices[task.item];
    if (call->kind == PRODUCT + NORM) {
        norm_rows(call, x, task, index);
        if (x->rank) delta_rows(call, x, task);
        return;
    }
    for (int64_t i = task.start; i < task.stop; i++) {
        if (call->kind == PRODUCT + STEP) update_row(call, x, task, i);
        else if (call->kind == PRODUCT + PULL) pull_row(call, x, task, i);
        else push_row(call, x, i);
    }
}

/* Add the sums by column of all tasks, in their order. */
static void add_columns(const Call *call) {
    for (int64_t t = 0; t < call->count; t++) {
        const Matrix *x = &call->matrices[call->tasks[t].item];
        const float *sums = call->scratch + call->tasks[t].at;
        for (int64_t k = 0; k < SUMS + x->rank; k++, sums += x->cols + PAD) {
            double *by_column = call->by_columns + x->col + (k < SUMS ? k * call->all_columns : 0);
            float *by_b = k < SUMS ? NULL : x->by_b + (k - SUMS) * x->cols;
            for (int64_t j = 0; j < x->cols; j++)
                if (k < SUMS) by_column[j] += (double)sums[j];
                else by_b[j] += sums[j];
        }
    }
}

/* ---- threads ---- */

static void *take_tasks(void *argument) {
    Call *call = argument;
    for (int64_t index; (index = call->next++) < call->count;)
        (call->kind < PRODUCT ? closed_task : product_task)(call, call->tasks[index], index);
    return NULL;
}

/* Run the tasks with a number of threads. Returns the sum of the squares of all raw gradients for norms. */
double sel_run(Call *call, int64_t threads) {
    pthread_t others[threads];
    int64_t started = 0;
    double sum = 0;
    while (started < threads - 1 && pthread_create(&others[started], NULL, take_tasks, call) == 0) started++;
    take_tasks(call);
    while (started > 0) pthread_join(others[--started], NULL);
    if (call->kind == PRODUCT + NORM) add_columns(call);
    for (int64_t t = 0; call->squares && t < call->count; t++) sum += call->squares[t];
    return sum;
}
