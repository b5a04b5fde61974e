// Dropout: which pairs are kept, from Philox4x32-7 as attnbias/backends/philox.py has it. The key is the
// seed, the counter (key position / 4, query position, head, batch), and a pair has word key position % 4:
// so the bits are the same in both passes, for every tiling and number of threads.
#pragma once

#include "simd/simd.h"

namespace AB_ISA {

typedef uint64_t Wide __attribute__((vector_size(AB_VECTOR_BYTES)));

AB_INLINE U splat(uint32_t x) { return x - U{}; }

// 64-bit products of the low halves of 64-bit lanes; the high halves are ignored.
AB_INLINE Wide multiply_low(Wide x, uint32_t y) {
#if defined(__AVX512F__)
  return (Wide)_mm512_mul_epu32((__m512i)x, _mm512_set1_epi64((int64_t)y));
#elif defined(__AVX2__)
  return (Wide)_mm256_mul_epu32((__m256i)x, _mm256_set1_epi64x((int64_t)y));
#elif defined(__SSE2__)
  return (Wide)_mm_mul_epu32((__m128i)x, _mm_set1_epi64x((int64_t)y));
#else
  return (x & 0xffffffffu) * (uint64_t)y;
#endif
}

struct Philox {
  static constexpr uint32_t FIRST = 0xD2511F53u, SECOND = 0xCD9E8D57u;  // multipliers
  static constexpr uint32_t KEY_0 = 0x9E3779B9u, KEY_1 = 0xBB67AE85u;   // steps of the key
  static constexpr int ROUNDS = 7;

  // Words of 32 bits in the low halves of 64-bit lanes, anything above them.
  struct Counter {
    Wide at[4];
  };

  AB_INLINE void mix(Counter &c, uint64_t seed) {
    uint32_t key_0 = (uint32_t)seed, key_1 = (uint32_t)(seed >> 32);
    AB_UNROLL
    for (int i = 0; i < ROUNDS; i++) {
      const Wide first = multiply_low(c.at[0], FIRST), second = multiply_low(c.at[2], SECOND);
      c.at[0] = (second >> 32) ^ c.at[1] ^ (uint64_t)key_0;
      c.at[1] = second;
      c.at[2] = (first >> 32) ^ c.at[3] ^ (uint64_t)key_1;
      c.at[3] = first;
      key_0 += KEY_0;
      key_1 += KEY_1;
    }
  }
};

// The dropout of one call.
struct Dropout {
  uint64_t seed;
  uint32_t limit;  // the largest word that drops its pair
  uint32_t first_batch, first_head;
  float kept;  // factor of the weights that are kept

  explicit Dropout(const ab_call &call)
      : seed(call.seed),
        limit((uint32_t)(call.drop_below - 1)),
        first_batch((uint32_t)call.first_batch),
        first_head((uint32_t)call.first_head),
        kept(call.kept_share) {}

  // Numbers of a batch and a head, as counters have them.
  AB_LAMBDA U batch(int64_t b) const { return splat((uint32_t)b + first_batch); }
  AB_LAMBDA U head(int64_t h) const { return splat((uint32_t)h + first_head); }

  // The four words of each lane's counter.
  AB_LAMBDA void words(U quad, U position, U head, U batch, U word[4]) const {
    const U counter[4] = {quad, position, head, batch};
    Philox::Counter even, odd;
    AB_UNROLL
    for (int i = 0; i < 4; i++) {
      even.at[i] = (Wide)counter[i];
      odd.at[i] = (Wide)counter[i] >> 32;
    }
    Philox::mix(even, seed);
    Philox::mix(odd, seed);
    AB_UNROLL
    for (int i = 0; i < 4; i++) word[i] = (U)((even.at[i] & 0xffffffffu) | odd.at[i] << 32);
  }

  // `kept` or 0 for pairs that have nothing in common.
  AB_LAMBDA F share(U key, U position, U head, U batch) const {
    U word[4];
    words(key >> 2, position, head, batch, word);
    const U lane = key & 3u;
    const U chosen = lane < 2u ? (lane == 0u ? word[0] : word[1]) : (lane == 2u ? word[2] : word[3]);
    return chosen > splat(limit) ? splat(kept) : F{};
  }

  // Where the query at `position` is kept, a bit for each of `count` keys from position `key` on, a
  // multiple of 4: bits [(count + 63) / 64 * 2].
  void row_bits(int64_t b, int64_t h, int64_t position, int64_t key, int64_t count, uint32_t *bits) const {
    U lane;
    for (int l = 0; l < VL; l++) lane[l] = (uint32_t)l;
    for (int64_t w = 0; w < (count + 63) / 64 * 2; w++) bits[w] = 0;
    for (int64_t j = 0; j < count; j += 4 * VL) {
      U word[4], nibbles = U{};
      words(splat((uint32_t)(key + j) >> 2) + lane, splat((uint32_t)position), head(h), batch(b), word);
      AB_UNROLL
      for (int i = 0; i < 4; i++) nibbles |= (U)(word[i] > splat(limit)) & (1u << i);
      for (int l = 0; l < VL; l++) {
        const int64_t at = j + 4 * l;
        if (at < count) bits[at / 32] |= nibbles[l] << at % 32;
      }
    }
  }
};

}  // namespace AB_ISA
