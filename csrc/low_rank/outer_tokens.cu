#include "low_rank/groups_of_rows.h"
#include "low_rank/policy.h"
#include "low_rank/tokens.h"
#include "platform/mma.h"
#include "primitives/elements.h"
#include "primitives/wave_rows.h"

namespace moe_fp8 {
namespace {

// scores * u, rounded to bfloat16. Null scores are ones.
MOE_DEVICE uint32_t scored(uint32_t u, const float* scores, float score) {
  return scores ? packed<BF16>(score * BF16::to_float(u & 0xffffu), score * BF16::to_float(u >> 16)) : u;
}
MOE_DEVICE float score_of(const OuterTokensParams& p, int64_t row) {
  return p.scores ? p.scores[slot_of(p.source, row)] : 1.f;
}

#if defined(MOE_MMA_SYNC)
// ---- mma.sync: a block has 64 columns of an expert ------------------------------------------------------------------
//
// The sum is over rows, but elements of a row are adjacent: an instruction wants pairs of elements of neighbouring rows
// in a register. A lane loads 16 bytes of four rows and makes the pairs itself, so nothing goes through shared memory.
// Lane 4 g + q has rows {0, 1, 8, 9} + 2 q of a step of 16. It has columns 8 g .. 8 g + 7 of x, one for each of eight
// instructions, and ranks 2 g and 2 g + 1 of u. So the sums of a lane are of 16 neighbouring columns and two ranks.

constexpr int kOuterThreads = 32 * kOuterWarps, kOuterColumns = 64, kOuterStep = 16;
using OuterPartial = float[kOuterWarps][8][4][32];  // sums of each warp, instruction, register and lane

// Joins the low, or the high, halves of two words.
MOE_DEVICE uint32_t low_halves(uint32_t a, uint32_t b) { return (a & 0xffffu) | b << 16; }
MOE_DEVICE uint32_t high_halves(uint32_t a, uint32_t b) { return a >> 16 | (b & 0xffff0000u); }

// What a lane needs to load its four rows of a step: their tokens, or -1, and scores.
struct OuterSlots {
  int token[4];
  float score[4];
};
MOE_DEVICE OuterSlots load_slots(const OuterTokensParams& p, uint32_t row, uint32_t end) {
  OuterSlots found;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t at = row + i % 2 + i / 2 * 8;
    const int slot = at < end ? slot_of(p.source, at) : -1;
    found.token[i] = slot < 0 ? -1 : p.source.at ? int(p.source.row_of(uint32_t(slot))) : slot;
    found.score[i] = slot >= 0 && p.scores ? p.scores[slot] : 1.f;
  }
  return found;
}

// A lane's elements of the rows of a step.
template <int kSixteens>
struct OuterRows {
  Vec16 x[4];
  uint32_t u[kSixteens][4];
};
// row: the lane's first. x and u: from the lane's column on. ranks: from the lane's first on.
template <int kSixteens>
MOE_DEVICE OuterRows<kSixteens> load_outer(const OuterTokensParams& p, uint32_t row, const OuterSlots& slots,
                                          const uint16_t* x, const uint16_t* u, bool has_columns, int ranks) {
  OuterRows<kSixteens> found;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t at = int64_t(row) + i % 2 + i / 2 * 8, token = slots.token[i];
    found.x[i] = token >= 0 && has_columns ? *reinterpret_cast<const Vec16*>(x + token * p.x_stride) : Vec16{};
#pragma unroll
    for (int s = 0; s < kSixteens; ++s) {
      const bool valid = token >= 0 && 16 * s < ranks;
      found.u[s][i] = valid ? *reinterpret_cast<const uint32_t*>(u + at * p.u_stride + 16 * s) : 0;
    }
  }
  return found;
}

template <int kSixteens>
MOE_DEVICE void add_outer(const OuterTokensParams& p, const OuterRows<kSixteens>& rows, const OuterSlots& slots,
                          float (&sum)[kSixteens][8][4]) {
  uint32_t a[kSixteens][4];
#pragma unroll
  for (int s = 0; s < kSixteens; ++s) {
    uint32_t u[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) u[i] = slots.token[i] < 0 ? 0 : scored(rows.u[s][i], p.scores, slots.score[i]);
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      a[s][i] = low_halves(u[i], u[i + 1]);
      a[s][i + 1] = high_halves(u[i], u[i + 1]);
    }
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const auto pair = [&](int i) {
      const uint32_t low = rows.x[i].w[j / 2], high = rows.x[i + 1].w[j / 2];
      return j % 2 ? high_halves(low, high) : low_halves(low, high);
    };
    const uint32_t b[2] = {pair(0), pair(2)};
#pragma unroll
    for (int s = 0; s < kSixteens; ++s) mma_bfloat16(sum[s][j], a[s], b);
  }
}

