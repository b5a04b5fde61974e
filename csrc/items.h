// Work items and who takes them.
#ifndef ATTNBIAS_ITEMS_H
#define ATTNBIAS_ITEMS_H

#include <sched.h>

#include "kernels.h"
#include "simd.h"

namespace AB_LEVEL {

// A tile of one head, and the group whose lists serve it.
struct Item {
  int64_t b, h, group, tile;
};

AB_INLINE int64_t tiles_of(int64_t length, int64_t tile) { return (length + tile - 1) / tile; }

// The group whose lists serve batch b and head h.
AB_INLINE int64_t group_of(const ab_layout &layout, int64_t b, int64_t h) {
  return layout.group[(layout.batch == 1 ? 0 : b) * layout.heads + (layout.heads == 1 ? 0 : h)];
}

// The bounds of the classes of a tile row in the list of its tiles, [classes + 1].
AB_INLINE const int32_t *class_bounds(const ab_layout &layout, const int32_t *ptr, int64_t row) {
  return ptr + row * (layout.classes + 1);
}

// Take `count` numbers of T from memory, which moves on to the next multiple of 64 bytes.
template <class T>
AB_INLINE T *cut(char *&memory, int64_t count) {
  T *here = (T *)memory;
  memory += round_up(count * (int64_t)sizeof(T), 64);
  return here;
}

// Call body(i, memory) for every i < count, where memory is a thread's own. Items are taken in order: a
// later one may wait for what an earlier one does. (OpenMP's own loops do not promise that.)
template <class Body>
AB_INLINE int32_t run_items(int64_t count, int32_t threads, int64_t bytes, const Body &body) {
  int64_t next = 0;
  [[maybe_unused]] const int team = (int)max64(1, min64(threads, count));  // unused without OpenMP
#pragma omp parallel num_threads(team) if (team > 1)
  {
    char *memory = ab_thread_memory(bytes);
    if (memory)
      for (int64_t i; (i = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < count;) body(i, memory);
  }
  return next >= count ? AB_OK : AB_NO_MEMORY;
}

// Wait until an earlier item has counted up to `wanted`.
AB_INLINE void wait_for(const int32_t *done, int32_t wanted) {
  for (int spins = 0; __atomic_load_n(done, __ATOMIC_ACQUIRE) != wanted; spins++)
    if (spins > 100) sched_yield();
}

// The tiles of each group in the order of the layout, [G, tiles]. The layout's own list serves a single
// group; `sorted` [G * tiles] and `ends` [G] take the lists of several.
static const int32_t *order_by_group(const int32_t *order, int64_t groups, int64_t tiles, int32_t *sorted,
                                     int32_t *ends) {
  if (groups == 1) return order;
  memset(ends, 0, (size_t)groups * sizeof(int32_t));
  for (int64_t i = 0; i < groups * tiles; i++) {
    int64_t g = order[i] / tiles;
    sorted[g * tiles + ends[g]++] = (int32_t)(order[i] % tiles);
  }
  return sorted;
}

}  // namespace AB_LEVEL

#endif
