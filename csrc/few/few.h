// Shared by both passes over few queries, as in decoding: lanes are columns, nothing is packed, and every
// key and value is read once. Both form q.k here, so that they get the same bits.
#pragma once

#include "items.h"
#include "simd/lanes.h"
#include "simd/pack.h"
#include "score.h"
#include "simd/philox.h"
#include "tiles/terms.h"

namespace AB_ISA::few {

using namespace tiles;  // score terms

constexpr int64_t FEW = VL;                   // queries at most; for more, panels of lanes are faster,
constexpr int64_t FEW_OF_LONG = VL + VL / 2;  // but with this many keys only for more than these: they
constexpr int64_t LONG_KEYS = 1024;           // come from memory, and panels would wait for each
constexpr int64_t MOST_KEYS = 128;            // of a tile
constexpr int64_t CHUNK_KEYS = 2048;          // of a work item, or a few more
constexpr int64_t AHEAD = 96;                 // rows from a prefetch to its use
constexpr int TREE = VL < 8 ? 8 : VL;         // products that one tree adds up across lanes

// Whether a call is for these kernels, which have no multi-level scores.
AB_INLINE bool takes(const ab_call &call) {
  const bool is_long = call.K >= LONG_KEYS && call.q.dtype != AB_BFLOAT16;  // pairs of those are quicker
  return call.Q <= (is_long ? FEW_OF_LONG : FEW) && call.layout.classes == 2;
}

// How many parts the keys are cut into; depends on the shape only.
AB_INLINE int64_t chunks_of(const ab_call &call) { return max64(1, call.K / CHUNK_KEYS); }

// Keys of such a part, at most.
AB_INLINE int64_t chunk_keys(const ab_call &call) {
  return (divide_up(divide_up(call.K, call.layout.tile), chunks_of(call)) + 1) * call.layout.tile;
}

// Positions from the first key to the last of such a part, at most.
AB_INLINE int64_t chunk_span(const ab_call &call) {
  return call.k_position ? key_span(call, 0, call.K) : chunk_keys(call);
}

// A thread's memory for rows of queries and a tile of keys; both passes have more.
struct FewBuffer {
  int64_t width, value_width;     // D and E rounded up to VL
  float *queries;                 // [rows, width], times the score's sign
  float *scores;                  // [4, MOST_KEYS]
  float *bias;                    // [MOST_KEYS]; NULL = no terms
  float *key_room, *value_room;   // [MOST_KEYS, width], [MOST_KEYS, value_width]
  Rows keys = {}, values = {};    // of the tile: in place, or in the room for them
  uint32_t bits[MOST_KEYS / 32];  // of the pairs that dropout keeps of a row

  // Cut the arrays from `memory`.
  FewBuffer(const ab_call &call, int64_t rows, Arena &memory)
      : width(round_up(call.D, VL)), value_width(round_up(call.E, VL)) {
    queries = memory.cut<float>(rows * width);
    scores = memory.cut<float>(4 * MOST_KEYS);
    bias = has_terms(call) ? memory.cut<float>(MOST_KEYS) : nullptr;
    key_room = memory.cut<float>(MOST_KEYS * width);
    value_room = memory.cut<float>(MOST_KEYS * value_width);
  }

  // Fill in query r, which is row i of head h.
  void read_query(const ab_call &call, const Score &score, int64_t b, int64_t h, int64_t i, int64_t r) {
    float *query = queries + r * width;
    copy_rows(call.q, b, h, i, 1, call.D, width, query);
    for (int64_t c = 0; c < width; c += VL) store(query + c, load(query + c) * splat(score.sign));
  }

  // Read keys [first, first + n) of key head h, and their values.
  void read_keys(const ab_call &call, int64_t b, int64_t h, int64_t first, int64_t n) {
    keys = rows_as_float(call.k, b, h, first, n, call.D, width, key_room);
    values = rows_as_float(call.v, b, h, first, n, call.E, value_width, value_room);
  }

  // Fill in the bias of row i of head h for keys [first, count) of the tile that starts at key `start` and
  // has n, and return the bits of those that dropout keeps; NULL = all.
  const uint32_t *read_terms(const ab_call &call, int64_t b, int64_t h, int64_t i, int64_t start, int64_t n,
                             int64_t first, int64_t count) {
    if (bias) fill_row(call, b, h, i, start + first, count - first, bias + first);
    if (!call.drop_below) return nullptr;
    Dropout(call).row_bits(b, h, query_position(call, i), key_position(call, start), n, bits);
    return bits;
  }
};

// Up to 4 rows that read the keys of a tile together.
struct FewRows {
  const float *at;
  int64_t row;
  const int32_t *bits[4];  // the rows of their patterns; NULL = every pair is related
};

// Rows r to r + R of `bits`, where each head repeats the pattern's rows.
AB_INLINE FewRows few_rows(const ab_call &call, const float *at, int64_t row, const int32_t *bits,
                           int64_t r) {
  FewRows rows = {at, row, {}};
  if (bits)
    for (int64_t i = 0; i < 4; i++) rows.bits[i] = bits + (r + i) % call.Q * (call.layout.tile / 32);
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

// The first to read a row waits for memory, so it prefetches the rows AHEAD.
AB_INLINE void prefetch_ahead(const Rows &rows, int64_t i, int64_t first, int64_t columns) {
  const float *row = rows.at + (i + AHEAD) * rows.row + first;
  for (int64_t c = 0; c < columns; c += 16) __builtin_prefetch(row + c);
}

// Products of R rows with J keys, products[r * MOST_KEYS + j]; `width` is a multiple of VL.
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
    for (int r = 0; r < R; r++) products[r * MOST_KEYS] = ordered_sum(sums[r]);
  } else {
    alignas(64) float all[R * J];
    store_sums<R * J>(sums, all);
    AB_UNROLL
    for (int r = 0; r < R; r++) memcpy(products + r * MOST_KEYS, all + r * J, J * sizeof(float));
  }
}

// Products of R rows with the keys [first, count) of a tile.
template <int R>
AB_INLINE void multiply_tile(const FewRows &rows, int64_t width, Rows keys, bool is_first, int64_t first,
                             int64_t count, float *products) {
  constexpr int J = TREE / R;
  int64_t j = first;
  for (; j + J <= count; j += J) {
    if (is_first)
      for (int64_t i = j; i < j + J; i++) prefetch_ahead(keys, i, 0, width);
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
      for (int r = 0; r < R; r++) all[r][i] = splat(weights[r * MOST_KEYS + j]) * y + all[r][i];
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

}  // namespace AB_ISA::few
