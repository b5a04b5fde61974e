// Attention over the pairs that a layout keeps as edges: forward by rows; backward by rows (dq, p and dS of
// each edge), then by columns (dk, dv).
//
// p and dS go from the row pass to the column pass in a buffer, for a wave of heads at a time that is small
// enough to stay in a cache; where one head's do not fit the budget they are computed again.
#pragma once

#include "edges/heads.h"

namespace AB_ISA::edges {

// Scratch of a wave of heads. Where the heads of a node lie together, all should go in one wave: rows with
// large strides would leave most of a cache unused.
constexpr int64_t WAVE_BYTES = 4 << 20, NODE_WAVE_BYTES = 32 << 20;

constexpr int64_t NEAR_BYTES = 1 << 20;  // of gathered rows, which a second cache holds

// Whether an edge of row i leads to a row that was not read lately: one outside a band about the diagonal
// and no neighbour of the row before.
AB_INLINE bool leads_far(const Lists &rows, const int32_t *edge_key, int64_t i, int64_t key, int64_t band) {
  if (key + band >= i && key <= i + band) return false;
  const int64_t begin = i ? rows.begin(0, i - 1) : 0, end = i ? rows.begin(0, i) : 0;
  for (int64_t e = begin; e < min64(end, begin + CHUNK); e++) {
    if (edge_key[e] == key) return false;
  }
  return true;
}

// Decide what to fetch by a sample of the first group's edges.
AB_INLINE Fetch what_to_fetch(const ab_call &call, bool backward, const Lists &rows) {
  const int64_t heads = by_node(call) ? call.Hk : 1, number = call.q.dtype == AB_FLOAT32 ? 4 : 2;
  const int64_t gathered = call.K + (backward ? call.Q : 0), bytes = heads * (call.D + call.E) * number;
  if (gathered * bytes <= NEAR_BYTES) return Fetch::nothing;
  const int64_t band = max64(ROWS_AHEAD, NEAR_BYTES / 2 / bytes);
  constexpr int64_t ROWS = 64, EDGES = 4;
  int64_t far = 0, seen = 0;
  for (int64_t s = 0; s < ROWS; s++) {
    const int64_t i = s * rows.rows / ROWS, begin = rows.begin(0, i), size = rows.size(0, i);
    if (size == 0) continue;
    for (int64_t t = 0; t < EDGES; t++, seen++) {
      const int32_t *edge_key = call.layout.edge_key;
      far += leads_far(rows, edge_key, i, edge_key[begin + t * size / EDGES], band);
    }
  }
  return 4 * far > seen ? Fetch::edges : Fetch::diagonal;
}

// How many numbers the scratch of one head holds.
struct HeadScratch {
  int64_t hand, stats, row_piece, column_piece;  // row_piece, column_piece: of one piece
  int64_t row_pieces, column_pieces;

