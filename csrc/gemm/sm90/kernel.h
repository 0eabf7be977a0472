// The kernel of all grouped products: its two roles between two barriers of the cluster.
#pragma once
#include <algorithm>

#include "gemm/sm90/consume.h"
#include "gemm/sm90/pipeline/producer.h"

namespace moe_fp8::sm90 {

// Rows behind the last group, by the consumers of all blocks.
template <class T>
MOE_DEVICE void clear_tail(const Args& p, const Shared<T>& shared) {
  const int64_t row_bytes = int64_t(p.N) * p.element, from = shared.groups.end[p.E] * row_bytes, to = p.M * row_bytes;
  const int64_t step = int64_t(gridDim.x) * 128 * kConsumers * 16;
  auto* out = static_cast<uint8_t*>(p.out);
  for (int64_t at = from + (int64_t(blockIdx.x) * 128 * kConsumers + threadIdx.x - 128) * 16; at < to; at += step)
    *reinterpret_cast<Vec16*>(out + at) = Vec16{};
}

template <class T>
MOE_GLOBAL void __launch_bounds__(kThreads, 1) grouped_gemm_kernel(MOE_GRID_CONSTANT const Args p) {
  if constexpr (kHasWgmma) {
    MOE_DYNAMIC_SMEM(smem);
    Shared<T>& shared = *reinterpret_cast<Shared<T>*>(smem + (-shared_address(smem) & (kStageAlignment - 1)));
    if (threadIdx.x == 0) {
      for (int s = 0; s < kStages; ++s) {
        barrier_init(shared_address(&shared.full[s]), producers_of<T>(p));
        barrier_init(shared_address(&shared.empty[s]), 2 * 4 * kConsumers);  // warps of both blocks
      }
      for (int turn = 0; is_planned<T>(p) && turn < kTurns; ++turn) {
        barrier_init(shared_address(&shared.known[turn]), 1);
        barrier_init(shared_address(&shared.done[turn]), (T::kSumGroups ? 1 : 2) * 4 * kConsumers);  // warps
        if (by_counter<T>(p)) barrier_init(shared_address(&shared.arrived[turn]), 1);
      }
      barriers_ready();
    }
    wait_for_previous_kernel();
    shared.groups.template build<T>(p.offs, p);
    cluster_barrier();
    if (threadIdx.x < 128) {
      leave_registers<kProducerRegisters>();
      if (threadIdx.x == 0) produce_operands(p, shared);
      if constexpr (T::kBlockScales) {
        if (threadIdx.x / 32 == 1) produce_block_scales(p, shared);
      } else if (threadIdx.x == 32) {
        if constexpr (T::kMx) produce_mx_scales(p, shared);
        else produce_tile_scales(p, shared);
      }
      if (is_planned<T>(p) && threadIdx.x >= 96) plan_tiles(p, shared);
      if (by_index<T>(p) && threadIdx.x >= 64) produce_rows(p, shared);
    } else {
      take_registers<kConsumerRegisters>();
      consume(p, shared);
      if (!T::kSumGroups) clear_tail<T>(p, shared);
    }
    __syncwarp();
    cluster_barrier();  // nobody leaves while copies and arrivals for it are under way
  }
}

template <class T>
int launch_grouped_gemm(const ScaledGroupedMmParams& p, int* counter, void* stream) {
  Args args = {};
  args.counter = counter;
  args.scale_a = static_cast<const float*>(p.scale_a.data);
  args.scale_b = static_cast<const float*>(p.scale_b.data);
  args.rows = p.a;
  args.row_stride = p.a_stride;
  args.index = p.index;
  args.offs = p.offs;
  args.out = p.out;
  args.M = int(p.M);
  args.N = int(p.N);
  args.K = int(p.K);
  args.E = int(p.E);
  args.expert_rows = p.E > 1 && !T::kSumGroups ? int(p.b_group_stride / p.b_stride) : 0;
  args.element = p.out_float32 ? 4 : 2;
  args.scale_a_stride = int(p.scale_a.block_stride);
  args.scale_b_stride = int(p.scale_b.block_stride);
  args.scale_blocks = p.scale_a.blocks;
  const int64_t rows_of_b = (T::kSumGroups ? 0 : (p.E - 1) * args.expert_rows) + p.N;
  if (!by_index<T>(args))
    if (const int e = describe_matrix(&args.a, p.a, p.M, p.K, p.a_stride, kWgmmaRows, T::kStageDepth)) return e;
  const int64_t bytes = T::kBytesB;
  if (const int e = describe_matrix(&args.b, p.b, rows_of_b, p.K * bytes, p.b_stride * bytes, T::kBoxColumns)) return e;

  constexpr auto kKernel = grouped_gemm_kernel<T>;
  if (const int e = allow_large<kKernel>()) return e;
  const int clusters = std::min(device().multiprocessors / 2, T::Deal::kMostWorkers);
  Launch l = {dim3(unsigned(2 * clusters)), dim3(kThreads), stream, sizeof(Shared<T>) + kStageAlignment};
  static_assert(sizeof(Shared<T>) + kStageAlignment + kStaticShared <= least_shared(90));
  l.cluster = 2;
  return launch(kKernel, l, args);
}
template <Scales kScales, Fp8Type kA, bool kAdds>
int launch_gemm(const ScaledGroupedMmParams& p, int* counter, void* stream) {
  if constexpr (!kAdds && kScales != Scales::kSquares)  // in which groups of rows have squares anyway
    if (!p.groups_of_sum) return launch_grouped_gemm<Traits<kScales, Grouped::kRows, kA, false>>(p, counter, stream);
  return launch_grouped_gemm<Traits<kScales, Grouped::kSum, kA, kAdds>>(p, counter, stream);
}

}  // namespace moe_fp8::sm90
