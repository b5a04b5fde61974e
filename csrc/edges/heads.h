// Eight or four heads at a time (L), for small D: the lanes of the scores are heads, so that no row is too
// short for a whole vector, and the maximum and the sum of a row need few steps across lanes or none. Long
// rows and columns go head by head; see single.h.
#pragma once

#include "edges/lists.h"
#include "edges/single.h"

namespace AB_ISA::edges {

constexpr int64_t LARGEST_FUSED = 32;  // numbers of a head

// Heads that go together; 0 = one by one.
AB_INLINE int64_t fused_heads(const ab_call &call) {
  const int64_t n = call.E / VL;
  const bool small = (call.D == call.E || call.D == 0) && call.E % VL == 0 && call.E <= LARGEST_FUSED &&
                     (n == 1 || n == 2 || n == 4) && call.H == call.Hk && call.layout.heads == 1;
  return !small ? 0 : call.H % 8 == 0 ? 8 : call.H % 4 == 0 ? 4 : 0;
}

// Call body(Count<L>) for L heads that go together; 0 = one by one.
template <class Body>
AB_INLINE void with_fused(int64_t heads, const Body &body) {
  if (heads == 8) return body(Count<8>());
  if (heads == 4) return body(Count<4>());
  body(Count<0>());
}

// How the scores of L heads lie in vectors: edge after edge.
template <int L>
struct Packed {
  static constexpr int PARTS = VL < L ? L / VL : 1;            // vectors of an edge
  static constexpr int COPIES = VL < L ? 1 : VL / L;           // edges in a vector
  static constexpr int64_t STRIDE = PARTS * VL;                // from the first such vectors to the next
  static constexpr int64_t ROOM = CHUNK * L + BATCH * STRIDE;  // of a batch of rows
};

// L lanes, again for each edge that a vector has room for.
template <int L>
struct Lanes {
  F part[Packed<L>::PARTS];
};

// L numbers in memory.
template <int L>
struct Few {
  typedef float V __attribute__((vector_size(4 * L), aligned(4), may_alias));
};

template <int L>
AB_INLINE Lanes<L> lanes_of(const float *heads) {
  Lanes<L> lanes;
  if constexpr (VL <= L) {
    AB_UNROLL
    for (int i = 0; i < Packed<L>::PARTS; i++) lanes.part[i] = load(heads + i * VL);
  } else {
    const typename Few<L>::V x = *(const typename Few<L>::V *)heads;
#if AB_VECTOR_BYTES == 64
    if constexpr (L == 8) {
      lanes.part[0] = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7);
    } else {
      lanes.part[0] = __builtin_shufflevector(x, x, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3);
    }
#elif AB_VECTOR_BYTES == 32
    lanes.part[0] = __builtin_shufflevector(x, x, 0, 1, 2, 3, 0, 1, 2, 3);
#endif
  }
  return lanes;
}

template <int L>
AB_INLINE void store_lanes(const Lanes<L> &lanes, float *heads) {
  AB_UNROLL
  for (int i = 0; i < Packed<L>::PARTS; i++)
    memcpy(heads + i * VL, &lanes.part[i], sizeof(float) * (L < VL ? L : VL));
}

// Sizes that a kernel is compiled for: vectors of a head, and whether the heads of a node lie next to each
// other in all tensors, so that addresses need no index.
template <int VECTORS, bool IS_TOGETHER>
struct Shape {
  enum { N = VECTORS, TOGETHER = IS_TOGETHER };
  static constexpr int64_t head(int64_t stride) { return IS_TOGETHER ? VECTORS * VL : stride; }
};

// Fetch row i of L heads.
template <int L, class S, class T>
AB_INLINE void prefetch_heads(const HeadRows<const T> &rows, int64_t i) {
  if (S::TOGETHER) {
    constexpr int BYTES = L * S::N * VL * (int)sizeof(T);
    AB_UNROLL
    for (int c = 0; c < BYTES; c += 64) __builtin_prefetch((const char *)rows[i] + c, 0, 2);
  } else {
    for (int h = 0; h < L; h++)
      prefetch(HeadRows<const T>{rows.data + h * rows.head, rows.stride, rows.size, 0}, i);
  }
}

// As Single::fetch_keys.
template <int L, class S, class T>
AB_INLINE void fetch_head_keys(const Single<T> &a, int64_t i, int64_t first, int64_t n) {
  a.fetch_ahead(i, a.call.K, a.layout.edge_key, first, n, [&](int64_t key) AB_LAMBDA {
    prefetch_heads<L, S>(a.k, key);
    prefetch_heads<L, S>(a.v, key);
  });
}

