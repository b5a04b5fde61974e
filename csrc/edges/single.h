// One query head at a time: neighbours lie in the lanes of the scores.
#pragma once

#include "edges/rows.h"
#include "places.h"
#include "simd/philox.h"
#include "score.h"

namespace AB_ISA::edges {

// A softmax under way: the largest score, the sum of exp(score - m), and that of exp(score - m) * value.
// `from` is where that lies, NULL for 0. It may start at a sink or an lse; `top` is of scores only, and
// followed only where it is wanted.
struct Softmax {
  float m, l;
  const float *from;
  float top = -INFINITY;
};

// A sum of rows under way, which lies at `from` so far, NULL for 0, and goes to `to`, NULL for not wanted.
struct RunningSum {
  const float *from;
  float *to;

  template <class T>
  void add(const float *w, const HeadRows<const T> &rows, const int32_t *row, int64_t n) {
    if (to) gather(w, rows, row, n, 1.0f, from, to);
    from = to;
  }
  // Add the pieces of a long row, or no pieces: then the sum moves to its place.
  void add(int64_t size, const float *pieces, int64_t count, int64_t stride) {
    if (to) add_pieces(from, size, pieces, count, stride, to);
    from = to;
  }
};

AB_INLINE float finite_or_0(float m) { return m == -INFINITY ? 0.0f : m; }
AB_INLINE float lse_of(float m, float l) { return l == 0.0f ? -INFINITY : m + logf(l); }
AB_INLINE F lse_of(F m, F l) {  // ln_of() makes a number of NaN
  const F lse = l == F{} ? splat(-INFINITY) : m + ln_of(l);
  return l == l ? lse : l;
}
AB_INLINE float inverse_or_0(float l) { return l > 0.0f ? 1.0f / l : 0.0f; }

// Whether the heads of a node lie together.
AB_INLINE bool by_node(const ab_call &call) { return call.k.head < call.k.row; }

template <class T>
struct Single {
  HeadRows<const T> q, k, v, o, dout;
  HeadRows<T> out, dq, dk, dv;
  HeadRows<const float> out_before, dq_before, dk_before,
      dv_before;  // the tiles' results; data may be NULL
  const ab_call &call;
  const ab_layout &layout;
  const float *lse_before = nullptr;
  float *lse, *row_max;
  const float *dlse;  // NULL is 0, as below
  const float *bias;
  float *dbias;
  const float *sink;
  int64_t batch, head, origin;  // origin: the group's first edge
  Fetch fetch = Fetch::nothing;
  int64_t hand_edge = 2, hand_ds = 1;  // where `hand` has p of an edge, and how far from it dS

  Single(const ab_call &the_call, const ab_call *before, int64_t b, int64_t h, int64_t first_edge)
      : call(the_call), layout(the_call.layout), batch(b), head(h), origin(first_edge) {
    const int64_t hk = h / (call.H / call.Hk), D = call.D, E = call.E;
    q = rows_of<const T>(call.q, b, h, D);
    k = rows_of<const T>(call.k, b, hk, D);
    v = rows_of<const T>(call.v, b, hk, E);
    o = rows_of<const T>(call.out, b, h, E);
    out = rows_of<T>(call.out, b, h, E);
    dout = rows_of<const T>(call.dout, b, h, E);
    dq = rows_of<T>(call.dq, b, h, D);
    dk = rows_of<T>(call.dk, b, hk, D);
    dv = rows_of<T>(call.dv, b, hk, E);
    const int64_t lse_at = (b * call.H + h) * call.Q, bias_at = b * call.bias_batch + h * call.bias_head;
    lse = call.lse + lse_at;
    row_max = call.row_max ? call.row_max + lse_at : nullptr;
    dlse = call.dlse ? call.dlse + lse_at : nullptr;
    bias = call.edge_bias ? call.edge_bias + bias_at : nullptr;
    dbias = call.dedge_bias ? call.dedge_bias + bias_at : nullptr;
    sink = call.sink ? call.sink + h : nullptr;
    if (before) {
      out_before = rows_of<const float>(before->out, b, h, E);
      dq_before = rows_of<const float>(before->dq, b, h, D);
      dk_before = rows_of<const float>(before->dk, b, hk, D);
      dv_before = rows_of<const float>(before->dv, b, hk, E);
      lse_before = before->lse + lse_at;
    }
  }

  // Fetch the keys and values that row i reads: n edges from `first` on. Inlined, all three: GCC takes a
  // function that does nothing but prefetch for one that does nothing.
  inline AB_LAMBDA void fetch_keys(int64_t i, int64_t first, int64_t n) const {
    fetch_ahead(i, call.K, layout.edge_key, first, n, [&](int64_t key) AB_LAMBDA {
      prefetch(k, key);
      prefetch(v, key);
    });
  }

