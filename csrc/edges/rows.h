// The two things that edge kernels do with the neighbours of a row: products with gathered rows, and sums
// of gathered rows.
#pragma once

#include "simd/lanes.h"

namespace AB_ISA::edges {

constexpr int64_t CHUNK = 256;  // scores that wait in a buffer between the passes over a row's edges
constexpr int64_t BATCH = 64;   // rows whose scores share the buffer, at most
constexpr int64_t ROWS_AHEAD = 256, EDGES_AHEAD = 32;  // from a prefetch to its use
constexpr int64_t OWN_AHEAD = 8;                       // the same for the row in work
constexpr int64_t MOST = AB_LARGEST;                   // the largest D and E
constexpr int SUMMED = 8;                              // vectors of a gathered sum that stay in registers

// Large functions that are called from several places: inlined in all they would take long to compile.
#define AB_APART static __attribute__((noinline, unused))

// Rows of one head: `size` numbers each, a stride apart; those of the next head are `head` further on.
template <class T>
struct HeadRows {
  T *data = nullptr;
  int64_t stride = 0, size = 0, head = 0;

  T *operator[](int64_t i) const { return data + i * stride; }
  T *row_or_null(int64_t i) const { return data ? data + i * stride : nullptr; }
};

template <class T>
AB_INLINE HeadRows<T> rows_of(const ab_tensor &tensor, int64_t b, int64_t h, int64_t size) {
  T *data = static_cast<T *>(tensor.data);
  return {data ? data + b * tensor.batch + h * tensor.head : data, tensor.row, size, tensor.head};
}

template <class T>
constexpr bool IS_FLOAT32 = sizeof(T) == sizeof(float);

// The same row as float32 with zeros up to a whole vector: in place, or else copied to `buffer`.
template <class T>
AB_INLINE const float *widen_row(const T *row, int64_t size, float *buffer) {
  if constexpr (IS_FLOAT32<T>)
    if (size % VL == 0) return row;
  copy_row(row, size, buffer, size + VL);
  return buffer;
}

// Where the sums of row i of L heads are formed: in place, or in a buffer that the destructor rounds once.
template <class T, int L = 1>
struct SumRow {
  const HeadRows<T> &rows;
  const int64_t i;
  alignas(IS_FLOAT32<T> ? 8 : 64) float buffer[IS_FLOAT32<T> ? 1 : MOST];
  float *at;     // NULL = not wanted
  int64_t head;  // from a head to the next

