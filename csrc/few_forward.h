// The forward pass over few queries; see few.h. Parts of the keys are work items, merged in order.
#ifndef ATTNBIAS_FEW_FORWARD_H
#define ATTNBIAS_FEW_FORWARD_H

#include "bias.h"
#include "few.h"
#include "philox.h"

namespace AB_LEVEL::tiles {

// The state of one row after some of its keys: [out, top, total], `out` rounded up to VL.
struct State {
  float *out, *top, *total;

  static int64_t floats(const ab_call &call) { return round_up(call.E, VL) + VL; }
  State(const ab_call &call, float *memory)
      : out(memory), top(memory + round_up(call.E, VL)), total(top + 1) {}
};

// Scores [first, count) of a row become 2^(score - top); returns what the state's sums are multiplied by.
// `bias` is for them, too, or NULL; `kept` has a bit for each that dropout keeps, or is NULL.
static float weigh_few(const Score &score, float *scores, const float *bias, const int32_t *bits,
                       const uint32_t *kept, int64_t first, int64_t count, State state) {
  F factor = splat(score.late);
  F highest = splat(-INFINITY), sum = F{};
  for (int64_t j = first; j < count; j += VL) {
    const F raw = score.raw(load(scores + j));
    const F whole = bias ? score.with_bias(raw, load(bias + j)) : raw;
    const F x = choose(related_lanes(bits, j, count), whole, splat(-INFINITY));
    store(scores + j, x);
    highest = maximum(highest, x);
  }
  const float before = *state.top, here = largest(highest * factor);
  const float top = before >= here ? before : here;  // `here` when it is NaN
  if (any_large(splat(top))) {                       // as in tiles: scores rounded as their maximum is
    for (int64_t j = first; j < count; j += VL) store(scores + j, load(scores + j) * factor);
    factor = splat(1.0f);
  }
  for (int64_t j = first; j < count; j += VL) {
    const F p = exp2_of(load(scores + j) * factor - splat(top));
    sum += p;
    store(scores + j, kept ? choose(kept[j / 32] >> j % 32, p, F{}) : p);
  }
  const F keep = exp2_of(splat(before) - splat(top));
  *state.top = top;
  *state.total = *state.total * keep[0] + sum_of(sum);
  return keep[0];
}

// What a thread keeps of a part of the keys.
struct FewBuffer {
  int64_t width, value_width;
  float *queries;        // [rows, width]
  float *scores;         // [4, FEW_KEYS]
  float *bias;           // [FEW_KEYS]
  float *keys, *values;  // [FEW_KEYS, width], [FEW_KEYS, value_width], where they cannot be read in place

