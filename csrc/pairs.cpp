// The tile kernels on pairs of bfloat16, for one instruction set that multiplies them; compiled once per
// such set with -DAB_ISA=name and its flags. Everything else runs on the set without them, see
// dispatch.cpp.
#ifndef AB_ISA
#error "compile with -DAB_ISA=avx512bf16"
#endif

#include "tiles/backward.h"
#include "tiles/forward.h"
#include "tiles/pairs.h"

#define AB_JOIN_OF(x, y) x##y
#define AB_JOIN(x, y) AB_JOIN_OF(x, y)

namespace AB_ISA {
namespace {

int32_t forward(const ab_call *call, void *scratch) {
  return tiles::forward<tiles::Pairs>(*call, Arena(scratch));
}

int32_t backward(const ab_call *call, void *scratch) {
  return tiles::backward<tiles::Pairs>(*call, Arena(scratch));
}

}  // namespace
}  // namespace AB_ISA

extern const ab_pairs_table AB_JOIN(ab_pairs_, AB_ISA);
const ab_pairs_table AB_JOIN(ab_pairs_, AB_ISA) = {AB_ISA::forward, AB_ISA::backward};
