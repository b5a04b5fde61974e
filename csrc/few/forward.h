// The forward pass over few queries; see few.h. Parts of the keys are work items, merged in order.
#pragma once

#include "few/few.h"

namespace AB_ISA::few {

// The state of one row after some of its keys: [out, top, total], `out` rounded up to VL.
struct State {
  float *out, *top, *total;

  static int64_t floats(const ab_call &call) { return round_up(call.E, VL) + VL; }
  State(const ab_call &call, float *memory)
      : out(memory), top(memory + round_up(call.E, VL)), total(top + 1) {}
};

// Turn scores [first, count) of a row into 2^(score - top), and return the factor of the state's sums.
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

// One part of the keys of one key head, for `heads` query heads from item.h on with the same lists.
// item.tile numbers the part; states [heads, Q, chunks].
static void add_chunk(const ab_call &call, const Item &item, int64_t heads, float *states, Arena memory) {
  const Score score(call, LOG2_E, has_terms(call));
  const ab_layout &layout = call.layout;
  const int64_t tile = layout.tile, chunks = chunks_of(call), state_row = chunks * State::floats(call);
  const int64_t key_head = item.h / (call.H / call.Hk), rows = heads * call.Q;
  FewBuffer buffer(call, rows, memory);
  const int32_t *bounds = layout.q_ptr + item.group * 3;
  const int64_t entries = bounds[2] - bounds[0];
  const int64_t begin = bounds[0] + entries * item.tile / chunks;
  const int64_t stop = bounds[0] + entries * (item.tile + 1) / chunks;
  states += item.tile * State::floats(call);
  for (int64_t r = 0; r < rows; r++) {
    buffer.read_query(call, score, item.b, item.h + r / call.Q, r % call.Q, r);
    const State state(call, states + r * state_row);
    memset(state.out, 0, (size_t)State::floats(call) * sizeof(float));
    *state.top = LOWEST;
  }
  for (int64_t t = begin; t < stop; t++) {
    const int64_t start = layout.q_tile[t] * tile, there = min64(tile, call.K - start);
    const int32_t *bits = t < bounds[1] ? nullptr : layout.patterns + layout.q_mark[t] * tile * (tile / 32);
    buffer.read_keys(call, item.b, key_head, start, there);
    by_four(rows, [&](auto together, int64_t r) AB_LAMBDA {
      constexpr int R = together.value;
      const FewRows some = few_rows(call, buffer.queries + r * buffer.width, buffer.width, bits, r);
      int64_t first, count = there;
      if (!find_keys<R>(some, &first, &count)) return;
      multiply_tile<R>(some, buffer.width, buffer.keys, r == 0, first, count, buffer.scores);
      float keep[R], *state = states + r * state_row;
      for (int i = 0; i < R; i++) {
        const int64_t h = item.h + (r + i) / call.Q, query = (r + i) % call.Q;
        const uint32_t *kept = buffer.read_terms(call, item.b, h, query, start, there, first, count);
        keep[i] = weigh_few(score, buffer.scores + i * MOST_KEYS, buffer.bias, some.bits[i], kept, first,
                            count, State(call, state + i * state_row));
      }
      add_tile<R>(buffer.scores, keep, buffer.values, buffer.value_width, r == 0, first, count, state,
                  state_row);
    });
  }
}

// Merge the parts of one query, in order, and write out, lse and the largest score.
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
  const int64_t at = (b * call.H + h) * call.Q + i;
  if (call.row_max) call.row_max[at] = max_of(*all.top, *all.total);
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
  call.lse[at] = log_of(*all.top, *all.total);
}

AB_INLINE int64_t forward_scratch_bytes(const ab_call &call) {
  return 4 * call.B * call.H * call.Q * chunks_of(call) * State::floats(call);
}

static int32_t forward(const ab_call &call, Arena scratch) {
  const ab_layout &layout = call.layout;
  const int64_t chunks = chunks_of(call), size = call.Q * chunks * State::floats(call);
  // Heads that share their keys read them together, unless their relations differ.
  const int64_t heads = layout.heads == 1 && call.H ? call.H / call.Hk : 1;
  float *states = scratch.cut<float>(call.B * call.H * size);
  Arena needed;
  FewBuffer(call, heads * call.Q, needed);
  const int64_t items = call.B * call.H / heads * chunks;
  int32_t status = run_items(items, call.threads, needed.bytes, [&](int64_t i, Arena memory) {
    const int64_t unit = i / chunks * heads;
    Item item = item_at(call, unit, 1);
    item.tile = i % chunks;
    add_chunk(call, item, heads, states + unit * size, memory);
  });
  if (status != AB_OK) return status;
  for (int64_t r = 0; r < call.B * call.H * call.Q; r++)
    merge_chunks(call, r / call.Q / call.H, r / call.Q % call.H, r % call.Q,
                 states + r * chunks * State::floats(call));
  return AB_OK;
}

}  // namespace AB_ISA::few
