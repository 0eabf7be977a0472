// The GEMM for every GPU as C functions, for ctypes, and what it is emulated on. See shim.h.
#include "shim.h"

#include "gemm/mma/grouped_gemm.h"
#include "gemm/sm90/grouped_gemm.h"
#include "platform/device.h"

extern "C" const char* simt_chip() { return simt::kArchName; }
extern "C" int simt_wave() { return SIMT_WARP; }
extern "C" int simt_native_fnuz() { return native_fnuz(); }

extern "C" const char* simt_scaled_grouped_mm(const uint8_t* a, int a_type, int64_t M, int64_t K, int64_t a_stride,
                                              const uint8_t* b, int b_type, int64_t N, int64_t b_stride,
                                              int64_t b_group_stride, bool groups_of_sum, const Scales* scale_a,
                                              const Scales* scale_b, const int* offs, int64_t E, bool adds,
                                              bool out_float32, void* out, bool fast, const int* indices,
                                              int64_t rows_of_a, int64_t top_k, bool counter,
                                              void* (*scratch)(int64_t words)) {
  const ScaledGroupedMmParams p = {
      .a = a, .b = b, .scale_a = scale_a->get(), .scale_b = scale_b->get(), .offs = offs, .out = out, .E = E,
      .M = M, .N = N, .K = K, .a_stride = a_stride, .b_stride = b_stride, .b_group_stride = b_group_stride,
      .groups_of_sum = groups_of_sum, .adds = adds, .out_float32 = out_float32, .a_type = Fp8Type(a_type),
      .b_type = Fp8Type(b_type), .index = indices ? RowIndex(indices, rows_of_a, top_k) : RowIndex()};
#if defined(SIMT_HOPPER)
  const bool takes_out = !adds || sm90::takes_total(p, fast), takes_rows = !indices || sm90::takes_index(p, fast);
  if (!sm90::takes_operands(p) || !takes_out || !takes_rows) return "not for these kernels";
  const int64_t bytes = sm90::scratch_bytes(p, counter);
  return outcome(sm90::grouped_gemm(p, fast, counter, bytes ? scratch(bytes / 4) : nullptr, nullptr));
#else
  return outcome(mma::grouped_gemm(p, fast, nullptr));
#endif
}
