// The table of contents of torch.ops.moe_fp8. Implementations register themselves in ops/<family>.cpp. Shapes, units
// and errors are documented in moe_fp8_ext/ops/<family>.py.
//
// Arguments that Python's wrappers take by keyword are positional here, because torch takes microseconds to parse
// keywords. Sizes are SymInt, because torch.compile takes an int for a constant and compiles again for another one.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(MOE_FP8_NAMESPACE, m) {  // moe_fp8, unless CMake sets another name
  // Quantizers. None means the format's usual align and rounding, and the device's own dtype.
  m.def(
      "quantize_rows(Tensor x, str format, Tensor? offs=None, Tensor? indices=None, SymInt? top_k=None,"
      " ScalarType? dtype=None, str? rounding=None) -> (Tensor q, Tensor scale)");
  m.def(
      "quantize_tokens(Tensor x, str format, Tensor offs, Tensor? indices=None, SymInt? top_k=None, int? align=None,"
      " ScalarType? dtype=None, str? rounding=None, str amax='group')"
      " -> (Tensor q_t, Tensor scale_t, Tensor padded_offs)");
  m.def(
      "quantize_both(Tensor x, str format, Tensor offs, Tensor? indices=None, SymInt? top_k=None, int? align=None,"
      " ScalarType? dtype=None, str? rounding=None, str amax='group')"
      " -> (Tensor q, Tensor scale, Tensor q_t, Tensor scale_t, Tensor padded_offs)");
  m.def(
      "quantize_weight(Tensor w, str format, ScalarType? dtype=None, str? rounding=None, str directions='both')"
      " -> (Tensor q, Tensor scale, Tensor q_t, Tensor scale_t)");
  // A weight in square blocks has the same bytes in both directions.
  m.def("transpose_weight(Tensor q) -> Tensor");
  m.def(
      "dequantize(Tensor q, Tensor scale, str format, str along='rows', Tensor? offs=None,"
      " ScalarType? out_dtype=None) -> Tensor");

  // The blocked (128x4) layout of scales. groups: None; 'rows' or 'columns', which offs divide; or 'experts' [E, R, C].
  // starts is [E] for rows and columns, else [0].
  m.def("swizzle_scales(Tensor scale, str? groups=None, Tensor? offs=None) -> (Tensor blocked, Tensor starts)");
  m.def(
      "unswizzle_scales(Tensor blocked, SymInt rows, SymInt cols, str? groups=None, Tensor? offs=None) -> Tensor");
  // Scales of 'blockwise' that are powers of two, as the scales of 'mxfp8' for the same values.
  m.def("expand_scales(Tensor q, Tensor scale, str along='rows', Tensor? offs=None) -> Tensor");

  // Activations of experts, by name. Gates and ups are the halves of h, or interleaved. An fp8 h comes with its scales
  // along rows and their format. With indices, scores are by slot, else by row.
  m.def("activate(Tensor h, str activation, bool interleaved=False) -> Tensor");
  m.def(
      "quantize_activated(Tensor h, str activation, str format, Tensor? bias=None, Tensor? offs=None,"
      " bool interleaved=False, bool keep_h=True, ScalarType? dtype=None, str? rounding=None)"
      " -> (Tensor q, Tensor scale, Tensor h_q, Tensor h_scale)");
  m.def("add_bias(Tensor x, Tensor bias, Tensor offs) -> Tensor");
  m.def("sum_groups(Tensor x, Tensor offs, Tensor? scores=None, Tensor? indices=None, SymInt? top_k=None) -> Tensor");
  m.def(
      "activate_backward(Tensor grad, Tensor h, str activation, Tensor? scores=None, Tensor? h_scale=None,"
      " str? format=None, Tensor? indices=None, bool interleaved=False)"
      " -> (Tensor grad_h, Tensor a, Tensor grad_scores)");
  m.def(
      "quantize_activated_backward(Tensor grad, Tensor h, str activation, str format, Tensor offs, Tensor? scores=None,"
      " Tensor? h_scale=None, Tensor? indices=None, bool interleaved=False, int? align=None, ScalarType? dtype=None,"
      " ScalarType? grad_dtype=None, str? rounding=None, str amax='group', bool sum_grad_h=False)"
      " -> (Tensor q, Tensor scale, Tensor q_t, Tensor scale_t, Tensor a_q_t, Tensor a_scale_t, Tensor padded_offs,"
      " Tensor grad_scores, Tensor grad_bias)");
  m.def(
      "quantize_activated_backward_rows(Tensor grad, Tensor h, str activation, str format, Tensor offs,"
      " Tensor? scores=None, Tensor? h_scale=None, Tensor? indices=None, bool interleaved=False,"
      " bool keep_grad_h=False, bool keep_a=False, ScalarType? dtype=None, str? rounding=None)"
      " -> (Tensor q, Tensor scale, Tensor grad_h, Tensor a, Tensor grad_scores)");

  // A router's choice. Logits are float32. The bias moves the choice, and no score.
  m.def(
      "choose_experts(Tensor logits, SymInt top_k, Tensor? bias=None, str scoring='softmax', bool normalize=True,"
      " float scaling_factor=1.0, SymInt num_groups=1, SymInt top_groups=1, str group_score='top2_sum',"
      " Tensor? given_ids=None)"
      " -> (Tensor topk_ids, Tensor topk_scores, Tensor topk_logits)");
  m.def(
      "choose_experts_backward(Tensor grad, Tensor logits, Tensor topk_ids, SymInt? num_experts=None,"
      " str scoring='softmax', bool normalize=True, float scaling_factor=1.0, int parts=1) -> Tensor");

  // Moves of tokens.
  m.def("sort_tokens(Tensor topk_ids, SymInt num_experts) -> (Tensor permutation, Tensor offs, Tensor inverse)");
  m.def("tokens_by_rank(Tensor topk_ids, SymInt num_experts, SymInt num_ranks) -> (Tensor by_rank, Tensor counts)");
  m.def(
      "permute_indices(Tensor tokens_per_rank_expert, SymInt num_local_experts, SymInt num_ranks, SymInt num_tokens,"
      " int align=16, bool align_empty=False) -> (Tensor indices, Tensor padded_offs, Tensor tokens_per_expert)");
  m.def("permute_pad(Tensor x, Tensor indices, SymInt top_k) -> Tensor");
  m.def(
      "permute_quantized(Tensor q, Tensor scale, str format, Tensor indices, SymInt top_k, Tensor? offs=None)"
      " -> (Tensor q, Tensor scale)");
  m.def(
      "pack_tokens(Tensor x, Tensor? topk_ids, Tensor? topk_scores, Tensor? scale, Tensor indices, SymInt top_k,"
      " SymInt num_experts) -> Tensor");
  m.def(
      "quantize_and_pack(Tensor x, Tensor? topk_ids, Tensor? topk_scores, str format, Tensor indices, Tensor inverse,"
      " SymInt num_experts, ScalarType? dtype=None, str? rounding=None) -> Tensor");
  m.def("unpermute(Tensor y, Tensor indices, SymInt top_k, SymInt num_tokens) -> Tensor");
  m.def("combine(Tensor y, Tensor inverse, Tensor? topk_scores=None) -> Tensor");
  m.def(
      "combine_backward(Tensor grad, Tensor? y, Tensor? topk_scores, Tensor inverse, SymInt num_rows,"
      " bool keep_grad_y=True) -> (Tensor grad_y, Tensor grad_scores)");
  // Products of tokens with factors of a low rank. With indices, scores are by slot, else by row.
  m.def(
      "narrow_tokens(Tensor x, Tensor m, Tensor offs, Tensor? x_scale=None, str? format=None, Tensor? indices=None,"
      " SymInt? top_k=None) -> Tensor");
  m.def(
      "outer_tokens(Tensor u, Tensor x, Tensor offs, Tensor? scores=None, Tensor? x_scale=None, str? format=None,"
      " Tensor? indices=None, SymInt? top_k=None, ScalarType? out_dtype=None) -> Tensor");
  // A factor of adapters [E, R, C] or [R, C] in another type, another order of dimensions and other sizes.
  m.def(
      "cast_factor(Tensor m, SymInt rows, SymInt cols, str order, ScalarType dtype, SymInt? num_experts=None,"
      " float scaling=1.0) -> Tensor");
  m.def(
      "pad_token_groups(Tensor x, Tensor offs, int align=16)"
      " -> (Tensor x_padded, Tensor padded_starts, Tensor padded_offs)");
  m.def("pad_token_groups_to(Tensor x, Tensor offs, Tensor padded_starts, SymInt num_padded) -> Tensor");
  m.def("unpad_token_groups(Tensor y, Tensor offs, Tensor padded_starts, SymInt num_tokens) -> Tensor");

  // The product of two quantized operands. In 2D x 3D, rows of a may be taken by index. In 2D x 2D, the caller promises
  // that all offs are multiples of align, and out may lie transposed. With a rounding, the caller promises that both
  // scales have it. A 2D x 3D product may have a low-rank term.
  m.def(
      "scaled_grouped_mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, str format, Tensor offs,"
      " Tensor? indices=None, SymInt? top_k=None, int align=1, ScalarType? out_dtype=None, bool use_fast_accum=True,"
      " str? rounding=None, bool out_transposed=False, Tensor? low_rank_a=None, Tensor? low_rank_b=None) -> Tensor");
  // The 2D x 2D product, added to the contents of total. It is a separate op, because results, writes and treatment
  // in graphs would otherwise depend on an argument.
  m.def(
      "add_scaled_grouped_mm(Tensor(a!) total, Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, str format,"
      " Tensor offs, int align=1, bool use_fast_accum=True, str? rounding=None) -> ()");
}
