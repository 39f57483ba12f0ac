/* The map of one vector of entries, its derivatives and its inverse (symexplin.transform is the definition).

   c, lambda and kappa are products of a row's and a column's factor (symexplin.kernels.factors). lambda multiplies |w|
   with `magnitude`, else w. The maps of kernels have no other difference.
*/
#ifndef SEL_ELEMENT_H
#define SEL_ELEMENT_H

#include "lanes.h"

#define LOG2E 1.4426950408889634

/* F = (2^y - 1)/2 and E = 2^y/2 with y = log2(e) x: half of expm1(x) and exp(x), so that terms do not overflow before
   their sum. For y = k + r, p = 2^r - 1 and q = 2^(k - 1), F = q p + q - 1/2. E is 0 where 2^y is below 2^-124. */
INLINE void grow(const V *y, V *F, V *E) {
    const float shift = 0x1.8p23f + 126; /* moves the exponent bits of q to the low end */
    V t[PAIR], q[PAIR], r[PAIR], p[PAIR];
    /* From k = -125 to k = 128 with p > 0, where the result is infinite. */
    EACH r[i] = max_(all(-125), min_(all(128.25f), y[i]));
    EACH t[i] = r[i] + all(shift);
    EACH q[i] = (V)((I)t[i] << 23);
    EACH r[i] = r[i] - (t[i] - all(shift));
    /* p/r, fitted to |r| <= 1/2: 0.22 units of rounding. */
    EACH p[i] = fma_(all(0.00015384566f), r[i], all(0.0013387421f));
    EACH p[i] = fma_(p[i], r[i], all(0.0096183056f));
    EACH p[i] = fma_(p[i], r[i], all(0.055503674f));
    EACH p[i] = fma_(p[i], r[i], all(0.24022649f));
    EACH p[i] = fma_(p[i], r[i], all(0.69314718f));
    EACH p[i] = p[i] * r[i];
    EACH F[i] = fma_(q[i], p[i], q[i] - all(0.5f));
    EACH E[i] = fma_(q[i], p[i], q[i]);
}

/* The factor of lambda. */
INLINE V path(int magnitude, V w) { return magnitude ? abs_(w) : w; }

/* F = c expm1(x) sign(w) and E = c exp(x) from a raw weight w and its weight, without an exponential. */
INLINE void known(int magnitude, V w, V weight, V c, V lambda, V *F, V *E) {
    *F = fma_(-lambda, path(magnitude, w), weight);
    *E = c + with_sign(*F, sign_of(w));
}

/* dw_eff/dw with c_kappa E = c kappa exp(x); at w = 0 the mean of the one-sided slopes. */
INLINE V slope(int magnitude, V w, V c_kappa, V lambda, V E) {
    return fma_(c_kappa, E, magnitude ? unless_zero(w, with_sign(lambda, sign_of(w))) : lambda);
}

/* (x exp(x) - expm1(x))/2 with x = y ln2 >= 0; below 1 the sum over k >= 2 of x^k (k - 1)/k!, without cancellation. */
INLINE V difference(V y, V F, V E) {
    static const float terms[] = {1.0 / 2,    1.0 / 3,     1.0 / 8,      1.0 / 30,      1.0 / 144,     1.0 / 840,
                                  1.0 / 5760, 1.0 / 45360, 1.0 / 403200, 1.0 / 3991680, 1.0 / 43545600};
    V x = y * all((float)(1 / LOG2E)), near = min_(all(1), x), series = all(terms[10]);
#pragma GCC unroll 10
    for (int k = 9; k >= 0; k--) series = fma_(series, near, all(terms[k]));
    return pick_less(x, all(1), series * near * near * all(0.5f), x * E - F);
}

/* exp(x) and expm1(x) in double for 0 <= x <= 700, with relative errors below 1e-10. */
INLINE void grow_double(D x, D *F, D *E) {
    const double shift = 0x1.8p52 + 1023;
    D t = x * all_double(0x1.71547652b82fep+0) + all_double(shift), q = (D)((L)t << 52);
    D r = x - (t - all_double(shift)) * all_double(0x1.62e42fefa39efp-1), s = all_double(1.0 / 3628800);
    static const double terms[] = {1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1};
#pragma GCC unroll 9
    for (int k = 0; k < 9; k++) s = s * r + all_double(terms[k]);
    s = s * r;
    *F = q * s + (q - all_double(1)), *E = q * s + q;
}

/* log(x) for normal x >= 1 with an error of 1e-4, for Newton's start. */
INLINE D log_roughly(D x) {
    D f = (D)(((L)x & 0x000fffffffffffff) | 0x3ff0000000000000), power = (D)(((L)x >> 52) | 0x4330000000000000);
    D k = power - all_double(0x1p52 + 1023), p = all_double(-0.05545931);
    p = p * f + all_double(0.44050274), p = p * f + all_double(-1.45519477), p = p * f + all_double(2.80698053);
    return k * all_double(0x1.62e42fefa39efp-1) + (p * f + all_double(-1.73675974));
}

/* The error of four steps is 1e-6 units of a float's rounding for |lambda| < c kappa, which holds if lambda multiplies
   |w|. The error of five steps is 1e-2 units for lambda up to 1000 c kappa. */
enum { NEWTON = 4 };

/* The x >= 0 with c expm1(kappa x) + lambda x = tau, where c > 0, c kappa > -lambda and tau >= 0: Newton's method from
   an upper bound (symexplin.inversion). */
INLINE D solve(int magnitude, D tau, D c, D lambda, D kappa) {
    D steep = c * kappa, at_zero = steep + lambda, zero = all_double(0);
    D near = (tau + tau) / (at_zero + sqrt_double(at_zero * at_zero + (steep + steep) * kappa * tau));
    D far = log_roughly(all_double(1) + (tau + max_double(zero, zero - lambda) * near) / c) / kappa;
    D x = pick_less_double(near * kappa, all_double(1), near, min_double(near, far));
    for (int k = 0; k < NEWTON + !magnitude; k++) {
        D F, E;
        grow_double(kappa * x, &F, &E);
        x = max_double(zero, x - (c * F + lambda * x - tau) / (steep * E + lambda));
    }
    return x;
}

#endif
