/* One parameter as kernels see it (symexplin.kernels.part), and the factors of its scales along each dimension. */
#ifndef SEL_PART_H
#define SEL_PART_H

#include "element.h"

enum { ROLES = 4, AXES = 2 };
enum { ROLE_E, ROLE_L, ROLE_KAPPA, ROLE_N };
enum { NOTHING, SAME_AS_RAW, BFLOAT16 };

typedef struct {
    REAL *value, *exp_avg, *exp_avg_sq, *gradient;
    int64_t width; /* how many learned vectors or numbers */
} Panel;

/* Every field has eight bytes: symexplin.kernels.cpu packs them in this order. A 1-D tensor is one row ("flat"), whose
   panel0 holds the factors of its columns. */
typedef struct {
    int64_t rows, cols, flat;
    int64_t mode, normalize, absorbed, columns[ROLES][3];
    double beta, s, values[ROLES];
    REAL *raw, *exp_avg, *exp_avg_sq;
    void *grad, *weight;
    int64_t grad_kind, weight_kind, keep;
    REAL *out; /* the raw gradient, where wanted */
    Panel panels[3];
    double lr, decay, beta1, beta2, eps, corrections[4];
    double panel_rates[3][2][ROLES]; /* of each column the learning rate, then the decay */
} Part;

/* A learned vector: `count` numbers `stride` apart, from `start` on in each array of its panel; none if count is 0. */
typedef struct {
    const Panel *panel;
    int64_t start, stride;
    int learned;
} Slot;

static Slot slot_of(const Part *part, int axis, int role) {
    int panel = part->flat ? 0 : axis;
    int64_t column = part->flat && axis == 0 ? -1 : part->columns[role][panel];
    if (column < 0) return (Slot){0};
    const Panel *of = &part->panels[panel];
    if (panel == 0) return (Slot){of, column, of->width, 1};
    return (Slot){of, column * part->cols, 1, 1};
}

/* The factors along one axis; what is constant or one number goes with the rows (axis 0). */
typedef struct {
    double values[ROLES], numbers[ROLES]; /* fixed, and learned as one number: 1 or, where they are summed, 0 */
    double s_over_d, decay; /* 1/d here if it is not kappa, and exp(-n) of what is not a vector */
    int absorbed, normalize, linear;
    Slot slots[ROLES];
} Axis;

static Axis axis_of(const Part *part, int axis) {
    Axis out = {.s_over_d = 1, .absorbed = (int)part->absorbed, .normalize = (int)part->normalize};
    out.linear = part->mode == MISMATCH || part->mode == CONGRUENT;
    for (int role = 0; role < ROLES; role++) {
        int summed = role == ROLE_N || (role == ROLE_KAPPA && out.absorbed);
        int64_t column = part->columns[role][2];
        out.values[role] = axis == 0 ? part->values[role] : role == ROLE_N ? 0 : 1;
        out.numbers[role] = axis == 0 && column >= 0 ? (double)part->panels[2].value[column] : summed ? 0 : 1;
        out.slots[role] = slot_of(part, axis, role);
    }
    if (axis == 0) out.s_over_d = part->normalize ? part->s : part->s / part->beta;
    out.decay = exp(-(out.values[ROLE_N] + out.numbers[ROLE_N]));
    return out;
}

/* At one index: learned numbers m[], kappa, and c = (c without e) e and lambda = (lambda without l) l with the
   factors that are not learned vectors. */
typedef struct {
    double m[ROLES], kappa, c, c_rest, lambda, lambda_rest;
} Factor;

static Factor factor_at(const Axis *axis, int64_t i) {
    Factor f;
    for (int role = 0; role < ROLES; role++) {
        const Slot *slot = &axis->slots[role];
        int summed = role == ROLE_N || (role == ROLE_KAPPA && axis->absorbed);
        f.m[role] = slot->learned ? (double)slot->panel->value[slot->start + i * slot->stride] : summed ? 0 : 1;
    }
    double number = axis->numbers[ROLE_KAPPA], m = f.m[ROLE_KAPPA];
    f.kappa = axis->values[ROLE_KAPPA] * (axis->absorbed ? exp(number + m) : number * m);
    f.lambda_rest = axis->normalize ? axis->s_over_d / f.kappa : axis->s_over_d;
    f.c_rest = f.lambda_rest * axis->decay;
    if (axis->slots[ROLE_N].learned) f.c_rest *= exp(-f.m[ROLE_N]);
    if (!axis->linear) f.lambda_rest = 0;
    f.c = f.c_rest * axis->values[ROLE_E] * axis->numbers[ROLE_E] * f.m[ROLE_E];
    f.lambda = f.lambda_rest * axis->values[ROLE_L] * axis->numbers[ROLE_L] * f.m[ROLE_L];
    return f;
}

/* What the map needs of an axis, padded with zeros to whole vectors. */
typedef struct {
    REAL *kappa, *c, *lambda, *c_kappa;
} Factors;

static void fill_factors(const Part *part, int axis, Factors out, int64_t count, int64_t padded) {
    Axis of = axis_of(part, axis);
    for (int64_t i = 0; i < count; i++) {
        Factor f = factor_at(&of, i);
        out.kappa[i] = (REAL)f.kappa, out.c[i] = (REAL)f.c, out.lambda[i] = (REAL)f.lambda;
        out.c_kappa[i] = (REAL)(f.c * f.kappa);
    }
    for (int64_t i = count; i < padded; i++) out.kappa[i] = out.c[i] = out.lambda[i] = out.c_kappa[i] = 0;
}