// The products of head_dots for COUNT edges at once.
template <int L, class S, int COUNT, class T>
AB_INLINE void dots_step(const T *x, int64_t x_head, const HeadRows<const T> &rows, int64_t head,
                         const int32_t *row, float *s) {
  F sum[L * COUNT] = {};
  AB_UNROLL
  for (int i = 0; i < COUNT; i++) {
    const T *p = rows[row[i]];
    AB_UNROLL
    for (int h = 0; h < L; h++) {
      AB_UNROLL
      for (int c = 0; c < S::N; c++) {
        sum[i * L + h] += load(x + h * x_head + c * VL) * load(p + h * head + c * VL);
      }
    }
  }
  store_sums<L * COUNT>(sum, s);
}

// s[j][h] = x_h . rows_h[row[j]], where the next head of x is `stride` further on; 0 for rows without
// numbers.
template <int L, class S, class T>
AB_APART void head_dots(const T *x, int64_t stride, const HeadRows<const T> &rows, const int32_t *row,
                        int64_t n, float *s) {
  const int64_t x_head = S::head(stride), head = S::head(rows.head);
  if (rows.size == 0) {
    memset(s, 0, sizeof(float) * (size_t)round_up(n * L, Packed<L>::STRIDE));
    return;
  }
  constexpr int COPIES = Packed<L>::COPIES;
  int64_t j = 0;
  for (; j + COPIES <= n; j += COPIES) dots_step<L, S, COPIES>(x, x_head, rows, head, row + j, s + j * L);
  if (COPIES > 2 && j + 2 <= n) {
    dots_step<L, S, 2>(x, x_head, rows, head, row + j, s + j * L);
    j += 2;
  }
  if (COPIES > 1 && j < n) dots_step<L, S, 1>(x, x_head, rows, head, row + j, s + j * L);
}

// y_h = alpha[h] * from_h + sum_j w[j][h] * rows_h[row[j]]. The weights of edge j are at w + j * L, or at
// w + (place[j] - origin) * 2 L.
template <int L, class S, class T>
AB_APART void head_gather(const float *w, const int32_t *place, int64_t origin,
                          const HeadRows<const T> &rows, const int32_t *row, int64_t n, const float *alpha,
                          const float *from, int64_t from_head, float *y, int64_t y_stride) {
  constexpr int N = S::N, HEADS = SUMMED / N < L ? SUMMED / N : L;
  const int64_t head = S::head(rows.head), y_head = S::head(y_stride);
  for (int h0 = 0; h0 < L; h0 += HEADS) {
    F sum[HEADS][N] = {};
    for (int64_t j = 0; j < n; j++) {
      const float *weight = (place ? w + (place[j] - origin) * 2 * L : w + j * L) + h0;
      const T *p = rows[row[j]] + h0 * head;
      AB_UNROLL
      for (int h = 0; h < HEADS; h++) {
        AB_UNROLL
        for (int c = 0; c < N; c++) sum[h][c] += splat(weight[h]) * load(p + h * head + c * VL);
      }
    }
    AB_UNROLL
    for (int h = 0; h < HEADS; h++) {
      AB_UNROLL
      for (int c = 0; c < N; c++) {
        const float *before = from ? from + (h0 + h) * from_head + c * VL : from;
        if (before) sum[h][c] += splat(alpha ? alpha[h0 + h] : 1.0f) * load(before);
        store(y + (h0 + h) * y_head + c * VL, sum[h][c]);
      }
    }
  }
}

AB_INLINE bool are_together(const ab_call &call) {
  const ab_tensor *of_value[] = {&call.v, &call.out, &call.dout, &call.dv};
  const ab_tensor *of_key[] = {&call.q, &call.k, &call.dq, &call.dk};
  bool together = true;
  for (const ab_tensor *x : of_value) together = together && (!x->data || x->head == call.E);
  for (const ab_tensor *x : of_key) together = together && (!x->data || !call.D || x->head == call.D);
  return together;
}

// Call body with a Shape.
template <bool IS_TOGETHER, class Body>
AB_INLINE void with_size(int64_t size, const Body &body) {
  if (size == VL) return body(Shape<1, IS_TOGETHER>());
  if (size == 2 * VL) return body(Shape<2, IS_TOGETHER>());
  if constexpr (4 * VL <= LARGEST_FUSED) return body(Shape<4, IS_TOGETHER>());
}
template <class Body>
AB_INLINE void with_shape(const ab_call &call, const Body &body) {
  are_together(call) ? with_size<true>(call.E, body) : with_size<false>(call.E, body);
}

