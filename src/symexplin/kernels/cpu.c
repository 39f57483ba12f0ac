/* AdamW in curved weight space on CPUs: plain loops, which the compiler turns into vector instructions.

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

/* ---- what Python passes, in the order of symexplin.kernels.cpu ---- */

typedef struct {
    int64_t rows, cols, as; /* FLOAT, HALF or READ */
    float *raw, *exp_avg, *exp_avg_sq;
    char *weight;
    const char *grad;
    float *old, *new, *sums; /* FACTORS of rows, then of columns; SUMS of each tile's columns, then rows */
    const float *vectors[8]; /* e, l, m (absorbed: a) and n, each of rows and columns; NULL if not learned */
    float *gradients[8];
} Matrix;

/* AdamW's direction times the rate is m/(root sqrt(s) + eps). In the closed form raw gradients are g (base + slope |v|)
   and `decay` is lr wd; plain and raw weights keep the share `keep`. */
typedef struct {
    float far, towards, beta2, gain2, root, eps, clip, keep, decay, base, slope, c, inverse;
} Step;

typedef struct {
    int64_t task, count, moves; /* moves: lr is not 0 */
    const int64_t *first;       /* the index of each tensor's or matrix's first tile, and their number at the end */
    double *squares;            /* of each tile's raw gradients, for NORM and PULL; zeros before */
    Step step;
    double kappa, c, lambda; /* of a factored map without its learned vectors */
    int64_t normalize, absorbed, magnitude;
    Matrix *matrices;
    /* Of the closed form. `half`: weights and gradients are bfloat16, with or without masters. `noise` has key, offset,
       columns and stride of each tensor if weights are rounded stochastically, else it is NULL. */
    int64_t half, plain;
    const int64_t *sizes, *noise;
    void *const *weights, *const *grads;
    float *const *exp_avgs, *const *exp_avg_sqs, *const *masters;
    _Atomic int64_t next; /* tile; the operator ++ is atomic */
} Call;

enum { NORM, STEP, PULL, MOVE }; /* tasks */
enum { FLOAT, HALF, READ }; /* weights and gradients; READ: float, with the exponential had from the weight */
/* A block's arrays fit the first-level cache. PAD makes the addresses of factors and sums differ modulo 4096. */
enum { BLOCK = 256, TILE = 64 * BLOCK, TALL = 256, CHUNK = 32, PAD = 48 };
const int64_t sel_tile = TILE, sel_tall = TALL, sel_pad = PAD, sel_call_size = sizeof(Call);

INLINE uint32_t bits_of(float x) { return ((union { float x; uint32_t bits; }){x}).bits; }
INLINE float from_bits(uint32_t bits) { return ((union { uint32_t bits; float x; }){bits}).x; }
INLINE float flipped(float x, float w) { return from_bits(bits_of(x) ^ (bits_of(w) & 0x80000000u)); }

INLINE float number(int as, const void *p, int64_t at) {
    return as == HALF ? from_bits((uint32_t)((const uint16_t *)p)[at] << 16) : ((const float *)p)[at];
}

