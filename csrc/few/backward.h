// The backward pass over few queries; see few.h. A part of the keys is a work item: it has dk and dv of its
// keys to itself, and its parts of dq and of the gradients of terms, which are added up in order.
#pragma once

#include "few/few.h"

namespace AB_ISA::few {

// A thread's memory for the rows of all query heads of a key head, and for a tile of their keys. `scores`
// becomes P, `bias` dS before scale and softcap.
struct FewGradients : FewBuffer {
  float *plain_queries, *d_out;   // [rows, width], [rows, value_width]
  float *delta, *lse, *lse_rest;  // [rows]; lse as Score::split gives it
  float *d_scores;                // [4, MOST_KEYS]
  float *d_keys, *d_values;       // [MOST_KEYS, width], [MOST_KEYS, value_width]

  // Cut the arrays from `memory`.
  FewGradients(const ab_call &call, int64_t rows, Arena &memory) : FewBuffer(call, rows, memory) {
    plain_queries = memory.cut<float>(rows * width);
    d_out = memory.cut<float>(rows * value_width);
    delta = memory.cut<float>(rows);
    lse = memory.cut<float>(rows);
    lse_rest = memory.cut<float>(rows);
    d_scores = memory.cut<float>(4 * MOST_KEYS);
    d_keys = memory.cut<float>(MOST_KEYS * width);
    d_values = memory.cut<float>(MOST_KEYS * value_width);
  }

