// All kernels for one instruction level; compiled once per level with -DAB_LEVEL=name and its flags.
#ifndef AB_LEVEL
#error "compile with -DAB_LEVEL=baseline, avx2, avx512 or neon"
#endif

#include "additive.h"
#include "edges.h"
#include "tiles_backward.h"
#include "tiles_forward.h"

#define AB_TEXT_OF(x) #x
#define AB_TEXT(x) AB_TEXT_OF(x)
#define AB_JOIN_OF(x, y) x##y
#define AB_JOIN(x, y) AB_JOIN_OF(x, y)

namespace AB_LEVEL {
namespace {

// A float32 tensor [B, heads, rows, columns] in scratch, unless `x` is float32 itself or not wanted.
ab_tensor float32_twin(const ab_tensor &x, int64_t B, int64_t heads, int64_t rows, int64_t columns,
                       char *&scratch) {
  if (x.dtype == AB_FLOAT32 || !x.data) return x;
  float *data = cut<float>(scratch, B * heads * rows * columns);
  return {data, heads * rows * columns, rows * columns, columns, AB_FLOAT32, 0};
}

// The call that the tile kernels get when edges go on from their results; see kernels.h.
ab_call call_for_tiles(const ab_call &call, bool backward, char *&scratch) {
  ab_call first = call;  // with the sink: edges go on from a softmax that has it
  if (!backward) {
    first.out = float32_twin(call.out, call.B, call.H, call.Q, call.E, scratch);
  } else {
    first.dq = float32_twin(call.dq, call.B, call.H, call.Q, call.D, scratch);
    first.dk = float32_twin(call.dk, call.B, call.Hk, call.K, call.D, scratch);
    first.dv = float32_twin(call.dv, call.B, call.Hk, call.K, call.E, scratch);
  }
  return first;
}

// A layout without pairs is one of tiles: they write the zeros.
bool has_tiles(const ab_call &call) { return call.layout.tiles || !call.layout.edges; }

int64_t scratch_bytes(const ab_call *call, bool backward) {
  ab_call first = *call;
  char *const start = (char *)64;  // not NULL, which would say that a tensor is not wanted
  char *end = start;
  if (has_tiles(*call) && call->layout.edges) first = call_for_tiles(*call, backward, end);
  int64_t bytes = 0;
  if (has_tiles(*call))
    bytes = backward ? tiles::backward_scratch_bytes(first) : tiles::forward_scratch_bytes(first);
  if (call->layout.edges)
    bytes = max64(bytes, call->additive ? additive_scratch_bytes(*call, backward)
                                        : edges_scratch_bytes(*call, backward));
  return (end - start) + round_up(bytes, 64);
}

template <bool BACKWARD>
int32_t run(const ab_call *call) {
  ab_call first = *call;
  char *scratch = (char *)call->scratch;
  const bool mixed = has_tiles(*call) && call->layout.edges;
  if (mixed) first = call_for_tiles(*call, BACKWARD, scratch);
  int32_t status = AB_OK;
  if (has_tiles(*call))
    status = BACKWARD ? tiles::tiles_backward(first, scratch) : tiles::tiles_forward(first, scratch);
  if (status != AB_OK || !call->layout.edges) return status;
  if (call->additive)
    return BACKWARD ? additive_backward(*call, scratch) : additive_forward(*call, scratch);
  const ab_call *before = mixed ? &first : nullptr;
  return BACKWARD ? edges_backward(*call, before, scratch) : edges_forward(*call, before, scratch);
}

}  // namespace
}  // namespace AB_LEVEL

extern const ab_level_table AB_JOIN(ab_level_, AB_LEVEL);
const ab_level_table AB_JOIN(ab_level_, AB_LEVEL) = {AB_TEXT(AB_LEVEL), AB_LEVEL::scratch_bytes,
                                                     AB_LEVEL::run<false>, AB_LEVEL::run<true>};
