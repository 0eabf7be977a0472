#include "quantize/transpose_weight.h"

#include "cpu/parallel.h"
#include "numerics/groups.h"

namespace moe_fp8 {

void transpose_weight_cpu(const TransposeWeightParams& p) {
  constexpr int64_t kTile = 64;  // a tile of both tensors fits in the first cache
  if (p.N == 0 || p.K == 0) return;
  const int64_t row_tiles = ceil_div(p.N, kTile);
  parallel(p.E * row_tiles, p.E * p.N * p.K, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t e = i / row_tiles, row = i % row_tiles * kTile, row_end = std::min(row + kTile, p.N);
      for (int64_t column = 0; column < p.K; column += kTile)
        for (int64_t k = column; k < std::min(column + kTile, p.K); ++k)
          for (int64_t n = row; n < row_end; ++n)
            p.q_t[(e * p.K + k) * p.N + n] = p.q[e * p.expert_stride + n * p.row_stride + k];
    }
  });
}

}  // namespace moe_fp8