  SumRow(const HeadRows<T> &the_rows, int64_t row) : rows(the_rows), i(row) {
    if constexpr (IS_FLOAT32<T>)
      at = rows.row_or_null(i), head = rows.head;
    else
      at = rows.data ? buffer : nullptr, head = rows.size;
  }
  ~SumRow() {
    if constexpr (!IS_FLOAT32<T>) {
      if (!at) return;
      for (int h = 0; h < L; h++) copy_row(at + h * head, rows.size, rows[i] + h * rows.head, rows.size);
    }
  }
};

// y = alpha * x; x may be y, NULL is 0.
AB_INLINE void scale_row(float alpha, const float *x, int64_t size, float *y) {
  for (int64_t c = 0; c < size; c++) y[c] = x ? alpha * x[c] : 0.0f;
}

// y = x + the sum of the pieces of a long row, in order; x may be y, NULL is 0.
AB_INLINE void add_pieces(const float *x, int64_t size, const float *pieces, int64_t count, int64_t stride,
                          float *y) {
  scale_row(1.0f, x, size, y);
  for (int64_t p = 0; p < count; p++) {
    for (int64_t c = 0; c < size; c++) y[c] += pieces[p * stride + c];
  }
}

// e^x for x up to 88, 0 below -87.7 and for -inf; relative error 1e-7 for every x. An edge's time goes into
// its rows, so here, unlike in a tile, there is time to leave the score unscaled and get the last bit
// right.
AB_INLINE F exp_of(F x) {
  x = maximum(splat(-88.0f), x);
  const F magic = splat(12582912.0f + 127.0f);  // 1.5 * 2^23 rounds to an integer; the bias of exponents
  const F t = x * splat(LOG2_E) + magic, n = t - magic;
  F f = x - n * splat(0.693359375f);  // log 2 in two parts, of which the first times n is exact
  f = f - n * splat(-2.12194440e-4f);
  F p = f * splat(1.9875691500e-4f) + splat(1.3981999507e-3f);
  p = p * f + splat(8.3334519073e-3f);
  p = p * f + splat(4.1665795894e-2f);
  p = p * f + splat(1.6666665459e-1f);
  p = p * f + splat(5.0000001201e-1f);
  p = p * (f * f) + f + splat(1.0f);
  return p * (F)((I)t << 23);
}

// The natural logarithm of normal positive numbers; relative error 1e-7 (Cephes).
AB_INLINE F ln_of(F x) {
  const I bits = (I)((U)x - 0x3f3504f3u);  // fractions from sqrt(1/2) to sqrt(2); lanes may hold anything
  const F e = __builtin_convertvector(bits >> 23, F);
  const F f = (F)((bits & 0x007fffff) + 0x3f3504f3) - splat(1.0f), z = f * f;
  F p = f * splat(7.0376836292e-2f) + splat(-1.1514610310e-1f);
  p = p * f + splat(1.1676998740e-1f);
  p = p * f + splat(-1.2420140846e-1f);
  p = p * f + splat(1.4249322787e-1f);
  p = p * f + splat(-1.6668057665e-1f);
  p = p * f + splat(2.0000714765e-1f);
  p = p * f + splat(-2.4999993993e-1f);
  p = p * f + splat(3.3333331174e-1f);
  p = p * f * z + e * splat(-2.12194440e-4f) - splat(0.5f) * z;
  return f + p + e * splat(0.693359375f);
}

// The first n lanes of x; `value` in the others.
AB_INLINE F first_lanes(F x, int64_t n, float value) {
  I lane;
  for (int i = 0; i < VL; i++) lane[i] = i;
  return lane < (int32_t)n ? x : splat(value);
}

// Fill n numbers up to a whole vector, which the next load finds in one piece.
AB_INLINE void fill_up(float *s, int64_t n, float value) {
  float *last = s + n / VL * VL;
  if (n % VL) store(last, first_lanes(load(last), n % VL, value));
}

// The largest of n numbers and m, and their sum; whole vectors can be loaded.
AB_INLINE float largest_of(const float *s, int64_t n, float m) {
  F most = splat(m);
  for (int64_t j = 0; j < n; j += VL) most = maximum(most, first_lanes(load(s + j), n - j, -INFINITY));
  return largest(most);
}

AB_INLINE float total_of(const float *s, int64_t n) {
  F sum = {};
  for (int64_t j = 0; j < n; j += VL) sum += first_lanes(load(s + j), n - j, 0.0f);
  return sum_of(sum);
}

// Write x n times, and on to a whole vector: rows are written in order, so the next one overwrites that.
AB_INLINE void spread(float x, int64_t n, float *y) {
  for (int64_t j = 0; j < n; j += VL) store(y + j, splat(x));
}

// s[j] = x . rows[row[j]] for J neighbours at once; from `left` on `rest` in their place. N whole vectors,
// or as many as the rows have when N is 0.
template <int J, int N, class T>
AB_INLINE void dot_step(const float *x, const HeadRows<const T> &rows, const int32_t *row, int64_t left,
                        const T *rest, float *s) {
  const T *p[J];
  AB_UNROLL
  for (int j = 0; j < J; j++) p[j] = j < left ? rows[row[j]] : rest;
  F sum[J] = {};
  AB_UNROLL
  for (int c = 0; c < N; c++) {
    const F a = load(x + c * VL);
    AB_UNROLL
    for (int j = 0; j < J; j++) sum[j] += a * load(p[j] + c * VL);
  }
  int64_t c = 0;
  while (!N && c + VL <= rows.size) {
    F part[J] = {};  // of 128 numbers: long rows add up in two steps
    for (const int64_t stop = min64(c + 128, rows.size - rows.size % VL); c < stop; c += VL) {
      const F a = load(x + c);
      AB_UNROLL
      for (int j = 0; j < J; j++) part[j] += a * load(p[j] + c);
    }
    AB_UNROLL
    for (int j = 0; j < J; j++) sum[j] += part[j];
  }
  if (!N && c < rows.size) {
    const F a = load(x + c);
    AB_UNROLL
    for (int j = 0; j < J; j++) sum[j] += a * load_some(p[j] + c, rows.size - c);
  }
  store_sums<J>(sum, s);
}

template <int N, class T>
AB_INLINE void dot_steps(const float *x, const HeadRows<const T> &rows, const int32_t *row, int64_t n,
                         float *s, const T *also) {
  const T *const rest = also || n == 0 ? also : rows[row[n - 1]];
  int64_t j = 0;
  for (; j + VL <= n; j += VL) dot_step<VL, N>(x, rows, row + j, VL, rest, s + j);
  for (; j < n + (also != nullptr); j += 4) dot_step<4, N>(x, rows, row + j, n - j, rest, s + j);
}

// s[j] = x . rows[row[j]] for j < n, and s[n] = x . also unless that is NULL; x is widened, s has room up
// to a whole vector. Usual sizes have code of their own, with addresses that need no index.
template <class T>
AB_APART void dots(const float *x, const HeadRows<const T> &rows, const int32_t *row, int64_t n, float *s,
                   const T *also = nullptr) {
  switch (rows.size) {
    case 32: return dot_steps<32 / VL>(x, rows, row, n, s, also);
    case 64: return dot_steps<64 / VL>(x, rows, row, n, s, also);
    case 128: return dot_steps<128 / VL>(x, rows, row, n, s, also);
    default: return dot_steps<0>(x, rows, row, n, s, also);
  }
}

// The rows to fetch into the second cache before they are read, because the machine does not foresee the
// rows that a list names: the row at the diagonal, which is near most neighbours in a graph of a good
// order, or the row of each edge.
enum class Fetch { nothing, diagonal, edges };

template <class T>
AB_INLINE void prefetch(const HeadRows<const T> &rows, int64_t i) {
  const char *p = (const char *)rows[i];
  for (int64_t c = 0; c < rows.size * (int64_t)sizeof(T); c += 64) __builtin_prefetch(p + c, 0, 2);
}

// The same to write the row, if it is wanted.
template <class T>
AB_INLINE void prefetch(const HeadRows<T> &rows, int64_t i) {
  const char *p = (const char *)rows.row_or_null(i);
  for (int64_t c = 0; p && c < rows.size * (int64_t)sizeof(T); c += 64) __builtin_prefetch(p + c, 1, 2);
}

// y = alpha * before + sum_j w[j] * rows[row[j]], for N vectors; several sets of sums where one would
// wait for its own FMAs. `before` may be y, NULL is 0.
template <int N, class T>
AB_INLINE void gather_block(const float *w, const T *data, int64_t stride, const int32_t *row, int64_t n,
                            float alpha, const float *before, float *y) {
  constexpr int SETS = N <= 2 ? 4 : N <= 4 ? 2 : 1;
  F sum[SETS][N] = {};
  int64_t j = 0;
  for (; j + SETS <= n; j += SETS) {
    AB_UNROLL
    for (int i = 0; i < SETS; i++) {
      const T *p = data + row[j + i] * stride;
      const F weight = splat(w[j + i]);
      AB_UNROLL
      for (int c = 0; c < N; c++) sum[i][c] += weight * load(p + c * VL);
    }
  }
  for (; j < n; j++) {
    const T *p = data + row[j] * stride;
    const F weight = splat(w[j]);
    AB_UNROLL
    for (int c = 0; c < N; c++) sum[0][c] += weight * load(p + c * VL);
  }
  AB_UNROLL
  for (int c = 0; c < N; c++) {
    AB_UNROLL
    for (int i = 1; i < SETS; i++) sum[0][c] += sum[i][c];
    if (before) sum[0][c] += splat(alpha) * load(before + c * VL);  // last: long rows add up in two steps
    store(y + c * VL, sum[0][c]);
  }
}

// The same for the last, partial vector.
template <class T>
static void gather_some(const float *w, const T *data, int64_t stride, const int32_t *row, int64_t n,
                        float alpha, const float *before, float *y, int64_t size) {
  F sum = {};
  for (int64_t j = 0; j < n; j++) sum += splat(w[j]) * load_some(data + row[j] * stride, size);
  if (before) sum += splat(alpha) * load_some(before, size);
  store_some(y, sum, size);
}

// y = alpha * before + sum_j w[j] * rows[row[j]].
template <class T>
AB_APART void gather(const float *w, const HeadRows<const T> &rows, const int32_t *row, int64_t n,
                     float alpha, const float *before, float *y) {
  if constexpr (64 / VL <= SUMMED) {
    if (rows.size == 64) return gather_block<64 / VL>(w, rows.data, rows.stride, row, n, alpha, before, y);
  }
  const int64_t vectors = rows.size / VL;
  int64_t blocks = (vectors + SUMMED - 1) / SUMMED, c = 0;
  for (; blocks > 0; blocks--) {
    const int64_t width = (vectors - c / VL + blocks - 1) / blocks;
    const T *data = rows.data + c;
    const float *from = before ? before + c : before;
    with_count<SUMMED>(width, [&](auto n_vectors) AB_LAMBDA {
      gather_block<n_vectors.value>(w, data, rows.stride, row, n, alpha, from, y + c);
    });
    c += width * VL;
  }
  if (c < rows.size) {
    gather_some(w, rows.data + c, rows.stride, row, n, alpha, before ? before + c : before, y + c,
                rows.size - c);
  }
}

}  // namespace AB_ISA::edges
