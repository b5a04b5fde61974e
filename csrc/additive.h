// Scores of graph attention networks, sum_d weight[h, d] * LeakyReLU(q_d + k_d), over the edges of a
// layout.
//
// They are written as a bias of each edge; the edge kernels then run with D = 0, so that the bias is the
// whole score, and the gradient of the bias goes back to q, k and the weight here.
#ifndef ATTNBIAS_ADDITIVE_H
#define ATTNBIAS_ADDITIVE_H

#include "edges.h"

namespace AB_LEVEL {
namespace additive {

using edge::CHUNK;
using edge::ITEM;
using edge::Lists;
using edge::MOST;

AB_INLINE F leaky(F x, float slope) { return x > F{} ? x : x * splat(slope); }
AB_INLINE F steepness(F x, float slope) { return x > F{} ? splat(1.0f) : splat(slope); }

// A vector of which n lanes, or all, are there.
AB_INLINE F get(const float *p, int64_t n) { return n >= VL ? load(p) : load_some(p, n); }
AB_INLINE void put(float *p, F x, int64_t n) {
  if (n >= VL) return store(p, x);
  store_some(p, x, n);
}

AB_INLINE const float *as_float(const float *p, int64_t, float *) { return p; }
template <class T>
AB_INLINE const float *as_float(const T *p, int64_t n, float *buffer) {
  return edge::widen(p, n, buffer);
}

AB_INLINE int64_t most_items(const ab_call &call, int64_t rows) {
  return edge::divide_up(call.layout.edges + edge::ROW_COST * rows, ITEM);
}

// Scores [B, edges, H] by place in edge_key, and their gradients; sums of the weight's gradient by item.
struct Buffers {
  float *scores, *dscores, *dweight;

  Buffers(const ab_call &call, bool backward, char *&scratch) : dscores(nullptr), dweight(nullptr) {
    const int64_t count = call.B * call.layout.edges * call.H;
    scores = cut<float>(scratch, count);
    if (!backward) return;
    dscores = cut<float>(scratch, count);
    if (call.dadditive) dweight = cut<float>(scratch, call.B * most_items(call, call.Q) * call.H * call.D);
  }
};

// What the edge kernels get: scores without a dot product.
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
    if (call.D > 1 || (per == 1 && x.head == 1)) return as_float(p, lanes, buffer);
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
      const F y = leaky(get(q + l, n) + get(k + l, n), slope) * get(weight + l, n);
      if (call.D == 1) put(s + l, y * splat(scale), n);
      sum += y;
    }
    if (call.D > 1) s[0] = ordered_sum(sum) * scale;
    for (int64_t h = 0; score.capped && h < count; h++) s[h] = score.raw(splat(s[h]))[0];
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
      for (int64_t h = 0; call.edge_bias && h < count; h++) s[h] += call.edge_bias[bias_at(e, h)];
    }
  }

  // sums += of * weight * steepness(x + y) and dweight, when wanted, += of * leaky(x + y).
  void add(const float *x, const float *y, const float *of, float *sums, float *dweight) const {
    for (int64_t l = 0; l < lanes; l += VL) {
      const int64_t n = lanes - l;
      const F z = get(x + l, n) + get(y + l, n), by = call.D > 1 ? splat(of[0]) : get(of + l, n);
      put(sums + l, get(sums + l, n) + by * get(weight + l, n) * steepness(z, slope), n);
      if (dweight) put(dweight + l, get(dweight + l, n) + by * leaky(z, slope), n);
    }
  }

  void start(float *x, float *y) const {
    for (int64_t l = 0; l < lanes; l++) x[l] = y[l] = 0;
  }

  // total += part, which starts anew: long lists add up in two levels.
  void flush(float *part, float *total) const {
    for (int64_t l = 0; l < lanes; l++) {
      total[l] += part[l];
      part[l] = 0;
    }
  }

  // dq of a row, and the way of its gradients back to the caller's bias and to the products.
  void row(int64_t i, int64_t begin, int64_t end, float *dscores, float *dweight) const {
    alignas(64) float q_copy[MOST + VL], k_copy[MOST + VL], s[MOST], part[MOST], total[MOST];
    start(part, total);
    const float *q = query(i, q_copy);
    for (int64_t e = begin; e < end; e++) {
      const float *k = key(call.layout.edge_key[e], k_copy);
      float *d = of_edge(dscores, e);
      if (score.capped) pair(q, k, s);
      for (int64_t h = 0; call.dedge_bias && h < count; h++) call.dedge_bias[bias_at(e, h)] += d[h];
      for (int64_t h = 0; h < count; h++) d[h] *= slope_of(s[h]);
      add(q, k, d, part, dweight ? dweight + first * call.D : nullptr);
      if ((e - begin) % CHUNK == CHUNK - 1) flush(part, total);
    }
    flush(part, total);
    if (call.dq.data) put_node(call.dq, first, 1, i, total);
  }

  // Add to the sums of a key's gradient.
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
    if (call.D > 1) {
      int64_t c = 0;
      for (; c + VL <= lanes; c += VL) store(p + c, load(sums + c));
      if (c < lanes) store_some(p + c, load_some(sums + c, lanes - c), lanes - c);
      return;
    }
    for (int64_t h = 0; h < count; h += per) {
      float sum = 0;
      for (int64_t s = 0; s < per; s++) sum += sums[h + s];
      store_some(p + h / per * x.head, splat(sum), 1);
    }
  }
};

