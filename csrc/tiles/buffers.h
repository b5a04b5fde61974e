// The memory of the backward pass over tiles: shared by all threads, and of a thread for its key tile.
#pragma once

#include "score.h"
#include "tiles/floats.h"
#include "tiles/levels.h"
#include "tiles/terms.h"

namespace AB_ISA::tiles {

constexpr int64_t MOST_ROWS = 128;  // of a tile

// Numbers that are written; row i starts at `at + i * row`.
struct FloatRows {
  float *at;
  int64_t row;
};

// Shared by all threads, in scratch.
struct BackwardShared {
  float *delta;    // [B, H, Q]
  int32_t *rank;   // [tiles + 1], by key: how many key tiles come before it at its query tile
  int32_t *count;  // [G, q_tiles]: how many key tiles a query tile has
  int32_t *done;   // [B, H, q_tiles]: how many of them are in dq
  int32_t *turn;   // [B, H]: the key tile that is to hand over its gradients of terms
  ab_tensor dq;    // float32: the caller's or in scratch

  // Cut the arrays from `memory`.
  BackwardShared(const ab_call &call, Arena &memory) {
    const ab_layout &layout = call.layout;
    const int64_t tiles = divide_up(call.Q, layout.tile);
    delta = memory.cut<float>(call.B * call.H * call.Q);
    dq = call.dq;
    rank = count = done = turn = nullptr;
    if (wants_terms(call)) turn = memory.cut<int32_t>(call.B * call.H);
    if (!call.dq.data) return;
    rank = memory.cut<int32_t>(layout.tiles + 1);
    count = memory.cut<int32_t>(layout.groups * tiles);
    done = memory.cut<int32_t>(call.B * call.H * tiles);
    if (call.dq.dtype == AB_FLOAT32) return;
    float *data = memory.cut<float>(call.B * call.H * call.Q * call.D);
    dq = {data, call.H * call.Q * call.D, call.Q * call.D, call.D, AB_FLOAT32, 0};
  }
};

// A thread's memory for a key tile.
template <class Form>
struct BackwardBuffer {
  typedef typename Form::Number Number;
  typedef typename Form::Operand Operand;
  int64_t width,
      value_width;            // D and E rounded up to VL; with levels, which start anywhere, VL more than D
  int64_t row;                // of probs, d_scores and slopes, not a power of 2 for the caches' sake
  Number *keys, *values;      // [WAYS, tile, width], [WAYS, tile, value_width]: room for Form::both
  Number *queries, *d_out;    // likewise
  Number *keys_t, *values_t;  // [panels, D, LANES], [panels, E, LANES], D and E rounded up to steps
  float *d_keys, *d_values;   // [tile, width], [tile, value_width]
  Number *probs, *d_scores;   // [tile / STEP, row, STEP], for products down the queries
  Number *d_scores_across;  // [tile, row], for those across the keys: d_scores, or a copy in another order
  float *slopes;            // [tile, row]; with softcap only
  float *bias;              // [tile, row]: P takes its place in Floats
  float *weights;           // [ROWS, LANES]: P of a strip, before it is rounded; Pairs only
  float *d_bias;            // [tile, row]: dS before scale and softcap, where terms want it
  float *lse, *lse_rest;    // [tile], as Score::split gives them
  uint32_t *kept;           // [tile, tile / 32]: bits of pairs that dropout keeps; NULL = all
  float *factors;           // [width]: the factors that levels give q
  float *ended;             // [ROWS, LANES]: see add_parts
  TileBlocks blocks;        // of levels

  // Cut the arrays from `memory`.
  BackwardBuffer(const ab_call &call, Arena &memory)
      : width(round_up(call.D, VL) + (has_levels(call) ? VL : 0)),
        value_width(round_up(call.E, VL)),
        row(call.layout.tile + 16),
        blocks(call, memory) {
    const int64_t tile = call.layout.tile;
    factors = memory.cut<float>(has_levels(call) ? width : 0);
    keys = memory.cut<Number>(Form::WAYS * tile * width);
    values = memory.cut<Number>(Form::WAYS * tile * value_width);
    queries = memory.cut<Number>(Form::WAYS * tile * width);
    d_out = memory.cut<Number>(Form::WAYS * tile * value_width);
    keys_t = memory.cut<Number>(tile * round_up(call.D, Form::STEP));
    values_t = memory.cut<Number>(tile * round_up(call.E, Form::STEP));
    d_keys = memory.cut<float>(tile * width);
    d_values = memory.cut<float>(tile * value_width);
    probs = memory.cut<Number>(tile * row);
    d_scores = memory.cut<Number>(tile * row);
    if constexpr (Form::STEP == 1) {
      d_scores_across = d_scores;
      bias = probs;
      weights = nullptr;
    } else {
      d_scores_across = memory.cut<Number>(tile * row);
      bias = has_terms(call) ? memory.cut<float>(tile * row) : nullptr;
      weights = memory.cut<float>(ROWS * LANES);
    }
    slopes = memory.cut<float>(call.softcap != 0 ? tile * row : 0);
    d_bias = wants_terms(call) ? memory.cut<float>(tile * row) : nullptr;
    ended = memory.cut<float>(ROWS * LANES);
    lse = memory.cut<float>(tile);
    lse_rest = memory.cut<float>(tile);
    kept = call.drop_below ? memory.cut<uint32_t>(tile * (tile / 32)) : nullptr;
  }

  // Panel p of the keys or values, with `columns` columns.
  AB_LAMBDA Operand panel(const Number *panels, int64_t p, int64_t columns) const {
    return {panels + p * LANES * round_up(columns, Form::STEP), Form::STEP * LANES};
  }

  // Probs or d_scores from query r and key j on, for a product down the queries; r is at a whole step.
  AB_LAMBDA Operand down(const Number *scores, int64_t r, int64_t j) const {
    return {scores + r * row + Form::STEP * j, Form::STEP * row};
  }

  // The float32 weights of the strip of queries from r on with the keys from j on.
  AB_LAMBDA FloatRows strip(int64_t r, int64_t j) const {
    if constexpr (Form::STEP == 1)
      return {probs + r * row + j, row};
    else
      return {weights, LANES};
  }

  // Set P and dS of n queries from r on with the LANES keys from j on to 0.
  void clear_panel(int64_t r, int64_t n, int64_t j) const {
    for (int64_t i = r; i < r + n; i += Form::STEP) {
      memset(probs + i * row + Form::STEP * j, 0, Form::STEP * LANES * sizeof(Number));
      memset(d_scores + i * row + Form::STEP * j, 0, Form::STEP * LANES * sizeof(Number));
    }
    for (int64_t i = r; i < r + n; i++) {
      if (Form::STEP != 1) memset(d_scores_across + i * row + j, 0, LANES * sizeof(Number));
      if (d_bias) memset(d_bias + i * row + j, 0, LANES * sizeof(float));
    }
  }
};

// A query tile as one key tile meets it.
template <class Operand>
struct Meeting {
  TwoWays<Operand> queries, d_out;
  const float *delta;   // [count]
  int64_t count;        // of queries
  const int32_t *bits;  // of the first query; NULL = every pair is related
  Depths depths;        // of a multi-level score
};

// A range of the dims of q and k.
struct Dims {
  int64_t first, count;
};

// A strip of queries and the panels of keys, one bit each, that have a pair with it.
struct Strip {
  int64_t first, count;
  uint32_t panels;
};

}  // namespace AB_ISA::tiles
