#include "activations/backward/gradient_tile.h"

namespace moe_fp8 {
namespace {

// Runs before the kernel of tiles: places the tiles, clears what no tile writes, and gathers scores.
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kTileThreads, 1)
    place_gradient_tiles_kernel(MOE_GRID_CONSTANT const GradientTilesPlan p) {
  __shared__ int words[TokenTiles::words(kMaxExperts)];
  const TokenTiles tiles(words, p.dh);
  wait_for_previous_kernel();
  tiles.build();
  const auto clear_gaps = [&](auto scales) {
    using Scales = decltype(scales);
    Scales::template clear_gaps<DhTraits<Scales>>(p.dh, tiles);
    Scales::template clear_gaps<ATraits<Scales>>(p.a, tiles);
  };
  if (p.has_float_scales) clear_gaps(FloatScales{});
  else clear_gaps(MxScales{});
  __syncthreads();
  const int thread = blockIdx.x * kTileThreads + threadIdx.y * kLanes + threadIdx.x;
  gather_scores(p, thread, gridDim.x * kTileThreads);
  for (int along = thread; along < p.tiles; along += gridDim.x * kTileThreads) {
    const int e = tiles.group_of(along), first = tiles.first_tile_of(e);
    PlacedTile placed = {tiles.at(along, 0, e), first, tiles.first_tile_of(e + 1) - first};
    placed.tile.valid = along < tiles.count();
    p.placed[along] = placed;
  }
}

// Every tile has its own block. In a loop over tiles the compiler keeps addresses of the casts in registers, which
// the gradients need, and spills. T is not used: its name tells the report of instructions what the kernel casts to.
template <class T, class Scales, class Activations>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kTileThreads, kGradientTileBlocks)
    quantize_gradient_tiles_kernel(MOE_GRID_CONSTANT const GradientTilesPlan p) {
  using Dh = DhTraits<Scales>;
  using A = ATraits<Scales>;
  constexpr int kProjections = Activations::kProjections, kOutputs = kProjections + 1;
  using Shared = GradientTile<Dh, kOutputs>;
  if constexpr (has_room<Dh, kOutputs>(kMinSharedBytes)) {
    MOE_DYNAMIC_SMEM(smem);
    Shared& shared = *reinterpret_cast<Shared*>(smem);
    // kStack tiles of a tile column follow one another, because their columns are neighbours in memory.
    const uint32_t stack = blockIdx.x / kStack, along = stack / p.a.tiles_across * kStack + blockIdx.x % kStack;
    wait_for_previous_kernel();
    if (int(along) >= p.tiles || !p.placed[along].tile.valid) return;
    if (const int output = threadIdx.x; threadIdx.y == 0 && output < kOutputs) {
      const PlacedTile& placed = p.placed[along];
      QuantizedTile& tile = shared.tiles[output];
      tile = placed.tile;
      tile.across = p.tile_column(output, int(stack % p.a.tiles_across));
      if (tile.scale >= 0)
        place_scales(tile, output < kProjections ? p.dh : p.a, placed.first, placed.count, int(along));
    }
    __syncthreads();
    const QuantizedTile* const tile = shared.tiles;
    differentiate<Activations, Dh>(p, tile[kProjections], shared);
    __syncthreads();
#pragma unroll
    for (int output = 0; output < kProjections; ++output) make_multipliers<Dh>(p.dh, shared.scaling[output]);
    make_multipliers<A>(p.a, shared.scaling[kProjections]);
    if (p.partial_sums) sum_halves<kProjections>(p, int(along), shared);
    TileWords<Dh> v;
    read_output<Dh>(shared, 0, v);
    __syncthreads();
    for (int output = 0; output < kProjections; ++output) {
      cast_output_rows<Dh>(p.dh, tile[output], v, shared.scaling[output]);
      stage_columns<Dh>(p.dh, tile[output], v, shared.scaling[output], shared.stage(output));
      read_output<Dh>(shared, output + 1, v);
      __syncthreads();
      if (tile[output].across < int(p.dh.tiles_across))
        Scales::template store<Dh>(p.dh, tile[output], shared.scaling[output]);
      store_staged<Dh, 1>(p.dh, &shared.stage(output), [&](int) -> const QuantizedTile& { return tile[output]; });
    }
    stage_columns<A>(p.a, tile[kProjections], v, shared.scaling[kProjections], shared.stage(kProjections));
    __syncthreads();
    Scales::template store<A>(p.a, tile[kProjections], shared.scaling[kProjections]);
    store_staged<A, 1>(p.a, &shared.stage(kProjections),
                       [&](int) -> const QuantizedTile& { return tile[kProjections]; });
  }
}