// Call body(heads, group) for the heads of a batch in turn: those of one key together, in steps that share
// a group where the layout has one for all.
template <class T, class Body>
AB_INLINE void each_heads(const ab_call &call, int64_t b, const Body &body) {
  const int64_t share = call.H / call.Hk;
  const int64_t most = call.D == 1 && call.layout.heads == 1 ? MOST / share * share : 1;
  const int64_t step = most < 1 ? 1 : most;
  for (int64_t h = 0; h < call.H; h += step)
    body(Heads<T>(call, b, h, min64(step, call.H - h)), group_of(call.layout, b, h));
}

template <class T>
static void scores_with(const ab_call &call, float *scores, const Lists &rows) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(call.threads)
  for (int64_t t = 0; t < call.B * rows.items; t++) {
    each_heads<T>(call, t / rows.items, [&](const Heads<T> &heads, int64_t g) AB_LAMBDA {
      const int64_t item = t % rows.items, end = rows.row_at(g, (item + 1) * ITEM);
      for (int64_t i = rows.row_at(g, item * ITEM); i < end; i++)
        heads.write_scores(i, rows.begin(g, i), rows.begin(g, i + 1), scores);
    });
  }
}

template <class T>
static void rows_with(const ab_call &call, const Buffers &buffers, const Lists &rows) {
  const int64_t numbers = call.H * call.D;
  // A bias that batches or heads share gets its sums in one order.
  const bool shared = edge::shares_bias(call);
#pragma omp parallel for schedule(dynamic, 1) num_threads(shared ? 1 : call.threads)
  for (int64_t t = 0; t < call.B * rows.items; t++) {
    float *dweight = buffers.dweight ? buffers.dweight + t * numbers : nullptr;
    if (dweight) memset(dweight, 0, sizeof(float) * (size_t)numbers);
    each_heads<T>(call, t / rows.items, [&](const Heads<T> &heads, int64_t g) AB_LAMBDA {
      const int64_t item = t % rows.items, end = rows.row_at(g, (item + 1) * ITEM);
      for (int64_t i = rows.row_at(g, item * ITEM); i < end; i++)
        heads.row(i, rows.begin(g, i), rows.begin(g, i + 1), buffers.dscores, dweight);
    });
  }
  for (int64_t n = 0; buffers.dweight && n < numbers; n++) {
    double sum = 0;
    for (int64_t t = 0; t < call.B * rows.items; t++) sum += (double)buffers.dweight[t * numbers + n];
    call.dadditive[n] = (float)sum;
  }
}

