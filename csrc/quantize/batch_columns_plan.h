// The plan that the kernels of batch columns share.
#pragma once
#include "quantize/geometries.h"
#include "quantize/policy.h"

namespace moe_fp8 {

struct BatchColumnsPlan : QuantizeParams {
  uint32_t panels;       // panels of columns, kLanes lanes wide
  int ranges;            // of rows: a block has a panel of one range
  int range_rows;        // rows of a range
  int64_t stride;        // bytes between rows of x in fp8
  uint8_t* cast;         // [x_rows, stride]: x in fp8, zeros beyond K
  int* source;           // [positions]: the row of x at a position of q_t; -1: zeros
  uint32_t* amax;        // [K], float32 bits
  int* is_used;          // [x_rows]: whether any position has the row
  int64_t moved;         // tiles of q_t that earlier launches moved
};

// Quantizes rows of x and finds the amax of its columns, from one read. For bfloat16 and at most kLongestBatchRow
// columns, it replaces find_amax_kernel.
int launch_batch_rows(const BatchColumnsPlan& p, void* stream);

}  // namespace moe_fp8
