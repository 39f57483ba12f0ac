/* Vectors of floats in one register: AVX-512, AVX2 with FMA, SSE2 or NEON, by the target of the build.

   Operators (+ - * /) work on V as on numbers. Other functions are defined here for each instruction set, so that no
   loop over lanes depends on the compiler's vectoriser. D is a vector of doubles with half as many lanes.
*/
#ifndef SEL_LANES_H
#define SEL_LANES_H

#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline))

#if defined(__AVX512F__)
#include <immintrin.h>
enum { BYTES = 64 };
typedef __m512 V;
typedef __m512d D;
INLINE V all(float x) { return _mm512_set1_ps(x); }
INLINE V load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void store(float *p, V x) { _mm512_storeu_ps(p, x); }
INLINE V fma_(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
INLINE V sqrt_(V x) { return _mm512_sqrt_ps(x); }
/* Minimum and maximum; if an operand is NaN, the second one is returned. */
INLINE V min_(V bound, V x) { return _mm512_min_ps(bound, x); }
INLINE V max_(V bound, V x) { return _mm512_max_ps(bound, x); }
/* x where w is not 0, else 0. */
INLINE V unless_zero(V w, V x) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(w, all(0), _CMP_NEQ_UQ), x); }
INLINE V pick_less(V a, V b, V yes, V no) { return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes); }
/* The bits of bfloat16 numbers in the upper halves of floats, and back. */
INLINE V widen_half(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
INLINE void store_half(uint16_t *p, V x) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(x), 16)));
}
INLINE D load_double(const float *p) { return _mm512_cvtps_pd(_mm256_loadu_ps(p)); }
INLINE void store_double(float *p, D x) { _mm256_storeu_ps(p, _mm512_cvtpd_ps(x)); }
INLINE D all_double(double x) { return _mm512_set1_pd(x); }
INLINE D sqrt_double(D x) { return _mm512_sqrt_pd(x); }
INLINE D min_double(D bound, D x) { return _mm512_min_pd(bound, x); }
INLINE D max_double(D bound, D x) { return _mm512_max_pd(bound, x); }
INLINE D pick_less_double(D a, D b, D yes, D no) {
    return _mm512_mask_blend_pd(_mm512_cmp_pd_mask(a, b, _CMP_LT_OQ), no, yes);
}

