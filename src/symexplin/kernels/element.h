/* One element of the map and of its derivatives (symexplin.transform is the definition). */
#ifndef SEL_ELEMENT_H
#define SEL_ELEMENT_H

#include "lanes.h"

enum { PLAIN, MISMATCH, CONGRUENT, EXP_ONLY, SINH };

typedef struct {
    V F; /* expm1(x), in mode SINH sinh(x) */
    V E; /* F' */
} Growth;

#ifdef SEL_DOUBLE

INLINE Growth grow(int mode, V x) {
    Growth out;
    for (int i = 0; i < LANES; i++) {
        out.F[i] = mode == SINH ? sinh(x[i]) : expm1(x[i]);
        out.E[i] = mode == SINH ? cosh(x[i]) : exp(x[i]);
    }
    return out;
}

#else

/* With x = k ln2 + r: a quarter of expm1(x) and of exp(x) are q p + (q - 1/4) and q p + q, where p = expm1(r) and
   q = 2^(k - 2), which keeps in range what doubles to infinity only at the end. Below 2^-124 exp(x) is 0. */
INLINE Growth grow(int mode, V x) {
    const float from = -86.6f, to = 89.7f;   /* k = -125, where q = 0, and k = 129, where 4 q (1 + p) = inf */
    const float shift = 0x1.8p23f + 125.0f;  /* leaves k + 125, the exponent's bits of q, at the low end */
    I sign = mode == SINH ? sign_bits(x) : (I){0};
    V y = at_least(at_most(with_sign(x, sign), to), from);
    V t = fma_(y, all(0x1.715476p+0f), all(shift));
    V k = t - shift;
    V q = (V)((I)t << 23);
    /* ln2 in two parts, the first short enough that k times it is exact. */
    V r = fma_(k, all(-0x1.62e4p-1f), y);
    r = fma_(k, all(-0x1.7f7d1cp-20f), r);
    /* p = r + r^2 s(r), s fitted to |r| <= ln2/2: relative error 2^-31 before rounding. */
    V s = fma_(all(0.00019845893f), r, all(0.0013940823f));
    s = fma_(s, r, all(0.0083333896f));
    s = fma_(s, r, all(0.04166636f));
    s = fma_(s, r, all(0.16666666f));
    s = fma_(s, r, all(0.5f));
    V p = fma_(r * r, s, r);
    V F = fma_(q, p, q - 0.25f), E = fma_(q, p, q);
    if (mode != SINH) return (Growth){F * 4.0f, E * 4.0f};
    /* sinh = (F + F/E)/2 and cosh = (E + 1/E)/2 of the whole F and E, that are four times these. */
    V sinh_ = fma_(all(0.25f), F / E, F) * 2.0f;
    return (Growth){with_sign(sinh_, sign), (E + 0.0625f / E) * 2.0f};
}

#endif

/* The weight at w: c, lambda and kappa as in symexplin.kernels.terms. */
INLINE V image(int mode, V w, V c, V lambda, V kappa) {
    V magnitude = abs_(w);
    V value = c * with_sign(grow(mode, kappa * magnitude).F, sign_bits(w));
    if (mode == MISMATCH) return fma_(lambda, magnitude, value);
    if (mode == CONGRUENT) return fma_(lambda, w, value);
    return value;
}

/* dw_eff/dw, where c_kappa is c times kappa: at w = 0 the mean of both sides. */
INLINE V slope(int mode, V w, V c_kappa, V lambda, V E) {
    V value = c_kappa * E;
    if (mode == MISMATCH) return value + (V)((I)with_sign(lambda, sign_bits(w)) & (I)(w != 0));
    if (mode == CONGRUENT) return value + lambda;
    return value;
}

#ifdef SEL_DOUBLE
enum { SERIES_TERMS = 20 };
#else
enum { SERIES_TERMS = 12 };
#endif

/* x F'(x) - F(x): below |x| = 1 a series, since there the difference cancels (symexplin.transform). */
INLINE V difference(int mode, V x, Growth growth) {
    /* k!/(k - 1) for k = 2, 3, ...; cosh has the odd ones. */
    static const double exp_terms[] = {
        2.0, 3.0, 8.0, 30.0, 144.0, 840.0, 5760.0, 45360.0, 403200.0, 3991680.0, 43545600.0, 518918400.0,
        6706022400.0, 93405312000.0, 1394852659200.0, 22230464256000.0, 376610217984000.0, 6758061133824000.0,
        128047474114560000.0, 2554547108585472000.0};
    V near = at_most(at_least(x, -1), 1), square = near * near, series;
    if (mode == SINH) {
        series = all((REAL)(1.0 / exp_terms[SERIES_TERMS - 1]));
        for (int k = SERIES_TERMS - 3; k > 0; k -= 2) series = fma_(series, square, all((REAL)(1.0 / exp_terms[k])));
        series = series * square * near;
    } else {
        series = all((REAL)(1.0 / exp_terms[SERIES_TERMS - 2]));
        for (int k = SERIES_TERMS - 3; k >= 0; k--) series = fma_(series, near, all((REAL)(1.0 / exp_terms[k])));
        series = series * square;
    }
    return pick((I)(abs_(x) < 1), series, x * growth.E - growth.F);
}

#endif
