// Scaling blocks along rows alone: the kernel that the recipes with blocks share. A team of lanes shares a block in
// four rows and loads 16 bytes a lane and row; which rows, and where scales go, is the Map's to say, of its unit.
#pragma once
#include "kernels/dispatch.h"
#include "primitives/row.h"

namespace moe_fp8 {

struct RowBlocksArgs {
  const void* x;
  uint8_t* q;
  void* scale;
  int64_t rows, K, row_stride, scale_stride;
  const int* places;  // [rows], of blocked scales by groups: each row's own, -1: none; null: as they lie
  uint32_t units;     // along a row: of blocks of threads
  uint32_t first;     // of this launch
  bool rule;          // a choice that the scales' rule leaves
  RowIndex index;
};
constexpr int kTeamRows = 4, kRowBlockThreads = 256;

// That registers are for. 1x32 of [131072, 7168] in groups on an H200: five at 1.03 of copy, four at 0.96.
template <class In, Fp8Type kOut, bool kAligned>
constexpr int row_blocks_each() { return kAligned && kCastsInHardware<kOut> && kPerWord<In> == 2 ? 5 : 1; }

template <class Map, class In, Fp8Type kOut, bool kAligned>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kRowBlockThreads, (row_blocks_each<In, kOut, kAligned>()))
    quantize_row_blocks_kernel(MOE_GRID_CONSTANT const RowBlocksArgs p) {
  __shared__ typename Map::Shared shared;
  constexpr int kTeam = Map::kTeam, kVecs = Map::kSize / kVecElements<In> / kTeam;  // of a lane in a row
  wait_for_previous_kernel();
  const Map map(p, blockIdx.x + p.first);
  const int lane = threadIdx.x % kTeam;
  const int vec = int(map.block * (Map::kSize / kVecElements<In>)) + lane;
  const int vecs = int(ceil_div<int64_t>(p.K, kVecElements<In>));
  Vec16 held[kTeamRows][kVecs] = {};
  uint32_t amax[kTeamRows] = {};
#pragma unroll
  for (int r = 0; r < kTeamRows; ++r) {
    const int64_t row = map.row(r), source = row >= p.rows ? -1 : p.index.at ? p.index.row(row) : row;
    const auto* x = static_cast<const typename In::Bits*>(p.x) + source * p.row_stride;
#pragma unroll
    for (int i = 0; i < kVecs; ++i)
      if (source >= 0 && vec + i * kTeam < vecs)
        held[r][i] = load_vec<In, kAligned, Reuse::kNotBeforeStores>(x, vec + i * kTeam, p.K);
  }
#pragma unroll
  for (int r = 0; r < kTeamRows; ++r)
#pragma unroll
    for (int i = 0; i < kVecs; ++i) amax[r] = max_vec<In>(amax[r], held[r][i]);

  constexpr int kLanesOfRow = kTeam / kTeamRows;
  const auto s = Map::Scale::template from_amax<kOut>(amax_of_rows<In, kTeam>(amax, lane), p.rule);
  if (lane % kLanesOfRow == 0) map.at(shared, lane / kLanesOfRow) = s.stored();
#pragma unroll
  for (int r = 0; r < kTeamRows; ++r) {
    const int64_t row = map.row(r);
    const int team_lane0 = int(threadIdx.x) % kWarpSize / kTeam * kTeam;
    const float m = as_float(shfl(as_bits(s.multiplier), team_lane0 + r * kLanesOfRow));
#pragma unroll
    for (int i = 0; i < kVecs; ++i)
      if (row < p.rows && vec + i * kTeam < vecs)
        store_cast<In, kOut, kAligned>(p.q + row * p.K, vec + i * kTeam, p.K, held[r][i], m);
  }
  __syncthreads();
  map.store(p, shared);
}

constexpr int64_t kMaxRowBlocks = 1 << 23;  // HIP has fewer than 2^32 threads a launch

// p: all but `units` and `first`.
template <class Map>
int launch_row_blocks(RowBlocksArgs p, InType in_type, Fp8Type out_type, void* stream) {
  p.units = uint32_t(ceil_div<int64_t>(p.K, Map::kUnitColumns));
  const int64_t units = Map::row_units(p) * p.units;
  if (units == 0) return 0;
  return dispatch(in_type, out_type, [&](auto in, auto out) -> int {
    using In = decltype(in);
    constexpr int n = kVecElements<In>;
    const bool aligned = reinterpret_cast<uintptr_t>(p.x) % 16 == 0 && p.K % n == 0 && p.row_stride % n == 0;
    constexpr Fp8Type kOut = decltype(out)::value;
    auto* kernel = aligned ? quantize_row_blocks_kernel<Map, In, kOut, true>
                           : quantize_row_blocks_kernel<Map, In, kOut, false>;
    for (int64_t first = 0; first < units; first += kMaxRowBlocks) {
      p.first = uint32_t(first);
      const int64_t blocks = units - first < kMaxRowBlocks ? units - first : kMaxRowBlocks;
      if (const int e = launch(kernel, {dim3(unsigned(blocks)), dim3(kRowBlockThreads), stream}, p)) return e;
    }
    return 0;
  });
}

}  // namespace moe_fp8
