// Shared by the launch functions for ctypes. Each returns null, or an error message.
#pragma once
#include <hip/hip_runtime.h>

#include "numerics/operand_scales.h"

using namespace moe_fp8;

inline const char* outcome(int code) {
  const bool failed = code || hipPeekAtLastError();
  (void)hipGetLastError();
  return failed ? hipGetErrorString(hipError_t(code)) : nullptr;
}

struct Scales {  // simt_kernels.py fills it
  const void* data;
  int64_t group_stride, row_stride, block_stride, blocks, block_size, rows_log2, layout;

  OperandScales get() const {
    return {data, group_stride, row_stride, block_stride, int(blocks), int(block_size), int(rows_log2),
            ScaleLayout(layout)};
  }
};
