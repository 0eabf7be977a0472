#include "ops/quantize_blockwise.h"

namespace moe_fp8 {
namespace {

// Of one expert: squares of 128 by 128, row by row of them.
template <class In, Fp8Type kOut>
void loop_128x128(const QuantizeBlockwiseParams& p) {
  const int64_t N = p.rows, K = p.K, of_expert = ceil_div<int64_t>(N, kBlock), strips = ceil_div<int64_t>(K, kBlock);
  parallel(p.E * of_expert, p.E * N * K, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t e = unit / of_expert, first = unit % of_expert * kBlock;
      const int64_t rows = std::min<int64_t>(kBlock, N - first);
      const auto* w = static_cast<const typename In::Bits*>(p.x) + e * p.group_stride + first * p.row_stride;
      for (int64_t k = 0; k < K; k += kBlock) {
        const int64_t columns = std::min<int64_t>(kBlock, K - k);
        Magnitude<In> amax = 0;
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t c = 0; c < columns; ++c) amax = std::max(amax, magnitude<In>(w[r * p.row_stride + k + c]));
        const ScaleF32 s = scale_of<In, kOut>(amax, p.pow2_scale);
        p.scale[unit * strips + k / kBlock] = s.dequant();
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t c = 0; c < columns; ++c)
            p.q[(e * N + first + r) * K + k + c] =
                fp8_from_float<kOut>(In::to_float(w[r * p.row_stride + k + c]) * s.multiplier);
        float m[kStrip];
        std::fill_n(m, kStrip, s.multiplier);
        for (int64_t c = 0; c < columns; c += kStrip) {
          auto row_of = [&](int64_t r) { return w + r * p.row_stride + k + c; };
          cast_strip_transposed<In, kOut>(row_of, rows, int(std::min<int64_t>(kStrip, columns - c)), m,
                                          p.q_t + (e * K + k + c) * N + first, N);
        }
      }
    }
  });
}

QuantizeBlockwiseParams checked_tokens(const char* op, const Tensor& x, bool pow2_scale) {
  const InType in = check_tokens(op, "x", x);
  return of_tokens(x, in, x.sizes[0], pow2_scale);
}
BlockwiseOutputs quantize(const Call& call, QuantizeBlockwiseParams& p, const Tensor& x, std::optional<int32_t> dtype,
                          bool rowwise, bool columnwise) {
  p.out = call.out_type(dtype);
  return quantize_tokens(call, p, rowwise, columnwise, x.on_gpu(), [&](auto in) {
    return TokenRows<typename decltype(in)::Bits>{x.as<typename decltype(in)::Bits>(), x.strides[0]};
  });
}

}  // namespace

Results<2> quantize_1x128_op(const Tensor& x, std::optional<int32_t> dtype, bool pow2_scale) {
  constexpr const char* kOp = "quantize_1x128";
  QuantizeBlockwiseParams p = checked_tokens(kOp, x, pow2_scale);
  BlockwiseOutputs o = quantize(Call(kOp, "x", x), p, x, dtype, true, false);
  return results(o.q, o.scale);
}

Results<3> quantize_128x1_op(const Tensor& x, const Tensor& offs, int64_t align, std::optional<int32_t> dtype,
                             bool pow2_scale, bool transpose) {
  constexpr const char* kOp = "quantize_128x1";
  QuantizeBlockwiseParams p = checked_tokens(kOp, x, pow2_scale);
  group(kOp, p, "x", x, offs, align, transpose);
  BlockwiseOutputs o = quantize(Call(kOp, "x", x), p, x, dtype, false, true);
  return results(o.q_t, o.scale_t, o.padded_offs);
}

Results<5> quantize_1x128_128x1_op(const Tensor& x, const Tensor& offs, int64_t align, std::optional<int32_t> dtype,
                                   bool pow2_scale, bool transpose) {
  constexpr const char* kOp = "quantize_1x128_128x1";
  QuantizeBlockwiseParams p = checked_tokens(kOp, x, pow2_scale);
  group(kOp, p, "x", x, offs, align, transpose);
  BlockwiseOutputs o = quantize(Call(kOp, "x", x), p, x, dtype, true, true);
  return results(o.q, o.scale, o.q_t, o.scale_t, o.padded_offs);
}

Results<3> quantize_128x128_op(const Tensor& w, std::optional<int32_t> dtype, bool pow2_scale) {
  constexpr const char* kOp = "quantize_128x128";
  QuantizeBlockwiseParams p = {};
  p.in = check_experts(kOp, "w", w);
  p.x = w.data;
  p.E = w.sizes[0];
  p.rows = w.sizes[1];
  p.K = w.sizes[2];
  p.group_stride = w.strides[0];
  p.row_stride = w.strides[1];
  p.positions = p.rows;
  p.align = 1;
  p.transpose = true;
  p.pow2_scale = pow2_scale;
  const Call call(kOp, "w", w);
  p.out = call.out_type(dtype);
  Handle q = call.empty({p.E, p.rows, p.K}, p.out), q_t = call.empty({p.E, p.K, p.rows}, p.out);
  Handle scale = call.empty({p.E, ceil_div<int64_t>(p.rows, kBlock), ceil_div<int64_t>(p.K, kBlock)}, kFloat32);
  p.q = data<uint8_t>(q);
  p.q_t = data<uint8_t>(q_t);
  p.scale = data<float>(scale);
#if defined(MOE_FP8_GPU)
  if (w.on_gpu()) {
    call.check(quantize_128x128(p, call.stream()));
    return results(q, q_t, scale);
  }
#endif
  dispatch(p.in, p.out, [&](auto in_tag, auto out_tag) {
    loop_128x128<decltype(in_tag), decltype(out_tag)::value>(p);
    return 0;
  });
  return results(q, q_t, scale);
}

}  // namespace moe_fp8

MOE_FP8_REGISTER(quantize_1x128)
MOE_FP8_REGISTER(quantize_128x1)
MOE_FP8_REGISTER(quantize_1x128_128x1)
MOE_FP8_REGISTER(quantize_128x128)