/* The nearest bfloat16, ties to even; NaN gets torch's bits. */
INLINE uint16_t rounded(float x) {
    uint32_t bits = bits_of(x);
    return (uint16_t)(x != x ? 0x7fc0u : (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

/* expm1(x) for |x| <= ln(2)/2, with an error of 2e-8 before rounding. */
INLINE float expm1_near(float x) {
    float p = 0.001390129409f * x + 0.00836316214f;
    p = p * x + 0.04166685362f;
    p = p * x + 0.1666657719f;
    return (x * x) * (p * x + 0.4999999955f) + x;
}

/* F = expm1(x) and E = exp(x), halved so that a product with a small number does not overflow early. x = r + k ln 2:
   adding SHIFT rounds to the integer k, with the bits of 2^(k - 1)'s exponent at the low end. The first part of ln 2
   times k is exact. */
INLINE void grow(float x, float *F, float *E) {
    const float SHIFT = 0x1.8p23f + 126;
    float shifted = x * 1.44269504f + SHIFT, k = shifted - SHIFT;
    float p = expm1_near((x - k * 0.693359375f) + k * 2.12194440e-4f);
    int32_t bits = (int32_t)bits_of(shifted), zero = 0x4b400000, infinite = 0x4b4000ff;
    float q = from_bits((uint32_t)(bits < zero ? zero : bits > infinite ? infinite : bits) << 23);
    *F = q * p + (q - 0.5f), *E = q * p + q;
}

/* (x exp(x) - expm1(x))/2 for x >= 0 from these halves; below 1 by a polynomial, without cancellation. */
INLINE float difference(float x, float F, float E) {
    float p = 0.0002702958672f * x + 0.001050773849f;
    p = (p * x + 0.007040225814f) * x + 0.03330036595f;
    p = (p * x + 0.1250053115f) * x + 0.333333018f;
    return x < 1 ? (p * x + 0.500000003f) * x * x * 0.5f : x * E - F;
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
   g^2 without its factor overflows early. */
INLINE float direction(Step k, float g, float *m, float *s) {
    *m = (k.far != 0 ? g : *m) + (g - *m) * k.towards;
    *s = *s * k.beta2 + (g * k.gain2) * g;
    return *m / (k.root * sqrtf(*s) + k.eps);
}

/* ---- the closed form ---- */

static void copy_in(int64_t half, const void *from, int64_t at, int64_t count, Out to) {
    if (!half) memcpy(to, (const float *)from + at, (size_t)count * sizeof(float));
    for (int64_t i = 0; half && i < count; i++) to[i] = number(HALF, from, at + i);
}

/* Weights, or their masters, except where a weight is not its rounded master: somebody wrote it. */
static void copy_weights(const Call *x, int64_t item, int64_t at, int64_t count, Out to) {
    if (!x->masters) copy_in(x->half, x->weights[item], at, count, to);
    for (int64_t i = 0; x->masters && i < count; i++) {
        float w = number(HALF, x->weights[item], at + i), master = x->masters[item][at + i];
        to[i] = (uint32_t)rounded(master) << 16 == bits_of(w) ? master : w;
    }
}

/* Round with noise of 16 bits, a hash of the key and of the entry's index in the whole tensor. */
static void round_noisily(const int64_t *noise, int64_t at, int64_t count, In from, uint16_t *restrict to) {
    int64_t columns = noise[2], row = at / columns, column = at % columns;
    for (int64_t run; count > 0; from += run, to += run, count -= run, column = 0) {
        run = columns - column < count ? columns - column : count;
        uint64_t index = (uint64_t)(noise[1] + row++ * noise[3] + column);
        for (int64_t i = 0; i < run; i++, index++) {
            uint32_t bits = bits_of(from[i]), high = (uint32_t)(index >> 32) * 0x9E3779B9u;
            uint32_t hash = (uint32_t)index ^ (uint32_t)noise[0] ^ high;
            hash = (hash ^ hash >> 16) * 0x21f0aaadu;
            hash = (hash ^ hash >> 15) * 0x735a2d97u;
            hash = (hash ^ hash >> 15) & 0xffffu;
            to[i] = (bits & 0x7f800000u) == 0x7f800000u ? rounded(from[i]) : (uint16_t)((bits + hash) >> 16);
        }
    }
}

static void write_weights(const Call *x, int64_t item, int64_t at, int64_t count, In from) {
    uint16_t *restrict halves = (uint16_t *)x->weights[item] + at;
    if (!x->half) memcpy((float *)x->weights[item] + at, from, (size_t)count * sizeof(float));
    if (x->masters) memcpy(x->masters[item] + at, from, (size_t)count * sizeof(float));
    if (x->noise) round_noisily(x->noise + 4 * item, at, count, from, halves);
    for (int64_t i = 0; x->half && !x->noise && i < count; i++) halves[i] = rounded(from[i]);
}

/* The sum of the squares of raw gradients. */
NOINLINE double norm_block(const Call *x, int64_t item, int64_t at, int64_t count) {
    float copied_v[BLOCK] = {0}, copied_g[BLOCK], base = x->step.base, slope = x->step.slope, sum = 0;
    const float *v = x->half || x->plain ? copied_v : (float *)x->weights[item] + at;
    const float *g = x->half ? copied_g : (float *)x->grads[item] + at;
    if (x->half) copy_in(1, x->grads[item], at, count, copied_g);
    if (x->half && !x->plain) copy_weights(x, item, at, count, copied_v);
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; i++) {
        float raw = g[i] * (base + slope * fabsf(v[i]));
        sum += raw * raw;
    }
    return (double)sum;
}

/* The following functions step a whole block, so that an entry gets the same bits wherever its block begins. */
NOINLINE void step_plain(Step k, Out v, In g, Out m, Out s) {
    for (int i = 0; i < BLOCK; i++) v[i] = v[i] * k.keep - direction(k, g[i] * k.base, &m[i], &s[i]);
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
        grow(x[i], &F, &E);
        float t = 2 * (size * E + c * F), other = t * (c / (c + size)) / (2 * E); /* no difference of large numbers */
        t = t < 0 ? other : t;
        v[i] = flipped(fabsf(x[i]) < 0.3f ? size_near(c, size, x[i]) : t, v[i]);
    }
}

static void step_block(const Call *x, int64_t item, int64_t at, int64_t count) {
    const Step k = x->step;
    float copies[4][BLOCK], exponents[BLOCK], *m = x->exp_avgs[item] + at, *s = x->exp_avg_sqs[item] + at;
    int whole = count == BLOCK, direct = whole && !x->half;
    float *v = direct && x->moves ? (float *)x->weights[item] + at : copies[0];
    float *g = direct ? (float *)x->grads[item] + at : copies[1];
    if (!whole) memset(copies, 0, sizeof copies);
    if (v == copies[0]) copy_weights(x, item, at, count, v);
    if (g == copies[1]) copy_in(x->half, x->grads[item], at, count, g);
    if (!whole) copy_in(0, m, 0, count, copies[2]), copy_in(0, s, 0, count, copies[3]), m = copies[2], s = copies[3];
    if (x->plain) step_plain(k, v, g, m, s);
    else if (find_exponents(k, v, g, m, s, exponents)) move_far(k.c, v, exponents);
    else move_near(k.c, v, exponents);
    if (v == copies[0] && x->moves) write_weights(x, item, at, count, v);
    if (!whole) copy_in(0, m, 0, count, x->exp_avgs[item] + at), copy_in(0, s, 0, count, x->exp_avg_sqs[item] + at);
}

static void closed_tile(const Call *x, int64_t item, int64_t tile, int64_t index) {
    int64_t end = (tile + 1) * TILE < x->sizes[item] ? (tile + 1) * TILE : x->sizes[item];
    for (int64_t at = tile * TILE; at < end; at += BLOCK) {
        int64_t count = at + BLOCK < end ? BLOCK : end - at;
        if (x->task == STEP) step_block(x, item, at, count);
        else x->squares[index] += norm_block(x, item, at, count);
    }
}

/* ---- maps of row and column factors ---- */

/* w_eff = c_i c_j sign(w) expm1(kappa_i kappa_j |w|) + lambda_i lambda_j u(w); u(w) is |w| with `magnitude`, else w.
   SUMS over a row or column are of g sign(w) expm1(x), g u(w) and g w exp(x) times the other dimension's c, lambda and
   c kappa. For normalized maps the third is of g sign(w) (x exp(x) - expm1(x)) times c. */
enum { BY_C, BY_LAMBDA, BY_KAPPA, SUMS, FACTORS = 4 }; /* factors: kappa, c, lambda and c kappa */

/* The factors of one row (dim 0) or column; by_e is c without e, by_l is lambda without l. */
typedef struct {
    double m, kappa, by_e, c, by_l, lambda;
} Axis;

static Axis axis_at(const Call *map, const Matrix *x, int dim, int64_t i) {
    double value[4];
    for (int role = 0; role < 4; role++) {
        const float *from = x->vectors[2 * role + dim];
        value[role] = !from ? 1 : role == 3 ? exp(-from[i]) : role == 2 && map->absorbed ? exp(from[i]) : from[i];
    }
    double kappa = value[2] * (dim ? 1 : map->kappa), share = map->normalize ? 1 / kappa : 1;
    double by_e = share * value[3] * (dim ? 1 : map->c), by_l = share * (dim ? 1 : map->lambda);
    return (Axis){value[2], kappa, by_e, by_e * value[0], by_l, by_l * value[1]};
}

/* Write the old or new factors. The weight minus its linear pathway has an error of 1 + lambda/(c kappa) units of
   rounding, so READ needs a small ratio. */
static void write_factors(const Call *map, Matrix *x) {
    float *to = map->task == PULL ? x->old : x->new;
    double flattest[2] = {0};
    for (int dim = 0; dim < 2; dim++) {
        int64_t count = dim ? x->cols : x->rows;
        for (int64_t i = 0; i < count; i++) {
            Axis a = axis_at(map, x, dim, i);
            double factors[FACTORS] = {a.kappa, a.c, a.lambda, a.c * a.kappa}, flat = fabs(a.lambda / (a.c * a.kappa));
            for (int k = 0; k < FACTORS; k++) to[k * (count + PAD) + i] = (float)factors[k];
            if (flat > flattest[dim] || flat != flat) flattest[dim] = flat;
        }
        to += FACTORS * (count + PAD);
    }
    if (map->task == PULL && x->as != HALF) x->as = !map->normalize && flattest[0] * flattest[1] <= 8 ? READ : FLOAT;
}

/* Into the second-level cache: the first one allows few outstanding lines, and the loops would wait. */
INLINE void prefetch(const void *p, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)p + i, 0, 2);
}

