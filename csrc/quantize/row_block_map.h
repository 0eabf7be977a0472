// Which rows and blocks the threads of quantize_row_blocks_kernel have, and where scales go, for each order of scales.
#pragma once
#include "quantize/sources.h"

namespace moe_fp8 {

struct RowBlocksPlan : QuantizeParams {
  int64_t stride;  // between columns of column-major scales, else between rows
  uint32_t units;  // units of work along a row: a block of threads takes one
  uint32_t first;  // first unit of this launch
};
constexpr int kTeamRows = 4, kRowBlockThreads = 256;

template <ScaleOrder>
struct RowBlockMap;

// Column-major: 16 lanes share a block of four neighbouring rows. A block of threads is two crews of 32 rows each, so
// that the scales of a crew are a line of 128 bytes. Scales bypass the caches (docs/kernels/quantize.md).
template <>
struct RowBlockMap<ScaleOrder::kColumnMajor> {
  using Scale = ScaleF32;
  static constexpr int kSize = kBlock, kTeam = 16, kRows = 32, kCrewThreads = kRows / kTeamRows * kTeam;
  static constexpr int kCrews = kRowBlockThreads / kCrewThreads, kUnitColumns = kCrews * kSize;
  using Shared = float[kCrews][kRows];

  int64_t unit_row, block;
  int crew, thread;  // number of the crew, and of the thread in it

  MOE_DEVICE RowBlockMap(const RowBlocksPlan& p, uint32_t unit)
      : unit_row(int64_t(unit / p.units) * kRows), crew(threadIdx.x / kCrewThreads),
        thread(threadIdx.x % kCrewThreads) {
    block = int64_t(unit % p.units) * kCrews + crew;
  }
  static int64_t row_units(const RowBlocksPlan& p) { return ceil_div(p.rows, int64_t(kRows)); }
  MOE_DEVICE int team_row(int r) const { return thread / kTeam * kTeamRows + r; }
  MOE_DEVICE int64_t row(int r) const { return unit_row + team_row(r); }
  MOE_DEVICE float& at(Shared& scales, int r) const { return scales[crew][team_row(r)]; }
  MOE_DEVICE void store(const RowBlocksPlan& p, const Shared& scales) const {
    const int64_t row_of_thread = unit_row + thread;
    if (thread < kRows && row_of_thread < p.stride && block * kSize < p.K)
      store_stream(static_cast<float*>(p.scale) + block * p.stride + row_of_thread,
                   row_of_thread < p.rows ? scales[crew][thread] : 0.f);
  }
};

// E8M0: four lanes share a block of the rows r, r + 32, r + 64 and r + 96, which are neighbours in the blocked layout.
// A block of threads writes scales in whole sectors. Row-major: two such r by 1024 columns, 32 bytes of a row each.
// Blocked: eight such r by 256 columns, 128 bytes of two 128x4 blocks each.
template <bool kBlocked>
struct SectorMap {
  using Scale = ScaleE8M0;
  static constexpr int kSize = kMxBlock, kTeam = 4, kTeams = kRowBlockThreads / kTeam;
  static constexpr int kRs = kBlocked ? 8 : 2, kAcross = kTeams / kRs, kUnitColumns = kAcross * kSize;
  using Shared = uint8_t[kRs][kTeamRows][kAcross];
  static_assert(sizeof(Shared) == kRowBlockThreads);  // a thread stores one scale

  int64_t first_row, block;  // first_row: the row of r = 0
  int place = 0;             // blocked row of the scale that this thread stores, where groups place rows

  MOE_DEVICE SectorMap(const RowBlocksPlan& p, uint32_t unit) {
    const uint32_t rs = unit / p.units;
    first_row = int64_t(rs / (32 / kRs)) * kScaleRows + rs % (32 / kRs) * kRs;
    block = int64_t(unit % p.units) * kAcross + team() % kAcross;
    const int64_t row = first_row + stored_row();
    if (kBlocked && p.scratch) place = row < p.rows ? p.scratch[row] : -1;  // loaded long before it is needed
  }
  static int64_t row_units(const RowBlocksPlan& p) { return ceil_div(p.rows, int64_t(kScaleRows)) * (32 / kRs); }
  MOE_DEVICE int team() const { return threadIdx.x / kTeam; }
  MOE_DEVICE int64_t row(int r) const { return first_row + team() / kAcross + 32 * r; }
  MOE_DEVICE uint8_t& at(Shared& scales, int r) const { return scales[team() / kAcross][r][team() % kAcross]; }

  // The scale that a thread stores, in the order of memory: r and quarter of its row 32 * quarter + r, and its unit.
  MOE_DEVICE int stored_r() const { return kBlocked ? threadIdx.x / 16 % kRs : threadIdx.x / kAcross % kRs; }
  MOE_DEVICE int stored_quarter() const { return kBlocked ? threadIdx.x / 4 % 4 : threadIdx.x / kAcross / kRs; }
  MOE_DEVICE int stored_unit() const {
    return kBlocked ? threadIdx.x / (16 * kRs) * kScaleColumns + threadIdx.x % kScaleColumns : threadIdx.x % kAcross;
  }
  MOE_DEVICE int stored_row() const { return stored_r() + 32 * stored_quarter(); }
  MOE_DEVICE void store(const RowBlocksPlan& p, const Shared& scales) const {
    const int64_t row = first_row + stored_row(), column = block - team() % kAcross + stored_unit();
    const bool valid = row < p.rows && column * kSize < p.K;
    const uint8_t value = valid ? scales[stored_r()][stored_quarter()][stored_unit()] : uint8_t(0);
    auto* scale = static_cast<uint8_t*>(p.scale);
    if (!kBlocked) {
      if (valid) store_stream(scale + row * p.stride + column, value);
    } else if (column < p.stride && place >= 0) {  // without groups, rows behind the last one have places too
      store_stream(scale + blocked_offset(p.scratch ? place : row, column, p.stride), value);
    }
  }
};
template <>
struct RowBlockMap<ScaleOrder::kBlocked> : SectorMap<true> { using SectorMap::SectorMap; };
template <>
struct RowBlockMap<ScaleOrder::kRowMajor> : SectorMap<false> { using SectorMap::SectorMap; };

}  // namespace moe_fp8
