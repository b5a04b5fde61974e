// The score terms on tiles: their sum for pairs of queries and keys, and the way back of its gradient.
//
// A bias is written where a score is to come, in units of log 2, and the kernel adds the score to it.
// Forward has queries in the lanes; backward, and few queries, have keys there.
#ifndef ATTNBIAS_BIAS_H
#define ATTNBIAS_BIAS_H

#include "items.h"
#include "pack.h"

namespace AB_LEVEL::tiles {

// Keys that one softmax step takes: more rescale less often, until S^T leaves the first-level cache.
constexpr int64_t BLOCK = 128;

AB_INLINE bool has_terms(const ab_call &call) {
  return call.relative.data || call.key.data || call.pair.data || call.grid.data;
}

AB_INLINE bool wants_terms(const ab_call &call) {
  return call.relative.grad || call.key.grad || call.pair.grad || call.grid.grad;
}

// The numbers of a part for one head.
AB_INLINE const float *part_of(const ab_part &part, int64_t b, int64_t h) {
  return part.data ? part.data + b * part.batch + h * part.head : nullptr;
}

AB_INLINE F lookup(const float *table, I index) {
#if defined(__AVX512F__)
  return (F)_mm512_i32gather_ps((__m512i)index, table, 4);
#elif defined(__AVX2__)
  return (F)_mm256_i32gather_ps(table, (__m256i)index, 4);
#else
  F x;
  for (int i = 0; i < VL; i++) x[i] = table[index[i]];
  return x;
#endif
}

AB_INLINE I load_codes(const int32_t *p) {
  I x;
  memcpy(&x, p, sizeof x);
  return x;
}

// The bias of a panel of LANES queries.
struct PanelBias {
  const float *relative, *key, *pair, *grid;  // of the head
  const int32_t *key_code;
  int64_t pair_row, pair_column;
  int64_t first, count, last;        // the panel's first query, how many there are, Q - 1
  alignas(64) int32_t codes[LANES];  // of the queries
  alignas(
      64) float diagonals[BLOCK + LANES];  // of a block: query first + l, its key r at l + (size - 1 - r)
  int64_t start, size;                     // the block's first key, how many it has

  PanelBias(const ab_call &call, int64_t b, int64_t h, int64_t i, int64_t n)
      : relative(part_of(call.relative, b, h)),
        key(part_of(call.key, b, h)),
        pair(part_of(call.pair, b, h)),
        grid(part_of(call.grid, b, h)),
        key_code(call.key_code),
        pair_row(call.pair.row),
        pair_column(call.pair.column),
        first(i),
        count(n),
        last(call.Q - 1),
        start(0),
        size(0) {
    for (int64_t l = 0; grid && l < LANES; l++) codes[l] = call.query_code[i + min64(l, n - 1)];
  }

  // Get ready for a block of keys.
  void start_block(int64_t j, int64_t n) {
    start = j;
    size = n;
    if (!relative) return;
    const int64_t at = j + n - 1 - first + last;
    for (int64_t d = 0; d < n - 1 + LANES; d++) diagonals[d] = d <= at ? relative[at - d] : 0;
  }

  // The block's keys from `offset` on, n <= ROWS of them, as [n, LANES]; finite for missing queries.
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
        if (grid) x += lookup(grid, load_codes(codes + c) - splat(key_code[j + r]));
        store(to + r * LANES + c, x * splat(LOG2_E));
      }
    }
  }
};

// Of query i of a head and the keys from j on: `count` of them, then zeros up to a whole vector.
static void fill_row(const ab_call &call, int64_t b, int64_t h, int64_t i, int64_t j, int64_t count,
                     float *to) {
  const float *relative = part_of(call.relative, b, h), *key = part_of(call.key, b, h);
  const float *pair = part_of(call.pair, b, h), *grid = part_of(call.grid, b, h);
  const int64_t column = call.pair.column;
  relative = relative ? relative + (j - i + call.Q - 1) : nullptr;
  key = key ? key + j : nullptr;
  pair = pair ? pair + i * call.pair.row + j * column : nullptr;
  for (int64_t c = 0; c < count; c += VL) {
    const int64_t n = count - c;
    auto some = [&](const float *p) AB_LAMBDA { return n >= VL ? load(p + c) : load_some(p + c, n); };
    F x = F{};
    if (relative) x += some(relative);
    if (key) x += some(key);
    if (pair && column == 1) {
      x += some(pair);
    } else if (pair) {
      alignas(64) float numbers[VL] = {};
      for (int64_t l = 0; l < VL && l < n; l++) numbers[l] = pair[(c + l) * column];
      x += load(numbers);
    }
    if (grid) {
      alignas(64) int32_t codes[VL];
      for (int64_t l = 0; l < VL; l++) codes[l] = call.key_code[j + min64(c + l, count - 1)];
      x += lookup(grid, splat(call.query_code[i]) - load_codes(codes));
    }
    store(to + c, x * splat(LOG2_E));
  }
}

