// What the edge kernels of all levels share.
#include "attnbias.h"
#include "edges_budget.h"

int64_t ab_edge_budget = int64_t{256} << 20;

int64_t ab_set_edge_budget(int64_t bytes) {
  const int64_t before = ab_edge_budget;
  ab_edge_budget = bytes;
  return before;
}
