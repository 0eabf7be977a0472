#include "tokens/token_groups.h"

#include "platform/launch.h"
#include "primitives/groups.h"
#include "tokens/table_blocks.h"

namespace moe_fp8 {
namespace {

struct TokenGroupsPlan : TokenGroupsParams {
  int64_t rows;  // of the output
  bool pads;
};

// The source of a row of the output, or -1.
MOE_DEVICE int source_of(const TokenGroupsPlan& p, const GroupTable& table, int row) {
  const int e = table.find(p.pads ? table.pos : table.row, int(p.E), row);
  if (e < 0 || e >= p.E) return -1;
  if (p.pads) return row - table.pos[e] < table.rows(e) ? table.row[e] + row - table.pos[e] : -1;
  const int64_t at = int64_t(p.starts[e]) + row - table.row[e];
  return at >= 0 && at < p.P ? int(at) : -1;
}

MOE_DEVICE void place_groups(const GroupTable& table, const TokenGroupsParams& p) {
  build_group_table(table, p.offs, int(p.E), int(p.M), int(p.P), p.align);
  if (p.starts == nullptr) {
    if (blockIdx.x > 0) return;
    for (int e = threadIdx.x; e < p.E; e += kTableThreads) {
      p.padded_starts[e] = table.pos[e];
      p.padded_offs[e] = table.pos[e + 1];
    }
    return;
  }
  for (int e = threadIdx.x; e <= p.E; e += kTableThreads)
    table.pos[e] = e < p.E ? clamp_offset(p.starts[e], int(p.P)) : int(p.P);
  __syncthreads();
  block_scan(table.pos, int(p.E), Max{});
}

MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kTableThreads, 1)
    token_groups_kernel(MOE_GRID_CONSTANT const TokenGroupsPlan p) {
  MOE_DYNAMIC_SMEM(smem);
  wait_for_previous_kernel();
  const GroupTable table(reinterpret_cast<int*>(smem), int(p.E));
  place_groups(table, p);
  for (int64_t row = int64_t(blockIdx.x) * kTableThreads + threadIdx.x; row < p.rows; row += gridDim.x * kTableThreads)
    p.source[row] = source_of(p, table, int(row));
}

int launch_for(const TokenGroupsPlan& p, void* stream) {
  Launch l = {table_blocks(p.rows), dim3(kTableThreads), stream};
  l.shared = 4 * GroupTable::words(int(p.E));
  return launch(token_groups_kernel, l, p);
}

}  // namespace

int pad_sources(const TokenGroupsParams& p, void* stream) { return launch_for({p, p.source ? p.P : 0, true}, stream); }
int unpad_sources(const TokenGroupsParams& p, void* stream) { return launch_for({p, p.M, false}, stream); }

}  // namespace moe_fp8