// Call body(i, n, at) for the rows [row, end): row i has n edges, whose scores lie at `at`. Returns the end
// of the scores.
template <int L, class Body>
AB_INLINE int64_t each_row(int64_t row, int64_t end, const int32_t *ptr, const Body &body) {
  int64_t at = 0;
  for (int64_t i = row; i < end; i++) {
    const int64_t n = ptr[i + 1] - ptr[i];
    body(i, n, at);
    at += round_up(n * L, Packed<L>::STRIDE);
  }
  return at;
}

template <int L, class T>
AB_INLINE void add_head_bias(const Single<T> &a, float *s, int64_t first, int64_t n) {
  if (!a.bias) return;
  for (int64_t j = 0; j < n; j++) {
    const float *bias = a.bias + a.bias_place(first + j);
    for (int h = 0; h < L; h++) s[j * L + h] += bias[h * a.call.bias_head];
  }
}

// Apply dropout to numbers [n, L] of row i: multiply them by 0 or by the share of kept pairs.
template <int L, class T>
static void drop_heads(const Single<T> &a, int64_t i, const int32_t *key, int64_t n, float *numbers) {
  if (!a.call.drop_below) return;
  const Dropout dropout(a.call);
  for (int64_t at = 0; at < n * L; at += VL) {
    U keys, heads;
    for (int64_t l = 0; l < VL; l++) {
      keys[l] = (uint32_t)key_position(a.call, key[min64((at + l) / L, n - 1)]);
      heads[l] = (uint32_t)((at + l) % L);
    }
    const U position = splat((uint32_t)query_position(a.call, i));
    const F share = dropout.share(keys, position, dropout.head(a.head) + heads, dropout.batch(a.batch));
    store(numbers + at, load(numbers + at) * share);
  }
}

// Turn the scores of a row into weights that add up to 1. Unless it is fresh, continue from (m, l); alpha
// is then the factor of the sums so far.
template <int L>
AB_APART void head_weights(float *s, int64_t n, bool fresh, float *m, float *l, float *alpha) {
  constexpr int PARTS = Packed<L>::PARTS;
  constexpr int64_t STRIDE = Packed<L>::STRIDE;
  Lanes<L> most, sum = {}, by, base;
  // Not filled up in memory, where the next load would wait for a store of some lanes.
  const auto score = [&](int64_t j) AB_LAMBDA {
    return Packed<L>::COPIES > 1 ? first_lanes(load(s + j), n * L - j, -INFINITY) : load(s + j);
  };
  AB_UNROLL
  for (int i = 0; i < PARTS; i++) most.part[i] = splat(-INFINITY);
  if (!fresh) most = lanes_of<L>(m);
  for (int64_t j = 0; j < n * L; j += STRIDE) {
    AB_UNROLL
    for (int i = 0; i < PARTS; i++) most.part[i] = maximum(most.part[i], score(j + i * VL));
  }
  AB_UNROLL
  for (int i = 0; i < PARTS; i++) {
    most.part[i] = fold_maximum<L>(most.part[i]);
    base.part[i] = most.part[i] == splat(-INFINITY) ? F{} : most.part[i];
  }
  for (int64_t j = 0; j < n * L; j += STRIDE) {
    AB_UNROLL
    for (int i = 0; i < PARTS; i++) {
      const F p = exp_of(score(j + i * VL) - base.part[i]);
      store(s + j + i * VL, p);
      sum.part[i] += p;
    }
  }
  Lanes<L> before = {};
  if (!fresh) {
    const Lanes<L> m_before = lanes_of<L>(m), l_before = lanes_of<L>(l);
    AB_UNROLL
    for (int i = 0; i < PARTS; i++)
      before.part[i] = l_before.part[i] * exp_of(m_before.part[i] - base.part[i]);
  }
  AB_UNROLL
  for (int i = 0; i < PARTS; i++) {
    sum.part[i] = fold_sum<L>(sum.part[i]) + before.part[i];
    by.part[i] = sum.part[i] > F{} ? splat(1.0f) / sum.part[i] : F{};
    before.part[i] *= by.part[i];
  }
  for (int64_t j = 0; j < n * L; j += STRIDE) {
    AB_UNROLL
    for (int i = 0; i < PARTS; i++) store(s + j + i * VL, load(s + j + i * VL) * by.part[i]);
  }
  store_lanes(most, m);
  store_lanes(sum, l);
  store_lanes(before, alpha);
}

