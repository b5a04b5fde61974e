// The variants that the tile kernels are compiled in.
#pragma once

#include "simd/simd.h"

namespace AB_ISA::tiles {

// TERMS: score terms and, backward, dropout. LEVELS: a multi-level score. Form: Floats or Pairs.
template <bool TERMS_, bool LEVELS_, class Form_>
struct Mode {
  static constexpr bool TERMS = TERMS_, LEVELS = LEVELS_;
  typedef Form_ Form;
};

// Call body(Mode).
template <class Form, class Body>
AB_INLINE void with_mode(bool terms, [[maybe_unused]] bool levels, const Body &body) {
  if constexpr (Form::HAS_LEVELS)
    if (levels) return terms ? body(Mode<true, true, Form>()) : body(Mode<false, true, Form>());
  terms ? body(Mode<true, false, Form>()) : body(Mode<false, false, Form>());
}

}  // namespace AB_ISA::tiles
