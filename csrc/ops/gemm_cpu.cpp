#include "ops/gemm_product.h"

#include "cpu/dequantize.h"
#include "cpu/groups.h"
#include "cpu/parallel.h"
#include "ops/call.h"

namespace moe_fp8 {
namespace {

// Dequantizes rows [0, rows) and K indices [0, n) of an operand to float32 [rows, n]. If scales are
// of blocks, they are applied: row 0 has the scales of row scale_row, and index 0 begins block `first`.
Handle dequantized(const Call& call, Fp8Type type, const uint8_t* q, const OperandScales& scales, int64_t group,
                   int64_t scale_row, int64_t first, int64_t stride, int64_t rows, int64_t n) {
  const OperandScales block_scales = scales.block_size ? scales : OperandScales{};
  const std::array<float, 256> values = decoded(type);
  std::vector<Segment> segments;
  add_segments(segments, block_scales, 0, n, int(first));
  Handle out = call.empty({rows, n}, kFloat32);
  parallel(rows, rows * n, [&, to = data<uint32_t>(out)](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      dequantize_row<F32>(values, block_scales, group, scale_row + r, segments, q + r * stride, to + r * n);
  });
  return out;
}

// a [rows, n] times the transpose of b [columns, n]. It calls an out variant, because autocast does not cast those.
Handle multiply(const Call& call, const Handle& a, const Handle& b, int64_t rows, int64_t columns, int64_t n) {
  const Handle sum = call.empty({rows, columns}, kFloat32);
  StableIValue stack[] = {to_word(share(a)), to_word(view(b, {n, columns}, {1, n})), to_word(share(sum))};
  return call_torch("aten::mm", "out", stack);
}

// Element (m, n) of the low-rank term of group e, in float32 by rising r. Products of bfloat16 are exact.
float low_rank_term(const LowRankTerm& term, int64_t m, int64_t e, int64_t n) {
  const uint16_t* a = term.a + m * term.a_stride;
  const uint16_t* b = term.b + e * term.b_group_stride + n * term.b_stride;
  float sum = 0;
  for (int r = 0; r < term.rank; ++r) sum += BF16::to_float(a[r]) * BF16::to_float(b[r]);
  return sum;
}

}  // namespace

void scaled_grouped_mm_cpu(const Call& call, const ScaledGroupedMmParams& p) {
  const std::vector<int> ends = safe_ends(p.offs, p.E, p.k_grouped ? p.K : p.M);
  const int64_t out_bytes = (p.k_grouped ? p.E * p.M : p.M) * p.N * (p.out_float32 ? 4 : 2);
  if (out_bytes == 0) return;
  if (!p.accumulate) std::memset(p.out, 0, out_bytes);
  const bool rowwise = p.scale_a.block_size == 0, row_major = p.scale_a.layout == ScaleLayout::kE8M0;
  const bool blocked_rows = p.scale_a.layout == ScaleLayout::kBlocked && !p.k_grouped;
  int64_t at = 0;  // row or column where the group's scales begin
  for (int64_t e = 0, start = 0, next = 0; e < p.E; start = ends[e++], at = next) {
    const int64_t size = ends[e] - start, rows = p.k_grouped ? p.M : size, n = p.k_grouped ? size : p.K;
    next = at + round_up<int64_t>(size, kGroupScales);
    if (size == 0) continue;
    const uint8_t* a_first = p.a + start * (p.k_grouped ? 1 : p.a_stride);
    const uint8_t* b_first = p.b + (p.k_grouped ? start : e * p.b_group_stride);
    const int64_t scale_row = blocked_rows ? at : p.k_grouped ? 0 : start;
    const int64_t block = p.k_grouped && !rowwise ? (row_major ? start : at) / p.scale_a.block_size : 0;
    const int64_t a_group = p.k_grouped ? e : 0;
    const Handle a = dequantized(call, p.a_type, a_first, p.scale_a, a_group, scale_row, block, p.a_stride, rows, n);
    const Handle b = dequantized(call, p.b_type, b_first, p.scale_b, e, 0, block, p.b_stride, p.N, n);
    const Handle sum = multiply(call, a, b, rows, p.N, n);
    const int64_t first = p.k_grouped ? e * p.M : start;  // the group's first row in out and scale_a
    parallel(rows, rows * p.N, [&, from = data<float>(sum), N = p.N](int64_t begin, int64_t end) {
      const float* scales_a = static_cast<const float*>(p.scale_a.data);
      const float* scale_b = static_cast<const float*>(p.scale_b.data) + (rowwise ? e * N : 0);
      for (int64_t r = begin; r < end; ++r) {
        const float scale_a = rowwise ? scales_a[first + r] : 1.f;
        const int64_t row = (first + r) * N;
        auto scaled = [&, row_of_sum = from + r * N](int64_t c) {
          const float product = rowwise ? row_of_sum[c] * scale_a * scale_b[c] : row_of_sum[c];
          return p.low_rank.a ? product + low_rank_term(p.low_rank, first + r, e, c) : product;
        };
        auto* out32 = static_cast<float*>(p.out);
        auto* out16 = static_cast<uint16_t*>(p.out);
        for (int64_t c = 0; c < N; ++c) {
          const int64_t i = p.out_transposed ? (e * N + c) * p.M + r : row + c;
          if (p.out_float32) out32[i] = p.accumulate ? out32[i] + scaled(c) : scaled(c);
          else out16[i] = BF16::from_float(p.accumulate ? BF16::to_float(out16[i]) + scaled(c) : scaled(c));
        }
      }
    });
  }
}

}  // namespace moe_fp8
