// Plan a layout from ranges of keys, then fill its buffer.
#include "layout/layout.h"

#include <exception>
#include <memory>

#include "layout/patterns.h"
#include "layout/tiling.h"

namespace layouts {
namespace {

constexpr int32_t COVERED = -1;  // instead of a pattern's number

bool is_sound(const ab_ranges &form) {
  const int64_t rows = form.groups * form.q_len;
  if (form.ptr[0] != 0 || form.ptr[rows] != form.count) return false;
  for (int64_t row = 0; row < rows; row++) {
    const int64_t end = form.ptr[row + 1];
    if (end < form.ptr[row] || end > form.count) return false;
    int64_t reached = 0;
    for (int64_t i = form.ptr[row]; i < end; i++) {
      if (form.start[i] < reached || form.stop[i] <= form.start[i]) return false;
      reached = form.stop[i];
    }
    if (reached > form.k_len) return false;
  }
  return true;
}

class Plan {
 public:
  explicit Plan(const ab_ranges &form) : form_(form), tiling_(choose(form)), book_(tiling_.tile) {
    std::vector<int64_t> next(static_cast<size_t>(tiling_.tile));
    tiling_.each_kept([&](int64_t g, int64_t t, int64_t tile_row) {
      mark_partial(g, t, next);
      mark_ragged(g, t);
      tiles_ += count(tiling_.partial, tile_row) + count(tiling_.covered, tile_row);
    });
  }

  void tell(ab_planned *planned) const {
    planned->tile = tiling_.tile;
    planned->tiles = tiles_;
    planned->patterns = book_.size();
    planned->edges = tiling_.edges;
  }

  void fill(const ab_where &where, const int64_t *group, int32_t *buffer) const {
    for (int64_t i = 0; i < where.batch * where.heads; i++) {
      buffer[where.group + i] = static_cast<int32_t>(group[i]);
    }
    list_side</*by_key=*/false>(buffer + where.q_ptr, buffer + where.q_tile, buffer + where.q_mark);
    list_side</*by_key=*/true>(buffer + where.k_ptr, buffer + where.k_tile, buffer + where.k_mark);
    order_rows(buffer + where.q_ptr, tiling_.groups * tiling_.q_tiles, buffer + where.q_order);
    order_rows(buffer + where.k_ptr, tiling_.groups * tiling_.k_tiles, buffer + where.k_order);
    book_.write(buffer + where.patterns, buffer + where.patterns_t);
    if (!tiling_.edges) return;
    list_by_query(buffer + where.edge_ptr, buffer + where.edge_key, buffer + where.edge_id);
    list_by_key(buffer + where.edge_ptr, buffer + where.edge_key, buffer + where.col_ptr,
                buffer + where.col_query, buffer + where.col_edge);
  }

 private:
  struct Tile {
    int64_t g, t, col;  // group, query tile, key tile
    int32_t mark;       // number of its pattern, or COVERED
  };

  // Number the patterns of the partial tiles of a tile row; `next` is memory for the rows of a tile.
  void mark_partial(int64_t g, int64_t t, std::vector<int64_t> &next) {
    const int64_t first = tiling_.first_row(g, t), height = tiling_.height(t), tile = tiling_.tile;
    std::copy(form_.ptr + first, form_.ptr + first + height, next.begin());
    tiling_.partial.each_tile(g * tiling_.q_tiles + t, [&](int64_t col) {
      const int64_t left = col * tile;
      uint64_t *const pattern = book_.open();
      for (int64_t row = 0; row < height; row++) {
        const int64_t end = form_.ptr[first + row + 1];
        int64_t i = next[row];
        while (i < end && form_.stop[i] <= left) i++;
        next[row] = i;  // ranges to the left of this tile are to the left of the next ones, too
        for (; i < end && form_.start[i] < left + tile; i++) {
          book_.set(pattern, row, form_.start[i] - left, form_.stop[i] - left);
        }
      }
      marks_.push_back(book_.close());
    });
  }

