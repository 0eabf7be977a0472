// Scaling blocks along rows only. A lane group shares a scaling block in each of four rows; a lane loads vectors of 16
// bytes of each row. The RowBlockMap of the order of scales says which rows these are, and where their scales go.
#pragma once
#include "platform/launch.h"
#include "platform/waves.h"
#include "quantize/geometries.h"
#include "quantize/policy.h"
#include "quantize/row.h"
#include "quantize/row_block_map.h"

namespace moe_fp8 {

// Blocks of a multiprocessor for which there are registers.
template <class T>
constexpr int kResidentRowBlocks =
    T::kVectorized && kCastsInHardware && kPerWord<typename T::In> == 2 ? kRowBlocks16Bit : 1;

template <ScaleOrder kOrder, class T>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kRowBlockThreads, kResidentRowBlocks<T>)
    quantize_row_blocks_kernel(MOE_GRID_CONSTANT const RowBlocksPlan p) {
  using In = typename T::In;
  using Map = RowBlockMap<kOrder>;
  __shared__ typename Map::Shared shared;
  constexpr int kLanesPerBlock = Map::kLanesPerBlock;
  constexpr int kVecs = Map::kSize / T::kVec / kLanesPerBlock;  // vectors of a lane in a row
  wait_for_previous_kernel();
  const Map map(p, blockIdx.x + p.first);
  const int lane = threadIdx.x % kLanesPerBlock;
  const int vec = int(map.block * (Map::kSize / T::kVec)) + lane;
  const int vecs = int(ceil_div<int64_t>(p.K, T::kVec));
  Vec16 vectors[kLaneGroupRows][kVecs] = {};
  uint32_t amax[kLaneGroupRows] = {};
#pragma unroll
  for (int r = 0; r < kLaneGroupRows; ++r) {
    const int64_t row = map.row(r), source = row >= p.rows ? -1 : source_row(p.index, row);
    const auto* x = find_element<T>(p, source * p.row_stride);
#pragma unroll
    for (int i = 0; i < kVecs; ++i)
      if (source >= 0 && vec + i * kLanesPerBlock < vecs)
        vectors[r][i] = load_vec<T, Reuse::kNotBeforeStores>(p, x, vec + i * kLanesPerBlock);
  }
#pragma unroll
  for (int r = 0; r < kLaneGroupRows; ++r)
#pragma unroll
    for (int i = 0; i < kVecs; ++i) amax[r] = max_vec<In>(amax[r], vectors[r][i]);

  constexpr int kLanesOfRow = kLanesPerBlock / kLaneGroupRows;
  const auto s = T::template scale_of<typename Map::Scale>(p, amax_of_rows<In, kLanesPerBlock>(amax, lane));
  if (lane % kLanesOfRow == 0) map.at(shared, lane / kLanesOfRow) = s.stored();
  T::with_cast(p, [&](auto cast) {
#pragma unroll
    for (int r = 0; r < kLaneGroupRows; ++r) {
      const int64_t row = map.row(r);
      const int first_lane = int(threadIdx.x) % kWarpSize / kLanesPerBlock * kLanesPerBlock;
      const float m = as_float(shfl(as_bits(s.multiplier), first_lane + r * kLanesOfRow));
#pragma unroll
      for (int i = 0; i < kVecs; ++i)
        if (row < p.rows && vec + i * kLanesPerBlock < vecs)
          store_cast<T>(p, p.q + row * p.K, vec + i * kLanesPerBlock, vectors[r][i], m, cast);
    }
  });
  __syncthreads();
  map.store(p, shared);
}

template <ScaleOrder kOrder, class T>
int launch_row_blocks_of(const QuantizeParams& p, void* stream) {
  using Map = RowBlockMap<kOrder>;
  const int64_t blocks = ceil_div<int64_t>(p.K, Map::kSize);
  RowBlocksPlan plan = {p};
  plan.stride = kOrder == ScaleOrder::kColumnMajor ? scale_stride(p.rows)
              : kOrder == ScaleOrder::kBlocked     ? padded_scale_columns(blocks)
                                                   : blocks;
  plan.units = uint32_t(ceil_div<int64_t>(p.K, Map::kUnitColumns));
  const int64_t units = Map::row_units(plan) * plan.units;
  for (int64_t first = 0; first < units; first += max_grid_blocks(kRowBlockThreads)) {
    plan.first = uint32_t(first);
    const Launch l = {dim3(grid_blocks(units - first, kRowBlockThreads)), dim3(kRowBlockThreads), stream};
    if (const int e = launch(quantize_row_blocks_kernel<kOrder, T>, l, plan)) return e;
  }
  return 0;
}

template <class In>
int launch_row_blocks(const QuantizeParams& p, void* stream) {
  using T = TypesOf<In>;
  switch (format_of(p.format).order) {
    case ScaleOrder::kColumnMajor: return launch_row_blocks_of<ScaleOrder::kColumnMajor, T>(p, stream);
    case ScaleOrder::kBlocked: return launch_row_blocks_of<ScaleOrder::kBlocked, T>(p, stream);
    default: return launch_row_blocks_of<ScaleOrder::kRowMajor, T>(p, stream);
  }
}

}  // namespace moe_fp8
