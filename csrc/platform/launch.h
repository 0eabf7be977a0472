// The current device, and kernels on it.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <type_traits>

#include "platform/compiler.h"

namespace moe_fp8 {

// Programmatic dependent launch: a kernel may start before the one ahead of it in the stream has ended, as soon as all
// blocks of that one have ended or allowed it. Elsewhere kernels run one after the other.
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

// Bytes of shared memory that a block may ask for on every chip that runs the code for a compute capability: an A100's
// also runs on the smaller chips of its generation.
constexpr int least_shared([[maybe_unused]] int sm) {
#if defined(MOE_SIMT)
  return simt::kMaxSharedBytes;
#elif defined(MOE_HIP)
  return 64 << 10;
#else
  return sm >= 90 && sm < 120 ? 227 << 10 : 99 << 10;
#endif
}
#if defined(__CUDA_ARCH__)
constexpr int kLeastShared = least_shared(__CUDA_ARCH__ / 10);
#else
constexpr int kLeastShared = least_shared(0);
#endif

struct Device {
  int multiprocessors;
  int l2_bytes;
  int shared_per_block;  // bytes a block may ask for
  int shared_per_multiprocessor;
  bool has_clusters;  // the emulation has some of one block, at one of its wave sizes
  bool overlaps_kernels;  // programmatic dependent launch; the emulation takes that road too, one after the other
  bool native_fnuz;  // fp8 instructions are FNUZ (gfx942)
  bool scales_blocks;  // MFMA takes the E8M0 scales of blocks of 32 (gfx950)
  int sm;            // CUDA compute capability, 90 for Hopper; 0 elsewhere
};
constexpr int kMaxDevices = 64;
inline int current_device() {
  int id = 0;
  (void)cudaGetDevice(&id);
  return id % kMaxDevices;
}
inline Device ask_device(int id) {
  Device d = {};
#if defined(MOE_HIP)
  d.shared_per_block = kLeastShared;
#if defined(MOE_SIMT)
  d.l2_bytes = 3 << 20;
  d.has_clusters = SIMT_WARP == 32;
  d.overlaps_kernels = true;
#endif
  d.shared_per_multiprocessor = d.shared_per_block;
  cudaDeviceProp properties = {};
  if (cudaGetDeviceProperties(&properties, id) == cudaSuccess) {
    d.native_fnuz = strncmp(properties.gcnArchName, "gfx94", 5) == 0;
    d.scales_blocks = strncmp(properties.gcnArchName, "gfx950", 6) == 0;
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
// Attributes of the current device, read once.
inline const Device& device() {
  static Device known[kMaxDevices] = {};
  static std::once_flag asked[kMaxDevices];
  const int id = current_device();
  std::call_once(asked[id], [id] { known[id] = ask_device(id); });
  return known[id];
}

struct Launch {
  dim3 grid;
  dim3 block;
  void* stream;
  size_t shared = 0;
  int cluster = 1;  // blocks, along x
};

// Every kernel takes one struct by value. Returns the runtime's error code.
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

// Before the first launch of a kernel on a device: all shared memory that a block can have besides kStaticShared, the
// rest of the multiprocessor's for other kernels' blocks, and clusters of 16 blocks.
constexpr int kStaticShared = 512, kReservedShared = 1024;  // bytes: __shared__ arrays at most; the runtime's own
template <auto kKernel>
int allow_large() {
#if defined(MOE_CUDA)
  static std::atomic<bool> allowed[kMaxDevices] = {};
  const int id = current_device();
  if (allowed[id]) return 0;
  const int most = device().shared_per_block - kStaticShared;
  cudaError_t e = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
  if (e == cudaSuccess)
    e = cudaFuncSetAttribute(kKernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (e == cudaSuccess && device().has_clusters)
    e = cudaFuncSetAttribute(kKernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  allowed[id] = e == cudaSuccess;
  return e;
#else
  return 0;
#endif
}

// Clusters of this kernel, of blocks with a multiprocessor each, that the current device holds at once; asked once per
// device and cluster size, after allow_large().
template <auto kKernel>
int resident_clusters(int threads, int cluster) {
#if defined(MOE_CUDA)
  static std::atomic<int> known[kMaxDevices][5] = {};  // of 1 to 16 blocks; 1 more than the answer
  int log2 = 0;
  while (1 << log2 < cluster) ++log2;
  std::atomic<int>& answer = known[current_device()][log2];
  if (answer == 0) {
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
    answer = n + 1;
  }
  return answer - 1;
#else
  return 0;
#endif
}

inline int fill_bytes(void* p, int byte, size_t bytes, void* stream) {
  return bytes ? cudaMemsetAsync(p, byte, bytes, static_cast<cudaStream_t>(stream)) : cudaSuccess;
}

}  // namespace moe_fp8