// Gradients of the parts that a work item adds up before they go to the caller's arrays: of distances
// [first, first + count) and of the whole grid, one head's.
struct TermSums {
  float *relative, *grid;  // NULL = not wanted
  int64_t first, count, grid_size;

  // Lay out from `memory` on, which moves to the end: room for the distances of `queries` and `keys`.
  TermSums(const ab_call &call, int64_t queries, int64_t keys, char *&memory)
      : relative(nullptr), grid(nullptr), first(0), count(0), grid_size(call.grid_size) {
    if (call.relative.grad) relative = cut<float>(memory, queries + keys + VL);
    if (call.grid.grad) grid = cut<float>(memory, grid_size);
  }

  // Begin anew, for queries [i, i_stop) and keys [j, j_stop).
  void clear(const ab_call &call, int64_t i, int64_t i_stop, int64_t j, int64_t j_stop) {
    first = j - (i_stop - 1) + call.Q - 1;
    count = (i_stop - i) + (j_stop - j) - 1;
    if (relative) memset(relative, 0, (size_t)(count + VL) * sizeof(float));
    if (grid) memset(grid, 0, (size_t)grid_size * sizeof(float));
  }

  // What the gradients [count] by the scores of query i and the keys from j on add to all parts. There are
  // numbers up to a whole vector.
  void add_row(const ab_call &call, int64_t b, int64_t h, int64_t i, int64_t j, int64_t n,
               const float *gradients) {
    float *key = call.key.grad, *pair = call.pair.grad;
    if (key) key += b * call.key.grad_batch + h * call.key.grad_head + j;
    if (pair) pair += b * call.pair.grad_batch + h * call.pair.grad_head + i * call.K + j;
    float *distances = relative ? relative + (j - i + call.Q - 1 - first) : nullptr;
    for (int64_t c = 0; c < n; c += VL) {
      auto add_to = [&](float *to) AB_LAMBDA {
        if (c + VL <= n)
          store(to + c, load(to + c) + load(gradients + c));
        else
          store_some(to + c, load_some(to + c, n - c) + load(gradients + c), n - c);
      };
      if (distances) add_to(distances);
      if (key) add_to(key);
      if (pair) add_to(pair);
    }
    for (int64_t c = 0; grid && c < n; c++) grid[call.query_code[i] - call.key_code[j + c]] += gradients[c];
  }

  // Add the sums to the caller's arrays; the caller sees to the order.
  void hand_over(const ab_call &call, int64_t b, int64_t h) const {
    auto add = [](const float *from, int64_t n, float *to) {
      for (int64_t c = 0; c < n; c++) to[c] += from[c];
    };
    if (relative)
      add(relative, count,
          call.relative.grad + b * call.relative.grad_batch + h * call.relative.grad_head + first);
    if (grid) add(grid, grid_size, call.grid.grad + b * call.grid.grad_batch + h * call.grid.grad_head);
  }
};

// Call body(b, key head, t, memory) for all t < count. Where batches or heads share the gradient of a
// pair's bias, one work item takes them all, in order.
template <class Body>
AB_INLINE int32_t run_together(const ab_call &call, int64_t count, int64_t bytes, const Body &body) {
  const int64_t Hk = call.H ? call.Hk : 0;
  const int64_t batches = call.pair.grad && !call.pair.grad_batch ? call.B : 1;
  const int64_t heads = call.pair.grad && !call.pair.grad_head ? Hk : 1;
  const int64_t units = (call.B ? call.B / batches : 0) * (Hk ? Hk / heads : 0);
  return run_items(units * count, call.threads, bytes, [&](int64_t i, char *memory) {
    const int64_t unit = i / count, first_b = unit / (Hk / heads) * batches,
                  first_h = unit % (Hk / heads) * heads;
    for (int64_t b = first_b; b < first_b + batches; b++)
      for (int64_t h = first_h; h < first_h + heads; h++) body(b, h, i % count, memory);
  });
}

}  // namespace AB_LEVEL::tiles

#endif
