// Memory for p and dS on their way from the row pass of the edge kernels to the column pass.
#ifndef ATTNBIAS_EDGES_BUDGET_H
#define ATTNBIAS_EDGES_BUDGET_H

#include "attnbias.h"

#ifdef __cplusplus
extern "C" {
#endif

extern int64_t ab_edge_budget;

// Bytes that a call of ab_backward may take for it, 256 MiB unless set; a graph of E edges needs 8 E for
// each query head of a key head, else p and dS are computed twice. Returns the former value. To be set
// between calls: ab_scratch_bytes depends on it.
AB_EXPORT int64_t ab_set_edge_budget(int64_t bytes);

#ifdef __cplusplus
}
#endif

#endif
