// The one file that knows vendors. Everything else is written against the names below and compiles as CUDA,
// as HIP (after hipify), as plain host C++, and as hipified code under the tests' SIMT emulation (MOE_SIMT).
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__HIP__) || defined(__CUDACC__)
#include <atomic>
#include <mutex>
#endif

#if defined(__HIP__)
#include <hip/hip_runtime.h>
#define MOE_HIP 1
#elif defined(__CUDACC__)
#include <cuda_runtime.h>
#define MOE_CUDA 1
#endif

#if defined(MOE_CUDA) || defined(MOE_HIP)
#define MOE_HD __host__ __device__ __forceinline__
#define MOE_DEVICE __device__ __forceinline__
#define MOE_GLOBAL static __global__
#else
#define MOE_HD inline
#endif

// The second argument of launch bounds means blocks per multiprocessor on CUDA, waves per SIMD on HIP.
#if defined(MOE_CUDA)
#define MOE_LAUNCH_BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)
#elif defined(MOE_HIP)
#define MOE_LAUNCH_BOUNDS(threads, blocks) __launch_bounds__(threads)
#endif

#if defined(MOE_CUDA)
#define MOE_GRID_CONSTANT __grid_constant__
#else
#define MOE_GRID_CONSTANT
#endif

#if defined(MOE_SIMT)
#define MOE_DYNAMIC_SMEM(name) HIP_DYNAMIC_SHARED(unsigned char, name)
#else
#define MOE_DYNAMIC_SMEM(name) extern __shared__ __align__(128) unsigned char name[]
#endif

namespace moe_fp8 {

// ---- bits ----------------------------------------------------------------------------------------------------------
MOE_HD float as_float(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
#endif
}
MOE_HD uint32_t as_bits(float f) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(f);
#else
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  return bits;
#endif
}

// Of a 16-bit float, where the chip converts: exact, subnormals included.
#if defined(__CUDA_ARCH__)
constexpr bool kConvertsHalf = true;
MOE_DEVICE float half_to_float(uint32_t bits) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(uint16_t(bits)));
  return f;
}
#else
constexpr bool kConvertsHalf = false;
MOE_HD float half_to_float(uint32_t) { return 0; }
#endif

// Two floats to bfloat16, to nearest even, `lo` in the low half, where the chip converts; it has its own NaN.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
constexpr bool kConvertsToBF16 = true;
MOE_DEVICE uint32_t to_bf16x2(float lo, float hi) {
  uint32_t d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
  return d;
}
#else
constexpr bool kConvertsToBF16 = false;
MOE_HD uint32_t to_bf16x2(float, float) { return 0; }
#endif

// The E8M0 byte of a positive float, rounded up to a power of two, where the chip converts.
#if defined(__CUDA_ARCH__) && (defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM120_ALL))
constexpr bool kConvertsE8M0 = true;
MOE_DEVICE uint32_t e8m0_rounded_up(float f) {
  uint16_t pair;
  asm("cvt.rp.satfinite.ue8m0x2.f32 %0, 0f00000000, %1;" : "=h"(pair) : "f"(f));
  return pair & 0xffu;
}
#else
constexpr bool kConvertsE8M0 = false;
MOE_HD uint32_t e8m0_rounded_up(float) { return 0; }
#endif

#if defined(MOE_CUDA) || defined(MOE_HIP)

// ---- waves ---------------------------------------------------------------------------------------------------------
// kWarpSize is known to the device only: on the host one binary may serve both sizes, hence kLargestWarp.
#if defined(MOE_SIMT)
constexpr int kWarpSize = SIMT_WARP;
#elif defined(MOE_HIP) && defined(__GFX9__)
constexpr int kWarpSize = 64;
#else
constexpr int kWarpSize = 32;
#endif

#if defined(MOE_HIP)
constexpr int kLargestWarp = 64;
#else
constexpr int kLargestWarp = 32;
#endif

