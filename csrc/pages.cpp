#include "pages.h"

#if defined(__linux__)
#include <sys/mman.h>
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14; older ones refuse it
#endif
#endif

void ab_expect_writes(void *data, int64_t bytes, int32_t threads) {
#if defined(__linux__)
  constexpr int64_t page = 4096;
  if (bytes < (1 << 20)) return;
  const auto first = ((int64_t)data + page - 1) / page, end = ((int64_t)data + bytes) / page;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static, 1)
  for (int32_t t = 0; t < threads; t++) {
    const int64_t from = first + (end - first) * t / threads,
                  to = first + (end - first) * (t + 1) / threads;
    // No more than a request: refused, the pages come one by one.
    (void)madvise((void *)(from * page), (size_t)((to - from) * page), MADV_POPULATE_WRITE);
  }
#else
  (void)data, (void)bytes, (void)threads;
#endif
}
