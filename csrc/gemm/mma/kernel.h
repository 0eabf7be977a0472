// The kernel and its launch. Four waves, two by two, compute a tile; while a stage is multiplied, or a tile written,
// the next stage is loaded.
#pragma once
#include "gemm/mma/epilogue/store_or_add.h"
#include "gemm/mma/pipeline/loader.h"
#include "platform/launch.h"
#include "primitives/operand.h"

namespace moe_fp8::mma {

// Called when the waves have read stage k_tile: waits for the next stage and fetches the one after it.
template <class T>
MOE_DEVICE void advance(Loader<T>& loader, int k_tile) {
  if constexpr (T::kStages == 1) __syncthreads();
  loader.complete(k_tile + 1);
  wait_copies();
  __syncthreads();
  loader.fetch(k_tile + 2);
}

// With two stages, operands are loaded to registers while the patch before them is multiplied. No instruction then
// waits for shared memory, and a stage is read before its last patch is multiplied. Behind the last stage nothing is
// multiplied.
template <class T>
MOE_DEVICE void multiply_stage(Loader<T>& loader, SharedStorage<T>& shared, int k_tile, const LaneMap<T>& lane,
                               Operands<T>& current, typename LaneMap<T>::Sums& block_sums,
                               typename LaneMap<T>::Sums& sums) {
  Operands<T> next;
#pragma unroll(T::kUnrolledPatches)
  for (int patch = 0; patch < T::kStagePatches; ++patch) {
    const bool last = patch + 1 == T::kStagePatches;
    if (last && T::kStages > 1) advance(loader, k_tile);
    if (!last || T::kStages > 1) next.load(shared, last ? k_tile + 1 : k_tile, last ? 0 : patch + 1, lane);
    multiply_patches(current, shared, T::kBlock ? block_sums : sums);
    if constexpr (T::kBlock == kPatchDepth) promote(shared, k_tile, patch, lane, block_sums, sums);
    current = next;
  }
}

template <class T>
MOE_DEVICE void multiply_tile(Loader<T>& loader, SharedStorage<T>& shared, int k_tiles, const LaneMap<T>& lane,
                              typename LaneMap<T>::Sums& sums) {
  typename LaneMap<T>::Sums block_sums;
  for_each_sum<T>([&](int m, int n, int i, int j) { sums[m][n][i][j] = block_sums[m][n][i][j] = 0.f; });
  wait_copies();
  __syncthreads();
  if constexpr (T::kTakesScales) {
#pragma unroll 1
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
      multiply_scaled(shared, k_tile, lane, sums);
      advance(loader, k_tile);
    }
  } else if constexpr (T::kStages == 1) {
    Operands<T> current;
    current.load(shared, 0, 0, lane);
#pragma unroll 1
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
      multiply_stage(loader, shared, k_tile, lane, current, block_sums, sums);
      // Promote before advance(), which fills registers with the chunks of one more stage.
      if constexpr (T::kBlock > kPatchDepth)
        if ((k_tile + 1) % T::kStagesPerScale == 0 || k_tile + 1 == k_tiles)
          promote(shared, k_tile, 0, lane, block_sums, sums);
      advance(loader, k_tile);
      current.load(shared, k_tile + 1, 0, lane);
    }
  } else {
    Operands<T> current;
    current.load(shared, 0, 0, lane);
#pragma unroll 1
    for (int block = 0; block < k_tiles; block += T::kStagesPerScale) {
#pragma unroll
      for (int i = 0; i < T::kStagesPerScale; ++i)
        if (i == 0 || block + i < k_tiles) multiply_stage(loader, shared, block + i, lane, current, block_sums, sums);
      if constexpr (T::kBlock > kPatchDepth) promote(shared, block, 0, lane, block_sums, sums);
    }
  }
  __syncthreads();
}

template <class T>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, kBlocksPerMultiprocessor)
    mma_kernel(MOE_GRID_CONSTANT const ScaledGroupedMmParams p) {
  if (!T::Instruction::kSupported) return;  // compiled for every chip of the build, launched only where it exists
  MOE_DYNAMIC_SMEM(smem);
  auto& shared = *reinterpret_cast<SharedStorage<T>*>(smem);
  wait_for_previous_kernel();
  if constexpr (T::kUsesTables) {
    for (int byte = threadIdx.x; byte < 256; byte += kThreads) {
      shared.half_values[0][byte] = F16::from_float(decode(p.a_type, uint8_t(byte)));
      shared.half_values[1][byte] = F16::from_float(decode(p.b_type, uint8_t(byte)));
    }
  }
  shared.groups.template build<T>(p.offs, p);
  gemm::TileScheduler<T> scheduler(p, shared.groups, int(blockIdx.x), int(gridDim.x));
  const LaneMap<T> lane;
  Loader<T> loader(p, shared);
  if (threadIdx.x == 0) shared.tiles[0] = scheduler.next(0);
  __syncthreads();
  if (shared.tiles[0].valid) loader.begin(shared.tiles[0]);
  for (int slot = 0, next_slot; shared.tiles[slot].valid; slot = next_slot) {
    next_slot = slot < kTileSlots - 1 ? slot + 1 : 0;
    const gemm::Tile &tile = shared.tiles[slot], &next = shared.tiles[next_slot];
    if (threadIdx.x == 0) shared.tiles[next_slot] = scheduler.next(0);
    typename LaneMap<T>::Sums sums;
    multiply_tile(loader, shared, k_tiles<T>(tile), lane, sums);
    if (next.valid) loader.begin(next);
    T::Epilogue::template finish_tile<T>(p, tile, lane, sums);
  }
  if (!p.k_grouped) T::Epilogue::clear_tail(p, shared.groups);
}

template <class T>
int launch_kernel(const ScaledGroupedMmParams& p, void* stream) {
  // The least shared memory of a multiprocessor: 64 KB on gfx942, 100 KB on sm_86, sm_89 and sm_120. Scaled runs on
  // gfx950 alone, which has 160 KB.
  constexpr size_t kLeast = (T::kTakesScales ? 160 : kHasAsyncCopies ? 100 : 64) * 1024;
  static_assert(sizeof(SharedStorage<T>) + kStaticShared <= kMinSharedBytes);
  static_assert(kBlocksPerMultiprocessor * (sizeof(SharedStorage<T>) + kStaticShared + kReservedShared) <= kLeast);
  constexpr auto kKernel = mma_kernel<T>;
  if (const int e = raise_kernel_limits<kKernel>()) return e;
  return launch(kKernel, {dim3(unsigned(kBlocksPerMultiprocessor * device().multiprocessors)), dim3(kThreads), stream,
                          sizeof(SharedStorage<T>)}, p);
}

template <Types kTypes, int kBlock>
int launch_types(const ScaledGroupedMmParams& p, void* stream) {
  if constexpr (kMayHaveScaledMma && kBlock == kMxBlock && kTypes != Types::kAny)
    if (device().has_scaled_mfma) return launch_kernel<Traits<kTypes, kBlock, Scaled, StoreOrAdd>>(p, stream);
  return launch_kernel<Traits<kTypes, kBlock, Unscaled, StoreOrAdd>>(p, stream);
}

template <int kBlock>
int launch_gemm(Types types, const ScaledGroupedMmParams& p, void* stream) {
  switch (types) {
    case Types::kE4M3: return launch_types<Types::kE4M3, kBlock>(p, stream);
    case Types::kE5M2: return launch_types<Types::kE5M2, kBlock>(p, stream);
    default: return launch_types<Types::kAny, kBlock>(p, stream);
  }
}

}  // namespace moe_fp8::mma
