#include "kernels/quantize_blockwise.h"

#include "kernels/dispatch.h"
#include "primitives/row.h"
#include "primitives/tile.h"

namespace moe_fp8 {
namespace {

// 1x128 alone: 16 lanes share a block of 128 columns in four neighbouring rows, eight such teams a unit of 32 rows,
// whose scales are a line of 128 bytes. Of copy on an H200: 1.03 with scales stored as streams, 0.93 otherwise.
constexpr int kTeam = 16, kTeamRows = 4, kUnitRows = 32, kUnitThreads = kUnitRows / kTeamRows * kTeam, kUnits = 2;

struct RowBlocks {
  QuantizeBlockwiseParams p;
  int64_t scale_stride;
  uint32_t strips;  // blocks of 128 along K
};

template <class In, Fp8Type kOut, bool kAligned>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kUnits * kUnitThreads, 1)
    quantize_1x128_kernel(MOE_GRID_CONSTANT const RowBlocks args) {
  __shared__ float scales[kUnits][kUnitRows];
  constexpr int kVecs = kBlock / kVecElements<In> / kTeam;  // of a lane in a row
  const QuantizeBlockwiseParams& p = args.p;
  const uint32_t unit = blockIdx.x * kUnits + threadIdx.y, strip = unit % args.strips;
  const int lane = threadIdx.x % kTeam, team_row = threadIdx.x / kTeam * kTeamRows;
  const int64_t unit_row = int64_t(unit / args.strips) * kUnitRows, first = unit_row + team_row;
  const int vec = int(strip * (kBlock / kVecElements<In>)) + lane, vecs = int(ceil_div<int64_t>(p.K, kVecElements<In>));
  wait_for_previous_kernel();
  Vec16 held[kTeamRows][kVecs] = {};
  uint32_t amax[kTeamRows] = {};
#pragma unroll
  for (int r = 0; r < kTeamRows; ++r) {
    const int64_t row = first + r, source = row >= p.rows ? -1 : p.index.at ? p.index.row(row) : row;
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
  const ScaleF32 s = ScaleF32::from_amax<kOut>(amax_of_rows<In, kTeam>(amax, lane), p.pow2_scale);
  if (lane % kLanesOfRow == 0) scales[threadIdx.y][team_row + lane / kLanesOfRow] = s.dequant();
#pragma unroll
  for (int r = 0; r < kTeamRows; ++r) {
    const int team_lane0 = int(threadIdx.x) % kWarpSize / kTeam * kTeam;
    const float m = as_float(shfl(as_bits(s.multiplier), team_lane0 + r * kLanesOfRow));
#pragma unroll
    for (int i = 0; i < kVecs; ++i)
      if (first + r < p.rows && vec + i * kTeam < vecs)
        store_cast<In, kOut, kAligned>(p.q + (first + r) * p.K, vec + i * kTeam, p.K, held[r][i], m);
  }
  __syncthreads();
  const int64_t mine = unit_row + threadIdx.x;
  if (threadIdx.x < kUnitRows && mine < args.scale_stride)
    store_stream(p.scale + strip * args.scale_stride + mine, mine < p.rows ? scales[threadIdx.y][threadIdx.x] : 0.f);
}

// The other directions, tile by tile. Blocks of a multiprocessor: as few as keep it busy, for the less is under way at
// once, the nearer in time neighbours in memory are written. Of copy on an H200 with 2, 3 and 4 blocks: both directions
// of [131072, 7168] E = 8 0.85, 0.84, 0.73; of [16640, 5120] E = 128, whose groups end in small tiles, 0.67 and 0.72
// with 2 and 3. Columns of two tiles, one below the other, are stored together, 256 bytes a column: those of
// [131072, 7168] at 0.96, tile by tile at 0.88.
constexpr int kTileBlocks = 2, kTileBlocksOfShortGroups = 3;
constexpr int64_t kShortGroup = 2048;  // rows
template <class T>
constexpr int most_blocks() {  // that registers are for
  if (!T::kAligned) return 1;
  if (T::kWords == 4) return T::kScaling == Scaling::kSquares ? 1 : 2;
  return std::is_same_v<typename T::In, BF16> && T::kAccess == Access::kTransposed ? kTileBlocksOfShortGroups : 2;
}

template <class T>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kTileThreads, kCastsInHardware<T::kOut> ? most_blocks<T>() : 1)
    quantize_tiles_kernel(MOE_GRID_CONSTANT const TileArgs p) {
  MOE_DYNAMIC_SMEM(smem);
  auto& shared = *reinterpret_cast<TileShared<T>*>(smem);
  wait_for_previous_kernel();
  const typename T::Tiles tiles(reinterpret_cast<int*>(&shared + 1), p);
  tiles.build();
  if (T::kScaling == Scaling::kRowsAndColumns && blockIdx.x == 0 && p.K > 0) {  // what lies between columns of scale
    const uint32_t t = threadIdx.y * kLanes + threadIdx.x, gap = uint32_t(p.scale_stride - p.rows);
    for (uint32_t i = t; i < p.strips * gap; i += kTileThreads)
      p.scale[i / gap * p.scale_stride + p.rows + i % gap] = 0.f;
  }
  const bool scheduler = threadIdx.y == kTileSlots - 1 && threadIdx.x == 0;  // works out the tiles for all
  auto schedule = [&](uint32_t turn) {
    if (scheduler) shared.tile(turn) = tile_of_turn(p, tiles, turn);
  };
  __syncthreads();
  schedule(0);
  schedule(1);
  __syncthreads();
  find_sources(p, shared.tile(0), shared.source[0]);
  find_sources(p, shared.tile(1), shared.source[1]);
  __syncthreads();
  copy_tile<T>(p, shared.tile(0), shared.source[0], shared);
  for (uint32_t turn = 0; shared.tile(turn).there; ++turn) {
    const Tile& tile = shared.tile(turn);
    schedule(turn + 2);
    wait_copies<0>();
    __syncthreads();
    TileWords<T> v;
    read_tile<T>(p, tile, shared.source[turn & 1], shared, v);
    reduce_slot<T>(v, shared);
    __syncthreads();
    copy_tile<T>(p, shared.tile(turn + 1), shared.source[(turn + 1) & 1], shared);
    find_sources(p, shared.tile(turn + 2), shared.source[turn & 1]);
    if constexpr (T::kScaling == Scaling::kSquares) make_square_multiplier<T>(p, shared);
    else make_column_multipliers<T>(p, shared);
    if constexpr (T::kScaling == Scaling::kRowsAndColumns) make_row_multipliers<T>(p, v, shared);
    if constexpr (T::kScaling != Scaling::kColumns) cast_rows<T>(p, tile, v, shared);
    __syncthreads();
    store_scales<T>(p, tile, shared);
    if (!T::transposes(p)) {
      cast_columns_in_place<T>(p, tile, v, shared);
      continue;
    }
    stage_columns<T>(tile, v, shared, turn % kStack);
    if (turn % kStack != kStack - 1) continue;
    __syncthreads();
    store_staged<T>(p, shared, turn);
  }
}

template <Scaling kScaling>
int launch_tiles(const QuantizeBlockwiseParams& q, void* stream) {
  constexpr bool kTokens = kScaling != Scaling::kSquares;
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
  p.scale_stride = scale_stride(q.rows);
  p.scale_t_stride = scale_stride(q.K);
  p.blocks = int(kTokens ? block_extent(q.rows, q.E, q.align) : 0);
  p.align = q.align;
  p.strips = q.K ? uint32_t(ceil_div<int64_t>(q.K, kBlock)) : 1;
  p.rows_too = kScaling == Scaling::kRowsAndColumns;
  p.transpose = q.transpose;
  p.pow2_scale = q.pow2_scale;
  p.index = q.index;
  const int64_t of_expert = ceil_div(q.rows, int64_t(kBlock));  // tiles
  const int64_t tiles = p.strips * (kTokens ? p.blocks + ceil_div(q.positions, int64_t(kBlock)) : q.E * of_expert);
  const int64_t average = kTokens && q.E ? q.rows / q.E : q.rows;
  const int64_t wanted = average < kShortGroup ? kTileBlocksOfShortGroups : kTileBlocks;
  if (!kTokens && tiles * q.K == 0) return 0;
  return dispatch(q.in, q.out, [&](auto in, auto out) {
    auto run = [&](auto traits) {
      using T = decltype(traits);
      constexpr auto kKernel = quantize_tiles_kernel<T>;
      if (const int e = allow_large<kKernel>()) return e;
      const int64_t most = device().multiprocessors * (wanted < most_blocks<T>() ? wanted : most_blocks<T>());
      Launch l = {dim3(unsigned(tiles < 1 ? 1 : tiles < most ? tiles : most)), dim3(kLanes, kTileSlots), stream};
      l.shared = sizeof(TileShared<T>) + 4 * T::Tiles::words(p.E);
      return launch(kKernel, l, p);
    };
    using In = decltype(in);
    constexpr Fp8Type kOut = decltype(out)::value;
    constexpr int n = kVecElements<In>;
    bool aligned = reinterpret_cast<uintptr_t>(p.x) % 16 == 0 && p.positions % 16 == 0;
    aligned = aligned && (!kTokens || p.align % 16 == 0);
    for (int64_t stride : {p.K, p.row_stride, p.group_stride}) aligned = aligned && stride % n == 0;
    if (!aligned) return run(TileTraits<In, kOut, kScaling, Access::kAny>{});
    if constexpr (kTokens)
      if (!p.transpose) return run(TileTraits<In, kOut, kScaling, Access::kInPlace>{});
    return run(TileTraits<In, kOut, kScaling, Access::kTransposed>{});
  });
}

}  // namespace

