#include "activations/backward/gradient_tiles.h"

#include "activations/backward/gradient_tile.h"
#include "activations/launch.h"

namespace moe_fp8 {
namespace {

constexpr int kSumThreads = 128;

// Before the tiles: where they are, zeros where no tile writes, and scores.
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kTileThreads, 1)
    place_gradient_tiles_kernel(MOE_GRID_CONSTANT const GradientTilesPlan p) {
  __shared__ int words[TokenTiles::words(kMaxExperts)];
  const TokenTiles tiles(words, p.dh);
  wait_for_previous_kernel();
  tiles.build();
  const auto clear_gaps = [&](auto scales) {
    using Scales = decltype(scales);
    Scales::template clear_gaps<OfDh<Scales>>(p.dh, tiles);
    Scales::template clear_gaps<OfA<Scales>>(p.a, tiles);
  };
  if (p.has_float_scales) clear_gaps(FloatScales{});
  else clear_gaps(MxScales{});
  __syncthreads();
  const int thread = blockIdx.x * kTileThreads + threadIdx.y * kLanes + threadIdx.x;
  take_scores(p, thread, gridDim.x * kTileThreads);
  for (int along = thread; along < p.tiles; along += gridDim.x * kTileThreads) {
    const int e = tiles.group_of(along), first = tiles.first_of(e);
    PlacedTile placed = {tiles.at(along, 0, e), first, tiles.first_of(e + 1) - first};
    placed.tile.there = along < tiles.count();
    p.placed[along] = placed;
  }
}

// Every tile is a block of its own: in a loop over tiles the compiler keeps addresses of the casts in registers that
// the gradients need, and spills. T is for the name alone, which tells the report of instructions what it casts to.
template <class T, class Scales, class Activations>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kTileThreads, 2)
    quantize_gradient_tiles_kernel(MOE_GRID_CONSTANT const GradientTilesPlan p) {
  using Dh = OfDh<Scales>;
  using A = OfA<Scales>;
  constexpr int kParts = Activations::kParts;
  using B = GradientTile<Dh, kParts>;
  if constexpr (has_room<Dh, kParts>(kLeastShared)) {
    MOE_DYNAMIC_SMEM(smem);
    B& shared = *reinterpret_cast<B*>(smem);
    // Tiles one below the other come one after the other: their columns are neighbours in memory.
    const uint32_t stack = blockIdx.x / kStack, along = stack / p.a.tiles_across * kStack + blockIdx.x % kStack;
    wait_for_previous_kernel();
    if (int(along) >= p.tiles || !p.placed[along].tile.there) return;
    if (const int part = threadIdx.x; threadIdx.y == 0 && part <= kParts) {
      const PlacedTile& placed = p.placed[along];
      QuantizedTile& tile = shared.tiles[part];
      tile = placed.tile;
      tile.across = p.across_of(part, int(stack % p.a.tiles_across));
      if (tile.scale >= 0) place_scales(tile, part < kParts ? p.dh : p.a, placed.first, placed.count, int(along));
    }
    __syncthreads();
    const QuantizedTile* const tile = shared.tiles;
    differentiate<Activations, Dh>(p, tile[kParts], shared);
    __syncthreads();
#pragma unroll
    for (int part = 0; part < kParts; ++part) make_multipliers<Dh>(p.dh, shared.of[part]);
    make_multipliers<A>(p.a, shared.of[kParts]);
    TileWords<Dh> v;
    read_part<Dh>(shared, 0, v);
    __syncthreads();
    for (int part = 0; part < kParts; ++part) {
      cast_part_along_rows<Dh>(p.dh, tile[part], v, shared.of[part]);
      stage_columns<Dh>(p.dh, tile[part], v, shared.of[part], shared.stage(part));
      read_part<Dh>(shared, part + 1, v);
      __syncthreads();
      Scales::template store<Dh>(p.dh, tile[part], shared.of[part]);
      store_staged<Dh, 1>(p.dh, &shared.stage(part), [&](int) -> const QuantizedTile& { return tile[part]; });
    }
    stage_columns<A>(p.a, tile[kParts], v, shared.of[kParts], shared.stage(kParts));
    __syncthreads();
    Scales::template store<A>(p.a, tile[kParts], shared.of[kParts]);
    store_staged<A, 1>(p.a, &shared.stage(kParts), [&](int) -> const QuantizedTile& { return tile[kParts]; });
  }
}