// Write the largest score of row i for L heads, from scores s [n, L].
template <int L, class T>
static void put_head_maxima(const Single<T> &a, int64_t i, const float *s, int64_t n) {
  for (int h = 0; h < L; h++) {
    float *const to = a.row_max + h * a.call.Q + i;
    float top = a.lse_before ? *to : -INFINITY;
    for (int64_t j = 0; j < n; j++) top = fmaxf(top, s[j * L + h]);
    *to = top;
  }
}

// As Single::forward_rows and backward_rows.
template <int L, class T>
static void forward_rows(const Single<T> &a, int64_t row, int64_t end, const int32_t *ptr) {
  with_shape(a.call, [&](auto shape) AB_LAMBDA {
    typedef decltype(shape) S;
    alignas(64) float s[Packed<L>::ROOM], m[BATCH][L], l[BATCH][L], alpha[BATCH][L];
    const int32_t *edge_key = a.layout.edge_key;
    const int64_t Q = a.call.Q;
    const bool fresh = !a.lse_before && !a.sink;
    if (!fresh) {
      for (int64_t i = row; i < end; i++) {
        for (int h = 0; h < L; h++) {
          m[i - row][h] = a.lse_before ? a.lse_before[h * Q + i] : a.sink[h];
          l[i - row][h] = m[i - row][h] != -INFINITY ? 1.0f : 0.0f;
        }
      }
    }
    const int64_t count = each_row<L>(row, end, ptr, [&](int64_t i, int64_t n, int64_t at) AB_LAMBDA {
      fetch_head_keys<L, S>(a, i, ptr[i], n);
      head_dots<L, S>(a.q[i], a.q.head, a.k, edge_key + ptr[i], n, s + at);
    });
    a.scores(s, nullptr, count);
    each_row<L>(row, end, ptr, [&](int64_t i, int64_t n, int64_t at) AB_LAMBDA {
      add_head_bias<L>(a, s + at, ptr[i], n);
      if (a.row_max) put_head_maxima<L>(a, i, s + at, n);
      head_weights<L>(s + at, n, fresh, m[i - row], l[i - row], alpha[i - row]);
      drop_heads<L>(a, i, edge_key + ptr[i], n, s + at);
    });
    each_row<L>(row, end, ptr, [&](int64_t i, int64_t n, int64_t at) AB_LAMBDA {
      const SumRow<T, L> y(a.out, i);
      head_gather<L, S>(s + at, nullptr, 0, a.v, edge_key + ptr[i], n, alpha[i - row],
                        a.out_before.row_or_null(i), a.out_before.head, y.at, y.head);
    });
    float *most = m[0], *total = l[0];
    for (int64_t j = 0; j < round_up((end - row) * L, VL); j += VL) {
      store(most + j, lse_of(load(most + j), load(total + j)));
    }
    for (int h = 0; h < L; h++) {
      for (int64_t i = row; i < end; i++) a.lse[h * Q + i] = m[i - row][h];
      if (!a.row_max) continue;
      for (int64_t j = h * Q + row; j < h * Q + end; j++) a.row_max[j] = max_or_nan(a.row_max[j], a.lse[j]);
    }
  });
}

