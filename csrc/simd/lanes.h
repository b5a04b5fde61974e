// Sums and maxima across the lanes of vectors.
#pragma once

#include "simd/simd.h"

namespace AB_ISA {

// The same shuffle within every 16 bytes.
#if AB_VECTOR_BYTES == 64
#define AB_LANES_OF_4(a, b, c, d) \
  a, b, c, d, a + 4, b + 4, c + 4, d + 4, a + 8, b + 8, c + 8, d + 8, a + 12, b + 12, c + 12, d + 12
#elif AB_VECTOR_BYTES == 32
#define AB_LANES_OF_4(a, b, c, d) a, b, c, d, a + 4, b + 4, c + 4, d + 4
#else
#define AB_LANES_OF_4(a, b, c, d) a, b, c, d
#endif

// Exchange blocks of N lanes with their neighbours.
template <int N>
AB_INLINE F swap_blocks(F x) {
#if AB_VECTOR_BYTES == 64
  if constexpr (N == 8)
    return __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  if constexpr (N == 4)
    return __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
#elif AB_VECTOR_BYTES == 32
  if constexpr (N == 4) return __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3);
#endif
  if constexpr (N == 2) return __builtin_shufflevector(x, x, AB_LANES_OF_4(2, 3, 0, 1));
  return __builtin_shufflevector(x, x, AB_LANES_OF_4(1, 0, 3, 2));
}

// Combine the lanes that are a multiple of L apart, the farthest first: every L lanes of the result are the
// same.
template <int L, class Op>
AB_INLINE F fold(F x, [[maybe_unused]] const Op &op) {
  if constexpr (VL > 8 && L <= 8) x = op(x, swap_blocks<8>(x));
  if constexpr (VL > 4 && L <= 4) x = op(x, swap_blocks<4>(x));
  if constexpr (L <= 2) x = op(x, swap_blocks<2>(x));
  if constexpr (L <= 1) x = op(x, swap_blocks<1>(x));
  return x;
}

template <int L>
AB_INLINE F fold_sum(F x) {
  return fold<L>(x, [](F y, F z) AB_LAMBDA { return y + z; });
}

template <int L>
AB_INLINE F fold_maximum(F x) {
  return fold<L>(x, [](F y, F z) AB_LAMBDA { return maximum(y, z); });
}

// The order of fold_sum<1>, in narrower vectors where those are faster.
AB_INLINE float sum_of(F x) {
#if defined(__AVX512F__)
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256((__m512)x),
                                    _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)x, 1)));
  const __m128 y = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  return (y[0] + y[2]) + (y[1] + y[3]);
#else
  return fold_sum<1>(x)[0];
#endif
}
AB_INLINE float largest(F x) { return fold_maximum<1>(x)[0]; }

// Turn two vectors into one of half their sums.
AB_INLINE F add_pair(F x, F y) {
  return __builtin_shufflevector(x, y, AB_LANES_OF_4(0, VL, 1, VL + 1)) +
         __builtin_shufflevector(x, y, AB_LANES_OF_4(2, VL + 2, 3, VL + 3));
}

// Every 16 bytes of the result hold a part of the sums of x[0] to x[3].
AB_INLINE F add_four(const F *x) {
  F y = add_pair(x[0], x[1]), z = add_pair(x[2], x[3]);
  return __builtin_shufflevector(y, z, AB_LANES_OF_4(0, 1, VL, VL + 1)) +
         __builtin_shufflevector(y, z, AB_LANES_OF_4(2, 3, VL + 2, VL + 3));
}

// Store the sums of the lanes of J vectors: one tree for all costs a few instructions for each.
template <int J>
AB_INLINE void store_sums(const F *x, float *sums) {
#if AB_VECTOR_BYTES == 64
  if (J == 16) {
    F a = add_four(x), b = add_four(x + 4), c = add_four(x + 8), d = add_four(x + 12);
    F ab = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    F cd = __builtin_shufflevector(c, d, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           __builtin_shufflevector(c, d, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    store(sums,
          __builtin_shufflevector(ab, cd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
              __builtin_shufflevector(ab, cd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31));
    return;
  }
#elif AB_VECTOR_BYTES == 32
  if (J == 8) {
    F a = add_four(x), b = add_four(x + 4);
    store(sums, __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) +
                    __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15));
    return;
  }
#endif
  AB_UNROLL
  for (int j = 0; j < J; j += 4) {
    F y = add_four(x + j);
    F4 sum = __builtin_shufflevector(y, y, 0, 1, 2, 3);
#if AB_VECTOR_BYTES == 64
    sum = (sum + __builtin_shufflevector(y, y, 8, 9, 10, 11)) +
          (__builtin_shufflevector(y, y, 4, 5, 6, 7) + __builtin_shufflevector(y, y, 12, 13, 14, 15));
#elif AB_VECTOR_BYTES == 32
    sum += __builtin_shufflevector(y, y, 4, 5, 6, 7);
#endif
    *(AnyF4 *)(sums + j) = sum;
  }
}

// The sum of the lanes in the order of store_sums, so that equal rows give equal bits: dO . v and dO . out
// of a row with a single key must cancel.
AB_INLINE float ordered_sum(F x) {
  const F four[4] = {x, F{}, F{}, F{}};
  float sums[4];
  store_sums<4>(four, sums);
  return sums[0];
}

}  // namespace AB_ISA
