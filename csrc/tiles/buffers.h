// The memory of the backward pass over tiles: shared by all threads, and of a thread for its key tile.
#pragma once

#include "score.h"
#include "tiles/levels.h"

namespace AB_ISA::tiles {

constexpr int64_t MOST_ROWS = 128;  // of a tile

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
struct BackwardBuffer {
  int64_t width,
      value_width;           // D and E rounded up to VL; with levels, which start anywhere, VL more than D
  int64_t row;               // of probs, d_scores and slopes, not a power of 2 for the caches' sake
  float *keys, *values;      // [tile, width], [tile, value_width], if they cannot be read in place
  float *queries, *d_out;    // likewise
  float *keys_t, *values_t;  // [panels, D, LANES], [panels, E, LANES]
  float *d_keys, *d_values;  // [tile, width], [tile, value_width]
  float *probs, *d_scores, *slopes;  // [tile, row]; slopes with softcap only
  float *d_bias;                     // [tile, row]: dS before scale and softcap, where terms want it
  float *lse, *lse_rest;             // [tile], as Score::split gives them
  uint32_t *kept;                    // [tile, tile / 32]: bits of pairs that dropout keeps; NULL = all
  float *factors;                    // [width]: the factors that levels give q
  float *ended;                      // [ROWS, LANES]: see add_parts
  TileBlocks blocks;                 // of levels

  // Cut the arrays from `memory`.
  BackwardBuffer(const ab_call &call, Arena &memory)
      : width(round_up(call.D, VL) + (has_levels(call) ? VL : 0)),
        value_width(round_up(call.E, VL)),
        row(call.layout.tile + 16),
        blocks(call, memory) {
    const int64_t tile = call.layout.tile;
    factors = memory.cut<float>(has_levels(call) ? width : 0);
    keys = memory.cut<float>(tile * width);
    values = memory.cut<float>(tile * value_width);
    queries = memory.cut<float>(tile * width);
    d_out = memory.cut<float>(tile * value_width);
    keys_t = memory.cut<float>(tile * call.D);
    values_t = memory.cut<float>(tile * call.E);
    d_keys = memory.cut<float>(tile * width);
    d_values = memory.cut<float>(tile * value_width);
    probs = memory.cut<float>(tile * row);
    d_scores = memory.cut<float>(tile * row);
    slopes = memory.cut<float>(call.softcap != 0 ? tile * row : 0);
    d_bias = wants_terms(call) ? memory.cut<float>(tile * row) : nullptr;
    ended = memory.cut<float>(ROWS * LANES);
    lse = memory.cut<float>(tile);
    lse_rest = memory.cut<float>(tile);
    kept = call.drop_below ? memory.cut<uint32_t>(tile * (tile / 32)) : nullptr;
  }
};

// A query tile as one key tile meets it.
struct Meeting {
  Rows queries, d_out;
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
