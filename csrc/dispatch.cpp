// The C interface: checks a call, and runs it on the best instruction set of this machine.
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <stdlib.h>
#include <string.h>

#include <atomic>

#include "isa.h"

#if defined(__x86_64__)
extern const ab_isa_table ab_isa_avx512, ab_isa_avx2, ab_isa_baseline;
extern const ab_pairs_table ab_pairs_avx512bf16;
#elif defined(__aarch64__)
extern const ab_isa_table ab_isa_neon;
#else
extern const ab_isa_table ab_isa_baseline;
#endif

namespace {

constexpr int MOST = 4;  // instruction sets

#if defined(__x86_64__)
// Clang 14 does not know the names that __builtin_cpu_supports has for these in GCC.
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

bool has_avx512bf16() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 5);
}
#endif

// An instruction set: its kernels, and those that replace its tile kernels for bfloat16.
struct Isa {
  const char *name = nullptr;
  const ab_isa_table *kernels = nullptr;
  const ab_pairs_table *pairs = nullptr;
};

struct Isas {
  Isa best_first[MOST + 1];  // ends with one without a name
  char names[64] = "";

  Isas() {
    Isa *next = best_first;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    // Intel's cores multiply pairs at half the rate of AMD's, and then float32 is 1.5 times as fast.
    const bool pairs = avx512 && has_avx512bf16(), quick = __builtin_cpu_is("amd");
    const Isa with_pairs = {"avx512bf16", &ab_isa_avx512, &ab_pairs_avx512bf16};
    if (pairs && quick) *next++ = with_pairs;
    if (avx512) *next++ = {"avx512", &ab_isa_avx512, nullptr};
    if (pairs && !quick) *next++ = with_pairs;
    if (avx2) *next++ = {"avx2", &ab_isa_avx2, nullptr};
    *next++ = {"baseline", &ab_isa_baseline, nullptr};
#elif defined(__aarch64__)
    *next++ = {"neon", &ab_isa_neon, nullptr};
#else
    *next++ = {"baseline", &ab_isa_baseline, nullptr};
#endif
    for (const Isa *found = best_first; found < next; found++) {
      if (found != best_first) strcat(names, " ");
      strcat(names, found->name);
    }
  }
};

const Isas &isas() {
  static const Isas found;
  return found;
}

std::atomic<const Isa *> forced{nullptr};

const Isa *isa() {
  const Isa *asked = forced.load(std::memory_order_relaxed);
  return asked ? asked : isas().best_first;
}

const Isa *find(const char *name) {
  for (const Isa *found = isas().best_first; found->name; found++)
    if (!strcmp(found->name, name)) return found;
  return nullptr;
}

// Eight heads of eight numbers fill vectors of eight lanes, whose kernel takes them at once; rows of half a
// longer vector go head by head, at a fifth of the speed.
const Isa *isa_for(const ab_call &call) {
  const bool eights = call.E == 8 && (call.D == 8 || call.additive) && call.H % 8 == 0;
  const bool may = eights && !call.layout.tiles && !forced.load(std::memory_order_relaxed);
  const Isa *const avx2 = may ? find("avx2") : nullptr;
  return avx2 ? avx2 : isa();
}

struct Memory {
  char *data = nullptr;
  int64_t bytes = 0;
  ~Memory() { free(data); }
};

bool is_wrong(const ab_call &call) {
  const bool sizes = call.B >= 0 && call.H >= 0 && call.Hk >= 0 && call.Q >= 0 && call.K >= 0 &&
                     call.D >= 1 && call.D <= (call.layout.edges ? AB_LARGEST : AB_LARGEST_SCORE) &&
                     call.E >= 1 && call.E <= AB_LARGEST;
  const bool heads = call.H == 0 || (call.Hk > 0 && call.H % call.Hk == 0);
  const bool tile = call.layout.tile == 64 || call.layout.tile == 128;
  const int32_t levels = call.layout.classes - 2;
  const bool fits = levels == 0 || (levels > 0 && !call.layout.edges && call.layout.levels &&
                                    call.layout.levels[2 * levels - 1] == call.D);
  const bool dtype = call.q.dtype >= AB_FLOAT32 && call.q.dtype <= AB_FLOAT16 &&
                     call.k.dtype == call.q.dtype && call.v.dtype == call.q.dtype;
  return !(sizes && heads && tile && fits && dtype);
}

// Run a pass, or return the bytes of scratch that it lacks, negated.
int64_t run(const ab_call &call, bool backward) {
  if (is_wrong(call)) return AB_BAD_ARGUMENT;
  const Isa *const isa = isa_for(call);
  const int64_t bytes = isa->kernels->scratch_bytes(&call, backward);
  if (call.scratch_bytes < bytes) return -bytes;
  return backward ? isa->kernels->backward(&call, isa->pairs) : isa->kernels->forward(&call, isa->pairs);
}

}  // namespace

int64_t ab_edge_budget = int64_t{256} << 20;

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

int64_t ab_forward(const ab_call *call) {
  if (!call->B || !call->H || !call->Q) return AB_OK;  // nothing to write
  return run(*call, false);
}

int64_t ab_backward(const ab_call *call) { return run(*call, true); }

const char *ab_isa(void) { return isa()->name; }

const char *ab_isas(void) { return isas().names; }

int32_t ab_force_isa(const char *name) {
  const Isa *const wanted = find(name);
  if (!wanted && *name) return AB_BAD_ARGUMENT;
  forced.store(wanted, std::memory_order_relaxed);
  return AB_OK;
}

int64_t ab_set_edge_budget(int64_t bytes) {
  const int64_t before = ab_edge_budget;
  ab_edge_budget = bytes;
  return before;
}
}
