// The seam between the C interface and the kernels, which are compiled once per instruction set.
//
// A layout holds tiles and edges, two disjoint sets of pairs. Tiles run first, and edges continue from
// their results: `before` is the call that the tile kernels got, or NULL when there were no tiles. Its out,
// dq, dk and dv are float32 (in scratch when the caller's are not) and hold the results of the tiles only;
// so does its lse in forward. The edge kernels read them, add theirs, and write to the tensors of `call`,
// which may be the same memory. In backward lse and out are always those of the whole.
#pragma once

#include "attnbias.h"

// The tile kernels on pairs of bfloat16 (pairs.cpp). They need the scratch that the others need.
struct ab_pairs_table {
  int32_t (*forward)(const ab_call *call, void *scratch);
  int32_t (*backward)(const ab_call *call, void *scratch);
};

// The entry points of one instruction set; dispatch.cpp chooses one of these. Where `pairs` is not NULL, it
// gets the tiles that it can take.
struct ab_isa_table {
  int64_t (*scratch_bytes)(const ab_call *call, bool backward);
  int32_t (*forward)(const ab_call *call, const ab_pairs_table *pairs);
  int32_t (*backward)(const ab_call *call, const ab_pairs_table *pairs);
};

// See ab_set_edge_budget.
extern int64_t ab_edge_budget;

// Memory of the calling thread, 64-byte aligned, of any contents, valid until its next call; NULL = none.
// Kept between calls: fresh pages would cost more than a small call. It is a few tiles in size.
char *ab_thread_memory(int64_t bytes);

// No kernel may use inline functions or templates of the standard library: the linker keeps one copy of
// each for all instruction sets, perhaps one with instructions that the machine lacks.
