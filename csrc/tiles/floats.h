// The operands of the tile kernels as float32, one number of the depth in a step.
//
// The kernels are written once for two forms of their operands, Floats and Pairs (pairs.h). A form says how
// rows of a tensor become operands and how weights are stored to be one. In a product with rows of a tensor
// the depth runs across their columns, as in q.k, or down the rows, as in the sum of weighted values.
#pragma once

#include "simd/pack.h"

namespace AB_ISA::tiles {

// The same rows with their columns as the depth, and as the depth themselves.
template <class Operand>
struct TwoWays {
  Operand across, down;
};

struct Floats {
  typedef float Number;
  typedef Rows Operand;
  static constexpr int STEP = 1;            // numbers of the depth that one step takes
  static constexpr int WAYS = 1;            // copies of rows that `both` makes
  static constexpr bool HAS_LEVELS = true;  // multi-level scores

  // Rows [first, first + n) of a tensor, in place or in `room` [n, columns].
  static Rows across(const ab_tensor &x, int64_t b, int64_t h, int64_t first, int64_t n, int64_t columns,
                     float *room) {
    return rows_as_float(x, b, h, first, n, columns, columns, room);
  }
  static Rows down(const ab_tensor &x, int64_t b, int64_t h, int64_t first, int64_t n, int64_t columns,
                   float *room) {
    return rows_as_float(x, b, h, first, n, columns, columns, room);
  }

  // Both ways, in WAYS rooms [n, width]; columns from `columns` on are 0 as far as the depth runs down.
  static TwoWays<Rows> both(const ab_tensor &x, int64_t b, int64_t h, int64_t first, int64_t n,
                            int64_t columns, int64_t width, float *room) {
    const Rows rows = rows_as_float(x, b, h, first, n, columns, width, room);
    return {rows, rows};
  }

  // Pack rows into panels [panels, columns, LANES], times `sign`; missing rows are 0.
  static void pack(const ab_tensor &x, int64_t b, int64_t h, int64_t first, int64_t n, int64_t columns,
                   float sign, float *room, float *panels) {
    pack_panels(across(x, b, h, first, n, columns, room), n, columns, sign, panels);
  }

  // Store the weights of a vector of queries with STEP keys.
  AB_INLINE void store_weights(float *to, const F weights[STEP]) { store(to, weights[0]); }

  // Set those to 0 that are not kept.
  AB_INLINE void drop_weights(float *to, const I kept[STEP]) { store(to, kept[0] ? load(to) : F{}); }

  // Store dS of the strip of queries from r on with the panel of keys from j on.
  template <int MR, class Buffer>
  AB_INLINE void store_d_scores(Sums<MR, 2> &sums, const Buffer &buffer, int64_t r, int64_t j) {
    store(sums, buffer.d_scores + r * buffer.row + j, buffer.row);
  }

  // Store its P where that is not buffer.strip itself.
  template <int MR, class Buffer>
  AB_INLINE void store_probs(const Buffer &, int64_t, int64_t) {}

  // Make the dS of a last step that has keys past the end harmless.
  template <class Buffer>
  AB_INLINE void end_keys(const Buffer &, int64_t, int64_t) {}
};

}  // namespace AB_ISA::tiles
