// The backward pass over few queries; see few.h. A part of the keys is a work item: it has dk and dv of its
// keys to itself, and its parts of dq and of the gradients of terms, which are added up in order.
#ifndef ATTNBIAS_FEW_BACKWARD_H
#define ATTNBIAS_FEW_BACKWARD_H

#include "bias.h"
#include "few.h"
#include "philox.h"

namespace AB_LEVEL::tiles {

// What a thread keeps of the rows of all query heads that share a key head, and of a tile of their keys.
struct FewGradients {
  int64_t width, value_width;
  float *queries, *signed_queries, *d_out;  // [rows, width] twice, [rows, value_width]
  float *delta, *lse, *lse_rest;            // [rows]; lse as Score::split gives it
  float *probs, *d_scores;                  // [4, FEW_KEYS]
  float *bias;                              // [FEW_KEYS]; after it, dS before scale and softcap
  float *keys, *values;  // [FEW_KEYS, width], [FEW_KEYS, value_width], where they cannot be read in place
  float *d_keys, *d_values;  // the same

  // Lay out from `memory` on, which moves to the end.
  FewGradients(const ab_call &call, char *&memory)
      : width(round_up(call.D, VL)), value_width(round_up(call.E, VL)) {
    const int64_t rows = call.H / call.Hk * call.Q;
    queries = cut<float>(memory, rows * width);
    signed_queries = cut<float>(memory, rows * width);
    d_out = cut<float>(memory, rows * value_width);
    delta = cut<float>(memory, rows);
    lse = cut<float>(memory, rows);
    lse_rest = cut<float>(memory, rows);
    probs = cut<float>(memory, 4 * FEW_KEYS);
    d_scores = cut<float>(memory, 4 * FEW_KEYS);
    bias = has_terms(call) ? cut<float>(memory, FEW_KEYS) : nullptr;
    keys = cut<float>(memory, FEW_KEYS * width);
    values = cut<float>(memory, FEW_KEYS * value_width);
    d_keys = cut<float>(memory, FEW_KEYS * width);
    d_values = cut<float>(memory, FEW_KEYS * value_width);
  }

  // Fill in what belongs to row r, which is query i of head h.
  void read(const ab_call &call, const Score &score, int64_t r, int64_t b, int64_t h, int64_t i) {
    float *query = queries + r * width, *bent = signed_queries + r * width, *d = d_out + r * value_width;
    copy_rows(call.q, b, h, i, 1, call.D, width, query);
    for (int64_t c = 0; c < width; c += VL) store(bent + c, load(query + c) * splat(score.sign));
    copy_rows(call.dout, b, h, i, 1, call.E, value_width, d);
    const int64_t at = (b * call.H + h) * call.Q + i;
    const float value = call.lse[at];
    score.split(value, lse + r, lse_rest + r);
    const Rows out = rows_as_float(call.out, b, h, i, 1, call.E, value_width, values);
    float product;  // in the order of dO . v: for a row with a single key the two must cancel
    multiply_keys<1, 1>({d, value_width, {}}, value_width, out.at, 0, &product);
    delta[r] = value == -INFINITY ? 0 : product - (call.dlse ? call.dlse[at] : 0);
  }
};

// Raw scores [first, count) of row r become P, the products dO . v dS, the bias dS by the score.
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
    for (int r = 0; r < R; r++) weight[r] = splat(weights[r * FEW_KEYS + j]);
    for (int64_t c = 0; c < width; c += VL) {
      F sum = load(to + j * width + c);
      AB_UNROLL
      for (int r = 0; r < R; r++) sum = weight[r] * load(rows + r * width + c) + sum;
      store(to + j * width + c, sum);
    }
  }
}

// What `rows` rows from `start` on and `there` keys of item.tile give; parts [rows, parts_row] of dq.
static void add_meeting(const ab_call &call, const Score &score, const FewGradients &buffer,
                        TermSums *terms, const Item &item, int64_t start, int64_t rows, const int32_t *bits,
                        Rows keys, Rows values, int64_t there, float *parts, int64_t parts_row) {
  const int64_t first_head = item.h * (call.H / call.Hk), first_key = item.tile * call.layout.tile;
  by_four(rows, [&](auto together, int64_t some) AB_LAMBDA {
    constexpr int R = together.value;
    const int64_t r = start + some, width = buffer.width, value_width = buffer.value_width;
    const FewRows queries = few_rows(call, buffer.signed_queries + r * width, width, bits, some);
    const FewRows d_out = {buffer.d_out + r * value_width, value_width, {}};
    int64_t first, count = there;
    if (!find_keys<R>(queries, &first, &count)) return;
    multiply_tile<R>(queries, width, keys, r == 0, first, count, buffer.probs);
    multiply_tile<R>(d_out, value_width, values, r == 0, first, count, buffer.d_scores);
    for (int i = 0; i < R; i++) {
      const int64_t h = first_head + (r + i) / call.Q, query = (r + i) % call.Q, key = first_key + first;
      if (buffer.bias) fill_row(call, item.b, h, query, key, count - first, buffer.bias + first);
      uint32_t kept[FEW_KEYS / 32];
      if (call.drop_below) Dropout(call).row_bits(item.b, h, query, first_key, there, kept);
      weigh_few(call, score, buffer, r + i, queries.bits[i], call.drop_below ? kept : nullptr, first, count,
                buffer.probs + i * FEW_KEYS, buffer.d_scores + i * FEW_KEYS);
      if (terms)
        terms[(r + i) / call.Q].add_row(call, item.b, h, query, key, count - first, buffer.bias + first);
    }
    const float ones[4] = {1, 1, 1, 1};
    if (call.dv.data) add_outer<R>(buffer.probs, d_out.at, value_width, first, count, buffer.d_values);
    if (call.dk.data)
      add_outer<R>(buffer.d_scores, buffer.queries + r * width, width, first, count, buffer.d_keys);
    if (call.dq.data)
      add_tile<R>(buffer.d_scores, ones, keys, width, false, first, count, parts + r * parts_row,
                  parts_row);
  });
}

