// Attributes of the current device, and kernel launches.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <type_traits>

#include "platform/compiler.h"

namespace moe_fp8 {

// Programmatic dependent launch: a kernel may start before the previous kernel of the stream has ended, once each of
// its blocks has exited or called allow_next_kernel(). Before Hopper and on AMD, kernels run one after the other.
MOE_DEVICE void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
MOE_DEVICE void allow_next_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Bytes of shared memory that a block may request on every chip that runs code for this compute capability. Code for an
// A100 also runs on the smaller chips of its generation.
constexpr int min_shared_bytes([[maybe_unused]] int sm) {
#if defined(MOE_SIMT)
  return simt::kMaxSharedBytes;
#elif defined(MOE_HIP)
  return 64 << 10;
#else
  return sm >= 90 && sm < 120 ? 227 << 10 : 99 << 10;
#endif
}
#if defined(__CUDA_ARCH__)
constexpr int kMinSharedBytes = min_shared_bytes(__CUDA_ARCH__ / 10);
#else
constexpr int kMinSharedBytes = min_shared_bytes(0);
#endif

struct Device {
  int multiprocessors;
  int l2_bytes;
  int shared_per_block;  // bytes that a block may request
  int shared_per_multiprocessor;
  bool has_clusters;      // the emulation has clusters of one block, at wave size 32
  bool overlaps_kernels;  // programmatic dependent launch; the emulation runs this code path too, without overlap
  bool native_fnuz;       // fp8 instructions are FNUZ (gfx942)
  bool has_scaled_mfma;   // MFMA takes E8M0 scales of blocks of 32 (gfx950)
  int sm;                 // CUDA compute capability, 90 for Hopper; other vendors: 0
};
constexpr int kMaxDevices = 64;
inline int current_device() {
  int id = 0;
  (void)cudaGetDevice(&id);
  return id % kMaxDevices;
}
inline Device query_device(int id) {
  Device d = {};
#if defined(MOE_HIP)
  d.shared_per_block = kMinSharedBytes;
#if defined(MOE_SIMT)
  d.l2_bytes = 3 << 20;
  d.has_clusters = SIMT_WARP == 32;
  d.overlaps_kernels = true;
#endif
  d.shared_per_multiprocessor = d.shared_per_block;
  cudaDeviceProp properties = {};
  if (cudaGetDeviceProperties(&properties, id) == cudaSuccess) {
    d.native_fnuz = strncmp(properties.gcnArchName, "gfx94", 5) == 0;
    d.has_scaled_mfma = strncmp(properties.gcnArchName, "gfx950", 6) == 0;
  }
#else
  int major = 0, minor = 0;
  (void)cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, id);
  (void)cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, id);
  d.sm = 10 * major + minor;
  (void)cudaDeviceGetAttribute(&d.shared_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, id);
  (void)cudaDeviceGetAttribute(&d.shared_per_multiprocessor, cudaDevAttrMaxSharedMemoryPerMultiprocessor, id);
  d.has_clusters = d.overlaps_kernels = major >= 9;
#endif
#if !defined(MOE_SIMT)
  (void)cudaDeviceGetAttribute(&d.l2_bytes, cudaDevAttrL2CacheSize, id);
#endif
  (void)cudaDeviceGetAttribute(&d.multiprocessors, cudaDevAttrMultiProcessorCount, id);
  return d;
}
// Attributes of the current device. Each device is queried once.
inline const Device& device() {
  static Device devices[kMaxDevices] = {};
  static std::once_flag queried[kMaxDevices];
  const int id = current_device();
  std::call_once(queried[id], [id] { devices[id] = query_device(id); });
  return devices[id];
}

// The largest number of blocks of `threads` threads in one launch: HIP has fewer than 2^32 threads there, and 2^31 is a
// multiple of every usual block. Callers launch again for the rest, or their blocks loop over work.
constexpr int64_t max_grid_blocks(int threads) { return (int64_t(1) << 31) / threads; }
constexpr unsigned grid_blocks(int64_t wanted, int threads) {
  return unsigned(wanted < max_grid_blocks(threads) ? wanted : max_grid_blocks(threads));
}
constexpr int kMaxGridBlocksY = 65535;  // blocks along y, and along z

struct Launch {
  dim3 grid;
  dim3 block;
  void* stream;
  size_t shared = 0;
  int cluster = 1;  // blocks in a cluster, along x
};

// Launches a kernel, which takes one struct by value. Returns 0 or the runtime's error code.
template <class Params>
int launch(void (*kernel)(Params), const Launch& l, std::remove_const_t<Params> params) {
#if defined(MOE_SIMT)
  return simt::launch(l.grid, l.block, l.shared, [=] { kernel(params); }, unsigned(l.cluster));
#elif defined(MOE_HIP)
  void* args[] = {&params};
  const auto stream = static_cast<cudaStream_t>(l.stream);
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), l.grid, l.block, args, l.shared, stream);
#else
  cudaLaunchConfig_t config = {};
  config.gridDim = l.grid;
  config.blockDim = l.block;
  config.dynamicSmemBytes = l.shared;
  config.stream = static_cast<cudaStream_t>(l.stream);
  cudaLaunchAttribute attributes[2];
  config.attrs = attributes;
  if (device().overlaps_kernels) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (l.cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs].val.clusterDim.x = l.cluster;
    attributes[config.numAttrs].val.clusterDim.y = attributes[config.numAttrs].val.clusterDim.z = 1;
    ++config.numAttrs;
  }
  return cudaLaunchKernelEx(&config, kernel, params);
#endif
}

// Raises a kernel's limits before its first launch on a device: to all shared memory of a block except kStaticShared,
// the largest shared-memory carveout, and clusters of 16 blocks. Returns 0 or the runtime's error code.
constexpr int kStaticShared = 512;     // bytes that __shared__ arrays of such a kernel may take
constexpr int kReservedShared = 1024;  // bytes of a block that the runtime takes
template <auto kKernel>
int raise_kernel_limits() {
#if defined(MOE_CUDA)
  static std::atomic<bool> raised[kMaxDevices] = {};
  const int id = current_device();
  if (raised[id]) return 0;
  const int max_dynamic = device().shared_per_block - kStaticShared;
  cudaError_t e = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, max_dynamic);
  if (e == cudaSuccess)
    e = cudaFuncSetAttribute(kKernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (e == cudaSuccess && device().has_clusters)
    e = cudaFuncSetAttribute(kKernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  raised[id] = e == cudaSuccess;
  return e;
#else
  return 0;
#endif
}

// How many clusters of this kernel the current device holds at once, if each block takes a whole multiprocessor. The
// runtime is asked once per device and cluster size. Called after raise_kernel_limits().
template <auto kKernel>
int resident_clusters(int threads, int cluster) {
#if defined(MOE_CUDA)
  static std::atomic<int> cache[kMaxDevices][5] = {};  // by log2 of the cluster size; 0: unknown, else the number + 1
  int log2 = 0;
  while (1 << log2 < cluster) ++log2;
  std::atomic<int>& cached = cache[current_device()][log2];
  if (cached == 0) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(cluster);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = device().shared_per_block - kStaticShared;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = cluster;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
    int n = 0;
    (void)cudaOccupancyMaxActiveClusters(&n, kKernel, &config);
    cached = n + 1;
  }
  return cached - 1;
#else
  return 0;
#endif
}

inline int fill_bytes(void* p, int byte, size_t bytes, void* stream) {
  return bytes ? cudaMemsetAsync(p, byte, bytes, static_cast<cudaStream_t>(stream)) : cudaSuccess;
}

}  // namespace moe_fp8
