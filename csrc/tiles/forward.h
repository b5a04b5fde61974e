// The forward pass over tiles: out = softmax(scores) v, one query tile after the other.
//
// Lanes are queries. Q^T is packed in panels of LANES queries, scaled; K and V are read in place:
//   S^T [keys, lanes] = K Q^T,  P^T = 2^(factor S^T - top),  O^T [E, lanes] += V^T P^T.
// So maxima, sums and rescaling need no work across lanes, and D, E and the number of keys are arbitrary.
// Pairs (see floats.h) take keys two by two. After an odd last key comes one that no query is related to:
// tiles at a ragged end have bits.
#pragma once

#include "score.h"
#include "simd/philox.h"
#include "tiles/levels.h"
#include "tiles/mode.h"
#include "tiles/panel_bias.h"

namespace AB_ISA::tiles {

// Adjacent keys that some query of a panel is related to.
struct Run {
  int64_t first, count;
};

template <class Operand>
struct Block {
  Operand keys, values;
  int64_t first, count;  // keys
  const int32_t *bits;   // of the first key, for the first panel; NULL = every pair is related
  Depths depths;         // of a multi-level score
  float share;           // factor of scores of one depth that is not yet in the products
};

// A thread's memory for a query tile.
template <class Form>
struct ForwardBuffer {
  typedef typename Form::Number Number;
  int64_t depth;          // D rounded up to whole steps
  Number *queries;        // [panels, depth, LANES]
  float *out;             // [panels, E, LANES]
  float *top, *total;     // [panels, LANES]
  float *scores, *ended;  // [BLOCK_KEYS, LANES], [ROWS, LANES]
  Number *weights;        // [BLOCK_KEYS, LANES]: they take the place of the scores
  Number *keys, *values;  // [BLOCK_KEYS, depth], [BLOCK_KEYS, E], if they cannot be read in place
  float *rows;            // [LANES, E]: results on their way to half precision
  TileBlocks blocks;      // of levels

  // Cut the arrays from `memory`.
  ForwardBuffer(const ab_call &call, Arena &memory)
      : depth(round_up(call.D, Form::STEP)), blocks(call, memory) {
    int64_t lanes = round_up(call.layout.tile, LANES);
    queries = memory.cut<Number>(lanes * depth);
    out = memory.cut<float>(lanes * call.E);
    top = memory.cut<float>(lanes);
    total = memory.cut<float>(lanes);
    scores = memory.cut<float>(BLOCK_KEYS * LANES);
    weights = (Number *)(void *)scores;
    ended = memory.cut<float>(ROWS * LANES);
    keys = memory.cut<Number>(BLOCK_KEYS * depth);
    values = memory.cut<Number>(BLOCK_KEYS * round_up(call.E, VL));
    rows = memory.cut<float>(LANES * call.E);
  }
};

// The state of one panel of queries.
template <class Form>
struct Panel {
  int64_t b, h, lane;              // `lane` of the tile is its first query
  int64_t first, count;            // queries
  typename Form::Number *queries;  // [depth, LANES]
  float *out;                      // [E, LANES], not divided by `total` yet
  float *top, *total;              // [LANES]: largest score in units of log 2, sum of 2^(score - top)