MOE_DEVICE uint32_t shfl(uint32_t v, int lane) {
#if defined(MOE_HIP)
  return __shfl(v, lane);
#else
  return __shfl_sync(0xffffffffu, v, lane);
#endif
}
MOE_DEVICE uint32_t shfl_xor(uint32_t v, int lane_mask) {
#if defined(MOE_HIP)
  return __shfl_xor(v, lane_mask);
#else
  return __shfl_xor_sync(0xffffffffu, v, lane_mask);
#endif
}
MOE_DEVICE uint32_t shfl_up(uint32_t v, int delta) {
#if defined(MOE_HIP)
  return __shfl_up(v, delta);
#else
  return __shfl_up_sync(0xffffffffu, v, delta);
#endif
}
MOE_DEVICE uint32_t warp_max(uint32_t v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_max_sync(0xffffffffu, v);
#else
  for (int mask = kWarpSize / 2; mask > 0; mask >>= 1) {
    const uint32_t other = shfl_xor(v, mask);
    v = v > other ? v : other;
  }
  return v;
#endif
}

// A bit a lane; bits of lanes that the wave does not have are zero.
#if defined(MOE_HIP)
using LaneMask = uint64_t;
#else
using LaneMask = uint32_t;
#endif
MOE_DEVICE LaneMask ballot(bool vote) {
#if defined(MOE_HIP)
  return __ballot(vote);
#else
  return __ballot_sync(0xffffffffu, vote);
#endif
}
MOE_DEVICE int popcount(LaneMask mask) {
#if defined(MOE_HIP)
  return __popcll(mask);
#else
  return __popc(mask);
#endif
}
// What lanes wrote to shared memory before it, all lanes of the wave read behind it.
MOE_DEVICE void wave_barrier() {
#if defined(MOE_HIP)
  __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
  __builtin_amdgcn_wave_barrier();
#else
  __syncwarp();
#endif
}

// ---- packed arithmetic ---------------------------------------------------------------------------------------------
MOE_DEVICE uint32_t max_u16x2(uint32_t a, uint32_t b) {
#if defined(MOE_CUDA)
  return __vmaxu2(a, b);
#else
  const uint32_t lo = (a & 0xffffu) > (b & 0xffffu) ? a & 0xffffu : b & 0xffffu;
  const uint32_t hi = (a >> 16) > (b >> 16) ? a >> 16 : b >> 16;
  return hi << 16 | lo;
#endif
}
// max(|a|, |b|) of two halves, NaN largest. The sign bits of the result mean nothing.
MOE_DEVICE uint32_t max_magnitude_bf16x2(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
  uint32_t d;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
#else
  return max_u16x2(a & 0x7fff7fffu, b & 0x7fff7fffu);
#endif
}
MOE_DEVICE uint32_t max_magnitude_f16x2(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
  uint32_t d;
  asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
#else
  return max_u16x2(a & 0x7fff7fffu, b & 0x7fff7fffu);
#endif
}

// ---- memory: streams that are read or written once keep out of each other's way in the caches -----------------------
struct alignas(16) Vec16 { uint32_t w[4]; };
struct alignas(8) Vec8 { uint32_t w[2]; };

constexpr uint64_t kEvictFirst = 0x12F0000000000000ull, kEvictLast = 0x14F0000000000000ull;  // createpolicy's encoding

// kSoon: leave the line in the L2, it is read again shortly. kNotBeforeStores: it is not, but leaves after what
// store_stream writes (evict_last): on an H200 128x1 of [131072, 7168] at 0.96 of copy instead of 0.94, and a GEMM
// right behind it took no longer.
enum class Reuse { kNone, kSoon, kNotBeforeStores };

template <Reuse kReuse = Reuse::kNone>
MOE_DEVICE Vec16 load_stream(const Vec16* p) {
#if defined(MOE_CUDA)
  Vec16 v;
  if constexpr (kReuse != Reuse::kSoon)
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
                 : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
                 : "l"(p), "l"(kReuse == Reuse::kNone ? kEvictFirst : kEvictLast));
  else
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3]) : "l"(p));
  return v;
