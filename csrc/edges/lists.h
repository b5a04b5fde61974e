// How the rows (or columns) of a layout's edges are divided into work. Items hold about equally many edges,
// and a row with more edges than an item is cut into pieces that are merged in order. Both depend on the
// lists only, so no bit of a result depends on the number of threads.
#pragma once

#include "items.h"

namespace AB_ISA::edges {

constexpr int64_t PIECE = 4096;  // edges of a piece; longer rows are cut
constexpr int64_t ITEM = 2048;   // edges of an item, about
constexpr int64_t ROW_COST = 4;  // edges that take the time of a row's own work

// Part number `part` of a long row of a group.
struct Piece {
  int32_t row, part;
};

// The edges [first, last) of such a part.
struct Span {
  int64_t row, part, first, last;
};

struct Lists {
  const int32_t *ptr;  // [groups * rows + 1]
  int64_t rows, groups;
  int64_t items;   // of a group, at most
  int64_t pieces;  // of a group, at most
  Piece *piece;
  int64_t *bound;  // [groups + 1] in piece

  // Cut the arrays from scratch. Without the_ptr there are no items, and nothing is filled in.
  Lists(const int32_t *the_ptr, int64_t the_rows, const ab_layout &layout, Arena &scratch)
      : ptr(the_ptr), rows(the_rows), groups(layout.groups), items(0), pieces(0) {
    piece = scratch.cut<Piece>(2 * int64_t{layout.edges} / PIECE);  // a row has fewer than 2 edges / PIECE
    bound = scratch.cut<int64_t>(groups + 1);
    if (!ptr) return;
    int64_t count = 0;
    for (int64_t g = 0; g < groups; g++) {
      bound[g] = count;
      items = max64(items, divide_up(edges_of(g) + ROW_COST * rows, ITEM));
      if (edges_of(g) > PIECE)
        for (int64_t i = 0; i < rows; i++) {
          if (!is_long(size(g, i))) continue;
          const int64_t parts = divide_up(size(g, i), PIECE);
          for (int64_t p = 0; p < parts; p++) piece[count++] = {(int32_t)i, (int32_t)p};
        }
      pieces = max64(pieces, count - bound[g]);
    }
    bound[groups] = count;
  }

  int64_t begin(int64_t g, int64_t row) const { return ptr[g * rows + row]; }
  int64_t size(int64_t g, int64_t row) const { return begin(g, row + 1) - begin(g, row); }
  int64_t edges_of(int64_t g) const { return begin(g, rows) - begin(g, 0); }
  static bool is_long(int64_t size) { return size > PIECE; }
  int64_t pieces_of(int64_t g) const { return bound[g + 1] - bound[g]; }

  // The edges of piece p of a group.
  Span span(int64_t g, int64_t p) const {
    const Piece found = piece[bound[g] + p];
    const int64_t first = begin(g, found.row) + found.part * PIECE;
    return {found.row, found.part, first, min64(first + PIECE, begin(g, found.row + 1))};
  }

  // The first row before which there is at least this much work.
  int64_t row_at(int64_t g, int64_t work) const {
    int64_t low = 0, high = rows;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      const bool before = begin(g, middle) - begin(g, 0) + ROW_COST * middle < work;
      low = before ? middle + 1 : low;
      high = before ? high : middle;
    }
    return low;
  }
};

// The bytes of scratch that the lists of a pass take: of rows and, backward, of columns.
static int64_t list_bytes(const ab_call &call, bool backward) {
  Arena scratch;
  Lists(nullptr, call.Q, call.layout, scratch);
  if (backward) Lists(nullptr, call.K, call.layout, scratch);
  return scratch.bytes;
}

}  // namespace AB_ISA::edges
