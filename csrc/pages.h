// Memory for large results.
#ifndef ATTNBIAS_PAGES_H
#define ATTNBIAS_PAGES_H

#include "attnbias.h"

#ifdef __cplusplus
extern "C" {
#endif

// Make the pages of memory that was just allocated and will be written whole. One by one, as they are first
// written, they take longer than computing what goes there (48 MiB: 19 ms against 12 ms here). Not huge
// pages: making those is faster still, until memory is fragmented and the system stops to compact it (40 ms
// and more a call, measured). Does nothing below 1 MiB and where the system has no such request.
AB_EXPORT void ab_expect_writes(void *data, int64_t bytes, int32_t threads);

#ifdef __cplusplus
}
#endif

#endif
