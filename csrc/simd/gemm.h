// The register micro-kernel: MR rows by NV vectors of sums stay in registers while the depth runs.
//
// Every product of attention is sum_k a(r, k) * b(k, :), where a is read number by number, from rows or
// from columns, and b by vectors. So only b must be dense, and only b is ever packed.
//
// No sum is one long chain of roundings: dot products are summed in parts, sums over keys or queries tile
// by tile, each from 0 on, to which the earlier sum is added last. docs/numerics.md says why.
#pragma once

#include "simd/simd.h"

namespace AB_ISA {

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

// Row i starts at `at + i * row`.
struct Rows {
  const float *at;
  int64_t row;

  AB_LAMBDA Rows from(int64_t i, int64_t column = 0) const { return {at + i * row + column, row}; }
};

template <int MR, int NV>
struct Sums {
  F at[MR][NV];

  // Call body(x, r, c) for vector c of row r.
  template <class Body>
  AB_LAMBDA void each(const Body &body) {
    AB_UNROLL
    for (int r = 0; r < MR; r++) {
      AB_UNROLL
      for (int c = 0; c < NV; c++) body(at[r][c], r, c);
    }
  }
};

template <int MR, int NV>
AB_INLINE void clear(Sums<MR, NV> &sums) {
  sums.each([](F &x, int, int) AB_LAMBDA { x = F{}; });
}

template <int MR, int NV>
AB_INLINE void add(Sums<MR, NV> &sums, const float *from, int64_t step) {
  sums.each([=](F &x, int r, int c) AB_LAMBDA { x += load(from + r * step + c * VL); });
}

template <int MR, int NV>
AB_INLINE void store(Sums<MR, NV> &sums, float *to, int64_t step) {
  sums.each([=](F &x, int r, int c) AB_LAMBDA { store(to + r * step + c * VL, x); });
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

// sums += a b, `depth` steps.
template <int MR, int NV>
AB_INLINE void add_product(Sums<MR, NV> &sums, int64_t depth, Rows a, Rows b) {
#pragma GCC unroll 4
  for (int64_t k = 0; k < depth; k++) add_step(sums, a.at + k, a.row, b.at + k * b.row);
}

// sums += a^T b.
template <int MR, int NV>
AB_INLINE void add_transposed(Sums<MR, NV> &sums, int64_t depth, Rows a, Rows b) {
#pragma GCC unroll 4
  for (int64_t k = 0; k < depth; k++) add_step(sums, a.at + k * a.row, 1, b.at + k * b.row);
}

// Finish dot products of `stop` numbers: `sums` holds their last part, `ended` [MR, NV vectors] the sum of
// those before it.
template <int MR, int NV>
AB_INLINE void add_ended(Sums<MR, NV> &sums, const float *ended, int64_t stop) {
  if (stop > PART) add(sums, ended, NV * VL);
}

// sums += a b for the numbers [first, stop) of dot products. A part begins at a multiple of PART, so that
// no bit depends on where one call stops and the next goes on.
template <int MR, int NV>
AB_INLINE void add_parts(Sums<MR, NV> &sums, float *ended, int64_t first, int64_t stop, Rows a, Rows b) {
  while (first < stop) {
    if (first && first % PART == 0) {
      add_ended(sums, ended, first);
      store(sums, ended, NV * VL);
      clear(sums);
    }
    const int64_t end = min64(stop, (first / PART + 1) * PART);
    add_product(sums, end - first, a.from(0, first), b.from(first));
    first = end;
  }
}

// sums = a b, dot products of `depth` numbers.
template <int MR, int NV>
AB_INLINE void multiply(Sums<MR, NV> &sums, float *ended, int64_t depth, Rows a, Rows b) {
  clear(sums);
  add_parts(sums, ended, 0, depth, a, b);
  add_ended(sums, ended, depth);
}

// Call body(Count<NV>, c, n) for n columns from c on, up to NV vectors of them, until all are done.
template <class Body>
AB_INLINE void by_vectors(int64_t columns, const Body &body) {
  int64_t c = 0;
  for (; c + 2 * VL <= columns; c += 2 * VL) body(Count<2>(), c, int64_t{2 * VL});
  for (; c + VL <= columns; c += VL) body(Count<1>(), c, int64_t{VL});
  if (c < columns) body(Count<1>(), c, columns - c);
}

// Cut rows into strips of at most ROWS; the last two share the rest, so that none is thin. Only the last
// may end within a step.
template <int STEP = 1>
AB_INLINE int strip_of(int64_t left) {
  if (left <= ROWS) return (int)left;
  return left < 2 * ROWS ? (int)round_up((left + 1) / 2, STEP) : ROWS;
}

}  // namespace AB_ISA
