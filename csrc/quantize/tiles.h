// Scaling blocks along columns, or along rows and columns, tile by tile.
#pragma once
#include "platform/launch.h"
#include "quantize/geometries.h"
#include "quantize/scale_shapes.h"
#include "quantize/tile_scales.h"

namespace moe_fp8 {

template <class T>
constexpr int blocks_by_registers() {  // blocks of a multiprocessor for which there are registers
  if (!T::Types::kVectorized) return 1;
  if (T::kWords == 4) return T::kScaling == Scaling::kSquares ? 1 : 2;
  if (T::kBlocks > 1 && kIsWeight<T>) return kTileBlocks;
  return std::is_same_v<typename T::In, BF16> ? kTileBlocksOfShortGroups : 2;
}

template <class T>
constexpr int resident_blocks() {
  constexpr int by_memory = kMinSharedBytes / int(sizeof(TileShared<T>));
  constexpr int by_registers = kCastsInHardware ? blocks_by_registers<T>() : 1;
  return by_memory < by_registers ? by_memory : by_registers;
}

template <class T>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kTileThreads, resident_blocks<T>())
    quantize_tiles_kernel(MOE_GRID_CONSTANT const TilesPlan p) {
  static_assert(tile_shared_bytes<T>(copies_ahead<T>(kMinSharedBytes), kMaxExperts) + kStaticShared <= kMinSharedBytes);
  MOE_DYNAMIC_SMEM(smem);
  auto& shared = *reinterpret_cast<TileShared<T>*>(smem);
  wait_for_previous_kernel();
  const typename T::Tiles tiles(reinterpret_cast<int*>(&shared + 1), p);
  tiles.build();
  T::Format::template clear_gaps<T>(p, tiles);
  const bool scheduler = threadIdx.y == kTileThreadRows - 1 && threadIdx.x == 0;  // one thread schedules for all
  auto schedule = [&](uint32_t iteration) {
    if (scheduler) shared.tile(iteration) = tile_at_iteration(p, tiles, iteration);
  };
  __syncthreads();
  schedule(0);
  schedule(1);
  __syncthreads();
  find_sources(p, shared.tile(0), shared.source[0]);
  find_sources(p, shared.tile(1), shared.source[1]);
  __syncthreads();
  copy_tile<T>(p, shared.tile(0), shared.source[0], shared);
  for (uint32_t iteration = 0; shared.tile(iteration).valid; ++iteration) {
    const QuantizedTile& tile = shared.tile(iteration);
    schedule(iteration + 2);
    wait_copies<0>();
    __syncthreads();
    TileWords<T> v;
    read_tile<T>(p, tile, shared.source[iteration & 1], shared, v);
    reduce_rows<T>(v, shared);
    __syncthreads();
    copy_tile<T>(p, shared.tile(iteration + 1), shared.source[(iteration + 1) & 1], shared);
    find_sources(p, shared.tile(iteration + 2), shared.source[iteration & 1]);
    const bool squares = T::kScaling == Scaling::kSquares || (T::kBlocks == 1 && p.has_square_amax());
    if (squares) make_square_multiplier<T>(p, shared);
    else make_column_multipliers<T>(p, shared);
    if (writes_rows<T>(p) && in_wave(tile.rows) > 0) {
      if constexpr (T::kScaling == Scaling::kRowsAndColumns) make_row_multipliers<T>(p, v, shared);
      if constexpr (T::kScaling != Scaling::kColumns) cast_rows<T>(p, tile, v, shared);
    }
    __syncthreads();
    T::Format::template store<T>(p, tile, shared);
    if (writes_columns<T>(p)) cast_columns<T>(p, tile, v, shared, iteration);
  }
}

template <class T>
TilesPlan plan_tiles(const QuantizeParams& p) {
  constexpr bool kTokens = std::is_same_v<typename T::Tiles, TokenTiles>;
  TilesPlan plan = {p};
  plan.tiles_across = p.K ? uint32_t(ceil_div<int64_t>(p.K, kBlock)) : 1;
  plan.down_first = p.index.at && p.index.repeats();
  if (std::is_same_v<typename T::Scale, ScaleF32>) {
    plan.stride = scale_stride(p.rows);
    plan.scales_t = scales_of_columns(format_of(p.format), p.K, p.amax);
    plan.stride_t = scale_stride(plan.scales_t);
    plan.blocks = kTokens ? int(block_extent(p.rows, p.E, p.align)) : 0;
  } else {
    plan.blocked = format_of(p.format).blocked();
    plan.stride = ceil_div(p.K, int64_t(kMxBlock));
    plan.stride_t = ceil_div(p.positions, int64_t(kMxBlock));
    if (kTokens) {  // the scales of experts have no gaps
      plan.scale_bytes = grouped_scale_rows(p.rows, p.E) * padded_scale_columns(plan.stride);
      plan.scale_t_bytes = padded_scale_rows(p.K) * grouped_scale_columns(plan.stride_t, p.E);
    }
  }
  return plan;
}

template <class T>
int launch_tiles_of(const QuantizeParams& p, void* stream) {
  constexpr bool kTokens = std::is_same_v<typename T::Tiles, TokenTiles>;
  const TilesPlan plan = plan_tiles<T>(p);
  const int64_t token_tiles = block_extent(p.rows, p.E, p.align) + ceil_div(p.positions, int64_t(kBlock));
  const int64_t tiles = plan.tiles_across * (kTokens ? token_tiles : p.E * ceil_div(p.rows, int64_t(kBlock)));
  const int64_t average = kTokens && p.E ? p.rows / p.E : p.rows;
  const int64_t wanted = average < kShortGroup ? kTileBlocksOfShortGroups : kTileBlocks;
  if (!kTokens && tiles * p.K == 0) return 0;
  constexpr auto kKernel = quantize_tiles_kernel<T>;
  if (const int e = raise_kernel_limits<kKernel>()) return e;
  constexpr int64_t kMaxBlocks = blocks_by_registers<T>();
  const int64_t max_grid = device().multiprocessors * (wanted < kMaxBlocks ? wanted : kMaxBlocks);
  const int64_t grid = tiles < 1 ? 1 : tiles < max_grid ? tiles : max_grid;
  Launch l = {dim3(unsigned(grid)), dim3(kLanes, kTileThreadRows), stream};
  l.shared = tile_shared_bytes<T>(copies_ahead<T>(min_shared_bytes(device().sm)), p.E);
  return launch(kKernel, l, plan);
}
template <ScaleType kScale, class In>
int launch_tiles(const QuantizeParams& p, void* stream) {
  using Scales = TileScales<kScale>;
  constexpr Scaling kWeightScaling = kScale == ScaleType::kF32 ? Scaling::kSquares : Scaling::kRowsAndColumns;
  return dispatch_types<In>(p, [&](auto types) {
    using T = decltype(types);
    if (p.weight) return launch_tiles_of<TileTraits<T, Scales, kWeightScaling, ExpertTiles>>(p, stream);
    if (p.along_rows) return launch_tiles_of<TileTraits<T, Scales, Scaling::kRowsAndColumns, TokenTiles>>(p, stream);
    return launch_tiles_of<TileTraits<T, Scales, Scaling::kColumns, TokenTiles>>(p, stream);
  });
}

}  // namespace moe_fp8