/* Sums over the other axis, each times what there multiplies it: of g sign(w) F, g u, and g w F' or, normalized,
   g sign(w) (x F' - F). */
typedef struct {
    double c, lambda, kappa;
} Sums;

/* Write the gradients of the learned vectors at `i`; add those of the learned numbers to `numbers`. */
static void pull_factors(const Axis *axis, int64_t i, Sums sums, double *numbers) {
    Factor f = factor_at(axis, i);
    double lambda = axis->linear ? sums.lambda : 0, m = f.m[ROLE_KAPPA], number = axis->numbers[ROLE_KAPPA];
    double change = axis->normalize ? f.c * sums.kappa - f.lambda * lambda : f.c * sums.kappa;
    double by_e = f.c_rest * axis->values[ROLE_E] * sums.c, by_l = f.lambda_rest * axis->values[ROLE_L] * lambda;
    double by_kappa = axis->normalize ? change : axis->absorbed ? f.kappa * change : axis->values[ROLE_KAPPA] * change;
    /* Normalized, `change` is kappa times the derivative by kappa. */
    int product = !axis->absorbed, divide = product && axis->normalize;
    const double vectors[ROLES] = {by_e * axis->numbers[ROLE_E], by_l * axis->numbers[ROLE_L],
                                   divide ? by_kappa / m : product ? by_kappa * number : by_kappa, -f.c * sums.c};
    for (int role = 0; role < ROLES; role++) {
        const Slot *slot = &axis->slots[role];
        if (slot->learned) slot->panel->gradient[slot->start + i * slot->stride] = (REAL)vectors[role];
    }
    numbers[ROLE_E] += by_e * f.m[ROLE_E];
    numbers[ROLE_L] += by_l * f.m[ROLE_L];
    numbers[ROLE_KAPPA] += divide ? by_kappa / number : product ? by_kappa * m : by_kappa;
    numbers[ROLE_N] -= f.c * sums.c;
}

/* AdamW as symexplin.optim.adamw has it, its constants merged: the step is m / (root sqrt(v) + eps) with both divided
   by the rate. Where that is 0 the result is not used. */
typedef struct {
    REAL keep, keep1, gain1, keep2, gain2, root, eps;
} Rule;

static Rule rule_of(double lr, double decay, const Part *part, const double *corrections) {
    double rate = lr / corrections[0];
    return (Rule){(REAL)(1 - lr * decay), (REAL)part->beta1, (REAL)(1 - part->beta1), (REAL)part->beta2,
                  (REAL)(1 - part->beta2), (REAL)(1 / (sqrt(corrections[1]) * rate)), (REAL)(part->eps / rate)};
}

INLINE void adamw(const Rule *rule, V *x, const V *g, V *m, V *v) {
    /* As torch's lerp, from the nearer end: a small beta loses no g that is small beside m. g^2 alone overflows early. */
    if (rule->gain1 < (REAL)0.5) EACH m[i] = fma_(g[i] - m[i], all(rule->gain1), m[i]);
    else EACH m[i] = fma_(m[i] - g[i], all(rule->keep1), g[i]);
    EACH v[i] = fma_(g[i] * rule->gain2, g[i], v[i] * rule->keep2);
    EACH x[i] = x[i] * rule->keep - m[i] / fma_(sqrt_(v[i]), all(rule->root), all(rule->eps));
}

static void adamw_of(const Rule *rule, REAL *x, const REAL *g, REAL *m, REAL *v) {
    V xs[PAIR], gs[PAIR], ms[PAIR], vs[PAIR];
    EACH xs[i] = load(x + i * LANES), gs[i] = load(g + i * LANES);
    EACH ms[i] = load(m + i * LANES), vs[i] = load(v + i * LANES);
    adamw(rule, xs, gs, ms, vs);
    EACH store(x + i * LANES, xs[i]), store(m + i * LANES, ms[i]), store(v + i * LANES, vs[i]);
}

/* One panel under AdamW; a learned number whose rate is 0 keeps its bits. */
static void update_panel(const Part *part, int index, double gradient_factor) {
    const Panel *panel = &part->panels[index];
    int64_t length = index == 0 ? (part->flat ? part->cols : part->rows) : index == 1 && !part->flat ? part->cols : 1;
    if (index == 1 && part->flat) return;
    for (int64_t column = 0; column < panel->width; column++) {
        int64_t start = index == 0 ? column : column * length, stride = index == 0 ? panel->width : 1;
        double lr = part->panel_rates[index][0][column], decay = part->panel_rates[index][1][column];
        Rule rule = rule_of(lr, decay, part, part->corrections + 2);
        for (int64_t j = 0; j < length; j += STEP) {
            REAL x[STEP] = {0}, g[STEP] = {0}, m[STEP] = {0}, v[STEP] = {0};
            int64_t count = length - j < STEP ? length - j : STEP;
            for (int64_t k = 0; k < count; k++) {
                int64_t at = start + (j + k) * stride;
                x[k] = panel->value[at], g[k] = panel->gradient[at] * (REAL)gradient_factor;
                m[k] = panel->exp_avg[at], v[k] = panel->exp_avg_sq[at];
            }
            adamw_of(&rule, x, g, m, v);
            for (int64_t k = 0; k < count; k++) {
                int64_t at = start + (j + k) * stride;
                if (lr != 0) panel->value[at] = x[k];
                panel->exp_avg[at] = m[k], panel->exp_avg_sq[at] = v[k];
            }
        }
    }
}

#endif
