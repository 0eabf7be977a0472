#include "tokens/permute.h"

#include "platform/launch.h"
#include "primitives/groups.h"
#include "tokens/table_blocks.h"

namespace moe_fp8 {
namespace {

// A table in shared memory: where the tokens of every rank and expert lie in x and in the output.
struct ExchangeTable {
  static MOE_HD constexpr int words(int R, int E) { return 2 * R * E + E + 2; }
  MOE_DEVICE ExchangeTable(int* storage, int R, int E)
      : end(storage), placed(end + R * E), pos(placed + R * E), R(R), E(E) {}

  int* end;     // [R][E], exclusive ends in x
  int* placed;  // [E][R], exclusive ends of ranks, counted from the first row of the expert's group
  int* pos;     // [E + 1], first position of every expert's group
  int R, E;

  MOE_DEVICE int begin(int i) const { return i ? end[i - 1] : 0; }
  MOE_DEVICE int size(int e) const { return placed[e * R + R - 1]; }
  // The row of x at position p of the padded layout, or -1.
  MOE_DEVICE int source(int p) const {
    const int e = GroupTable::find(pos, E, p), i = p - pos[e];
    if (e >= E || i >= size(e)) return -1;
    const int* ends = placed + e * R;
    const int r = GroupTable::find(ends, R - 1, i) + 1;  // the first rank whose tokens end behind i
    return begin(r * E + e) + i - (r ? ends[r - 1] : 0);
  }
};

MOE_DEVICE void build_table(const ExchangeTable& x, const PermuteIndicesParams& p) {
  const int counts = x.R * x.E, M = int(p.M);
  for (int i = threadIdx.x; i < counts; i += kTableThreads) x.end[i] = p.count(i);
  __syncthreads();
  block_scan(x.end, counts, SumUpTo{M});
  for (int e = threadIdx.x; e < x.E; e += kTableThreads) {
    int placed = 0;
    for (int r = 0; r < x.R; ++r) x.placed[e * x.R + r] = placed += x.end[r * x.E + e] - x.begin(r * x.E + e);
    x.pos[e + 1] = placed ? round_up(placed, p.align) : p.empty;
    if (blockIdx.x == 0) p.tokens_per_expert[e] = placed;
  }
  if (threadIdx.x == 0) x.pos[0] = 0;
  __syncthreads();
  block_scan(x.pos + 1, x.E, Sum{});
  if (blockIdx.x == 0)
    for (int e = threadIdx.x; e < x.E; e += kTableThreads) p.padded_offs[e] = x.pos[e + 1];
}

MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kTableThreads, 1)
    permute_indices_kernel(MOE_GRID_CONSTANT const PermuteIndicesParams p) {
  MOE_DYNAMIC_SMEM(smem);
  wait_for_previous_kernel();
  const ExchangeTable table(reinterpret_cast<int*>(smem), int(p.R), int(p.E));
  build_table(table, p);
  for (int64_t i = int64_t(blockIdx.x) * kTableThreads + threadIdx.x; i < p.P; i += gridDim.x * kTableThreads)
    p.indices[i] = table.source(int(i));
}

}  // namespace

int permute_indices(const PermuteIndicesParams& p, void* stream) {
  Launch l = {table_blocks(p.P), dim3(kTableThreads), stream};
  l.shared = 4 * ExchangeTable::words(int(p.R), int(p.E));
  return launch(permute_indices_kernel, l, p);
}

}  // namespace moe_fp8