// One part of the keys of a key head, item.h; item.tile numbers the part, parts [rows, chunks, width].
static void few_backward_item(const ab_call &call, const Item &item, float *parts, int32_t *turn,
                              char *memory) {
  const Score score(call, LOG2_E, has_terms(call));
  const ab_layout &layout = call.layout;
  const int64_t tile = layout.tile, tiles = tiles_of(call.K, tile), chunks = chunks_of(call);
  const int64_t share = call.H / call.Hk, first_head = item.h * share;
  FewGradients buffer(call, memory);
  const int64_t begin = tiles * item.tile / chunks, stop = tiles * (item.tile + 1) / chunks;
  TermSums *terms =
      turn ? (TermSums *)(void *)cut<char>(memory, share * (int64_t)sizeof(TermSums)) : nullptr;
  for (int64_t s = 0; terms && s < share; s++) {
    terms[s] = TermSums(call, call.Q, few_chunk_keys(call), memory);
    terms[s].clear(call, 0, call.Q, begin * tile, min64(stop * tile, call.K));
  }
  const int64_t parts_row = chunks * buffer.width;
  for (int64_t r = 0; r < share * call.Q; r++) {
    buffer.read(call, score, r, item.b, first_head + r / call.Q, r % call.Q);
    if (call.dq.data) memset(parts + r * parts_row, 0, (size_t)buffer.width * sizeof(float));
  }
  // Heads of one relation go together.
  const int64_t heads = layout.heads == 1 ? share : 1;
  for (int64_t t = begin; t < stop; t++) {
    const int64_t start = t * tile, n = min64(tile, call.K - start);
    const Rows keys = rows_as_float(call.k, item.b, item.h, start, n, call.D, buffer.width, buffer.keys);
    const Rows values =
        rows_as_float(call.v, item.b, item.h, start, n, call.E, buffer.value_width, buffer.values);
    memset(buffer.d_keys, 0, (size_t)(n * buffer.width) * sizeof(float));
    memset(buffer.d_values, 0, (size_t)(n * buffer.value_width) * sizeof(float));
    for (int64_t s = 0; s < share; s += heads) {
      const int32_t *bounds = layout.k_ptr + (group_of(layout, item.b, first_head + s) * tiles + t) * 3;
      if (bounds[0] == bounds[2]) continue;
      const bool full = bounds[0] < bounds[1];
      const int32_t *bits =
          full ? nullptr : layout.patterns + layout.k_mark[bounds[0]] * tile * (tile / 32);
      add_meeting(call, score, buffer, terms, {item.b, item.h, 0, t}, s * call.Q, heads * call.Q, bits,
                  keys, values, n, parts, parts_row);
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
AB_INLINE int64_t few_backward_scratch_bytes(const ab_call &call) {
  const int64_t parts = call.B * call.H * call.Q * chunks_of(call) * round_up(call.D, VL);
  return 4 * (call.dq.data ? round_up(parts, 16) : 0) + (wants_terms(call) ? 4 * call.B * call.Hk : 0);
}

// The backward pass of a call of at most FEW queries.
static int32_t few_backward(const ab_call &call, char *scratch) {
  const int64_t chunks = chunks_of(call), width = round_up(call.D, VL);
  const int64_t size = call.Q * chunks * width, share = call.Hk ? call.H / call.Hk : 0;
  float *parts = cut<float>(scratch, call.dq.data ? call.B * call.H * size : 0);
  int32_t *turns = wants_terms(call) ? (int32_t *)(void *)scratch : nullptr;
  if (turns) memset(turns, 0, (size_t)(call.B * call.Hk) * sizeof(int32_t));
  char *end = nullptr;
  if (call.H) FewGradients(call, end);
  if (turns) cut<char>(end, share * (int64_t)sizeof(TermSums));
  for (int64_t s = 0; turns && s < share; s++) TermSums(call, call.Q, few_chunk_keys(call), end);
  const int64_t bytes = (int64_t)(uintptr_t)end;
  int32_t status = run_together(call, chunks, bytes, [&](int64_t b, int64_t h, int64_t c, char *memory) {
    const int64_t unit = b * call.Hk + h;
    float *here = call.dq.data ? parts + unit * share * size + c * width : nullptr;
    few_backward_item(call, {b, h, 0, c}, here, turns ? turns + unit : nullptr, memory);
  });
  for (int64_t r = 0; call.dq.data && status == AB_OK && r < call.B * call.H * call.Q; r++) {
    float *sum = parts + r * chunks * width;
    for (int64_t i = width; i < chunks * width; i += VL) {
      float *to = sum + i % width;
      store(to, load(to) + load(sum + i));
    }
    write_rows(call.dq, r / call.Q / call.H, r / call.Q % call.H, r % call.Q, 1, call.D, sum, width);
  }
  return status;
}

}  // namespace AB_LEVEL::tiles

#endif