  // Number the patterns of covered tiles at a ragged end: related throughout, but with pairs that do not
  // exist. Those of a range are the kinds of its first and last.
  void mark_ragged(int64_t g, int64_t t) {
    const int64_t tile_row = g * tiling_.q_tiles + t;
    for (int64_t i = tiling_.covered.ptr[tile_row]; i < tiling_.covered.ptr[tile_row + 1]; i++) {
      const Range range = tiling_.covered.ranges[i];
      for (const int64_t col : {range.start, range.stop - 1}) {
        const Tile tile{g, t, col, COVERED};
        int32_t &mark = ragged_[is_cut_query(tile)][is_cut_key(tile)];
        if (mark != COVERED || !(is_cut_query(tile) || is_cut_key(tile))) continue;
        uint64_t *const pattern = book_.open();
        const int64_t keys = tiling_.k_len - col * tiling_.tile;
        for (int64_t row = 0; row < tiling_.height(t); row++) book_.set(pattern, row, 0, keys);
        mark = book_.close();
      }
    }
  }

  bool is_cut_query(const Tile &tile) const { return (tile.t + 1) * tiling_.tile > tiling_.q_len; }
  bool is_cut_key(const Tile &tile) const { return (tile.col + 1) * tiling_.tile > tiling_.k_len; }

  // All tiles by query tile; in each first the partial ones, so that a ragged one, which is the last, comes
  // after them.
  template <class Visit>
  void each_tile(Visit visit) const {
    size_t place = 0;
    tiling_.each_kept([&](int64_t g, int64_t t, int64_t tile_row) {
      tiling_.partial.each_tile(tile_row, [&](int64_t col) { visit(Tile{g, t, col, marks_[place++]}); });
      tiling_.covered.each_tile(tile_row, [&](int64_t col) { visit(Tile{g, t, col, COVERED}); });
    });
  }

  // Write the bounds and lists of one side: in each row first the full tiles, then the partial ones.
  template <bool by_key>
  void list_side(int32_t *ptr, int32_t *list, int32_t *mark) const {
    const auto row_of = [&](const Tile &tile) {
      return by_key ? tile.g * tiling_.k_tiles + tile.col : tile.g * tiling_.q_tiles + tile.t;
    };
    const auto is_full = [&](const Tile &tile) {
      return tile.mark == COVERED && !(by_key ? is_cut_query(tile) : is_cut_key(tile));
    };
    const int64_t rows = tiling_.groups * (by_key ? tiling_.k_tiles : tiling_.q_tiles);
    each_tile([&](const Tile &tile) { ptr[3 * row_of(tile) + (is_full(tile) ? 1 : 2)]++; });
    int32_t total = 0;
    std::vector<int32_t> next(static_cast<size_t>(2 * rows));  // free places of full and of partial tiles
    for (int64_t row = 0; row < rows; row++, ptr += 3) {
      ptr[0] = next[2 * row] = total;
      ptr[1] = next[2 * row + 1] = total += ptr[1];
      ptr[2] = total += ptr[2];
    }
    each_tile([&](const Tile &tile) {
      const bool full = is_full(tile);
      const int32_t place = next[2 * row_of(tile) + (full ? 0 : 1)]++;
      list[place] = static_cast<int32_t>(by_key ? tile.t : tile.col);
      if (full) return;
      mark[place] = tile.mark == COVERED ? ragged_[is_cut_query(tile)][is_cut_key(tile)] : tile.mark;
    });
  }

