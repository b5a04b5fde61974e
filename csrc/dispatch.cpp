// The C interface: checks what can be checked, and calls the best level that this machine runs.
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <stdlib.h>
#include <string.h>

#include <atomic>

#include "kernels.h"

#if defined(__x86_64__)
extern const ab_level_table ab_level_avx512, ab_level_avx2, ab_level_baseline;
#elif defined(__aarch64__)
extern const ab_level_table ab_level_neon;
#else
extern const ab_level_table ab_level_baseline;
#endif

namespace {

constexpr int MOST = 3;  // levels

#if defined(__x86_64__)
// Clang 14 does not know the name that __builtin_cpu_supports has for it in GCC.
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

struct Levels {
  const ab_level_table *best_first[MOST + 1] = {};
  char names[64] = "";

  Levels() {
    int count = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
      best_first[count++] = &ab_level_avx512;
    if (avx2) best_first[count++] = &ab_level_avx2;
    best_first[count++] = &ab_level_baseline;
#elif defined(__aarch64__)
    best_first[count++] = &ab_level_neon;
#else
    best_first[count++] = &ab_level_baseline;
#endif
    for (int i = 0; i < count; i++) {
      if (i) strcat(names, " ");
      strcat(names, best_first[i]->name);
    }
  }
};

const Levels &levels() {
  static const Levels found;
  return found;
}

std::atomic<const ab_level_table *> forced{nullptr};

const ab_level_table *level() {
  const ab_level_table *asked = forced.load(std::memory_order_relaxed);
  return asked ? asked : levels().best_first[0];
}

// Eight heads of eight numbers fill vectors of eight lanes, whose kernel takes them at once; rows of half a
// longer vector go head by head, at a fifth of the speed.
const ab_level_table *level_for(const ab_call &call) {
  const ab_level_table *const best = level();
  const bool eights = call.E == 8 && (call.D == 8 || call.additive) && call.H % 8 == 0;
  if (!eights || call.layout.tiles || forced.load(std::memory_order_relaxed)) return best;
  for (const ab_level_table *const *found = levels().best_first; *found; found++)
    if (!strcmp((*found)->name, "avx2")) return *found;
  return best;
}

struct Memory {
  char *data = nullptr;
  int64_t bytes = 0;
  ~Memory() { free(data); }
};

bool is_wrong(const ab_call &call) {
  const bool sizes = call.B >= 0 && call.H >= 0 && call.Hk >= 0 && call.Q >= 0 && call.K >= 0 &&
                     call.D >= 1 && call.D <= (call.layout.edges ? 256 : 1024) && call.E >= 1 &&
                     call.E <= 256;
  const bool heads = call.H == 0 || (call.Hk > 0 && call.H % call.Hk == 0);
  const bool tile = call.layout.tile == 64 || call.layout.tile == 128;
  const int32_t levels = call.layout.classes - 2;
  const bool fits = levels == 0 || (levels > 0 && !call.layout.edges && call.layout.levels &&
                                    call.layout.levels[2 * levels - 1] == call.D);
  const bool dtype = call.q.dtype >= AB_FLOAT32 && call.q.dtype <= AB_FLOAT16 &&
                     call.k.dtype == call.q.dtype && call.v.dtype == call.q.dtype;
  return !(sizes && heads && tile && fits && dtype);
}

int32_t check(const ab_call *call, bool backward) {
  if (is_wrong(*call)) return AB_BAD_ARGUMENT;
  const int64_t bytes = level_for(*call)->scratch_bytes(call, backward);
  return call->scratch_bytes < bytes ? AB_SMALL_SCRATCH : AB_OK;
}

}  // namespace

char *ab_thread_memory(int64_t bytes) {
  static thread_local Memory memory;
  if (memory.bytes < bytes) {
    free(memory.data);
    memory.bytes = (bytes + 63) / 64 * 64;
    void *data = nullptr;
    if (posix_memalign(&data, 64, (size_t)memory.bytes) != 0) data = nullptr;
    memory.data = (char *)data;
    if (!data) memory.bytes = 0;
  }
#ifdef AB_POISON
  if (memory.data) memset(memory.data, 0xff, (size_t)memory.bytes);  // NaN in every dtype
#endif
  return memory.data;
}

extern "C" {

int32_t ab_abi_version(void) { return AB_ABI_VERSION; }

int64_t ab_call_bytes(void) { return (int64_t)sizeof(ab_call); }

int64_t ab_scratch_bytes(const ab_call *call, int32_t backward) {
  return is_wrong(*call) ? 0 : level_for(*call)->scratch_bytes(call, backward != 0);
}

int32_t ab_forward(const ab_call *call) {
  if (!call->B || !call->H || !call->Q) return AB_OK;  // nothing to write
  const int32_t status = check(call, false);
  return status == AB_OK ? level_for(*call)->forward(call) : status;
}

int32_t ab_backward(const ab_call *call) {
  const int32_t status = check(call, true);
  return status == AB_OK ? level_for(*call)->backward(call) : status;
}

const char *ab_level(void) { return level()->name; }

const char *ab_levels(void) { return levels().names; }

int32_t ab_force_level(const char *name) {
  const ab_level_table *wanted = nullptr;
  for (const ab_level_table *const *found = levels().best_first; *found; found++)
    if (!strcmp((*found)->name, name)) wanted = *found;
  if (!wanted && *name) return AB_BAD_ARGUMENT;
  forced.store(wanted, std::memory_order_relaxed);
  return AB_OK;
}
}
