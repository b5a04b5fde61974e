// The score terms of a panel of queries, for the forward pass over tiles.
#pragma once

#include "tiles/terms.h"

namespace AB_ISA::tiles {

// Keys of a softmax step: more keys mean fewer rescalings, until S^T leaves the first cache.
constexpr int64_t BLOCK_KEYS = 128;

// The bias of a panel of LANES queries and a block of keys.
struct PanelBias {
  const float *relative, *key, *pair, *grid;  // of the head
  const int32_t *key_code;
  int64_t pair_row, pair_column;
  int64_t first, count;              // queries
  int64_t start, size;               // keys
  alignas(64) int32_t codes[LANES];  // of the queries
  // The relative bias of query first + l and key r of the block is at l + (size - 1 - r).
  alignas(64) float diagonals[BLOCK_KEYS + LANES];

  // For queries [i, i + n) of a tile and keys [j, j + m), whose positions follow each other.
  PanelBias(const ab_call &call, int64_t b, int64_t h, int64_t i, int64_t n, int64_t j, int64_t m)
      : relative(part_of(call.relative, b, h)),
        key(part_of(call.key, b, h)),
        pair(part_of(call.pair, b, h)),
        grid(part_of(call.grid, b, h)),
        key_code(call.key_code),
        pair_row(call.pair.row),
        pair_column(call.pair.column),
        first(i),
        count(n),
        start(j),
        size(m) {
    if (grid)
      for (int64_t l = 0; l < LANES; l++) codes[l] = call.query_code[i + min64(l, n - 1)];
    if (!relative) return;
    const int64_t at = distance_of(call, i, j) + m - 1;
    for (int64_t d = 0; d < m - 1 + LANES; d++) diagonals[d] = d <= at ? relative[at - d] : 0;
  }

  // Write the bias of n <= ROWS keys of the block from `offset` on, [n, LANES]; finite for missing queries.
  void fill(int64_t offset, int64_t n, float *to) const {
    alignas(64) float pairs[ROWS * LANES];
    const int64_t j = start + offset;
    if (pair) {
      const float *from = pair + first * pair_row + j * pair_column;
      if (count < LANES) memset(pairs, 0, (size_t)(n * LANES) * sizeof(float));
      if (pair_column == 1) {
        transpose(from, pair_row, count, n, pairs, LANES);
      } else {
        for (int64_t r = 0; r < n; r++)
          for (int64_t i = 0; i < count; i++) pairs[r * LANES + i] = from[i * pair_row + r * pair_column];
      }
    }
    for (int64_t r = 0; r < n; r++) {
      AB_UNROLL
      for (int c = 0; c < LANES; c += VL) {
        F x = F{};
        if (relative) x += load(diagonals + (size - 1 - offset - r) + c);
        if (key) x += splat(key[j + r]);
        if (pair) x += load(pairs + r * LANES + c);
        if (grid) x += lookup(grid, load(codes + c) - splat(key_code[j + r]));
        store(to + r * LANES + c, x * splat(LOG2_E));
      }
    }
  }
};

}  // namespace AB_ISA::tiles