  // Panel p of a tile.
  Panel(const ab_call &call, const ForwardBuffer<Form> &buffer, const Item &item, int64_t p)
      : b(item.b), h(item.h), lane(p * LANES), first(item.tile * call.layout.tile + lane) {
    count = min64(LANES, min64(call.layout.tile - lane, call.Q - first));
    queries = buffer.queries + lane * buffer.depth;
    out = buffer.out + lane * call.E;
    top = buffer.top + lane;
    total = buffer.total + lane;
  }
};

// The products of `MR` keys with a panel become raw scores, -inf where unrelated; `top` follows their
// maximum. With TERMS `scores` holds the bias before, and whole scores after.
template <int MR, bool TERMS>
AB_INLINE void score_keys(const Score &score, Sums<MR, 2> &sums, const uint32_t *related, float *scores,
                          F top[2]) {
  sums.each([&](F sum, int r, int c) AB_LAMBDA {
    F x = score.raw(sum);
    if (TERMS) x = score.with_bias(x, load(scores + r * LANES + c * VL));
    if (related) x = choose(related[r] >> (c * VL), x, splat(-INFINITY));
    top[c] = maximum(top[c], x);
    store(scores + r * LANES + c * VL, x);
  });
}

// All scores of a block; returns the number of runs of keys that have any.
template <class M>
static int64_t score_block(const ab_call &call, const Score &score,
                           const ForwardBuffer<typename M::Form> &buffer,
                           const Block<typename M::Form::Operand> &block,
                           const Panel<typename M::Form> &panel, const PanelBias *bias, Run *runs,
                           F top[2]) {
  constexpr int STEP = M::Form::STEP;
  const int64_t lane = panel.lane;
  const typename M::Form::Operand queries = {panel.queries, STEP * LANES};
  float *const all_scores = buffer.scores, *const ended = buffer.ended;
  uint32_t related[BLOCK_KEYS];
  int64_t end = block.count;
  if (block.bits) {
    const int32_t *word = block.bits + lane / 32;
    const uint32_t all = (uint32_t)((1ull << LANES) - 1);
    for (int64_t j = 0; j < block.count; j++, word += call.layout.tile / 32)
      related[j] = (uint32_t)*word >> lane % 32 & all;
    while (end && !related[end - 1]) end--;
    if (end % STEP) related[end++] = 0;
  }
  // Whether the step from key j on has no pair.
  const auto skips = [&](int64_t j)
                         AB_LAMBDA { return block.bits && !(related[j] | related[j + STEP - 1]); };
  int64_t count = 0;
  for (int64_t j = 0; j < end;) {
    if (skips(j)) {
      j += STEP;
      continue;
    }
    int n = strip_of<STEP>(end - j);
    while (skips(j + n - STEP)) n -= STEP;
    const auto keys = block.keys.from(j);
    float *const scores = all_scores + j * LANES;
    if (M::TERMS) bias->fill(j, min64(n, block.count - j), scores);
    with_count<ROWS>(n, [&](auto rows) AB_LAMBDA {
      Sums<rows.value, 2> sums;
      if constexpr (M::LEVELS) {
        Levels levels(call);
        levels.per_pair &= block.share == 1.0f;
        const TileBlocks &blocks = buffer.blocks;
        const int32_t *of_keys = blocks.keys + j, *of_lanes = blocks.queries + lane;
        const Depths depths = blocks.narrow(block.depths, of_lanes, panel.count, of_keys, n);
        multiply_levels(sums, ended, levels, depths, keys, queries, blocks, of_keys, of_lanes);
      } else {
        multiply(sums, ended, call.D, keys, queries);
      }
      score_keys<rows.value, M::TERMS>(score, sums, block.bits ? related + j : nullptr, scores, top);
    });
    if (count && runs[count - 1].first + runs[count - 1].count == j)
      runs[count - 1].count += n;
    else
      runs[count++] = {j, n};
    j += n;
  }
  return count;
}

// O^T = keep * O^T + V^T P^T for `MR` columns of V; `keep` [LANES] is NULL where it would be all 1.
template <int MR, int STEP, class Operand>
AB_INLINE void add_values(Operand values, Operand probs, const Run *runs, int64_t count, const float *keep,
                          float *out) {
  Sums<MR, 2> sums;
  clear(sums);
  for (const Run *run = runs; run < runs + count; run++)
    add_transposed(sums, run->count / STEP, values.from(run->first / STEP), probs.from(run->first / STEP));
  if (keep)
    sums.each([=](F &x, int r, int c)
                  AB_LAMBDA { x = load(out + r * LANES + c * VL) * load(keep + c * VL) + x; });
  else
    add(sums, out, LANES);
  store(sums, out, LANES);
}

// Weights of dropped pairs become 0.
template <class Form>
static void drop_keys(const ab_call &call, int64_t first_key, const Panel<Form> &panel, const Run *runs,
                      int64_t count, typename Form::Number *weights) {
  const Dropout dropout(call);
  const int64_t first = query_position(call, panel.first);
  U position[2];
  for (int c = 0; c < 2; c++)
    for (int l = 0; l < VL; l++) position[c][l] = (uint32_t)(first + c * VL + l);
  const U head = dropout.head(panel.h), batch = dropout.batch(panel.b), limit = splat(dropout.limit);
  for (const Run *run = runs; run < runs + count; run++) {
    const int64_t end = run->first + run->count;
    for (int64_t j = run->first / 4 * 4; j < end; j += 4) {
      const U quad = splat((uint32_t)(first_key + j) >> 2);
      AB_UNROLL
      for (int c = 0; c < 2; c++) {
        U word[4];
        dropout.words(quad, position[c], head, batch, word);
        AB_UNROLL
        for (int i = 0; i < 4; i += Form::STEP) {
          if (j + i < run->first || j + i >= end) continue;
          I kept[Form::STEP];
          for (int s = 0; s < Form::STEP; s++) kept[s] = word[i + s] > limit;
          Form::drop_weights(weights + (j + i) * LANES + c * Form::STEP * VL, kept);
        }
      }
    }
  }
}

// Multiply the scores and round them, as the row's maximum was. The FMA that follows would subtract that
// maximum from an unrounded product, and the error of large scores would overflow exp2. Returns the factor
// that remains.
static F round_scores(float *scores, const Run *runs, int64_t count, F factor) {
  for (const Run *run = runs; run < runs + count; run++)
    for (float *x = scores + run->first * LANES; x < scores + (run->first + run->count) * LANES; x += VL)
      store(x, load(x) * factor);
  return splat(1.0f);
}

// Add a block of keys to a panel of queries.
template <class M>
static void add_block(const ab_call &call, const Score &score,
                      const ForwardBuffer<typename M::Form> &buffer,
                      const Block<typename M::Form::Operand> &block, const Panel<typename M::Form> &panel) {
  typedef typename M::Form Form;
  constexpr int STEP = Form::STEP;
  Run runs[BLOCK_KEYS];
  float *const scores = buffer.scores;
  F top[2] = {splat(-INFINITY), splat(-INFINITY)};
  int64_t count;
  if constexpr (M::TERMS) {
    const PanelBias bias(call, panel.b, panel.h, panel.first, panel.count, block.first, block.count);
    count = score_block<M>(call, score, buffer, block, panel, &bias, runs, top);
  } else {
    count = score_block<M>(call, score, buffer, block, panel, nullptr, runs, top);
  }
  if (!count) return;
  alignas(64) float keep[LANES];
  bool moved = false;
  F total[2], sum[2] = {};
  F factor = splat(score.late * block.share);
  bool large = false;
  for (int c = 0; c < 2; c++) {
    F before = load(panel.top + c * VL);
    top[c] = maximum(before, top[c] * factor);
    large |= any_large(top[c]);
    F share = exp2_of(before - top[c]);
    store(keep + c * VL, share);
    total[c] = load(panel.total + c * VL) * share;
    moved |= any_differs(before, top[c]);
  }
  if (large) factor = round_scores(scores, runs, count, factor);
  for (const Run *run = runs; run < runs + count; run++) {
    float *x = scores + run->first * LANES;
    const float *stop = x + run->count * LANES;
    while (x < stop) {
      // Sum in three steps: where scores repeat, as those of a table do, all roundings go one way.
      const float *end = x + min64(stop - x, 16 * LANES);
      F few[2] = {};
      for (; x < end; x += STEP * LANES) {
        typename Form::Number *to = buffer.weights + (x - scores);
        AB_UNROLL
        for (int c = 0; c < 2; c++, to += STEP * VL) {
          F p[STEP];
          AB_UNROLL
          for (int s = 0; s < STEP; s++) {
            p[s] = exp2_of(load(x + s * LANES + c * VL) * factor - top[c]);
            few[c] += p[s];
          }
          Form::store_weights(to, p);
        }
      }
      for (int c = 0; c < 2; c++) sum[c] += few[c];
    }
  }
  for (int c = 0; c < 2; c++) {
    store(panel.top + c * VL, top[c]);
    store(panel.total + c * VL, total[c] + sum[c]);
  }
  if (call.drop_below)
    drop_keys<Form>(call, key_position(call, block.first), panel, runs, count, buffer.weights);
  for (int64_t e = 0; e < call.E;) {
    int n = strip_of(call.E - e);
    with_count<ROWS>(n, [&](auto rows) AB_LAMBDA {
      const typename Form::Operand weights = {buffer.weights, STEP * LANES};
      add_values<rows.value, STEP>(block.values.from(0, e), weights, runs, count, moved ? keep : nullptr,
                                   panel.out + e * LANES);
    });
    e += n;
  }
}

// Divide by the sums and write out, lse and the largest scores.
template <class Form>
static void finish_panel(const ab_call &call, const Panel<Form> &panel, float *rows) {
  alignas(64) float share[LANES];
  const int64_t b = panel.b, h = panel.h, first = panel.first, n = panel.count;
  const int64_t at = (b * call.H + h) * call.Q + first;
  float *lse = call.lse + at;
  if (call.row_max)
    for (int64_t i = 0; i < n; i++) call.row_max[at + i] = max_of(panel.top[i], panel.total[i]);
  for (int64_t i = 0; i < LANES; i++) share[i] = call.drop_below ? call.kept_share : 1;
  if (call.sink) {
    for (int64_t c = 0; c < LANES; c += VL) {
      F top = load(panel.top + c), total = load(panel.total + c);
      store(share + c, load(share + c) * add_sink(call.sink[h], top, total));
      store(panel.top + c, top);
      store(panel.total + c, total);
    }
  }
  for (int64_t i = 0; i < LANES; i++) share[i] = panel.total[i] == 0 ? 0 : share[i] / panel.total[i];
  for (int64_t i = 0; i < n; i++) lse[i] = log_of(panel.top[i], panel.total[i]);
  for (float *x = panel.out; x < panel.out + call.E * LANES; x += LANES)
    for (int64_t c = 0; c < LANES; c += VL) store(x + c, load(x + c) * load(share + c));
  if (call.out.dtype == AB_FLOAT32) {
    transpose(panel.out, LANES, call.E, n, row_of<float>(call.out, b, h, first), call.out.row);
  } else {
    transpose(panel.out, LANES, call.E, n, rows, call.E);
    write_rows(call.out, b, h, first, n, call.E, rows, call.E);
  }
}

// q~ of a panel: each level's dims divided by their number.
[[maybe_unused]] static void divide_by_ranks(const ab_call &call, float *panel) {
  const Levels levels(call);
  for (int l = 0; l < levels.count; l++) {
    const F factor = splat(1.0f / (float)(levels.prefix(l + 1) - levels.prefix(l)));
    for (int64_t i = levels.prefix(l) * LANES; i < levels.prefix(l + 1) * LANES; i += VL)
      store(panel + i, load(panel + i) * factor);
  }
}

// One query tile of one head.
template <class M>
static void forward_item(const ab_call &call, const Item &item, Arena memory) {
  typedef typename M::Form Form;
  const ForwardBuffer<Form> buffer(call, memory);
  const Score score(call, LOG2_E, M::TERMS);
  const ab_layout &layout = call.layout;
  const int64_t tile = layout.tile, first = item.tile * tile, n = min64(tile, call.Q - first);
  const int64_t b = item.b, h = item.h, key_head = h / (call.H / call.Hk);
  const int32_t *bounds =
      class_bounds(layout, layout.q_ptr, item.group * divide_up(call.Q, tile) + item.tile);
  const int32_t partial = bounds[layout.classes - 1], end = bounds[layout.classes];
  const int64_t panels = divide_up(n, LANES);
  // The rows pass through the buffer of the keys on their way to the panels.
  for (int64_t p = 0; p < panels; p++) {
    const Panel<Form> panel(call, buffer, item, p);
    Form::pack(call.q, b, h, panel.first, panel.count, call.D, score.sign, buffer.keys, panel.queries);
    if constexpr (M::LEVELS) divide_by_ranks(call, panel.queries);
  }
  memset(buffer.out, 0, (size_t)(panels * LANES * call.E) * sizeof(float));
  memset(buffer.total, 0, (size_t)(panels * LANES) * sizeof(float));
  for (int64_t i = 0; i < panels * LANES; i++) buffer.top[i] = LOWEST;
  for (int64_t i = bounds[0]; i < end;) {
    const bool full = i < partial;
    const int64_t start = layout.q_tile[i] * tile;
    const int32_t mark = layout.q_mark[i];
    Block<typename Form::Operand> block = {{}, {}, start, min64(tile, call.K - start), nullptr, {}, 1.0f};
    if (!full) block.bits = layout.patterns_t + mark * tile * (tile / 32);
    // Adjacent full tiles of one depth are one block.
    const int64_t key = key_position(call, start);
    const auto continues = [&](int64_t next) {
      return next < partial && block.count < BLOCK_KEYS &&
             layout.q_tile[next] * tile == start + block.count &&
             key_position(call, start + block.count) == key + block.count &&
             (!M::LEVELS || layout.q_mark[next] == mark);
    };
    i++;
    if (full)
      for (; continues(i); i++) block.count += tile;
    int64_t D = call.D;
    if constexpr (M::LEVELS) {
      const Levels levels(call);
      const int64_t query = query_position(call, first);
      const Depths found = buffer.blocks.fill(levels, full, mark, query, n, key, block.count);
      const bool linear = !M::TERMS && !score.capped;
      if (linear && found.shallow == found.deep) block.share = levels.share(found.deep);
      block.depths = found;
      D = levels.prefix(found.deep);
    }
    block.keys = Form::across(call.k, b, key_head, start, block.count, D, buffer.keys);
    block.values = Form::down(call.v, b, key_head, start, block.count, call.E, buffer.values);
    for (int64_t p = 0; p < panels; p++)
      add_block<M>(call, score, buffer, block, Panel<Form>(call, buffer, item, p));
  }
  for (int64_t p = 0; p < panels; p++) finish_panel(call, Panel<Form>(call, buffer, item, p), buffer.rows);
}

[[maybe_unused]] static int64_t forward_scratch_bytes(const ab_call &call) {
  Arena scratch;
  TileOrder(call.layout, divide_up(call.Q, call.layout.tile), scratch);
  return scratch.bytes;
}

template <class Form>
static int32_t forward(const ab_call &call, Arena scratch) {
  const ab_layout &layout = call.layout;
  const int64_t tiles = divide_up(call.Q, layout.tile);
  const TileOrder order(layout, tiles, scratch);
  Arena needed;
  ForwardBuffer<Form>(call, needed);
  return run_items(call.B * call.H * tiles, call.threads, needed.bytes, [&](int64_t i, Arena memory) {
    Item item = item_at(call, i, tiles);
    item.tile = order.of_group[item.group * tiles + item.tile];
    with_mode<Form>(has_terms(call), has_levels(call),
                    [&](auto mode) { forward_item<decltype(mode)>(call, item, memory); });
  });
}

}  // namespace AB_ISA::tiles
