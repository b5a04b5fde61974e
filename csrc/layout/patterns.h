// The distinct bit patterns of a layout's partial tiles.
#pragma once

#include <algorithm>
#include <unordered_set>
#include <vector>

#include "layout/layout.h"

namespace layouts {

// Equal patterns are stored once. A row of a pattern is one or two words: bit j of word w is key 64 w + j.
class PatternBook {
 public:
  explicit PatternBook(int64_t tile)
      : row_words_(tile / 64), words_(tile * row_words_), known_(0, Hash{this}, Equal{this}) {}
  PatternBook(const PatternBook &) = delete;  // known_ points here
  PatternBook &operator=(const PatternBook &) = delete;

  int64_t size() const { return static_cast<int64_t>(known_.size()); }

  // Begin a pattern without bits.
  uint64_t *open() {
    stored_.resize(static_cast<size_t>((size() + 1) * words_));
    return stored_.data() + size() * words_;
  }

  // Set the bits of keys low .. high - 1 in a row of it; keys beyond the tile have none.
  void set(uint64_t *pattern, int64_t row, int64_t low, int64_t high) const {
    uint64_t *const words = pattern + row * row_words_;
    for (int64_t w = 0; w < row_words_; w++) words[w] |= below(high - 64 * w) & ~below(low - 64 * w);
  }

  // Number the open pattern: an equal one's number, or the next.
  int32_t close() {
    const int64_t number = *known_.insert(size()).first;
    stored_.resize(static_cast<size_t>(size() * words_));
    return static_cast<int32_t>(number);
  }

  // Write all, [size, tile, tile / 32]: rows are queries in `out`, keys in `turned`.
  void write(int32_t *out, int32_t *turned) const {
    std::vector<uint64_t> other(static_cast<size_t>(words_));
    for (int64_t number = 0; number < size(); number++, out += 2 * words_, turned += 2 * words_) {
      const uint64_t *const from = words(number);
      for (int64_t y = 0; y < row_words_; y++) {
        for (int64_t x = 0; x < row_words_; x++)
          turn(from + 64 * y * row_words_ + x, &other[64 * x * row_words_ + y]);
      }
      halve(from, out);
      halve(other.data(), turned);
    }
  }

 private:
  struct Hash {
    const PatternBook *book;
    size_t operator()(int64_t number) const {
      const uint64_t *const words = book->words(number);
      uint64_t mixed = 0;
      for (int64_t i = 0; i < book->words_; i++) {
        mixed = (mixed ^ words[i]) * 0x9E3779B97F4A7C15u;
        mixed ^= mixed >> 32;
      }
      return mixed;
    }
  };

  struct Equal {
    const PatternBook *book;
    bool operator()(int64_t a, int64_t b) const {
      return std::equal(book->words(a), book->words(a) + book->words_, book->words(b));
    }
  };

  const uint64_t *words(int64_t number) const { return stored_.data() + number * words_; }

  // A word with its lowest bits set, `count` being cut to 0 .. 64.
  static uint64_t below(int64_t count) {
    return count <= 0 ? 0 : count >= 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
  }

  // Transpose 64 x 64 bits by exchanging blocks of 32, 16, ... 1 on the two sides of the diagonal.
  void turn(const uint64_t *words, uint64_t *out) const {
    uint64_t rows[64];
    for (int64_t i = 0; i < 64; i++) rows[i] = words[i * row_words_];
    uint64_t low = 0xFFFFFFFFu;
    for (int64_t side = 32; side; side >>= 1, low ^= low << side) {
      for (int64_t i = 0; i < 64; i = ((i | side) + 1) & ~side) {
        const uint64_t both = ((rows[i] >> side) ^ rows[i | side]) & low;
        rows[i] ^= both << side;
        rows[i | side] ^= both;
      }
    }
    for (int64_t i = 0; i < 64; i++) out[i * row_words_] = rows[i];
  }

  void halve(const uint64_t *words, int32_t *out) const {
    for (int64_t i = 0; i < words_; i++) {
      out[2 * i] = static_cast<int32_t>(words[i]);
      out[2 * i + 1] = static_cast<int32_t>(words[i] >> 32);
    }
  }

  int64_t row_words_, words_;
  std::vector<uint64_t> stored_;
  std::unordered_set<int64_t, Hash, Equal> known_;  // numbers, compared by the patterns they stand for
};

}  // namespace layouts
