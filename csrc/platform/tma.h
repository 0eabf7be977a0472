// Hopper's copy engine and the barriers that its copies complete on.
#pragma once
#include <cstdint>

#include "platform/compiler.h"
#if defined(MOE_CUDA)
#include <cuda.h>
#endif

namespace moe_fp8 {

#if defined(MOE_CUDA)
// ---- barriers in shared memory; addresses are those of the block's own window ---------------------------------------
// A barrier completes a phase when as many arrivals as it was made for have come and all bytes that were announced. The
// first phase is 0; a wait for the phase before the one under way returns at once.
MOE_DEVICE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

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
MOE_DEVICE void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
MOE_DEVICE void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
MOE_DEVICE void barrier_arrive_expecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
MOE_DEVICE void barrier_wait(uint32_t barrier, uint32_t phase) {
  asm volatile("{.reg .pred done;\n"
               "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
               "@!done bra again;}" ::"r"(barrier), "r"(phase) : "memory");
}
// The same place in the shared memory of another block of the cluster, and an arrival there.
MOE_DEVICE uint32_t in_block(uint32_t shared, uint32_t rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared), "r"(rank));
  return there;
}
MOE_DEVICE void barrier_arrive_in_cluster(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// A word to there, whose bytes the barrier beside it counts; who waits for that calls barrier_wait_for_cluster().
MOE_DEVICE void store_in_cluster(uint32_t shared, uint32_t word, uint32_t barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];"
               ::"r"(shared), "r"(word), "r"(barrier) : "memory");
}
MOE_DEVICE void barrier_wait_for_cluster(uint32_t barrier, uint32_t phase) {
  asm volatile("{.reg .pred done;\n"
               "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
               "@!done bra again;}" ::"r"(barrier), "r"(phase) : "memory");
}
// What this thread stored to shared memory comes before what the copy engine and the tensor cores do behind a barrier.
MOE_DEVICE void stores_before_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- copies, global -> shared; `barrier` counts their bytes --------------------------------------------------------
// A box of a matrix, from column c and row r on; zeros beyond the matrix.
MOE_DEVICE void copy_box(uint32_t shared, const CUtensorMap& matrix, int c, int r, uint32_t barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
               ::"r"(shared), "l"(&matrix), "r"(barrier), "r"(c), "r"(r) : "memory");
}
// The same into both blocks of a cluster of two, at the same place, each with a barrier of its own there.
MOE_DEVICE void copy_box_to_both(uint32_t shared, const CUtensorMap& matrix, int c, int r, uint32_t barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
               " [%0], [%1, {%3, %4}], [%2], %5;"
               ::"r"(shared), "l"(&matrix), "r"(barrier), "r"(c), "r"(r), "h"(uint16_t(3)) : "memory");
}
// Neighbouring bytes; addresses and their number are multiples of 16.
MOE_DEVICE void copy_bytes(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(shared), "l"(global), "r"(bytes), "r"(barrier) : "memory");
}
// Neighbouring bytes to the L2, likewise.
MOE_DEVICE void prefetch_bytes(const void* global, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}
// ---- copies of single chunks, global -> shared, as in memory.h -----------------------------------------------------
// Zeros where it is not there.
MOE_DEVICE void copy_chunk(uint32_t shared, const void* global, bool there) {
  asm volatile("{.reg .pred clear; setp.eq.u32 clear, %2, 0;\n"
               "cp.async.cg.shared.global.L2::256B [%0], [%1], 16, clear;}"
               ::"r"(shared), "l"(global), "r"(uint32_t(there)) : "memory");
}
// An arrival when all of these that the thread has begun are there. Whoever waits for it and lets tensor cores read
// them calls stores_before_copies() between.
MOE_DEVICE void barrier_arrive_behind_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
// ---- the host's description of a matrix ----------------------------------------------------------------------------
// Bytes [rows, columns], rows row_stride bytes apart, copied in boxes of box_rows rows and of 128 columns or 64, by
// which they are swizzled. The base is a multiple of 16 bytes, as is the stride. 0, or the runtime's error code.
inline int describe_matrix(CUtensorMap* map, const void* base, int64_t rows, int64_t columns, int64_t row_stride,
                           int box_rows, int box_columns = 128) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {  // asked of the runtime, so that the module needs no libcuda where there is none
    void* found = nullptr;
    cudaDriverEntryPointQueryResult how;
    (void)cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &how);
    return reinterpret_cast<Encode>(found);
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
