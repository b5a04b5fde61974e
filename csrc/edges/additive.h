// Scores of graph attention networks, sum_d weight[h, d] * LeakyReLU(q_d + k_d), on edges.
//
// They are written as a bias of each edge. The edge kernels then run with D = 0, so that the bias is the
// whole score, and its gradient goes back to q, k and the weight here.
#pragma once

#include "edges/edges.h"

namespace AB_ISA::additive {

using edges::CHUNK;
using edges::ITEM;
using edges::Lists;
using edges::MOST;

AB_INLINE F leaky(F x, float slope) { return x > F{} ? x : x * splat(slope); }
AB_INLINE F steepness(F x, float slope) { return x > F{} ? splat(1.0f) : splat(slope); }

AB_INLINE int64_t most_items(const ab_call &call, int64_t rows) {
  return divide_up(call.layout.edges + edges::ROW_COST * rows, ITEM);
}

// Scores [B, edges, H] by place in edge_key, and their gradients; sums of the weight's gradient by item.
struct Buffers {
  float *scores, *dscores, *dweight;

  Buffers(const ab_call &call, bool backward, Arena &scratch) : dscores(nullptr), dweight(nullptr) {
    const int64_t count = call.B * call.layout.edges * call.H;
    scores = scratch.cut<float>(count);
    if (!backward) return;
    dscores = scratch.cut<float>(count);
    if (call.dadditive) dweight = scratch.cut<float>(call.B * most_items(call, call.Q) * call.H * call.D);
  }
};

// The call for the edge kernels, whose scores have no dot product.
AB_INLINE ab_call without_dots(const ab_call &call, const Buffers &buffers) {
  ab_call inner = call;
  inner.D = 0;
  inner.k = call.v;  // whose strides say how heads lie
  inner.dq.data = inner.dk.data = nullptr;
  inner.softcap = 0;
  inner.edge_bias = buffers.scores;
  inner.dedge_bias = buffers.dscores;
  inner.bias_edge = call.H;
  inner.bias_head = 1;
  inner.bias_batch = call.layout.edges * call.H;
  inner.bias_by_place = 1;
  return inner;
}

// Heads [first, first + count) of a batch, which share a group. Loops run over their numbers: one a head
// where D is 1 (GAT), else those of a single head (GATv2).
template <class T>
struct Heads {
  const ab_call &call;
  int64_t b, first, count, lanes;
  const float *weight;
  float slope;
  Score score;

  Heads(const ab_call &the_call, int64_t batch, int64_t h, int64_t n)
      : call(the_call),
        b(batch),
        first(h),
        count(n),
        lanes(the_call.D == 1 ? n : the_call.D),
        weight(the_call.additive + h * the_call.D),
        slope(the_call.negative_slope),
        score(the_call, 1.0f) {}

  // The numbers of a node; `per` heads share them.
  const float *numbers(const ab_tensor &x, int64_t per, int64_t i, float *buffer) const {
    const T *p = (const T *)x.data + b * x.batch + i * x.row + first / per * x.head;
    if (call.D > 1 || (per == 1 && x.head == 1)) {
      if constexpr (edges::IS_FLOAT32<T>) return p;
      copy_row(p, lanes, buffer, lanes);
      return buffer;
    }
    for (int64_t h = 0; h < count; h++) buffer[h] = load_some(p + h / per * x.head, 1)[0];
    return buffer;
  }

  const float *query(int64_t i, float *buffer) const { return numbers(call.q, 1, i, buffer); }
  const float *key(int64_t j, float *buffer) const { return numbers(call.k, call.H / call.Hk, j, buffer); }

  // Scores s [count] of a pair, without bias.
  void pair(const float *q, const float *k, float *s) const {
    const float scale = score.capped ? 1.0f : call.scale;
    F sum = {};
    for (int64_t l = 0; l < lanes; l += VL) {
      const int64_t n = lanes - l;
      const F y = leaky(load_first(q + l, n) + load_first(k + l, n), slope) * load_first(weight + l, n);
      if (call.D == 1) store_first(s + l, y * splat(scale), n);
      sum += y;
    }
    if (call.D > 1) s[0] = ordered_sum(sum) * scale;
    if (!score.capped) return;
    for (int64_t h = 0; h < count; h++) s[h] = score.raw(splat(s[h]))[0];
  }

  // The derivative of a score by the sum over d.
  float slope_of(float s) const { return call.scale * (score.capped ? score.slope(splat(s))[0] : 1.0f); }

  // Where the caller's bias has the number of an edge and head.
  int64_t bias_at(int64_t place, int64_t h) const {
    const int64_t edge = call.bias_by_place ? place : call.layout.edge_id[place];
    return b * call.bias_batch + edge * call.bias_edge + (first + h) * call.bias_head;
  }

