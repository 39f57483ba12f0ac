/* One element of the map and of its derivatives (symexplin.transform is the definition). */
#ifndef SEL_ELEMENT_H
#define SEL_ELEMENT_H

#include "lanes.h"

enum { PLAIN, MISMATCH, CONGRUENT, EXP_ONLY, SINH };

/* F(x) = expm1(x), or in mode SINH sinh(x), and E(x) = F'(x), both over whole(mode): so the parts of a sum do not
   overflow before it does. */
#ifdef SEL_DOUBLE

INLINE REAL whole(int mode) { return (void)mode, 1; }

INLINE void grow(int mode, const V *x, V *F, V *E) {
    EACH for (int lane = 0; lane < LANES; lane++) {
        F[i][lane] = mode == SINH ? sinh(x[i][lane]) : expm1(x[i][lane]);
        E[i][lane] = mode == SINH ? cosh(x[i][lane]) : exp(x[i][lane]);
    }
}

#else

INLINE REAL whole(int mode) { return mode == SINH ? 4 : 2; }

/* With x = k ln2 + r, p = expm1(r) and q = 2^k over whole(mode): expm1(x) is q p + q - 1 and exp(x) q p + q. Where
   exp(x) is below 2^-124 it is 0. */
INLINE void grow(int mode, const V *x, V *F, V *E) {
    const int down = mode == SINH ? 2 : 1;              /* q = 2^(k - down) */
    const float from = -86.6f;                          /* k = -125 */
    const float to = mode == SINH ? 89.7f : 88.9f;      /* k = 127 + down, p > 0: the whole is infinite */
    const float shift = 0x1.8p23f + (float)(127 - down); /* leaves the exponent's bits of q at the low end */
    const float one = 1.0f / whole(mode);
    V y[PAIR], t[PAIR], q[PAIR], r[PAIR], s[PAIR], p[PAIR];
    EACH y[i] = at_least(at_most(mode == SINH ? abs_(x[i]) : x[i], to), from);
    EACH t[i] = fma_(y[i], all(0x1.715476p+0f), all(shift));
    EACH q[i] = (V)((I)t[i] << 23);
    /* float's ln2 errs by 0.05 units of rounding. */
    EACH r[i] = fma_(t[i] - shift, all(-0x1.62e43p-1f), y[i]);
    /* p = r + r^2 s(r), s fitted to |r| <= ln2/2: 0.22 units of rounding. */
    EACH s[i] = fma_(all(0.0013882498f), r[i], all(0.008366647f));
    EACH s[i] = fma_(s[i], r[i], all(0.041667204f));
    EACH s[i] = fma_(s[i], r[i], all(0.16666542f));
    EACH s[i] = fma_(s[i], r[i], all(0.49999997f));
    EACH p[i] = fma_(r[i] * r[i], s[i], r[i]);
    EACH F[i] = fma_(q[i], p[i], q[i] - one);
    EACH E[i] = fma_(q[i], p[i], q[i]);
    if (mode != SINH) return;
    /* sinh = (F + F/E)/2 and cosh = (E + 1/E)/2 of the whole F and E. */
    EACH F[i] = with_sign(fma_(all(0.25f), F[i] / E[i], F[i]) * 0.5f, sign_bits(x[i]));
    EACH E[i] = (E[i] + 0.0625f / E[i]) * 0.5f;
}

#endif

/* The weight at w: c, lambda and kappa as in symexplin.kernels.terms. */
INLINE void image(int mode, const V *w, const V *c, const V *lambda, const V *kappa, V *out) {
    V x[PAIR], F[PAIR], E[PAIR];
    EACH x[i] = kappa[i] * abs_(w[i]);
    grow(mode, x, F, E);
    EACH out[i] = c[i] * with_sign(F[i] * whole(mode), sign_bits(w[i]));
    if (mode == MISMATCH) EACH out[i] = fma_(lambda[i], abs_(w[i]), out[i]);
    if (mode == CONGRUENT) EACH out[i] = fma_(lambda[i], w[i], out[i]);
}

/* dw_eff/dw, where c_kappa is c kappa whole(mode): at w = 0 the mean of both sides. */
INLINE V slope(int mode, V w, V c_kappa, V lambda, V E) {
    if (mode == MISMATCH) return fma_(c_kappa, E, (V)((I)with_sign(lambda, sign_bits(w)) & (I)(w != 0)));
    return mode == CONGRUENT ? fma_(c_kappa, E, lambda) : c_kappa * E;
}

#ifdef SEL_DOUBLE
enum { SERIES_TERMS = 20 };
#else
enum { SERIES_TERMS = 12 };
#endif

/* x F'(x) - F(x), over whole(mode): below |x| = 1 a series, since there it cancels (symexplin.transform). */
INLINE V difference(int mode, V x, V F, V E) {
    /* (k - 1)/k! for k = 2, 3, ...; the series of cosh has every other one. */
    static const REAL terms[] = {
        1.0 / 2,           1.0 / 3,           1.0 / 8,           1.0 / 30,           1.0 / 144,
        1.0 / 840,         1.0 / 5760,        1.0 / 45360,       1.0 / 403200,       1.0 / 3991680,
        1.0 / 43545600,    1.0 / 518918400,   1.0 / 6706022400,  1.0 / 93405312000,  1.0 / 1394852659200,
        1.0 / 22230464256000, 1.0 / 376610217984000, 1.0 / 6758061133824000, 1.0 / 128047474114560000,
        1.0 / 2554547108585472000};
    const int first = mode == SINH, stride = mode == SINH ? 2 : 1;
    V near = at_most(at_least(x, -1), 1), square = near * near, by = mode == SINH ? square : near;
    V series = all(terms[SERIES_TERMS - 2 + first]);
#pragma GCC unroll 20
    for (int k = SERIES_TERMS - 2 + first - stride; k >= first; k -= stride) series = fma_(series, by, all(terms[k]));
    series = series * square * (mode == SINH ? near : all(1)) / whole(mode);
    return pick((I)(abs_(x) < 1), series, x * E - F);
}

#endif
