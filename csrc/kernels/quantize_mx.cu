#include "kernels/quantize_mx.h"

#include "kernels/quantize_row_blocks.h"
#include "kernels/quantize_tiles.h"

namespace moe_fp8 {
namespace {

// 1x32: four lanes share a block of the rows r, r + 32, r + 64 and r + 96, which are neighbours in the blocked layout.
// A block of threads writes scales in whole sectors: of two such r and 1024 columns, 32 bytes of a row each; of eight
// and 256, where they are blocked, 128 bytes of two blocks of scales each.
template <bool kBlocked>
struct SectorMap {
  using Scale = ScaleE8M0;
  static constexpr int kSize = kMxBlock, kTeam = 4, kTeams = kRowBlockThreads / kTeam;
  static constexpr int kRs = kBlocked ? 8 : 2, kAcross = kTeams / kRs, kUnitColumns = kAcross * kSize;
  using Shared = uint8_t[kRs][kTeamRows][kAcross];
  static_assert(sizeof(Shared) == kRowBlockThreads);  // a thread stores one

  int64_t first_row, block;  // first_row: that of r = 0
  int place = 0;             // of the own scale's row, with places by groups

  MOE_DEVICE SectorMap(const RowBlocksArgs& p, uint32_t unit) {
    const uint32_t rs = unit / p.units;
    first_row = int64_t(rs / (32 / kRs)) * kScaleRows + rs % (32 / kRs) * kRs;
    block = int64_t(unit % p.units) * kAcross + team() % kAcross;
    const int64_t row = first_row + own_row();
    if (kBlocked && p.places) place = row < p.rows ? p.places[row] : -1;  // long before it is needed
  }
  static int64_t row_units(const RowBlocksArgs& p) { return ceil_div(p.rows, int64_t(kScaleRows)) * (32 / kRs); }
  MOE_DEVICE int team() const { return threadIdx.x / kTeam; }
  MOE_DEVICE int64_t row(int r) const { return first_row + team() / kAcross + 32 * r; }
  MOE_DEVICE uint8_t& at(Shared& scales, int r) const { return scales[team() / kAcross][r][team() % kAcross]; }