#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
enum { BYTES = 32 };
typedef __m256 V;
typedef __m256d D;
INLINE V all(float x) { return _mm256_set1_ps(x); }
INLINE V load(const float *p) { return _mm256_loadu_ps(p); }
INLINE void store(float *p, V x) { _mm256_storeu_ps(p, x); }
INLINE V fma_(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
INLINE V sqrt_(V x) { return _mm256_sqrt_ps(x); }
INLINE V min_(V bound, V x) { return _mm256_min_ps(bound, x); }
INLINE V max_(V bound, V x) { return _mm256_max_ps(bound, x); }
INLINE V unless_zero(V w, V x) { return _mm256_and_ps(_mm256_cmp_ps(w, all(0), _CMP_NEQ_UQ), x); }
INLINE V pick_less(V a, V b, V yes, V no) { return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
INLINE V widen_half(const uint16_t *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
INLINE void store_half(uint16_t *p, V x) {
    __m256i half = _mm256_srai_epi32(_mm256_castps_si256(x), 16); /* fits 16 signed bits: no saturation */
    half = _mm256_permute4x64_epi64(_mm256_packs_epi32(half, half), 0x08);
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(half));
}
INLINE D load_double(const float *p) { return _mm256_cvtps_pd(_mm_loadu_ps(p)); }
INLINE void store_double(float *p, D x) { _mm_storeu_ps(p, _mm256_cvtpd_ps(x)); }
INLINE D all_double(double x) { return _mm256_set1_pd(x); }
INLINE D sqrt_double(D x) { return _mm256_sqrt_pd(x); }
INLINE D min_double(D bound, D x) { return _mm256_min_pd(bound, x); }
INLINE D max_double(D bound, D x) { return _mm256_max_pd(bound, x); }
INLINE D pick_less_double(D a, D b, D yes, D no) { return _mm256_blendv_pd(no, yes, _mm256_cmp_pd(a, b, _CMP_LT_OQ)); }

#elif defined(__SSE2__)
#include <emmintrin.h>
enum { BYTES = 16 };
typedef __m128 V;
typedef __m128d D;
INLINE V all(float x) { return _mm_set1_ps(x); }
INLINE V load(const float *p) { return _mm_loadu_ps(p); }
INLINE void store(float *p, V x) { _mm_storeu_ps(p, x); }
INLINE V fma_(V a, V b, V c) { return a * b + c; } /* two roundings: without the instruction fma is a call per lane */
INLINE V sqrt_(V x) { return _mm_sqrt_ps(x); }
INLINE V min_(V bound, V x) { return _mm_min_ps(bound, x); }
INLINE V max_(V bound, V x) { return _mm_max_ps(bound, x); }
INLINE V unless_zero(V w, V x) { return _mm_and_ps(_mm_cmpneq_ps(w, all(0)), x); }
INLINE V pick_less(V a, V b, V yes, V no) {
    V mask = _mm_cmplt_ps(a, b);
    return _mm_or_ps(_mm_and_ps(mask, yes), _mm_andnot_ps(mask, no));
}
INLINE V widen_half(const uint16_t *p) {
    return _mm_castsi128_ps(_mm_unpacklo_epi16(_mm_setzero_si128(), _mm_loadl_epi64((const __m128i *)p)));
}
INLINE void store_half(uint16_t *p, V x) {
    __m128i half = _mm_srai_epi32(_mm_castps_si128(x), 16);
    _mm_storel_epi64((__m128i *)p, _mm_packs_epi32(half, half));
}
INLINE D load_double(const float *p) { return _mm_cvtps_pd(_mm_castsi128_ps(_mm_loadl_epi64((const __m128i *)p))); }
INLINE void store_double(float *p, D x) { _mm_storel_epi64((__m128i *)p, _mm_castps_si128(_mm_cvtpd_ps(x))); }
INLINE D all_double(double x) { return _mm_set1_pd(x); }
INLINE D sqrt_double(D x) { return _mm_sqrt_pd(x); }
INLINE D min_double(D bound, D x) { return _mm_min_pd(bound, x); }
INLINE D max_double(D bound, D x) { return _mm_max_pd(bound, x); }
INLINE D pick_less_double(D a, D b, D yes, D no) {
    D mask = _mm_cmplt_pd(a, b);
    return _mm_or_pd(_mm_and_pd(mask, yes), _mm_andnot_pd(mask, no));
}

#elif defined(__aarch64__)
#include <arm_neon.h>
enum { BYTES = 16 };
typedef float32x4_t V;
typedef float64x2_t D;
INLINE V all(float x) { return vdupq_n_f32(x); }
INLINE V load(const float *p) { return vld1q_f32(p); }
INLINE void store(float *p, V x) { vst1q_f32(p, x); }
INLINE V fma_(V a, V b, V c) { return vfmaq_f32(c, a, b); }
INLINE V sqrt_(V x) { return vsqrtq_f32(x); }
INLINE V min_(V bound, V x) { return vminq_f32(bound, x); }
INLINE V max_(V bound, V x) { return vmaxq_f32(bound, x); }
INLINE V unless_zero(V w, V x) { return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(x), vceqzq_f32(w))); }
INLINE V pick_less(V a, V b, V yes, V no) { return vbslq_f32(vcltq_f32(a, b), yes, no); }
INLINE V widen_half(const uint16_t *p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
INLINE void store_half(uint16_t *p, V x) { vst1_u16(p, vshrn_n_u32(vreinterpretq_u32_f32(x), 16)); }
INLINE D load_double(const float *p) { return vcvt_f64_f32(vld1_f32(p)); }
INLINE void store_double(float *p, D x) { vst1_f32(p, vcvt_f32_f64(x)); }
INLINE D all_double(double x) { return vdupq_n_f64(x); }
INLINE D sqrt_double(D x) { return vsqrtq_f64(x); }
INLINE D min_double(D bound, D x) { return vminq_f64(bound, x); }
INLINE D max_double(D bound, D x) { return vmaxq_f64(bound, x); }
INLINE D pick_less_double(D a, D b, D yes, D no) { return vbslq_f64(vcltq_f64(a, b), yes, no); }

#else
#error "symexplin's compiled kernels need AVX-512, AVX2 with FMA, SSE2 or NEON"
#endif

/* The map is a long chain of dependent instructions. Two independent vectors hide their latency. */
enum { LANES = BYTES / 4, PAIR = 2, STEP = PAIR * LANES };
#define EACH _Pragma("GCC unroll 2") for (int i = 0; i < PAIR; i++)

typedef int32_t I __attribute__((vector_size(BYTES)));
typedef uint32_t U __attribute__((vector_size(BYTES)));
typedef uint64_t L __attribute__((vector_size(BYTES)));

INLINE V abs_(V x) { return (V)((I)x & 0x7fffffff); }

INLINE V sign_of(V x) { return (V)((I)x & (int32_t)0x80000000); }

INLINE V with_sign(V x, V sign) { return (V)((I)x ^ (I)sign); }

/* Round to nearest, ties to even; NaN gets torch's bits. */
INLINE void round_half(uint16_t *p, V x) {
    U bits = (U)x, nan = (U)(x != x);
    U rounded = bits + 0x7fff + ((bits >> 16) & 1);
    store_half(p, (V)((nan & 0x7fc00000) | (~nan & rounded)));
}

/* The type of weights and gradients in memory: float or bfloat16. READ: float, with the exponential computed from the
   weight. */
enum { FLOAT, HALF, READ };

INLINE V load_as(int as, const void *p, int64_t at) {
    return as == HALF ? widen_half((const uint16_t *)p + at) : load((const float *)p + at);
}

INLINE void store_as(int as, void *p, int64_t at, V x) {
    if (as == HALF) round_half((uint16_t *)p + at, x);
    else store((float *)p + at, x);
}

/* Prefetch into the second-level cache. The first level allows few outstanding lines, and the loops would wait. */
INLINE void prefetch(const float *p) { __builtin_prefetch(p, 0, 2); }

INLINE void prefetch_as(int as, const void *p, int64_t at) {
    prefetch((const float *)((const char *)p + at * (as == HALF ? 2 : 4)));
}

/* The sum of all lanes in a fixed order. */
INLINE float sum_of(V x) {
    typedef float Four __attribute__((vector_size(16)));
    Four part[LANES / 4];
    memcpy(part, &x, sizeof part);
    for (int half = LANES / 8; half > 0; half /= 2)
        for (int i = 0; i < half; i++) part[i] += part[i + half];
    return (part[0][0] + part[0][2]) + (part[0][1] + part[0][3]);
}

#endif
