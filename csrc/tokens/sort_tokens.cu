#include "tokens/sort_tokens.h"

#include "platform/launch.h"
#include "platform/waves.h"
#include "primitives/groups.h"
#include "tokens/policy.h"

namespace moe_fp8 {
namespace {

// A counting sort in two launches. In the first, every block counts the experts of its range of slots. In the second,
// it knows all counts and places its slots: each wave has a part of the range, from front to back. No result depends on
// the order in which threads run.
constexpr int kDefaultShared = 47 * 1024;  // bytes that a block has without asking, besides what block_scan takes

struct SortPlan : SortTokensParams {
  int64_t slots_per_block;
  int bits;  // of an expert's number
};

struct SlotRange {
  int64_t begin, end;
};
MOE_DEVICE SlotRange slots_of_block(const SortPlan& p) {
  const int64_t begin = blockIdx.x * p.slots_per_block, end = begin + p.slots_per_block;
  return {begin < p.N ? begin : p.N, end < p.N ? end : p.N};
}

// Loads the experts of kSortSlots slots, `lanes` apart; -1 behind the end. All loads are in flight at once.
template <class Id>
MOE_DEVICE void load_experts(const SortPlan& p, const SlotRange& s, int64_t first, int lanes,
                             int (&expert)[kSortSlots]) {
  const Id* ids = static_cast<const Id*>(p.ids.ids);
  Id id[kSortSlots];
  if (p.ids.stride == p.top_k) {
#pragma unroll
    for (int i = 0; i < kSortSlots; ++i) id[i] = first + i * lanes < s.end ? ids[first + i * lanes] : Id(-1);
  } else {
#pragma unroll
    for (int i = 0; i < kSortSlots; ++i) {
      const int64_t slot = first + i * lanes, row = slot / p.top_k;
      id[i] = slot < s.end ? ids[row * p.ids.stride + slot - row * p.top_k] : Id(-1);
    }
  }
#pragma unroll
  for (int i = 0; i < kSortSlots; ++i) expert[i] = expert_of(id[i], p.E);
}

// Calls f(slot, expert) for every lanes-th slot of `s`, from number `lane` on; expert -1 is a dropped slot. All lanes
// make the same number of calls; behind the end the expert is -1.
template <class F>
MOE_DEVICE void for_each_slot(const SortPlan& p, const SlotRange& s, int lane, int lanes, F f) {
  for (int64_t begin = s.begin; begin < s.end; begin += kSortSlots * lanes) {
    const int64_t first = begin + lane;
    int expert[kSortSlots];
    if (p.ids.is_int64) load_experts<int64_t>(p, s, first, lanes, expert);
    else load_experts<int>(p, s, first, lanes, expert);
#pragma unroll
    for (int i = 0; i < kSortSlots; ++i) f(first + i * lanes, expert[i]);
  }
}

MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kSortThreads, 1) count_tokens_kernel(MOE_GRID_CONSTANT const SortPlan p) {
  __shared__ int count[kMaxExperts];
  for (int e = threadIdx.x; e < p.E; e += blockDim.x) count[e] = 0;
  __syncthreads();
  wait_for_previous_kernel();
  allow_next_kernel();  // place_tokens_kernel reads ids, which exist, and waits before it reads the counts
  for_each_slot(p, slots_of_block(p), threadIdx.x, blockDim.x, [&](int64_t, int e) {
    if (e >= 0) atomicAdd(count + e, 1);
  });
  __syncthreads();
  for (int e = threadIdx.x; e < p.E; e += blockDim.x) p.counts[int64_t(blockIdx.x) * p.E + e] = count[e];
}

// Adds up the columns of counts: over all blocks, and over the blocks before this one. Several threads may add to one
// column in any order: integer sums are the same.
MOE_DEVICE void sum_counts(const SortPlan& p, int* total, int* before) {
  const int threads_per_expert = p.E < int(blockDim.x) ? blockDim.x / p.E : 1, blocks = gridDim.x;
  for (int i = threadIdx.x; i < p.E * threads_per_expert; i += blockDim.x) {
    const int e = i % p.E;
    int all = 0, first = 0;
#pragma unroll 8
    for (int b = i / p.E; b < blocks; b += threads_per_expert) {
      const int n = p.counts[int64_t(b) * p.E + e];
      all += n;
      first += b < int(blockIdx.x) ? n : 0;
    }
    if (all) atomicAdd(total + e, all);
    if (first) atomicAdd(before + e, first);
  }
}

// The lanes of the wave that have the same expert. Undefined for a lane without an expert.
MOE_DEVICE LaneMask same_expert(int e, int bits) {
  LaneMask same = ballot(e >= 0);
  for (int b = 0; b < bits; ++b) {
    const bool bit = e >> b & 1;
    const LaneMask ones = ballot(bit);
    same &= bit ? ones : ~ones;
  }
  return same;
}

MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kSortThreads, 1) place_tokens_kernel(MOE_GRID_CONSTANT const SortPlan p) {
  MOE_DYNAMIC_SMEM(smem);
  const int lane = threadIdx.x % kWarpSize, wave = threadIdx.x / kWarpSize, waves = blockDim.x / kWarpSize;
  int* const ends = reinterpret_cast<int*>(smem);
  int* const before = ends + p.E;
  int* const next = before + p.E;  // [waves, E]: counts, then the place of the wave's next slot of an expert
  for (int i = threadIdx.x; i < (waves + 2) * p.E; i += blockDim.x) ends[i] = 0;
  __syncthreads();

  SlotRange wave_slots = slots_of_block(p);
  const int64_t block_end = wave_slots.end;
  const int64_t size = round_up<int64_t>(ceil_div<int64_t>(p.slots_per_block, waves), kWarpSize);
  wave_slots.begin += wave * size;
  wave_slots.end = wave_slots.begin + size < block_end ? wave_slots.begin + size : block_end;
  int* const wave_next = next + wave * p.E;
  for_each_slot(p, wave_slots, lane, kWarpSize, [&](int64_t, int e) {
    if (e >= 0) atomicAdd(wave_next + e, 1);
  });
  wait_for_previous_kernel();
  sum_counts(p, ends, before);
  __syncthreads();
  block_scan(ends, p.E, Sum{});

  for (int e = threadIdx.x; e < p.E; e += blockDim.x) {
    int place = (e > 0 ? ends[e - 1] : 0) + before[e];
#pragma unroll 8
    for (int w = 0; w < waves; ++w) {
      const int n = next[w * p.E + e];
      next[w * p.E + e] = place;
      place += n;
    }
    if (blockIdx.x == 0) p.offs[e] = ends[e];
  }
  __syncthreads();

  const LaneMask below = (LaneMask(1) << lane) - 1;
  for_each_slot(p, wave_slots, lane, kWarpSize, [&](int64_t slot, int e) {
    const LaneMask same = same_expert(e, p.bits);
    const int place = e >= 0 ? wave_next[e] + popcount(same & below) : -1;
    wave_barrier();
    if (e >= 0 && (same & ~below) >> lane == 1) wave_next[e] = place + 1;  // the last lane of its expert
    wave_barrier();
    if (slot < wave_slots.end) p.inverse[slot] = place;
    if (place >= 0) p.permutation[place] = int(slot);
  });
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = ends[p.E - 1] + int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < p.N; i += step)
    p.permutation[i] = -1;
}

}  // namespace

