// The GEMM of every GPU, or Hopper's, as C functions for ctypes, and the chip that is emulated. See shim.h.
#include "shim.h"

#include "gemm/mma/grouped_gemm.h"
#include "gemm/sm90/grouped_gemm.h"
#include "platform/device.h"

extern "C" const char* simt_chip() { return simt::kArchName; }
extern "C" int simt_wave() { return SIMT_WARP; }
extern "C" int simt_native_fnuz() { return native_fnuz(); }

extern "C" const char* simt_scaled_grouped_mm(const uint8_t* a, int a_type, int64_t M, int64_t K, int64_t a_stride,
                                              const uint8_t* b, int b_type, int64_t N, int64_t b_stride,
                                              int64_t b_group_stride, bool k_grouped, const Scales* scale_a,
                                              const Scales* scale_b, const int* offs, int64_t E, bool accumulate,
                                              bool out_transposed, bool out_float32, void* out, bool fast, const int* indices,
                                              int64_t rows_of_a, int64_t top_k, bool dynamic,
                                              const uint16_t* low_rank_a, const uint16_t* low_rank_b, int rank,
                                              void* (*scratch)(int64_t words)) {
  const ScaledGroupedMmParams p = {
      .a = a, .b = b, .scale_a = scale_a->get(), .scale_b = scale_b->get(), .offs = offs, .out = out, .E = E,
      .M = M, .N = N, .K = K, .a_stride = a_stride, .b_stride = b_stride, .b_group_stride = b_group_stride,
      .k_grouped = k_grouped, .accumulate = accumulate, .out_transposed = out_transposed, .out_float32 = out_float32,
      .a_type = Fp8Type(a_type), .b_type = Fp8Type(b_type), .index = indices ? RowIndex(indices, rows_of_a, top_k) : RowIndex(),
      .low_rank = {low_rank_a, low_rank_b, rank, rank, N * rank, rank}};
#if defined(SIMT_HOPPER)
  const bool writes_out = !accumulate || sm90::can_accumulate(p, fast);
  const bool reads_rows = !indices || sm90::can_gather_rows(p, fast);
  const bool lays_out = !out_transposed || sm90::can_transpose(p);
  const bool adds = !low_rank_a || sm90::can_add_low_rank(p, fast);
  if (!sm90::supports(p) || !adds || !writes_out || !reads_rows || !lays_out) return "not for these kernels";
  const int64_t bytes = sm90::scratch_bytes(p, dynamic);
  return outcome(sm90::grouped_gemm(p, fast, dynamic, bytes ? scratch(bytes / 4) : nullptr, nullptr));
#else
  return outcome(mma::grouped_gemm(p, fast, nullptr));
#endif
}