/* PULL or MOVE the columns from `start` to `stop` of a tile, `count` at once. READ has F and E times c, else halved. */
INLINE void run_rows(const Call *map, const Matrix *x, int64_t tile, int64_t index, int task, int as, int normalize,
                     int64_t start, int64_t stop, int64_t count) {
    const int64_t cols = x->cols, wide = cols + PAD, high = x->rows + PAD, size = as == HALF ? 2 : 4;
    const int64_t end = (tile + 1) * TALL < x->rows ? (tile + 1) * TALL : x->rows;
    In kappa1 = x->old + FACTORS * high, c1 = kappa1 + wide, lambda1 = c1 + wide, steep1 = lambda1 + wide;
    In kappa3 = x->new + FACTORS * high, c3 = kappa3 + wide, lambda3 = c3 + wide;
    Out down0 = x->sums + tile * SUMS * (wide + TALL), down1 = down0 + wide, down2 = down1 + wide, right = down2 + wide;
    const uint32_t signs = map->magnitude ? 0x80000000u : 0, at_zero = map->magnitude ? 0 : 0xffffffffu;
    const Step step = map->step;
    float unmoved[CHUNK], unwritten[CHUNK];
    for (int64_t i = tile * TALL; i < end; i++) {
        const float *old = x->old + i, *new = x->new + i;
        const float kappa0 = old[0], c0 = old[high], lambda0 = old[2 * high], steep0 = old[3 * high];
        const float kappa2 = new[0], c2 = 2 * new[high], lambda2 = new[2 * high];
        const float by_c0 = as == READ ? 1 : c0, by_kappa0 = as == READ ? kappa0 : normalize ? c0 : steep0;
        float sums[SUMS + 1][CHUNK] = {0};
        for (int64_t from = start; from < stop; from += count) {
            int64_t at = i * cols + from, ahead = at + 2 * cols;
            const char *g_ = x->grad + at * size, *weight = x->weight + at * size;
            float *w_ = x->raw + at, *out = map->moves ? w_ : unmoved, *m_ = x->exp_avg + at, *s_ = x->exp_avg_sq + at;
            void *written = map->moves ? x->weight + at * size : (void *)unwritten;
            prefetch(x->raw + ahead, 4 * CHUNK), prefetch(x->grad + ahead * size, size * CHUNK);
            if (task == MOVE) prefetch(x->exp_avg + ahead, 4 * CHUNK), prefetch(x->exp_avg_sq + ahead, 4 * CHUNK);
            if (task == MOVE || as == READ) prefetch(x->weight + ahead * size, size * CHUNK);
#pragma omp simd
            for (int64_t j = 0; j < count; j++) {
                int64_t k = from + j;
                float g = number(as, g_, j), w = w_[j], lambda = lambda0 * lambda1[k], kappa = kappa0 * kappa1[k], F, E;
                float u = from_bits(bits_of(w) & ~signs), steep = as == READ ? kappa : 2 * steep0 * steep1[k];
                if (as == READ) F = number(FLOAT, weight, j) - lambda * u, E = c0 * c1[k] + flipped(F, w);
                else grow(kappa * fabsf(w), &F, &E), F = flipped(F, w);
                /* At w = 0 the slope is the mean of the one-sided ones. */
                float linear = from_bits(w == 0 ? bits_of(lambda) & at_zero : bits_of(lambda) ^ (bits_of(w) & signs));
                float raw = g * (steep * E + linear);
                if (task == PULL) {
                    float by_c = g * F, by_lambda = g * u, by_kappa = g * w * E;
                    if (normalize) by_kappa = g * flipped(difference(kappa * fabsf(w), flipped(F, w), E), w);
                    sums[BY_C][j] += by_c * (as == READ ? 1 : c1[k]), down0[k] += by_c * by_c0;
                    sums[BY_LAMBDA][j] += by_lambda * lambda1[k], down1[k] += by_lambda * lambda0;
                    sums[BY_KAPPA][j] += by_kappa * (as == READ ? kappa1[k] : normalize ? c1[k] : steep1[k]);
                    down2[k] += by_kappa * by_kappa0, sums[SUMS][j] += raw * raw;
                } else {
                    float m = m_[j], s = s_[j];
                    w = w * step.keep - direction(step, step.clip * raw, &m, &s);
                    m_[j] = m, s_[j] = s, out[j] = w;
                    grow(kappa2 * kappa3[k] * fabsf(w), &F, &E);
                    F = c2 * c3[k] * flipped(F, w) + lambda2 * lambda3[k] * from_bits(bits_of(w) & ~signs);
                    if (as == HALF) ((uint16_t *)written)[j] = rounded(F);
                    else ((float *)written)[j] = F;
                }
            }
        }
        for (int k = 0; task == PULL && k <= SUMS; k++) {
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int j = 0; j < CHUNK; j++) sum += sums[k][j];
            if (k == SUMS) map->squares[index] += (double)sum;
            else right[k * TALL + i % TALL] += sum;
        }
    }
}

