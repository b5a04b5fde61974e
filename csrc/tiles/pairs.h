// The operands of the tile kernels as pairs of bfloat16; see floats.h. Weights and their gradients are
// rounded to bfloat16, sums are float32.
#pragma once

#include "simd/pairs.h"
#include "tiles/floats.h"

namespace AB_ISA::tiles {

struct Pairs {
  typedef Bfloat16 Number;
  typedef PairRows Operand;
  static constexpr int STEP = 2;
  static constexpr int WAYS = 2;
  static constexpr bool HAS_LEVELS = false;

  // An odd last row has a row of zeros after it: `room` is [n, columns], both rounded up.
  static PairRows across(const ab_tensor &x, int64_t b, int64_t h, int64_t first, int64_t n,
                         int64_t columns, Bfloat16 *room) {
    return pair_columns(x, b, h, first, n, round_up(n, 2), columns, room);
  }

  // `room` is [n, columns], rows rounded up and columns to whole vectors.
  static PairRows down(const ab_tensor &x, int64_t b, int64_t h, int64_t first, int64_t n, int64_t columns,
                       Bfloat16 *room) {
    return pair_rows(x, b, h, first, n, columns, round_up(columns, VL), room);
  }

  static TwoWays<PairRows> both(const ab_tensor &x, int64_t b, int64_t h, int64_t first, int64_t n,
                                int64_t columns, int64_t width, Bfloat16 *room) {
    Bfloat16 *const copy = room + round_up(n, 2) * width;
    return {pair_columns(x, b, h, first, n, n, columns, copy),
            pair_rows(x, b, h, first, n, columns, width, room)};
  }

  // Panels are [columns / 2, LANES] pairs; `room` is [LANES, columns], columns rounded up.
  static void pack(const ab_tensor &x, int64_t b, int64_t h, int64_t first, int64_t n, int64_t columns,
                   float sign, Bfloat16 *room, Bfloat16 *panels) {
    for (int64_t i = 0; i < n; i += LANES, panels += round_up(columns, 2) * LANES)
      pack_pairs(x, b, h, first + i, min64(LANES, n - i), columns, sign, room, panels);
  }

  AB_INLINE void store_weights(Bfloat16 *to, const F weights[STEP]) {
    store_pairs(to, pair_up(weights[0], weights[1]));
  }

  AB_INLINE void drop_weights(Bfloat16 *to, const I kept[STEP]) {
    store_pairs(to, load_pairs(to) & (((U)kept[0] & 0xffffu) | ((U)kept[1] & 0xffff0000u)));
  }

  template <int MR, class Buffer>
  AB_INLINE void store_d_scores(Sums<MR, 2> &sums, const Buffer &buffer, int64_t r, int64_t j) {
    store_paired(sums, buffer.d_scores + r * buffer.row + 2 * j, 2 * buffer.row);
    store_rounded(sums, buffer.d_scores_across + r * buffer.row + j, buffer.row);
  }

  template <int MR, class Buffer>
  AB_INLINE void store_probs(const Buffer &buffer, int64_t r, int64_t j) {
    Sums<MR, 2> sums;
    sums.each([&](F &x, int i, int c) AB_LAMBDA { x = load(buffer.weights + i * LANES + c * VL); });
    store_paired(sums, buffer.probs + r * buffer.row + 2 * j, 2 * buffer.row);
  }

  // The scores of an odd last key's neighbour are those of a key of zeros, whose weight may be anything.
  template <class Buffer>
  AB_INLINE void end_keys(const Buffer &buffer, int64_t queries, int64_t keys) {
    if (keys % 2)
      for (int64_t i = 0; i < queries; i++)
        memset(buffer.d_scores_across + i * buffer.row + keys, 0, sizeof(Bfloat16));
  }
};

}  // namespace AB_ISA::tiles
