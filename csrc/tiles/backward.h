// The backward pass over tiles, one key tile after the other.
//
// Lanes are keys. K^T and V^T are packed in panels of LANES keys; rows of Q and dO are read in place
// (pairs, see floats.h, are also packed for the last three products):
//   P = 2^(Q K^T - lse),  dS = P * (dO V^T - delta) * scale,  delta = rowsum(dO * out) - dlse,
//   dV += P^T dO,  dK += dS^T Q,  dQ += dS K.
// dK and dV stay with the thread that has the key tile. dQ is shared: the key tiles of a head are added to
// a query tile in ascending order, each waiting for its turn, so that no copies of dQ are needed and no
// result depends on the number of threads. The gradients of relative and grid go the same way.
#pragma once

#include "simd/lanes.h"
#include "simd/philox.h"
#include "tiles/buffers.h"
#include "tiles/mode.h"

namespace AB_ISA::tiles {

template <class M>
using Buffer = BackwardBuffer<typename M::Form>;
template <class M>
using MeetingOf = Meeting<typename M::Form::Operand>;

// Compute P of a strip of queries and a panel of keys; 0 where unrelated. With TERMS `bias` may hold a
// bias.
template <int MR, class M>
AB_INLINE void compute_probs(const ab_call &call, const Score &score, const Buffer<M> &buffer,
                             const MeetingOf<M> &meeting, [[maybe_unused]] Depths depths, int64_t r,
                             int64_t panel) {
  Sums<MR, 2> sums;
  const auto queries = meeting.queries.across.from(r), keys_t = buffer.panel(buffer.keys_t, panel, call.D);
  if constexpr (M::LEVELS) {
    multiply_levels(sums, buffer.ended, Levels(call), depths, queries, keys_t, buffer.blocks,
                    buffer.blocks.queries + r, buffer.blocks.keys + panel * LANES);
  } else {
    multiply(sums, buffer.ended, call.D, queries, keys_t);
  }
  const int64_t first = panel * LANES, words = call.layout.tile / 32;
  const FloatRows probs = buffer.strip(r, first);
  AB_UNROLL
  for (int i = 0; i < MR; i++) {
    const uint32_t related =
        meeting.bits ? (uint32_t)meeting.bits[(r + i) * words + first / 32] >> first % 32 : 0;
    const int64_t at = (r + i) * buffer.row + first;
    AB_UNROLL
    for (int c = 0; c < 2; c++) {
      F raw = score.raw(sums.at[i][c]);
      const F whole =
          M::TERMS && score.biased ? score.with_bias(raw, load(buffer.bias + at + c * VL)) : raw;
      F p = exp2_of(score.below(whole, buffer.lse[r + i], buffer.lse_rest[r + i]));
      if (meeting.bits) p = choose(related >> (c * VL), p, F{});
      store(probs.at + i * probs.row + c * VL, p);
      if (score.capped) store(buffer.slopes + at + c * VL, score.slope(raw));
    }
  }
}

// The factors that levels give the products of query r with the keys from j on.
AB_INLINE F share_of(const ab_call &call, const BackwardBuffer<Floats> &buffer, Depths depths, int64_t r,
                     int64_t j) {
  const Levels levels(call);
  F share = splat(levels.share(depths.shallow));
  for (int l = depths.shallow; l < depths.deep; l++) {
    const I block = splat(buffer.blocks.queries[l * buffer.blocks.row + r]);
    share =
        block == load(buffer.blocks.keys + l * buffer.blocks.row + j) ? splat(levels.share(l + 1)) : share;
  }
  return share;
}

// Compute dS of the same.
template <int MR, class M>
AB_INLINE void compute_d_scores(const ab_call &call, const Buffer<M> &buffer, const MeetingOf<M> &meeting,
                                [[maybe_unused]] Depths depths, int64_t r, int64_t panel) {
  Sums<MR, 2> sums;
  multiply(sums, buffer.ended, call.E, meeting.d_out.across.from(r),
           buffer.panel(buffer.values_t, panel, call.E));
  const int64_t first = panel * LANES;
  [[maybe_unused]] const int64_t words = call.layout.tile / 32;
  const FloatRows probs = buffer.strip(r, first);
  const bool differs = M::LEVELS && call.per_pair && depths.shallow < depths.deep;
  const F scale =
      splat(M::LEVELS && !differs ? call.scale * Levels(call).share(depths.shallow) : call.scale);
  AB_UNROLL
  for (int i = 0; i < MR; i++) {
    const int64_t at = (r + i) * buffer.row + first;
    const uint32_t kept =
        M::TERMS && buffer.kept ? buffer.kept[(r + i) * words + first / 32] >> first % 32 : 0;
    AB_UNROLL
    for (int c = 0; c < 2; c++) {
      float *const weights = probs.at + i * probs.row + c * VL;
      const F p = load(weights);
      F d_weight = sums.at[i][c];
      if (M::TERMS && buffer.kept) {
        const F share = choose(kept >> (c * VL), splat(call.kept_share), F{});
        d_weight *= share;
        store(weights, p * share);
      }
      const F by_weight = d_weight - splat(meeting.delta[r + i]);
      F d = p * scale * by_weight;
      if (M::TERMS && buffer.d_bias) store(buffer.d_bias + at + c * VL, p * by_weight);
      if (call.softcap != 0) d *= load(buffer.slopes + at + c * VL);
      if constexpr (M::LEVELS)
        if (differs) d *= share_of(call, buffer, depths, r + i, first + c * VL);
      sums.at[i][c] = d;
    }
  }
  M::Form::store_d_scores(sums, buffer, r, first);
}

// The depths of n queries from r on with panel p of `keys` keys.
AB_INLINE Depths narrow(const BackwardBuffer<Floats> &buffer, Depths depths, int64_t r, int64_t n,
                        int64_t p, int64_t keys) {
  return buffer.blocks.narrow(depths, buffer.blocks.queries + r, n, buffer.blocks.keys + p * LANES,
                              min64(LANES, keys - p * LANES));
}

// The panels that have a pair with rows [r, r + n), one bit each.
AB_INLINE uint32_t panels_of(const ab_call &call, const int32_t *bits, int64_t panels, int64_t r,
                             int64_t n) {
  if (!bits) return (1u << panels) - 1;
  const int64_t words = call.layout.tile / 32;
  uint32_t found = 0;
  for (int64_t p = 0; p < panels; p++) {
    uint32_t any = 0;
    for (int64_t i = r; i < r + n; i++) any |= (uint32_t)bits[i * words + p * LANES / 32];
    if (any >> p * LANES % 32 & (uint32_t)((1ull << LANES) - 1)) found |= 1u << p;
  }
  return found;
}

// Compute P and dS of a meeting, 0 in panels without a pair; returns the number of strips.
template <class M>
static int64_t compute_scores(const ab_call &call, const Score &score, const Buffer<M> &buffer,
                              const MeetingOf<M> &meeting, int64_t keys, Strip *strips) {
  const int64_t panels = divide_up(keys, LANES);
  int64_t count = 0;
  for (int64_t r = 0; r < meeting.count;) {
    const int n = strip_of<M::Form::STEP>(meeting.count - r);
    const uint32_t found = panels_of(call, meeting.bits, panels, r, n);
    for (int64_t p = 0; p < panels; p++) {
      if (!(found >> p & 1)) {
        buffer.clear_panel(r, n, p * LANES);
        continue;
      }
      Depths depths = {};
      if constexpr (M::LEVELS) depths = narrow(buffer, meeting.depths, r, n, p, keys);
      with_count<ROWS>(n, [&](auto rows) AB_LAMBDA {
        compute_probs<rows.value, M>(call, score, buffer, meeting, depths, r, p);
        if (call.dq.data || call.dk.data || (M::TERMS && (buffer.d_bias || buffer.kept)))
          compute_d_scores<rows.value, M>(call, buffer, meeting, depths, r, p);
        M::Form::template store_probs<rows.value>(buffer, r, p * LANES);
      });
    }
    strips[count++] = {r, n, found};
    r += n;
  }
  M::Form::end_keys(buffer, meeting.count, keys);
  return count;
}

// Store n columns of sums.
template <int MR, int NV>
AB_INLINE void store_columns(Sums<MR, NV> &sums, float *to, int64_t row, int64_t n) {
  if (n == NV * VL) return store(sums, to, row);
  AB_UNROLL
  for (int r = 0; r < MR; r++)
    store(to + r * row, choose((1u << n) - 1, sums.at[r][0], load(to + r * row)));
}

// to [MR, columns] += a^T b over `depth` steps, where a is [queries, keys] and b [queries, columns].
template <int MR, class Operand>
AB_INLINE void add_to_keys(int64_t depth, Operand a, Operand b, int64_t columns, float *to,
                           int64_t to_row) {
  by_vectors(columns, [&](auto vectors, int64_t c, int64_t n) AB_LAMBDA {
    Sums<MR, vectors.value> sums;
    clear(sums);
    add_transposed(sums, depth, a, b.from(0, c));
    add(sums, to + c, to_row);
    store_columns(sums, to + c, to_row, n);
  });
}

// Add to some dims of dK, and to dV if `values`, of a key tile.
template <class Form>
static void add_d_keys(const ab_call &call, const BackwardBuffer<Form> &buffer,
                       const Meeting<typename Form::Operand> &meeting, const Strip *strips, int64_t count,
                       int64_t keys, Dims dims, bool values) {
  for (int64_t j = 0; j < keys;) {
    const int n = strip_of(keys - j);
    const uint32_t panels = (2u << (j + n - 1) / LANES) - (1u << j / LANES);
    const Strip *first = strips, *last = strips + count;
    while (first < last && !(first->panels & panels)) first++;
    while (first < last && !(last[-1].panels & panels)) last--;
    if (first < last) {
      const int64_t start = first->first, step = start / Form::STEP;
      const int64_t depth = divide_up(last[-1].first + last[-1].count - start, Form::STEP);
      with_count<ROWS>(n, [&](auto rows) AB_LAMBDA {
        if (call.dv.data && values)
          add_to_keys<rows.value>(depth, buffer.down(buffer.probs, start, j), meeting.d_out.down.from(step),
                                  buffer.value_width, buffer.d_values + j * buffer.value_width,
                                  buffer.value_width);
        if (call.dk.data)
          add_to_keys<rows.value>(depth, buffer.down(buffer.d_scores, start, j),
                                  meeting.queries.down.from(step, dims.first), dims.count,
                                  buffer.d_keys + j * buffer.width + dims.first, buffer.width);
      });
    }
    j += n;
  }
}

// to [MR, columns] += a b, where a is [MR, depth]; the first one writes. A row has `room` numbers.
template <int MR, class Operand>
AB_INLINE void add_to_queries(int64_t depth, Operand a, Operand b, int64_t columns, int64_t room,
                              bool is_first, float *to, int64_t to_row) {
  by_vectors(columns, [&](auto vectors, int64_t c, int64_t n) AB_LAMBDA {
    Sums<MR, vectors.value> sums;
    clear(sums);
    add_product(sums, depth, a, b.from(0, c));
    if (n == vectors.value * VL || (!is_first && c + VL <= room)) {
      if (!is_first) add(sums, to + c, to_row);
      return store_columns(sums, to + c, to_row, n);
    }
    for (int i = 0; i < MR; i++) {  // a vector would end beyond the row
      float *x = to + i * to_row + c;
      store_some(x, is_first ? sums.at[i][0] : sums.at[i][0] + load_some(x, n), n);
    }
  });
}

// Add one key tile to some dims of dQ of a query tile, `to`.
template <class Form>
static void add_d_queries(const ab_call &call, const BackwardBuffer<Form> &buffer,
                          typename Form::Operand keys, int64_t key_count, const Strip *strips,
                          int64_t count, Dims dims, bool is_first, float *to, int64_t to_row) {
  for (const Strip *strip = strips; strip < strips + count; strip++) {
    float *rows_to = to + strip->first * to_row + dims.first;
    if (!strip->panels) {
      if (is_first)
        for (int64_t i = 0; i < strip->count; i++)
          memset(rows_to + i * to_row, 0, (size_t)dims.count * sizeof(float));
      continue;
    }
    const int64_t first = __builtin_ctz(strip->panels) * LANES;
    const int64_t stop = min64(key_count, (32 - __builtin_clz(strip->panels)) * LANES);
    const typename Form::Operand a = {buffer.d_scores_across + strip->first * buffer.row + first,
                                      buffer.row};
    with_count<ROWS>(strip->count, [&](auto rows) AB_LAMBDA {
      add_to_queries<rows.value>(divide_up(stop - first, Form::STEP), a,
                                 keys.from(first / Form::STEP, dims.first), dims.count, call.D - dims.first,
                                 is_first, rows_to, to_row);
    });
  }
}

// Fill in q~ of a meeting, of the dims that it reads, and the depths of its pairs.
[[maybe_unused]] static void read_levels(const ab_call &call, const BackwardBuffer<Floats> &buffer,
                                         int64_t b, int64_t h, int64_t i, int64_t j, int64_t key_count,
                                         bool full, int32_t mark, Meeting<Rows> &meeting) {
  const Levels levels(call);
  meeting.depths = buffer.blocks.fill(levels, full, mark, query_position(call, i), meeting.count,
                                      key_position(call, j), key_count);
  const int64_t columns = levels.prefix(meeting.depths.deep);
  copy_rows(call.q, b, h, i, meeting.count, columns, buffer.width, buffer.queries);
  multiply_columns(buffer.queries, buffer.width, meeting.count, columns, buffer.factors);
  meeting.queries.across = meeting.queries.down = {buffer.queries, buffer.width};
}

// Set dS of pairs that do not share a level to 0; the others add to that level's dims.
[[maybe_unused]] static void keep_level(const BackwardBuffer<Floats> &buffer, int level, int64_t keys,
                                        Strip *strips, int64_t count) {
  const int64_t row = buffer.blocks.row;
  for (Strip *strip = strips; strip < strips + count; strip++)
    for (int64_t p = 0; p < divide_up(keys, LANES); p++) {
      if (!(strip->panels >> p & 1)) continue;
      const Depths found = narrow(buffer, {level, level + 1}, strip->first, strip->count, p, keys);
      if (found.shallow == level + 1) continue;
      if (found.deep == level) strip->panels &= ~(1u << p);
      for (int64_t r = strip->first; r < strip->first + strip->count; r++) {
        const I block = splat(buffer.blocks.queries[level * row + r]);
        for (int64_t j = p * LANES; j < (p + 1) * LANES; j += VL) {
          float *x = buffer.d_scores + r * buffer.row + j;
          store(x, block == load(buffer.blocks.keys + level * row + j) ? load(x) : F{});
        }
      }
    }
}

// Add everything that a key tile and an entry of its list, a query tile of head h, contribute.
template <class M>
static void backward_meeting(const ab_call &call, const BackwardShared &shared, const Buffer<M> &buffer,
                             TermSums &terms, const Item &item, int64_t h, int64_t group, int64_t entry,
                             bool full, typename M::Form::Operand keys, int64_t key_count) {
  typedef typename M::Form Form;
  const ab_layout &layout = call.layout;
  const int64_t tile = layout.tile, t = layout.k_tile[entry], first = t * tile;
  const int64_t head = item.b * call.H + h, tiles = divide_up(call.Q, tile);
  const float *lse = call.lse + head * call.Q + first;
  const Score score(call, LOG2_E, M::TERMS && has_terms(call));
  MeetingOf<M> meeting = {};
  meeting.count = min64(tile, call.Q - first);
  if constexpr (M::LEVELS)
    read_levels(call, buffer, item.b, h, first, item.tile * tile, key_count, full, layout.k_mark[entry],
                meeting);
  else
    meeting.queries =
        Form::both(call.q, item.b, h, first, meeting.count, call.D, buffer.width, buffer.queries);
  meeting.d_out =
      Form::both(call.dout, item.b, h, first, meeting.count, call.E, buffer.value_width, buffer.d_out);
  meeting.delta = shared.delta + head * call.Q + first;
  if (!full) meeting.bits = layout.patterns + layout.k_mark[entry] * tile * (tile / 32);
  for (int64_t i = 0; i < meeting.count; i++) score.split(lse[i], buffer.lse + i, buffer.lse_rest + i);
  if (M::TERMS && buffer.kept)
    for (int64_t i = 0; i < meeting.count; i++)
      Dropout(call).row_bits(item.b, h, query_position(call, first + i),
                             key_position(call, item.tile * tile), key_count,
                             buffer.kept + i * (tile / 32));
  if (M::TERMS && score.biased)
    for (int64_t i = 0; i < meeting.count; i++)
      fill_row(call, item.b, h, first + i, item.tile * tile, key_count, buffer.bias + i * buffer.row);
  Strip strips[MOST_ROWS] = {};
  const int64_t count = compute_scores<M>(call, score, buffer, meeting, key_count, strips);
  const int64_t together = M::LEVELS ? Levels(call).prefix(meeting.depths.shallow) : buffer.width;
  add_d_keys<Form>(call, buffer, meeting, strips, count, key_count, {0, together}, true);
  if (M::TERMS && buffer.d_bias)
    for (int64_t i = 0; i < meeting.count; i++)
      terms.add_row(call, item.b, h, first + i, item.tile * tile, key_count,
                    buffer.d_bias + i * buffer.row);
  const bool wants_queries = call.dq.data;
  const int32_t rank = wants_queries ? shared.rank[entry] : 0;
  int32_t *done = wants_queries ? shared.done + head * tiles + t : nullptr;
  float *to = nullptr;
  if (wants_queries) {
    wait_for(done, rank);
    to = row_of<float>(shared.dq, item.b, h, first);
    if (M::LEVELS && rank == 0)
      for (int64_t i = 0; i < meeting.count; i++)
        memset(to + i * shared.dq.row, 0, (size_t)call.D * sizeof(float));
    add_d_queries<Form>(call, buffer, keys, key_count, strips, count, {0, M::LEVELS ? together : call.D},
                        !M::LEVELS && rank == 0, to, shared.dq.row);
  }
  if constexpr (M::LEVELS) {
    const bool wanted = wants_queries || call.dk.data;
    for (int l = meeting.depths.shallow; wanted && l < meeting.depths.deep; l++) {
      const int64_t start = Levels(call).prefix(l);
      const Dims dims = {start, Levels(call).prefix(l + 1) - start};
      keep_level(buffer, l, key_count, strips, count);
      add_d_keys<Form>(call, buffer, meeting, strips, count, key_count, dims, false);
      if (wants_queries)
        add_d_queries<Form>(call, buffer, keys, key_count, strips, count, dims, false, to, shared.dq.row);
    }
  }
  if (!wants_queries) return;
  const bool is_last = rank + 1 == shared.count[group * tiles + t];
  if (M::LEVELS && is_last) multiply_columns(to, shared.dq.row, meeting.count, call.D, buffer.factors);
  if (call.dq.dtype != AB_FLOAT32 && is_last)
    write_rows(call.dq, item.b, h, first, meeting.count, call.D, to, shared.dq.row);
  __atomic_store_n(done, rank + 1, __ATOMIC_RELEASE);
}

// Start the sums of terms of a key tile, for the first to the last query that it meets.
AB_INLINE void start_terms(const ab_call &call, const int32_t *bounds, int64_t key, int64_t n,
                           TermSums &terms) {
  int64_t low = call.Q, high = 0;
  for (int64_t i = bounds[0]; i < bounds[call.layout.classes]; i++) {
    const int64_t at = call.layout.k_tile[i] * call.layout.tile;
    low = min64(low, at);
    high = max64(high, min64(at + call.layout.tile, call.Q));
  }
  terms.clear(call, low, high, key, key + n);
}

// One key tile of one key head, with all query heads that read it.
template <class M>
static void backward_item(const ab_call &call, const BackwardShared &shared, const Item &item,
                          Arena memory) {
  typedef typename M::Form Form;
  const Buffer<M> buffer(call, memory);
  TermSums terms(call, query_span(call, 0, call.Q), call.layout.tile, memory);
  const ab_layout &layout = call.layout;
  const int64_t tile = layout.tile, first = item.tile * tile, n = min64(tile, call.K - first);
  const int64_t tiles = divide_up(call.K, tile), share = call.H / call.Hk;
  if (M::LEVELS) Levels(call).fill_factors(buffer.factors, buffer.width);
  Form::pack(call.k, item.b, item.h, first, n, call.D, Score(call).sign, buffer.keys, buffer.keys_t);
  Form::pack(call.v, item.b, item.h, first, n, call.E, 1.0f, buffer.values, buffer.values_t);
  const auto keys = Form::both(call.k, item.b, item.h, first, n, call.D, buffer.width, buffer.keys).down;
  memset(buffer.d_keys, 0, (size_t)(n * buffer.width) * sizeof(float));
  memset(buffer.d_values, 0, (size_t)(n * buffer.value_width) * sizeof(float));
  for (int64_t h = item.h * share; h < (item.h + 1) * share; h++) {
    const int64_t group = group_of(layout, item.b, h);
    const int32_t *bounds = class_bounds(layout, layout.k_ptr, group * tiles + item.tile);
    const int32_t partial = bounds[layout.classes - 1], end = bounds[layout.classes];
    if (M::TERMS && buffer.d_bias) start_terms(call, bounds, first, n, terms);
    for (int64_t i = bounds[0]; i < end; i++)
      backward_meeting<M>(call, shared, buffer, terms, item, h, group, i, i < partial, keys, n);
    if (!M::TERMS || !buffer.d_bias) continue;
    int32_t *turn = shared.turn + item.b * call.H + h;
    wait_for(turn, (int32_t)item.tile);
    terms.hand_over(call, item.b, h);
    __atomic_store_n(turn, (int32_t)item.tile + 1, __ATOMIC_RELEASE);
  }
  if (call.dk.data) write_rows(call.dk, item.b, item.h, first, n, call.D, buffer.d_keys, buffer.width);
  if (call.dv.data)
    write_rows(call.dv, item.b, item.h, first, n, call.E, buffer.d_values, buffer.value_width);
}

// Compute delta of a query tile, and clear dq where no key tile will write it.
static void prepare_item(const ab_call &call, const BackwardShared &shared, const Item &item) {
  const int64_t tile = call.layout.tile, first = item.tile * tile, n = min64(tile, call.Q - first);
  const int64_t start = (item.b * call.H + item.h) * call.Q + first;
  with_dtype(call.out.dtype, [&](auto type) AB_LAMBDA {
    typedef typename decltype(type)::Number T;
    const T *out = row_of<T>(call.out, item.b, item.h, first);
    const T *d_out = row_of<T>(call.dout, item.b, item.h, first);
    for (int64_t i = 0; i < n; i++) {
      const auto *x = out + i * call.out.row, *y = d_out + i * call.dout.row;
      F sum = F{};
      for (int64_t c = 0; c < call.E; c += VL)
        sum = load_first(x + c, call.E - c) * load_first(y + c, call.E - c) + sum;
      const float delta = sum_of(sum) - (call.dlse ? call.dlse[start + i] : 0);
      shared.delta[start + i] = call.lse[start + i] == -INFINITY ? 0 : delta;
    }
  });
  if (call.dq.data && !shared.count[item.group * divide_up(call.Q, tile) + item.tile])
    with_row(call.dq, item.b, item.h, first, [&](auto *dq) AB_LAMBDA {
      for (int64_t i = 0; i < n; i++) memset(dq + i * call.dq.row, 0, (size_t)call.D * sizeof(*dq));
    });
}

template <class Form>
static int32_t backward(const ab_call &call, Arena scratch) {
  const ab_layout &layout = call.layout;
  const BackwardShared shared(call, scratch);
  const int64_t q_tiles = divide_up(call.Q, layout.tile), k_tiles = divide_up(call.K, layout.tile);
  if (call.dq.data) {
    memset(shared.count, 0, (size_t)(layout.groups * q_tiles) * sizeof(int32_t));
    memset(shared.done, 0, (size_t)(call.B * call.H * q_tiles) * sizeof(int32_t));
    for (int64_t g = 0; g < layout.groups; g++)
      for (int64_t t = 0; t < k_tiles; t++) {
        const int32_t *bounds = class_bounds(layout, layout.k_ptr, g * k_tiles + t);
        for (int64_t i = bounds[0]; i < bounds[layout.classes]; i++)
          shared.rank[i] = shared.count[g * q_tiles + layout.k_tile[i]]++;
      }
  }
  if (shared.turn) memset(shared.turn, 0, (size_t)(call.B * call.H) * sizeof(int32_t));
  int32_t status = run_items(call.B * call.H * q_tiles, call.threads, 64, [&](int64_t i, Arena) {
    prepare_item(call, shared, item_at(call, i, q_tiles));
  });
  if (status != AB_OK) return status;
  Arena needed;
  BackwardBuffer<Form>(call, needed);
  TermSums(call, query_span(call, 0, call.Q), layout.tile, needed);
  return run_together(call, k_tiles, needed.bytes, [&](int64_t b, int64_t h, int64_t t, Arena memory) {
    with_mode<Form>(has_terms(call) || call.drop_below, has_levels(call),
                    [&](auto mode) { backward_item<decltype(mode)>(call, shared, {b, h, 0, t}, memory); });
  });
}

[[maybe_unused]] static int64_t backward_scratch_bytes(const ab_call &call) {
  Arena scratch;
  BackwardShared(call, scratch);
  return scratch.bytes;
}

}  // namespace AB_ISA::tiles
