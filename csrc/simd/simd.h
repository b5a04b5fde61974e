// Vectors on GCC/Clang extensions: one source for 16 (SSE2, NEON), 32 (AVX2) and 64 bytes (AVX-512).
//
// Compiled once per instruction set, each time in a namespace of its own (AB_ISA). Nothing here may be an
// inline function of the standard library: see isa.h.
#pragma once

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "attnbias.h"

#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13
// GCC 12 warns of its own _mm512_undefined_ps, wherever that is inlined (its bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define AB_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define AB_VECTOR_BYTES 32
#else
#define AB_VECTOR_BYTES 16
#endif

#define AB_INLINE static inline __attribute__((always_inline, unused))
#define AB_LAMBDA __attribute__((always_inline))
#if defined(__clang__)
#define AB_UNROLL _Pragma("clang loop unroll(full)")
#else
#define AB_UNROLL _Pragma("GCC unroll 32")
#endif

namespace AB_ISA {

constexpr int VL = AB_VECTOR_BYTES / 4;  // float32 lanes
constexpr float LOG2_E = 1.44269504088896340736f;

typedef float F __attribute__((vector_size(AB_VECTOR_BYTES)));
typedef int32_t I __attribute__((vector_size(AB_VECTOR_BYTES)));
typedef uint32_t U __attribute__((vector_size(AB_VECTOR_BYTES)));
typedef uint16_t Half __attribute__((vector_size(AB_VECTOR_BYTES / 2)));
typedef float AnyF __attribute__((vector_size(AB_VECTOR_BYTES), aligned(4), may_alias));
typedef uint16_t AnyHalf __attribute__((vector_size(AB_VECTOR_BYTES / 2), aligned(2), may_alias));
typedef float F4 __attribute__((vector_size(16)));
typedef float AnyF4 __attribute__((vector_size(16), aligned(4), may_alias));

// A number of each dtype as it is stored.
struct Bfloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <class T>
struct Type {
  typedef T Number;
};

// A count that the compiler knows.
template <int N>
struct Count {
  static constexpr int value = N;
};

// Call body(Count<n>) for 1 <= n <= MOST.
template <int MOST, int N = 1, class Body>
AB_INLINE void with_count(int64_t n, const Body &body) {
  if constexpr (N < MOST)
    if (n != N) return with_count<MOST, N + 1>(n, body);
  body(Count<N>());
}

// Call body(Type<T>) with the type of an ab_dtype.
template <class Body>
AB_INLINE auto with_dtype(int32_t dtype, const Body &body) {
  switch (dtype) {
    case AB_BFLOAT16: return body(Type<Bfloat16>());
    case AB_FLOAT16: return body(Type<Float16>());
    default: return body(Type<float>());
  }
}

AB_INLINE int64_t min64(int64_t x, int64_t y) { return x < y ? x : y; }
AB_INLINE int64_t max64(int64_t x, int64_t y) { return x > y ? x : y; }
AB_INLINE int64_t divide_up(int64_t x, int64_t y) { return (x + y - 1) / y; }
AB_INLINE int64_t round_up(int64_t x, int64_t step) { return divide_up(x, step) * step; }

AB_INLINE F splat(float x) { return x - F{}; }
AB_INLINE I splat(int32_t x) { return x - I{}; }
AB_INLINE F load(const float *p) { return *(const AnyF *)p; }
AB_INLINE void store(float *p, F x) { *(AnyF *)p = x; }
AB_INLINE I load(const int32_t *p) {
  I x;
  memcpy(&x, p, sizeof x);
  return x;
}

// With a NaN in y the result is y: a NaN among the scores must reach the result.
AB_INLINE F maximum(F x, F y) {
#if defined(__AVX512F__)
  return (F)_mm512_max_ps((__m512)x, (__m512)y);
#elif defined(__AVX2__)
  return (F)_mm256_max_ps((__m256)x, (__m256)y);
#elif defined(__SSE2__)
  return (F)_mm_max_ps((__m128)x, (__m128)y);
#else
  return x > y ? x : y;
#endif
}

AB_INLINE bool any_differs(F x, F y) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)x, (__m512)y, _CMP_NEQ_UQ) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps(_mm256_cmp_ps((__m256)x, (__m256)y, _CMP_NEQ_UQ)) != 0;
#else
  I differs = x != y;
  int32_t any = 0;
  for (int i = 0; i < VL; i++) any |= differs[i];
  return any != 0;
#endif
}

// Lane i is x[i] where bit i is set, else y[i].
AB_INLINE F choose(uint32_t bits, F x, F y) {
#if defined(__AVX512F__)
  return (F)_mm512_mask_blend_ps((__mmask16)bits, (__m512)y, (__m512)x);
#else
  I lane;
  for (int i = 0; i < VL; i++) lane[i] = 1 << i;
  return (splat((int32_t)bits) & lane) != 0 ? x : y;
#endif
}

// 2^x for x up to 127, 0 below -126 and for -inf; relative error 1.6e-7 (minimax of degree 5).
AB_INLINE F exp2_of(F x) {
  x = maximum(splat(-127.0f), x);
  const F magic = splat(12582912.0f + 127.0f);  // 1.5 * 2^23 rounds to an integer; the bias of exponents
  F t = x + magic;
  I power = (I)t << 23;
  F f = x - (t - magic);
  F p = f * splat(1.326472712e-03f) + splat(9.671512645e-03f);
  p = p * f + splat(5.550733743e-02f);
  p = p * f + splat(2.402224209e-01f);
  p = p * f + splat(6.931469776e-01f);
  p = p * f + splat(1.0f);
  return p * (F)power;
}

