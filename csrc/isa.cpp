// All kernels for one instruction set; compiled once per set with -DAB_ISA=name and its flags.
#ifndef AB_ISA
#error "compile with -DAB_ISA=baseline, avx2, avx512 or neon"
#endif

#include "edges/additive.h"
#include "edges/edges.h"
#include "few/backward.h"
#include "few/forward.h"
#include "tiles/backward.h"
#include "tiles/forward.h"

#define AB_JOIN_OF(x, y) x##y
#define AB_JOIN(x, y) AB_JOIN_OF(x, y)

namespace AB_ISA {
namespace {

// Turn a tensor [B, heads, rows, columns] that is wanted into one of float32 in scratch. Without scratch it
// keeps its address: the bytes are counted, and it stays wanted.
void make_float32(ab_tensor &x, int64_t B, int64_t heads, int64_t rows, int64_t columns, Arena &scratch) {
  if (x.dtype == AB_FLOAT32 || !x.data) return;
  float *data = scratch.cut<float>(B * heads * rows * columns);
  x = {data ? data : x.data, heads * rows * columns, rows * columns, columns, AB_FLOAT32, 0};
}

// A layout without pairs is one of tiles: they write the zeros.
bool has_tiles(const ab_call &call) { return call.layout.tiles || !call.layout.edges; }

// The call for the tile kernels; see isa.h. It has the sink: edges go on from a softmax that includes it.
ab_call call_for_tiles(const ab_call &call, bool backward, Arena &scratch) {
  ab_call first = call;
  if (!call.layout.edges) return first;
  if (!backward) {
    make_float32(first.out, call.B, call.H, call.Q, call.E, scratch);
  } else {
    make_float32(first.dq, call.B, call.H, call.Q, call.D, scratch);
    make_float32(first.dk, call.B, call.Hk, call.K, call.D, scratch);
    make_float32(first.dv, call.B, call.Hk, call.K, call.E, scratch);
  }
  return first;
}

int64_t tile_scratch_bytes(const ab_call &call, bool backward) {
  if (few::takes(call))
    return backward ? few::backward_scratch_bytes(call) : few::forward_scratch_bytes(call);
  return backward ? tiles::backward_scratch_bytes(call) : tiles::forward_scratch_bytes(call);
}

int64_t scratch_bytes(const ab_call *call, bool backward) {
  Arena scratch;
  int64_t bytes = 0;
  if (has_tiles(*call)) bytes = tile_scratch_bytes(call_for_tiles(*call, backward, scratch), backward);
  if (call->layout.edges)
    bytes = max64(bytes, call->additive ? additive::scratch_bytes(*call, backward)
                                        : edges::scratch_bytes(*call, backward));
  return scratch.bytes + round_up(bytes, 64);
}

template <bool BACKWARD>
int32_t run_tiles(const ab_call &call, const ab_pairs_table *pairs, Arena scratch) {
  if (few::takes(call)) return BACKWARD ? few::backward(call, scratch) : few::forward(call, scratch);
  if (pairs && call.q.dtype == AB_BFLOAT16 && !tiles::has_levels(call)) {
    void *const rest = scratch.cut<char>(0);  // what is left of it
    return BACKWARD ? pairs->backward(&call, rest) : pairs->forward(&call, rest);
  }
  return BACKWARD ? tiles::backward<tiles::Floats>(call, scratch)
                  : tiles::forward<tiles::Floats>(call, scratch);
}

template <bool BACKWARD>
int32_t run(const ab_call *call, const ab_pairs_table *pairs) {
  Arena scratch(call->scratch);
  ab_call first;
  if (has_tiles(*call)) {
    first = call_for_tiles(*call, BACKWARD, scratch);
    const int32_t status = run_tiles<BACKWARD>(first, pairs, scratch);
    if (status != AB_OK || !call->layout.edges) return status;
  }
  if (call->additive) return additive::run<BACKWARD>(*call, scratch);
  return edges::run<BACKWARD>(*call, has_tiles(*call) ? &first : nullptr, scratch);
}

}  // namespace
}  // namespace AB_ISA

extern const ab_isa_table AB_JOIN(ab_isa_, AB_ISA);
const ab_isa_table AB_JOIN(ab_isa_, AB_ISA) = {AB_ISA::scratch_bytes, AB_ISA::run<false>,
                                               AB_ISA::run<true>};
