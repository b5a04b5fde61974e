// Where rows and keys stand: at their number, or where a call that is a part of a larger problem says.
//
// Positions increase. Those of the rows and keys of a tile follow each other, so kernels over tiles look up
// the first one only.
#pragma once

#include "simd/simd.h"

namespace AB_ISA {

AB_INLINE int64_t query_position(const ab_call &call, int64_t i) {
  return call.q_position ? call.q_position[i] : i + call.q_start;
}

AB_INLINE int64_t key_position(const ab_call &call, int64_t j) {
  return call.k_position ? call.k_position[j] : j;
}

// Positions from the first row to the last of [i, i_stop), and the same of keys.
AB_INLINE int64_t query_span(const ab_call &call, int64_t i, int64_t i_stop) {
  return i < i_stop ? query_position(call, i_stop - 1) - query_position(call, i) + 1 : 0;
}

AB_INLINE int64_t key_span(const ab_call &call, int64_t j, int64_t j_stop) {
  return j < j_stop ? key_position(call, j_stop - 1) - key_position(call, j) + 1 : 0;
}

// Where the part of distances has the number of row i and key j.
AB_INLINE int64_t distance_of(const ab_call &call, int64_t i, int64_t j) {
  return key_position(call, j) - query_position(call, i) + call.q_start + call.q_len - 1;
}

}  // namespace AB_ISA