  // Lay out from `memory` on, which moves to the end.
  FewBuffer(const ab_call &call, int64_t rows, char *&memory)
      : width(round_up(call.D, VL)), value_width(round_up(call.E, VL)) {
    queries = cut<float>(memory, rows * width);
    scores = cut<float>(memory, 4 * FEW_KEYS);
    bias = cut<float>(memory, FEW_KEYS);
    keys = cut<float>(memory, FEW_KEYS * width);
    values = cut<float>(memory, FEW_KEYS * value_width);
  }
};

// One part of the keys of one key head, for `heads` query heads from item.h on with the same lists.
// item.tile numbers the part; states [heads, Q, chunks].
static void add_chunk(const ab_call &call, const Item &item, int64_t heads, float *states, char *memory) {
  const bool terms = has_terms(call);
  const Score score(call, LOG2_E, terms);
  const ab_layout &layout = call.layout;
  const int64_t tile = layout.tile, chunks = chunks_of(call), state_row = chunks * State::floats(call);
  const int64_t key_head = item.h / (call.H / call.Hk), rows = heads * call.Q;
  const FewBuffer buffer(call, rows, memory);
  const int32_t *bounds = layout.q_ptr + item.group * 3;
  const int64_t entries = bounds[2] - bounds[0];
  const int64_t begin = bounds[0] + entries * item.tile / chunks;
  const int64_t stop = bounds[0] + entries * (item.tile + 1) / chunks;
  states += item.tile * State::floats(call);
  for (int64_t r = 0; r < rows; r++) {
    float *query = buffer.queries + r * buffer.width;
    copy_rows(call.q, item.b, item.h + r / call.Q, r % call.Q, 1, call.D, buffer.width, query);
    for (int64_t c = 0; c < buffer.width; c += VL) store(query + c, load(query + c) * splat(score.sign));
    const State state(call, states + r * state_row);
    memset(state.out, 0, (size_t)State::floats(call) * sizeof(float));
    *state.top = LOWEST;
  }
  for (int64_t t = begin; t < stop; t++) {
    const int64_t start = layout.q_tile[t] * tile, there = min64(tile, call.K - start);
    const int32_t *bits = t < bounds[1] ? nullptr : layout.patterns + layout.q_mark[t] * tile * (tile / 32);
    const Rows keys =
        rows_as_float(call.k, item.b, key_head, start, there, call.D, buffer.width, buffer.keys);
    const Rows values =
        rows_as_float(call.v, item.b, key_head, start, there, call.E, buffer.value_width, buffer.values);
    by_four(rows, [&](auto together, int64_t r) AB_LAMBDA {
      constexpr int R = together.value;
      const FewRows some = few_rows(call, buffer.queries + r * buffer.width, buffer.width, bits, r);
      int64_t first, count = there;
      if (!find_keys<R>(some, &first, &count)) return;
      multiply_tile<R>(some, buffer.width, keys, r == 0, first, count, buffer.scores);
      float keep[R], *state = states + r * state_row;
      for (int i = 0; i < R; i++) {
        const int64_t h = item.h + (r + i) / call.Q, query = (r + i) % call.Q;
        if (terms) fill_row(call, item.b, h, query, start + first, count - first, buffer.bias + first);
        uint32_t kept[FEW_KEYS / 32];
        if (call.drop_below) Dropout(call).row_bits(item.b, h, query, start, there, kept);
        keep[i] =
            weigh_few(score, buffer.scores + i * FEW_KEYS, terms ? buffer.bias : nullptr, some.bits[i],
                      call.drop_below ? kept : nullptr, first, count, State(call, state + i * state_row));
      }
      add_tile<R>(buffer.scores, keep, values, buffer.value_width, r == 0, first, count, state, state_row);
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
  F keep = splat(call.drop_below ? call.kept_share : 1.0f);
  if (call.sink) {
    F top = splat(*all.top), total = splat(*all.total);
    keep *= add_sink(call.sink[h], top, total);
    *all.top = top[0];
    *all.total = total[0];
  }
  const F share = splat(*all.total == 0 ? 0 : keep[0] / *all.total);
  for (int64_t e = 0; e < call.E; e += VL) store(all.out + e, load(all.out + e) * share);
  write_rows(call.out, b, h, i, 1, call.E, all.out, call.E);
  call.lse[(b * call.H + h) * call.Q + i] = log_of(*all.top, *all.total);
}

AB_INLINE int64_t few_forward_scratch_bytes(const ab_call &call) {
  return 4 * call.B * call.H * call.Q * chunks_of(call) * State::floats(call);
}

// The forward pass of a call of at most FEW queries.
static int32_t few_forward(const ab_call &call, char *scratch) {
  const ab_layout &layout = call.layout;
  const int64_t chunks = chunks_of(call), size = call.Q * chunks * State::floats(call);
  // Heads that share their keys read them together, unless their relations differ.
  const int64_t heads = layout.heads == 1 && call.H ? call.H / call.Hk : 1;
  float *states = cut<float>(scratch, call.B * call.H * size);
  char *end = nullptr;
  FewBuffer(call, heads * call.Q, end);
  const int64_t items = call.B * call.H / heads * chunks;
  int32_t status = run_items(items, call.threads, (int64_t)(uintptr_t)end, [&](int64_t i, char *memory) {
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