  // The scale that a thread stores, in the order of memory: r, row 32 * quarter + r and unit of those across.
  MOE_DEVICE int own_r() const { return kBlocked ? threadIdx.x / 16 % kRs : threadIdx.x / kAcross % kRs; }
  MOE_DEVICE int own_quarter() const { return kBlocked ? threadIdx.x / 4 % 4 : threadIdx.x / kAcross / kRs; }
  MOE_DEVICE int own_unit() const {
    return kBlocked ? threadIdx.x / (16 * kRs) * kScaleColumns + threadIdx.x % kScaleColumns : threadIdx.x % kAcross;
  }
  MOE_DEVICE int own_row() const { return own_r() + 32 * own_quarter(); }
  MOE_DEVICE void store(const RowBlocksArgs& p, const Shared& scales) const {
    const int64_t row = first_row + own_row(), column = block - team() % kAcross + own_unit();
    const bool there = row < p.rows && column * kSize < p.K;
    const uint8_t own = there ? scales[own_r()][own_quarter()][own_unit()] : uint8_t(0);
    auto* scale = static_cast<uint8_t*>(p.scale);
    if (!kBlocked) {
      if (there) store_stream(scale + row * p.scale_stride + column, own);
    } else if (column < p.scale_stride && place >= 0) {  // without groups, rows behind the last have places too
      store_stream(scale + blocked_offset(p.places ? place : row, column, p.scale_stride), own);
    }
  }
};

// The places of rows among blocked scales by groups, and zeros in the last blocks of every group, which it may not
// fill, and behind the last group.
struct PlaceRowsArgs {
  const int* offs;
  int* places;
  uint8_t* scale;
  int64_t scale_stride, scale_bytes;
  int E, rows;
};
constexpr int kPlaceThreads = 256;
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kPlaceThreads, 1) place_rows_kernel(MOE_GRID_CONSTANT const PlaceRowsArgs p) {
  __shared__ int words[GroupTable::words(kMaxExperts)];
  const GroupTable groups(words, p.E);
  wait_for_previous_kernel();
  build_group_table(groups, p.offs, p.E, p.rows, 0, kScaleRows);
  const int64_t threads = int64_t(gridDim.x) * kPlaceThreads;
  const int64_t thread = int64_t(blockIdx.x) * kPlaceThreads + threadIdx.x;
  for (int64_t r = thread; r < p.rows; r += threads) {
    const int e = GroupTable::find(groups.row, p.E, int(r));
    p.places[r] = e < p.E ? groups.pos[e] + int(r) - groups.row[e] : -1;
  }
  for (int e = blockIdx.x; e < p.E; e += gridDim.x)
    if (groups.rows(e) % kScaleRows != 0)
      clear_scales(p.scale, (groups.pos[e + 1] - kScaleRows) * p.scale_stride, groups.pos[e + 1] * p.scale_stride,
                   threadIdx.x, kPlaceThreads);
  clear_scales(p.scale, groups.pos[p.E] * p.scale_stride, p.scale_bytes, thread, threads);
}

template <Scaling kScaling, class Tiles>
int launch_tiles(const QuantizeMxParams& q, void* stream) {
  const int64_t blocks = ceil_div(q.K, int64_t(kMxBlock)), blocks_t = q.positions / kMxBlock;
  TileArgs p = {};
  p.x = q.x;
  p.offs = q.offs;
  p.q = q.q;
  p.scale = q.scale;
  p.q_t = q.q_t;
  p.scale_t = q.scale_t;
  p.padded_offs = q.padded_offs;
  p.E = q.E;
  p.rows = q.rows;
  p.K = q.K;
  p.row_stride = q.row_stride;
  p.group_stride = q.group_stride;
  p.positions = q.positions;
  p.scale_stride = blocks;
  p.scale_t_stride = blocks_t;
  if constexpr (std::is_same_v<Tiles, TokenTiles>) {  // experts fill theirs
    p.scale_bytes = grouped_scale_rows(q.rows, q.E) * padded_scale_columns(blocks);
    p.scale_t_bytes = padded_scale_rows(q.K) * grouped_scale_columns(blocks_t, q.E);
  }
  p.align = q.align;
  p.rows_too = kScaling != Scaling::kColumns;
  p.transpose = true;
  p.blocked = q.blocked;
  p.rule = q.floor;
  p.index = q.index;
  return launch_tiles<MxFormat, kScaling, Tiles>(p, q.in, q.out, stream);
}

}  // namespace

int quantize_mx_1x32(const QuantizeMxParams& p, void* stream) {
  const int64_t blocks = ceil_div(p.K, int64_t(kMxBlock));
  RowBlocksArgs args = {p.x, p.q, p.scale, p.rows, p.K, p.row_stride};
  args.scale_stride = p.blocked ? padded_scale_columns(blocks) : blocks;
  args.places = p.by_groups ? p.places : nullptr;
  args.rule = p.floor;
  args.index = p.index;
  if (p.by_groups && p.K > 0) {
    const PlaceRowsArgs place = {p.offs, p.places, p.scale, args.scale_stride,
                                 grouped_scale_rows(p.rows, p.E) * args.scale_stride, int(p.E), int(p.rows)};
    const Launch l = {dim3(unsigned(device().multiprocessors)), dim3(kPlaceThreads), stream};
    if (const int e = launch(place_rows_kernel, l, place)) return e;
  }
  return p.blocked ? launch_row_blocks<SectorMap<true>>(args, p.in, p.out, stream)
                   : launch_row_blocks<SectorMap<false>>(args, p.in, p.out, stream);
}
int quantize_mx_32x1(const QuantizeMxParams& p, void* stream) {
  return launch_tiles<Scaling::kColumns, TokenTiles>(p, stream);
}
int quantize_mx_1x32_32x1(const QuantizeMxParams& p, void* stream) {
  return launch_tiles<Scaling::kRowsAndColumns, TokenTiles>(p, stream);
}
int quantize_mx_weight(const QuantizeMxParams& p, void* stream) {
  return launch_tiles<Scaling::kRowsAndColumns, ExpertTiles>(p, stream);
}

}  // namespace moe_fp8