  // The same for column j, which reads queries and the gradients of their results.
  inline AB_LAMBDA void fetch_queries(int64_t j, int64_t first, int64_t n) const {
    fetch_ahead(j, call.Q, layout.col_query, first, n, [&](int64_t query) AB_LAMBDA {
      if (dk.data) prefetch(q, query);
      if (dv.data) prefetch(dout, query);
    });
  }

  // Fetch what row i + OWN_AHEAD of `rows` reads and writes itself. The machine foresees that unless rows
  // of other heads lie between those of one head.
  template <class... Rows>
  inline AB_LAMBDA void fetch_own(int64_t i, int64_t rows, const Rows &...each) const {
    if (by_node(call) && i + OWN_AHEAD < rows) (prefetch(each, i + OWN_AHEAD), ...);
  }

  template <class Body>
  inline AB_LAMBDA void fetch_ahead(int64_t i, int64_t rows, const int32_t *row, int64_t first, int64_t n,
                                    const Body &body) const {
    if (fetch == Fetch::diagonal && i + ROWS_AHEAD < rows) body(i + ROWS_AHEAD);
    if (fetch != Fetch::edges) return;
    const int64_t from = first + EDGES_AHEAD, last = min64(from + n, layout.edges);
    for (int64_t e = from; e < last; e++) body(row[e]);
  }

  // Turn n dot products into scores, and `slopes`, when wanted, into their derivatives by q.k.
  void scores(float *s, float *slopes, int64_t n) const {
    const Score score(call, 1.0f);
    for (int64_t j = 0; j < n; j += VL) {
      const F raw = score.raw(load(s + j) * splat(score.sign)), slope = splat(call.scale);
      store(s + j, raw * splat(score.factor));
      if (slopes) store(slopes + j, score.capped ? slope * score.slope(raw) : slope);
    }
  }

  // Edge j stands at place[j] of edge_key, or at first + j.
  void add_bias(float *s, int64_t first, const int32_t *place, int64_t n) const {
    if (!bias) return;
    for (int64_t j = 0; j < n; j++) s[j] += bias[bias_place(place ? place[j] : first + j)];
  }

  // Where the bias of an edge lies, given its place in edge_key.
  int64_t bias_place(int64_t place) const {
    return (call.bias_by_place ? place : layout.edge_id[place]) * call.bias_edge;
  }

  // Apply dropout to n numbers: multiply them by 0 or by the share of kept pairs. Pair j is of row[j] and
  // key[j]; NULL = all of `one`.
  void drop(const int32_t *row, const int32_t *key, int64_t one, int64_t n, float *numbers) const {
    if (!call.drop_below) return;
    const Dropout dropout(call);
    U rows = splat(row ? 0u : (uint32_t)query_position(call, one));
    U keys = splat(key ? 0u : (uint32_t)key_position(call, one));
    for (int64_t j = 0; j < n; j += VL) {
      for (int64_t l = 0; l < VL && j + l < n; l++) {
        if (row) rows[l] = (uint32_t)query_position(call, row[j + l]);
        if (key) keys[l] = (uint32_t)key_position(call, key[j + l]);
      }
      const F share = dropout.share(keys, rows, dropout.head(head), dropout.batch(batch));
      store(numbers + j, load(numbers + j) * share);
    }
  }

  // Scores become weights, exp(score - m), after which the state holds m and l; the last vector is filled
  // up with 0. Returns the factor of the state's sum.
  AB_INLINE float weights(float *s, int64_t n, Softmax &state) {
    fill_up(s, n, -INFINITY);
    const float m = largest_of(s, n, state.m), base = finite_or_0(m);
    const float alpha = state.m == m ? 1.0f : state.l == 0.0f ? 0.0f : expf(state.m - base);
    F sum = {};
    for (int64_t j = 0; j < n; j += VL) {
      const F p = exp_of(load(s + j) - splat(base));
      store(s + j, p);
      sum += p;
    }
    state.l = state.l * alpha + sum_of(sum);
    state.m = m;
    return alpha;
  }

