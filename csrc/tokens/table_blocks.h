// The grid of a kernel in which every block builds a table of groups and the blocks then share the rows.
#pragma once
#include "numerics/groups.h"
#include "platform/launch.h"
#include "tokens/policy.h"

namespace moe_fp8 {

// kTableRowsPerThread rows a thread. At most one block a multiprocessor, because each builds a table. At least one,
// because the first block also writes what the table holds.
inline dim3 table_blocks(int64_t rows) {
  const int64_t blocks = ceil_div<int64_t>(rows, kTableThreads * kTableRowsPerThread);
  const int64_t max_blocks = device().multiprocessors;
  return dim3(unsigned(blocks < 1 ? 1 : blocks < max_blocks ? blocks : max_blocks));
}

}  // namespace moe_fp8
