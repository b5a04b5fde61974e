// Attention over the pairs that a layout keeps as edges: forward by rows; backward by rows (dq, p and dS of
// each edge), then by columns (dk, dv).
//
// p and dS go from the row pass to the column pass in a buffer, for a wave of heads at a time that is small
// enough to stay in a cache; where one head's do not fit the budget they are computed again.
#ifndef ATTNBIAS_EDGES_H
#define ATTNBIAS_EDGES_H

#include "edge_heads.h"
#include "edge_lists.h"
#include "edge_single.h"
#include "edges_budget.h"
#include "items.h"

namespace AB_LEVEL {
namespace edge {

// Scratch of a wave of heads. Where the heads of a node lie together all should go in one wave, for else
// rows with large strides leave most of a cache unused.
constexpr int64_t WAVE_BYTES = 4 << 20, NODE_WAVE_BYTES = 32 << 20;

AB_INLINE bool by_node(const ab_call &call) { return call.k.head < call.k.row; }

constexpr int64_t NEAR_BYTES = 1 << 20;  // of gathered rows, which a second cache holds

// Whether an edge of row i leads where nothing was read lately: neither into a band about the diagonal nor
// to a neighbour of the row before.
AB_INLINE bool leads_far(const Lists &rows, const int32_t *edge_key, int64_t i, int64_t key, int64_t band) {
  if (key + band >= i && key <= i + band) return false;
  const int64_t begin = i ? rows.begin(0, i - 1) : 0, end = i ? rows.begin(0, i) : 0;
  for (int64_t e = begin; e < min64(end, begin + CHUNK); e++) {
    if (edge_key[e] == key) return false;
  }
  return true;
}

// What to fetch, by a sample of the first group's edges.
AB_INLINE Fetch what_to_fetch(const ab_call &call, bool backward, const Lists &rows) {
  const int64_t heads = by_node(call) ? call.Hk : 1, number = call.q.dtype == AB_FLOAT32 ? 4 : 2;
  const int64_t gathered = call.K + (backward ? call.Q : 0), bytes = heads * (call.D + call.E) * number;
  if (gathered * bytes <= NEAR_BYTES) return Fetch::nothing;
  const int64_t band = max64(ROWS_AHEAD, NEAR_BYTES / 2 / bytes);
  constexpr int64_t ROWS = 64, EDGES = 4;
  int64_t far = 0, seen = 0;
  for (int64_t s = 0; s < ROWS; s++) {
    const int64_t i = s * rows.rows / ROWS, begin = rows.begin(0, i), size = rows.size(0, i);
    for (int64_t t = 0; size && t < EDGES; t++, seen++) {
      const int32_t *edge_key = call.layout.edge_key;
      far += leads_far(rows, edge_key, i, edge_key[begin + t * size / EDGES], band);
    }
  }
  return 4 * far > seen ? Fetch::edges : Fetch::diagonal;
}

// Numbers that the scratch of one head holds, by kind.
struct HeadScratch {
  int64_t hand, stats, row_piece, column_piece;  // row_piece, column_piece: of one piece
  int64_t row_pieces, column_pieces;

  int64_t bytes() const {
    return 4 * (hand + stats + row_piece * row_pieces + column_piece * column_pieces);
  }
};

// How a call is walked: `step` heads belong together, because one kernel takes them or they share a key.
struct Plan {
  const ab_call &call;
  const ab_call *before;
  int64_t step, steps, wave;  // wave in steps
  int64_t share;              // query heads of a key head
  HeadScratch head;
  char *scratch;  // of the wave's heads
  int64_t fused;  // heads that go together where rows are short enough; 0 = one by one
  bool by_node;   // the heads of a node lie together: items of equal rows then follow each other
  Fetch fetch;

