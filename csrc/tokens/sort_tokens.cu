#include "tokens/sort_tokens.h"

#include "platform/launch.h"
#include "platform/waves.h"
#include "primitives/groups.h"

namespace moe_fp8 {
namespace {

// A counting sort in two launches. Every block counts the experts of its chunk of the slots; then, knowing all counts,
// it places them, each wave a piece of the chunk from front to back. No order depends on the scheduling of threads.
constexpr int kThreads = 1024;
constexpr int kHeld = 8;                   // slots that a lane takes at a time
constexpr int64_t kLeastChunk = kThreads;  // slots, where there are few
constexpr int kPlainShared = 47 * 1024;    // bytes that a block has without asking, besides what block_scan takes

struct Sort : SortTokensParams {
  int64_t chunk;   // slots of a block
  int bits;        // of an expert's number
};

struct Slots {
  int64_t begin, end;
};
MOE_DEVICE Slots chunk_of(const Sort& p) {
  const int64_t begin = blockIdx.x * p.chunk, end = begin + p.chunk;
  return {begin < p.N ? begin : p.N, end < p.N ? end : p.N};
}

// The experts of kHeld slots, `lanes` apart; -1 beyond the end. All ids are on their way at once.
template <class Id>
MOE_DEVICE void load_experts(const Sort& p, const Slots& s, int64_t first, int lanes, int (&expert)[kHeld]) {
  const Id* ids = static_cast<const Id*>(p.ids);
  Id id[kHeld];
  if (p.row_stride == p.top_k) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) id[i] = first + i * lanes < s.end ? ids[first + i * lanes] : Id(-1);
  } else {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int64_t slot = first + i * lanes, row = slot / p.top_k;
      id[i] = slot < s.end ? ids[row * p.row_stride + slot - row * p.top_k] : Id(-1);
    }
  }
#pragma unroll
  for (int i = 0; i < kHeld; ++i) expert[i] = expert_of(id[i], p.E);
}

// f(slot, expert) for every lanes-th slot of `s`, from number `lane` on; -1 is no expert. All lanes make the same
// number of calls, those beyond the end without an expert.
template <class F>
MOE_DEVICE void for_each_slot(const Sort& p, const Slots& s, int lane, int lanes, F f) {
  for (int64_t first = s.begin; first < s.end; first += kHeld * lanes) {
    const int64_t mine = first + lane;
    int expert[kHeld];
    if (p.is_int64) load_experts<int64_t>(p, s, mine, lanes, expert);
    else load_experts<int>(p, s, mine, lanes, expert);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) f(mine + i * lanes, expert[i]);
  }
}

MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, 1) count_tokens_kernel(MOE_GRID_CONSTANT const Sort p) {
  __shared__ int count[kMaxExperts];
  for (int e = threadIdx.x; e < p.E; e += blockDim.x) count[e] = 0;
  __syncthreads();
  wait_for_previous_kernel();
  allow_next_kernel();  // it reads ids, which are there, and waits before it reads the counts
  for_each_slot(p, chunk_of(p), threadIdx.x, blockDim.x, [&](int64_t, int e) {
    if (e >= 0) atomicAdd(count + e, 1);
  });
  __syncthreads();
  for (int e = threadIdx.x; e < p.E; e += blockDim.x) p.counts[int64_t(blockIdx.x) * p.E + e] = count[e];
}

// Adds up the columns of counts: of all blocks, and of those before this one. Threads that share a column add to it in
// any order, which integers forgive.
MOE_DEVICE void sum_counts(const Sort& p, int* total, int* before) {
  const int teams = p.E < int(blockDim.x) ? blockDim.x / p.E : 1, blocks = gridDim.x;
  for (int i = threadIdx.x; i < p.E * teams; i += blockDim.x) {
    const int e = i % p.E;
    int all = 0, first = 0;
#pragma unroll 8
    for (int b = i / p.E; b < blocks; b += teams) {
      const int n = p.counts[int64_t(b) * p.E + e];
      all += n;
      first += b < int(blockIdx.x) ? n : 0;
    }
    if (all) atomicAdd(total + e, all);
    if (first) atomicAdd(before + e, first);
  }
}

// The lanes of the wave that hold the same expert; of a lane without one, anything.
MOE_DEVICE LaneMask same_expert(int e, int bits) {
  LaneMask same = ballot(e >= 0);
  for (int b = 0; b < bits; ++b) {
    const bool bit = e >> b & 1;
    const LaneMask ones = ballot(bit);
    same &= bit ? ones : ~ones;
  }
  return same;
}

MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, 1) place_tokens_kernel(MOE_GRID_CONSTANT const Sort p) {
  MOE_DYNAMIC_SMEM(smem);
  const int lane = threadIdx.x % kWarpSize, wave = threadIdx.x / kWarpSize, waves = blockDim.x / kWarpSize;
  int* const ends = reinterpret_cast<int*>(smem);
  int* const before = ends + p.E;
  int* const next = before + p.E;  // [waves, E]: counts, then the place of the wave's next slot of an expert
  for (int i = threadIdx.x; i < (waves + 2) * p.E; i += blockDim.x) ends[i] = 0;
  __syncthreads();

  Slots piece = chunk_of(p);
  const int64_t chunk_end = piece.end, size = round_up<int64_t>(ceil_div<int64_t>(p.chunk, waves), kWarpSize);
  piece.begin += wave * size;
  piece.end = piece.begin + size < chunk_end ? piece.begin + size : chunk_end;
  int* const mine = next + wave * p.E;
  for_each_slot(p, piece, lane, kWarpSize, [&](int64_t, int e) {
    if (e >= 0) atomicAdd(mine + e, 1);
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
  for_each_slot(p, piece, lane, kWarpSize, [&](int64_t slot, int e) {
    const LaneMask same = same_expert(e, p.bits);
    const int place = e >= 0 ? mine[e] + popcount(same & below) : -1;
    wave_barrier();
    if (e >= 0 && (same & ~below) >> lane == 1) mine[e] = place + 1;  // the last lane of its expert
    wave_barrier();
    if (slot < piece.end) p.inverse[slot] = place;
    if (place >= 0) p.permutation[place] = int(slot);
  });
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = ends[p.E - 1] + int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < p.N; i += step)
    p.permutation[i] = -1;
}

}  // namespace

int64_t sort_tokens_blocks(int64_t N) {
  const int64_t blocks = ceil_div<int64_t>(N, kLeastChunk), most = device().multiprocessors;
  return blocks < 1 ? 1 : blocks < most ? blocks : most;
}

int sort_tokens(const SortTokensParams& params, void* stream) {
  Sort p = {params};
  const int64_t blocks = sort_tokens_blocks(p.N);
  p.chunk = round_up<int64_t>(ceil_div<int64_t>(p.N, blocks), kLargestWarp);
  while (1 << p.bits < p.E) ++p.bits;
  const Launch count = {dim3(unsigned(blocks)), dim3(kThreads), stream};
  if (const int e = launch(count_tokens_kernel, count, p)) return e;

  const int room = device().shared_per_block - kStaticShared, row = p.E * int(sizeof(int));
  int waves = room / row - 2;
  if (waves > kThreads / kSmallestWarp) waves = kThreads / kSmallestWarp;
  const int threads = waves * kSmallestWarp / kLargestWarp * kLargestWarp;
  Launch place = {dim3(unsigned(blocks)), dim3(threads), stream};
  place.shared = size_t(waves + 2) * row;
  if (place.shared > kPlainShared)
    if (const int e = allow_large<place_tokens_kernel>()) return e;
  return launch(place_tokens_kernel, place, p);
}

}  // namespace moe_fp8
