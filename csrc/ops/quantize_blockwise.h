// What the ops of the blockwise recipe share: the CPU's loops, and one function for tokens as they lie and by index.
#pragma once
#include "kernels/quantize_blockwise.h"
#include "ops/common.h"
#include "ops/cpu_loops.h"

namespace moe_fp8 {

// row_of(r) is row r's first element.
template <class In, Fp8Type kOut, class RowOf>
void loop_1x128(RowOf row_of, int64_t rows, int64_t K, bool pow2, uint8_t* q, float* scale) {
  const int64_t stride = scale_stride(rows);
  parallel(rows, rows * K, [=](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const typename In::Bits* row = row_of(r);
      for (int64_t k = 0; k < K; k += kBlock)
        scale[k / kBlock * stride + r] =
            quantize_row<In, kOut>(row + k, std::min<int64_t>(kBlock, K - k), pow2, q + r * K + k).dequant();
    }
  });
}
// Every group's blocks of 128 rows, with their scales.
inline std::vector<GroupRows> blocks_of(const std::vector<GroupRows>& groups, int64_t align, int64_t scale_t_stride) {
  std::vector<GroupRows> blocks;
  int64_t first_block = 0;
  for (const GroupRows& g : groups) {
    for (int64_t r = 0; r < g.rows; r += kBlock)
      blocks.push_back({g.first + r, std::min<int64_t>(kBlock, g.rows - r), g.q_t + r,
                        (first_block + r / kBlock) * scale_t_stride});
    first_block += round_up(g.rows, std::max<int64_t>(align, kBlock)) / kBlock;
  }
  return blocks;
}
// Columns of blocks, as rows of the padded layout.
template <class In, Fp8Type kOut, class RowOf>
void loop_in_place(RowOf row_of, const std::vector<GroupRows>& blocks, int64_t K, bool pow2, uint8_t* q,
                   float* scale_t) {
  auto store_scale = [=](const GroupRows& g, int64_t k, float scale) { scale_t[g.scale_t + k] = scale; };
  strips_loop<In, kOut>(row_of, blocks, K, pow2, store_scale,
                        [=](const GroupRows& g, int64_t k, int columns, auto row_of_strip, const float* m) {
                          for (int64_t r = 0; r < g.rows; ++r) {
                            const typename In::Bits* __restrict row = row_of_strip(r);
                            uint8_t* __restrict out = q + (g.q_t + r) * K + k;
                            for (int c = 0; c < columns; ++c)
                              out[c] = fp8_from_float<kOut>(In::to_float(row[c]) * m[c]);
                          }
                        });
}

// Parameters of `rows` rows of outputs from tokens x, which have been checked.
inline QuantizeBlockwiseParams of_tokens(const Tensor& x, InType in, int64_t rows, bool pow2_scale) {
  QuantizeBlockwiseParams p = {};
  p.in = in;
  p.x = x.data;
  p.rows = rows;
  p.K = x.sizes[1];
  p.row_stride = x.strides[0];
  p.align = 1;
  p.transpose = true;
  p.pow2_scale = pow2_scale;
  return p;
}
// Those of groups of the rows; `arg` has them.
inline void group(const char* op, QuantizeBlockwiseParams& p, const char* arg, const Tensor& x, const Tensor& offs,
                  int64_t align, bool transpose) {
  check_offs(op, offs, "x", x, p.rows, std::strcmp(arg, "x") ? arg : "rows");
  p.offs = offs.as<int>();
  p.E = offs.sizes[0];
  p.positions = check_align(op, align, arg, p.rows, p.E);
  check_align(op, std::max<int64_t>(align, kBlock), arg, p.rows, p.E);
  p.align = int(align);
  p.transpose = transpose;
}

// The outputs of tokens' rows, columns or both, in the order in which ops return them.
struct BlockwiseOutputs {
  Handle q, scale, q_t, scale_t, padded_offs;
};
// p: x, offs, E, rows (those of the outputs), K, row_stride, align, transpose, in, out, pow2_scale and index.
// rows_of(In) gives the CPU's rows.
template <class RowsOf>
BlockwiseOutputs quantize_tokens(const Call& call, QuantizeBlockwiseParams& p, bool rowwise, bool columnwise,
                                 bool on_gpu, RowsOf rows_of) {
  const int64_t M = p.rows, K = p.K, blocks = block_extent(M, p.E, p.align);
  BlockwiseOutputs o;
  if (rowwise) {
    p.q = data<uint8_t>(o.q = call.empty({M, K}, p.out));
    p.scale = data<float>(o.scale = call.empty_scales(M, ceil_div<int64_t>(K, kBlock)));
  }
  if (columnwise) {
    p.q_t = data<uint8_t>(o.q_t = p.transpose ? call.empty({K, p.positions}, p.out)
                                              : call.empty({p.positions, K}, p.out));
    o.scale_t = p.transpose ? call.empty_scales(K, blocks) : call.empty({blocks, scale_stride(K)}, kFloat32);
    p.scale_t = data<float>(o.scale_t);
    if (!p.transpose) o.scale_t = view(o.scale_t, {blocks, K}, {scale_stride(K), 1});
    p.padded_offs = data<int>(o.padded_offs = call.empty({p.E}, kInt32));
  }
#if defined(MOE_FP8_GPU)
  if (on_gpu) {
    auto launch = !columnwise ? quantize_1x128 : !rowwise ? quantize_128x1 : quantize_1x128_128x1;
    call.check(launch(p, call.stream()));
    return o;
  }
#endif
  if (rowwise) std::memset(p.scale, 0, ceil_div<int64_t>(K, kBlock) * scale_stride(M) * 4);
  std::vector<GroupRows> groups;
  if (columnwise) {
    std::memset(p.q_t, 0, K * p.positions);
    std::memset(p.scale_t, 0, blocks * scale_stride(K) * 4);
    groups = blocks_of(token_groups(p.offs, p.E, M, p.align, K, p.padded_offs), p.align, scale_stride(K));
  }
  dispatch(p.in, p.out, [&](auto in_tag, auto out_tag) {
    using In = decltype(in_tag);
    constexpr Fp8Type kOut = decltype(out_tag)::value;
    const auto rows = rows_of(in_tag);
    if (rowwise) loop_1x128<In, kOut>(rows, M, K, p.pow2_scale, p.q, p.scale);
    if (!columnwise) return 0;
    if (p.transpose) colwise_loop<In, kOut>(rows, groups, K, p.pow2_scale, p.q_t, p.positions, p.scale_t);
    else loop_in_place<In, kOut>(rows, groups, K, p.pow2_scale, p.q_t, p.scale_t);
    return 0;
  });
  return o;
}

}  // namespace moe_fp8
