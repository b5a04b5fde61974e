// Find the tiles with related pairs, and for each tile row whether tiles or edges are less work.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "layout/layout.h"

namespace layouts {

struct Range {
  int64_t start, stop;

  bool operator<(const Range &other) const { return start < other.start; }
};

using Ranges = std::vector<Range>;

// Increasing, disjoint ranges of key tiles for each tile row.
struct RangeLists {
  std::vector<int64_t> ptr{0};
  Ranges ranges;

  void end_row() { ptr.push_back(static_cast<int64_t>(ranges.size())); }

  template <class Visit>
  void each_tile(int64_t tile_row, Visit visit) const {
    for (int64_t i = ptr[tile_row]; i < ptr[tile_row + 1]; i++) {
      for (int64_t col = ranges[i].start; col < ranges[i].stop; col++) visit(col);
    }
  }
};

inline int64_t count(const RangeLists &lists, int64_t tile_row) {
  int64_t tiles = 0;
  for (int64_t i = lists.ptr[tile_row]; i < lists.ptr[tile_row + 1]; i++) {
    tiles += lists.ranges[i].stop - lists.ranges[i].start;
  }
  return tiles;
}

// Ranges as one tile size sees them. Tile rows are numbered g * q_tiles + query tile.
struct Tiling {
  int64_t tile, groups, q_len, k_len;
  int shift = tile == 64 ? 6 : 7;  // instead of divisions, which would be most of the time
  int64_t q_tiles = up(q_len), k_tiles = up(k_len);
  RangeLists covered{};      // tiles whose existing pairs are all related
  RangeLists partial{};      // tiles of which some pair is related and some is not
  std::vector<char> kept{};  // [tile rows] 1: as tiles, 0: as edges
  int64_t pairs = 0, edges = 0;
  double work = 0;

  int64_t down(int64_t position) const { return position >> shift; }
  int64_t up(int64_t position) const { return (position + tile - 1) >> shift; }
  int64_t first_row(int64_t g, int64_t t) const { return g * q_len + t * tile; }
  int64_t height(int64_t t) const { return std::min(tile, q_len - t * tile); }

  // Call visit(g, t, tile row) for the tile rows that are kept as tiles.
  template <class Visit>
  void each_kept(Visit visit) const {
    for (int64_t g = 0, row = 0; g < groups; g++) {
      for (int64_t t = 0; t < q_tiles; t++, row++) {
        if (kept[row]) visit(g, t, row);
      }
    }
  }
};

// The tiles of one tile row after another; keeps its memory between them.
class Coarsener {
 public:
  Coarsener(const ab_ranges &form, Tiling &made) : form_(form), made_(made) {}

  void add_tile_row(int64_t first_row, int64_t height) {
    touched_.clear();
    spoilt_.clear();
    add_row(first_row);
    for (int64_t row = first_row + 1; row < first_row + height; row++) {
      if (!repeats(row)) add_row(row);
    }
    unite(touched_);
    unite(spoilt_);
    split();
  }

 private:
  void add_row(int64_t row) {
    const size_t touched = touched_.size(), spoilt = spoilt_.size();
    int64_t reached = 0;  // tiles before it are spoilt by this row or covered in it
    for (int64_t i = form_.ptr[row]; i < form_.ptr[row + 1]; i++) {
      const int64_t start = form_.start[i], stop = form_.stop[i];
      append(touched_, touched, {made_.down(start), made_.up(stop)});
      append(spoilt_, spoilt, {reached, made_.up(start)});
      reached = whole(stop);
    }
    append(spoilt_, spoilt, {reached, made_.k_tiles});
  }

  // Whether a row has the tiles of the row before, as most rows have.
  bool repeats(int64_t row) const {
    const int64_t begin = form_.ptr[row], end = form_.ptr[row + 1], back = begin - form_.ptr[row - 1];
    if (end - begin != back) return false;
    for (int64_t i = begin; i < end; i++) {
      if (place(form_.start[i]) != place(form_.start[i - back])) return false;
      if (place(form_.stop[i]) != place(form_.stop[i - back])) return false;
    }
    return true;
  }

  // The same number for ends of ranges that are in the same tile, or between the same two.
  int64_t place(int64_t end) const { return made_.up(end) + whole(end); }

  // Tiles before an end of a range; one cut short by the last key is whole when its existing keys are
  // there.
  int64_t whole(int64_t end) const { return end == form_.k_len ? made_.k_tiles : made_.down(end); }

