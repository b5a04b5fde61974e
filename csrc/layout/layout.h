// Turn ranges of keys into the lists of a layout, with the tile size and form of the least counted work.
// attnbias/layouts/host.py does the same with NumPy, and is the specification; only the numbers of the
// patterns may differ.
#pragma once

#include <stdint.h>

#include "attnbias.h"

#ifdef __cplusplus
extern "C" {
#endif

enum ab_form { AB_AUTO = 0, AB_TILES = 1, AB_EDGES = 2 };

// The keys of each row g * q_len + query, and the costs that decide how they are laid out.
typedef struct ab_ranges {
  const int64_t *ptr;           // [groups * q_len + 1]
  const int64_t *start, *stop;  // [count], increasing and disjoint in a row
  int64_t count, groups, q_len, k_len;
  int64_t form;         // enum ab_form; AB_AUTO takes for each tile row whichever is less work
  int64_t sizes;        // how many of `size` to try
  int64_t size[2];      // tiles of 64 or 128; the first is taken when both are the same work
  double size_cost[2];  // of a pair in a tile of that size
  double edge_cost;
  int64_t skips;        // whether kernels skip the empty parts of partial tiles, at the cost of
  double run_cost;      // each run of consecutive keys, and
  double partial_cost;  // each row of a partial tile
  int64_t most_listed;  // keys; rows that have more on average are never listed as edges
} ab_ranges;

// The sizes that the plan found, from which the caller makes the buffer.
typedef struct ab_planned {
  void *plan;  // to fill from, and to drop in any case
  int64_t tile, tiles, patterns, edges;
} ab_planned;

// A Layout's `where`: its sizes, then the place of each field in the buffer.
typedef struct ab_where {
  int64_t version, q_len, k_len, q_start, batch, heads, groups, tile, classes, tiles, patterns_count, edges;
  int64_t group, q_ptr, q_tile, q_mark, k_ptr, k_tile, k_mark, patterns, patterns_t, q_order, k_order;
  int64_t edge_ptr, edge_key, edge_id, col_ptr, col_query, col_edge;
} ab_where;

// Returns AB_OK, AB_NO_MEMORY, or AB_BAD_ARGUMENT for ranges that are not increasing, disjoint and inside
// 0 .. k_len; the plan is then NULL. The arrays of `ranges` must live as long as the plan.
AB_EXPORT int32_t ab_plan_layout(const ab_ranges *ranges, ab_planned *planned);

// Fill a buffer of zeros; `group` is [batch, heads]. Returns AB_OK or AB_NO_MEMORY.
AB_EXPORT int32_t ab_fill_layout(const void *plan, const ab_where *where, const int64_t *group,
                                 int32_t *buffer);

AB_EXPORT void ab_drop_plan(void *plan);

#ifdef __cplusplus
}
#endif