#elif defined(MOE_HIP) && !defined(MOE_SIMT)
  typedef uint32_t u32x4 __attribute__((vector_size(16)));
  const u32x4* q = reinterpret_cast<const u32x4*>(p);
  const u32x4 v = kReuse == Reuse::kNone ? __builtin_nontemporal_load(q) : *q;
  return Vec16{{v[0], v[1], v[2], v[3]}};
#else
  return *p;
#endif
}
template <Reuse kReuse = Reuse::kNone>
MOE_DEVICE Vec8 load_stream(const Vec8* p) {
#if defined(MOE_CUDA)
  Vec8 v;
  if constexpr (kReuse == Reuse::kNone)
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v2.u32 {%0,%1}, [%2], %3;"
                 : "=r"(v.w[0]), "=r"(v.w[1]) : "l"(p), "l"(kEvictFirst));
  else
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.w[0]), "=r"(v.w[1]) : "l"(p));
  return v;
#elif defined(MOE_HIP) && !defined(MOE_SIMT)
  typedef uint32_t u32x2 __attribute__((vector_size(8)));
  const u32x2* q = reinterpret_cast<const u32x2*>(p);
  const u32x2 v = kReuse == Reuse::kNone ? __builtin_nontemporal_load(q) : *q;
  return Vec8{{v[0], v[1]}};
#else
  return *p;
#endif
}
MOE_DEVICE void store_stream(Vec16* p, Vec16 v) {
#if defined(MOE_CUDA)
  __stcs(reinterpret_cast<uint4*>(p), make_uint4(v.w[0], v.w[1], v.w[2], v.w[3]));
#elif defined(MOE_HIP) && !defined(MOE_SIMT)
  typedef uint32_t u32x4 __attribute__((vector_size(16)));
  __builtin_nontemporal_store(u32x4{v.w[0], v.w[1], v.w[2], v.w[3]}, reinterpret_cast<u32x4*>(p));
#else
  *p = v;
#endif
}
MOE_DEVICE void store_stream(Vec8* p, Vec8 v) {
#if defined(MOE_CUDA)
  __stcs(reinterpret_cast<uint2*>(p), make_uint2(v.w[0], v.w[1]));
#elif defined(MOE_HIP) && !defined(MOE_SIMT)
  typedef uint32_t u32x2 __attribute__((vector_size(8)));
  __builtin_nontemporal_store(u32x2{v.w[0], v.w[1]}, reinterpret_cast<u32x2*>(p));
#else
  *p = v;
#endif
}
// The same of single words, bytes and halves, where rows are not multiples of more.
template <Reuse kReuse = Reuse::kNone, class T>
MOE_DEVICE std::enable_if_t<std::is_unsigned_v<T>, T> load_stream(const T* p) {
  if constexpr (kReuse == Reuse::kSoon) return *p;
#if defined(MOE_CUDA)
  return __ldcs(p);
#elif defined(MOE_HIP) && !defined(MOE_SIMT)
  return __builtin_nontemporal_load(p);
#else
  return *p;
#endif
}
template <class T>
MOE_DEVICE std::enable_if_t<std::is_arithmetic_v<T>> store_stream(T* p, T v) {
#if defined(MOE_CUDA)
  __stcs(p, v);
#elif defined(MOE_HIP) && !defined(MOE_SIMT)
  __builtin_nontemporal_store(v, p);
#else
  *p = v;
#endif
}

// Whether the copies below go on while their thread does other work; the emulation takes one road at each wave size.
#if defined(MOE_CUDA) || (defined(MOE_SIMT) && SIMT_WARP == 32)
constexpr bool kCopiesInBackground = true;
#else
constexpr bool kCopiesInBackground = false;
#endif

