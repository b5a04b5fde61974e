// The variants that the tile kernels are compiled in.
#pragma once

#include "simd/simd.h"

namespace AB_ISA::tiles {

// TERMS: score terms and, backward, dropout. LEVELS: a multi-level score.
template <bool TERMS_, bool LEVELS_>
struct Mode {
  static constexpr bool TERMS = TERMS_, LEVELS = LEVELS_;
};

// Call body(Mode).
template <class Body>
AB_INLINE void with_mode(bool terms, bool levels, const Body &body) {
  if (levels)
    terms ? body(Mode<true, true>()) : body(Mode<false, true>());
  else
    terms ? body(Mode<true, false>()) : body(Mode<false, false>());
}

}  // namespace AB_ISA::tiles
