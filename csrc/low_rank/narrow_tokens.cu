#include "low_rank/policy.h"
#include "low_rank/token_pieces.h"
#include "numerics/floats.h"
#include "primitives/groups.h"
#include "primitives/row_reduce.h"
#include "primitives/wave_rows.h"

namespace moe_fp8 {
namespace {

#if defined(MOE_MMA_SYNC)
// ---- mma.sync: a block has a window of rows -------------------------------------------------------------------------
//
// A window may hold rows of several groups. The block multiplies it by the factor of each, and stores the rows of the
// group. Nothing is staged in shared memory: a lane loads 16 bytes of its rows of x, and these columns of the factor.
// Eight columns are for two instructions; any order along W is right if both operands use the same.

constexpr int kNarrowThreads = 32 * kNarrowWarps, kHalfRows = kNarrowRows / 8;

// Sums of each warp, by fragment of rows, instruction, register and lane. The result has kEights groups of 8 columns.
template <int kEights>
using NarrowPartial = float[kNarrowWarps][kHalfRows / 2][kEights][4][32];

// Adds the warp's share of W to sum. `token` holds the tokens of the lane's rows, or -1 where no result is stored. `m`
// points to the lane's first row of the factor. Lanes hold rows lane / 4 + 8 * h of the window, and rows
// lane / 4 + 8 * j of the factor.
template <class Piece, int kEights>
MOE_DEVICE void add_narrow(const NarrowTokensParams& p, const int64_t (&token)[kHalfRows], const uint16_t* m, int ranks,
                           float (&sum)[kHalfRows / 2][kEights][4]) {
  constexpr int kUnroll = 2 / Piece::kEights;  // steps whose loads are in flight at once
  constexpr int kStep = 4 * Piece::kColumns;   // columns of a warp
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  typename Piece::Row row[kHalfRows];
#pragma unroll
  for (int h = 0; h < kHalfRows; ++h) row[h] = Piece::row(p.x, token[h]);
#pragma unroll 1
  for (int64_t first = warp * kStep; first < p.W; first += kStep * kNarrowWarps * kUnroll) {
    Piece a[kUnroll][kHalfRows];
    Vec16 b[kUnroll][Piece::kEights][kEights];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t w = first + u * kStep * kNarrowWarps + lane % 4 * Piece::kColumns;
#pragma unroll
      for (int h = 0; h < kHalfRows; ++h) a[u][h] = token[h] >= 0 && w < p.W ? Piece::load(p.x, row[h], w) : Piece{};
#pragma unroll
      for (int c = 0; c < Piece::kEights; ++c)
#pragma unroll
        for (int j = 0; j < kEights; ++j)
          b[u][c][j] = 8 * j < ranks && w < p.W ? *reinterpret_cast<const Vec16*>(m + 8 * j * p.m_stride + w + 8 * c)
                                                : Vec16{};
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
#pragma unroll
      for (int c = 0; c < Piece::kEights; ++c) {
        Vec16 rows[kHalfRows];
#pragma unroll
        for (int h = 0; h < kHalfRows; ++h) rows[h] = a[u][h].eight(c);
#pragma unroll
        for (int i = 0; i < 4; i += 2)
#pragma unroll
          for (int j = 0; j < kEights; ++j)
#pragma unroll
            for (int f = 0; f < kHalfRows / 2; ++f) {
              const Vec16 &low = rows[2 * f], &high = rows[2 * f + 1], &columns = b[u][c][j];
              mma_bfloat16(sum[f][j], {low.w[i], high.w[i], low.w[i + 1], high.w[i + 1]},
                           {columns.w[i], columns.w[i + 1]});
            }
      }
  }
}

// Adds the warps' sums, and stores the rows of the window that are in [begin, end). Rows without a token are zero.
template <int kEights>
MOE_DEVICE void store_narrow(const NarrowTokensParams& p, NarrowPartial<kEights>& partial, int64_t window,
                             int64_t begin, int64_t end, int64_t first_rank,
                             const float (&sum)[kHalfRows / 2][kEights][4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __syncthreads();
#pragma unroll
  for (int f = 0; f < kHalfRows / 2; ++f)
#pragma unroll
    for (int j = 0; j < kEights; ++j)
#pragma unroll
      for (int d = 0; d < 4; ++d) partial[warp][f][j][d][lane] = sum[f][j][d];
  __syncthreads();
  for (int i = warp; i < kHalfRows / 2 * kEights * 4; i += kNarrowWarps) {
    const int f = i / (kEights * 4), j = i / 4 % kEights, d = i % 4;
    const int64_t row = window + 16 * f + lane / 4 + d / 2 * 8, r = first_rank + 8 * j + lane % 4 * 2 + d % 2;
    if (row < begin || row >= end || r >= p.R) continue;
    float total = 0;
#pragma unroll
    for (int w = 0; w < kNarrowWarps; ++w) total += partial[w][f][j][d][lane];
    p.out[row * p.R + r] = source_row(p.source, row) < 0 ? uint16_t(0) : BF16::from_float(total);
  }
}

template <class Piece, int kEights>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kNarrowThreads, narrow_blocks(8 * kEights))
    narrow_tokens_kernel(MOE_GRID_CONSTANT const NarrowTokensParams p) {
  __shared__ int begins[kMaxExperts + 1];
  __shared__ NarrowPartial<kEights> partial;
  constexpr int kRanks = 8 * kEights;
  const int E = int(p.E), lane = threadIdx.x % 32;
  const int64_t first_rank = int64_t(blockIdx.y) * kRanks;
  const int ranks = int(p.R - first_rank) - lane / 4;  // rows of the factor from the lane's first on
  wait_for_previous_kernel();
  find_begins(begins, p.offs, E, int(p.P));
#pragma unroll 1
  for (int64_t window = int64_t(blockIdx.x) * kNarrowRows; window < p.P; window += int64_t(gridDim.x) * kNarrowRows) {
    const int64_t stop = window + kNarrowRows < p.P ? window + kNarrowRows : p.P;
    int64_t token[kHalfRows];
#pragma unroll
    for (int h = 0; h < kHalfRows; ++h) {
      const int64_t row = window + lane / 4 + 8 * h;
      token[h] = row < stop ? source_row(p.source, row) : -1;
    }
    int e = GroupTable::find(begins, E - 1, int(window));
#pragma unroll 1
    for (; e < E && begins[e] < stop; ++e) {
      const int64_t begin = begins[e], end = begins[e + 1];
      if (end <= window || end == begin) continue;
      int64_t of_group[kHalfRows];
#pragma unroll
      for (int h = 0; h < kHalfRows; ++h) {
        const int64_t at = window + lane / 4 + 8 * h;
        of_group[h] = at >= begin && at < end ? token[h] : -1;
      }
      float sum[kHalfRows / 2][kEights][4] = {};
      const uint16_t* m = p.m + e * p.m_expert_stride + (first_rank + lane / 4) * p.m_stride;
      add_narrow<Piece, kEights>(p, of_group, m, ranks, sum);
      store_narrow<kEights>(p, partial, window, begin, end, first_rank, sum);
    }
    if (stop <= begins[E]) continue;
    for (int i = threadIdx.x; i < kNarrowRows * kRanks; i += kNarrowThreads) {  // rows behind the last group
      const int64_t row = window + i / kRanks, r = first_rank + i % kRanks;
      if (row >= begins[E] && row < stop && r < p.R) p.out[row * p.R + r] = 0;
    }
  }
}

template <class Piece, int kEights>
int launch_narrow(const NarrowTokensParams& p, void* stream) {
  const int64_t windows = ceil_div<int64_t>(p.P, kNarrowRows);
  const int64_t blocks = int64_t(narrow_blocks(8 * kEights)) * device().multiprocessors;
  const dim3 grid(unsigned(windows < blocks ? windows : blocks), unsigned(ceil_div<int64_t>(p.R, 8 * kEights)));
  return launch(narrow_tokens_kernel<Piece, kEights>, {grid, dim3(kNarrowThreads), stream}, p);
}

template <class Piece>
int launch_narrow(const NarrowTokensParams& p, void* stream) {
  return p.R <= 16 ? launch_narrow<Piece, 2>(p, stream) : launch_narrow<Piece, 4>(p, stream);
}

bool is_aligned(const NarrowTokensParams& p) {
  const bool factor = reinterpret_cast<uintptr_t>(p.m) % 16 == 0 && (p.m_stride | p.m_expert_stride) % 8 == 0;
  return factor && has_pieces(p.x, p.W);
}
#endif

// ---- any strides, and chips without mma.sync: a wave has a row ------------------------------------------------------
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, 4) narrow_tokens_any_kernel(MOE_GRID_CONSTANT const NarrowTokensParams p) {
  __shared__ int begins[kMaxExperts + 1];
  const int E = int(p.E), lane = threadIdx.x % kWarpSize;
  wait_for_previous_kernel();
  find_begins(begins, p.offs, E, int(p.P));
#pragma unroll 1
  for (int64_t row = first_row(); row < p.P; row += rows_per_grid()) {
    const int e = GroupTable::find(begins, E, int(row));
    const int64_t token = e < E ? source_row(p.source, row) : -1;
#pragma unroll 1
    for (int64_t r = 0; r < p.R; ++r) {
      float sum = 0;
      if (token >= 0) {
        const uint16_t* m = p.m + e * p.m_expert_stride + r * p.m_stride;
#pragma unroll 1
        for (int64_t w = lane; w < p.W; w += kWarpSize)
          sum = fmaf(element(p.x, token, w), BF16::to_float(m[w]), sum);
      }
      sum = reduce_lanes(sum, SumF32{});
      if (lane == 0) p.out[row * p.R + r] = BF16::from_float(sum);
    }
  }
}

}  // namespace

int narrow_tokens(const NarrowTokensParams& p, void* stream) {
  if (p.P == 0 || p.R == 0) return 0;
#if defined(MOE_MMA_SYNC)
  if (p.E > 0 && is_aligned(p) && p.R <= 32 * kMaxGridBlocksY)
    return dispatch_pieces(p.x, [&](auto piece) { return launch_narrow<decltype(piece)>(p, stream); });
#endif
  return launch_on_rows(narrow_tokens_any_kernel, p, p.P, stream);
}

}  // namespace moe_fp8