  // Add the edges [first, last) of row i to a softmax: y gets the sum of weights times values.
  void attend(int64_t i, int64_t first, int64_t last, Softmax &state, float *y) const {
    alignas(64) float s[CHUNK + VL], wide[MOST + VL];
    const float *x = widen_row(q[i], q.size, wide);
    for (; first < last; first += CHUNK) {
      const int64_t n = min64(last - first, CHUNK);
      const int32_t *key = layout.edge_key + first;
      dots(x, k, key, n, s);
      scores(s, nullptr, n);
      add_bias(s, first, nullptr, n);
      if (row_max) state.top = largest_of(s, n, state.top);
      const float alpha = weights(s, n, state);
      drop(nullptr, key, i, n, s);
      gather(s, v, key, n, alpha, state.from, y);
      state.from = y;
    }
  }

  // Go on from the tiles, which have the sink already, or begin with the sink.
  Softmax start(int64_t i) const {
    if (!lse_before) return {sink ? *sink : -INFINITY, sink ? 1.0f : 0.0f, nullptr};
    if (lse_before[i] == -INFINITY) return {-INFINITY, 0.0f, nullptr};
    return {lse_before[i], 1.0f, out_before[i]};
  }

  // Write the largest score of row i, where it is wanted; `top` is that of its edges, and lse is written.
  void put_max(int64_t i, float top) const {
    if (row_max) row_max[i] = max_or_nan(lse_before ? fmaxf(row_max[i], top) : top, lse[i]);
  }

  // A row of more than CHUNK edges.
  void forward_row(int64_t i, int64_t first, int64_t last) const {
    Softmax state = start(i);
    const SumRow<T> y(out, i);
    attend(i, first, last, state, y.at);
    scale_row(inverse_or_0(state.l), y.at, out.size, y.at);
    lse[i] = lse_of(state.m, state.l);
    put_max(i, state.top);
  }

  // As drop, numbers of all edges of the rows [row, end).
  void drop_rows(int64_t row, int64_t end, const int32_t *ptr, float *numbers) const {
    if (!call.drop_below) return;
    int32_t query[CHUNK] = {};
    for (int64_t i = row; i < end; i++) {
      for (int64_t e = ptr[i]; e < ptr[i + 1]; e++) query[e - ptr[row]] = (int32_t)i;
    }
    drop(query, layout.edge_key + ptr[row], 0, ptr[end] - ptr[row], numbers);
  }

  // Rows [row, end) of a few edges each, CHUNK in all: step by step for all rows, because the steps of one
  // row wait for each other. Their scores lie without gaps, so that no vector is filled by half: only the
  // largest and the sum are taken row by row.
  void forward_rows(int64_t row, int64_t end, const int32_t *ptr) const {
    alignas(64) float s[CHUNK + VL], of_row[CHUNK + VL], wide[MOST + VL];
    alignas(64) float m[BATCH + VL], l[BATCH + VL];
    float scale[BATCH], top[BATCH];
    const int64_t first = ptr[row], total = ptr[end] - first;
    for (int64_t i = row; i < end; i++) {
      const int64_t n = ptr[i + 1] - ptr[i];
      fetch_own(i, call.Q, q, out);
      fetch_keys(i, ptr[i], n);
      dots(widen_row(q[i], q.size, wide), k, layout.edge_key + ptr[i], n, s + (ptr[i] - first));
    }
    scores(s, nullptr, total);
    add_bias(s, first, nullptr, total);
    for (int64_t i = row; i < end; i++) {
      const int64_t at = ptr[i] - first, n = ptr[i + 1] - ptr[i];
      m[i - row] = largest_of(s + at, n, start(i).m);
      if (row_max) top[i - row] = largest_of(s + at, n, -INFINITY);
      spread(finite_or_0(m[i - row]), n, of_row + at);
    }
    for (int64_t j = 0; j < total; j += VL) store(s + j, exp_of(load(s + j) - load(of_row + j)));
    for (int64_t i = row; i < end; i++) {
      const int64_t at = ptr[i] - first, n = ptr[i + 1] - ptr[i];
      const Softmax state = start(i);
      const float alpha = state.l == 0.0f ? 0.0f : expf(state.m - finite_or_0(m[i - row]));
      l[i - row] = state.l * alpha + total_of(s + at, n);
      const float by = inverse_or_0(l[i - row]);
      scale[i - row] = alpha * by;
      spread(by, n, of_row + at);
    }
    for (int64_t j = 0; j < total; j += VL) store(s + j, load(s + j) * load(of_row + j));
    drop_rows(row, end, ptr, s);
    for (int64_t i = row; i < end; i++) {
      const SumRow<T> y(out, i);
      gather(s + (ptr[i] - first), v, layout.edge_key + ptr[i], ptr[i + 1] - ptr[i], scale[i - row],
             start(i).from, y.at);
    }
    for (int64_t i = row; i < end; i += VL)
      store_first(lse + i, lse_of(load(m + (i - row)), load(l + (i - row))), end - i);
    if (row_max)
      for (int64_t i = row; i < end; i++) put_max(i, top[i - row]);
  }

