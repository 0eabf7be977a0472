// The columns of quantize_colwise, quantize_rowcol and quantize_weight, strip by strip. Blocks wait for one another
// only inside a cluster, which the hardware starts and runs as one.
#pragma once
#include "kernels/dispatch.h"
#include "primitives/strip.h"

namespace moe_fp8 {
namespace {

// Every tile choice, with what it gave on an H200. Small groups: two to four blocks of 8 slots a multiprocessor, as
// many as still hold two strips each, one in work and one on its way (130 rows a group: four blocks 0.70 of copy, three
// 0.66, two 0.56; 260 rows: four 0.64, three 0.77, two 0.79). Larger ones: one block of 16 slots, in clusters that hold
// a third more rows than the average group has (0.80 to 0.86; clusters that just hold the strip 0.5 to 0.7).
constexpr int kSmallSlots = 8, kSmallBlocks = 4, kStripsHeld = 2;
constexpr int kLargeSlots = 16, kMaxCluster = 16;
template <class T>  // that registers are for
constexpr int kBlocks = T::kSlots == kSmallSlots && kCastsInHardware<T::kOut> ? kSmallBlocks : 1;

// With rows beside the columns, both must keep pace to share what either has read: the columns leave a part of the
// shared memory to the rows, the more the longer a strip takes, up to where a cluster of blocks works on it. Of copy on
// an H200 by KB of 228 left, at rows a group: 130: 40 0.67, 48 0.72, 56 0.68; 260: 64 0.69, 72 0.80, 80 0.75; 520: 72
// 0.73, 80 0.83, 96 0.69; 1408: 56 0.67, 72 0.77, 88 0.76; 4096: 56 0.67, 72 0.70, 80 0.66; 8192: 48 0.67, 56 0.71, 64
// 0.65; 16384: 40 0.65, 48 0.66, 56 0.65. Rows first and then columns: 0.52 to 0.64. Columns of rows that are taken by
// index take longer, so that the rows beside them need less: 260: 64 0.69, 72 0.62; 2048: 40 0.68, 48 0.61, 80 0.54;
// 8192: 40 0.55, 56 0.54; 16384: 32 0.56, 48 0.54, 64 0.44.
constexpr int kBlocksBesideRows = 2;
struct Spare { int64_t rows; int percent, percent_by_index; };
constexpr Spare kSpare[] = {{192, 21, 18}, {384, 32, 28}, {2048, 35, 18},
                            {6144, 32, 17}, {14336, 25, 17}, {INT64_MAX, 21, 14}};
template <Rows kRows>
int spare_beside(int64_t average_rows) {
  int i = 0;
  while (average_rows > kSpare[i].rows) ++i;
  return kRows == Rows::kByIndex ? kSpare[i].percent_by_index : kSpare[i].percent;
}

template <class Groups, class T>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(T::kThreads, kBlocks<T>) quantize_strips_kernel(MOE_GRID_CONSTANT const StripArgs p) {
  MOE_DYNAMIC_SMEM(smem);
  Vec16* ring = reinterpret_cast<Vec16*>(smem);
  auto& shared = *reinterpret_cast<StripShared<T>*>(ring + p.held * kChunks);
  wait_for_previous_kernel();
  if (p.rows_beside) allow_next_kernel();
  const Groups groups(reinterpret_cast<int*>(&shared + 1), p);
  if (p.cluster_log2 > 0) {
    if (threadIdx.y == 0 && threadIdx.x < 2) cluster_inbox_init(shared.inbox[threadIdx.x]);
    cluster_barrier();  // nobody sends to an inbox that is not there
  }

  const bool scheduler = threadIdx.y == T::kSlots - 1 && threadIdx.x == 0;  // works out the parts for all
  Unit unit(blockIdx.x >> p.cluster_log2, p.strips);
  const Unit step(gridDim.x >> p.cluster_log2, p.strips);
  auto schedule = [&](uint32_t turn) {
    if (!scheduler) return;
    shared.parts[turn & 3] = part_of(p, groups, unit);
    unit.advance(step, p.strips);
  };
  schedule(0);
  schedule(1);
  __syncthreads();
  copy_rows<T>(p, shared.parts[0], 0, shared.parts[0].held(p.held), ring, 0);
  commit_copies();
  int base = 0, buffer = 0;
  for (uint32_t turn = 0; shared.parts[turn & 3].group < groups.count(); ++turn) {
    const Part w = shared.parts[turn & 3];
    const Part& next = shared.parts[(turn + 1) & 3];
    schedule(turn + 2);
    const int occupied = round_up(w.held(p.held), kSlotRows), next_base = ring_row(p, base + occupied);
    int copied = 0;
    auto copy_next = [&](int freed) {  // into what the strip leaves of the ring
      const int end = next.held(p.held - occupied + freed);
      if (end > copied) copy_rows<T>(p, next, copied, end, ring, next_base);
      copied = end;
      commit_copies();
    };
    // Before the amax, room permitting: from 0.64 to 0.82 of copy at large groups, from 0.78 to 0.72 at small ones.
    if (T::kSlots == kLargeSlots || w.line0 == w.line1) copy_next(0);
    else commit_copies();
    reduce_strip<T>(p, w, ring, base, shared);
    __syncthreads();
    if (threadIdx.y == 0) make_scales<T>(p, w, shared, turn);
    __syncthreads();
    uint8_t* q_t = p.q_t + groups.q_t_offset(w.group);
    for (int line = w.line0; line < w.line1; line += T::kLines, buffer ^= 1) {
      cast_lines<T>(p, w, line, ring, base, shared.multiplier, shared.stage[buffer]);
      __syncthreads();
      const int cast = (line + T::kLines) * kLine - w.begin - w.skipped;  // rows
      copy_next(cast < occupied ? cast : occupied);
      store_lines<T>(p, w, q_t, line, shared.stage[buffer]);
    }
    base = next_base;
  }
  if (p.cluster_log2 > 0) cluster_barrier();  // nobody leaves while messages to it are under way
}

// How many blocks hold a strip, from the average group; any choice is right for any groups.
struct Plan {
  int slots, blocks;  // of a block; of a multiprocessor
  int cluster;        // blocks
  int held;           // rows a block; negative: does not fit
  int64_t shared;     // bytes a block
};
template <class Groups, class T>
Plan plan_with(int blocks, int64_t E, int spare) {
  Plan plan = {T::kSlots, blocks, 1, 0, int64_t(device().shared_per_multiprocessor) * (100 - spare) / 100 / blocks};
  plan.shared -= kReservedShared + kStaticShared;
  const int64_t most = device().shared_per_block - kStaticShared;
  if (plan.shared > most) plan.shared = most;
  const int64_t rest = plan.shared - int64_t(sizeof(StripShared<T>)) - 4 * Groups::table_words(E);
  plan.held = rest < 0 ? -1 : int(rest / kStripBytes / kSlotRows * kSlotRows);
  return plan;
}
template <class Groups, class In, Fp8Type kOut>
Plan plan_for(int64_t average_rows, int64_t E, bool rows_beside) {
  using Small = StripTraits<In, kOut, kSmallSlots, Groups::kRows>;
  const int spare = rows_beside ? spare_beside<Groups::kRows>(average_rows) : 0;
  if (rows_beside) {
    const Plan plan = plan_with<Groups, Small>(kBlocksBesideRows, E, spare);
    if (average_rows <= plan.held) return plan;
  } else {
    for (int blocks = kSmallBlocks; blocks > 1; --blocks) {
      const Plan plan = plan_with<Groups, Small>(blocks, E, 0);
      if (average_rows * kStripsHeld <= plan.held) return plan;
    }
  }
  if (!device().has_clusters) return plan_with<Groups, Small>(1, E, spare);
  Plan plan = plan_with<Groups, StripTraits<In, kOut, kLargeSlots, Groups::kRows>>(1, E, spare);
  while (plan.cluster < kMaxCluster && plan.cluster * plan.held < average_rows + average_rows / 3) plan.cluster *= 2;
  return plan;
}

// Params: QuantizeColwiseParams or QuantizeRowcolParams; rows: of all tokens, or of one expert.
template <class Params>
StripArgs strip_args(const Params& p, int64_t rows) {
  StripArgs a = {};
  a.x = p.x;
  a.offs = p.offs;
  a.q_t = p.q_t;
  a.scale_t = p.scale_t;
  a.padded_offs = p.padded_offs;
  a.E = p.E;
  a.rows = rows;
  a.K = p.K;
  a.row_stride = p.row_stride;
  a.positions = p.positions;
  a.align = p.align;
  a.pow2_scale = p.pow2_scale;
  return a;
}

template <class Groups>
int launch_strips(InType in_type, Fp8Type out_type, int64_t average_rows, StripArgs p, void* stream) {
  return dispatch(in_type, out_type, [&](auto in, auto out) {
    using In = decltype(in);
    constexpr Fp8Type kOut = decltype(out)::value;
    const Plan plan = plan_for<Groups, In, kOut>(average_rows, p.E, p.rows_beside);
    auto run = [&](auto traits) {
      using T = decltype(traits);
      constexpr auto kKernel = quantize_strips_kernel<Groups, T>;
      p.held = plan.held;
      p.strips = p.K ? int(ceil_div<int64_t>(p.K, T::kColumns)) : 1;
      const int64_t strides[] = {p.K, p.row_stride, p.group_stride};
      p.aligned = reinterpret_cast<uintptr_t>(p.x) % 16 == 0;
      for (int64_t stride : strides) p.aligned = p.aligned && stride % T::kVec == 0;
      p.aligned_t = p.positions % 16 == 0 && (!Groups::kShareRows || p.align % 16 == 0);
      if (const int e = allow_large<kKernel>()) return e;
      int clusters = 0, cluster = plan.cluster;  // smaller ones where the chip, or our slice of it, has no such
      while (cluster > 1 && (clusters = resident_clusters<kKernel>(T::kThreads, cluster)) == 0) cluster /= 2;
      if (cluster == 1) clusters = plan.blocks * device().multiprocessors;
      p.cluster_log2 = 0;
      while (1 << p.cluster_log2 < cluster) ++p.cluster_log2;
      Launch l = {dim3(clusters * cluster), dim3(kLanes, T::kSlots), stream};
      l.shared = plan.shared;
      l.cluster = cluster;
      return launch(kKernel, l, p);
    };
    if (plan.slots == kSmallSlots) return run(StripTraits<In, kOut, kSmallSlots, Groups::kRows>{});
    return run(StripTraits<In, kOut, kLargeSlots, Groups::kRows>{});
  });
}

}  // namespace
}  // namespace moe_fp8