NOINLINE void factored_tile(const Call *map, int64_t item, int64_t tile, int64_t index) {
    const Matrix *x = &map->matrices[item];
    const int64_t as = x->as, whole = x->cols / CHUNK * CHUNK, rest = x->cols - whole;
#define ROWS(...) (run_rows(map, x, tile, index, __VA_ARGS__, 0, whole, CHUNK), \
                   rest ? run_rows(map, x, tile, index, __VA_ARGS__, whole, x->cols, rest) : (void)0)
    if (map->task == MOVE) as == READ ? ROWS(MOVE, READ, 0) : as == HALF ? ROWS(MOVE, HALF, 0) : ROWS(MOVE, FLOAT, 0);
    else if (map->normalize) as == HALF ? ROWS(PULL, HALF, 1) : ROWS(PULL, FLOAT, 1);
    else as == READ ? ROWS(PULL, READ, 0) : as == HALF ? ROWS(PULL, HALF, 0) : ROWS(PULL, FLOAT, 0);
}

/* The gradients of a matrix's vectors by the chain rule, from the sums of its tiles. */
static void chain(const Call *map, const Matrix *x) {
    for (int dim = 0; dim < 2; dim++) {
        int64_t count = dim ? x->cols : x->rows, wide = x->cols + PAD, span = SUMS * (wide + TALL);
        for (int64_t i = 0; i < count; i++) {
            Axis a = axis_at(map, x, dim, i);
            double by[SUMS] = {0};
            const float *sums = x->sums + (dim ? i : SUMS * wide + i % TALL);
            for (int64_t tile = dim ? 0 : i / TALL; tile < (dim ? (x->rows + TALL - 1) / TALL : i / TALL + 1); tile++)
                for (int k = 0; k < SUMS; k++) by[k] += (double)sums[tile * span + k * (dim ? wide : TALL)];
            double unit = x->as == READ ? 1 / a.c : 2; /* see run_rows */
            by[BY_C] *= unit, by[BY_KAPPA] *= unit;
            double by_m = by[BY_KAPPA] * a.c * (map->absorbed ? a.kappa : dim ? 1 : map->kappa);
            if (map->normalize) by_m = (a.c * by[BY_KAPPA] - a.lambda * by[BY_LAMBDA]) / (map->absorbed ? 1 : a.m);
            double gradients[4] = {by[BY_C] * a.by_e, by[BY_LAMBDA] * a.by_l, by_m, -by[BY_C] * a.c};
            for (int role = 0; role < 4; role++)
                if (x->gradients[2 * role + dim]) x->gradients[2 * role + dim][i] = (float)gradients[role];
        }
    }
}

/* ---- threads ---- */

static void *take_tiles(void *argument) {
    Call *call = argument;
    for (int64_t item = 0, index; (index = call->next++) < call->first[call->count];) {
        while (call->first[item + 1] <= index) item++;
        (call->task < PULL ? closed_tile : factored_tile)(call, item, index - call->first[item], index);
    }
    return NULL;
}

/* Run a task with a number of threads. Returns the sum of the squares of all raw gradients for NORM and PULL. */
double sel_run(Call *call, int64_t threads) {
    pthread_t others[threads];
    int64_t started = 0;
    double sum = 0;
    for (int64_t i = 0; call->task >= PULL && i < call->count; i++) write_factors(call, &call->matrices[i]);
    while (started < threads - 1 && pthread_create(&others[started], NULL, take_tiles, call) == 0) started++;
    take_tiles(call);
    while (started > 0) pthread_join(others[--started], NULL);
    for (int64_t i = 0; call->task == PULL && i < call->count; i++) chain(call, &call->matrices[i]);
    for (int64_t t = 0; call->squares && t < call->first[call->count]; t++) sum += call->squares[t];
    return sum;
}
