// Score terms: their sum for pairs of a query with keys, and the gradients of their parts.
//
// A bias is written to where the score will be, in units of log 2, and the kernel adds the score to it.
// Lanes are keys here; forward has queries in the lanes, see panel_bias.h.
#pragma once

#include "items.h"
#include "places.h"
#include "simd/pack.h"

namespace AB_ISA::tiles {

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

// Write the bias of query i of a head with `count` keys from j on, then zeros up to a whole vector.
static void fill_row(const ab_call &call, int64_t b, int64_t h, int64_t i, int64_t j, int64_t count,
                     float *to) {
  const float *relative = part_of(call.relative, b, h), *key = part_of(call.key, b, h);
  const float *pair = part_of(call.pair, b, h), *grid = part_of(call.grid, b, h);
  const int64_t column = call.pair.column;
  relative = relative ? relative + distance_of(call, i, j) : nullptr;
  key = key ? key + j : nullptr;
  pair = pair ? pair + i * call.pair.row + j * column : nullptr;
  for (int64_t c = 0; c < count; c += VL) {
    const int64_t n = count - c;
    auto some = [&](const float *p) AB_LAMBDA { return load_first(p + c, n); };
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
      x += lookup(grid, splat(call.query_code[i]) - load(codes));
    }
    store(to + c, x * splat(LOG2_E));
  }
}

// Gradients of one head's parts that a work item sums before they go to the caller's arrays: of distances
// [first, first + count) and of the whole grid.
struct TermSums {
  float *relative, *grid;  // NULL = not wanted
  int64_t first, count, grid_size;

  // Cut room for the distances of queries and keys with these spans from `memory`.
  TermSums(const ab_call &call, int64_t queries, int64_t keys, Arena &memory)
      : relative(nullptr), grid(nullptr), first(0), count(0), grid_size(call.grid_size) {
    if (call.relative.grad) relative = memory.cut<float>(queries + keys + VL);
    if (call.grid.grad) grid = memory.cut<float>(grid_size);
  }

  // Start from 0, for queries [i, i_stop) and keys [j, j_stop).
  void clear(const ab_call &call, int64_t i, int64_t i_stop, int64_t j, int64_t j_stop) {
    const bool some = i < i_stop && j < j_stop;
    first = some ? distance_of(call, i_stop - 1, j) : 0;
    count = some ? query_span(call, i, i_stop) + key_span(call, j, j_stop) - 1 : 0;
    if (relative) memset(relative, 0, (size_t)(count + VL) * sizeof(float));
    if (grid) memset(grid, 0, (size_t)grid_size * sizeof(float));
  }

  // Add the gradients [n] of the scores of query i with the keys from j on to all parts. They can be read
  // up to a whole vector.
  void add_row(const ab_call &call, int64_t b, int64_t h, int64_t i, int64_t j, int64_t n,
               const float *gradients) {
    float *key = call.key.grad, *pair = call.pair.grad;
    if (key) key += b * call.key.grad_batch + h * call.key.grad_head + j;
    if (pair) pair += b * call.pair.grad_batch + h * call.pair.grad_head + i * call.K + j;
    float *distances = relative ? relative + (distance_of(call, i, j) - first) : nullptr;
    for (int64_t c = 0; c < n; c += VL) {
      auto add_to = [&](float *to) AB_LAMBDA {
        store_first(to + c, load_first(to + c, n - c) + load(gradients + c), n - c);
      };
      if (distances) add_to(distances);
      if (key) add_to(key);
      if (pair) add_to(pair);
    }
    if (grid)
      for (int64_t c = 0; c < n; c++) grid[call.query_code[i] - call.key_code[j + c]] += gradients[c];
  }

  // Add the sums to the caller's arrays; the order of such calls is the caller's business.
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
  const int64_t Hk = call.Hk;
  const int64_t batches = call.pair.grad && !call.pair.grad_batch ? call.B : 1;
  const int64_t heads = call.pair.grad && !call.pair.grad_head ? Hk : 1;
  const int64_t units = (call.B ? call.B / batches : 0) * (Hk ? Hk / heads : 0);
  return run_items(units * count, call.threads, bytes, [&](int64_t i, Arena memory) {
    const int64_t unit = i / count, first_b = unit / (Hk / heads) * batches,
                  first_h = unit % (Hk / heads) * heads;
    for (int64_t b = first_b; b < first_b + batches; b++)
      for (int64_t h = first_h; h < first_h + heads; h++) body(b, h, i % count, memory);
  });
}

}  // namespace AB_ISA::tiles
