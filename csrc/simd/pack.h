// Rows of tensors as float32: read in place, or widened or transposed into a buffer.
#pragma once

#include "simd/gemm.h"

namespace AB_ISA {

template <class T>
AB_INLINE T *row_of(const ab_tensor &x, int64_t b, int64_t h, int64_t i) {
  return (T *)x.data + b * x.batch + h * x.head + i * x.row;
}

// Call body(first), where first is the typed pointer to row i.
template <class Body>
AB_INLINE void with_row(const ab_tensor &x, int64_t b, int64_t h, int64_t i, const Body &body) {
  with_dtype(x.dtype,
             [&](auto type) AB_LAMBDA { body(row_of<typename decltype(type)::Number>(x, b, h, i)); });
}

// Copy rows [first, first + n) of a tensor as float32 [n, width]; columns past `columns` become 0.
static void copy_rows(const ab_tensor &x, int64_t b, int64_t h, int64_t first, int64_t n, int64_t columns,
                      int64_t width, float *to) {
  with_row(x, b, h, first, [&](auto *from) AB_LAMBDA {
    for (int64_t i = 0; i < n; i++) copy_row(from + i * x.row, columns, to + i * width, width);
  });
}

// The same, read in place if possible, otherwise copied to `buffer`.
static Rows rows_as_float(const ab_tensor &x, int64_t b, int64_t h, int64_t first, int64_t n,
                          int64_t columns, int64_t width, float *buffer) {
  if (x.dtype == AB_FLOAT32 && columns == width) return {row_of<float>(x, b, h, first), x.row};
  copy_rows(x, b, h, first, n, columns, width, buffer);
  return {buffer, width};
}

// Write float32 rows [n, columns], rounded once to the tensor's dtype.
static void write_rows(const ab_tensor &x, int64_t b, int64_t h, int64_t first, int64_t n, int64_t columns,
                       const float *from, int64_t from_row) {
  with_row(x, b, h, first, [&](auto *to) AB_LAMBDA {
    for (int64_t i = 0; i < n; i++) copy_row(from + i * from_row, columns, to + i * x.row, columns);
  });
}

AB_INLINE void transpose_quads(const float *from, int64_t from_row, float *to, int64_t to_row) {
  F4 a = *(const AnyF4 *)from, b = *(const AnyF4 *)(from + from_row);
  F4 c = *(const AnyF4 *)(from + 2 * from_row), d = *(const AnyF4 *)(from + 3 * from_row);
  F4 ab_low = __builtin_shufflevector(a, b, 0, 4, 1, 5),
     ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
  F4 cd_low = __builtin_shufflevector(c, d, 0, 4, 1, 5),
     cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
  *(AnyF4 *)to = __builtin_shufflevector(ab_low, cd_low, 0, 1, 4, 5);
  *(AnyF4 *)(to + to_row) = __builtin_shufflevector(ab_low, cd_low, 2, 3, 6, 7);
  *(AnyF4 *)(to + 2 * to_row) = __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5);
  *(AnyF4 *)(to + 3 * to_row) = __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7);
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

// Pack rows [n, columns] into panels [ceil(n / LANES), columns, LANES], times a factor; missing rows are 0.
static void pack_panels(Rows rows, int64_t n, int64_t columns, float factor, float *panels) {
  for (int64_t first = 0; first < n; first += LANES, panels += columns * LANES) {
    int64_t here = min64(LANES, n - first);
    if (here < LANES) memset(panels, 0, (size_t)(columns * LANES) * sizeof(float));
    transpose(rows.at + first * rows.row, rows.row, here, columns, panels, LANES);
    if (factor == 1.0f) continue;
    for (int64_t i = 0; i < columns * LANES; i += VL) store(panels + i, load(panels + i) * splat(factor));
  }
}

}  // namespace AB_ISA