// Global -> shared without passing through registers where the chip can. A thread's copies since the last
// commit_copies() form a group; wait_copies<n>() waits until at most its n newest groups are under way. Other threads
// see the data after a barrier.
template <Reuse kReuse = Reuse::kSoon>
MOE_DEVICE void copy_to_shared(Vec16* shared, const Vec16* global) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  if constexpr (kReuse == Reuse::kNotBeforeStores)
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;"
                 ::"r"(to), "l"(global), "l"(kEvictLast) : "memory");
  else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
#else
  *shared = load_stream(global);
#endif
}
MOE_DEVICE void commit_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int kPending = 0>
MOE_DEVICE void wait_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}
// ---- thread-block clusters (Hopper and later; elsewhere a cluster is one block) -------------------------------------
MOE_DEVICE uint32_t cluster_size() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t n;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(n));
  return n;
#else
  return 1;
#endif
}
MOE_DEVICE uint32_t cluster_rank() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
#else
  return 0;
#endif
}
MOE_DEVICE void cluster_barrier() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// One message from every block of the cluster to every block: kLanes words each, sent and received by 32 lanes. The
// words arrive in inbox.words[sender]; an arrival counts on the inbox's barrier, so nothing else is waited for. Two
// inboxes used in turn suffice: a sender is at most one message ahead of a receiver.
struct ClusterInbox {
  uint64_t barrier;
  uint64_t unused;  // 16-byte alignment of what follows
  uint32_t words[16][32];
};
MOE_DEVICE void cluster_inbox_init(ClusterInbox& inbox) {  // by one thread, before a cluster_barrier()
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;"
               ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(&inbox.barrier))) : "memory");
#endif
}
MOE_DEVICE void cluster_send(ClusterInbox& inbox, uint32_t word, int lane) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const uint32_t size = cluster_size(), barrier = static_cast<uint32_t>(__cvta_generic_to_shared(&inbox.barrier));
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(&inbox.words[cluster_rank()][lane]));
  if (lane == 0)
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 ::"r"(barrier), "r"(size * 32 * 4) : "memory");
  for (uint32_t rank = 0; rank < size; ++rank)
    asm volatile("{.reg .b32 to, barrier;\n"
                 "mapa.shared::cluster.u32 to, %0, %3;\n"
                 "mapa.shared::cluster.u32 barrier, %1, %3;\n"
                 "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [to], %2, [barrier];}"
                 ::"r"(to), "r"(barrier), "r"(word), "r"(rank) : "memory");
#else
  inbox.words[0][lane] = word;
#endif
}
MOE_DEVICE void cluster_wait(ClusterInbox& inbox, uint32_t phase) {  // phase: parity of the messages this inbox has had
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("{.reg .pred done;\n"
               "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
               "@!done bra again;}"
               ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(&inbox.barrier))), "r"(phase) : "memory");
#endif
}

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

// ---- hardware fp8 casts: round to nearest even, saturating, NaN to the canonical code -------------------------------
enum class HardwareFp8 { kNone, kFN, kFNUZ };
#if (defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890) || \
    (defined(MOE_HIP) && (defined(__gfx950__) || defined(__gfx1201__)))
constexpr HardwareFp8 kHardwareFp8 = HardwareFp8::kFN;
#elif defined(MOE_HIP) && defined(__gfx942__)
constexpr HardwareFp8 kHardwareFp8 = HardwareFp8::kFNUZ;
#else
constexpr HardwareFp8 kHardwareFp8 = HardwareFp8::kNone;
#endif

#if defined(MOE_HIP)
// The instructions neither saturate nor have one NaN; fmed3 would swallow a NaN.
MOE_DEVICE float clamp_keep_nan(float v, float max) {
  return v != v ? as_float(0x7fc00000u) : __builtin_amdgcn_fmed3f(v, max, -max);
}
#endif
// Byte 0 of the result is a.
MOE_DEVICE uint32_t convert_e4m3x4(float a, float b, float c, float d) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint32_t r;
  asm("{.reg .b16 lo, hi;\n"
      "cvt.rn.satfinite.e4m3x2.f32 lo, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 hi, %4, %3;\n"
      "mov.b32 %0, {lo, hi};}" : "=r"(r) : "f"(a), "f"(b), "f"(c), "f"(d));
  return r;