  float *of_edge(float *of_all, int64_t place) const {
    return of_all + (b * call.layout.edges + place) * call.H + first;
  }

  void write_scores(int64_t row, int64_t begin, int64_t end, float *scores) const {
    alignas(64) float q_copy[MOST + VL], k_copy[MOST + VL];
    const float *q = query(row, q_copy);
    for (int64_t e = begin; e < end; e++) {
      float *s = of_edge(scores, e);
      pair(q, key(call.layout.edge_key[e], k_copy), s);
      if (call.edge_bias)
        for (int64_t h = 0; h < count; h++) s[h] += call.edge_bias[bias_at(e, h)];
    }
  }

  // sums += of * weight * steepness(x + y) and dweight, when wanted, += of * leaky(x + y).
  void add(const float *x, const float *y, const float *of, float *sums, float *dweight) const {
    for (int64_t l = 0; l < lanes; l += VL) {
      const int64_t n = lanes - l;
      const F z = load_first(x + l, n) + load_first(y + l, n),
              by = call.D > 1 ? splat(of[0]) : load_first(of + l, n);
      store_first(sums + l, load_first(sums + l, n) + by * load_first(weight + l, n) * steepness(z, slope),
                  n);
      if (dweight) store_first(dweight + l, load_first(dweight + l, n) + by * leaky(z, slope), n);
    }
  }

  void start(float *x, float *y) const {
    for (int64_t l = 0; l < lanes; l++) x[l] = y[l] = 0;
  }

  // total += part, which starts at 0 again: long lists are summed in two steps.
  void flush(float *part, float *total) const {
    for (int64_t l = 0; l < lanes; l++) {
      total[l] += part[l];
      part[l] = 0;
    }
  }

  // Write dq of a row and the gradient of the caller's bias; turn dscores into gradients of the sums over
  // d.
  void row(int64_t i, int64_t begin, int64_t end, float *dscores, float *dweight) const {
    alignas(64) float q_copy[MOST + VL], k_copy[MOST + VL], s[MOST], part[MOST], total[MOST];
    start(part, total);
    const float *q = query(i, q_copy);
    for (int64_t e = begin; e < end; e++) {
      const float *k = key(call.layout.edge_key[e], k_copy);
      float *d = of_edge(dscores, e);
      if (score.capped) pair(q, k, s);
      if (call.dedge_bias)
        for (int64_t h = 0; h < count; h++) call.dedge_bias[bias_at(e, h)] += d[h];
      for (int64_t h = 0; h < count; h++) d[h] *= slope_of(s[h]);
      add(q, k, d, part, dweight ? dweight + first * call.D : nullptr);
      if ((e - begin) % CHUNK == CHUNK - 1) flush(part, total);
    }
    flush(part, total);
    if (call.dq.data) put_node(call.dq, first, 1, i, total);
  }

  // Add a column to the sums of a key's gradient.
  void column(int64_t j, int64_t begin, int64_t end, float *dscores, float *total) const {
    alignas(64) float q_copy[MOST + VL], k_copy[MOST + VL], part[MOST];
    start(part, part);
    const float *k = key(j, k_copy);
    for (int64_t e = begin; e < end; e++) {
      add(k, query(call.layout.col_query[e], q_copy), of_edge(dscores, call.layout.col_edge[e]), part,
          nullptr);
      if ((e - begin) % CHUNK == CHUNK - 1) flush(part, total);
    }
    flush(part, total);
  }

  // Write a node's numbers from head h0 on; with D = 1 `per` sums add up to one.
  void put_node(const ab_tensor &x, int64_t h0, int64_t per, int64_t i, const float *sums) const {
    T *p = (T *)x.data + b * x.batch + i * x.row + h0 * x.head;
    if (call.D > 1) return copy_row(sums, lanes, p, lanes);
    for (int64_t h = 0; h < count; h += per) {
      float sum = 0;
      for (int64_t s = 0; s < per; s++) sum += sums[h + s];
      store_some(p + h / per * x.head, splat(sum), 1);
    }
  }
};

// Call body(heads, group) for the heads of a batch: those of a key head together, and as many as possible
// where the layout has one group for all.
template <class T, class Body>
AB_INLINE void each_heads(const ab_call &call, int64_t b, const Body &body) {
  const int64_t share = call.H / call.Hk;
  const int64_t most = call.D == 1 && call.layout.heads == 1 ? MOST / share * share : 1;
  const int64_t step = most < 1 ? 1 : most;
  for (int64_t h = 0; h < call.H; h += step)
    body(Heads<T>(call, b, h, min64(step, call.H - h)), group_of(call.layout, b, h));
}

// Call body(t, heads, i, begin, end) for the heads of item t and their rows (or columns) i, whose edges are
// [begin, end).
template <class T, class Body>
AB_INLINE void each_row(const ab_call &call, const Lists &lists, [[maybe_unused]] int32_t threads,
                        Body body) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) firstprivate(body)
  for (int64_t t = 0; t < call.B * lists.items; t++) {
    const int64_t item = t % lists.items;
    each_heads<T>(call, t / lists.items, [&](const Heads<T> &heads, int64_t g) AB_LAMBDA {
      const int64_t end = lists.row_at(g, (item + 1) * ITEM);
      for (int64_t i = lists.row_at(g, item * ITEM); i < end; i++)
        body(t, heads, i, lists.begin(g, i), lists.begin(g, i + 1));
    });
  }
}