  int64_t bytes() const {
    return 4 * (hand + stats + row_piece * row_pieces + column_piece * column_pieces);
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

// How a call is walked: `step` heads belong together, because one kernel takes them or they share a key.
struct Plan {
  const ab_call &call;
  const ab_call *before;
  int64_t fused;              // heads that go together where rows are short enough; 0 = one by one
  int64_t share;              // query heads of a key head
  int64_t step, steps, wave;  // wave in steps
  Fetch fetch;
  HeadScratch head;
  float *scratch;  // of the wave's heads

  Plan(const ab_call &the_call, const ab_call *the_tiles, bool backward, Arena &memory, const Lists &rows,
       int64_t column_pieces)
      : call(the_call), before(the_tiles), fused(fused_heads(call)), share(call.H / call.Hk) {
    const int64_t bytes = wave_bytes(call, backward);
    scratch = memory.cut<float>(bytes / 4);
    step = edge_step(call);
    steps = call.B * call.H / step;
    fetch = what_to_fetch(call, backward, rows);
    int64_t edges = 0;
    for (int64_t g = 0; g < rows.groups; g++) edges = max64(edges, rows.edges_of(g));
    head = head_scratch(call, backward, step, edges, rows.pieces, column_pieces);
    const bool some = head.hand || head.stats || rows.pieces || column_pieces;
    wave = some ? max64(1, min64(bytes / (step * head.bytes()), steps)) : steps;
  }

  // Asked for every column: no divisions where there is nothing to divide.
  int64_t group(int64_t unit) const {
    return call.layout.groups == 1 ? 0 : group_of(call.layout, unit / call.H, unit % call.H);
  }
  // Call body(head, task) for task t of `tasks` for each of `heads`. Where the heads of a node lie
  // together, tasks of equal rows follow each other.
  template <class Body>
  void with_task(int64_t t, int64_t heads, int64_t tasks, const Body &body) const {
    by_node(call) ? body(t % heads, t / heads) : body(t / tasks, t % tasks);
  }

  // Areas of the i-th head of the wave. Heads that go together have p and dS of an edge together.
  float *area(int64_t numbers) const { return scratch + wave * step * numbers; }
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

template <class T>
AB_INLINE Single<T> kernel_of(const Plan &plan, const Lists &rows, int64_t unit) {
  const int64_t H = plan.call.H;
  Single<T> kernel(plan.call, plan.before, unit / H, unit % H, rows.begin(plan.group(unit), 0));
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
// together the first has the ranges of all. Backward fills `hand` or `stats` for the columns.
template <bool BACKWARD, class T>
static void row_item(const Plan &plan, const Lists &rows, int64_t first, int64_t i, int64_t t) {
  const int64_t g = plan.group(first + i), together = max64(plan.fused, 1);
  const bool edges = !BACKWARD || plan.call.dq.data || plan.call.dedge_bias || plan.head.hand;
  float *const hand = plan.hand(i);
  if (t >= rows.items) {
    const int64_t p = t - rows.items;
    if (!edges || p >= rows.pieces_of(g)) return;
    const Single<T> kernel = kernel_of<T>(plan, rows, first + i);
    const Span piece = rows.span(g, p);
    float *const sums = plan.row_piece(i, p);
    return BACKWARD ? kernel.backward_piece(piece.row, piece.first, piece.last, hand, sums)
                    : kernel.forward_piece(piece.row, piece.first, piece.last, sums);
  }
  if (i % together) return;
  const Single<T> kernel = kernel_of<T>(plan, rows, first + i);
  const int32_t *ptr = rows.ptr + g * rows.rows;
  const int64_t end = rows.row_at(g, (t + 1) * ITEM);
  for (int64_t row = rows.row_at(g, t * ITEM), next; row < end; row = next) {
    next = batch_end(rows, g, row, end);
    const bool is_batch = next > row;
    if (!is_batch) next = row + 1;
    if (edges && is_batch)
      with_fused(plan.fused, [&](auto heads) AB_LAMBDA {
        constexpr int L = heads.value;
        if constexpr (L == 0)
          BACKWARD ? kernel.backward_rows(row, next, ptr, hand) : kernel.forward_rows(row, next, ptr);
        else
          BACKWARD ? backward_rows<L>(kernel, row, next, ptr, hand)
                   : forward_rows<L>(kernel, row, next, ptr);
      });
    const bool is_alone = edges && !is_batch && !Lists::is_long(rows.size(g, row));
    if (!is_alone && !plan.head.stats) continue;
    for (int64_t h = i; h < i + together; h++) {
      const Single<T> one = kernel_of<T>(plan, rows, first + h);
      if (plan.head.stats)
        for (int64_t j = row; j < next; j++) one.statistics(j, plan.stats(h) + 2 * j);
      if (!is_alone) continue;
      BACKWARD ? one.backward_row(row, ptr[row], ptr[next], plan.hand(h))
               : one.forward_row(row, ptr[row], ptr[next]);
    }
  }
}

// Merge the pieces of the row that begins at piece p.
template <bool BACKWARD, class T>
static void merge_row(const Plan &plan, const Lists &rows, int64_t first, int64_t i, int64_t p) {
  const int64_t g = plan.group(first + i);
  if (p >= rows.pieces_of(g)) return;
  const Span piece = rows.span(g, p);
  if (piece.part != 0) return;
  const Single<T> kernel = kernel_of<T>(plan, rows, first + i);
  const int64_t count = divide_up(rows.size(g, piece.row), PIECE);
  const float *pieces = plan.row_piece(i, p);
  BACKWARD ? kernel.backward_merge(piece.row, pieces, count, plan.head.row_piece)
           : kernel.forward_merge(piece.row, pieces, count, plan.head.row_piece);
}

AB_INLINE bool shares_bias(const ab_call &call) {
  const bool apart = (call.bias_batch || call.B == 1) && (call.bias_head || call.H == 1);
  return call.dedge_bias && !apart;
}

// Compute dk and dv of column j from all heads that share it; `i` counts these in the wave.
template <class T>
static void whole_column(const Plan &plan, const Lists &rows, const Lists &columns, const Single<T> &kernel,
                         int64_t first, int64_t i, int64_t j) {
  const int64_t D = plan.call.D, E = plan.call.E;
  const SumRow<T> key_row(kernel.dk, j), value_row(kernel.dv, j);
  RunningSum keys = {kernel.dk_before.row_or_null(j), key_row.at};
  RunningSum values = {kernel.dv_before.row_or_null(j), value_row.at};
  const auto add = [&](const Single<T> &head, int64_t s) AB_LAMBDA {
    const int64_t g = plan.group(first + i + s), begin = columns.begin(g, j), end = columns.begin(g, j + 1);
    if (begin == end) return;
    if (Lists::is_long(end - begin)) {
      int64_t p = columns.bound[g];
      while (columns.piece[p].row != j) p++;
      const float *pieces = plan.column_piece(i + s, p - columns.bound[g]);
      const int64_t count = divide_up(end - begin, PIECE), stride = plan.head.column_piece;
      keys.add(D, pieces, count, stride);
      values.add(E, pieces + round_up(D, 16), count, stride);
    } else {
      head.column(j, begin, end, plan.hand(i + s), plan.stats(i + s), keys, values);
    }
    keys.from = keys.to;
    values.from = values.to;
  };
  add(kernel, 0);
  for (int64_t s = 1; s < plan.share; s++) add(kernel_of<T>(plan, rows, first + i + s), s);
  if (keys.from != keys.to) keys.add(D, nullptr, 0, 0);
  if (values.from != values.to) values.add(E, nullptr, 0, 0);
}

// The first of the heads that share column j for which it is long; plan.share when there is none.
AB_INLINE int64_t first_long(const Plan &plan, const Lists &columns, int64_t unit, int64_t j) {
  int64_t s = 0;
  while (s < plan.share && !Lists::is_long(columns.size(plan.group(unit + s), j))) s++;
  return s;
}

// Item t of the columns that `step` heads share: a range of columns, or a piece of a long one.
template <class T>
static void column_item(const Plan &plan, const Lists &rows, const Lists &columns, int64_t first, int64_t i,
                        int64_t t) {
  const int64_t g = plan.group(first + i);
  if (t < columns.items) {
    const Single<T> kernel = kernel_of<T>(plan, rows, first + i);
    const int64_t begin = columns.row_at(g, t * ITEM), end = columns.row_at(g, (t + 1) * ITEM);
    return with_fused(plan.head.hand ? plan.fused : 0, [&](auto heads) AB_LAMBDA {
      constexpr int L = heads.value;
      if constexpr (L > 0) {
        if (i % L) return;
        return add_columns<L>(kernel, begin, end, columns.ptr + g * columns.rows, plan.hand(i));
      }
      for (int64_t j = begin; j < end; j++) {
        if (columns.pieces && first_long(plan, columns, first + i, j) < plan.share) continue;
        whole_column(plan, rows, columns, kernel, first, i, j);
      }
    });
  }
  const int64_t s = (t - columns.items) / columns.pieces, p = (t - columns.items) % columns.pieces;
  const int64_t of = plan.group(first + i + s);
  if (p >= columns.pieces_of(of)) return;
  const Single<T> kernel = kernel_of<T>(plan, rows, first + i + s);
  const Span piece = columns.span(of, p);
  float *sums = plan.column_piece(i + s, p);
  kernel.column(piece.row, piece.first, piece.last, plan.hand(i + s), plan.stats(i + s),
                {nullptr, kernel.dk.data ? sums : nullptr},
                {nullptr, kernel.dv.data ? sums + round_up(plan.call.D, 16) : nullptr});
}

// Merge the long column that begins at piece p of head s among those that share it.
template <class T>
static void merge_column(const Plan &plan, const Lists &rows, const Lists &columns, int64_t first,
                         int64_t i, int64_t s, int64_t p) {
  const int64_t g = plan.group(first + i + s);
  if (p >= columns.pieces_of(g)) return;
  const Span piece = columns.span(g, p);
  if (piece.part != 0 || first_long(plan, columns, first + i, piece.row) != s) return;
  whole_column(plan, rows, columns, kernel_of<T>(plan, rows, first + i), first, i, piece.row);
}

template <bool BACKWARD, class T>
static int32_t run_with(const ab_call &call, const ab_call *before, Arena scratch) {
  Arena none;
  const ab_layout &layout = call.layout;
  const Lists rows(layout.edge_ptr, call.Q, layout, scratch);
  const Lists columns(BACKWARD ? layout.col_ptr : nullptr, call.K, layout, BACKWARD ? scratch : none);
  const Plan plan(call, before, BACKWARD, scratch, rows, columns.pieces);
  const bool by_column = BACKWARD && hands_over(call);
  const bool by_row = !BACKWARD || by_column || call.dq.data || call.dedge_bias;
  const int64_t row_tasks = by_row ? rows.items + rows.pieces : 0;
  const int64_t share = plan.share, merges = by_column ? share * columns.pieces : 0;
  const int64_t column_tasks = by_column ? columns.items + merges : 0;
  // A gradient of the bias that sums over batches or heads: one task takes all heads of a group, in order.
  const bool in_order = BACKWARD && shares_bias(call);
#pragma omp parallel num_threads(call.threads)
  for (int64_t done = 0; done < plan.steps; done += plan.wave) {
    const int64_t first = done * plan.step, heads = min64(plan.wave, plan.steps - done) * plan.step;
    const int64_t units = in_order ? call.layout.groups : heads, key_heads = heads / share;
#pragma omp for schedule(dynamic, 1)
    for (int64_t t = 0; t < units * row_tasks; t++)
      plan.with_task(t, units, row_tasks, [&](int64_t unit, int64_t task) {
        if (!in_order) return row_item<BACKWARD, T>(plan, rows, first, unit, task);
        for (int64_t i = 0; i < heads; i++)
          if (plan.group(first + i) == unit) row_item<BACKWARD, T>(plan, rows, first, i, task);
      });
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t t = 0; t < heads * rows.pieces; t++)
      merge_row<BACKWARD, T>(plan, rows, first, t / rows.pieces, t % rows.pieces);
    // Runs in every pass, even without columns: the barrier after it ends the wave.
#pragma omp for schedule(dynamic, 1)
    for (int64_t t = 0; t < key_heads * column_tasks; t++)
      plan.with_task(t, key_heads, column_tasks, [&](int64_t head, int64_t task) {
        column_item<T>(plan, rows, columns, first, head * share, task);
      });
    if (merges == 0) continue;
#pragma omp for schedule(dynamic, 1)
    for (int64_t t = 0; t < key_heads * merges; t++) {
      const int64_t s = t % merges / columns.pieces, p = t % columns.pieces;
      merge_column<T>(plan, rows, columns, first, t / merges * share, s, p);
    }
  }
  return AB_OK;
}

static int64_t scratch_bytes(const ab_call &call, bool backward) {
  return list_bytes(call, backward) + wave_bytes(call, backward);
}

template <bool BACKWARD>
static int32_t run(const ab_call &call, const ab_call *before, Arena scratch) {
  return with_dtype(call.q.dtype, [&](auto type) {
    return run_with<BACKWARD, typename decltype(type)::Number>(call, before, scratch);
  });
}

}  // namespace AB_ISA::edges