  // A piece of a long row: its sum, then m and l.
  void forward_piece(int64_t i, int64_t first, int64_t last, float *piece) const {
    Softmax state = {-INFINITY, 0.0f, nullptr};
    attend(i, first, last, state, piece);
    piece[v.size] = state.m;
    piece[v.size + 1] = state.l;
  }

  void forward_merge(int64_t i, const float *pieces, int64_t count, int64_t stride) const {
    const int64_t E = v.size;
    const Softmax state = start(i);
    float m = state.m, l = 0.0f;
    for (int64_t p = 0; p < count; p++) m = fmaxf(m, pieces[p * stride + E]);
    const float base = finite_or_0(m);
    l = state.l * expf(state.m - base);
    for (int64_t p = 0; p < count; p++) {
      l += pieces[p * stride + E + 1] * expf(pieces[p * stride + E] - base);
    }
    const float by = inverse_or_0(l);
    const SumRow<T> y(out, i);
    scale_row(by * expf(state.m - base), state.from, E, y.at);
    for (int64_t p = 0; p < count; p++) {
      const float alpha = by * expf(pieces[p * stride + E] - base);
      for (int64_t c = 0; c < E; c++) y.at[c] += alpha * pieces[p * stride + c];
    }
    lse[i] = lse_of(m, l);
    if (!row_max) return;
    float top = -INFINITY;
    for (int64_t p = 0; p < count; p++) top = fmaxf(top, pieces[p * stride + E]);
    put_max(i, top);
  }

  // Write lse and dO . out - dlse, which is subtracted from dO . v. Both are 0 for an empty row, whose lse
  // is a constant.
  void statistics(int64_t i, float *both) const {
    alignas(64) float wide[MOST + VL], sum[VL];
    dots(widen_row(dout[i], dout.size, wide), v, nullptr, 0, sum, o[i]);
    statistics(i, sum[0], both);
  }
  void statistics(int64_t i, float dout_out, float *both) const {
    const bool empty = lse[i] == -INFINITY;
    both[0] = empty ? 0.0f : lse[i];
    both[1] = empty ? 0.0f : dout_out - (dlse ? dlse[i] : 0.0f);
  }

  // s becomes p and d, which holds dO . v, the gradient by q . k; `slopes` becomes that by the score.
  AB_INLINE void weigh(float *s, float *d, float *slopes, F lse_, F delta, int64_t j) {
    const F p = exp_of(load(s + j) - lse_);
    const F by_score = p * (load(d + j) - delta);
    store(s + j, p);
    store(d + j, by_score * load(slopes + j));
    store(slopes + j, by_score);
  }

  // Put the results of n edges where they are wanted.
  void keep(const float *p, const float *d, const float *by_score, int64_t first, int64_t n,
            float *hand) const {
    if (dbias)
      for (int64_t j = 0; j < n; j++) dbias[bias_place(first + j)] += by_score[j];
    if (!hand) return;
    for (int64_t j = 0; j < n; j++) {
      float *pair = hand + hand_edge * (first - origin + j);
      pair[0] = p[j];
      pair[hand_ds] = d[j];
    }
  }

  // The edges [first, last) of row i: y = from + dq, dbias, and (p, dS) of each edge in `hand`; y and
  // hand may be NULL.
  void backward_edges(int64_t i, int64_t first, int64_t last, const float *from, float *y,
                      float *hand) const {
    alignas(64) float s[CHUNK + VL], d[CHUNK + VL], slopes[CHUNK + VL], wide[MOST + VL], wide_g[MOST + VL];
    const float *x = widen_row(q[i], q.size, wide), *g = widen_row(dout[i], dout.size, wide_g);
    float both[2];
    statistics(i, both);
    const F lse_ = splat(both[0]), delta = splat(both[1]);
    for (; first < last; first += CHUNK) {
      const int64_t n = min64(last - first, CHUNK);
      const int32_t *key = layout.edge_key + first;
      dots(x, k, key, n, s);
      dots(g, v, key, n, d);
      scores(s, slopes, n);
      add_bias(s, first, nullptr, n);
      drop(nullptr, key, i, n, d);
      for (int64_t j = 0; j < n; j += VL) weigh(s, d, slopes, lse_, delta, j);
      drop(nullptr, key, i, n, s);
      keep(s, d, slopes, first, n, hand);
      if (y) {
        gather(d, k, key, n, 1.0f, from, y);
        from = y;
      }
    }
  }

