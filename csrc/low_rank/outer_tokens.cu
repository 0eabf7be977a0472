#include "low_rank/policy.h"
#include "low_rank/token_pieces.h"
#include "primitives/elements.h"
#include "primitives/groups.h"
#include "primitives/wave_rows.h"

namespace moe_fp8 {
namespace {

// scores * u, rounded to bfloat16. Null scores are ones.
MOE_DEVICE uint32_t scored(uint32_t u, const float* scores, float score) {
  return scores ? packed<BF16>(score * BF16::to_float(u & 0xffffu), score * BF16::to_float(u >> 16)) : u;
}

#if defined(MOE_MMA_SYNC)
// ---- mma.sync: a block has 8 pieces of the rows of an expert --------------------------------------------------------
//
// The sum is over rows, but elements of a row are adjacent: an instruction wants pairs of elements of neighbouring rows
// in a register. A lane loads 16 bytes of four rows and makes the pairs itself, so nothing goes through shared memory.
// Lane 4 g + q has rows {0, 1, 8, 9} + 2 q of a step of 16. It has piece g of each row: 8 columns, or 16 of FP8, one
// for each instruction. It has ranks 2 g and 2 g + 1 of u. So a lane sums two neighbouring pieces and two ranks.

constexpr int kOuterThreads = 32 * kOuterWarps, kOuterStep = 16;
using OuterPartial = float[kOuterWarps][8][4][32];  // sums of each warp, instruction, register and lane

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
template <class Piece, int kSixteens>
struct OuterRows {
  Piece x[4];
  uint32_t u[kSixteens][4];
};
// Loads a lane's elements of a step. `row` and `column` are the first ones that the lane has. `u` points to its first
// rank in row 0, and `ranks` counts the ranks from there.
template <class Piece, int kSixteens>
MOE_DEVICE OuterRows<Piece, kSixteens> load_outer(const OuterTokensParams& p, uint32_t row, const OuterSlots& slots,
                                                  int64_t column, const uint16_t* u, int ranks) {
  OuterRows<Piece, kSixteens> found;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t at = int64_t(row) + i % 2 + i / 2 * 8, token = slots.token[i];
    found.x[i] = token >= 0 && column < p.W ? Piece::load(p.x, Piece::row(p.x, token), column) : Piece{};
#pragma unroll
    for (int s = 0; s < kSixteens; ++s) {
      const bool valid = token >= 0 && 16 * s < ranks;
      found.u[s][i] = valid ? *reinterpret_cast<const uint32_t*>(u + at * p.u_stride + 16 * s) : 0;
    }
  }
  return found;
}

template <class Piece, int kSixteens>
MOE_DEVICE void add_outer(const OuterTokensParams& p, const OuterRows<Piece, kSixteens>& rows, const OuterSlots& slots,
                          float (&sum)[kSixteens][Piece::kEights][8][4]) {
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
  for (int c = 0; c < Piece::kEights; ++c) {
    Vec16 x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = rows.x[i].eight(c);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const auto pair = [&](int i) {
        const uint32_t low = x[i].w[j / 2], high = x[i + 1].w[j / 2];
        return j % 2 ? high_halves(low, high) : low_halves(low, high);
      };
      const uint32_t b[2] = {pair(0), pair(2)};
#pragma unroll
      for (int s = 0; s < kSixteens; ++s) mma_bfloat16(sum[s][c][j], a[s], b);
    }
  }
}

