// What both passes over few queries, as in decoding, share: lanes are columns, nothing is packed, and every
// key and value is read once. Both form q.k here, so that they get the same bits.
#ifndef ATTNBIAS_FEW_H
#define ATTNBIAS_FEW_H

#include "items.h"
#include "lanes.h"
#include "pack.h"
#include "score.h"

namespace AB_LEVEL::tiles {

constexpr int64_t FEW = VL;            // queries; above, panels of lanes are faster
constexpr int64_t FEW_KEYS = 128;      // of a tile, at most
constexpr int64_t CHUNK_KEYS = 2048;   // that one work item takes, or a little more
constexpr int64_t AHEAD = 96;          // rows from a prefetch to its use
constexpr int TREE = VL < 8 ? 8 : VL;  // products that one tree adds up across lanes

// Whether a call is for the kernels here; those know no levels.
AB_INLINE bool takes_few(const ab_call &call) { return call.Q <= FEW && call.layout.classes == 2; }

// How many parts the keys are cut into, from the shape alone.
AB_INLINE int64_t chunks_of(const ab_call &call) { return max64(1, call.K / CHUNK_KEYS); }

// Keys of such a part, at most.
AB_INLINE int64_t few_chunk_keys(const ab_call &call) {
  return (tiles_of(tiles_of(call.K, call.layout.tile), chunks_of(call)) + 1) * call.layout.tile;
}

// R rows of numbers, R up to 4, that read the keys of a tile together.
struct FewRows {
  const float *at;
  int64_t row;
  const int32_t *bits[4];  // the rows of their patterns; NULL = every pair is related
};

// Rows r to r + R of `bits`, where each head repeats the pattern's rows.
AB_INLINE FewRows few_rows(const ab_call &call, const float *at, int64_t row, const int32_t *bits,
                           int64_t r) {
  FewRows rows = {at, row, {}};
  for (int64_t i = 0; bits && i < 4; i++) rows.bits[i] = bits + (r + i) % call.Q * (call.layout.tile / 32);
  return rows;
}

// Call body(Count<R>, r) for all rows, 4 at a time while there are as many.
template <class Body>
AB_INLINE void by_four(int64_t rows, const Body &body) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) body(Count<4>(), r);
  if (r + 2 <= rows) {
    body(Count<2>(), r);
    r += 2;
  }
  if (r < rows) body(Count<1>(), r);
}

// The keys of a tile that some of R rows is related to, from a multiple of TREE on; false = none.
template <int R>
AB_INLINE bool find_keys(const FewRows &rows, int64_t *first, int64_t *count) {
  auto related = [&](int64_t j) AB_LAMBDA {
    bool any = !rows.bits[0];
    for (int r = 0; r < R && !any; r++) any = (uint32_t)rows.bits[r][j / 32] >> j % 32 & 1;
    return any;
  };
  while (*count && !related(*count - 1)) --*count;
  int64_t j = 0;
  while (j < *count && !related(j)) j++;
  *first = j - j % TREE;
  return j < *count;
}

// One bit for each of the VL keys from j on, of which `count` are there.
AB_INLINE uint32_t related_lanes(const int32_t *bits, int64_t j, int64_t count) {
  const uint32_t there = j + VL <= count ? ~0u : (1u << (count - j)) - 1;
  return bits ? (uint32_t)bits[j / 32] >> j % 32 & there : there;
}

// The first to read a row brings it from far away: it asks for those that are AHEAD.
AB_INLINE void prefetch_ahead(const Rows &rows, int64_t i, int64_t first, int64_t columns) {
  const float *row = rows.at + (i + AHEAD) * rows.row + first;
  for (int64_t c = 0; c < columns; c += 16) __builtin_prefetch(row + c);
}

// Products of R rows with J keys, products[r * FEW_KEYS + j]; `width` is a multiple of VL.
template <int R, int J>
AB_INLINE void multiply_keys(const FewRows &rows, int64_t width, const float *keys, int64_t key_row,
                             float *products) {
  F sums[R * J] = {};
  for (int64_t c = 0; c < width; c += VL) {
    F x[R];
    AB_UNROLL
    for (int r = 0; r < R; r++) x[r] = load(rows.at + r * rows.row + c);
    AB_UNROLL
    for (int j = 0; j < J; j++) {
      const F y = load(keys + j * key_row + c);
      AB_UNROLL
      for (int r = 0; r < R; r++) sums[r * J + j] = x[r] * y + sums[r * J + j];
    }
  }
  if constexpr (J == 1) {
    for (int r = 0; r < R; r++) products[r * FEW_KEYS] = ordered_sum(sums[r]);
  } else {
    alignas(64) float all[R * J];
    store_sums<R * J>(sums, all);
    AB_UNROLL
    for (int r = 0; r < R; r++) memcpy(products + r * FEW_KEYS, all + r * J, J * sizeof(float));
  }
}

// Products of R rows with the keys [first, count) of a tile.
template <int R>
AB_INLINE void multiply_tile(const FewRows &rows, int64_t width, Rows keys, bool is_first, int64_t first,
                             int64_t count, float *products) {
  constexpr int J = TREE / R;
  int64_t j = first;
  for (; j + J <= count; j += J) {
    for (int64_t i = j; is_first && i < j + J; i++) prefetch_ahead(keys, i, 0, width);
    multiply_keys<R, J>(rows, width, keys.at + j * keys.row, keys.row, products + j);
  }
  for (; j < count; j++) multiply_keys<R, 1>(rows, width, keys.at + j * keys.row, keys.row, products + j);
}

// sums = keep * sums + weights values for R rows and N vectors of columns.
template <int R, int N>
AB_INLINE void add_columns_of(const float *weights, const float *keep, Rows values, bool is_first,
                              int64_t first, int64_t count, float *sums, int64_t sums_row) {
  F all[R][N] = {};
  for (int64_t j = first; j < count; j++) {
    if (is_first) prefetch_ahead(values, j, 0, N * VL);
    AB_UNROLL
    for (int i = 0; i < N; i++) {
      const F y = load(values.at + j * values.row + i * VL);
      AB_UNROLL
      for (int r = 0; r < R; r++) all[r][i] = splat(weights[r * FEW_KEYS + j]) * y + all[r][i];
    }
  }
  AB_UNROLL
  for (int r = 0; r < R; r++) {
    AB_UNROLL
    for (int i = 0; i < N; i++) {
      float *sum = sums + r * sums_row + i * VL;
      store(sum, splat(keep[r]) * load(sum) + all[r][i]);
    }
  }
}

// sums [R, width] = keep * sums + weights [R, keys] values [keys, width], for the keys [first, count).
template <int R>
AB_INLINE void add_tile(const float *weights, const float *keep, Rows values, int64_t width, bool is_first,
                        int64_t first, int64_t count, float *sums, int64_t sums_row) {
  constexpr int N = 8 / R;
  int64_t c = 0;
  auto add = [&](auto vectors) AB_LAMBDA {
    for (; c + vectors.value * VL <= width; c += vectors.value * VL)
      add_columns_of<R, vectors.value>(weights, keep, {values.at + c, values.row}, is_first, first, count,
                                       sums + c, sums_row);
  };
  add(Count<N>());
  if constexpr (N > 4) add(Count<4>());
  if constexpr (N > 1) add(Count<1>());
}

}  // namespace AB_LEVEL::tiles

#endif
