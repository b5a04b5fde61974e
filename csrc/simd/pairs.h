// Pairs of bfloat16 numbers: one instruction multiplies two pairs and adds both products to a float32, so a
// product of matrices takes half the steps. Needs AVX512-BF16.
//
// A pair holds two numbers that follow each other in the depth of a product. Where the depth is the columns
// of a tensor its rows hold pairs as they are; where the depth is the rows, two of them are interleaved.
// The instruction adds the second product first and rounds after each; it takes denormal numbers as 0.
#pragma once

#include "simd/pack.h"

namespace AB_ISA {

typedef uint32_t Pair __attribute__((may_alias, aligned(2)));  // the first number is in the low half

// Rows of pairs; row i starts at `at + i * row`, counted in numbers.
struct PairRows {
  const Bfloat16 *at;
  int64_t row;

  // From row i and pair `column` on.
  AB_LAMBDA PairRows from(int64_t i, int64_t column = 0) const { return {at + i * row + 2 * column, row}; }
};

AB_INLINE U load_pairs(const Bfloat16 *p) { return (U)_mm512_loadu_si512(p); }
AB_INLINE void store_pairs(Bfloat16 *p, U x) { _mm512_storeu_si512(p, (__m512i)x); }

// Lane i is the pair (x[i], y[i]), each rounded to nearest even.
AB_INLINE U pair_up(F x, F y) {
  const __m512i numbers =
      (__m512i)_mm512_cvtne2ps_pbh((__m512)y, (__m512)x);  // x[0], x[1] .. y[0], y[1] ..
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,  //
                                         23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return (U)_mm512_permutexvar_epi16(order, numbers);
}

// Store row r of sums rounded to nearest even, at `to + r * row`.
template <int MR>
AB_INLINE void store_rounded(const Sums<MR, 2> &sums, Bfloat16 *to, int64_t row) {
  AB_UNROLL
  for (int r = 0; r < MR; r++)
    store_pairs(to + r * row, (U)_mm512_cvtne2ps_pbh((__m512)sums.at[r][1], (__m512)sums.at[r][0]));
}

// Store rows 2 r and 2 r + 1 of sums as row r of pairs; a missing last row is 0.
template <int MR>
AB_INLINE void store_paired(const Sums<MR, 2> &sums, Bfloat16 *to, int64_t row) {
  AB_UNROLL
  for (int r = 0; r < MR; r += 2) {
    AB_UNROLL
    for (int c = 0; c < 2; c++)
      store_pairs(to + r / 2 * row + 2 * c * VL,
                  pair_up(sums.at[r][c], r + 1 < MR ? sums.at[r + 1 < MR ? r + 1 : r][c] : F{}));
  }
}

// One step of the depth, of two numbers.
template <int MR, int NV>
AB_INLINE void add_step(Sums<MR, NV> &sums, const Bfloat16 *a, int64_t a_row, const Bfloat16 *b) {
  __m512bh row[NV];
  AB_UNROLL
  for (int c = 0; c < NV; c++) row[c] = (__m512bh)_mm512_loadu_si512(b + 2 * c * VL);
  AB_UNROLL
  for (int r = 0; r < MR; r++) {
    const __m512bh pair = (__m512bh)_mm512_set1_epi32((int32_t)*(const Pair *)(a + r * a_row));
    AB_UNROLL
    for (int c = 0; c < NV; c++) sums.at[r][c] = (F)_mm512_dpbf16_ps((__m512)sums.at[r][c], row[c], pair);
  }
}

// sums += a b, `depth` steps.
template <int MR, int NV>
AB_INLINE void add_product(Sums<MR, NV> &sums, int64_t depth, PairRows a, PairRows b) {
#pragma GCC unroll 4
  for (int64_t k = 0; k < depth; k++) add_step(sums, a.at + 2 * k, a.row, b.at + k * b.row);
}

// sums += a^T b.
template <int MR, int NV>
AB_INLINE void add_transposed(Sums<MR, NV> &sums, int64_t depth, PairRows a, PairRows b) {
#pragma GCC unroll 4
  for (int64_t k = 0; k < depth; k++) add_step(sums, a.at + k * a.row, 2, b.at + k * b.row);
}

// sums = a b, dot products of `depth` numbers. In one chain of roundings: their sum is less than what the
// rounding of the inputs left, see docs/numerics.md.
template <int MR, int NV>
AB_INLINE void multiply(Sums<MR, NV> &sums, float *, int64_t depth, PairRows a, PairRows b) {
  clear(sums);
  add_product(sums, divide_up(depth, 2), a, b);
}

// Copy rows [first, first + n) of a tensor, times 1, -1 or 0; further rows up to `rows`, and columns up to
// `width`, are 0.
static void copy_numbers(const ab_tensor &x, int64_t b, int64_t h, int64_t first, int64_t n, int64_t rows,
                         int64_t columns, int64_t width, float sign, Bfloat16 *to) {
  const Bfloat16 *from = row_of<Bfloat16>(x, b, h, first);
  for (int64_t i = 0; i < rows; i++, to += width) {
    const int64_t there = i < n ? columns : 0;
    if (there) memcpy(to, from + i * x.row, (size_t)there * sizeof *to);
    memset(to + there, 0, (size_t)(width - there) * sizeof *to);
    if (sign == 1.0f) continue;
    for (int64_t c = 0; c < there; c += VL) {
      const F numbers = load_first(to + c, there - c) * splat(sign);
      store_first(to + c, numbers, there - c);
    }
  }
}

// Rows [first, first + n) with pairs of columns: read in place, or copied to `room` where their columns are
// odd, or where `rows` are wanted and there are fewer.
static PairRows pair_columns(const ab_tensor &x, int64_t b, int64_t h, int64_t first, int64_t n,
                             int64_t rows, int64_t columns, Bfloat16 *room) {
  if (columns % 2 == 0 && rows == n) return {row_of<Bfloat16>(x, b, h, first), x.row};
  const int64_t width = round_up(columns, 2);
  copy_numbers(x, b, h, first, n, rows, columns, width, 1.0f, room);
  return {room, width};
}

// Interleave rows [first, first + n) two by two into [n / 2, width] pairs; a missing last row and columns
// past `columns` are 0.
static PairRows pair_rows(const ab_tensor &x, int64_t b, int64_t h, int64_t first, int64_t n,
                          int64_t columns, int64_t width, Bfloat16 *to) {
  const Bfloat16 *from = row_of<Bfloat16>(x, b, h, first);
  const PairRows paired = {to, 2 * width};
  for (int64_t i = 0; i < n; i += 2, from += 2 * x.row, to += paired.row) {
    for (int64_t c = 0; c < width; c += VL) {
      const int64_t there = columns - c;
      const U low = (U)load_first(from + c, there);
      const U high = i + 1 < n ? (U)load_first(from + x.row + c, there) : U{};
      store_pairs(to + 2 * c, low >> 16 | high);
    }
  }
  return paired;
}

// Pack rows [first, first + n), at most LANES, times 1, -1 or 0, into a panel [columns / 2, LANES] of pairs
// of columns; missing rows and columns are 0. `room` holds [LANES, columns] numbers, columns rounded up.
static void pack_pairs(const ab_tensor &x, int64_t b, int64_t h, int64_t first, int64_t n, int64_t columns,
                       float sign, Bfloat16 *room, Bfloat16 *panel) {
  const int64_t width = round_up(columns, 2);
  copy_numbers(x, b, h, first, n, LANES, columns, width, sign, room);
  // A pair moves as a float32 does.
  transpose((const float *)(const void *)room, width / 2, LANES, width / 2, (float *)(void *)panel, LANES);
}

}  // namespace AB_ISA