// Near 0 an odd polynomial (Cephes), elsewhere by exp2; relative error 2e-7.
AB_INLINE F tanh_of(F x) {
  F z = x * x;
  F p = z * splat(-5.70498872745e-3f) + splat(2.06390887954e-2f);
  p = p * z + splat(-5.37397155531e-2f);
  p = p * z + splat(1.33314422036e-1f);
  p = p * z + splat(-3.33332819422e-1f);
  F near = p * z * x + x;
  F bounded = x > splat(20.0f) ? splat(20.0f) : x;  // tanh is 1 there, and exp2 would overflow
  F far = splat(1.0f) - splat(2.0f) / (exp2_of(bounded * splat(2.0f * LOG2_E)) + splat(1.0f));
  return z < splat(0.625f * 0.625f) ? near : far;
}

#if !defined(__AVX2__) && !defined(__aarch64__)
// float16 without instructions for it: shift the fields into place, mend the exponent by a product.
AB_INLINE F widen_float16(U h) {
  U magnitude = (h & 0x7fffu) << 13;
  F x = (F)magnitude * splat(5.192296858534828e33f);  // 2^112
  U special = (U)(magnitude >= 0x0f800000u) & 0x7f800000u;
  return (F)((U)x | special | (h & 0x8000u) << 16);
}

AB_INLINE U narrow_float16(F x) {
  U bits = (U)x, sign = bits & 0x80000000u, magnitude = bits ^ sign;
  U normal = (magnitude + 0xc8000fffu + ((magnitude >> 13) & 1u)) >> 13;  // rebias, round to even
  U tiny = (U)((F)magnitude + splat(0.5f)) - 0x3f000000u;                 // the sum rounds to 2^-24
  U result = magnitude < 0x38800000u ? tiny : normal;
  result = magnitude >= 0x477ff000u ? U{} + 0x7c00u : result;
  result = magnitude > 0x7f800000u ? U{} + 0x7e00u : result;
  return result | sign >> 16;
}
#endif

// GCC 12 makes several instructions of __builtin_convertvector where one would do.
AB_INLINE F load(const Bfloat16 *p) {
#if defined(__AVX512F__)
  const U bits = (U)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__AVX2__)
  const U bits = (U)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
#else
  const U bits = __builtin_convertvector(*(const AnyHalf *)p, U);
#endif
  return (F)(bits << 16);
}

AB_INLINE void store(Bfloat16 *p, F x) {
  U bits = (U)x;
  U rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  U result = (bits & 0x7fffffffu) > 0x7f800000u ? U{} + 0x7fc0u : rounded;
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16((__m512i)result));
#elif defined(__AVX2__)
  const __m256i pairs = _mm256_packus_epi32((__m256i)result, (__m256i)result);
  _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(_mm256_permute4x64_epi64(pairs, 0x08)));
#else
  *(AnyHalf *)p = __builtin_convertvector(result, Half);
#endif
}

AB_INLINE F load(const Float16 *p) {
#if defined(__AVX512F__)
  return (F)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__AVX2__)
  return (F)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif defined(__aarch64__)
  return (F)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)p)));
#else
  return widen_float16(__builtin_convertvector(*(const AnyHalf *)p, U));
#endif
}

AB_INLINE void store(Float16 *p, F x) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
  _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
  vst1_u16((uint16_t *)p, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)x)));
#else
  *(AnyHalf *)p = __builtin_convertvector(narrow_float16(x), Half);
#endif
}

// The first n < VL lanes; the others are 0 and are neither read nor written.
template <class T>
AB_INLINE F load_some(const T *p, int64_t n) {
  alignas(64) T some[VL] = {};
  memcpy(some, p, (size_t)n * sizeof(T));
  return load(some);
}

template <class T>
AB_INLINE void store_some(T *p, F x, int64_t n) {
  alignas(64) T some[VL];
  store(some, x);
  memcpy(p, some, (size_t)n * sizeof(T));
}

#if defined(__AVX512F__)
AB_INLINE F load_some(const float *p, int64_t n) {
  return (F)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
}
AB_INLINE void store_some(float *p, F x, int64_t n) {
  _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)x);
}
#elif defined(__AVX2__)
AB_INLINE __m256i first_lanes(int64_t n) {
  static const int32_t lanes[2 * VL] = {-1, -1, -1, -1, -1, -1, -1, -1};
  return _mm256_loadu_si256((const __m256i *)(lanes + VL - n));
}
AB_INLINE F load_some(const float *p, int64_t n) { return (F)_mm256_maskload_ps(p, first_lanes(n)); }
AB_INLINE void store_some(float *p, F x, int64_t n) { _mm256_maskstore_ps(p, first_lanes(n), (__m256)x); }
#endif

// The first n lanes, or all of them where n is VL or more.
template <class T>
AB_INLINE F load_first(const T *p, int64_t n) {
  return n >= VL ? load(p) : load_some(p, n);
}

template <class T>
AB_INLINE void store_first(T *p, F x, int64_t n) {
  n >= VL ? store(p, x) : store_some(p, x, n);
}

// Copy n numbers to another dtype, rounded once. The rest of the last vector becomes 0 as far as there is
// `room`.
template <class T, class U>
AB_INLINE void copy_row(const T *from, int64_t n, U *to, int64_t room) {
  int64_t c = 0;
  for (; c + VL <= n; c += VL) store(to + c, load(from + c));
  if (c < n) store_first(to + c, load_some(from + c, n - c), room - c);
}

}  // namespace AB_ISA