  void backward_row(int64_t i, int64_t first, int64_t last, float *hand) const {
    const SumRow<T> y(dq, i);
    backward_edges(i, first, last, dq_before.row_or_null(i), y.at, hand);
  }

  // As forward_rows.
  void backward_rows(int64_t row, int64_t end, const int32_t *ptr, float *hand) const {
    alignas(64) float s[CHUNK + VL], d[CHUNK + VL], slopes[CHUNK + VL], lse_[CHUNK + VL], delta[CHUNK + VL];
    alignas(64) float wide[MOST + VL];
    const int64_t first = ptr[row], total = ptr[end] - first;
    const int32_t *key = layout.edge_key + first;
    for (int64_t i = row; i < end; i++) {
      const int64_t at = ptr[i] - first, n = ptr[i + 1] - ptr[i];
      float both[2];
      fetch_own(i, call.Q, q, dout, o, dq);
      fetch_keys(i, ptr[i], n);
      dots(widen_row(q[i], q.size, wide), k, key + at, n, s + at);
      dots(widen_row(dout[i], dout.size, wide), v, key + at, n, d + at, o[i]);
      statistics(i, d[at + n], both);
      spread(both[0], n, lse_ + at);
      spread(both[1], n, delta + at);
    }
    scores(s, slopes, total);
    add_bias(s, first, nullptr, total);
    drop_rows(row, end, ptr, d);
    for (int64_t j = 0; j < total; j += VL) weigh(s, d, slopes, load(lse_ + j), load(delta + j), j);
    drop_rows(row, end, ptr, s);
    keep(s, d, slopes, first, total, hand);
    if (!dq.data) return;
    for (int64_t i = row; i < end; i++) {
      const int64_t at = ptr[i] - first;
      const SumRow<T> y(dq, i);
      gather(d + at, k, key + at, ptr[i + 1] - ptr[i], 1.0f, dq_before.row_or_null(i), y.at);
    }
  }

  void backward_piece(int64_t i, int64_t first, int64_t last, float *hand, float *piece) const {
    backward_edges(i, first, last, nullptr, dq.data ? piece : nullptr, hand);
  }

  void backward_merge(int64_t i, const float *pieces, int64_t count, int64_t stride) const {
    if (!dq.data) return;
    const SumRow<T> y(dq, i);
    add_pieces(dq_before.row_or_null(i), dq.size, pieces, count, stride, y.at);
  }

  // Compute p and dS of n edges of a column again; `stats` holds the statistics() of each query.
  void recompute(int64_t column, int64_t first, int64_t n, const float *x, const float *y,
                 const float *stats, float *s, float *d) const {
    alignas(64) float slopes[CHUNK + VL], lse_[CHUNK + VL], delta[CHUNK + VL];
    const int32_t *query = layout.col_query + first;
    dots(x, q, query, n, s);
    dots(y, dout, query, n, d);
    scores(s, slopes, n);
    add_bias(s, 0, layout.col_edge + first, n);
    for (int64_t j = 0; j < n; j++) {
      const float *both = stats + 2 * int64_t{query[j]};
      lse_[j] = both[0];
      delta[j] = both[1];
    }
    drop(query, nullptr, column, n, d);
    for (int64_t j = 0; j < n; j += VL) weigh(s, d, slopes, load(lse_ + j), load(delta + j), j);
    drop(query, nullptr, column, n, s);
  }

  // Add the edges [first, last) of column j to dk and dv; from `hand`, or from `stats` when there is none.
  void column(int64_t j, int64_t first, int64_t last, const float *hand, const float *stats,
              RunningSum keys, RunningSum values) const {
    alignas(64) float s[CHUNK + VL], d[CHUNK + VL], wide_k[MOST + VL], wide_v[MOST + VL];
    const float *x = nullptr, *y = nullptr;
    fetch_own(j, call.K, dk, dv);
    if (!hand) {
      x = widen_row(k[j], k.size, wide_k);
      y = widen_row(v[j], v.size, wide_v);
    }
    for (; first < last; first += CHUNK) {
      const int64_t n = min64(last - first, CHUNK);
      const int32_t *query = layout.col_query + first;
      fetch_queries(j, first, n);
      if (hand) {
        for (int64_t e = 0; e < n; e++) {
          const float *pair = hand + hand_edge * (layout.col_edge[first + e] - origin);
          s[e] = pair[0];
          d[e] = pair[hand_ds];
        }
      } else {
        recompute(j, first, n, x, y, stats, s, d);
      }
      values.add(s, dout, query, n);
      keys.add(d, q, query, n);
    }
  }
};

}  // namespace AB_ISA::edges
