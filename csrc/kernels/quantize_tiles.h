// Scaling blocks along rows, columns or both, tile by tile: the kernel that the recipes with blocks share, and its
// launch.
#pragma once
#include "kernels/dispatch.h"
#include "primitives/tile_scales.h"

namespace moe_fp8 {

// Blocks of a multiprocessor: as few as keep it busy, for the less is under way at once, the nearer in time neighbours
// in memory are written. Of copy on an H200 with 2, 3 and 4 blocks: 1x128 with 128x1 of [131072, 7168] E = 8 0.85,
// 0.84, 0.73; of [16640, 5120] E = 128, whose groups end in small tiles, 0.67 and 0.72 with 2 and 3. Columns of two
// tiles, one below the other, are stored together, 256 bytes a column: 128x1 of [131072, 7168] at 0.96, tile by tile at
// 0.88.
constexpr int kTileBlocks = 2, kTileBlocksOfShortGroups = 3;
constexpr int64_t kShortGroup = 2048;  // rows
template <class T>
constexpr int most_blocks() {  // that registers are for
  if (!T::kAligned) return 1;
  if (T::kWords == 4) return T::kScaling == Scaling::kSquares ? 1 : 2;
  if (T::kBlocks > 1 && std::is_same_v<typename T::Tiles, ExpertTiles>) return kTileBlocks;
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
  T::Format::template clear_gaps<T>(p, tiles);
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
    if (in_wave(tile.rows) > 0) {
      if constexpr (T::kScaling == Scaling::kRowsAndColumns) make_row_multipliers<T>(p, v, shared);
      if constexpr (T::kScaling != Scaling::kColumns) cast_rows<T>(p, tile, v, shared);
    }
    __syncthreads();
    T::Format::template store<T>(p, tile, shared);
    cast_columns<T>(p, tile, v, shared, turn);
  }
}

// p: all but `strips`.
template <class Format, Scaling kScaling, class Tiles>
int launch_tiles(TileArgs p, InType in_type, Fp8Type out_type, void* stream) {
  constexpr bool kTokens = std::is_same_v<Tiles, TokenTiles>;
  p.strips = p.K ? uint32_t(ceil_div<int64_t>(p.K, kBlock)) : 1;
  const int64_t of_tokens = block_extent(p.rows, p.E, p.align) + ceil_div(p.positions, int64_t(kBlock));
  const int64_t tiles = p.strips * (kTokens ? of_tokens : p.E * ceil_div(p.rows, int64_t(kBlock)));
  const int64_t average = kTokens && p.E ? p.rows / p.E : p.rows;
  const int64_t wanted = average < kShortGroup ? kTileBlocksOfShortGroups : kTileBlocks;
  if (!kTokens && tiles * p.K == 0) return 0;
  return dispatch(in_type, out_type, [&](auto in, auto out) {
    using In = decltype(in);
    auto run = [&](auto access) {
      using T = TileTraits<Format, In, decltype(out)::value, kScaling, Tiles, decltype(access)::value>;
      constexpr auto kKernel = quantize_tiles_kernel<T>;
      if (const int e = allow_large<kKernel>()) return e;
      const int64_t most = device().multiprocessors * (wanted < most_blocks<T>() ? wanted : most_blocks<T>());
      Launch l = {dim3(unsigned(tiles < 1 ? 1 : tiles < most ? tiles : most)), dim3(kLanes, kTileSlots), stream};
      l.shared = sizeof(TileShared<T>) + 4 * Tiles::words(p.E);
      return launch(kKernel, l, p);
    };
    constexpr int n = kVecElements<In>;
    bool aligned = reinterpret_cast<uintptr_t>(p.x) % 16 == 0 && p.positions % 16 == 0;
    aligned = aligned && (!kTokens || p.align % 16 == 0);
    for (int64_t stride : {p.K, p.row_stride, p.group_stride}) aligned = aligned && stride % n == 0;
    if (!aligned) return run(std::integral_constant<Access, Access::kAny>{});
    if constexpr (kTokens && std::is_same_v<Format, BlockwiseFormat>)
      if (!p.transpose) return run(std::integral_constant<Access, Access::kInPlace>{});
    return run(std::integral_constant<Access, Access::kTransposed>{});
  });
}

}  // namespace moe_fp8