int quantize_1x128(const QuantizeBlockwiseParams& p, void* stream) {
  const int64_t strips = ceil_div(p.K, int64_t(kBlock)), units = ceil_div(p.rows, int64_t(kUnitRows)) * strips;
  if (units == 0) return 0;
  return dispatch(p.in, p.out, [&](auto in, auto out) {
    using In = decltype(in);
    constexpr int n = kVecElements<In>;
    const RowBlocks args = {p, scale_stride(p.rows), uint32_t(strips)};
    const bool aligned = reinterpret_cast<uintptr_t>(p.x) % 16 == 0 && p.K % n == 0 && p.row_stride % n == 0;
    const Launch l = {dim3(unsigned(ceil_div(units, int64_t(kUnits)))), dim3(kUnitThreads, kUnits), stream};
    if (aligned) return launch(quantize_1x128_kernel<In, decltype(out)::value, true>, l, args);
    return launch(quantize_1x128_kernel<In, decltype(out)::value, false>, l, args);
  });
}
int quantize_128x1(const QuantizeBlockwiseParams& p, void* stream) {
  return launch_tiles<Scaling::kColumns>(p, stream);
}
int quantize_1x128_128x1(const QuantizeBlockwiseParams& p, void* stream) {
  return launch_tiles<Scaling::kRowsAndColumns>(p, stream);
}
int quantize_128x128(const QuantizeBlockwiseParams& p, void* stream) {
  return launch_tiles<Scaling::kSquares>(p, stream);
}

}  // namespace moe_fp8
