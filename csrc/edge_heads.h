// Eight or four heads at a time (L), for small D: the lanes of the scores are heads, so that no row is too
// short for a whole vector, and the maximum and the sum of a row need few steps across lanes or none. Long
// rows and columns go head by head, as everywhere; see edge_single.h.
#ifndef ATTNBIAS_EDGE_HEADS_H
#define ATTNBIAS_EDGE_HEADS_H

#include "edge_lists.h"
#include "edge_single.h"

namespace AB_LEVEL {
namespace edge {

constexpr int64_t LARGEST_FUSED = 32;  // numbers of a head

// Heads that go together; 0 = one by one.
AB_INLINE int64_t fused_heads(const ab_call &call) {
  const int64_t n = call.E / VL;
  const bool small = (call.D == call.E || call.D == 0) && call.E % VL == 0 && call.E <= LARGEST_FUSED &&
                     (n == 1 || n == 2 || n == 4) && call.H == call.Hk && call.layout.heads == 1;
  return !small ? 0 : call.H % 8 == 0 ? 8 : call.H % 4 == 0 ? 4 : 0;
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
  for (int i = 0; i < Packed<L>::PARTS; i++) {
    if constexpr (VL <= L) {
      store(heads + i * VL, lanes.part[i]);
    } else if constexpr (L == 8) {
      *(typename Few<L>::V *)heads =
          __builtin_shufflevector(lanes.part[i], lanes.part[i], 0, 1, 2, 3, 4, 5, 6, 7);
    } else {
      *(typename Few<L>::V *)heads = __builtin_shufflevector(lanes.part[i], lanes.part[i], 0, 1, 2, 3);
    }
  }
}

// Combine the edges of a vector: every L lanes of the result are the same.
template <int L, class Op>
AB_INLINE F fold(F x, [[maybe_unused]] const Op &op) {
#if AB_VECTOR_BYTES == 64
  if (L <= 8) {
    x = op(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  }
  if (L <= 4) {
    x = op(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  }
#elif AB_VECTOR_BYTES == 32
  if (L <= 4) x = op(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3));
#endif
  return x;
}

// What a kernel knows when it is compiled: vectors of a head, and whether the heads of a node lie next to
// each other in all tensors, so that addresses need no index.
template <int VECTORS, bool IS_TOGETHER>
struct Shape {
  enum { N = VECTORS, TOGETHER = IS_TOGETHER };
  static constexpr int64_t head(int64_t stride) { return IS_TOGETHER ? VECTORS * VL : stride; }
};

// Fetch row i of L heads.
template <int L, class S, class T>
AB_INLINE void prefetch_heads(const Rows<const T> &rows, int64_t i, int64_t head) {
  if (S::TOGETHER) {
    constexpr int BYTES = L * S::N * VL * (int)sizeof(T);
    AB_UNROLL
    for (int c = 0; c < BYTES; c += 64) __builtin_prefetch((const char *)rows[i] + c, 0, 2);
  } else {
    for (int h = 0; h < L; h++) prefetch(Rows<const T>{rows.data + h * head, rows.stride, rows.size}, i);
  }
}

// As Single::fetch_keys.
template <int L, class S, class T>
AB_INLINE void fetch_head_keys(const Single<T> &a, int64_t i, int64_t first, int64_t n) {
  a.fetch_ahead(i, a.call.K, a.edge_key, first, n, [&](int64_t key) AB_LAMBDA {
    prefetch_heads<L, S>(a.k, key, a.call.k.head);
    prefetch_heads<L, S>(a.v, key, a.call.v.head);
  });
}

// The products of head_dots for COUNT edges at once.
template <int L, class S, int COUNT, class T>
AB_INLINE void dots_step(const T *x, int64_t x_head, const Rows<const T> &rows, int64_t head,
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

// s[j][h] = x_h . rows_h[row[j]], where head h lies `head` numbers further on; 0 for rows without numbers.
template <int L, class S, class T>
AB_APART void head_dots(const T *x, int64_t x_stride, const Rows<const T> &rows, int64_t stride,
                        const int32_t *row, int64_t n, float *s) {
  const int64_t x_head = S::head(x_stride), head = S::head(stride);
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
AB_APART void head_gather(const float *w, const int32_t *place, int64_t origin, const Rows<const T> &rows,
                          int64_t stride, const int32_t *row, int64_t n, const float *alpha,
                          const float *from, int64_t from_head, float *y, int64_t y_stride) {
  constexpr int N = S::N, HEADS = BLOCK / N < L ? BLOCK / N : L;
  const int64_t head = S::head(stride), y_head = S::head(y_stride);
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

// Where the sums of L heads for a row are collected, and how far apart.
template <int L>
AB_INLINE float *collect_heads(float *row, int64_t head, int64_t, float *, int64_t &y_head) {
  y_head = head;
  return row;
}
template <int L, class T>
AB_INLINE float *collect_heads(T *, int64_t, int64_t size, float *buffer, int64_t &y_head) {
  y_head = size;
  return buffer;
}
template <int L>
AB_INLINE void narrow_heads(float *, int64_t, const float *, int64_t) {}
template <int L, class T>
AB_INLINE void narrow_heads(T *row, int64_t head, const float *sums, int64_t size) {
  for (int h = 0; h < L; h++) narrow(row + h * head, sums + h * size, size);
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

template <int L, class T>
AB_INLINE void add_head_bias(const Single<T> &a, float *s, int64_t first, int64_t n) {
  for (int64_t j = 0; a.bias && j < n; j++) {
    const float *bias = a.bias + a.bias_place(first + j);
    for (int h = 0; h < L; h++) s[j * L + h] += bias[h * a.call.bias_head];
  }
}

// Multiply numbers [n, L] of row i by what dropout makes of their weights.
template <int L, class T>
static void drop_heads(const Single<T> &a, int64_t i, const int32_t *key, int64_t n, float *numbers) {
  if (!a.call.drop_below) return;
  const Dropout dropout(a.call);
  for (int64_t at = 0; at < n * L; at += VL) {
    U keys, heads;
    for (int64_t l = 0; l < VL; l++) {
      keys[l] = (uint32_t)key[min64((at + l) / L, n - 1)];
      heads[l] = (uint32_t)(a.head + (at + l) % L);
    }
    const U position = splat((uint32_t)i + dropout.q_start);
    const F share = dropout.share(keys, position, heads, splat((uint32_t)a.batch));
    store(numbers + at, load(numbers + at) * share);
  }
}

// Scores of a row to weights that add up to 1. Unless it is fresh, (m, l) are there to go on from; alpha is
// what to multiply by there.
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
    most.part[i] = fold<L>(most.part[i], [](F x, F y) AB_LAMBDA { return maximum(x, y); });
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
    sum.part[i] = fold<L>(sum.part[i], [](F x, F y) AB_LAMBDA { return x + y; }) + before.part[i];
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

template <int L, class T>
static void fused_forward(const Single<T> &a, int64_t row, int64_t end, const int32_t *ptr) {
  with_shape(a.call, [&](auto shape) AB_LAMBDA {
    typedef decltype(shape) S;
    alignas(64) float s[Packed<L>::ROOM], sums[MOST];
    alignas(64) float m[BATCH][L], l[BATCH][L], alpha[BATCH][L];
    const ab_call &call = a.call, &before = a.before ? *a.before : a.call;
    const int64_t Q = call.Q;
    const bool fresh = !a.lse_before && !a.sink;
    for (int64_t i = row; !fresh && i < end; i++) {
      for (int h = 0; h < L; h++) {
        m[i - row][h] = a.lse_before ? a.lse_before[h * Q + i] : a.sink[h];
        l[i - row][h] = m[i - row][h] != -INFINITY ? 1.0f : 0.0f;
      }
    }
    int64_t at = 0;
    for (int64_t i = row; i < end; i++) {
      const int64_t n = ptr[i + 1] - ptr[i];
      fetch_head_keys<L, S>(a, i, ptr[i], n);
      head_dots<L, S>(a.q[i], call.q.head, a.k, call.k.head, a.edge_key + ptr[i], n, s + at);
      at += round_up(n * L, Packed<L>::STRIDE);
    }
    a.scores(s, nullptr, at);
    at = 0;
    for (int64_t i = row; i < end; i++) {
      const int64_t n = ptr[i + 1] - ptr[i];
      add_head_bias<L>(a, s + at, ptr[i], n);
      head_weights<L>(s + at, n, fresh, m[i - row], l[i - row], alpha[i - row]);
      drop_heads<L>(a, i, a.edge_key + ptr[i], n, s + at);
      at += round_up(n * L, Packed<L>::STRIDE);
    }
    at = 0;
    for (int64_t i = row; i < end; i++) {
      const int64_t n = ptr[i + 1] - ptr[i];
      int64_t y_head;
      float *y = collect_heads<L>(a.out[i], call.out.head, a.out.size, sums, y_head);
      head_gather<L, S>(s + at, nullptr, 0, a.v, call.v.head, a.edge_key + ptr[i], n, alpha[i - row],
                        a.row_or_null(a.out_before, i), before.out.head, y, y_head);
      narrow_heads<L>(a.out[i], call.out.head, y, a.out.size);
      at += round_up(n * L, Packed<L>::STRIDE);
    }
    float *most = m[0], *total = l[0];
    for (int64_t j = 0; j < round_up((end - row) * L, VL); j += VL) {
      store(most + j, lse_of(load(most + j), load(total + j)));
    }
    for (int h = 0; h < L; h++) {
      for (int64_t i = row; i < end; i++) a.lse[h * Q + i] = m[i - row][h];
    }
  });
}

template <int L, class T>
static void fused_backward(const Single<T> &a, int64_t row, int64_t end, const int32_t *ptr, float *hand) {
  with_shape(a.call, [&](auto shape) AB_LAMBDA {
    typedef decltype(shape) S;
    constexpr int PARTS = Packed<L>::PARTS;
    constexpr int64_t STRIDE = Packed<L>::STRIDE, ROOM = Packed<L>::ROOM;
    alignas(64) float s[ROOM], d[ROOM], slopes[ROOM], sums[MOST], lse[BATCH][L], delta[BATCH][STRIDE];
    const ab_call &call = a.call, &before = a.before ? *a.before : a.call;
    int64_t at = 0;
    for (int h = 0; h < L; h++) {
      for (int64_t i = row; i < end; i++) lse[i - row][h] = a.lse[h * call.Q + i];
    }
    for (int64_t i = row; i < end; i++) {
      const int64_t n = ptr[i + 1] - ptr[i];
      const int32_t *key = a.edge_key + ptr[i], self = (int32_t)i;
      fetch_head_keys<L, S>(a, i, ptr[i], n);
      head_dots<L, S>(a.dout[i], call.dout.head, a.o, call.out.head, &self, 1, delta[i - row]);
      for (int h = 0; a.dlse && h < L; h++) delta[i - row][h] -= a.dlse[h * call.Q + i];
      head_dots<L, S>(a.q[i], call.q.head, a.k, call.k.head, key, n, s + at);
      head_dots<L, S>(a.dout[i], call.dout.head, a.v, call.v.head, key, n, d + at);
      at += round_up(n * L, Packed<L>::STRIDE);
    }
    a.scores(s, slopes, at);
    at = 0;
    for (int64_t i = row; i < end; i++) {
      const int64_t n = ptr[i + 1] - ptr[i];
      add_head_bias<L>(a, s + at, ptr[i], n);
      drop_heads<L>(a, i, a.edge_key + ptr[i], n, d + at);
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
      drop_heads<L>(a, i, a.edge_key + ptr[i], n, s + at);
      for (int64_t j = 0; a.dbias && j < n; j++) {
        float *dbias = a.dbias + a.bias_place(ptr[i] + j);
        for (int h = 0; h < L; h++) dbias[h * call.bias_head] += slopes[at + j * L + h];
      }
      for (int64_t j = 0; hand && j < n; j++) {
        float *pair = hand + 2 * L * (ptr[i] - a.origin + j);
        memcpy(pair, s + at + j * L, sizeof(float) * L);
        memcpy(pair + L, d + at + j * L, sizeof(float) * L);
      }
      if (a.dq.data) {
        int64_t y_head;
        float *y = collect_heads<L>(a.dq[i], call.dq.head, a.dq.size, sums, y_head);
        head_gather<L, S>(d + at, nullptr, 0, a.k, call.k.head, a.edge_key + ptr[i], n, nullptr,
                          a.row_or_null(a.dq_before, i), before.dq.head, y, y_head);
        narrow_heads<L>(a.dq[i], call.dq.head, y, a.dq.size);
      }
      at += round_up(n * L, Packed<L>::STRIDE);
    }
  });
}

// row_h = from_h + sum over the edges [first, last) of a column of handed weights times rows_h.
template <int L, class S, class T>
AB_INLINE void fused_sum(const Single<T> &a, const float *hand, const Rows<const T> &rows, int64_t head,
                         int64_t first, int64_t last, const float *from, int64_t from_head, T *row,
                         int64_t row_head) {
  alignas(64) float sums[MOST];
  int64_t y_head;
  float *y = collect_heads<L>(row, row_head, rows.size, sums, y_head);
  do {
    const int64_t n = min64(last - first, CHUNK);
    head_gather<L, S>(hand, a.col_edge + first, a.origin, rows, head, a.col_query + first, n, nullptr, from,
                      from_head, y, y_head);
    from = y;
    from_head = y_head;
    first += CHUNK;
  } while (first < last);
  narrow_heads<L>(row, row_head, y, rows.size);
}

// dk and dv of some columns, from what fused_backward handed over; long ones go in pieces.
template <int L, class T>
static void fused_columns(const Single<T> &a, int64_t begin, int64_t end, const int32_t *ptr,
                          const float *hand) {
  with_shape(a.call, [&](auto shape) AB_LAMBDA {
    typedef decltype(shape) S;
    const ab_call &call = a.call, &before = a.before ? *a.before : a.call;
    for (int64_t j = begin; j < end; j++) {
      const int64_t first = ptr[j], last = ptr[j + 1];
      if (Lists::is_long(last - first)) continue;
      a.fetch_ahead(j, call.Q, a.col_query, first, min64(last - first, CHUNK),
                    [&](int64_t query) AB_LAMBDA {
                      if (a.dk.data) prefetch_heads<L, S>(a.q, query, call.q.head);
                      if (a.dv.data) prefetch_heads<L, S>(a.dout, query, call.dout.head);
                    });
      if (a.dv.data) {
        fused_sum<L, S>(a, hand, a.dout, call.dout.head, first, last, a.row_or_null(a.dv_before, j),
                        before.dv.head, a.dv[j], call.dv.head);
      }
      if (a.dk.data) {
        fused_sum<L, S>(a, hand + L, a.q, call.q.head, first, last, a.row_or_null(a.dk_before, j),
                        before.dk.head, a.dk[j], call.dk.head);
      }
    }
  });
}

}  // namespace edge
}  // namespace AB_LEVEL

#endif
