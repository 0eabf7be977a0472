// The units that each worker computes in Hopper's products, as a C function for ctypes.
#include <hip/hip_runtime.h>

#include "gemm/sm90/tile_pairs.h"

namespace {

using namespace moe_fp8;

struct Counter {
  int* at;
  int next() { return atomicAdd(at, 1); }
};

// units [workers, max]: the units of every worker in order, and one of expert -1 behind its last unit. `lanes` lanes of
// a warp run the scheduler.
template <class T, class Scheduler, class... Counter>
const char* schedule(const sm90::Args& args, int workers, gemm::WorkUnit* units, int max, unsigned lanes,
                     const Counter&... counter) {
  const auto kernel = [&] {
    HIP_DYNAMIC_SHARED(unsigned char, smem)
    auto& groups = *reinterpret_cast<gemm::GroupOffsets*>(smem);
    groups.build<T>(args.offs, args);
    if (threadIdx.x - kWarpSize >= lanes) return;
    Scheduler scheduler(args, groups, int(blockIdx.x), int(gridDim.x), counter...);
    for (int i = 0; i < max; ++i) {
      const gemm::WorkUnit unit = scheduler.next();
      if (threadIdx.x % kWarpSize == 0) units[int(blockIdx.x) * max + i] = unit;
      if (unit.expert < 0) return;
    }
  };
  const hipError_t code = simt::launch(dim3(unsigned(workers)), dim3(64), sizeof(gemm::GroupOffsets), kernel, 1);
  return code == hipSuccess ? nullptr : hipGetErrorString(code);
}
template <sm90::Scales kScales, sm90::Grouped kGrouped>
const char* schedule(const sm90::Args& args, int workers, gemm::WorkUnit* units, int max) {
  using T = sm90::Traits<kScales, kGrouped, Fp8Type::kE4M3FN, sm90::Store>;
  if (args.unit_counter)
    return schedule<T, gemm::DynamicScheduler<T, Counter>>(args, workers, units, max, 1, Counter{args.unit_counter});
  return schedule<T, typename T::Scheduler>(args, workers, units, max, kWarpSize);
}

}  // namespace

extern "C" const char* simt_schedule_units(const int* offs, int E, int M, int N, int K, bool k_grouped, bool blocks,
                                           int* unit_counter, int workers, gemm::WorkUnit* units, int max) {
  using sm90::Grouped, sm90::Scales;
  sm90::Args p = {};
  p.offs = offs;
  p.M = M, p.N = N, p.K = K, p.E = E;
  p.unit_counter = unit_counter;
  const auto run = k_grouped ? blocks ? schedule<Scales::kSquares, Grouped::kK> : schedule<Scales::kRows, Grouped::kK>
                             : blocks ? schedule<Scales::kBlocks, Grouped::kM> : schedule<Scales::kRows, Grouped::kM>;
  return run(p, workers, units, max);
}