// Sums dscores over tiles in the order of gradient_rows.cu: first the neighbouring tiles that are one wave's features
// there, then the waves in a row.
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kDscoresSumThreads, 1)
    sum_gradient_tiles_kernel(MOE_GRID_CONSTANT const GradientTilesPlan p) {
  constexpr int kWaveTiles = kWarpSize * kFeatures / kBlock;
  wait_for_previous_kernel();
  const int64_t rows = p.dh.rows, row = int64_t(blockIdx.x) * kDscoresSumThreads + threadIdx.x;
  const int slot = row < rows ? p.gradients.slot(row) : -1;
  if (slot < 0) return;
  float sum = 0;
#pragma unroll 4
  for (int first = 0; first < int(p.a.tiles_across); first += kWaveTiles) {
    float dots[kWaveTiles];
#pragma unroll
    for (int i = 0; i < kWaveTiles; ++i)
      dots[i] = first + i < int(p.a.tiles_across) ? p.dots[(first + i) * rows + row] : 0.f;
#pragma unroll
    for (int n = kWaveTiles / 2; n > 0; n /= 2)
#pragma unroll
      for (int i = 0; i < n; ++i) dots[i] = dots[2 * i] + dots[2 * i + 1];
    sum += dots[0];
  }
  store_element(p.gradients.dscores, InType::kF32, slot, sum);
}

bool has_float_scales(const QuantizeActivatedBackwardParams& p) {
  return format_of(p.quantize_dh.format).scale_type == ScaleType::kF32;
}
// The most tiles along the rows: block_extent() has room for groups of any sizes, so also for the tail as one more.
int64_t max_tiles(const QuantizeActivatedBackwardParams& p) {
  return block_extent(p.quantize_dh.rows, p.quantize_dh.E, p.quantize_dh.align);
}

// Words of the sums of half tiles, which fill whole 16-byte vectors.
int64_t partial_words(const QuantizeActivatedBackwardParams& p) {
  return p.dh_sums ? max_tiles(p) * (kBlock / kRowsOfPartial) * p.quantize_dh.K : 0;
}

template <class Scales, class Activations>
int launch_tiles(const QuantizeActivatedBackwardParams& params, void* stream) {
  using Dh = DhTraits<Scales>;
  auto* const scores = reinterpret_cast<float*>(params.scratch);
  GradientTilesPlan p = {gradient_inputs(params.gradients, scores), plan_tiles<Dh>(params.quantize_dh),
                         plan_tiles<ATraits<Scales>>(params.quantize_a)};
  p.tiles = int(max_tiles(params));
  p.has_float_scales = has_float_scales(params);
  p.partial_sums = params.dh_sums ? scores + score_words(params.gradients) : nullptr;
  p.placed = reinterpret_cast<PlacedTile*>(scores + score_words(params.gradients) + partial_words(params));
  p.dots = reinterpret_cast<float*>(p.placed + p.tiles);
  constexpr auto kKernel = quantize_gradient_tiles_kernel<GradientTypes, Scales, Activations>;
  if (const int e = raise_kernel_limits<kKernel>()) return e;
  const dim3 few(unsigned(device().multiprocessors)), threads(kLanes, kTileThreadRows);
  if (const int e = launch(place_gradient_tiles_kernel, {few, threads, stream}, p)) return e;
  Launch l = {dim3(unsigned(round_up<int64_t>(p.tiles, kStack) * p.a.tiles_across)), threads, stream};
  l.shared = sizeof(GradientTile<Dh, Activations::kProjections + 1>);
  if (const int e = launch(kKernel, l, p)) return e;
  const auto blocks = unsigned(ceil_div<int64_t>(params.quantize_dh.rows, kDscoresSumThreads));
  if (const int e = launch(sum_gradient_tiles_kernel, {dim3(blocks), dim3(kDscoresSumThreads), stream}, p)) return e;
  if (!params.dh_sums) return 0;
  const QuantizeParams& dh = params.quantize_dh;
  const int align = dh.align < kBlock ? kBlock : dh.align;
  return sum_partials({p.partial_sums, kRowsOfPartial, align, false, dh.offs, int(dh.E), dh.rows, dh.K,
                       params.dh_sums}, stream);
}

}  // namespace

int64_t gradient_tiles_words(const QuantizeActivatedBackwardParams& p) {
  const int64_t tiles_across = ceil_div<int64_t>(p.gradients.h.F, kBlock);
  return partial_words(p) + max_tiles(p) * int64_t(sizeof(PlacedTile) / 4) + tiles_across * p.quantize_dh.rows;
}

bool can_take_gradient_tiles(const QuantizeActivatedBackwardParams& p) {
  return has_whole_blocks(p.gradients) && has_room<DhTraits<MxScales>, 3>(min_shared_bytes(device().sm));
}

int launch_gradient_tiles(const QuantizeActivatedBackwardParams& p, void* stream) {
  return dispatch_gated(p.gradients.activation, [&](auto activations) {
    using Activations = decltype(activations);
    return has_float_scales(p) ? launch_tiles<FloatScales, Activations>(p, stream)
                               : launch_tiles<MxScales, Activations>(p, stream);
  });
}

}  // namespace moe_fp8
