// Rows of tensors as float32: in place where they are, else widened or transposed into a buffer.
#ifndef ATTNBIAS_PACK_H
#define ATTNBIAS_PACK_H

#include "gemm.h"

namespace AB_LEVEL::tiles {

typedef float Quad __attribute__((vector_size(16)));
typedef float AnyQuad __attribute__((vector_size(16), aligned(4), may_alias));

// Row i starts at `at + i * row`.
struct Rows {
  const float *at;
  int64_t row;
};

template <class T>
AB_INLINE T *row_of(const ab_tensor &x, int64_t b, int64_t h, int64_t i) {
  return (T *)x.data + b * x.batch + h * x.head + i * x.row;
}

template <class Pointer>
struct Pointee;
template <class T>
struct Pointee<T *> {
  typedef T Type;
};

// Call body(first), where first is the typed pointer to row i.
template <class Body>
AB_INLINE void with_row(const ab_tensor &x, int64_t b, int64_t h, int64_t i, const Body &body) {
  switch (x.dtype) {
    case AB_BFLOAT16: return body(row_of<Bfloat16>(x, b, h, i));
    case AB_FLOAT16: return body(row_of<Float16>(x, b, h, i));
    default: return body(row_of<float>(x, b, h, i));
  }
}

// Rows [n, columns] widened to [n, width]; what is past `columns` becomes 0.
template <class T>
AB_INLINE void widen(const T *from, int64_t from_row, int64_t n, int64_t columns, float *to,
                     int64_t width) {
  for (int64_t i = 0; i < n; i++) {
    const T *x = from + i * from_row;
    float *y = to + i * width;
    int64_t c = 0;
    for (; c + VL <= columns; c += VL) store(y + c, load(x + c));
    if (c == columns) continue;
    F last = load_some(x + c, columns - c);
    if (c + VL <= width)
      store(y + c, last);
    else
      store_some(y + c, last, width - c);
  }
}

// Rows first .. first + n as float32 [n, width], the columns past `columns` 0.
static void copy_rows(const ab_tensor &x, int64_t b, int64_t h, int64_t first, int64_t n, int64_t columns,
                      int64_t width, float *to) {
  with_row(x, b, h, first, [&](auto *from) AB_LAMBDA { widen(from, x.row, n, columns, to, width); });
}

// The same, read where they lie if they can be, else copied to `buffer`.
static Rows rows_as_float(const ab_tensor &x, int64_t b, int64_t h, int64_t first, int64_t n,
                          int64_t columns, int64_t width, float *buffer) {
  if (x.dtype == AB_FLOAT32 && columns == width) return {row_of<float>(x, b, h, first), x.row};
  copy_rows(x, b, h, first, n, columns, width, buffer);
  return {buffer, width};
}

// float32 rows [n, columns] rounded once to the tensor's dtype.
static void write_rows(const ab_tensor &x, int64_t b, int64_t h, int64_t first, int64_t n, int64_t columns,
                       const float *from, int64_t from_row) {
  with_row(x, b, h, first, [&](auto *to) AB_LAMBDA {
    for (int64_t i = 0; i < n; i++) {
      const float *row = from + i * from_row;
      auto *at = to + i * x.row;
      int64_t c = 0;
      for (; c + VL <= columns; c += VL) store(at + c, load(row + c));
      if (c < columns) store_some(at + c, load_some(row + c, columns - c), columns - c);
    }
  });
}

AB_INLINE void transpose_quads(const float *from, int64_t from_row, float *to, int64_t to_row) {
  Quad a = *(const AnyQuad *)from, b = *(const AnyQuad *)(from + from_row);
  Quad c = *(const AnyQuad *)(from + 2 * from_row), d = *(const AnyQuad *)(from + 3 * from_row);
  Quad ab_low = __builtin_shufflevector(a, b, 0, 4, 1, 5),
       ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
  Quad cd_low = __builtin_shufflevector(c, d, 0, 4, 1, 5),
       cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
  *(AnyQuad *)to = __builtin_shufflevector(ab_low, cd_low, 0, 1, 4, 5);
  *(AnyQuad *)(to + to_row) = __builtin_shufflevector(ab_low, cd_low, 2, 3, 6, 7);
  *(AnyQuad *)(to + 2 * to_row) = __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5);
  *(AnyQuad *)(to + 3 * to_row) = __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7);
}

// to(c, r) = from(r, c) for r < rows, c < columns.
static void transpose(const float *from, int64_t from_row, int64_t rows, int64_t columns, float *to,
                      int64_t to_row) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    const float *x = from + r * from_row;
    int64_t c = 0;
    for (; c + 4 <= columns; c += 4) transpose_quads(x + c, from_row, to + c * to_row + r, to_row);
    for (; c < columns; c++)
      for (int64_t i = 0; i < 4; i++) to[c * to_row + r + i] = x[i * from_row + c];
  }
  for (; r < rows; r++)
    for (int64_t c = 0; c < columns; c++) to[c * to_row + r] = from[r * from_row + c];
}

// Rows [n, columns] to panels [ceil(n / LANES), columns, LANES], times a factor; missing rows are 0.
static void pack_panels(Rows rows, int64_t n, int64_t columns, float factor, float *panels) {
  for (int64_t first = 0; first < n; first += LANES, panels += columns * LANES) {
    int64_t here = min64(LANES, n - first);
    if (here < LANES) memset(panels, 0, (size_t)(columns * LANES) * sizeof(float));
    transpose(rows.at + first * rows.row, rows.row, here, columns, panels, LANES);
    if (factor == 1.0f) continue;
    for (int64_t i = 0; i < columns * LANES; i += VL) store(panels + i, load(panels + i) * splat(factor));
  }
}

}  // namespace AB_LEVEL::tiles

#endif