// dscores, in the order of gradient_rows.cu: tiles that share a wave there are neighbours, and waves come in a row.
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kSumThreads, 1)
    sum_gradient_tiles_kernel(MOE_GRID_CONSTANT const GradientTilesPlan p) {
  constexpr int kTiles = kWarpSize * kFeatures / kBlock;  // that share a wave
  wait_for_previous_kernel();
  const int64_t rows = p.dh.rows, row = int64_t(blockIdx.x) * kSumThreads + threadIdx.x;
  const int slot = row < rows ? p.gradients.slot(row) : -1;
  if (slot < 0) return;
  float sum = 0;
#pragma unroll 4
  for (int first = 0; first < int(p.a.tiles_across); first += kTiles) {
    float of_wave[kTiles];
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
      of_wave[i] = first + i < int(p.a.tiles_across) ? p.dots[(first + i) * rows + row] : 0.f;
#pragma unroll
    for (int n = kTiles / 2; n > 0; n /= 2)
#pragma unroll
      for (int i = 0; i < n; ++i) of_wave[i] = of_wave[2 * i] + of_wave[2 * i + 1];
    sum += of_wave[0];
  }
  store_stream(p.gradients.dscores + slot, sum);
}

bool has_float_scales(const QuantizeActivatedBackwardParams& p) {
  return format_of(p.of_dh.format).scale_type == ScaleType::kF32;
}
// Along the rows: block_extent() has room for groups of any sizes, and so for the tail as one more.
int64_t most_tiles(const QuantizeActivatedBackwardParams& p) {
  return block_extent(p.of_dh.rows, p.of_dh.E, p.of_dh.align);
}

template <class Scales, class Activations>
int launch_tiles(const QuantizeActivatedBackwardParams& of, void* stream) {
  using Dh = OfDh<Scales>;
  auto* const scores = reinterpret_cast<float*>(of.scratch);
  GradientTilesPlan p = {gradient_inputs(of.gradients, scores), plan_tiles<Dh>(of.of_dh),
                         plan_tiles<OfA<Scales>>(of.of_a)};
  p.tiles = int(most_tiles(of));
  p.has_float_scales = has_float_scales(of);
  p.placed = reinterpret_cast<PlacedTile*>(scores + score_words(of.gradients));
  p.dots = reinterpret_cast<float*>(p.placed + p.tiles);
  constexpr auto kKernel = quantize_gradient_tiles_kernel<GradientTypes, Scales, Activations>;
  if (const int e = allow_large<kKernel>()) return e;
  const dim3 few(unsigned(device().multiprocessors)), threads(kLanes, kTileThreadRows);
  if (const int e = launch(place_gradient_tiles_kernel, {few, threads, stream}, p)) return e;
  Launch l = {dim3(unsigned(round_up<int64_t>(p.tiles, kStack) * p.a.tiles_across)), threads, stream};
  l.shared = sizeof(GradientTile<Dh, Activations::kParts>);
  if (const int e = launch(kKernel, l, p)) return e;
  const auto blocks = unsigned(ceil_div<int64_t>(of.of_dh.rows, kSumThreads));
  return launch(sum_gradient_tiles_kernel, {dim3(blocks), dim3(kSumThreads), stream}, p);
}

}  // namespace

int64_t gradient_tiles_words(const QuantizeActivatedBackwardParams& p) {
  return most_tiles(p) * int64_t(sizeof(PlacedTile) / 4) + p.gradients.h.F / kBlock * p.of_dh.rows;
}

bool can_take_gradient_tiles(const QuantizeActivatedBackwardParams& p) {
  const bool has_tiles = p.gradients.h.F % kBlock == 0;
  return has_tiles && has_room<OfDh<MxScales>, 2>(least_shared(device().sm));
}

int launch_gradient_tiles(const QuantizeActivatedBackwardParams& p, void* stream) {
  return dispatch_gated(p.gradients.activation, [&](auto activations) {
    using Activations = decltype(activations);
    return has_float_scales(p) ? launch_tiles<FloatScales, Activations>(p, stream)
                               : launch_tiles<MxScales, Activations>(p, stream);
  });
}

}  // namespace moe_fp8
