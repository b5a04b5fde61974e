// How the rows (or columns) of a layout's edges are shared out. Items hold about equally many edges, and a
// row with more edges than an item is cut into pieces that are merged in order: both follow from the lists
// alone, so no bit of a result depends on the number of threads.
#ifndef ATTNBIAS_EDGE_LISTS_H
#define ATTNBIAS_EDGE_LISTS_H

#include "simd.h"

namespace AB_LEVEL {
namespace edge {

constexpr int64_t PIECE = 4096;  // edges of a piece; longer rows are cut
constexpr int64_t ITEM = 2048;   // edges of an item, about
constexpr int64_t ROW_COST = 4;  // edges that take the time of a row's own work

AB_INLINE int64_t divide_up(int64_t x, int64_t y) { return (x + y - 1) / y; }

// Part number `part` of a long row of a group.
struct Piece {
  int32_t row, part;
};

struct Lists {
  const int32_t *ptr;  // [groups * rows + 1]
  int64_t rows, groups;
  int64_t items;   // of a group, at most
  int64_t pieces;  // of a group, at most
  Piece *piece;
  int64_t *bound;  // [groups + 1] in piece

  AB_INLINE int64_t bytes(int64_t groups, int64_t edges) {
    const int64_t most = 2 * edges / PIECE;  // a row is cut into fewer than twice its edges / PIECE
    return round_up(most * (int64_t)sizeof(Piece) + (groups + 1) * (int64_t)sizeof(int64_t), 64);
  }

  int64_t begin(int64_t g, int64_t row) const { return ptr[g * rows + row]; }
  int64_t size(int64_t g, int64_t row) const { return begin(g, row + 1) - begin(g, row); }
  int64_t edges_of(int64_t g) const { return begin(g, rows) - begin(g, 0); }
  static bool is_long(int64_t size) { return size > PIECE; }

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

AB_INLINE Lists make_lists(const int32_t *ptr, int64_t rows, int64_t groups, char *scratch) {
  Lists lists = {ptr, rows, groups, 0, 0, nullptr, (int64_t *)(void *)scratch};
  lists.piece = (Piece *)(void *)(scratch + (groups + 1) * (int64_t)sizeof(int64_t));
  int64_t count = 0;
  for (int64_t g = 0; g < groups; g++) {
    const int64_t before = count, size = lists.edges_of(g);
    lists.bound[g] = count;
    lists.items = max64(lists.items, divide_up(size + ROW_COST * rows, ITEM));
    for (int64_t i = 0; size > PIECE && i < rows; i++) {
      if (!Lists::is_long(lists.size(g, i))) continue;
      const int64_t parts = divide_up(lists.size(g, i), PIECE);
      for (int64_t p = 0; p < parts; p++) lists.piece[count++] = {(int32_t)i, (int32_t)p};
    }
    lists.pieces = max64(lists.pieces, count - before);
  }
  lists.bound[groups] = count;
  return lists;
}

}  // namespace edge
}  // namespace AB_LEVEL

#endif
