// Work items, the order in which threads take them, and their memory.
#pragma once

#include <sched.h>

#include "isa.h"
#include "simd/simd.h"

namespace AB_ISA {

// A tile of one head, and the group whose lists serve it.
struct Item {
  int64_t b, h, group, tile;
};

// The group whose lists serve batch b and head h.
AB_INLINE int64_t group_of(const ab_layout &layout, int64_t b, int64_t h) {
  return layout.group[(layout.batch == 1 ? 0 : b) * layout.heads + (layout.heads == 1 ? 0 : h)];
}

// Item i of those that have `tiles` for each head.
AB_INLINE Item item_at(const ab_call &call, int64_t i, int64_t tiles) {
  const int64_t b = i / tiles / call.H, h = i / tiles % call.H;
  return {b, h, group_of(call.layout, b, h), i % tiles};
}

// The bounds of the classes of a tile row in the list of its tiles, [classes + 1].
AB_INLINE const int32_t *class_bounds(const ab_layout &layout, const int32_t *ptr, int64_t row) {
  return ptr + row * (layout.classes + 1);
}

// Memory that arrays are cut from, each at a multiple of 64 bytes. Without a start the arrays are NULL and
// only their bytes are counted.
struct Arena {
  char *start;
  int64_t bytes = 0;

  explicit Arena(void *memory = nullptr) : start((char *)memory) {}

  template <class T>
  AB_LAMBDA T *cut(int64_t count) {
    T *here = start ? (T *)(void *)(start + bytes) : nullptr;
    bytes += round_up(count * (int64_t)sizeof(T), 64);
    return here;
  }
};

// Call body(i, memory) for every i < count, where `memory` belongs to the thread. Items are taken in order,
// so that a later one may wait for an earlier one; OpenMP's own loops do not promise that.
template <class Body>
AB_INLINE int32_t run_items(int64_t count, int32_t threads, int64_t bytes, const Body &body) {
  int64_t next = 0;
  [[maybe_unused]] const int team = (int)max64(1, min64(threads, count));  // unused without OpenMP
#pragma omp parallel num_threads(team) if (team > 1)
  {
    char *memory = ab_thread_memory(bytes);
    if (memory)
      for (int64_t i; (i = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < count;) body(i, Arena(memory));
  }
  return next >= count ? AB_OK : AB_NO_MEMORY;
}

// Wait until an earlier item has counted up to `wanted`.
AB_INLINE void wait_for(const int32_t *done, int32_t wanted) {
  for (int spins = 0; __atomic_load_n(done, __ATOMIC_ACQUIRE) != wanted; spins++)
    if (spins > 100) sched_yield();
}

// The query tiles of each group in the order of the layout, [G, tiles].
struct TileOrder {
  const int32_t *of_group;

  // Use the layout's own list for a single group, otherwise a copy in scratch, sorted by group.
  TileOrder(const ab_layout &layout, int64_t tiles, Arena &scratch) : of_group(layout.q_order) {
    if (layout.groups == 1) return;
    int32_t *sorted = scratch.cut<int32_t>(layout.groups * tiles),
            *ends = scratch.cut<int32_t>(layout.groups);
    of_group = sorted;
    if (!sorted) return;
    memset(ends, 0, (size_t)layout.groups * sizeof(int32_t));
    for (int64_t i = 0; i < layout.groups * tiles; i++) {
      const int64_t g = layout.q_order[i] / tiles;
      sorted[g * tiles + ends[g]++] = (int32_t)(layout.q_order[i] % tiles);
    }
  }
};

}  // namespace AB_ISA
