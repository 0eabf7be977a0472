// Maps the threads of quantize_row_blocks_kernel to rows and scaling blocks, and scales to places, for each order of
// scales.
//
// THREAD MAP. A lane group is kLanesPerBlock neighbouring lanes. They share one scaling block in each of four rows. A
// quad is the rows r, r + 32, r + 64 and r + 96: neighbours in the blocked layout, whose 128x4 block is an atom.
//
//   order          lane group   its rows       a block of 256 threads         writes
//   column-major   16 lanes     4 neighbours   32 rows by 2 blocks of 128     a line of 128 bytes for each block
//   row-major      4 lanes      a quad         2 quads by 32 blocks of 32     32 bytes for each row
//   blocked        4 lanes      a quad         8 quads by 8 blocks of 32      128 bytes of each of two atoms
#pragma once
#include "quantize/sources.h"

namespace moe_fp8 {

struct RowBlocksPlan : QuantizeParams {
  int64_t stride;  // between columns of column-major scales, else between rows
  uint32_t units;  // units of work along a row: a block of threads takes one
  uint32_t first;  // first unit of this launch
};
constexpr int kLaneGroupRows = 4, kRowBlockThreads = 256;

template <ScaleOrder>
struct RowBlockMap;

// The 128 threads of a thread group have one scaling block of 32 rows. Scales bypass the caches, which is faster
// (docs/kernels/quantize.md).
template <>
struct RowBlockMap<ScaleOrder::kColumnMajor> {
  using Scale = ScaleF32;
  static constexpr int kSize = kBlock, kLanesPerBlock = 16, kRows = 32;
  static constexpr int kThreadsPerGroup = kRows / kLaneGroupRows * kLanesPerBlock;
  static constexpr int kThreadGroups = kRowBlockThreads / kThreadsPerGroup, kUnitColumns = kThreadGroups * kSize;
  using Shared = float[kThreadGroups][kRows];

  int64_t unit_row, block;
  int thread_group, thread;  // number of the thread group, and of the thread in it

  MOE_DEVICE RowBlockMap(const RowBlocksPlan& p, uint32_t unit)
      : unit_row(int64_t(unit / p.units) * kRows), thread_group(threadIdx.x / kThreadsPerGroup),
        thread(threadIdx.x % kThreadsPerGroup) {
    block = int64_t(unit % p.units) * kThreadGroups + thread_group;
  }
  static int64_t row_units(const RowBlocksPlan& p) { return ceil_div(p.rows, int64_t(kRows)); }
  MOE_DEVICE int row_in_unit(int r) const { return thread / kLanesPerBlock * kLaneGroupRows + r; }
  MOE_DEVICE int64_t row(int r) const { return unit_row + row_in_unit(r); }
  MOE_DEVICE float& at(Shared& scales, int r) const { return scales[thread_group][row_in_unit(r)]; }
  MOE_DEVICE void store(const RowBlocksPlan& p, const Shared& scales) const {
    const int64_t row_of_thread = unit_row + thread;
    if (thread < kRows && row_of_thread < p.stride && block * kSize < p.K)
      store_stream(ScaleSink<Scale, ScaleOrder::kColumnMajor>(p.scale, p.stride).at(row_of_thread, block),
                   row_of_thread < p.rows ? scales[thread_group][thread] : 0.f);
  }
};

// E8M0 scales, row-major or blocked.
template <bool kBlocked>
struct SectorMap {
  using Scale = ScaleE8M0;
  static constexpr int kSize = kMxBlock, kLanesPerBlock = 4, kLaneGroups = kRowBlockThreads / kLanesPerBlock;
  static constexpr int kQuads = kBlocked ? 8 : 2, kAcross = kLaneGroups / kQuads, kUnitColumns = kAcross * kSize;
  using Shared = uint8_t[kQuads][kLaneGroupRows][kAcross];
  static_assert(sizeof(Shared) == kRowBlockThreads);  // a thread stores one scale

  int64_t first_row, block;  // first_row: the row of r = 0
  int place = 0;             // from place_rows(), of the row whose scale this thread stores; -1: no place

  MOE_DEVICE SectorMap(const RowBlocksPlan& p, uint32_t unit) {
    const uint32_t quads = unit / p.units;
    first_row = int64_t(quads / (32 / kQuads)) * kScaleRows + quads % (32 / kQuads) * kQuads;
    block = int64_t(unit % p.units) * kAcross + lane_group() % kAcross;
    const int64_t row = first_row + stored_row();
    if (kBlocked && p.scratch) place = row < p.rows ? p.scratch[row] : -1;  // loaded long before it is needed
  }
  static int64_t row_units(const RowBlocksPlan& p) { return ceil_div(p.rows, int64_t(kScaleRows)) * (32 / kQuads); }
  MOE_DEVICE int lane_group() const { return threadIdx.x / kLanesPerBlock; }
  MOE_DEVICE int64_t row(int r) const { return first_row + lane_group() / kAcross + 32 * r; }
  MOE_DEVICE uint8_t& at(Shared& scales, int r) const {
    return scales[lane_group() / kAcross][r][lane_group() % kAcross];
  }

  // The scale that a thread stores, in the order of memory: of row 32 * quarter of a quad, and of a block.
  MOE_DEVICE int stored_quad() const { return kBlocked ? threadIdx.x / 16 % kQuads : threadIdx.x / kAcross % kQuads; }
  MOE_DEVICE int stored_quarter() const { return kBlocked ? threadIdx.x / 4 % 4 : threadIdx.x / kAcross / kQuads; }
  MOE_DEVICE int stored_block() const {
    return kBlocked ? threadIdx.x / (16 * kQuads) * kScaleColumns + threadIdx.x % kScaleColumns : threadIdx.x % kAcross;
  }
  MOE_DEVICE int stored_row() const { return stored_quad() + 32 * stored_quarter(); }
  MOE_DEVICE void store(const RowBlocksPlan& p, const Shared& scales) const {
    const int64_t row = first_row + stored_row(), column = block - lane_group() % kAcross + stored_block();
    const bool valid = row < p.rows && column * kSize < p.K;
    const uint8_t value = valid ? scales[stored_quad()][stored_quarter()][stored_block()] : uint8_t(0);
    const ScaleSink<Scale, kBlocked ? ScaleOrder::kBlocked : ScaleOrder::kRowMajor> sink(p.scale, p.stride);
    if (!kBlocked) {
      if (valid) store_stream(sink.at(row, column), value);
    } else if (column < p.stride && place >= 0) {  // without groups, rows behind the last one have places too
      store_stream(sink.at(p.scratch ? place : row, column), value);
    }
  }
};
template <>
struct RowBlockMap<ScaleOrder::kBlocked> : SectorMap<true> { using SectorMap::SectorMap; };
template <>
struct RowBlockMap<ScaleOrder::kRowMajor> : SectorMap<false> { using SectorMap::SectorMap; };

}  // namespace moe_fp8