template <class T>
static void write_scores(const ab_call &call, float *scores, const Lists &rows) {
  const auto write = [=](int64_t, const Heads<T> &heads, int64_t i, int64_t begin, int64_t end)
                         AB_LAMBDA { heads.write_scores(i, begin, end, scores); };
  each_row<T>(call, rows, call.threads, write);
}

template <class T>
static void backward_rows(const ab_call &call, const Buffers &buffers, const Lists &rows) {
  const int64_t numbers = call.H * call.D, items = call.B * rows.items;
  float *const dscores = buffers.dscores, *const dweight = buffers.dweight;
  if (dweight) memset(dweight, 0, sizeof(float) * (size_t)(items * numbers));
  const auto add = [=](int64_t t, const Heads<T> &heads, int64_t i, int64_t begin, int64_t end) AB_LAMBDA {
    heads.row(i, begin, end, dscores, dweight ? dweight + t * numbers : nullptr);
  };
  // A bias that batches or heads share gets its sums in one order.
  each_row<T>(call, rows, edges::shares_bias(call) ? 1 : call.threads, add);
  if (!dweight) return;
  for (int64_t n = 0; n < numbers; n++) {
    double sum = 0;
    for (int64_t t = 0; t < items; t++) sum += (double)dweight[t * numbers + n];
    call.dadditive[n] = (float)sum;
  }
}

template <class T>
static void backward_columns(const ab_call &call, const Buffers &buffers, const Lists &columns) {
  const int64_t share = call.H / call.Hk;
  each_row<T>(call, columns, call.threads,
              [&](int64_t, const Heads<T> &heads, int64_t j, int64_t, int64_t) AB_LAMBDA {
                // Heads that share a key are adjacent: the first adds up for all.
                const int64_t more = heads.count == 1 ? share : 1;
                if (heads.first % more) return;
                alignas(64) float total[MOST];
                heads.start(total, total);
                for (int64_t s = 0; s < more; s++) {
                  const Heads<T> one(call, heads.b, heads.first + s, heads.count);
                  const int64_t g = group_of(call.layout, heads.b, one.first);
                  one.column(j, columns.begin(g, j), columns.begin(g, j + 1), buffers.dscores, total);
                }
                heads.put_node(call.dk, heads.first / share, share / more, j, total);
              });
}

template <bool BACKWARD, class T>
static int32_t run_with(const ab_call &call, Arena scratch) {
  const Buffers buffers(call, BACKWARD, scratch);
  const ab_layout &layout = call.layout;
  const Lists rows(layout.edge_ptr, call.Q, layout, scratch);
  write_scores<T>(call, buffers.scores, rows);
  if (!BACKWARD) return edges::run<false>(without_dots(call, buffers), nullptr, scratch);
  const Lists columns(layout.col_ptr, call.K, layout, scratch);
  memset(buffers.dscores, 0, sizeof(float) * (size_t)(call.B * layout.edges * call.H));
  const int32_t status = edges::run<true>(without_dots(call, buffers), nullptr, scratch);
  if (status != AB_OK) return status;
  backward_rows<T>(call, buffers, rows);
  if (call.dk.data) backward_columns<T>(call, buffers, columns);
  return AB_OK;
}

static int64_t scratch_bytes(const ab_call &call, bool backward) {
  Arena scratch;
  const Buffers buffers(call, backward, scratch);
  return scratch.bytes + edges::list_bytes(call, backward) +
         edges::scratch_bytes(without_dots(call, buffers), backward);
}

// As edges::run; a layout of additive scores has edges only.
template <bool BACKWARD>
static int32_t run(const ab_call &call, Arena scratch) {
  return with_dtype(call.q.dtype, [&](auto type) {
    return run_with<BACKWARD, typename decltype(type)::Number>(call, scratch);
  });
}

}  // namespace AB_ISA::additive
