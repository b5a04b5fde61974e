// The register micro-kernel: MR rows by NV vectors of sums stay in registers while the depth runs.
//
// Every product of attention is sum_k a(r, k) * b(k, :), where a is read number by number, from rows or
// from columns, and b by vectors. So only what b holds must be dense, and only it is ever packed.
//
// No sum is one long chain of roundings: dot products are summed in parts, sums over keys or queries tile
// by tile, starting at 0 and adding what came before last. docs/numerics.md says what that gains.
#ifndef ATTNBIAS_GEMM_H
#define ATTNBIAS_GEMM_H

#include "simd.h"

namespace AB_LEVEL {

// Enough sums to hide the latency of an FMA; the rest of the registers hold b and one number of a.
#if defined(__AVX512F__)
constexpr int ROWS = 8;  // 16 of 32 registers: 8 divides the tiles
#elif defined(__AVX2__)
constexpr int ROWS = 6;  // 12 of 16 registers
#elif defined(__aarch64__)
constexpr int ROWS = 8;  // 16 of 32 registers
#else
constexpr int ROWS = 4;  // 8 of 16 registers: without FMA a product takes one too
#endif
constexpr int LANES = 2 * VL;  // of a panel
constexpr int64_t PART = 64;   // numbers of a dot product in one chain of roundings

template <int MR, int NV>
struct Sums {
  F at[MR][NV];
};

template <int MR, int NV>
AB_INLINE void clear(Sums<MR, NV> &sums) {
  AB_UNROLL
  for (int r = 0; r < MR; r++) {
    AB_UNROLL
    for (int c = 0; c < NV; c++) sums.at[r][c] = F{};
  }
}

template <int MR, int NV>
AB_INLINE void add(Sums<MR, NV> &sums, const float *from, int64_t step) {
  AB_UNROLL
  for (int r = 0; r < MR; r++) {
    AB_UNROLL
    for (int c = 0; c < NV; c++) sums.at[r][c] += load(from + r * step + c * VL);
  }
}

template <int MR, int NV>
AB_INLINE void store(const Sums<MR, NV> &sums, float *to, int64_t step) {
  AB_UNROLL
  for (int r = 0; r < MR; r++) {
    AB_UNROLL
    for (int c = 0; c < NV; c++) store(to + r * step + c * VL, sums.at[r][c]);
  }
}

// One step of the depth: a(r) lies at a[r * a_row].
template <int MR, int NV>
AB_INLINE void add_step(Sums<MR, NV> &sums, const float *a, int64_t a_row, const float *b) {
  F row[NV];
  AB_UNROLL
  for (int c = 0; c < NV; c++) row[c] = load(b + c * VL);
  AB_UNROLL
  for (int r = 0; r < MR; r++) {
    F number = splat(a[r * a_row]);
    AB_UNROLL
    for (int c = 0; c < NV; c++) sums.at[r][c] = number * row[c] + sums.at[r][c];
  }
}

// sums += a b with a(r, k) = a[r * a_row + k]: the rows of a are dense.
template <int MR, int NV>
AB_INLINE void add_rows(Sums<MR, NV> &sums, int64_t depth, const float *a, int64_t a_row, const float *b,
                        int64_t b_row) {
#pragma GCC unroll 4
  for (int64_t k = 0; k < depth; k++) add_step(sums, a + k, a_row, b + k * b_row);
}

// sums += a b with a(r, k) = a[r + k * a_column]: the columns of a are dense.
template <int MR, int NV>
AB_INLINE void add_columns(Sums<MR, NV> &sums, int64_t depth, const float *a, int64_t a_column,
                           const float *b, int64_t b_row) {
#pragma GCC unroll 4
  for (int64_t k = 0; k < depth; k++) add_step(sums, a + k * a_column, 1, b + k * b_row);
}

// Finish dot products of `stop` numbers: `sums` holds their last part, `ended` [MR, NV vectors] the sum of
// those before it.
template <int MR, int NV>
AB_INLINE void add_ended(Sums<MR, NV> &sums, const float *ended, int64_t stop) {
  if (stop > PART) add(sums, ended, NV * VL);
}

// As add_rows for the numbers [first, stop). A part begins at a multiple of PART, so that no bit depends on
// where one call stops and the next goes on.
template <int MR, int NV>
AB_INLINE void add_parts(Sums<MR, NV> &sums, float *ended, int64_t first, int64_t stop, const float *a,
                         int64_t a_row, const float *b, int64_t b_row) {
  while (first < stop) {
    if (first && first % PART == 0) {
      add_ended(sums, ended, first);
      store(sums, ended, NV * VL);
      clear(sums);
    }
    const int64_t end = min64(stop, (first / PART + 1) * PART);
    add_rows(sums, end - first, a + first, a_row, b + first * b_row, b_row);
    first = end;
  }
}

// sums = a b, dot products of `depth` numbers.
template <int MR, int NV>
AB_INLINE void multiply_rows(Sums<MR, NV> &sums, float *ended, int64_t depth, const float *a, int64_t a_row,
                             const float *b, int64_t b_row) {
  clear(sums);
  add_parts(sums, ended, 0, depth, a, a_row, b, b_row);
  add_ended(sums, ended, depth);
}

// A count that the compiler knows.
template <int N>
struct Count {
  static constexpr int value = N;
};

// Cut rows into strips of at most ROWS; the last two share what is left, so that none is thin.
AB_INLINE int strip_of(int64_t left) {
  if (left <= ROWS) return (int)left;
  return left < 2 * ROWS ? (int)(left + 1) / 2 : ROWS;
}

// Call body(Count<n>) for 1 <= n <= ROWS.
template <int N = 1, class Body>
AB_INLINE void with_rows(int n, const Body &body) {
  if constexpr (N < ROWS)
    if (n != N) return with_rows<N + 1>(n, body);
  body(Count<N>());
}

}  // namespace AB_LEVEL

#endif
