// The kernel: while a stage is multiplied, or a tile stored, the next one is on its way.
#pragma once
#include "gemm/mma/pipeline/load.h"
#include "gemm/mma/epilogue/store.h"
#include "platform/launch.h"
#include "primitives/operand.h"

namespace moe_fp8::mma {

// When the waves have read a stage: the next one is there, and one more is on its way.
template <class T>
MOE_DEVICE void advance(Loader<T>& loader, int step) {
  if constexpr (T::kStages == 1) __syncthreads();
  loader.land(step + 1);
  wait_copies();
  __syncthreads();
  loader.fetch(step + 2);
}

// Of two stages operands come into registers while those before them are multiplied, so that nothing waits for shared
// memory, and a stage has been read when its last patches are still to be multiplied. What lies behind the last stage
// is not multiplied.
template <class T>
MOE_DEVICE void multiply_stage(Loader<T>& loader, Shared<T>& shared, int step, const Lane<T>& lane, Operands<T>& now,
                               typename Lane<T>::Sums& of_block, typename Lane<T>::Sums& sums) {
  Operands<T> next;
#pragma unroll(T::kUnrolled)
  for (int patch = 0; patch < T::kSteps; ++patch) {
    const bool last = patch + 1 == T::kSteps;
    if (last && T::kStages > 1) advance(loader, step);
    if (!last || T::kStages > 1) next.load(shared, last ? step + 1 : step, last ? 0 : patch + 1, lane);
    multiply_patches(now, shared, T::kBlock ? of_block : sums);
    if constexpr (T::kBlock == kPatchDepth) promote(shared, step, patch, lane, of_block, sums);
    now = next;
  }
}

template <class T>
MOE_DEVICE void multiply_tile(Loader<T>& loader, Shared<T>& shared, int steps, const Lane<T>& lane,
                              typename Lane<T>::Sums& sums) {
  typename Lane<T>::Sums of_block;
  for_each_sum<T>([&](int m, int n, int i, int j) { sums[m][n][i][j] = of_block[m][n][i][j] = 0.f; });
  wait_copies();
  __syncthreads();
  if constexpr (T::kTakesScales) {
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      multiply_scaled(shared, step, lane, sums);
      advance(loader, step);
    }
  } else if constexpr (T::kStages == 1) {
    Operands<T> now;
    now.load(shared, 0, 0, lane);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      multiply_stage(loader, shared, step, lane, now, of_block, sums);
      // Before registers hold the chunks of one more stage.
      if constexpr (T::kBlock > kPatchDepth)
        if ((step + 1) % T::kStagesOfScale == 0 || step + 1 == steps) promote(shared, step, 0, lane, of_block, sums);
      advance(loader, step);
      now.load(shared, step + 1, 0, lane);
    }
  } else {
    Operands<T> now;
    now.load(shared, 0, 0, lane);
#pragma unroll 1
    for (int block = 0; block < steps; block += T::kStagesOfScale) {
#pragma unroll
      for (int i = 0; i < T::kStagesOfScale; ++i)
        if (i == 0 || block + i < steps) multiply_stage(loader, shared, block + i, lane, now, of_block, sums);
      if constexpr (T::kBlock > kPatchDepth) promote(shared, block, 0, lane, of_block, sums);
    }
  }
  __syncthreads();
}

template <class T>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, kBlocks) mma_kernel(MOE_GRID_CONSTANT const ScaledGroupedMmParams p) {
  if (!T::Instruction::kThere) return;  // code for a chip that is never asked to run it
  MOE_DYNAMIC_SMEM(smem);
  Shared<T>& shared = *reinterpret_cast<Shared<T>*>(smem);
  wait_for_previous_kernel();
  if constexpr (T::kLooksUp) {
    for (int byte = threadIdx.x; byte < 256; byte += kThreads) {
      shared.half[0][byte] = F16::from_float(decode(p.a_type, uint8_t(byte)));
      shared.half[1][byte] = F16::from_float(decode(p.b_type, uint8_t(byte)));
    }
  }
  shared.groups.template build<T>(p.offs, p);
  gemm::Schedule<T> schedule(p, shared.groups, int(blockIdx.x), int(gridDim.x));
  const Lane<T> lane;
  Loader<T> loader(p, shared);
  if (threadIdx.x == 0) shared.tiles[0] = schedule.next(0);
  __syncthreads();
  if (shared.tiles[0].there) loader.begin(shared.tiles[0]);
  for (int turn = 0, then; shared.tiles[turn].there; turn = then) {
    then = turn < 2 ? turn + 1 : 0;
    const gemm::Tile &tile = shared.tiles[turn], &next = shared.tiles[then];
    if (threadIdx.x == 0) shared.tiles[then] = schedule.next(0);
    typename Lane<T>::Sums sums;
    multiply_tile(loader, shared, steps_of<T>(tile), lane, sums);
    if (next.there) loader.begin(next);
    store_tile<T>(p, tile, lane, sums);
  }
  if (!p.groups_of_sum) clear_tail(p, shared);
}

template <class T>
int launch_kernel(const ScaledGroupedMmParams& p, void* stream) {
  // What sm_86, sm_89 and sm_120 have of shared memory, and gfx942: the least of all. Scaled is gfx950's, with 160 KB.
  constexpr size_t kLeast = (T::kTakesScales ? 160 : kCopiesInBackground ? 100 : 64) * 1024;
  static_assert(sizeof(Shared<T>) + kStaticShared <= kLeastShared);
  static_assert(kBlocks * (sizeof(Shared<T>) + kStaticShared + kReservedShared) <= kLeast);
  constexpr auto kKernel = mma_kernel<T>;
  if (const int e = allow_large<kKernel>()) return e;
  return launch(kKernel, {dim3(unsigned(kBlocks * device().multiprocessors)), dim3(kThreads), stream,
                          sizeof(Shared<T>)}, p);
}

template <Types kTypes, int kBlock>
int launch_types(const ScaledGroupedMmParams& p, void* stream) {
  if constexpr (kMayTakeScales && kBlock == kMxBlock && kTypes != Types::kAny)
    if (device().scales_blocks) return launch_kernel<Traits<kTypes, kBlock, Scaled>>(p, stream);
  return launch_kernel<Traits<kTypes, kBlock, Unscaled>>(p, stream);
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
