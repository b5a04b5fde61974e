// The forward pass over tiles: out = softmax(scores) v, one query tile after the other.
//
// Lanes are queries. Q^T is packed in panels of LANES queries, scaled; K and V are read where they lie:
//   S^T [keys, lanes] = K Q^T,  P^T = 2^(factor S^T - top),  O^T [E, lanes] += V^T P^T.
// So maxima, sums and rescaling need no work across lanes, and D, E and the number of keys may be any.
#ifndef ATTNBIAS_TILES_FORWARD_H
#define ATTNBIAS_TILES_FORWARD_H

#include "few_forward.h"
#include "levels.h"
#include "philox.h"

namespace AB_LEVEL::tiles {

// Keys next to each other that some query of a panel is related to.
struct Run {
  int64_t first, count;
};

struct Block {
  Rows keys, values;
  int64_t first, count;  // keys
  const int32_t *bits;   // of the first key, for the first panel; NULL = every pair is related
  Depths depths;         // of a multi-level score
  float share;           // what scores of one depth are multiplied by, last: it is not in the products then
};

// The state of one panel of queries.
struct Panel {
  const float *queries;  // [D, LANES]
  float *out;            // [E, LANES], not divided by `total` yet
  float *top, *total;    // [LANES]: largest score in units of log 2, sum of 2^(score - top)
  int64_t b, h, first;   // the first query
  int64_t count;         // of queries
  float *ended;          // [ROWS, LANES]: see add_parts
};

// The products of `MR` keys with a panel become raw scores, -inf where unrelated; `top` follows their
// maximum. With TERMS `scores` holds the bias before, and whole scores after.
template <int MR, bool TERMS>
AB_INLINE void score_keys(const Score &score, const Sums<MR, 2> &sums, const uint32_t *related,
                          float *scores, F top[2]) {
  AB_UNROLL
  for (int r = 0; r < MR; r++) {
    AB_UNROLL
    for (int c = 0; c < 2; c++) {
      F x = score.raw(sums.at[r][c]);
      if (TERMS) x = score.with_bias(x, load(scores + r * LANES + c * VL));
      if (related) x = choose(related[r] >> (c * VL), x, splat(-INFINITY));
      top[c] = maximum(top[c], x);
      store(scores + r * LANES + c * VL, x);
    }
  }
}

// All scores of a block; returns the number of runs of keys that have any.
template <class M>
static int64_t score_block(const ab_call &call, const Score &score, const Block &block, const Panel &panel,
                           int64_t lane, const PanelBias *bias, const TileBlocks &blocks, float *scores,
                           Run *runs, F top[2]) {
  uint32_t related[BLOCK];
  int64_t end = block.count;
  if (block.bits) {
    const int32_t *word = block.bits + lane / 32;
    const uint32_t all = (uint32_t)((1ull << LANES) - 1);
    for (int64_t j = 0; j < block.count; j++, word += call.layout.tile / 32)
      related[j] = (uint32_t)*word >> lane % 32 & all;
    while (end && !related[end - 1]) end--;
  }
  Levels levels(call);
  levels.per_pair &= block.share == 1.0f;
  int64_t count = 0;
  for (int64_t j = 0; j < end;) {
    if (block.bits && !related[j]) {
      j++;
      continue;
    }
    int n = strip_of(end - j);
    while (block.bits && !related[j + n - 1]) n--;
    Rows keys = {block.keys.at + j * block.keys.row, block.keys.row};
    if (M::MORE) bias->fill(j, n, scores + j * LANES);
    with_rows(n, [&](auto rows) AB_LAMBDA {
      Sums<rows.value, 2> sums;
      if constexpr (M::LEVELS) {
        const int32_t *of_keys = blocks.keys + j, *of_lanes = blocks.queries + lane;
        const Depths depths = blocks.narrow(block.depths, of_lanes, panel.count, of_keys, n);
        multiply_levels(sums, panel.ended, levels, depths, keys, panel.queries, blocks, of_keys, of_lanes);
      } else {
        multiply_rows(sums, panel.ended, call.D, keys.at, keys.row, panel.queries, LANES);
      }
      score_keys<rows.value, M::MORE>(score, sums, block.bits ? related + j : nullptr, scores + j * LANES,
                                      top);
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
template <int MR>
AB_INLINE void add_values(Rows values, const float *probs, const Run *runs, int64_t count,
                          const float *keep, float *out) {
  Sums<MR, 2> sums;
  clear(sums);
  for (const Run *run = runs; run < runs + count; run++)
    add_columns(sums, run->count, values.at + run->first * values.row, values.row,
                probs + run->first * LANES, LANES);
  if (keep) {
    AB_UNROLL
    for (int r = 0; r < MR; r++) {
      AB_UNROLL
      for (int c = 0; c < 2; c++)
        sums.at[r][c] = load(out + r * LANES + c * VL) * load(keep + c * VL) + sums.at[r][c];
    }
  } else {
    add(sums, out, LANES);
  }
  store(sums, out, LANES);
}

// Weights of dropped pairs become 0.
static void drop_keys(const ab_call &call, const Block &block, const Panel &panel, const Run *runs,
                      int64_t count, float *weights) {
  const Dropout dropout(call);
  U position[2];
  for (int c = 0; c < 2; c++)
    for (int l = 0; l < VL; l++) position[c][l] = (uint32_t)(panel.first + c * VL + l) + dropout.q_start;
  const U head = splat((uint32_t)panel.h), batch = splat((uint32_t)panel.b), limit = splat(dropout.limit);
  for (const Run *run = runs; run < runs + count; run++) {
    const int64_t end = run->first + run->count;
    for (int64_t j = run->first / 4 * 4; j < end; j += 4) {
      const U quad = splat((uint32_t)(block.first + j) >> 2);
      AB_UNROLL
      for (int c = 0; c < 2; c++) {
        U word[4];
        dropout.words(quad, position[c], head, batch, word);
        AB_UNROLL
        for (int i = 0; i < 4; i++) {
          if (j + i < run->first || j + i >= end) continue;
          float *x = weights + (j + i) * LANES + c * VL;
          store(x, word[i] > limit ? load(x) : F{});
        }
      }
    }
  }
}

// Multiply the scores and round them, as the row's maximum was: the FMA below would subtract that from a
// product that is not rounded, and of large scores leave more than a float's exponent. Returns what is left
// to multiply by.
static F round_scores(float *scores, const Run *runs, int64_t count, F factor) {
  for (const Run *run = runs; run < runs + count; run++)
    for (float *x = scores + run->first * LANES; x < scores + (run->first + run->count) * LANES; x += VL)
      store(x, load(x) * factor);
  return splat(1.0f);
}

// Add a block of keys to a panel of queries that starts at `lane` of the tile.
template <class M>
static void add_block(const ab_call &call, const Score &score, const Block &block, const Panel &panel,
                      int64_t lane, const PanelBias *bias, const TileBlocks &blocks, float *scores) {
  Run runs[BLOCK];
  F top[2] = {splat(-INFINITY), splat(-INFINITY)};
  int64_t count = score_block<M>(call, score, block, panel, lane, bias, blocks, scores, runs, top);
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
      // In three levels: where scores repeat, as those of a table do, all roundings of a sum go one way.
      const float *end = x + min64(stop - x, 16 * LANES);
      F few[2] = {};
      for (; x < end; x += LANES) {
        AB_UNROLL
        for (int c = 0; c < 2; c++) {
          F p = exp2_of(load(x + c * VL) * factor - top[c]);
          few[c] += p;
          store(x + c * VL, p);
        }
      }
      for (int c = 0; c < 2; c++) sum[c] += few[c];
    }
  }
  for (int c = 0; c < 2; c++) {
    store(panel.top + c * VL, top[c]);
    store(panel.total + c * VL, total[c] + sum[c]);
  }
  if (call.drop_below) drop_keys(call, block, panel, runs, count, scores);
  for (int64_t e = 0; e < call.E;) {
    int n = strip_of(call.E - e);
    with_rows(n, [&](auto rows) AB_LAMBDA {
      Rows values = {block.values.at + e, block.values.row};
      add_values<rows.value>(values, scores, runs, count, moved ? keep : nullptr, panel.out + e * LANES);
    });
    e += n;
  }
}

// What a thread keeps of a query tile.
struct ForwardBuffer {
  float *queries, *out;   // [panels, D, LANES], [panels, E, LANES]
  float *top, *total;     // [panels, LANES]
  float *scores, *ended;  // [BLOCK, LANES], [ROWS, LANES]
  float *keys, *values;   // [BLOCK, D], [BLOCK, E], for half precision

  // Lay out from `memory` on, which moves to the end.
  ForwardBuffer(const ab_call &call, char *&memory) {
    int64_t lanes = round_up(call.layout.tile, LANES);
    queries = cut<float>(memory, lanes * call.D);
    out = cut<float>(memory, lanes * call.E);
    top = cut<float>(memory, lanes);
    total = cut<float>(memory, lanes);
    scores = cut<float>(memory, BLOCK * LANES);
    ended = cut<float>(memory, ROWS * LANES);
    keys = cut<float>(memory, BLOCK * call.D);
    values = cut<float>(memory, BLOCK * call.E);
  }
};

// Divide by the sums and write out and lse.
static void finish_panel(const ab_call &call, const Panel &panel, float *rows) {
  alignas(64) float share[LANES];
  const int64_t b = panel.b, h = panel.h, first = panel.first, n = panel.count;
  float *lse = call.lse + (b * call.H + h) * call.Q + first;
  for (int64_t i = 0; i < LANES; i++) share[i] = call.drop_below ? call.kept_share : 1;
  for (int64_t c = 0; call.sink && c < LANES; c += VL) {
    F top = load(panel.top + c), total = load(panel.total + c);
    store(share + c, load(share + c) * add_sink(call.sink[h], top, total));
    store(panel.top + c, top);
    store(panel.total + c, total);
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
static void divide_by_ranks(const ab_call &call, float *panel) {
  const Levels levels(call);
  for (int l = 0; l < levels.count; l++) {
    const F factor = splat(1.0f / (float)(levels.prefix(l + 1) - levels.prefix(l)));
    for (int64_t i = levels.prefix(l) * LANES; i < levels.prefix(l + 1) * LANES; i += VL)
      store(panel + i, load(panel + i) * factor);
  }
}

// The depths of the pairs of a block, and which dims of its keys are read.
AB_INLINE int64_t find_depths(const ab_call &call, bool full, int32_t mark, int64_t i, int64_t n,
                              bool linear, Block &block, const TileBlocks &blocks) {
  const Levels levels(call);
  block.depths = full ? Depths{mark, mark} : levels.of_tile(i, n, block.first, block.count);
  if (linear && block.depths.shallow == block.depths.deep) block.share = levels.share(block.depths.deep);
  blocks.fill(levels, block.depths, i, n, block.first, block.count);
  return levels.prefix(block.depths.deep);
}

// One query tile of one head.
template <class M>
static void forward_item(const ab_call &call, const Item &item, char *memory) {
  ForwardBuffer buffer(call, memory);
  const TileBlocks blocks(call, memory);
  const Score score(call, LOG2_E, M::MORE);
  const ab_layout &layout = call.layout;
  const int64_t tile = layout.tile, first = item.tile * tile, n = min64(tile, call.Q - first);
  const int64_t b = item.b, h = item.h, key_head = h / (call.H / call.Hk);
  const int32_t *bounds =
      class_bounds(layout, layout.q_ptr, item.group * tiles_of(call.Q, tile) + item.tile);
  const int32_t partial = bounds[layout.classes - 1], end = bounds[layout.classes];
  const int64_t panels = (n + LANES - 1) / LANES;
  // The rows pass through the buffer of the scores' tile on their way to the panels.
  for (int64_t p = 0; p < panels; p++) {
    int64_t start = p * LANES, here = min64(LANES, n - start);
    Rows rows = rows_as_float(call.q, b, h, first + start, here, call.D, call.D, buffer.keys);
    pack_panels(rows, here, call.D, score.sign, buffer.queries + start * call.D);
    if (M::LEVELS) divide_by_ranks(call, buffer.queries + start * call.D);
  }
  memset(buffer.out, 0, (size_t)(panels * LANES * call.E) * sizeof(float));
  memset(buffer.total, 0, (size_t)(panels * LANES) * sizeof(float));
  for (int64_t i = 0; i < panels * LANES; i++) buffer.top[i] = LOWEST;
  auto panel_at = [&](int64_t p) {
    return Panel{buffer.queries + p * LANES * call.D,
                 buffer.out + p * LANES * call.E,
                 buffer.top + p * LANES,
                 buffer.total + p * LANES,
                 b,
                 h,
                 first + p * LANES,
                 min64(LANES, n - p * LANES),
                 buffer.ended};
  };
  for (int64_t i = bounds[0]; i < end;) {
    const bool full = i < partial;
    const int64_t start = layout.q_tile[i] * tile;
    const int32_t mark = layout.q_mark[i];
    Block block = {{}, {}, start, min64(tile, call.K - start), nullptr, {}, 1.0f};
    if (!full) block.bits = layout.patterns_t + mark * tile * (tile / 32);
    // Full tiles side by side are one block, if they have one depth.
    for (i++; full && i < partial && block.count < BLOCK &&
              layout.q_tile[i] * tile == start + block.count && (!M::LEVELS || layout.q_mark[i] == mark);
         i++)
      block.count += tile;
    const bool linear = !M::MORE && !score.capped;
    const int64_t D = M::LEVELS ? find_depths(call, full, mark, first, n, linear, block, blocks) : call.D;
    block.keys = rows_as_float(call.k, b, key_head, start, block.count, D, D, buffer.keys);
    block.values = rows_as_float(call.v, b, key_head, start, block.count, call.E, call.E, buffer.values);
    for (int64_t p = 0; p < panels; p++) {
      const Panel panel = panel_at(p);
      if constexpr (M::MORE) {
        PanelBias bias(call, b, h, panel.first, panel.count);
        bias.start_block(block.first, block.count);
        add_block<M>(call, score, block, panel, p * LANES, &bias, blocks, buffer.scores);
      } else {
        add_block<M>(call, score, block, panel, p * LANES, nullptr, blocks, buffer.scores);
      }
    }
  }
  for (int64_t p = 0; p < panels; p++) finish_panel(call, panel_at(p), buffer.values);
}

// The order of the tiles, when the layout has several groups.
AB_INLINE int64_t forward_scratch_bytes(const ab_call &call) {
  const ab_layout &layout = call.layout;
  if (takes_few(call)) return few_forward_scratch_bytes(call);
  if (layout.groups == 1) return 0;
  return 4 * layout.groups * (tiles_of(call.Q, layout.tile) + 1) + 2 * 64;
}

static int32_t tiles_forward(const ab_call &call, char *scratch) {
  const ab_layout &layout = call.layout;
  const int64_t tiles = tiles_of(call.Q, layout.tile);
  if (takes_few(call)) return few_forward(call, scratch);
  const bool terms = has_terms(call), levels = has_levels(call);
  int32_t *sorted = cut<int32_t>(scratch, layout.groups * tiles);
  const int32_t *order =
      order_by_group(layout.q_order, layout.groups, tiles, sorted, cut<int32_t>(scratch, layout.groups));
  char *end = nullptr;
  ForwardBuffer(call, end);
  TileBlocks(call, end);
  const int64_t bytes = (int64_t)(uintptr_t)end;
  return run_items(call.B * call.H * tiles, call.threads, bytes, [&](int64_t i, char *memory) {
    const int64_t b = i / tiles / call.H, h = i / tiles % call.H, g = group_of(layout, b, h);
    const Item item = {b, h, g, order[g * tiles + i % tiles]};
    if (levels)
      terms ? forward_item<Mode<true, true>>(call, item, memory)
            : forward_item<Mode<false, true>>(call, item, memory);
    else
      terms ? forward_item<Mode<true, false>>(call, item, memory)
            : forward_item<Mode<false, false>>(call, item, memory);
  });
}

}  // namespace AB_LEVEL::tiles

#endif
