// The seam between the C interface and the kernels, which are compiled once per instruction level.
//
// A layout holds tiles and edges, two disjoint sets of pairs. Tiles run first, edges go on from what they
// left: `before` is the call that the tile kernels got, or NULL when there were no tiles. In it out, dq,
// dk and dv are float32 (in scratch when the caller's are not) and hold the results for the tiles alone;
// lse too in forward. The edge kernels read them, add theirs, and write to the tensors of `call`, which
// may be the same memory. In backward lse and out are always those of the whole.
#ifndef ATTNBIAS_KERNELS_H
#define ATTNBIAS_KERNELS_H

#include "attnbias.h"

// One level's entry points, which dispatch.cpp chooses among.
struct ab_level_table {
  const char *name;
  int64_t (*scratch_bytes)(const ab_call *call, bool backward);
  int32_t (*forward)(const ab_call *call);
  int32_t (*backward)(const ab_call *call);
};

// Memory of the calling thread, 64-byte aligned, of any contents, valid until its next call; NULL = none.
// Kept between calls: fresh pages would cost more than a small call. It is a few tiles in size.
char *ab_thread_memory(int64_t bytes);

// What each part offers inside a level's namespace (see level.cpp). Scratch comes from `scratch`, which
// has at least the bytes that the part asked for.
//
//   int64_t tiles::forward_scratch_bytes(const ab_call &call);
//   int64_t tiles::backward_scratch_bytes(const ab_call &call);
//   int32_t tiles::tiles_forward(const ab_call &call, char *scratch);
//   int32_t tiles::tiles_backward(const ab_call &call, char *scratch);
//
//   int64_t edges_scratch_bytes(const ab_call &call, bool backward);
//   int32_t edges_forward(const ab_call &call, const ab_call *before, char *scratch);
//   int32_t edges_backward(const ab_call &call, const ab_call *before, char *scratch);
//
// No part may use inline functions or templates of the standard library: the linker keeps one copy of
// each for all levels, perhaps one with instructions that the machine lacks.

#endif
