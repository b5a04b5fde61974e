// Counting sorts: by key, then by row (each keeps the order of equals), then back to columns.
// Scattered items are pairs of int32, so that each costs one cache line and not two.
#include "edges/sort.h"

#include <cstdlib>
#include <cstring>
#include <memory>

namespace {

struct Pair {
  int32_t first, second;
};

struct Free {
  void operator()(Pair *pairs) const { std::free(pairs); }
};
using Pairs = std::unique_ptr<Pair[], Free>;

Pairs make_pairs(int64_t n) {
  return Pairs(static_cast<Pair *>(std::malloc(sizeof(Pair) * static_cast<size_t>(n ? n : 1))));
}

// While items are placed, ptr[c + 1] is the next free place of c; counted() makes the first of these
// from counts, and when all are placed ptr is the usual pointer again.
void counted(int32_t *ptr, int64_t n) {
  int32_t total = 0;
  ptr[0] = 0;
  for (int64_t c = 1; c <= n; c++) {
    const int32_t count = ptr[c];
    ptr[c] = total;
    total += count;
  }
}

void rewind(int32_t *ptr, int64_t n) {
  if (n) std::memmove(ptr + 1, ptr, sizeof(int32_t) * static_cast<size_t>(n));
  ptr[0] = 0;
}

struct Order {
  bool in_range, by_row, by_key, by_both;
};

// The column of an edge; groups = 1 needs no division.
struct Columns {
  int64_t groups, q_len, k_len;

  int64_t of(int64_t row, int64_t key) const { return groups == 1 ? key : row / q_len * k_len + key; }
};

// Count rows and columns, check every index, and see which order the edges are in already.
template <class Index>
Order count(const ab_edges &e, const Columns &columns) {
  const auto *row = static_cast<const Index *>(e.row);
  const auto *key = static_cast<const Index *>(e.key);
  const auto rows = static_cast<uint64_t>(e.groups * e.q_len);
  const auto keys = static_cast<uint64_t>(e.k_len);
  std::memset(e.edge_ptr, 0, sizeof(int32_t) * (rows + 1));
  std::memset(e.col_ptr, 0, sizeof(int32_t) * static_cast<size_t>(e.groups * e.k_len + 1));
  int64_t last_row = -1, last_key = -1, last_column = -1;
  bool by_row = true, by_key = true, by_both = true;
  for (int64_t i = 0; i < e.edges; i++) {
    const int64_t r = row[i], k = key[i];
    if (static_cast<uint64_t>(r) >= rows || static_cast<uint64_t>(k) >= keys) {
      return {false, false, false, false};
    }
    const int64_t c = columns.of(r, k);
    by_both &= (last_row < r) | ((last_row == r) & (last_key <= k));
    by_row &= last_row <= r;
    by_key &= last_column <= c;
    last_row = r, last_key = k, last_column = c;
    e.edge_ptr[r + 1]++;
    e.col_ptr[c + 1]++;
  }
  return {true, by_row, by_key, by_both};
}

// The pairs (key, id) in order of row and key.
template <class Index>
bool sort_rows(const ab_edges &e, const Columns &columns, const Order &order, Pair *sorted) {
  const auto *row = static_cast<const Index *>(e.row);
  const auto *key = static_cast<const Index *>(e.key);
  if (order.by_both) {
    for (int64_t i = 0; i < e.edges; i++) {
      sorted[i] = {static_cast<int32_t>(key[i]), static_cast<int32_t>(i)};
    }
    return true;
  }
  const int64_t rows = e.groups * e.q_len, cols = e.groups * e.k_len;
  counted(e.edge_ptr, rows);
  if (order.by_key) {
    for (int64_t i = 0; i < e.edges; i++) {
      sorted[e.edge_ptr[row[i] + 1]++] = {static_cast<int32_t>(key[i]), static_cast<int32_t>(i)};
    }
    return true;
  }
  const Pairs by_key = make_pairs(e.edges);  // (row, id)
  if (!by_key) return false;
  counted(e.col_ptr, cols);
  for (int64_t i = 0; i < e.edges; i++) {
    by_key[static_cast<size_t>(e.col_ptr[columns.of(row[i], key[i]) + 1]++)] = {
        static_cast<int32_t>(row[i]), static_cast<int32_t>(i)};
  }
  int64_t place = 0;
  for (int64_t c = 0; c < cols; c++) {
    const auto k = static_cast<int32_t>(c % e.k_len);
    for (; place < e.col_ptr[c + 1]; place++) {
      const Pair item = by_key[static_cast<size_t>(place)];
      sorted[e.edge_ptr[item.first + 1]++] = {k, item.second};
    }
  }
  rewind(e.col_ptr, cols);
  return true;
}

// Write the lists by row from the sorted pairs, and with them the lists by column.
void list(const ab_edges &e, const Columns &columns, const Pair *sorted) {
  int32_t place = 0;
  for (int64_t r = 0, end = e.groups * e.q_len; r < end; r++) {
    const int64_t column = columns.of(r, 0);
    const auto query = static_cast<int32_t>(columns.groups == 1 ? r : r % e.q_len);
    for (; place < e.edge_ptr[r + 1]; place++) {
      const Pair item = sorted[place];
      e.edge_key[place] = item.first;
      e.edge_id[place] = item.second;
      const int32_t at = e.col_ptr[column + item.first + 1]++;
      e.col_query[at] = query;
      e.col_edge[at] = place;
    }
  }
}

void sum(int32_t *ptr, int64_t n) {
  for (int64_t c = 0; c < n; c++) ptr[c + 1] += ptr[c];
}

template <class Index>
int32_t sort_edges(const ab_edges &e) {
  const Columns columns{e.groups, e.q_len, e.k_len};
  const Order order = count<Index>(e, columns);
  if (!order.in_range) return AB_SORT_RANGE;
  const Pairs sorted = make_pairs(e.edges);
  if (!sorted || !sort_rows<Index>(e, columns, order, sorted.get())) return AB_SORT_MEMORY;
  if (order.by_both) sum(e.edge_ptr, e.groups * e.q_len);
  if (order.by_both || order.by_key) counted(e.col_ptr, e.groups * e.k_len);
  list(e, columns, sorted.get());
  return AB_SORTED;
}

}  // namespace

extern "C" int32_t ab_sort_edges(const ab_edges *edges) {
  return edges->wide ? sort_edges<int64_t>(*edges) : sort_edges<int32_t>(*edges);
}