// Adds the warps' sums of 16 ranks and eight columns of each piece, and stores them. A thread has 4 neighbouring
// columns. step: from piece to piece.
MOE_DEVICE void store_outer(const OuterTokensParams& p, OuterPartial& partial, int64_t e, int64_t first_rank,
                            int64_t first_column, int step, const float (&sum)[8][4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __syncthreads();
#pragma unroll
  for (int j = 0; j < 8; ++j)
#pragma unroll
    for (int d = 0; d < 4; ++d) partial[warp][j][d][lane] = sum[j][d];
  __syncthreads();
  for (int i = threadIdx.x; i < 32 * 4 * 2; i += kOuterThreads) {  // lanes, registers, halves of the instructions
    const int d = i / 32 % 4, first = i / 128 * 4;
    const int piece = lane % 4 * 2 + d % 2;
    const int64_t r = first_rank + lane / 4 * 2 + d / 2, column = first_column + piece * step + first;
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
template <class Piece, int kSixteens>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kOuterThreads, outer_blocks(16 * kSixteens * Piece::kEights))
    outer_tokens_kernel(MOE_GRID_CONSTANT const OuterTokensParams p) {
  __shared__ int begins[kMaxExperts + 1];
  __shared__ OuterPartial partial;
  constexpr uint32_t kStride = kOuterWarps * kOuterStep;
  constexpr int64_t kColumns = 8 * Piece::kColumns;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t tiles = ceil_div(p.W, kColumns), first_rank = int64_t(blockIdx.y) * 16 * kSixteens;
  const int64_t rank = first_rank + lane / 4 * 2;
  const int ranks = int(p.R - rank);
  wait_for_previous_kernel();
  find_begins(begins, p.offs, int(p.E), int(p.P));
#pragma unroll 1
  for (int64_t tile = blockIdx.x; tile < tiles * p.E; tile += gridDim.x) {
    const int64_t e = tile / tiles, first_column = tile % tiles * kColumns;
    const int64_t column = first_column + lane / 4 * Piece::kColumns;
    const uint32_t end = begins[e + 1], begin = begins[e] + warp * kOuterStep + lane % 4 * 2;
    float sum[kSixteens][Piece::kEights][8][4] = {};
    OuterSlots slots = load_slots(p, begin, end);
#pragma unroll 1
    for (uint32_t row = begin; row - lane % 4 * 2 < end; row += kStride) {
      const auto rows = load_outer<Piece, kSixteens>(p, row, slots, column, p.u + rank, ranks);
      const OuterSlots next = load_slots(p, row + kStride, end);  // the loads above are still under way
      add_outer<Piece, kSixteens>(p, rows, slots, sum);
      slots = next;
    }
#pragma unroll
    for (int s = 0; s < kSixteens; ++s)
#pragma unroll
      for (int c = 0; c < Piece::kEights; ++c)
        store_outer(p, partial, e, first_rank + 16 * s, first_column + 8 * c, Piece::kColumns, sum[s][c]);
  }
}

template <class Piece, int kSixteens>
int launch_outer(const OuterTokensParams& p, void* stream) {
  const int64_t tiles = p.E * ceil_div<int64_t>(p.W, 8 * Piece::kColumns);
  const int64_t blocks = int64_t(outer_blocks(16 * kSixteens * Piece::kEights)) * device().multiprocessors;
  const dim3 grid(unsigned(tiles < blocks ? tiles : blocks), unsigned(ceil_div<int64_t>(p.R, 16 * kSixteens)));
  return launch(outer_tokens_kernel<Piece, kSixteens>, {grid, dim3(kOuterThreads), stream}, p);
}
template <class Piece>
int launch_outer(const OuterTokensParams& p, void* stream) {
  if constexpr (Piece::kEights == 1)  // sums of 32 ranks and 16 columns do not fit in registers
    if (p.R > 16) return launch_outer<Piece, 2>(p, stream);
  return launch_outer<Piece, 1>(p, stream);
}

bool is_aligned(const OuterTokensParams& p) {
  return reinterpret_cast<uintptr_t>(p.u) % 4 == 0 && (p.R | p.u_stride) % 2 == 0 && has_pieces(p.x, p.W);
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
        const int64_t token = source_row(p.source, row);
        if (token < 0) continue;
        const uint32_t u = scored(p.u[row * p.u_stride + r], p.scores, p.score(row));
        sum = fmaf(BF16::to_float(u & 0xffffu), element(p.x, token, w), sum);
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
  if (is_aligned(p) && p.R <= 16 * kMaxGridBlocksY)
    return dispatch_pieces(p.x, [&](auto piece) { return launch_outer<decltype(piece)>(p, stream); });
#endif
  return launch_on_rows(outer_tokens_any_kernel, p, p.E * p.R, stream);
}

}  // namespace moe_fp8
