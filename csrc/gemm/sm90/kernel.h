// The kernel of all grouped products: its two roles between two barriers of the cluster.
#pragma once
#include "gemm/sm90/consumer.h"
#include "gemm/sm90/producer.h"

namespace moe_fp8::sm90 {

// Rows behind the last group, by the consumers of all blocks.
template <class T>
MOE_DEVICE void clear_tail(const Args& p, const Shared& shared) {
  constexpr int kElement = T::kFloat ? 4 : 2;
  const int64_t row_bytes = int64_t(p.N) * kElement, from = shared.groups.end[p.E] * row_bytes, to = p.M * row_bytes;
  const int64_t step = int64_t(gridDim.x) * 128 * kConsumers * 16;
  auto* out = static_cast<uint8_t*>(p.out);
  for (int64_t at = from + (int64_t(blockIdx.x) * 128 * kConsumers + threadIdx.x - 128) * 16; at < to; at += step)
    *reinterpret_cast<Vec16*>(out + at) = Vec16{};
}

template <class T>
MOE_GLOBAL void __launch_bounds__(kThreads, 1) grouped_gemm_kernel(MOE_GRID_CONSTANT const Args p) {
  if constexpr (kHasWgmma) {
    MOE_DYNAMIC_SMEM(smem);
    Shared& shared = *reinterpret_cast<Shared*>(smem + (-shared_address(smem) & (kStageAlignment - 1)));
    if (threadIdx.x == 0) {
      for (int s = 0; s < kStages; ++s) {
        barrier_init(shared_address(&shared.full[s]), 1);
        barrier_init(shared_address(&shared.empty[s]), 2 * 4 * kConsumers);  // warps of both blocks
      }
      barriers_ready();
    }
    wait_for_previous_kernel();
    shared.groups.template build<T::kGrouped>(p.offs, p.E, T::kSumGroups ? p.K : p.M, ceil_div(p.N, kTileColumns));
    cluster_barrier();
    if (threadIdx.x < 128) {
      leave_registers<kProducerRegisters>();
      if (threadIdx.x == 0) produce<T>(p, shared);
    } else {
      take_registers<kConsumerRegisters>();
      consume<T>(p, shared);
      if (!T::kSumGroups) clear_tail<T>(p, shared);
    }
    __syncwarp();
    cluster_barrier();  // nobody leaves while copies and arrivals for it are under way
  }
}

template <class T>
int launch_grouped_gemm(const Args& args, void* stream) {
  constexpr auto kKernel = grouped_gemm_kernel<T>;
  if (const int e = allow_large<kKernel>()) return e;
  Launch l = {dim3(unsigned(device().multiprocessors / 2 * 2)), dim3(kThreads), stream,
              sizeof(Shared) + kStageAlignment};
  l.cluster = 2;
  return launch(kKernel, l, args);
}
// One instance file each.
int launch_row_scales(const Args& args, bool groups_of_sum, bool out_float32, void* stream);
int launch_block_scales(const Args& args, bool out_float32, void* stream);

template <Grouped kGrouped, Scales kScales>
int launch_with(const Args& args, bool out_float32, void* stream) {
  return out_float32 ? launch_grouped_gemm<Traits<kGrouped, kScales, true>>(args, stream)
                     : launch_grouped_gemm<Traits<kGrouped, kScales, false>>(args, stream);
}

}  // namespace moe_fp8::sm90
