// The host side of HIP that kernel launches need. Included by hip/hip_runtime.h.
#pragma once

typedef struct SimtStream* hipStream_t;
enum hipError_t {
  hipSuccess = 0,
  hipErrorInvalidValue = 1,
  hipErrorInvalidConfiguration = 9,
  hipErrorLaunchFailure = 719,
};
enum hipDeviceAttribute_t {
  hipDeviceAttributeMultiprocessorCount,
  hipDeviceAttributeMaxSharedMemoryPerBlock,
  hipDeviceAttributeSharedMemPerBlockOptin,
  hipDeviceAttributeL2CacheSize,
  hipDeviceAttributeWarpSize,
};
struct hipDeviceProp_t {
  char gcnArchName[256];
};
enum hipFuncAttribute { hipFuncAttributeMaxDynamicSharedMemorySize };

namespace simt {

#if defined(__gfx942__)
constexpr const char* kArchName = "gfx942:sramecc+:xnack-";
#elif defined(__gfx950__)
constexpr const char* kArchName = "gfx950:sramecc+:xnack-";
#elif defined(SIMT_HOPPER)
constexpr const char* kArchName = "sm_90a";
#else
constexpr const char* kArchName = "gfx1201";
#endif
constexpr int kMaxSharedBytes = SIMT_WARP == 32 ? 227 << 10 : 64 << 10;  // per block, on NVIDIA and on AMD
constexpr int kL2Bytes = 4 << 20;

inline unsigned multiprocessors() { return setting("SIMT_MULTIPROCESSORS", 2); }

struct LastError {
  hipError_t code = hipSuccess;
  std::string text;
};
extern LastError last_error;
hipError_t finish(hipError_t code, const std::string& text);

// The stricter limit of CUDA and HIP.
hipError_t check(dim3 grid, dim3 block, size_t shared_bytes, unsigned cluster);

template <class F>
[[nodiscard]] hipError_t launch(dim3 grid, dim3 block, size_t shared_bytes, const F& function, unsigned cluster = 1) {
  if (const hipError_t code = check(grid, block, shared_bytes, cluster)) return code;
  const std::string error = run(grid, block, shared_bytes, function, cluster);
  return finish(error.empty() ? hipSuccess : hipErrorLaunchFailure, error);
}

template <class... P, class... A>
hipError_t launch_kernel(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes, hipStream_t,
                         const A&... args) {
  return launch(grid, block, shared_bytes, [&] { kernel(P(args)...); });
}

template <class... P, size_t... I>
auto with_packed_arguments(void (*kernel)(P...), void** args, std::index_sequence<I...>) {
  return [=] { kernel(*static_cast<std::remove_reference_t<P>*>(args[I])...); };
}

}  // namespace simt

// kernel<<<grid, block, shared, stream>>>(arguments), as hipify writes it.
#define hipLaunchKernelGGL(kernel, grid, block, ...) \
  (void)simt::launch_kernel(kernel, dim3(grid), dim3(block), __VA_ARGS__)

// The emulator cannot unpack arguments for a `const void*`: pass the kernel itself, or call simt::launch.
template <class... P>
hipError_t hipLaunchKernel(void (*kernel)(P...), dim3 grid, dim3 block, void** args, size_t shared_bytes, hipStream_t) {
  return simt::launch(grid, block, shared_bytes,
                      simt::with_packed_arguments(kernel, args, std::index_sequence_for<P...>()));
}

inline hipError_t hipGetLastError() { return std::exchange(simt::last_error.code, hipSuccess); }
inline hipError_t hipPeekAtLastError() { return simt::last_error.code; }
inline const char* hipGetErrorString(hipError_t) { return simt::last_error.text.c_str(); }

inline hipError_t hipGetDevice(int* device) {
  *device = 0;
  return hipSuccess;
}
inline hipError_t hipGetDeviceProperties(hipDeviceProp_t* properties, int) {
  strcpy(properties->gcnArchName, simt::kArchName);
  return hipSuccess;
}
inline hipError_t hipDeviceGetAttribute(int* value, hipDeviceAttribute_t attribute, int) {
  switch (attribute) {
    case hipDeviceAttributeMultiprocessorCount: *value = int(simt::multiprocessors()); break;
    case hipDeviceAttributeMaxSharedMemoryPerBlock:
    case hipDeviceAttributeSharedMemPerBlockOptin: *value = simt::kMaxSharedBytes; break;
    case hipDeviceAttributeL2CacheSize: *value = simt::kL2Bytes; break;
    case hipDeviceAttributeWarpSize: *value = int(simt::kWave); break;
  }
  return hipSuccess;
}
template <class Kernel>
hipError_t hipOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, size_t) {
  *blocks = 1;
  return hipSuccess;
}
template <class Kernel>
hipError_t hipFuncSetAttribute(Kernel, hipFuncAttribute, int) {
  return hipSuccess;
}
inline hipError_t hipMemsetAsync(void* p, int value, size_t bytes, hipStream_t = nullptr) {
  memset(p, value, bytes);
  return hipSuccess;
}
