// A libcuda that runs nothing. It checks what Triton's launcher hands to it and keeps the last launches.
//
// An argument that a driver would refuse is refused here with its reason, which Triton raises as an error.

#include <cuda.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define MOST_FUNCTIONS 1024
#define MOST_PARAMETERS 96
#define MOST_BYTES 128 // a TMA descriptor
#define KEPT 64        // launches

typedef struct {
  char name[512];
  int count; // of parameters; -1 = not declared
  int sizes[MOST_PARAMETERS];
} Function;

typedef struct {
  int function;
  unsigned grid[3], threads, shared;
  unsigned long long stream;
  unsigned char values[MOST_PARAMETERS][MOST_BYTES];
} Launch;

// Read and set by driver.py.
unsigned long long fake_launches, fake_descriptors, fake_loads;
int fake_shared, fake_multiprocessors;
Function fake_functions[MOST_FUNCTIONS];
int fake_function_count;
Launch fake_kept[KEPT];

static char reason[256] = "fake libcuda";

static CUresult refuse(const char *what, unsigned long long got) {
  snprintf(reason, sizeof reason, "%s, got %llu", what, got);
  return CUDA_ERROR_INVALID_VALUE;
}

#define REFUSE_UNLESS(is_so, what, got)                                                                      \
  do {                                                                                                       \
    if (!(is_so)) return refuse(what, (unsigned long long)(got));                                            \
  } while (0)


// Say what sizes the parameters of the next kernel loaded by this name have, by its PTX. -1 = no room.
int fake_declare(const char *name, int count, const int *sizes) {
  int i = fake_function_count;
  if (count > MOST_PARAMETERS || i == MOST_FUNCTIONS || strlen(name) >= sizeof fake_functions[0].name) return -1;
  strcpy(fake_functions[i].name, name);
  fake_functions[i].count = count;
  memcpy(fake_functions[i].sizes, sizes, count * sizeof *sizes);
  return fake_function_count++;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = reason;
  return CUDA_SUCCESS;
}

// Whoever looks for a GPU by the ordinary way finds none.
CUresult cuInit(unsigned flags) { return CUDA_ERROR_NO_DEVICE; }

CUresult cuDeviceGetCount(int *count) {
  *count = 0;
  return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version) {
  *version = 13000;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int number) {
  *device = number;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device) {
  switch (which) {
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
    *value = fake_shared;
    break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
    *value = fake_shared + 1024;
    break;
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
    *value = fake_multiprocessors;
    break;
  case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    *value = 65536;
    break;
  case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
    *value = 32;
    break;
  default:
    *value = 1;
  }
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = (CUcontext)1;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }

CUresult cuCtxGetDevice(CUdevice *device) {
  *device = 0;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return cuCtxGetCurrent(context); }

CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
  *value = 0;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  fake_loads++;
  *module = (CUmodule)1;
  return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }

// A function is its number plus one, that of the declaration that came last.
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  int i = fake_function_count - 1;
  while (i >= 0 && strcmp(fake_functions[i].name, name)) i--;
  if (i < 0) return refuse("function: wanted one that was declared", 0);
  *function = (CUfunction)(uintptr_t)(i + 1);
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction function) {
  *value = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute which, int value) { return CUDA_SUCCESS; }

CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }

CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *config) {
  *clusters = 1;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute which, CUdeviceptr pointer) {
  *(CUdeviceptr *)value = pointer;
  return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

// The limits are those of the driver's documentation. What is kept tells two descriptors apart.
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                CUtensorMapFloatOOBfill fill) {
  static const int bytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
  fake_descriptors++;
  REFUSE_UNLESS((unsigned)type < sizeof bytes / sizeof *bytes, "TMA type: wanted a known one", type);
  REFUSE_UNLESS(rank >= 1 && rank <= 5, "TMA rank: wanted 1 to 5", rank);
  REFUSE_UNLESS((uintptr_t)address % 16 == 0, "TMA address: wanted a multiple of 16", address);
  for (unsigned i = 0; i < rank; i++) {
    REFUSE_UNLESS(sizes[i] >= 1 && sizes[i] <= 1ull << 32, "TMA size: wanted 1 to 2^32", sizes[i]);
    REFUSE_UNLESS(box[i] >= 1 && box[i] <= 256, "TMA box: wanted 1 to 256", box[i]);
    REFUSE_UNLESS(steps[i] >= 1 && steps[i] <= 8, "TMA element stride: wanted 1 to 8", steps[i]);
  }
  for (unsigned i = 0; i + 1 < rank; i++) {
    REFUSE_UNLESS(strides[i] && strides[i] % 16 == 0, "TMA stride: wanted a multiple of 16", strides[i]);
    REFUSE_UNLESS(strides[i] < 1ull << 40, "TMA stride: wanted less than 2^40", strides[i]);
  }
  unsigned inner = box[0] * bytes[type];
  unsigned most = swizzle == CU_TENSOR_MAP_SWIZZLE_32B    ? 32
                  : swizzle == CU_TENSOR_MAP_SWIZZLE_64B  ? 64
                  : swizzle == CU_TENSOR_MAP_SWIZZLE_128B ? 128
                                                          : 1u << 30;
  REFUSE_UNLESS(inner % 16 == 0, "TMA box: wanted rows of a multiple of 16 bytes", inner);
  REFUSE_UNLESS(inner <= most, "TMA box: wanted rows no longer than the swizzle", inner);
  memset(map, 0, sizeof *map);
  uint64_t *words = (uint64_t *)map;
  words[0] = (uint64_t)(uintptr_t)address;
  for (unsigned i = 0; i < rank; i++) {
    words[1 + i] = sizes[i];
    words[6 + i] = i + 1 < rank ? strides[i] : 0;
    words[11] = words[11] << 12 | box[i];
  }
  return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeIm2col(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                 const cuuint64_t *sizes, const cuuint64_t *strides, const int *lower,
                                 const int *upper, cuuint32_t channels, cuuint32_t pixels,
                                 const cuuint32_t *steps, CUtensorMapInterleave interleave,
                                 CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                 CUtensorMapFloatOOBfill fill) {
  return refuse("TMA: wanted a tiled descriptor", 0);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  int number = (int)(uintptr_t)function - 1;
  REFUSE_UNLESS(number >= 0 && number < fake_function_count, "function: wanted one that was loaded", number);
  REFUSE_UNLESS(config->gridDimX >= 1 && config->gridDimX <= 2147483647u, "grid x: wanted 1 to 2^31 - 1",
                config->gridDimX);
  REFUSE_UNLESS(config->gridDimY >= 1 && config->gridDimY <= 65535, "grid y: wanted 1 to 65535", config->gridDimY);
  REFUSE_UNLESS(config->gridDimZ >= 1 && config->gridDimZ <= 65535, "grid z: wanted 1 to 65535", config->gridDimZ);
  REFUSE_UNLESS(config->blockDimX <= 1024, "threads: wanted at most 1024", config->blockDimX);
  REFUSE_UNLESS(config->sharedMemBytes <= (unsigned)fake_shared, "shared memory: wanted no more than there is",
                config->sharedMemBytes);
  Launch *kept = &fake_kept[fake_launches % KEPT];
  kept->function = number;
  kept->grid[0] = config->gridDimX, kept->grid[1] = config->gridDimY, kept->grid[2] = config->gridDimZ;
  kept->threads = config->blockDimX, kept->shared = config->sharedMemBytes;
  kept->stream = (uintptr_t)config->hStream;
  for (int i = 0; i < fake_functions[number].count; i++) {
    REFUSE_UNLESS(parameters[i], "parameters: wanted as many as the kernel declares, missing one", i);
    memcpy(kept->values[i], parameters[i], fake_functions[number].sizes[i]);
  }
  fake_launches++;
  return CUDA_SUCCESS;
}