#elif defined(MOE_HIP) && (defined(__gfx942__) || defined(__gfx950__) || defined(__gfx1201__))
  constexpr float kMax = kHardwareFp8 == HardwareFp8::kFNUZ ? 240.f : 448.f;
  int r = __builtin_amdgcn_cvt_pk_fp8_f32(clamp_keep_nan(a, kMax), clamp_keep_nan(b, kMax), 0, false);
  return __builtin_amdgcn_cvt_pk_fp8_f32(clamp_keep_nan(c, kMax), clamp_keep_nan(d, kMax), r, true);
#else
  return 0;  // never chosen: kHardwareFp8 is kNone
#endif
}
MOE_DEVICE uint32_t convert_e5m2x4(float a, float b, float c, float d) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint32_t r;
  asm("{.reg .b16 lo, hi;\n"
      "cvt.rn.satfinite.e5m2x2.f32 lo, %2, %1;\n"
      "cvt.rn.satfinite.e5m2x2.f32 hi, %4, %3;\n"
      "mov.b32 %0, {lo, hi};}" : "=r"(r) : "f"(a), "f"(b), "f"(c), "f"(d));
  return r;
#elif defined(MOE_HIP) && (defined(__gfx942__) || defined(__gfx950__) || defined(__gfx1201__))
  constexpr float kMax = 57344.f;
  int r = __builtin_amdgcn_cvt_pk_bf8_f32(clamp_keep_nan(a, kMax), clamp_keep_nan(b, kMax), 0, false);
  return __builtin_amdgcn_cvt_pk_bf8_f32(clamp_keep_nan(c, kMax), clamp_keep_nan(d, kMax), r, true);
#else
  return 0;
#endif
}

// ---- launches ------------------------------------------------------------------------------------------------------
struct Device {
  int multiprocessors;
  int shared_per_block;  // bytes a block may ask for
  int shared_per_multiprocessor;
  bool has_clusters;
  bool overlaps_kernels;  // programmatic dependent launch; the emulation takes that road too, one after the other
  bool native_fnuz;  // fp8 instructions are FNUZ (gfx942)
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
  d.shared_per_block = d.shared_per_multiprocessor = 64 * 1024;
#if defined(MOE_SIMT)
  d.overlaps_kernels = true;
#endif
  cudaDeviceProp properties = {};
  if (cudaGetDeviceProperties(&properties, id) == cudaSuccess)
    d.native_fnuz = strncmp(properties.gcnArchName, "gfx94", 5) == 0;
#else
  int major = 0, minor = 0;
  (void)cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, id);
  (void)cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, id);
  d.sm = 10 * major + minor;
  (void)cudaDeviceGetAttribute(&d.shared_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, id);
  (void)cudaDeviceGetAttribute(&d.shared_per_multiprocessor, cudaDevAttrMaxSharedMemoryPerMultiprocessor, id);
  d.has_clusters = d.overlaps_kernels = major >= 9;
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
  int cluster = 1;           // blocks, along x
};

// Every kernel takes one struct by value. Returns the runtime's error code.
template <class Params>
int launch(void (*kernel)(Params), const Launch& l, std::remove_const_t<Params> params) {
#if defined(MOE_SIMT)
  return simt::launch(l.grid, l.block, l.shared, [=] { kernel(params); });
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
  return device().multiprocessors / cluster;
#endif
}

inline int fill_bytes(void* p, int byte, size_t bytes, void* stream) {
  return bytes ? cudaMemsetAsync(p, byte, bytes, static_cast<cudaStream_t>(stream)) : cudaSuccess;
}

#endif  // MOE_CUDA || MOE_HIP
}  // namespace moe_fp8
