// The kernel of all grouped products: warp-specialized roles between two barriers of the cluster, and its launch.
#pragma once
#include <algorithm>

#include "gemm/sm90/consumer_loop.h"
#include "gemm/sm90/epilogue/add.h"
#include "gemm/sm90/epilogue/store_low_rank.h"
#include "gemm/sm90/pipeline/gather_rows.h"
#include "gemm/sm90/pipeline/scale_producer.h"

namespace moe_fp8::sm90 {

template <class T>
MOE_GLOBAL void __launch_bounds__(kThreads, 1) grouped_gemm_kernel(MOE_GRID_CONSTANT const typename T::KernelArgs p) {
  if constexpr (kHasWgmma) {
    MOE_DYNAMIC_SMEM(smem);
    auto& shared = *reinterpret_cast<SharedStorage<T>*>(smem + (-shared_address(smem) & (kStageAlignment - 1)));
    if (threadIdx.x == 0) {
      for (int s = 0; s < kStages; ++s) {
        barrier_init(shared_address(&shared.stage_full[s]), producer_arrivals<T>(p));
        barrier_init(shared_address(&shared.stage_empty[s]), 2 * kConsumerWarps);  // of both blocks
      }
      for (int slot = 0; has_planner<T>(p) && slot < kTileSlots; ++slot) {
        barrier_init(shared_address(&shared.tile_full[slot]), 1);
        barrier_init(shared_address(&shared.tile_empty[slot]), (T::kKGrouped ? 1 : 2) * kConsumerWarps);
        if (schedules_dynamically<T>(p)) barrier_init(shared_address(&shared.work_full[slot]), 1);
      }
      fence_barrier_init();
    }
    wait_for_previous_kernel();
    shared.groups.template build<T>(p.offs, p);
    cluster_barrier();
    if (threadIdx.x < 128) {
      warpgroup_reg_dealloc<kProducerRegisters>();
      if (threadIdx.x == 0) produce_operands(p, shared);
      if constexpr (T::kBlockScales) {
        if (threadIdx.x / 32 == 1) produce_block_scales(p, shared);
      } else if (threadIdx.x == 32) {
        if constexpr (T::kMx) produce_mx_scales(p, shared);
        else produce_tile_scales(p, shared);
      }
      if (has_planner<T>(p) && threadIdx.x >= 96) plan_tiles(p, shared);
      if (gathers_rows<T>(p) && threadIdx.x >= 128 - 32 * kGatherWarps) gather_rows(p, shared);
    } else {
      warpgroup_reg_alloc<kConsumerRegisters>();
      consume_tiles(p, shared);
      if constexpr (!T::kKGrouped) T::Epilogue::template clear_tail<T>(p, shared.groups);
    }
    __syncwarp();
    cluster_barrier();  // no block leaves while copies to it or arrivals at its barriers are in flight
  }
}

template <class T>
int launch_grouped_gemm(const ScaledGroupedMmParams& p, int* unit_counter, void* stream) {
  typename T::KernelArgs args = {};
  args.unit_counter = unit_counter;
  args.scale_a = static_cast<const float*>(p.scale_a.data);
  args.scale_b = static_cast<const float*>(p.scale_b.data);
  args.a_rows = p.a;
  args.a_row_stride = p.a_stride;
  args.row_index = p.index;
  args.offs = p.offs;
  args.out = p.out;
  args.M = int(p.M);
  args.N = int(p.N);
  args.K = int(p.K);
  args.E = int(p.E);
  args.b_expert_rows = p.E > 1 && !T::kKGrouped ? int(p.b_group_stride / p.b_stride) : 0;
  args.out_bytes = p.out_float32 ? 4 : 2;
  args.out_transposed = p.out_transposed;
  args.scale_a_stride = int(p.scale_a.block_stride);
  args.scale_b_stride = int(p.scale_b.block_stride);
  args.scale_blocks = p.scale_a.blocks;
  args.epilogue = T::Epilogue::make_args(p);
  const int64_t b_rows = (T::kKGrouped ? 0 : (p.E - 1) * args.b_expert_rows) + p.N;
  if (!gathers_rows<T>(args))
    if (const int e = make_tensor_map(&args.a_map, p.a, p.M, p.K, p.a_stride, kWgmmaRows, T::kStageK)) return e;
  const int64_t bytes = T::kElementBytesB;
  if (const int e = make_tensor_map(&args.b_map, p.b, b_rows, p.K * bytes, p.b_stride * bytes, T::kBoxN)) return e;

  constexpr auto kKernel = grouped_gemm_kernel<T>;
  if (const int e = raise_kernel_limits<kKernel>()) return e;
  const int clusters = std::min(device().multiprocessors / 2, T::Scheduler::kMaxWorkers);
  Launch l = {dim3(unsigned(2 * clusters)), dim3(kThreads), stream, sizeof(SharedStorage<T>) + kStageAlignment};
  static_assert(sizeof(SharedStorage<T>) + kStageAlignment + kStaticShared <= min_shared_bytes(90));
  l.cluster = 2;
  return launch(kKernel, l, args);
}
template <Scales kScales, Fp8Type kA, class Epilogue>
int launch_gemm(const ScaledGroupedMmParams& p, int* unit_counter, void* stream) {
  if constexpr (Epilogue::kServesMGrouped && kScales != Scales::kSquares)  // kBlocks has squares in M-grouped products
    if (!Epilogue::kServesKGrouped || !p.k_grouped)
      return launch_grouped_gemm<Traits<kScales, Grouped::kM, kA, Epilogue>>(p, unit_counter, stream);
  if constexpr (Epilogue::kServesKGrouped)
    return launch_grouped_gemm<Traits<kScales, Grouped::kK, kA, Epilogue>>(p, unit_counter, stream);
}

}  // namespace moe_fp8::sm90
