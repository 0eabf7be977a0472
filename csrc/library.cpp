// The table of contents of torch.ops.moe_fp8. Implementations register themselves in ops/<op>.cpp; shapes, units and
// errors are documented in moe_fp8_ext/ops/<op>.py.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(moe_fp8, m) {
  m.def("quantize_rowwise(Tensor x, ScalarType? dtype=None, bool pow2_scale=False) -> (Tensor q, Tensor scale)");
  m.def(
      "quantize_colwise(Tensor x, Tensor offs, int align=16, ScalarType? dtype=None, bool pow2_scale=False)"
      " -> (Tensor q_t, Tensor scale_t, Tensor padded_offs)");
  m.def(
      "quantize_rowcol(Tensor x, Tensor offs, int align=16, ScalarType? dtype=None, bool pow2_scale=False)"
      " -> (Tensor q, Tensor scale, Tensor q_t, Tensor scale_t, Tensor padded_offs)");
  m.def(
      "quantize_weight(Tensor w, ScalarType? dtype=None, bool pow2_scale=False)"
      " -> (Tensor q, Tensor scale, Tensor q_t, Tensor scale_t)");
  m.def("quantize_1x128(Tensor x, ScalarType? dtype=None, bool pow2_scale=False) -> (Tensor q, Tensor scale)");
  m.def(
      "quantize_128x1(Tensor x, Tensor offs, int align=128, ScalarType? dtype=None, bool pow2_scale=False,"
      " bool transpose=True) -> (Tensor q_t, Tensor scale_t, Tensor padded_offs)");
  m.def(
      "quantize_1x128_128x1(Tensor x, Tensor offs, int align=128, ScalarType? dtype=None, bool pow2_scale=False,"
      " bool transpose=True) -> (Tensor q, Tensor scale, Tensor q_t, Tensor scale_t, Tensor padded_offs)");
  m.def(
      "quantize_128x128(Tensor w, ScalarType? dtype=None, bool pow2_scale=False)"
      " -> (Tensor q, Tensor q_t, Tensor scale)");
  m.def(
      "quantize_mx_1x32(Tensor x, str scaling='rceil', str layout='rowmajor', Tensor? offs=None,"
      " ScalarType? dtype=None) -> (Tensor q, Tensor scale)");
  m.def(
      "quantize_mx_32x1(Tensor x, Tensor offs, str scaling='rceil', str layout='blocked', int align=32,"
      " ScalarType? dtype=None) -> (Tensor q_t, Tensor scale_t, Tensor padded_offs)");
  m.def(
      "quantize_mx_1x32_32x1(Tensor x, Tensor offs, str scaling='rceil', str layout='blocked', int align=32,"
      " ScalarType? dtype=None) -> (Tensor q, Tensor scale, Tensor q_t, Tensor scale_t, Tensor padded_offs)");
  m.def(
      "quantize_mx_weight(Tensor w, str scaling='rceil', ScalarType? dtype=None)"
      " -> (Tensor q, Tensor scale, Tensor q_t, Tensor scale_t)");
  m.def(
      "dequantize(Tensor q, Tensor scale, str layout, Tensor? offs=None, ScalarType? out_dtype=None) -> Tensor");
  m.def(
      "pad_token_groups(Tensor x, Tensor offs, int align=16)"
      " -> (Tensor x_padded, Tensor padded_starts, Tensor padded_offs)");
  m.def("pad_token_groups_to(Tensor x, Tensor offs, Tensor padded_starts, SymInt num_padded) -> Tensor");
  m.def("unpad_token_groups(Tensor y, Tensor offs, Tensor padded_starts, SymInt num_tokens) -> Tensor");
  m.def("swizzle_scales_2d(Tensor scale) -> Tensor");
  m.def("swizzle_scales_m_groups(Tensor scale, Tensor offs) -> (Tensor blocked, Tensor starts)");
  m.def("swizzle_scales_k_groups(Tensor scale, Tensor offs) -> (Tensor blocked, Tensor starts)");
  m.def("swizzle_scales_3d(Tensor scale) -> Tensor");
  m.def("unswizzle_scales_2d(Tensor blocked, SymInt rows, SymInt cols) -> Tensor");
  m.def("unswizzle_scales_m_groups(Tensor blocked, Tensor offs, SymInt rows, SymInt cols) -> Tensor");
  m.def("unswizzle_scales_k_groups(Tensor blocked, Tensor offs, SymInt rows, SymInt cols) -> Tensor");
  m.def("unswizzle_scales_3d(Tensor blocked, SymInt rows, SymInt cols) -> Tensor");
  m.def("sort_tokens(Tensor topk_ids, int num_experts) -> (Tensor permutation, Tensor offs, Tensor inverse)");
  m.def("combine(Tensor y, Tensor inverse, Tensor? topk_scores=None) -> Tensor");
  m.def(
      "combine_backward(Tensor grad, Tensor? y, Tensor inverse, Tensor? topk_scores, SymInt num_rows)"
      " -> (Tensor grad_y, Tensor grad_scores)");
  m.def(
      "permute_indices(Tensor tokens_per_rank_expert, int num_ranks, int num_local_experts, SymInt num_tokens,"
      " int align=16, bool align_empty=False) -> (Tensor indices, Tensor padded_offs, Tensor tokens_per_expert)");
  m.def("permute_pad(Tensor x, Tensor indices, int top_k=1) -> Tensor");
  m.def("unpermute(Tensor y, Tensor indices, SymInt num_tokens, int top_k=1) -> Tensor");
  m.def(
      "permute_pad_quantize_rowwise(Tensor x, Tensor indices, int top_k=1, ScalarType? dtype=None,"
      " bool pow2_scale=False) -> (Tensor q, Tensor scale)");
  m.def(
      "permute_pad_quantize_rowcol(Tensor x, Tensor indices, Tensor offs, int top_k=1, int align=16,"
      " ScalarType? dtype=None, bool pow2_scale=False)"
      " -> (Tensor q, Tensor scale, Tensor q_t, Tensor scale_t, Tensor padded_offs)");
  m.def(
      "permute_pad_quantize_1x128(Tensor x, Tensor indices, int top_k=1, ScalarType? dtype=None, bool pow2_scale=False)"
      " -> (Tensor q, Tensor scale)");
  m.def(
      "permute_pad_quantize_1x128_128x1(Tensor x, Tensor indices, Tensor offs, int top_k=1, int align=128,"
      " ScalarType? dtype=None, bool pow2_scale=False, bool transpose=True)"
      " -> (Tensor q, Tensor scale, Tensor q_t, Tensor scale_t, Tensor padded_offs)");
  m.def(
      "permute_pad_quantize_mx_1x32(Tensor x, Tensor indices, Tensor? offs=None, int top_k=1, str scaling='rceil',"
      " str layout='rowmajor', ScalarType? dtype=None) -> (Tensor q, Tensor scale)");
  m.def(
      "permute_pad_quantize_mx_1x32_32x1(Tensor x, Tensor indices, Tensor offs, int top_k=1, str scaling='rceil',"
      " str layout='blocked', int align=32, ScalarType? dtype=None)"
      " -> (Tensor q, Tensor scale, Tensor q_t, Tensor scale_t, Tensor padded_offs)");
  m.def(
      "scaled_grouped_mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor offs, ScalarType? out_dtype=None,"
      " bool use_fast_accum=True, int? block_size=None) -> Tensor");
}