template <int L, class T>
static void backward_rows(const Single<T> &a, int64_t row, int64_t end, const int32_t *ptr, float *hand) {
  with_shape(a.call, [&](auto shape) AB_LAMBDA {
    typedef decltype(shape) S;
    constexpr int PARTS = Packed<L>::PARTS;
    constexpr int64_t STRIDE = Packed<L>::STRIDE, ROOM = Packed<L>::ROOM;
    alignas(64) float s[ROOM], d[ROOM], slopes[ROOM], lse[BATCH][L], delta[BATCH][STRIDE];
    const int32_t *edge_key = a.layout.edge_key;
    const int64_t Q = a.call.Q;
    for (int h = 0; h < L; h++) {
      for (int64_t i = row; i < end; i++) lse[i - row][h] = a.lse[h * Q + i];
    }
    const int64_t count = each_row<L>(row, end, ptr, [&](int64_t i, int64_t n, int64_t at) AB_LAMBDA {
      const int32_t *key = edge_key + ptr[i], self = (int32_t)i;
      fetch_head_keys<L, S>(a, i, ptr[i], n);
      head_dots<L, S>(a.dout[i], a.dout.head, a.o, &self, 1, delta[i - row]);
      if (a.dlse)
        for (int h = 0; h < L; h++) delta[i - row][h] -= a.dlse[h * Q + i];
      head_dots<L, S>(a.q[i], a.q.head, a.k, key, n, s + at);
      head_dots<L, S>(a.dout[i], a.dout.head, a.v, key, n, d + at);
    });
    a.scores(s, slopes, count);
    each_row<L>(row, end, ptr, [&](int64_t i, int64_t n, int64_t at) AB_LAMBDA {
      add_head_bias<L>(a, s + at, ptr[i], n);
      drop_heads<L>(a, i, edge_key + ptr[i], n, d + at);
      Lanes<L> row_lse = lanes_of<L>(lse[i - row]), row_delta = lanes_of<L>(delta[i - row]);
      AB_UNROLL
      for (int c = 0; c < PARTS; c++) {  // the lse of an empty row is a constant
        const I empty = row_lse.part[c] == splat(-INFINITY);
        row_lse.part[c] = empty ? F{} : row_lse.part[c];
        row_delta.part[c] = empty ? F{} : row_delta.part[c];
      }
      for (int64_t j = at; j < at + n * L; j += STRIDE) {
        AB_UNROLL
        for (int c = 0; c < PARTS; c++)
          a.weigh(s, d, slopes, row_lse.part[c], row_delta.part[c], j + c * VL);
      }
      drop_heads<L>(a, i, edge_key + ptr[i], n, s + at);
      if (a.dbias) {
        for (int64_t j = 0; j < n; j++) {
          float *dbias = a.dbias + a.bias_place(ptr[i] + j);
          for (int h = 0; h < L; h++) dbias[h * a.call.bias_head] += slopes[at + j * L + h];
        }
      }
      if (hand) {
        for (int64_t j = 0; j < n; j++) {
          float *pair = hand + 2 * L * (ptr[i] - a.origin + j);
          memcpy(pair, s + at + j * L, sizeof(float) * L);
          memcpy(pair + L, d + at + j * L, sizeof(float) * L);
        }
      }
      if (!a.dq.data) return;
      const SumRow<T, L> y(a.dq, i);
      head_gather<L, S>(d + at, nullptr, 0, a.k, edge_key + ptr[i], n, nullptr, a.dq_before.row_or_null(i),
                        a.dq_before.head, y.at, y.head);
    });
  });
}

// sums_h[j] = before_h[j] + the sum over the edges [first, last) of column j of handed weights times
// rows_h.
template <int L, class S, class T>
AB_INLINE void fused_sum(const Single<T> &a, const float *hand, const HeadRows<const T> &rows, int64_t j,
                         int64_t first, int64_t last, const HeadRows<const float> &before,
                         const HeadRows<T> &sums) {
  if (!sums.data) return;
  const SumRow<T, L> y(sums, j);
  const float *from = before.row_or_null(j);
  int64_t from_head = before.head;
  do {
    const int64_t n = min64(last - first, CHUNK);
    head_gather<L, S>(hand, a.layout.col_edge + first, a.origin, rows, a.layout.col_query + first, n,
                      nullptr, from, from_head, y.at, y.head);
    from = y.at;
    from_head = y.head;
    first += CHUNK;
  } while (first < last);
}

// Write dk and dv of some columns from p and dS that backward_rows handed over; long ones go in pieces.
template <int L, class T>
static void add_columns(const Single<T> &a, int64_t begin, int64_t end, const int32_t *ptr,
                        const float *hand) {
  with_shape(a.call, [&](auto shape) AB_LAMBDA {
    typedef decltype(shape) S;
    for (int64_t j = begin; j < end; j++) {
      const int64_t first = ptr[j], last = ptr[j + 1];
      if (Lists::is_long(last - first)) continue;
      a.fetch_ahead(j, a.call.Q, a.layout.col_query, first, min64(last - first, CHUNK),
                    [&](int64_t query) AB_LAMBDA {
                      if (a.dk.data) prefetch_heads<L, S>(a.q, query);
                      if (a.dv.data) prefetch_heads<L, S>(a.dout, query);
                    });
      fused_sum<L, S>(a, hand, a.dout, j, first, last, a.dv_before, a.dv);
      fused_sum<L, S>(a, hand + L, a.q, j, first, last, a.dk_before, a.dk);
    }
  });
}

}  // namespace AB_ISA::edges
