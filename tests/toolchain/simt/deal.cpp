// Who takes which units of Hopper's products, as a C function for ctypes.
#include <hip/hip_runtime.h>

#include "gemm/sm90/tile_schedule.h"

namespace {

using namespace moe_fp8;

struct Counter {
  int* at;
  int next() { return atomicAdd(at, 1); }
};

// taken: of every worker [most], and a unit of no group behind its last. `lanes` of a wave deal.
template <class T, class Deal, class... Counter>
const char* deal_by(const sm90::Args& args, int workers, gemm::Unit* taken, int most, unsigned lanes,
                    const Counter&... counter) {
  const auto kernel = [&] {
    HIP_DYNAMIC_SHARED(unsigned char, smem)
    auto& groups = *reinterpret_cast<gemm::GroupBounds*>(smem);
    groups.build<T>(args.offs, args);
    if (threadIdx.x - kWarpSize >= lanes) return;
    Deal units(args, groups, int(blockIdx.x), int(gridDim.x), counter...);
    for (int i = 0; i < most; ++i) {
      const gemm::Unit unit = units.next();
      if (threadIdx.x % kWarpSize == 0) taken[int(blockIdx.x) * most + i] = unit;
      if (unit.expert < 0) return;
    }
  };
  const hipError_t code = simt::launch(dim3(unsigned(workers)), dim3(64), sizeof(gemm::GroupBounds), kernel, 1);
  return code == hipSuccess ? nullptr : hipGetErrorString(code);
}
template <sm90::Scales kScales, sm90::Grouped kGrouped>
const char* deal(const sm90::Args& args, int workers, gemm::Unit* taken, int most) {
  using T = sm90::Traits<kScales, kGrouped, Fp8Type::kE4M3FN, false>;
  if (args.counter)
    return deal_by<T, gemm::ByCounter<T, Counter>>(args, workers, taken, most, 1, Counter{args.counter});
  return deal_by<T, typename T::Deal>(args, workers, taken, most, kWarpSize);
}

}  // namespace

extern "C" const char* simt_deal(const int* offs, int E, int M, int N, int K, bool groups_of_sum, bool blocks,
                                 int* counter, int workers, gemm::Unit* taken, int most) {
  using sm90::Grouped, sm90::Scales;
  sm90::Args p = {};
  p.offs = offs;
  p.M = M, p.N = N, p.K = K, p.E = E;
  p.counter = counter;
  const auto by = groups_of_sum ? blocks ? deal<Scales::kSquares, Grouped::kSum> : deal<Scales::kRows, Grouped::kSum>
                                : blocks ? deal<Scales::kBlocks, Grouped::kRows> : deal<Scales::kRows, Grouped::kRows>;
  return by(p, workers, taken, most);
}