template <class T>
static void columns_with(const ab_call &call, const Buffers &buffers, const Lists &columns) {
  const int64_t share = call.H / call.Hk;
#pragma omp parallel for schedule(dynamic, 1) num_threads(call.threads)
  for (int64_t t = 0; t < call.B * columns.items; t++) {
    const int64_t item = t % columns.items;
    each_heads<T>(call, t / columns.items, [&](const Heads<T> &heads, int64_t g) AB_LAMBDA {
      // Heads that share a key come after each other: the first adds up for all.
      if (heads.count == 1 && heads.first % share) return;
      const int64_t end = columns.row_at(g, (item + 1) * ITEM);
      for (int64_t j = columns.row_at(g, item * ITEM); j < end; j++) {
        alignas(64) float total[MOST];
        heads.start(total, total);
        const int64_t more = heads.count == 1 ? share : 1;
        for (int64_t s = 0; s < more; s++) {
          const Heads<T> one(call, heads.b, heads.first + s, heads.count);
          const int64_t of = group_of(call.layout, heads.b, one.first);
          one.column(j, columns.begin(of, j), columns.begin(of, j + 1), buffers.dscores, total);
        }
        heads.put_node(call.dk, heads.first / share, heads.count == 1 ? 1 : share, j, total);
      }
    });
  }
}

template <class T>
static int32_t backward_with(const ab_call &call, char *scratch) {
  const Buffers buffers(call, true, scratch);
  const ab_layout &layout = call.layout;
  const int64_t bytes = Lists::bytes(layout.groups, layout.edges);
  const Lists rows = edge::make_lists(layout.edge_ptr, call.Q, layout.groups, scratch);
  const Lists columns = edge::make_lists(layout.col_ptr, call.K, layout.groups, scratch + bytes);
  scores_with<T>(call, buffers.scores, rows);
  memset(buffers.dscores, 0, sizeof(float) * (size_t)(call.B * layout.edges * call.H));
  const int32_t status = edges_backward(without_dots(call, buffers), nullptr, scratch + 2 * bytes);
  if (status != AB_OK) return status;
  rows_with<T>(call, buffers, rows);
  if (call.dk.data) columns_with<T>(call, buffers, columns);
  return AB_OK;
}

template <class T>
static int32_t forward_with(const ab_call &call, char *scratch) {
  const Buffers buffers(call, false, scratch);
  const ab_layout &layout = call.layout;
  scores_with<T>(call, buffers.scores, edge::make_lists(layout.edge_ptr, call.Q, layout.groups, scratch));
  scratch += Lists::bytes(layout.groups, layout.edges);
  return edges_forward(without_dots(call, buffers), nullptr, scratch);
}

}  // namespace additive

static int64_t additive_scratch_bytes(const ab_call &call, bool backward) {
  char *const start = (char *)64;
  char *end = start;
  const additive::Buffers buffers(call, backward, end);
  const int64_t lists = edge::Lists::bytes(call.layout.groups, call.layout.edges);
  return (end - start) + (backward ? 2 : 1) * lists +
         edges_scratch_bytes(additive::without_dots(call, buffers), backward);
}

// As edges_forward and edges_backward; a layout of additive scores has edges alone.
static int32_t additive_forward(const ab_call &call, char *scratch) {
  switch (call.q.dtype) {
    case AB_FLOAT32: return additive::forward_with<float>(call, scratch);
    case AB_BFLOAT16: return additive::forward_with<Bfloat16>(call, scratch);
    default: return additive::forward_with<Float16>(call, scratch);
  }
}

static int32_t additive_backward(const ab_call &call, char *scratch) {
  switch (call.q.dtype) {
    case AB_FLOAT32: return additive::backward_with<float>(call, scratch);
    case AB_BFLOAT16: return additive::backward_with<Bfloat16>(call, scratch);
    default: return additive::backward_with<Float16>(call, scratch);
  }
}

}  // namespace AB_LEVEL

#endif
