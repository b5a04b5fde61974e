// Edges of a graph, in any order, to lists by query and by key.
#pragma once

#include <stdint.h>

#include "attnbias.h"

#ifdef __cplusplus
extern "C" {
#endif

// The edges, and the lists to fill. A graph has groups = 1; with more, row = g * q_len + query and the
// lists by key have the columns g * k_len + key.
typedef struct ab_edges {
  const void *row;  // [edges] int64 or int32, below groups * q_len
  const void *key;  // [edges] the same type, below k_len
  int64_t wide;     // 1: row and key are int64, 0: int32
  int64_t edges;    // below 2^31, as are groups * q_len and groups * k_len
  int64_t groups, q_len, k_len;
  int32_t *edge_ptr;   // [groups * q_len + 1]
  int32_t *edge_key;   // [edges] increasing in a row; equal ones in the order they came
  int32_t *edge_id;    // [edges] place in the input
  int32_t *col_ptr;    // [groups * k_len + 1]
  int32_t *col_query;  // [edges] increasing in a column
  int32_t *col_edge;   // [edges] place in edge_key
} ab_edges;

enum { AB_SORTED = 0, AB_SORT_RANGE = 1, AB_SORT_MEMORY = 2 };

// Fill the lists. AB_SORT_RANGE: an index is negative or too large; AB_SORT_MEMORY: 16 bytes an edge
// could not be had. The lists are then undefined.
AB_EXPORT int32_t ab_sort_edges(const ab_edges *edges);

#ifdef __cplusplus
}
#endif
