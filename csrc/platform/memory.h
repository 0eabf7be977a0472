// Memory access: streaming loads and stores, which do not displace other data in the caches, and asynchronous copies to
// shared memory.
#pragma once
#include <cstdint>
#include <type_traits>

#include "platform/compiler.h"

namespace moe_fp8 {

#if defined(MOE_CUDA)
// An address of the shared window.
MOE_DEVICE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
#endif

struct alignas(16) Vec16 { uint32_t w[4]; };
struct alignas(8) Vec8 { uint32_t w[2]; };

constexpr uint64_t kEvictFirst = 0x12F0000000000000ull, kEvictLast = 0x14F0000000000000ull;  // createpolicy's encoding

// When a loaded line may leave the L2. kNone: first. kSoon: it is read again shortly, so the default policy holds.
// kNotBeforeStores: it is not read again, but leaves after the lines that store_stream writes (evict_last). On an H200,
// quantizing [131072, 7168] in 128 x 1 blocks ran at 0.96 of copy instead of 0.94; a GEMM that followed took no longer.
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
// The same for single words, bytes and halves, for rows that are not whole vectors.
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

// Stores 16 bytes, or the words of them that `room` bytes hold.
MOE_DEVICE void store_words(uint8_t* p, const Vec16& v, int64_t room) {
  if (room >= int64_t(sizeof(Vec16))) return store_stream(reinterpret_cast<Vec16*>(p), v);
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (4 * i < room) store_stream(reinterpret_cast<uint32_t*>(p) + i, v.w[i]);
}

// Whether the copies below run while their thread does other work. The emulation copies asynchronously at wave size 32.
#if defined(MOE_CUDA) || (defined(MOE_SIMT) && SIMT_WARP == 32)
constexpr bool kHasAsyncCopies = true;
#else
constexpr bool kHasAsyncCopies = false;
#endif

// Copies 16 bytes from global to shared memory, without registers in between if the chip has cp.async. A thread's
// copies since the last commit_copies() form a group. wait_copies<n>() waits until at most the n newest groups of the
// thread are in flight. Other threads see the data after a barrier.
template <Reuse kReuse = Reuse::kSoon>
MOE_DEVICE void copy_to_shared(Vec16* shared, const Vec16* global) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  const uint32_t to = shared_address(shared);
  if constexpr (kReuse == Reuse::kNotBeforeStores)
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;"
                 ::"r"(to), "l"(global), "l"(kEvictLast) : "memory");
  else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
#elif defined(MOE_SIMT) && SIMT_WARP == 32
  simt::current->copy_chunk(shared, global);
#else
  *shared = load_stream(global);
#endif
}
// Does nothing unless `active`. Copies 16 bytes if `valid`; otherwise it reads nothing and writes zeros. It has no
// branch, so the compiler may move other instructions between the copies.
MOE_DEVICE void copy_or_zero(Vec16* shared, const Vec16* global, bool active, bool valid) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  const uint32_t to = shared_address(shared);
  asm volatile("{.reg .pred wanted;\n"
               "setp.ne.s32 wanted, %3, 0;\n"
               "@wanted cp.async.cg.shared.global [%0], [%1], 16, %2;}"
               ::"r"(to), "l"(global), "r"(valid ? 16 : 0), "r"(int(active)) : "memory");
#elif defined(MOE_SIMT) && SIMT_WARP == 32
  if (active) simt::current->copy_chunk(shared, valid ? global : nullptr);
#else
  if (active) *shared = valid ? load_stream<Reuse::kSoon>(global) : Vec16{};
#endif
}
MOE_DEVICE void commit_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#elif defined(MOE_SIMT) && SIMT_WARP == 32
  simt::current->complete_group();
#endif
}
template <int kPending = 0>
MOE_DEVICE void wait_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#elif defined(MOE_SIMT) && SIMT_WARP == 32
  simt::current->wait_but_for(kPending);
#endif
}

}  // namespace moe_fp8
