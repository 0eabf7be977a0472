// Hopper's tensor memory accelerator (TMA), and the mbarriers that its copies complete on.
#pragma once
#include <cstdint>

#include "platform/memory.h"
#if defined(MOE_CUDA)
#include <cuda.h>
#endif

namespace moe_fp8 {

#if defined(MOE_CUDA)
// ---- mbarriers in shared memory, at addresses of the shared window -------------------------------------------------
// A barrier completes a phase when it has all arrivals that it was initialized for, and all bytes that arrivals
// expected. Phases alternate between 0 and 1, beginning with 0. A wait for the phase before the current one returns at
// once.

MOE_DEVICE float load_shared(uint32_t address) {
  float f;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(f) : "r"(address) : "memory");
  return f;
}
MOE_DEVICE void load_shared(uint32_t address, float& f0, float& f1) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(f0), "=f"(f1) : "r"(address) : "memory");
}
MOE_DEVICE void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
MOE_DEVICE void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
MOE_DEVICE void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
MOE_DEVICE void barrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
MOE_DEVICE void barrier_wait(uint32_t barrier, uint32_t phase) {
  asm volatile("{.reg .pred done;\n"
               "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
               "@!done bra again;}" ::"r"(barrier), "r"(phase) : "memory");
}
// The address, in the cluster's window, of the same place in the shared memory of block `rank`.
MOE_DEVICE uint32_t cluster_address(uint32_t shared, uint32_t rank) {
  uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(shared), "r"(rank));
  return mapped;
}
// Arrives at a barrier of another block, at a cluster_address().
MOE_DEVICE void barrier_arrive_in_cluster(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Stores a word at a cluster_address(). A barrier of the same block counts its bytes; that block waits by
// barrier_wait_for_cluster().
MOE_DEVICE void store_async(uint32_t shared, uint32_t word, uint32_t barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];"
               ::"r"(shared), "r"(word), "r"(barrier) : "memory");
}
MOE_DEVICE void barrier_wait_for_cluster(uint32_t barrier, uint32_t phase) {
  asm volatile("{.reg .pred done;\n"
               "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
               "@!done bra again;}" ::"r"(barrier), "r"(phase) : "memory");
}
// Orders the thread's stores to shared memory before accesses of the copy engine and the tensor cores that follow a
// barrier (the async proxy).
MOE_DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- copies, global -> shared; `barrier` counts their bytes --------------------------------------------------------
// Copies the box of a matrix that begins at column c and row r. Elements outside of the matrix become zeros.
MOE_DEVICE void tma_load_box(uint32_t shared, const CUtensorMap& matrix, int c, int r, uint32_t barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
               ::"r"(shared), "l"(&matrix), "r"(barrier), "r"(c), "r"(r) : "memory");
}
// Copies the box to both blocks of a cluster of two, to the same place in each. The barrier of each block counts the
// bytes that arrive there.
MOE_DEVICE void tma_load_box_multicast(uint32_t shared, const CUtensorMap& matrix, int c, int r, uint32_t barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
               " [%0], [%1, {%3, %4}], [%2], %5;"
               ::"r"(shared), "l"(&matrix), "r"(barrier), "r"(c), "r"(r), "h"(uint16_t(3)) : "memory");
}
// Copies contiguous bytes. Addresses and `bytes` are multiples of 16.
MOE_DEVICE void bulk_copy(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(shared), "l"(global), "r"(bytes), "r"(barrier) : "memory");
}
// Prefetches contiguous bytes into the L2. The address and `bytes` are multiples of 16.
MOE_DEVICE void bulk_prefetch(const void* global, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}
// ---- copies of single chunks of 16 bytes, global -> shared, by cp.async as in memory.h -----------------------------
// Copies the chunk if `valid`, else writes zeros.
MOE_DEVICE void copy_chunk(uint32_t shared, const void* global, bool valid) {
  asm volatile("{.reg .pred clear; setp.eq.u32 clear, %2, 0;\n"
               "cp.async.cg.shared.global.L2::256B [%0], [%1], 16, clear;}"
               ::"r"(shared), "l"(global), "r"(uint32_t(valid)) : "memory");
}
// Arrives when all copy_chunk() of the thread are complete. A thread that waits for it calls fence_async_proxy() before
// tensor cores read the chunks.
MOE_DEVICE void barrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
// ---- tensor maps, made on the host ---------------------------------------------------------------------------------
// Describes bytes [rows, columns], whose rows are row_stride bytes apart, for copies in boxes of box_rows rows by
// box_columns columns, 128 or 64, swizzled by as many bytes. The base and the stride are multiples of 16. Returns 0 or
// the runtime's error code.
inline int make_tensor_map(CUtensorMap* map, const void* base, int64_t rows, int64_t columns, int64_t row_stride,
                           int box_rows, int box_columns = 128) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {  // looked up at run time, so that the module also loads without libcuda
    void* entry_point = nullptr;
    cudaDriverEntryPointQueryResult result;
    (void)cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry_point, 12000, cudaEnableDefault, &result);
    return reinterpret_cast<Encode>(entry_point);
  }();
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint64_t sizes[] = {cuuint64_t(columns), cuuint64_t(rows)}, strides[] = {cuuint64_t(row_stride)};
  const cuuint32_t box[] = {cuuint32_t(box_columns), cuuint32_t(box_rows)}, steps[] = {1, 1};
  const CUtensorMapSwizzle swizzle = box_columns == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B;
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(base), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}
#endif  // MOE_CUDA

}  // namespace moe_fp8
