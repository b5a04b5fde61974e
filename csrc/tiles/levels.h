// Multi-level scores: a pair reads the dims of the levels that it shares, the first ones, and no others.
//
// Level l cuts the positions into blocks of widths[l]; blocks nest, so the levels that a pair shares are
// the first `depth` ones, and its score is share(depth) * q~ . k over the first prefix(depth) dims, where
// q~ is q with each level's dims divided by their number. Full tiles have one depth, which the layout says;
// in partial ones it is found here, for strips of keys or queries against panels of lanes.
#pragma once

#include "items.h"
#include "places.h"
#include "simd/pack.h"

namespace AB_ISA::tiles {

AB_INLINE bool has_levels(const ab_call &call) { return call.layout.classes > 2; }

// Levels that all pairs share, and levels that some pair shares.
struct Depths {
  int shallow, deep;
};

struct Levels {
  const int64_t *widths, *prefixes;
  int count;
  bool per_pair;

  explicit Levels(const ab_call &call)
      : widths(call.layout.levels),
        prefixes(call.layout.levels + call.layout.classes - 2),
        count(call.layout.classes - 2),
        per_pair(call.per_pair != 0) {}

  int64_t prefix(int depth) const { return depth ? prefixes[depth - 1] : 0; }
  float share(int depth) const { return per_pair && depth ? 1.0f / (float)depth : 1.0f; }

  // Write the factors of q, [columns], and zeros up to `width`.
  void fill_factors(float *factors, int64_t width) const {
    int64_t d = 0;
    for (int l = 0; l < count; l++)
      for (; d < prefixes[l]; d++) factors[d] = 1.0f / (float)(prefixes[l] - prefix(l));
    for (; d < width; d++) factors[d] = 0;
  }

  // The block of a position; positions before the first key are negative.
  int64_t block(int level, int64_t position) const {
    const int64_t width = widths[level];
    if (!width) return 0;
    return position >= 0 ? position / width : -((width - 1 - position) / width);
  }

  // The depths of queries at positions [i, i + n) with keys at [j, j + m).
  Depths of_tile(int64_t i, int64_t n, int64_t j, int64_t m) const {
    Depths found = {0, 0};
    for (int l = 0; l < count; l++) {
      const int64_t a = block(l, i), b = block(l, i + n - 1), c = block(l, j), d = block(l, j + m - 1);
      if (a > d || c > b) break;
      found.deep++;
      found.shallow += a == b && c == d && a == c;
    }
    return found;
  }

  // Block numbers of n positions from `first` on, for the levels in which a tile's pairs differ; entries up
  // to `room` repeat the last one. Level l starts at to[l * row].
  void fill_blocks(Depths depths, int64_t first, int64_t n, int64_t room, int32_t *to, int64_t row) const {
    for (int l = depths.shallow; l < depths.deep; l++) {
      int64_t number = block(l, first), left = (number + 1) * widths[l] - first;
      for (int64_t i = 0; i < room; i++) {
        to[l * row + i] = (int32_t)number;
        if (i + 1 < n && --left == 0) number++, left = widths[l];
      }
    }
  }
};

// The blocks of a tile's queries and keys.
struct TileBlocks {
  int32_t *queries, *keys;  // [levels, row]
  int64_t row;

  // Cut the arrays from `memory`; none without levels.
  TileBlocks(const ab_call &call, Arena &memory) : queries(nullptr), keys(nullptr) {
    row = round_up(call.layout.tile, LANES);
    if (!has_levels(call)) return;
    queries = memory.cut<int32_t>(row * (call.layout.classes - 2));
    keys = memory.cut<int32_t>(row * (call.layout.classes - 2));
  }

  // Number the blocks of queries at positions [i, i + n) and keys at [j, j + m) where their depths differ,
  // and return these; the mark of a full tile is its one depth.
  Depths fill(const Levels &levels, bool full, int32_t mark, int64_t i, int64_t n, int64_t j,
              int64_t m) const {
    const Depths depths = full ? Depths{mark, mark} : levels.of_tile(i, n, j, m);
    if (depths.shallow == depths.deep) return depths;
    levels.fill_blocks(depths, i, n, row, queries, row);
    levels.fill_blocks(depths, j, m, row, keys, row);
    return depths;
  }

  // Of n numbers from `a` on with m from `b` on, both [levels, row], inside a tile of these depths.
  AB_LAMBDA Depths narrow(Depths depths, const int32_t *a, int64_t n, const int32_t *b, int64_t m) const {
    while (depths.shallow < depths.deep) {
      const int32_t *x = a + depths.shallow * row, *y = b + depths.shallow * row;
      if (x[0] != x[n - 1] || y[0] != y[m - 1] || x[0] != y[0]) break;
      depths.shallow++;
    }
    while (depths.shallow < depths.deep) {
      const int32_t *x = a + (depths.deep - 1) * row, *y = b + (depths.deep - 1) * row;
      if (x[0] <= y[m - 1] && y[0] <= x[n - 1]) break;
      depths.deep--;
    }
    return depths;
  }
};

// Rows [n, columns] times a factor for each column, which has zeros up to a whole vector.
AB_INLINE void multiply_columns(float *rows, int64_t row, int64_t n, int64_t columns,
                                const float *factors) {
  for (int64_t i = 0; i < n; i++, rows += row) {
    int64_t c = 0;
    for (; c + VL <= columns; c += VL) store(rows + c, load(rows + c) * load(factors + c));
    for (; c < columns; c++) rows[c] *= factors[c];
  }
}

template <int MR>
AB_INLINE void multiply_all(Sums<MR, 2> &sums, float by) {
  if (by != 1.0f) sums.each([=](F &x, int, int) AB_LAMBDA { x *= splat(by); });
}

// Products of MR rows with a panel, each over the dims of its pair's depth and times its share. Blocks of
// the rows and of the panel's lanes are [levels, blocks.row].
template <int MR>
AB_INLINE void multiply_levels(Sums<MR, 2> &products, float *ended, const Levels &levels, Depths depths,
                               Rows rows, Rows panel, const TileBlocks &blocks, const int32_t *of_rows,
                               const int32_t *of_lanes) {
  clear(products);
  add_parts(products, ended, 0, levels.prefix(depths.shallow), rows, panel);
  // Most strips are of one depth: they keep their sums in registers, which two sets would not find.
  if (depths.shallow == depths.deep) {
    add_ended(products, ended, levels.prefix(depths.shallow));
    return multiply_all(products, levels.share(depths.shallow));
  }
  Sums<MR, 2> sums = products;
  add_ended(products, ended, levels.prefix(depths.shallow));
  multiply_all(products, levels.share(depths.shallow));
  for (int l = depths.shallow; l < depths.deep; l++) {
    add_parts(sums, ended, levels.prefix(l), levels.prefix(l + 1), rows, panel);
    Sums<MR, 2> whole = sums;
    add_ended(whole, ended, levels.prefix(l + 1));
    const F deeper = splat(levels.share(l + 1));
    AB_UNROLL
    for (int r = 0; r < MR; r++) {
      const I block = splat(of_rows[l * blocks.row + r]);
      AB_UNROLL
      for (int c = 0; c < 2; c++) {
        const I lanes = load(of_lanes + l * blocks.row + c * VL);
        products.at[r][c] = block == lanes ? whole.at[r][c] * deeper : products.at[r][c];
      }
    }
  }
}

}  // namespace AB_ISA::tiles
