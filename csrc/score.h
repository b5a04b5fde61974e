// The score of a related pair, softcap(scale * q.k) + bias, written here once for tiles and edges.
//
// Both passes of a kernel form q.k from unscaled numbers in one order, so that they get the same bits. The
// tile kernels multiply it inside the FMA that subtracts the row's maximum or lse: no score is rounded.
#pragma once

#include "simd/simd.h"

namespace AB_ISA {

#if defined(__FMA__) || defined(__aarch64__)
constexpr bool FUSED = true;  // x * y - z is rounded once
#else
constexpr bool FUSED = false;
#endif

constexpr float LOWEST = -FLT_MAX;  // where maxima start: finite, so that -inf - LOWEST is -inf

constexpr float LARGE = 16777216.0f;  // 2^24: from here on a rounding of scores is more than 1

// Whether one of the maxima is large; those of rows without keys yet are not.
AB_INLINE bool any_large(F top) {
  const F limit = splat(LARGE), least = splat(LOWEST);
  const F bounded = top > limit ? limit : top;
  return any_differs((top < -limit) & (top > least) ? -limit : bounded, top);
}

struct Score {
  float sign;          // factor of q or k when packed: 1, -1 or 0, so that `factor` is positive
  float factor;        // score = factor * raw(sign * q.k), in units of 1 / unit
  float inner, outer;  // with softcap raw(x) = outer * tanh(inner * x)
  float late;          // factor of a score that tiles stored: `factor`, or 1 where it has the bias in it
  bool capped, biased;

  explicit Score(const ab_call &call, float unit = LOG2_E, bool terms = false)
      : capped(call.softcap != 0), biased(terms) {
    sign = capped || call.scale > 0 ? 1.0f : call.scale < 0 ? -1.0f : 0.0f;
    factor = capped || call.scale == 0 ? 1.0f : fabsf(call.scale) * unit;
    inner = capped ? call.scale / call.softcap : 0.0f;
    outer = call.softcap * unit;
    late = biased ? 1.0f : factor;
  }

  AB_LAMBDA F raw(F product) const {
    return capped ? splat(outer) * tanh_of(splat(inner) * product) : product;
  }

  // Split a row's lse, so that below() gets score - lse with a rounding of the difference only.
  AB_LAMBDA void split(float lse, float *rounded, float *rest) const {
    const double exact = (double)lse * 1.44269504088896340736 / (FUSED ? 1.0 : (double)late);
    const bool empty = lse == -INFINITY;  // 2^below is then 0
    *rounded = empty ? INFINITY : (float)exact;
    *rest = empty ? 0 : (float)(exact - (double)*rounded);
  }

  // A score with its bias, which both passes round alike.
  AB_LAMBDA F with_bias(F raw_score, F bias) const { return raw_score * splat(factor) + bias; }

  AB_LAMBDA F below(F raw_score, float rounded, float rest) const {
    if (biased) return raw_score - splat(rounded) - splat(rest);
    if (FUSED) return raw_score * splat(factor) - splat(rounded) - splat(rest);
    return (raw_score - splat(rounded) - splat(rest)) * splat(factor);
  }

  // The score's derivative by scale * q.k.
  AB_LAMBDA F slope(F raw_score) const {
    F t = raw_score * splat(1 / outer);
    return splat(1.0f) - t * t;
  }
};

// Take a sink, a logit without a value, into a softmax; returns the factor of its sums.
AB_INLINE F add_sink(float sink, F &top, F &total) {
  const F logit = splat(sink * LOG2_E), before = top;
  top = maximum(logit, before);
  const F keep = exp2_of(before - top);
  total = total * keep + exp2_of(logit - top);
  return keep;
}

// log(total * 2^top), the lse of a row; -inf for a row without keys.
AB_INLINE float log_of(float top, float total) {
  return total == 0 ? -INFINITY : (float)((double)top * 0.69314718055994530942 + (double)logf(total));
}

// The largest score of a row, or NaN if one was: maxima on the way may have lost it, no sum has. (A score
// of inf makes the sum NaN as well.)
AB_INLINE float max_or_nan(float top, float total) {
  return total != total && top != INFINITY ? total : top;
}

// The same for a maximum `top` in units of log 2; -inf for a row without keys.
AB_INLINE float max_of(float top, float total) {
  if (total == 0) return -INFINITY;
  return max_or_nan((float)((double)top * 0.69314718055994530942), total);
}

}  // namespace AB_ISA