  // Append to the ranges from `first` on, which are in order.
  static void append(Ranges &ranges, size_t first, Range range) {
    if (range.start >= range.stop) return;
    if (ranges.size() > first && range.start <= ranges.back().stop) {
      ranges.back().stop = std::max(ranges.back().stop, range.stop);
    } else {
      ranges.push_back(range);
    }
  }

  // Sort, and join ranges that overlap or touch.
  static void unite(Ranges &ranges) {
    if (!std::is_sorted(ranges.begin(), ranges.end())) std::sort(ranges.begin(), ranges.end());
    size_t made = 0;
    for (const Range range : ranges) {
      if (made && range.start <= ranges[made - 1].stop) {
        ranges[made - 1].stop = std::max(ranges[made - 1].stop, range.stop);
      } else {
        ranges[made++] = range;
      }
    }
    ranges.resize(made);
  }

  // Covered are the tiles that no row spoils, partial those that are touched and spoilt.
  void split() {
    int64_t reached = 0;
    auto touched = touched_.begin();
    for (const Range gap : spoilt_) {
      if (reached < gap.start) made_.covered.ranges.push_back({reached, gap.start});
      reached = gap.stop;
      while (touched != touched_.end() && touched->stop <= gap.start) ++touched;
      for (auto at = touched; at != touched_.end() && at->start < gap.stop; ++at) {
        made_.partial.ranges.push_back({std::max(at->start, gap.start), std::min(at->stop, gap.stop)});
      }
    }
    if (reached < made_.k_tiles) made_.covered.ranges.push_back({reached, made_.k_tiles});
    made_.covered.end_row();
    made_.partial.end_row();
  }

  const ab_ranges &form_;
  Tiling &made_;
  Ranges touched_, spoilt_;  // of the tile row so far, in any order
};

// Rounded as NumPy rounds it: no compiler may fuse it with an addition.
inline double product(double a, double b) {
  const volatile double rounded = a * b;
  return rounded;
}

inline double as_double(int64_t x) { return static_cast<double>(x); }

inline Tiling tile_ranges(const ab_ranges &form, int64_t tile, double tile_cost) {
  Tiling made{tile, form.groups, form.q_len, form.k_len};
  Coarsener coarsener(form, made);
  double in_tiles = 0;  // sums of whole numbers: no order of adding changes them
  for (int64_t g = 0; g < form.groups; g++) {
    for (int64_t t = 0; t < made.q_tiles; t++) {
      const int64_t first = made.first_row(g, t), height = made.height(t);
      coarsener.add_tile_row(first, height);
      int64_t pairs = 0;
      const int64_t begin = form.ptr[first], end = form.ptr[first + height];
      for (int64_t i = begin; i < end; i++) pairs += form.stop[i] - form.start[i];
      const auto tile_row = static_cast<int64_t>(made.kept.size());
      const int64_t partial = count(made.partial, tile_row),
                    tiles = partial + count(made.covered, tile_row);
      double work = as_double(tiles * height * std::min(tile, form.k_len));
      if (form.skips) {
        const double runs = product(form.run_cost, as_double(end - begin));
        const double rows = product(product(form.partial_cost, as_double(partial)), as_double(height));
        work = std::min(work, as_double(pairs) + runs + rows);
      }
      const bool is_less = product(work, tile_cost) <= product(as_double(pairs), form.edge_cost);
      const bool keep =
          form.form == AB_AUTO ? is_less || pairs > form.most_listed * height : form.form == AB_TILES;
      made.kept.push_back(keep);
      made.pairs += pairs;
      if (keep) {
        in_tiles += work;
      } else {
        made.edges += pairs;
      }
    }
  }
  made.work = product(in_tiles, tile_cost) + product(as_double(made.edges), form.edge_cost);
  return made;
}

// The better tile size, and which tile rows are less work as tiles than as edges.
inline Tiling choose(const ab_ranges &form) {
  Tiling best = tile_ranges(form, form.size[0], form.size_cost[0]);
  for (int64_t i = 1; i < form.sizes; i++) {
    if (best.work <= product(as_double(best.pairs), form.size_cost[i])) break;  // it wastes next to nothing
    Tiling next = tile_ranges(form, form.size[i], form.size_cost[i]);
    if (next.work < best.work) best = std::move(next);
  }
  return best;
}

}  // namespace layouts