  // Asked for every column: no divisions where there is nothing to divide.
  int64_t group(int64_t unit) const {
    return call.layout.groups == 1 ? 0 : group_of(call.layout, unit / call.H, unit % call.H);
  }
  // Task t of `tasks` for each of `heads`: which head, and which of its tasks.
  int64_t head_of(int64_t t, int64_t heads, int64_t tasks) const { return by_node ? t % heads : t / tasks; }
  int64_t task_of(int64_t t, int64_t heads, int64_t tasks) const { return by_node ? t / heads : t % tasks; }

  // What belongs to the i-th head of the wave. Heads that go together have p and dS of an edge together.
  float *area(int64_t numbers) const { return (float *)(void *)scratch + wave * step * numbers; }
  float *hand(int64_t i) const {
    if (!head.hand) return nullptr;
    return fused ? area(0) + i / fused * fused * head.hand + i % fused : area(0) + i * head.hand;
  }
  float *stats(int64_t i) const { return head.stats ? area(head.hand) + i * head.stats : nullptr; }
  float *row_piece(int64_t i, int64_t p) const {
    return area(head.hand + head.stats) + (i * head.row_pieces + p) * head.row_piece;
  }
  float *column_piece(int64_t i, int64_t p) const {
    return area(head.hand + head.stats + head.row_pieces * head.row_piece) +
           (i * head.column_pieces + p) * head.column_piece;
  }
};

AB_INLINE bool hands_over(const ab_call &call) { return call.dk.data || call.dv.data; }

AB_INLINE HeadScratch head_scratch(const ab_call &call, bool backward, int64_t step, int64_t edges,
                                   int64_t row_pieces, int64_t column_pieces) {
  HeadScratch head = {0, 0, round_up(backward ? call.D : call.E + 2, 16), 0, row_pieces, 0};
  if (!backward || !hands_over(call)) return head;
  const bool fits = 8 * edges * step <= ab_edge_budget;
  (fits ? head.hand : head.stats) = round_up(2 * (fits ? edges : call.Q), 16);
  head.column_piece = round_up(call.D, 16) + round_up(call.E, 16);
  head.column_pieces = column_pieces;
  return head;
}

AB_INLINE int64_t edge_step(const ab_call &call) {
  const int64_t fused = fused_heads(call);
  return fused ? fused : call.H / call.Hk;
}

static int64_t wave_bytes(const ab_call &call, bool backward) {
  const int64_t edges = call.layout.edges, step = edge_step(call), pieces = 2 * edges / PIECE;
  const HeadScratch head = head_scratch(call, backward, step, edges, pieces, pieces);
  const int64_t one = step * head.bytes();
  const int64_t most = by_node(call) ? NODE_WAVE_BYTES : WAVE_BYTES;
  return one == 0 ? 0 : max64(one, min64(most / one, call.B * call.H / step) * one);
}

AB_INLINE Plan make_plan(const ab_call &call, const ab_call *before, bool backward, char *scratch,
                         const Lists &rows, const Lists &columns) {
  Plan plan = {
      call,          before, edge_step(call), 0, 0, call.H / call.Hk, {}, scratch, fused_heads(call),
      by_node(call), {}};
  plan.fetch = what_to_fetch(call, backward, rows);
  int64_t edges = 0;
  for (int64_t g = 0; g < rows.groups; g++) edges = max64(edges, rows.edges_of(g));
  plan.head = head_scratch(call, backward, plan.step, edges, rows.pieces, columns.pieces);
  plan.steps = call.B * call.H / plan.step;
  const int64_t one = plan.step * plan.head.bytes();
  const bool some = plan.head.hand || plan.head.stats || rows.pieces || columns.pieces;
  plan.wave = some ? max64(1, min64(wave_bytes(call, backward) / one, plan.steps)) : plan.steps;
  return plan;
}

template <class Kernel>
AB_INLINE Kernel kernel_of(const Plan &plan, const Lists &rows, int64_t unit) {
  const int64_t H = plan.call.H;
  Kernel kernel(plan.call, plan.before, unit / H, unit % H, rows.begin(plan.group(unit), 0));
  kernel.fetch = plan.fetch;
  if (plan.fused) kernel.hand_edge = 2 * plan.fused, kernel.hand_ds = plan.fused;
  return kernel;
}

// The end of a batch of rows from `row` on that one buffer serves; `row` when it is too long for that.
AB_INLINE int64_t batch_end(const Lists &rows, int64_t g, int64_t row, int64_t end) {
  int64_t next = row;
  while (next < end && next - row < BATCH && rows.begin(g, next + 1) - rows.begin(g, row) <= CHUNK) next++;
  return next;
}

// Item t of a head's rows: a range of rows, or beyond the items a piece of a long one. Of heads that go
// together the first has the ranges of all.
template <class Kernel>
static void forward_item(const Plan &plan, const Lists &rows, int64_t first, int64_t i, int64_t t) {
  const int64_t g = plan.group(first + i), together = max64(plan.fused, 1);
  if (t < rows.items && i % together) return;
  const Kernel kernel = kernel_of<Kernel>(plan, rows, first + i);
  if (t < rows.items) {
    const int64_t end = rows.row_at(g, (t + 1) * ITEM);
    for (int64_t row = rows.row_at(g, t * ITEM), next; row < end; row = next) {
      next = batch_end(rows, g, row, end);
      if (next > row) {
        const int32_t *ptr = rows.ptr + g * rows.rows;
        if (!plan.fused) kernel.forward_rows(row, next, ptr);
        if (plan.fused == 8) fused_forward<8>(kernel, row, next, ptr);
        if (plan.fused == 4) fused_forward<4>(kernel, row, next, ptr);
        continue;
      }
      next = row + 1;
      for (int64_t h = 0; h < together && !Lists::is_long(rows.size(g, row)); h++) {
        const Kernel one = kernel_of<Kernel>(plan, rows, first + i + h);
        one.forward_row(row, rows.begin(g, row), rows.begin(g, next));
      }
    }
  } else if (t - rows.items < rows.bound[g + 1] - rows.bound[g]) {
    const int64_t p = t - rows.items;
    const Piece piece = rows.piece[rows.bound[g] + p];
    const int64_t begin = rows.begin(g, piece.row) + piece.part * PIECE;
    kernel.forward_piece(piece.row, begin, min64(begin + PIECE, rows.begin(g, piece.row + 1)),
                         plan.row_piece(i, p));
  }
}

// Merge the pieces of the row that begins at piece p.
template <class Kernel>
static void merge_row(const Plan &plan, const Lists &rows, bool backward, int64_t first, int64_t i,
                      int64_t p) {
  const int64_t g = plan.group(first + i);
  if (p >= rows.bound[g + 1] - rows.bound[g]) return;
  const Piece piece = rows.piece[rows.bound[g] + p];
  if (piece.part != 0) return;
  const Kernel kernel = kernel_of<Kernel>(plan, rows, first + i);
  const int64_t count = divide_up(rows.size(g, piece.row), PIECE);
  if (backward) {
    kernel.backward_merge(piece.row, plan.row_piece(i, p), count, plan.head.row_piece);
  } else {
    kernel.forward_merge(piece.row, plan.row_piece(i, p), count, plan.head.row_piece);
  }
}

template <class Kernel>
static int32_t forward_with(const ab_call &call, const ab_call *before, char *scratch) {
  const ab_layout &layout = call.layout;
  const Lists rows = make_lists(layout.edge_ptr, call.Q, layout.groups, scratch);
  const Lists none = {};
  const Plan plan =
      make_plan(call, before, false, scratch + Lists::bytes(layout.groups, layout.edges), rows, none);
  const int64_t tasks = rows.items + rows.pieces;
#pragma omp parallel num_threads(call.threads)
  for (int64_t done = 0; done < plan.steps; done += plan.wave) {
    const int64_t first = done * plan.step, heads = min64(plan.wave, plan.steps - done) * plan.step;
#pragma omp for schedule(dynamic, 1)
    for (int64_t t = 0; t < heads * tasks; t++) {
      forward_item<Kernel>(plan, rows, first, plan.head_of(t, heads, tasks), plan.task_of(t, heads, tasks));
    }
    if (rows.pieces == 0) continue;
#pragma omp for schedule(dynamic, 1)
    for (int64_t t = 0; t < heads * rows.pieces; t++) {
      merge_row<Kernel>(plan, rows, false, first, t / rows.pieces, t % rows.pieces);
    }
  }
  return AB_OK;
}

// As forward_item; what later passes need of a row is kept in `hand` or `stats`.
template <class Kernel>
static void backward_item(const Plan &plan, const Lists &rows, int64_t first, int64_t i, int64_t t) {
  const int64_t g = plan.group(first + i), together = max64(plan.fused, 1);
  if (t < rows.items && i % together) return;
  const Kernel kernel = kernel_of<Kernel>(plan, rows, first + i);
  const bool edges = plan.call.dq.data || plan.call.dedge_bias || plan.head.hand;
  if (t < rows.items) {
    const int64_t end = rows.row_at(g, (t + 1) * ITEM);
    for (int64_t row = rows.row_at(g, t * ITEM), next; row < end; row = next) {
      next = batch_end(rows, g, row, end);
      const bool batch = next > row;
      next = batch ? next : row + 1;
      if (edges && batch) {
        const int32_t *ptr = rows.ptr + g * rows.rows;
        if (!plan.fused) kernel.backward_rows(row, next, ptr, plan.hand(i));
        if (plan.fused == 8) fused_backward<8>(kernel, row, next, ptr, plan.hand(i));
        if (plan.fused == 4) fused_backward<4>(kernel, row, next, ptr, plan.hand(i));
      }
      for (int64_t h = i; h < i + together; h++) {
        float *stats = plan.stats(h);
        const bool alone = edges && !batch && !Lists::is_long(rows.size(g, row));
        if (!stats && !alone) break;
        const Kernel one = kernel_of<Kernel>(plan, rows, first + h);
        for (int64_t j = row; stats && j < next; j++) one.statistics(j, stats + 2 * j);
        if (alone) one.backward_row(row, rows.begin(g, row), rows.begin(g, next), plan.hand(h));
      }
    }
  } else if (edges && t - rows.items < rows.bound[g + 1] - rows.bound[g]) {
    const int64_t p = t - rows.items;
    const Piece piece = rows.piece[rows.bound[g] + p];
    const int64_t begin = rows.begin(g, piece.row) + piece.part * PIECE;
    kernel.backward_piece(piece.row, begin, min64(begin + PIECE, rows.begin(g, piece.row + 1)),
                          plan.hand(i), plan.row_piece(i, p));
  }
}

AB_INLINE bool shares_bias(const ab_call &call) {
  const bool apart = (call.bias_batch || call.B == 1) && (call.bias_head || call.H == 1);
  return call.dedge_bias && !apart;
}

// A gradient of the bias sums over batches (or heads): one item then takes all heads of a group, in order.
template <class Kernel>
static void backward_items(const Plan &plan, const Lists &rows, int64_t first, int64_t heads, int64_t unit,
                           int64_t t) {
  if (!shares_bias(plan.call)) return backward_item<Kernel>(plan, rows, first, unit, t);
  for (int64_t i = 0; i < heads; i++) {
    if (plan.group(first + i) == unit) backward_item<Kernel>(plan, rows, first, i, t);
  }
}

// dk and dv of column j from all heads that share it; `i` counts these in the wave.
template <class Kernel>
static void whole_column(const Plan &plan, const Lists &rows, const Lists &columns, const Kernel &kernel,
                         int64_t first, int64_t i, int64_t j) {
  alignas(64) float key_sums[MOST], value_sums[MOST];
  const bool keys = kernel.dk.data, values = kernel.dv.data;
  const float *key_from = keys ? kernel.row_or_null(kernel.dk_before, j) : nullptr;
  const float *value_from = values ? kernel.row_or_null(kernel.dv_before, j) : nullptr;
  float *key_sum = keys ? collect(kernel.dk[j], key_sums) : nullptr;
  float *value_sum = values ? collect(kernel.dv[j], value_sums) : nullptr;
  const auto add = [&](const Kernel &head, int64_t s) AB_LAMBDA {
    const int64_t g = plan.group(first + i + s), begin = columns.begin(g, j), end = columns.begin(g, j + 1);
    if (begin == end) return;
    if (Lists::is_long(end - begin)) {
      int64_t p = columns.bound[g];
      while (columns.piece[p].row != j) p++;
      const float *pieces = plan.column_piece(i + s, p - columns.bound[g]);
      const int64_t count = divide_up(end - begin, PIECE), stride = plan.head.column_piece;
      if (keys) add_rows(key_from, plan.call.D, pieces, count, stride, key_sum);
      pieces += round_up(plan.call.D, 16);
      if (values) add_rows(value_from, plan.call.E, pieces, count, stride, value_sum);
    } else {
      head.column(j, begin, end, plan.hand(i + s), plan.stats(i + s), key_from, key_sum, value_from,
                  value_sum);
    }
    key_from = key_sum;
    value_from = value_sum;
  };
  add(kernel, 0);
  for (int64_t s = 1; s < plan.share; s++) add(kernel_of<Kernel>(plan, rows, first + i + s), s);
  if (keys && key_from != key_sum) scale_row(1.0f, key_from, plan.call.D, key_sum);
  if (values && value_from != value_sum) scale_row(1.0f, value_from, plan.call.E, value_sum);
  if (keys) narrow(kernel.dk[j], key_sum, plan.call.D);
  if (values) narrow(kernel.dv[j], value_sum, plan.call.E);
}

// The first of the heads that share column j for which it is long; share() when there is none.
AB_INLINE int64_t first_long(const Plan &plan, const Lists &columns, int64_t unit, int64_t j) {
  int64_t s = 0;
  while (s < plan.share && !Lists::is_long(columns.size(plan.group(unit + s), j))) s++;
  return s;
}

// Item t of the columns that `step` heads share: a range of columns, or a piece of a long one.
template <class Kernel>
static void column_item(const Plan &plan, const Lists &rows, const Lists &columns, int64_t first, int64_t i,
                        int64_t t) {
  const int64_t g = plan.group(first + i);
  if (t < columns.items) {
    const Kernel kernel = kernel_of<Kernel>(plan, rows, first + i);
    const int64_t end = columns.row_at(g, (t + 1) * ITEM);
    const int64_t begin = columns.row_at(g, t * ITEM), fused = plan.head.hand ? plan.fused : 0;
    const int32_t *ptr = columns.ptr + g * columns.rows;
    if (fused == 8 && i % 8 == 0) fused_columns<8>(kernel, begin, end, ptr, plan.hand(i));
    if (fused == 4 && i % 4 == 0) fused_columns<4>(kernel, begin, end, ptr, plan.hand(i));
    for (int64_t j = begin; !fused && j < end; j++) {
      if (columns.pieces && first_long(plan, columns, first + i, j) < plan.share) continue;
      whole_column(plan, rows, columns, kernel, first, i, j);
    }
    return;
  }
  const int64_t s = (t - columns.items) / columns.pieces, p = (t - columns.items) % columns.pieces;
  const int64_t of = plan.group(first + i + s);
  if (p >= columns.bound[of + 1] - columns.bound[of]) return;
  const Kernel kernel = kernel_of<Kernel>(plan, rows, first + i + s);
  const Piece piece = columns.piece[columns.bound[of] + p];
  const int64_t begin = columns.begin(of, piece.row) + piece.part * PIECE;
  float *sums = plan.column_piece(i + s, p);
  kernel.column(piece.row, begin, min64(begin + PIECE, columns.begin(of, piece.row + 1)), plan.hand(i + s),
                plan.stats(i + s), nullptr, kernel.dk.data ? sums : nullptr, nullptr,
                kernel.dv.data ? sums + round_up(plan.call.D, 16) : nullptr);
}

// Merge the long column that begins at piece p of head s among those that share it.
template <class Kernel>
static void merge_column(const Plan &plan, const Lists &rows, const Lists &columns, int64_t first,
                         int64_t i, int64_t s, int64_t p) {
  const int64_t g = plan.group(first + i + s);
  if (p >= columns.bound[g + 1] - columns.bound[g]) return;
  const Piece piece = columns.piece[columns.bound[g] + p];
  if (piece.part != 0 || first_long(plan, columns, first + i, piece.row) != s) return;
  whole_column(plan, rows, columns, kernel_of<Kernel>(plan, rows, first + i), first, i, piece.row);
}

template <class Kernel>
static int32_t backward_with(const ab_call &call, const ab_call *before, char *scratch) {
  const ab_layout &layout = call.layout;
  const int64_t bytes = Lists::bytes(layout.groups, layout.edges);
  const Lists rows = make_lists(layout.edge_ptr, call.Q, layout.groups, scratch);
  const Lists columns = make_lists(layout.col_ptr, call.K, layout.groups, scratch + bytes);
  const Plan plan = make_plan(call, before, true, scratch + 2 * bytes, rows, columns);
  const bool by_column = hands_over(call), by_row = by_column || call.dq.data || call.dedge_bias;
  const int64_t row_tasks = by_row ? rows.items + rows.pieces : 0;
  const int64_t share = plan.share, merges = by_column ? share * columns.pieces : 0;
  const int64_t column_tasks = by_column ? columns.items + merges : 0;
#pragma omp parallel num_threads(call.threads)
  for (int64_t done = 0; done < plan.steps; done += plan.wave) {
    const int64_t steps = min64(plan.wave, plan.steps - done), first = done * plan.step;
    const int64_t heads = steps * plan.step, units = shares_bias(call) ? layout.groups : heads;
    const int64_t key_heads = heads / share;
#pragma omp for schedule(dynamic, 1)
    for (int64_t t = 0; t < units * row_tasks; t++) {
      backward_items<Kernel>(plan, rows, first, heads, plan.head_of(t, units, row_tasks),
                             plan.task_of(t, units, row_tasks));
    }
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t t = 0; t < heads * rows.pieces; t++) {
      merge_row<Kernel>(plan, rows, true, first, t / rows.pieces, t % rows.pieces);
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t t = 0; t < key_heads * column_tasks; t++) {
      column_item<Kernel>(plan, rows, columns, first, plan.head_of(t, key_heads, column_tasks) * share,
                          plan.task_of(t, key_heads, column_tasks));
    }
    if (merges == 0) continue;
#pragma omp for schedule(dynamic, 1)
    for (int64_t t = 0; t < key_heads * merges; t++) {
      const int64_t s = t % merges / columns.pieces, p = t % columns.pieces;
      merge_column<Kernel>(plan, rows, columns, first, t / merges * share, s, p);
    }
  }
  return AB_OK;
}

}  // namespace edge

static int64_t edges_scratch_bytes(const ab_call &call, bool backward) {
  const int64_t lists = edge::Lists::bytes(call.layout.groups, call.layout.edges);
  return (backward ? 2 : 1) * lists + edge::wave_bytes(call, backward);
}

static int32_t edges_forward(const ab_call &call, const ab_call *before, char *scratch) {
  switch (call.q.dtype) {
    case AB_FLOAT32: return edge::forward_with<edge::Single<float>>(call, before, scratch);
    case AB_BFLOAT16: return edge::forward_with<edge::Single<Bfloat16>>(call, before, scratch);
    default: return edge::forward_with<edge::Single<Float16>>(call, before, scratch);
  }
}

static int32_t edges_backward(const ab_call &call, const ab_call *before, char *scratch) {
  switch (call.q.dtype) {
    case AB_FLOAT32: return edge::backward_with<edge::Single<float>>(call, before, scratch);
    case AB_BFLOAT16: return edge::backward_with<edge::Single<Bfloat16>>(call, before, scratch);
    default: return edge::backward_with<edge::Single<Float16>>(call, before, scratch);
  }
}

}  // namespace AB_LEVEL

#endif
