// The epilogue that stores a product plus a low-rank term, such as an adapter's: out = RN(product + a[m] . b[e, n]).
// It serves M-grouped products with block scales. A lane holds the same sums after wgmma as after mma.sync, so a warp
// multiplies the factors by mma.sync, straight onto its sums. A lane loads its elements of both factors from global
// memory.
#pragma once
#include "gemm/sm90/epilogue/store.h"
#include "platform/mma.h"

namespace moe_fp8::sm90 {

struct StoreLowRank : Store {
  static constexpr bool kAddsLowRank = true, kServesKGrouped = false;
  using Args = LowRankTerm;
  static Args make_args(const ScaledGroupedMmParams& p) { return p.low_rank; }

  // Adds the term to the sums of the warp's rows, in kRowHalves halves of the tile. Each step is over 16 elements along
  // r: lane % 4 holds four neighbours of every row of a and b, and zeros behind the rank.
  template <int kRowHalves, class T>
  static MOE_DEVICE void add_low_rank(const typename T::KernelArgs& p, const Consumer<T>& c, const Tile& tile,
                                      float (&sum)[2][T::kTileN / 2]) {
    constexpr int kEights = T::kTileN / 8;  // groups of 8 columns
    const LowRankTerm& term = p.epilogue;
    const int g = c.lane() / 4, columns = up_to(tile.columns, T::kTileN);
    const uint16_t* b = term.b + tile.expert * term.b_group_stride + (tile.column + g) * term.b_stride;
#pragma unroll 1
    for (int first = 0; first < term.rank; first += 16) {
      const int r = first + c.lane() % 4 * 4;
      Vec8 rows[kRowHalves][2], column[kEights];  // all loads are under way before the first product waits
#pragma unroll
      for (int half = 0; half < kRowHalves; ++half)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = c.row() + 8 * h + 128 * half;
          const auto* at = reinterpret_cast<const Vec8*>(term.a + (tile.out_row + row) * term.a_stride + r);
          rows[half][h] = r < term.rank && row < tile.rows ? *at : Vec8{};
        }
#pragma unroll
      for (int j = 0; j < kEights; ++j) {
        const auto* at = reinterpret_cast<const Vec8*>(b + 8 * j * term.b_stride + r);
        column[j] = r < term.rank && 8 * j < columns ? *at : Vec8{};  // columns are a multiple of 16
      }
#pragma unroll
      for (int j = 0; j < kEights; ++j)
#pragma unroll
        for (int half = 0; half < kRowHalves; ++half) {
          float(&d)[4] = reinterpret_cast<float(&)[4]>(sum[half][4 * j]);
          mma_bfloat16(d, {rows[half][0].w[0], rows[half][1].w[0], rows[half][0].w[1], rows[half][1].w[1]},
                       {column[j].w[0], column[j].w[1]});
        }
    }
  }
};

}  // namespace moe_fp8::sm90