  // Rows with the most tiles first, equal ones as they come.
  static void order_rows(const int32_t *ptr, int64_t rows, int32_t *order) {
    int32_t most = 0;
    for (int64_t row = 0; row < rows; row++) most = std::max(most, ptr[3 * row + 2] - ptr[3 * row]);
    std::vector<int64_t> next(static_cast<size_t>(most) + 2);  // by how many fewer than the most
    for (int64_t row = 0; row < rows; row++) next[most - (ptr[3 * row + 2] - ptr[3 * row]) + 1]++;
    for (int32_t fewer = 0; fewer < most; fewer++) next[fewer + 1] += next[fewer];
    for (int64_t row = 0; row < rows; row++) {
      order[next[most - (ptr[3 * row + 2] - ptr[3 * row])]++] = static_cast<int32_t>(row);
    }
  }

  void list_by_query(int32_t *ptr, int32_t *key, int32_t *id) const {
    int32_t place = 0;
    for (int64_t g = 0; g < tiling_.groups; g++) {
      for (int64_t query = 0; query < tiling_.q_len; query++) {
        const int64_t row = g * tiling_.q_len + query;
        if (!tiling_.kept[g * tiling_.q_tiles + tiling_.down(query)]) {
          for (int64_t i = form_.ptr[row]; i < form_.ptr[row + 1]; i++) {
            for (int64_t k = form_.start[i]; k < form_.stop[i]; k++, place++) {
              key[place] = static_cast<int32_t>(k);
              id[place] = place;
            }
          }
        }
        ptr[row + 1] = place;
      }
    }
  }

  // While edges are placed, ptr[c + 1] is the next free place of column c.
  void list_by_key(const int32_t *edge_ptr, const int32_t *edge_key, int32_t *ptr, int32_t *query,
                   int32_t *edge) const {
    const int64_t q_len = tiling_.q_len, k_len = tiling_.k_len, columns = tiling_.groups * k_len;
    for (int64_t g = 0; g < tiling_.groups; g++) {
      int32_t *const next = ptr + g * k_len + 1;
      for (int32_t i = edge_ptr[g * q_len]; i < edge_ptr[(g + 1) * q_len]; i++) next[edge_key[i]]++;
    }
    int32_t total = 0;
    for (int64_t c = 1; c <= columns; c++) {
      const int32_t count = ptr[c];
      ptr[c] = total;
      total += count;
    }
    for (int64_t g = 0; g < tiling_.groups; g++) {
      int32_t *const next = ptr + g * k_len + 1;
      for (int64_t q = 0; q < q_len; q++) {
        for (int32_t i = edge_ptr[g * q_len + q]; i < edge_ptr[g * q_len + q + 1]; i++) {
          const int32_t place = next[edge_key[i]]++;
          query[place] = static_cast<int32_t>(q);
          edge[place] = i;
        }
      }
    }
  }

  const ab_ranges form_;
  const Tiling tiling_;
  PatternBook book_;
  std::vector<int32_t> marks_;  // of the partial tiles that are kept, in order
  // Of covered tiles, [cut by the last query][cut by the last key]; COVERED: there is none so far.
  int32_t ragged_[2][2] = {{COVERED, COVERED}, {COVERED, COVERED}};
  int64_t tiles_ = 0;
};

}  // namespace
}  // namespace layouts

extern "C" {

int32_t ab_plan_layout(const ab_ranges *ranges, ab_planned *planned) {
  planned->plan = nullptr;
  if (!layouts::is_sound(*ranges)) return AB_BAD_ARGUMENT;
  try {
    auto plan = std::make_unique<layouts::Plan>(*ranges);
    plan->tell(planned);
    planned->plan = plan.release();
    return AB_OK;
  } catch (const std::exception &) {
    return AB_NO_MEMORY;
  }
}

int32_t ab_fill_layout(const void *plan, const ab_where *where, const int64_t *group, int32_t *buffer) {
  try {
    static_cast<const layouts::Plan *>(plan)->fill(*where, group, buffer);
    return AB_OK;
  } catch (const std::exception &) {
    return AB_NO_MEMORY;
  }
}

void ab_drop_plan(void *plan) { delete static_cast<layouts::Plan *>(plan); }
}