int64_t sort_tokens_blocks(int64_t N) {
  const int64_t blocks = ceil_div<int64_t>(N, kMinSlotsPerBlock), max_blocks = device().multiprocessors;
  return blocks < 1 ? 1 : blocks < max_blocks ? blocks : max_blocks;
}

int sort_tokens(const SortTokensParams& params, void* stream) {
  SortPlan p = {params};
  const int64_t blocks = sort_tokens_blocks(p.N);
  p.slots_per_block = round_up<int64_t>(ceil_div<int64_t>(p.N, blocks), kMaxWarpSize);
  while (1 << p.bits < p.E) ++p.bits;
  const Launch count = {dim3(unsigned(blocks)), dim3(kSortThreads), stream};
  if (const int e = launch(count_tokens_kernel, count, p)) return e;

  const int shared = device().shared_per_block - kStaticShared, row = p.E * int(sizeof(int));
  int waves = shared / row - 2;
  if (waves > kSortThreads / kMinWarpSize) waves = kSortThreads / kMinWarpSize;
  const int threads = waves * kMinWarpSize / kMaxWarpSize * kMaxWarpSize;
  Launch place = {dim3(unsigned(blocks)), dim3(threads), stream};
  place.shared = size_t(waves + 2) * row;
  if (place.shared > kDefaultShared)
    if (const int e = raise_kernel_limits<place_tokens_kernel>()) return e;
  return launch(place_tokens_kernel, place, p);
}

}  // namespace moe_fp8
