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
    double lr[ROLES], decay[ROLES];
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
    double lr, decay, beta1, beta2, eps, corrections[4];
    Panel panels[3];
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
    double s, d;
    int absorbed, normalize, linear;
    Slot slots[ROLES];
} Axis;

static Axis axis_of(const Part *part, int axis) {
    Axis out = {.s = 1, .d = 1, .absorbed = (int)part->absorbed, .normalize = (int)part->normalize};
    out.linear = part->mode == MISMATCH || part->mode == CONGRUENT;
    for (int role = 0; role < ROLES; role++) {
        int summed = role == ROLE_N || (role == ROLE_KAPPA && out.absorbed);
        int64_t column = part->columns[role][2];
        out.values[role] = axis == 0 ? part->values[role] : role == ROLE_N ? 0 : 1;
        out.numbers[role] = axis == 0 && column >= 0 ? (double)part->panels[2].value[column] : summed ? 0 : 1;
        out.slots[role] = slot_of(part, axis, role);
    }
    if (axis == 0) out.s = part->s, out.d = part->beta;
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
    double curvature = axis->numbers[ROLE_KAPPA], m = f.m[ROLE_KAPPA], n = axis->values[ROLE_N];
    f.kappa = axis->values[ROLE_KAPPA] * (axis->absorbed ? exp(curvature + m) : curvature * m);
    double d = axis->normalize ? f.kappa : axis->d;
    n += axis->numbers[ROLE_N] + f.m[ROLE_N];
    f.c_rest = axis->s * (n == 0 ? 1 : exp(-n)) / d;
    f.c = f.c_rest * axis->values[ROLE_E] * axis->numbers[ROLE_E] * f.m[ROLE_E];
    f.lambda_rest = axis->linear ? axis->s / d : 0;
    f.lambda = f.lambda_rest * axis->values[ROLE_L] * axis->numbers[ROLE_L] * f.m[ROLE_L];
    return f;
}

/* What the map needs of an axis, padded with zeros to whole vectors. */
typedef struct {
    REAL *kappa, *c, *lambda;
} Factors;

static void fill_factors(const Part *part, int axis, Factors out, int64_t count, int64_t padded) {
    Axis of = axis_of(part, axis);
    for (int64_t i = 0; i < count; i++) {
        Factor f = factor_at(&of, i);
        out.kappa[i] = (REAL)f.kappa, out.c[i] = (REAL)f.c, out.lambda[i] = (REAL)f.lambda;
    }
    for (int64_t i = count; i < padded; i++) out.kappa[i] = out.c[i] = out.lambda[i] = 0;
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

/* AdamW as symexplin.optim.adamw has it; the numbers are constant over many values. */
typedef struct {
    REAL keep, gain1, beta2, gain2, root, eps, rate;
} Rule;

static Rule rule_of(double lr, double decay, const Part *part, const double *corrections) {
    return (Rule){(REAL)(1 - lr * decay), (REAL)(1 - part->beta1), (REAL)part->beta2, (REAL)(1 - part->beta2),
                  (REAL)(1 / sqrt(corrections[1])), (REAL)part->eps, (REAL)(lr / corrections[0])};
}

INLINE V adamw(const Rule *rule, V x, V g, V *m, V *v) {
    *m = fma_(g - *m, all(rule->gain1), *m);
    *v = fma_(g * g, all(rule->gain2), *v * rule->beta2);
    return x * rule->keep - *m / fma_(sqrt_(*v), all(rule->root), all(rule->eps)) * rule->rate;
}

/* One panel under AdamW; a learned number whose rate is 0 keeps its bits. */
static void update_panel(const Part *part, int index, double gradient_factor) {
    const Panel *panel = &part->panels[index];
    int64_t length = index == 0 ? (part->flat ? part->cols : part->rows) : index == 1 && !part->flat ? part->cols : 1;
    if (index == 1 && part->flat) return;
    for (int64_t column = 0; column < panel->width; column++) {
        int64_t start = index == 0 ? column : column * length, stride = index == 0 ? panel->width : 1;
        Rule rule = rule_of(panel->lr[column], panel->decay[column], part, part->corrections + 2);
        for (int64_t i = 0; i < length; i += LANES) {
            V x = {0}, g = {0}, m = {0}, v = {0};
            int64_t count = length - i < LANES ? length - i : LANES;
            for (int64_t lane = 0; lane < count; lane++) {
                int64_t at = start + (i + lane) * stride;
                x[lane] = panel->value[at], g[lane] = panel->gradient[at];
                m[lane] = panel->exp_avg[at], v[lane] = panel->exp_avg_sq[at];
            }
            V moved = adamw(&rule, x, g * (REAL)gradient_factor, &m, &v);
            for (int64_t lane = 0; lane < count; lane++) {
                int64_t at = start + (i + lane) * stride;
                if (panel->lr[column] != 0) panel->value[at] = moved[lane];
                panel->exp_avg[at] = m[lane], panel->exp_avg_sq[at] = v[lane];
            }
        }
    }
}

#endif