// Adds the warps' sums of 16 ranks, and stores them. A thread has 4 neighbouring columns.
MOE_DEVICE void store_outer(const OuterTokensParams& p, OuterPartial& partial, int64_t e, int64_t first_rank,
                            int64_t first_column, const float (&sum)[8][4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __syncthreads();
#pragma unroll
  for (int j = 0; j < 8; ++j)
#pragma unroll
    for (int d = 0; d < 4; ++d) partial[warp][j][d][lane] = sum[j][d];
  __syncthreads();
  for (int i = threadIdx.x; i < 32 * 4 * 2; i += kOuterThreads) {  // lanes, registers, halves of the instructions
    const int d = i / 32 % 4, first = i / 128 * 4;
    const int64_t r = first_rank + lane / 4 * 2 + d / 2, column = first_column + lane % 4 * 16 + d % 2 * 8 + first;
    if (r >= p.R || column >= p.W) continue;
    float total[4] = {};
#pragma unroll
    for (int w = 0; w < kOuterWarps; ++w)
#pragma unroll
      for (int j = 0; j < 4; ++j) total[j] += partial[w][first + j][d][lane];
    const int64_t at = (e * p.R + r) * p.W + column;
    if (p.is_float32) {
      const Vec16 four = {{as_bits(total[0]), as_bits(total[1]), as_bits(total[2]), as_bits(total[3])}};
      *reinterpret_cast<Vec16*>(static_cast<float*>(p.out) + at) = four;
    } else {
      const Vec8 four = {{packed<BF16>(total[0], total[1]), packed<BF16>(total[2], total[3])}};
      *reinterpret_cast<Vec8*>(static_cast<uint16_t*>(p.out) + at) = four;
    }
  }
}

// kSixteens: groups of 16 ranks. Blocks stay, and take tile after tile: each makes a table of the groups first.
template <int kSixteens>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kOuterThreads, outer_blocks(16 * kSixteens))
    outer_tokens_kernel(MOE_GRID_CONSTANT const OuterTokensParams p) {
  __shared__ int begins[kMaxExperts + 1];
  __shared__ OuterPartial partial;
  constexpr uint32_t kStride = kOuterWarps * kOuterStep;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t tiles = ceil_div<int64_t>(p.W, kOuterColumns), first_rank = int64_t(blockIdx.y) * 16 * kSixteens;
  const int64_t rank = first_rank + lane / 4 * 2;
  const int ranks = int(p.R - rank);
  wait_for_previous_kernel();
  find_begins(begins, p.offs, int(p.E), int(p.P));
#pragma unroll 1
  for (int64_t tile = blockIdx.x; tile < tiles * p.E; tile += gridDim.x) {
    const int64_t e = tile / tiles, first_column = tile % tiles * kOuterColumns, column = first_column + lane / 4 * 8;
    const uint32_t end = begins[e + 1], begin = begins[e] + warp * kOuterStep + lane % 4 * 2;
    const bool has_columns = column < p.W;
    float sum[kSixteens][8][4] = {};
    OuterSlots slots = load_slots(p, begin, end);
#pragma unroll 1
    for (uint32_t row = begin; row - lane % 4 * 2 < end; row += kStride) {
      const auto rows = load_outer<kSixteens>(p, row, slots, p.x + column, p.u + rank, has_columns, ranks);
      const OuterSlots next = load_slots(p, row + kStride, end);  // the loads above are still under way
      add_outer<kSixteens>(p, rows, slots, sum);
      slots = next;
    }
#pragma unroll
    for (int s = 0; s < kSixteens; ++s) store_outer(p, partial, e, first_rank + 16 * s, first_column, sum[s]);
  }
}

template <int kSixteens>
int launch_outer(const OuterTokensParams& p, void* stream) {
  const int64_t tiles = p.E * ceil_div<int64_t>(p.W, kOuterColumns);
  const int64_t blocks = int64_t(outer_blocks(16 * kSixteens)) * device().multiprocessors;
  const dim3 grid(unsigned(tiles < blocks ? tiles : blocks), unsigned(ceil_div<int64_t>(p.R, 16 * kSixteens)));
  return launch(outer_tokens_kernel<kSixteens>, {grid, dim3(kOuterThreads), stream}, p);
}

bool is_aligned(const OuterTokensParams& p) {
  return reinterpret_cast<uintptr_t>(p.x) % 16 == 0 && (p.W | p.x_stride) % 8 == 0 &&
         reinterpret_cast<uintptr_t>(p.u) % 4 == 0 && (p.R | p.u_stride) % 2 == 0;
}
#endif

// ---- any strides, and chips without mma.sync: a wave has a row of the result ----------------------------------------
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, 4) outer_tokens_any_kernel(MOE_GRID_CONSTANT const OuterTokensParams p) {
  __shared__ int begins[kMaxExperts + 1];
  const int lane = threadIdx.x % kWarpSize;
  wait_for_previous_kernel();
  find_begins(begins, p.offs, int(p.E), int(p.P));
#pragma unroll 1
  for (int64_t at = first_row(); at < p.E * p.R; at += rows_per_grid()) {
    const int64_t e = at / p.R, r = at % p.R;
#pragma unroll 1
    for (int64_t w = lane; w < p.W; w += kWarpSize) {
      float sum = 0;
#pragma unroll 1
      for (int64_t row = begins[e]; row < begins[e + 1]; ++row) {
        const int64_t token = token_of(p.source, row);
        if (token < 0) continue;
        const uint32_t u = scored(p.u[row * p.u_stride + r], p.scores, score_of(p, row));
        sum = fmaf(BF16::to_float(u & 0xffffu), BF16::to_float(p.x[token * p.x_stride + w]), sum);
      }
      if (p.is_float32) static_cast<float*>(p.out)[at * p.W + w] = sum;
      else static_cast<uint16_t*>(p.out)[at * p.W + w] = BF16::from_float(sum);
    }
  }
}

}  // namespace

int outer_tokens(const OuterTokensParams& p, void* stream) {
  if (p.E == 0 || p.R == 0 || p.W == 0) return 0;
#if defined(MOE_MMA_SYNC)
  if (is_aligned(p) && p.R <= 32 * kMaxGridBlocksY)
    return p.R <= 16 ? launch_outer<1>(p, stream) : launch_outer<2>(p, stream);
#endif
  return launch_on_rows(outer_tokens_any_kernel, p, p.E * p.R, stream);
}

}  // namespace moe_fp8