  // Fill in everything that belongs to query r, which is row i of head h.
  void read_row(const ab_call &call, const Score &score, int64_t b, int64_t h, int64_t i, int64_t r) {
    float *d = d_out + r * value_width;
    read_query(call, score, b, h, i, r);
    copy_rows(call.q, b, h, i, 1, call.D, width, plain_queries + r * width);
    copy_rows(call.dout, b, h, i, 1, call.E, value_width, d);
    const int64_t at = (b * call.H + h) * call.Q + i;
    const float value = call.lse[at];
    score.split(value, lse + r, lse_rest + r);
    const Rows out = rows_as_float(call.out, b, h, i, 1, call.E, value_width, value_room);
    float product;  // in the order of dO . v: for a row with a single key the two must cancel
    multiply_keys<1, 1>({d, value_width, {}}, value_width, out.at, 0, &product);
    delta[r] = value == -INFINITY ? 0 : product - (call.dlse ? call.dlse[at] : 0);
  }
};

// Turn raw scores [first, count) of row r into P, the products dO . v into dS, the bias into dS by the
// score.
static void weigh_few(const ab_call &call, const Score &score, const FewGradients &buffer, int64_t r,
                      const int32_t *bits, const uint32_t *kept, int64_t first, int64_t count, float *probs,
                      float *d_scores) {
  for (int64_t j = first; j < count; j += VL) {
    const F raw = score.raw(load(probs + j));
    const F whole = buffer.bias ? score.with_bias(raw, load(buffer.bias + j)) : raw;
    const F related = exp2_of(score.below(whole, buffer.lse[r], buffer.lse_rest[r]));
    const uint32_t lanes = related_lanes(bits, j, count);
    const F share = kept ? choose(kept[j / 32] >> j % 32, splat(call.kept_share), F{}) : splat(1.0f);
    const F p = choose(lanes, related, F{}),
            by_weight = load(d_scores + j) * share - splat(buffer.delta[r]);
    F d = p * splat(call.scale) * by_weight;
    if (score.capped) d *= score.slope(raw);
    store(probs + j, p * share);
    store(d_scores + j, choose(lanes, d, F{}));
    if (buffer.bias) store(buffer.bias + j, choose(lanes, p * by_weight, F{}));
  }
}

// to [keys, width] += weights^T [keys, R] rows [R, width], for the keys [first, count).
template <int R>
AB_INLINE void add_outer(const float *weights, const float *rows, int64_t width, int64_t first,
                         int64_t count, float *to) {
  for (int64_t j = first; j < count; j++) {
    F weight[R];
    AB_UNROLL
    for (int r = 0; r < R; r++) weight[r] = splat(weights[r * MOST_KEYS + j]);
    for (int64_t c = 0; c < width; c += VL) {
      F sum = load(to + j * width + c);
      AB_UNROLL
      for (int r = 0; r < R; r++) sum = weight[r] * load(rows + r * width + c) + sum;
      store(to + j * width + c, sum);
    }
  }
}

// Add the contributions of `rows` rows from `start` on and the `there` keys of item.tile; parts
// [rows, parts_row] of dq.
static void add_meeting(const ab_call &call, const Score &score, FewGradients &buffer, TermSums *terms,
                        const Item &item, int64_t start, int64_t rows, const int32_t *bits, int64_t there,
                        float *parts, int64_t parts_row) {
  const int64_t first_head = item.h * (call.H / call.Hk), first_key = item.tile * call.layout.tile;
  by_four(rows, [&](auto together, int64_t some) AB_LAMBDA {
    constexpr int R = together.value;
    const int64_t r = start + some, width = buffer.width, value_width = buffer.value_width;
    const FewRows queries = few_rows(call, buffer.queries + r * width, width, bits, some);
    const FewRows d_out = {buffer.d_out + r * value_width, value_width, {}};
    int64_t first, count = there;
    if (!find_keys<R>(queries, &first, &count)) return;
    multiply_tile<R>(queries, width, buffer.keys, r == 0, first, count, buffer.scores);
    multiply_tile<R>(d_out, value_width, buffer.values, r == 0, first, count, buffer.d_scores);
    for (int i = 0; i < R; i++) {
      const int64_t s = (r + i) / call.Q, h = first_head + s, query = (r + i) % call.Q;
      const uint32_t *kept = buffer.read_terms(call, item.b, h, query, first_key, there, first, count);
      weigh_few(call, score, buffer, r + i, queries.bits[i], kept, first, count,
                buffer.scores + i * MOST_KEYS, buffer.d_scores + i * MOST_KEYS);
      if (terms)
        terms[s].add_row(call, item.b, h, query, first_key + first, count - first, buffer.bias + first);
    }
    const float ones[4] = {1, 1, 1, 1};
    if (call.dv.data) add_outer<R>(buffer.scores, d_out.at, value_width, first, count, buffer.d_values);
    if (call.dk.data)
      add_outer<R>(buffer.d_scores, buffer.plain_queries + r * width, width, first, count, buffer.d_keys);
    if (call.dq.data)
      add_tile<R>(buffer.d_scores, ones, buffer.keys, width, false, first, count, parts + r * parts_row,
                  parts_row);
  });
}

// One part of the keys of a key head, item.h; item.tile numbers the part, parts [rows, chunks, width].
static void backward_item(const ab_call &call, const Item &item, float *parts, int32_t *turn,
                          Arena memory) {
  const Score score(call, LOG2_E, has_terms(call));
  const ab_layout &layout = call.layout;
  const int64_t tile = layout.tile, tiles = divide_up(call.K, tile), chunks = chunks_of(call);
  const int64_t share = call.H / call.Hk, first_head = item.h * share;
  FewGradients buffer(call, share * call.Q, memory);
  const int64_t begin = tiles * item.tile / chunks, stop = tiles * (item.tile + 1) / chunks;
  TermSums *terms = turn ? memory.cut<TermSums>(share) : nullptr;
  if (terms) {
    for (int64_t s = 0; s < share; s++) {
      terms[s] = TermSums(call, call.Q, chunk_span(call), memory);
      terms[s].clear(call, 0, call.Q, begin * tile, min64(stop * tile, call.K));
    }
  }
  const int64_t parts_row = chunks * buffer.width;
  for (int64_t r = 0; r < share * call.Q; r++) {
    buffer.read_row(call, score, item.b, first_head + r / call.Q, r % call.Q, r);
    if (call.dq.data) memset(parts + r * parts_row, 0, (size_t)buffer.width * sizeof(float));
  }
  // Heads of one relation go together.
  const int64_t heads = layout.heads == 1 ? share : 1;
  for (int64_t t = begin; t < stop; t++) {
    const int64_t start = t * tile, n = min64(tile, call.K - start);
    buffer.read_keys(call, item.b, item.h, start, n);
    memset(buffer.d_keys, 0, (size_t)(n * buffer.width) * sizeof(float));
    memset(buffer.d_values, 0, (size_t)(n * buffer.value_width) * sizeof(float));
    for (int64_t s = 0; s < share; s += heads) {
      const int32_t *bounds = layout.k_ptr + (group_of(layout, item.b, first_head + s) * tiles + t) * 3;
      if (bounds[0] == bounds[2]) continue;
      const bool full = bounds[0] < bounds[1];
      const int32_t *bits =
          full ? nullptr : layout.patterns + layout.k_mark[bounds[0]] * tile * (tile / 32);
      add_meeting(call, score, buffer, terms, {item.b, item.h, 0, t}, s * call.Q, heads * call.Q, bits, n,
                  parts, parts_row);
    }
    if (call.dk.data) write_rows(call.dk, item.b, item.h, start, n, call.D, buffer.d_keys, buffer.width);
    if (call.dv.data)
      write_rows(call.dv, item.b, item.h, start, n, call.E, buffer.d_values, buffer.value_width);
  }
  if (!terms) return;
  wait_for(turn, (int32_t)item.tile);
  for (int64_t s = 0; s < share; s++) terms[s].hand_over(call, item.b, first_head + s);
  __atomic_store_n(turn, (int32_t)item.tile + 1, __ATOMIC_RELEASE);
}

// The parts of dq, and whose turn it is to hand over gradients of terms, [B, Hk].
AB_INLINE int64_t backward_scratch_bytes(const ab_call &call) {
  const int64_t parts = call.B * call.H * call.Q * chunks_of(call) * round_up(call.D, VL);
  return 4 * (call.dq.data ? round_up(parts, 16) : 0) + (wants_terms(call) ? 4 * call.B * call.Hk : 0);
}

static int32_t backward(const ab_call &call, Arena scratch) {
  const int64_t chunks = chunks_of(call), width = round_up(call.D, VL);
  const int64_t size = call.Q * chunks * width, share = call.Hk ? call.H / call.Hk : 0;
  float *parts = scratch.cut<float>(call.dq.data ? call.B * call.H * size : 0);
  int32_t *turns = wants_terms(call) ? scratch.cut<int32_t>(call.B * call.Hk) : nullptr;
  if (turns) memset(turns, 0, (size_t)(call.B * call.Hk) * sizeof(int32_t));
  Arena needed;
  FewGradients(call, share * call.Q, needed);
  if (turns) {
    needed.cut<TermSums>(share);
    for (int64_t s = 0; s < share; s++) TermSums(call, call.Q, chunk_span(call), needed);
  }
  int32_t status =
      run_together(call, chunks, needed.bytes, [&](int64_t b, int64_t h, int64_t c, Arena memory) {
        const int64_t unit = b * call.Hk + h;
        float *here = call.dq.data ? parts + unit * share * size + c * width : nullptr;
        backward_item(call, {b, h, 0, c}, here, turns ? turns + unit : nullptr, memory);
      });
  if (status != AB_OK || !call.dq.data) return status;
  for (int64_t r = 0; r < call.B * call.H * call.Q; r++) {
    float *sum = parts + r * chunks * width;
    for (int64_t i = width; i < chunks * width; i += VL) {
      float *to = sum + i % width;
      store(to, load(to) + load(sum + i));
    }
    write_rows(call.dq, r / call.Q / call.H, r / call.Q % call.H, r % call.Q, 1, call.D, sum, width);
  }
  return AB_OK;
}

}  // namespace AB_ISA::few
