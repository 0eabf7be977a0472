// The grid of a kernel whose blocks build a table of groups each and then share rows.
#pragma once
#include "numerics/groups.h"
#include "platform/launch.h"

namespace moe_fp8 {

// Blocks for so many rows, a few of them a thread: no more than multiprocessors, as each builds a table,
// and one at least, as it also writes what the table holds.
inline dim3 table_blocks(int64_t rows, int threads) {
  constexpr int kRowsOfThread = 4;
  const int64_t blocks = ceil_div<int64_t>(rows, threads * kRowsOfThread), most = device().multiprocessors;
  return dim3(unsigned(blocks < 1 ? 1 : blocks < most ? blocks : most));
}

}  // namespace moe_fp8
