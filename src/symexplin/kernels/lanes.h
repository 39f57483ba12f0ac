/* Vectors of reals by the compiler's vector extension: one register wide, no intrinsics.

   Loops over the lanes of one vector become single instructions (fma, sqrt); the order of every sum is written out
   and so the same on every run. REAL is float, or double with -DSEL_DOUBLE.
*/
#ifndef SEL_LANES_H
#define SEL_LANES_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX__)
#define BYTES 32
#else
#define BYTES 16
#endif

#ifdef SEL_DOUBLE
typedef double REAL;
typedef int64_t INT;
#define FMA_OF __builtin_fma
#define SQRT_OF __builtin_sqrt
#define PACKED "pd"
#else
typedef float REAL;
typedef int32_t INT;
#define FMA_OF __builtin_fmaf
#define SQRT_OF __builtin_sqrtf
#define PACKED "ps"
#endif

/* The map is a long chain of dependent instructions: two vectors side by side keep the processor busy. */
enum { LANES = BYTES / (int)sizeof(REAL), PAIR = 2, STEP = PAIR * LANES };
#define EACH _Pragma("GCC unroll 2") for (int i = 0; i < PAIR; i++)

typedef REAL V __attribute__((vector_size(BYTES)));
typedef INT I __attribute__((vector_size(BYTES)));
typedef REAL Unaligned __attribute__((vector_size(BYTES), aligned(sizeof(REAL)), may_alias));

#define INLINE static inline __attribute__((always_inline))

/* A difference, since 0 + -0 is 0. */
INLINE V all(REAL x) { return x - (V){0}; }

INLINE V load(const REAL *p) { return *(const Unaligned *)p; }

INLINE void store(REAL *p, V x) { *(Unaligned *)p = x; }

/* Without the instruction, fma would be a library call for each lane. */
INLINE V fma_(V a, V b, V c) {
#if defined(__FMA__) || defined(__AVX512F__) || defined(__aarch64__)
    V r;
    for (int i = 0; i < LANES; i++) r[i] = FMA_OF(a[i], b[i], c[i]);
    return r;
#else
    return a * b + c;
#endif
}

INLINE V sqrt_(V a) {
    V r;
    for (int i = 0; i < LANES; i++) r[i] = SQRT_OF(a[i]);
    return r;
}

INLINE V pick(I mask, V yes, V no) { return (V)((mask & (I)yes) | (~mask & (I)no)); }

/* NaN stays: of two operands, one of them NaN, the instructions return the second, and comparisons are false. */
INLINE V at_most(V x, REAL bound) {
#ifdef __AVX__
    V r;
    __asm__("vmin" PACKED " %2, %1, %0" : "=v"(r) : "v"(all(bound)), "v"(x));
    return r;
#else
    return pick((I)(x > bound), all(bound), x);
#endif
}

INLINE V at_least(V x, REAL bound) {
#ifdef __AVX__
    V r;
    __asm__("vmax" PACKED " %2, %1, %0" : "=v"(r) : "v"(all(bound)), "v"(x));
    return r;
#else
    return pick((I)(x < bound), all(bound), x);
#endif
}

INLINE I sign_bits(V x) { return (I)x & (I)all((REAL)-0.0); }

INLINE V abs_(V x) { return (V)((I)x & ~(I)all((REAL)-0.0)); }

INLINE V with_sign(V x, I sign) { return (V)((I)x ^ sign); }

/* Always in the same order. */
INLINE REAL sum_of(V x) {
    typedef REAL Part __attribute__((vector_size(BYTES / 2)));
    Part low, high;
    memcpy(&low, &x, sizeof low), memcpy(&high, (const char *)&x + sizeof low, sizeof high);
    low += high;
    REAL total = low[0];
    for (int i = 1; i < LANES / 2; i++) total += low[i];
    return total;
}

#ifndef SEL_DOUBLE
typedef uint16_t Half __attribute__((vector_size(BYTES / 2)));
typedef uint16_t UnalignedHalf __attribute__((vector_size(BYTES / 2), aligned(2), may_alias));
typedef uint32_t U __attribute__((vector_size(BYTES)));

INLINE V from_bfloat16(const uint16_t *p) {
    return (V)(__builtin_convertvector((Half) * (const UnalignedHalf *)p, U) << 16);
}

/* To the nearest, ties to even; NaN as torch writes it. */
INLINE void to_bfloat16(uint16_t *p, V x) {
    U bits = (U)x;
    U rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    U nan = (U)(x != x);
    *(UnalignedHalf *)p = __builtin_convertvector((nan & 0x7fc0) | (~nan & rounded), Half);
}
#endif

#endif
