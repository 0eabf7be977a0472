// What the passes over columns of the batch share.
#pragma once
#include "quantize/geometries.h"

namespace moe_fp8 {

struct ColumnsPlan : QuantizeParams {
  uint32_t panels;       // of kLanes lanes' columns
  int shares, share;     // of a panel; rows of a share
  int64_t stride;        // bytes between rows of x in fp8
  uint8_t* cast;         // [x_rows, stride]: x in fp8, zeros beyond K
  int* source;           // [positions]: the row of x at a position of q_t; -1: zeros
  uint32_t* amax;        // [K], float32 bits
  int* taken;            // [x_rows]: whether any position has the row
  int64_t moved;         // tiles of q_t before the launch
};

// Rows of x and, at once, what find_amax_kernel finds: of bfloat16 and of so many columns at most.
constexpr int64_t kLongestBatchRow = 8192;
int launch_batch_rows(const ColumnsPlan& p, void* stream);

}  // namespace moe_fp8
