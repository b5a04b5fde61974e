// The forward pass for a tile of few queries, as in decoding: lanes are columns, nothing is packed, and
// every key and value is read once.
#ifndef ATTNBIAS_FEW_H
#define ATTNBIAS_FEW_H

#include "items.h"
#include "pack.h"
#include "score.h"

namespace AB_LEVEL::tiles {

constexpr int64_t FEW = 4;            // queries; above, panels of lanes are faster
constexpr int64_t FEW_KEYS = 128;     // that one softmax step takes: a tile
constexpr int64_t CHUNK_KEYS = 2048;  // that one work item takes, or a little more
constexpr int CHUNK_ROWS = 4;         // keys whose products run side by side
constexpr int64_t AHEAD = 16;         // rows

// The state of one query after some of its keys: [out, top, total], `out` rounded up to VL.
struct State {
  float *out, *top, *total;

  static int64_t floats(const ab_call &call) { return round_up(call.E, VL) + VL; }
  State(const ab_call &call, float *memory)
      : out(memory), top(memory + round_up(call.E, VL)), total(top + 1) {}
};

// The first query of a tile brings its rows from far away: it asks for those that are AHEAD.
template <class T>
AB_INLINE void prefetch_row(bool far, const T *row, int64_t columns) {
  if (!far) return;
  for (const char *p = (const char *)row; p < (const char *)(row + columns); p += 64) __builtin_prefetch(p);
}

// Products of one query with `N` keys.
template <int N, class T>
AB_INLINE void multiply_keys(const float *query, int64_t columns, const T *keys, int64_t row,
                             float *products) {
  F sums[N] = {};
  int64_t c = 0;
  for (; c + VL <= columns; c += VL) {
    F x = load(query + c);
    AB_UNROLL
    for (int j = 0; j < N; j++) sums[j] = x * load(keys + j * row + c) + sums[j];
  }
  if (c < columns)
    for (int j = 0; j < N; j++)
      sums[j] = load(query + c) * load_some(keys + j * row + c, columns - c) + sums[j];
  AB_UNROLL
  for (int j = 0; j < N; j++) products[j] = sum_of(sums[j]);
}

// out = keep * out + probs values, over `N` vectors of columns.
template <int N, class T>
AB_INLINE void add_few_values(bool far, const float *probs, int64_t count, const T *values, int64_t row,
                              F keep, float *out) {
  F sums[N];
  AB_UNROLL
  for (int i = 0; i < N; i++) sums[i] = keep * load(out + i * VL);
  for (int64_t j = 0; j < count; j++) {
    prefetch_row(far, values + (j + AHEAD) * row, N * VL);
    AB_UNROLL
    for (int i = 0; i < N; i++) sums[i] = splat(probs[j]) * load(values + j * row + i * VL) + sums[i];
  }
  AB_UNROLL
  for (int i = 0; i < N; i++) store(out + i * VL, sums[i]);
}

// Add a tile of keys to one query. `bits` is the query's row of the pattern, NULL when all are related.
template <class T>
static void add_few(const ab_call &call, const Score &score, bool far, const float *query, const T *keys,
                    const T *values, int64_t count, const int32_t *bits, float *scores, State state) {
  auto related = [&](int64_t j) AB_LAMBDA { return !bits || ((uint32_t)bits[j / 32] >> j % 32 & 1); };
  while (count && !related(count - 1)) count--;
  int64_t first = 0;
  while (first < count && !related(first)) first++;
  if (first == count) return;
  keys += first * call.k.row;
  values += first * call.v.row;
  count -= first;
  int64_t j = 0;
  for (; j + CHUNK_ROWS <= count; j += CHUNK_ROWS) {
    for (int64_t i = j; i < j + CHUNK_ROWS; i++) prefetch_row(far, keys + (i + AHEAD) * call.k.row, call.D);
    multiply_keys<CHUNK_ROWS>(query, call.D, keys + j * call.k.row, call.k.row, scores + j);
  }
  for (; j < count; j++) multiply_keys<1>(query, call.D, keys + j * call.k.row, call.k.row, scores + j);
  for (; j % VL; j++) scores[j] = 0;
  const F factor = splat(score.factor);
  F highest = splat(-INFINITY);
  for (j = 0; j < count; j += VL) {
    store(scores + j, score.raw(load(scores + j)));
    if (bits || j + VL > count)
      for (int64_t i = j; i < j + VL; i++)
        if (i >= count || !related(first + i)) scores[i] = -INFINITY;
    highest = maximum(highest, load(scores + j));
  }
  const float before = *state.top, here = max_of(highest * factor);
  const float top = before < here ? here : before;
  F keep = exp2_of(splat(before) - splat(top)), sum = F{};
  for (j = 0; j < count; j += VL) {
    F p = exp2_of(load(scores + j) * factor - splat(top));
    sum += p;
    store(scores + j, p);
  }
  *state.top = top;
  *state.total = *state.total * keep[0] + sum_of(sum);
  float *out = state.out;
  int64_t e = 0;
  for (; e + 8 * VL <= call.E; e += 8 * VL)
    add_few_values<8>(far, scores, count, values + e, call.v.row, keep, out + e);
  for (; e + 4 * VL <= call.E; e += 4 * VL)
    add_few_values<4>(far, scores, count, values + e, call.v.row, keep, out + e);
  for (; e + VL <= call.E; e += VL)
    add_few_values<1>(far, scores, count, values + e, call.v.row, keep, out + e);
  if (e == call.E) return;
  F last = keep * load(out + e);
  for (j = 0; j < count; j++)
    last = splat(scores[j]) * load_some(values + j * call.v.row + e, call.E - e) + last;
  store(out + e, last);
}

// How many parts the keys are cut into, from the shape alone.
AB_INLINE int64_t chunks_of(const ab_call &call) { return max64(1, call.K / CHUNK_KEYS); }

// One part of the keys of one key head, for `heads` query heads from item.h on with the same lists.
// item.tile numbers the part; states [heads, Q, chunks].
static void add_chunk(const ab_call &call, const Item &item, int64_t heads, float *states, char *memory) {
  const Score score(call);
  const ab_layout &layout = call.layout;
  const int64_t tile = layout.tile, width = round_up(call.D, VL), chunks = chunks_of(call);
  const int64_t key_head = item.h / (call.H / call.Hk), rows = heads * call.Q;
  const int32_t *bounds = layout.q_ptr + item.group * 3;
  const int64_t entries = bounds[2] - bounds[0];
  const int64_t begin = bounds[0] + entries * item.tile / chunks;
  const int64_t stop = bounds[0] + entries * (item.tile + 1) / chunks;
  float *queries = cut<float>(memory, rows * width), *scores = cut<float>(memory, FEW_KEYS);
  auto state_of = [&](int64_t r) {
    return State(call, states + (r * chunks + item.tile) * State::floats(call));
  };
  for (int64_t r = 0; r < rows; r++) {
    float *query = queries + r * width;
    with_row(call.q, item.b, item.h + r / call.Q, r % call.Q,
             [&](auto *from) AB_LAMBDA { widen(from, 0, 1, call.D, query, width); });
    for (int64_t c = 0; c < width; c += VL) store(query + c, load(query + c) * splat(score.sign));
    State state = state_of(r);
    memset(state.out, 0, (size_t)State::floats(call) * sizeof(float));
    *state.top = LOWEST;
  }
  for (int64_t t = begin; t < stop; t++) {
    const int64_t first = layout.q_tile[t] * tile, count = min64(tile, call.K - first);
    const int32_t *bits = t < bounds[1] ? nullptr : layout.patterns + layout.q_mark[t] * tile * (tile / 32);
    with_row(call.k, item.b, key_head, first, [&](auto *keys) AB_LAMBDA {
      auto *values = row_of<typename Pointee<decltype(keys)>::Type>(call.v, item.b, key_head, first);
      for (int64_t r = 0; r < rows; r++)
        add_few(call, score, r == 0, queries + r * width, keys, values, count,
                bits ? bits + r % call.Q * (tile / 32) : nullptr, scores, state_of(r));
    });
  }
}

// Merge the parts of one query, in order, and write out and lse.
static void merge_chunks(const ab_call &call, int64_t b, int64_t h, int64_t i, float *states) {
  State all(call, states);
  for (int64_t c = 1; c < chunks_of(call); c++) {
    const State part(call, states + c * State::floats(call));
    const float top = *part.top > *all.top ? *part.top : *all.top;
    const F keep = exp2_of(splat(*all.top) - splat(top)), add = exp2_of(splat(*part.top) - splat(top));
    *all.total = *all.total * keep[0] + *part.total * add[0];
    *all.top = top;
    for (int64_t e = 0; e < call.E; e += VL)
      store(all.out + e, load(all.out + e) * keep + load(part.out + e) * add);
  }
  const F share = splat(*all.total == 0 ? 0 : 1 / *all.total);
  for (int64_t e = 0; e < call.E; e += VL) store(all.out + e, load(all.out + e) * share);
  write_rows(call.out, b, h, i, 1, call.E, all.out, call.E);
  call.lse[(b * call.H + h) * call.Q + i] = log_of(*all.top, *all.total);
}

AB_INLINE int64_t few_scratch_bytes(const ab_call &call) {
  return 4 * call.B * call.H * call.Q * chunks_of(call) * State::floats(call);
}

// The forward pass of a call of at most FEW queries.
static int32_t few_forward(const ab_call &call, char *scratch) {
  const ab_layout &layout = call.layout;
  const int64_t chunks = chunks_of(call), size = call.Q * chunks * State::floats(call);
  // Heads that share their keys read them together, unless their relations differ.
  const int64_t heads = layout.heads == 1 && call.H ? call.H / call.Hk : 1;
  const int64_t bytes = 4 * (heads * call.Q * round_up(call.D, VL) + FEW_KEYS) + 2 * 64;
  float *states = cut<float>(scratch, call.B * call.H * size);
  const int64_t items = call.B * call.H / heads * chunks;
  int32_t status = run_items(items, call.threads, bytes, [&](int64_t i, char *memory) {
    const int64_t unit = i / chunks * heads, b = unit / call.H, h = unit % call.H;
    add_chunk(call, {b, h, group_of(layout, b, h), i % chunks}, heads, states + unit * size, memory);
  });
  for (int64_t r = 0; status == AB_OK && r < call.B * call.H * call.Q; r++)
    merge_chunks(call, r / call.Q / call.H, r / call.Q % call.H, r % call.Q,
                 states + r * chunks * State::floats(call));
  return status;
}

}  // namespace AB_LEVEL::tiles

#endif
