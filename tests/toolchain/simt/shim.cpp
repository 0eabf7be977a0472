// The launch functions of the kernels as C functions, for ctypes. The GEMM's are in shim_gemm.cpp.
#include "shim.h"

#include "activations/activations.h"
#include "activations/forward/add_bias.h"
#include "activations/forward/quantize_activated.h"
#include "activations/backward/quantize_activated_backward.h"
#include "activations/backward/sum_groups.h"
#include "gemm/scaled_grouped_mm.h"
#include "low_rank/cast_factor.h"
#include "low_rank/tokens.h"
#include "quantize/quantize.h"
#include "quantize/transpose_weight.h"
#include "scales/dequantize.h"
#include "scales/expand_scales.h"
#include "scales/swizzle_scales.h"
#include "tokens/choose_experts.h"
#include "tokens/combine.h"
#include "tokens/copy_rows.h"
#include "tokens/invert.h"
#include "tokens/permute.h"
#include "tokens/permute_quantized.h"
#include "tokens/quantize_and_pack.h"
#include "tokens/sort_tokens.h"
#include "tokens/token_groups.h"
#include "tokens/tokens_by_rank.h"

// Takes rows by index if there is an index.
extern "C" const char* simt_quantize(const void* x, int in, int64_t row_stride, int64_t group_stride, const int* index,
                                     int64_t M, int64_t top_k, const int* offs, int64_t E, int64_t rows, int64_t K,
                                     bool weight, int format, int rounding, int out, bool along_rows,
                                     bool along_tokens, uint8_t* q, void* scale, uint8_t* q_t, void* scale_t,
                                     int* padded_offs, int64_t positions, int align, int* (*scratch)(int64_t words),
                                     int amax) {
  QuantizeParams p = {
      .x = x, .in = InType(in), .row_stride = row_stride, .group_stride = group_stride, .index = {}, .offs = offs,
      .E = E, .rows = rows, .K = K, .weight = weight, .x_rows = M, .format = FormatId(format),
      .rounding = Rounding(rounding), .out = Fp8Type(out), .amax = Amax(amax), .along_rows = along_rows,
      .along_tokens = along_tokens, .q = q, .scale = scale, .q_t = q_t, .scale_t = scale_t,
      .padded_offs = padded_offs, .positions = positions, .align = align, .scratch = nullptr};
  if (const int64_t words = scratch_words(p)) p.scratch = scratch(words);
  if (index) p.index = RowIndex(index, M, top_k);
  return outcome(quantize(p, nullptr));
}

extern "C" const char* simt_transpose_weight(const uint8_t* q, uint8_t* q_t, int64_t E, int64_t N, int64_t K,
                                             int64_t expert_stride, int64_t row_stride) {
  return outcome(transpose_weight({q, q_t, E, N, K, expert_stride, row_stride}, nullptr));
}

extern "C" const char* simt_dequantize(const uint8_t* q, int type, int64_t E, int64_t rows, int64_t K,
                                       int64_t group_stride, int64_t row_stride, const Scales* scale, const int* offs,
                                       int num_groups, int groups, int out_type, void* out) {
  return outcome(dequantize(
      {.q = q, .scale = scale->get(), .offs = offs, .out = out, .E = E, .rows = rows, .K = K,
       .group_stride = group_stride, .row_stride = row_stride, .num_groups = num_groups, .groups = Groups(groups),
       .type = Fp8Type(type), .out_type = InType(out_type)}, nullptr));
}

extern "C" const char* simt_activate(const void* h, void* a, int64_t P, int64_t F, int64_t h_stride, int in,
                                     int activation, bool interleaved) {
  const GateRows rows = {.h = h, .stride = h_stride, .F = F, .in = InType(in), .fp8 = {}, .scale = {},
                         .interleaved = interleaved};
  return outcome(activate({.h = rows, .a = a, .P = P, .activation = Activation(activation)}, nullptr));
}

extern "C" const char* simt_add_bias(const void* x, const void* bias, const int* offs, int64_t E, int64_t rows,
                                     int64_t N, int64_t x_stride, int in, void* out) {
  return outcome(add_bias({x, {bias, offs, int(E)}, out, rows, N, x_stride, InType(in)}, nullptr));
}

extern "C" const char* simt_sum_groups(const void* x, const int* offs, int64_t E, int64_t rows, int64_t N,
                                       int64_t x_stride, int in, const float* scores, const int* index,
                                       int64_t x_rows, int64_t top_k, float* out, int* (*scratch)(int64_t words)) {
  SumGroupsParams p = {x, offs, int(E), out, nullptr, rows, N, x_stride, InType(in), {}, scores};
  if (index) p.index = RowIndex(index, x_rows, top_k);
  p.scratch = reinterpret_cast<float*>(scratch(partial_words(p)));
  return outcome(sum_groups(p, nullptr));
}

extern "C" const char* simt_quantize_activated(const void* h, int64_t P, int64_t F, int64_t columns, int64_t h_stride,
                                               int activation, bool interleaved, int format, int rounding, int out,
                                               uint8_t* q, void* scale, int64_t h_rows, uint8_t* h_q, void* h_scale,
                                               const int* offs, int64_t E, int* (*scratch)(int64_t words),
                                               const void* bias) {
  QuantizeParams of_a = {};
  of_a.rows = P;
  of_a.K = F;
  of_a.format = FormatId(format);
  of_a.rounding = Rounding(rounding);
  of_a.out = Fp8Type(out);
  QuantizeParams of_h = of_a;
  of_a.q = q;
  of_a.scale = scale;
  of_h.rows = h_rows;
  of_h.K = columns;
  of_h.q = h_q;
  of_h.scale = h_scale;
  const GateRows rows = {.h = h, .stride = h_stride, .F = F, .in = InType::kBF16, .fp8 = {}, .scale = {},
                         .interleaved = interleaved};
  of_a.offs = offs;
  of_a.E = E;
  if (const int64_t words = scratch_words(of_a)) of_a.scratch = scratch(words);
  const QuantizeActivatedParams p = {rows, Activation(activation), of_a, of_h, {bias, offs, int(E)}};
  if (!can_quantize_activated(p)) return "no kernel takes these rows";
  return outcome(quantize_activated(p, nullptr));
}

static RowIndex slots_of(const int* indices, int64_t slots) {  // slots of -1: rows are slots
  static const int kNoRows[1] = {};
  return slots < 0 ? RowIndex() : RowIndex(indices ? indices : kNoRows, slots, 1);
}

extern "C" const char* simt_activate_backward(const void* h, const void* da, const int* indices, int64_t slots,
                                              const float* scores, void* dh, void* a, float* dscores, int64_t P,
                                              int64_t F, int64_t h_stride, int64_t da_stride, int in, int fp8,
                                              const Scales* scale, int activation, bool interleaved) {
  const GateRows rows = {.h = h, .stride = h_stride, .F = F, .in = InType(in), .fp8 = Fp8Type(fp8),
                         .scale = scale ? scale->get() : OperandScales{}, .interleaved = interleaved};
  return outcome(activate_backward(
      {.h = rows, .da = da, .slots = slots_of(indices, slots), .scores = scores, .dh = dh, .a = a,
       .dscores = dscores, .P = P, .da_stride = da_stride, .in = InType(in), .activation = Activation(activation)},
      nullptr));
}

extern "C" const char* simt_quantize_activated_backward(
    const void* h, const void* da, const int* indices, int64_t slots, const float* scores, int64_t P, int64_t F,
    int64_t columns, int64_t h_stride, int64_t da_stride, int fp8, const Scales* scale, int activation,
    bool interleaved, const int* offs, int64_t E, int64_t positions, int align, int format, int rounding, int out,
    int out_of_dh, int amax, uint8_t* q, void* q_scale, uint8_t* q_t, void* scale_t, uint8_t* a_q_t, void* a_scale_t,
    int* padded_offs, float* dscores, float* dh_sums, int* (*scratch)(int64_t words)) {
  const GateRows rows = {.h = h, .stride = h_stride, .F = F, .in = InType::kBF16, .fp8 = Fp8Type(fp8),
                         .scale = scale ? scale->get() : OperandScales{}, .interleaved = interleaved};
  QuantizeParams of_a = {};
  of_a.in = InType::kBF16;
  of_a.rows = P;
  of_a.offs = offs;
  of_a.E = E;
  of_a.positions = positions;
  of_a.align = align;
  of_a.format = FormatId(format);
  of_a.rounding = Rounding(rounding);
  of_a.padded_offs = padded_offs;
  of_a.along_tokens = true;
  QuantizeParams of_dh = of_a;
  of_dh.along_rows = true;
  of_a.amax = Amax(amax);
  of_a.out = Fp8Type(out);
  of_a.K = F;
  of_a.q_t = a_q_t;
  of_a.scale_t = a_scale_t;
  of_dh.out = Fp8Type(out_of_dh);
  of_dh.K = columns;
  of_dh.q = q;
  of_dh.scale = q_scale;
  of_dh.q_t = q_t;
  of_dh.scale_t = scale_t;
  QuantizeActivatedBackwardParams p = {
      {.h = rows, .da = da, .slots = slots_of(indices, slots), .scores = scores, .dh = nullptr, .a = nullptr,
       .dscores = dscores, .P = P, .da_stride = da_stride, .in = InType::kBF16, .activation = Activation(activation)},
      of_dh, of_a, dh_sums, nullptr};
  if (!can_quantize_activated_backward(p)) return "no kernels take these rows";
  p.scratch = scratch(scratch_words(p));
  return outcome(quantize_activated_backward(p, nullptr));
}

extern "C" const char* simt_quantize_activated_backward_rows(
    const void* h, const void* da, const int* indices, int64_t slots, const float* scores, int64_t P, int64_t F,
    int64_t columns, int64_t h_stride, int64_t da_stride, int fp8, const Scales* scale, int activation,
    bool interleaved, const int* offs, int64_t E, int format, int rounding, int out, uint8_t* q, void* q_scale,
    void* dh, void* a, float* dscores, int* (*scratch)(int64_t words)) {
  const GateRows rows = {.h = h, .stride = h_stride, .F = F, .in = InType::kBF16, .fp8 = Fp8Type(fp8),
                         .scale = scale->get(), .interleaved = interleaved};
  QuantizeParams of_dh = {};
  of_dh.in = InType::kBF16;
  of_dh.rows = P;
  of_dh.offs = offs;
  of_dh.E = E;
  of_dh.K = columns;
  of_dh.format = FormatId(format);
  of_dh.rounding = Rounding(rounding);
  of_dh.out = Fp8Type(out);
  of_dh.along_rows = true;
  of_dh.q = q;
  of_dh.scale = q_scale;
  QuantizeActivatedBackwardParams p = {
      {.h = rows, .da = da, .slots = slots_of(indices, slots), .scores = scores, .dh = dh, .a = a,
       .dscores = dscores, .P = P, .da_stride = da_stride, .in = InType::kBF16, .activation = Activation(activation)},
      of_dh, {}, nullptr, nullptr};
  if (!can_quantize_activated_backward(p)) return "no kernels take these rows";
  p.scratch = scratch(scratch_words(p));
  return outcome(quantize_activated_backward(p, nullptr));
}

extern "C" const char* simt_prepare_offs(const int* offs, int* safe_offs, int E, int limit, int multiple) {
  return outcome(prepare_offs(offs, safe_offs, E, limit, multiple, nullptr));
}

extern "C" const char* simt_zero_rows(void* out, const int* first, int64_t rows, int64_t row_bytes) {
  return outcome(zero_rows(out, first, rows, row_bytes, nullptr));
}

extern "C" const char* simt_zero_empty_groups(void* out, const int* ends, int E, int64_t group_bytes) {
  return outcome(zero_empty_groups(out, ends, E, group_bytes, nullptr));
}

extern "C" const char* simt_add_low_rank(void* out, bool out_float32, int64_t M, int64_t N, const uint16_t* a,
                                         const uint16_t* b, int rank, const int* offs, int64_t E) {
  ScaledGroupedMmParams p = {};
  p.out = out, p.out_float32 = out_float32, p.M = M, p.N = N, p.offs = offs, p.E = E;
  p.low_rank = {a, b, rank, rank, N * rank, rank};
  return outcome(add_low_rank(p, nullptr));
}
extern "C" const char* simt_add_groups(void* out, bool out_float32, const void* product, bool product_float32,
                                       const int* ends, int E, int64_t group_size) {
  return outcome(add_groups(out, out_float32, product, product_float32, ends, E, group_size, nullptr));
}

extern "C" const char* simt_copy_rows(const void* from, int64_t from_rows, int64_t from_stride, void* to, int64_t rows,
                                      int64_t row_bytes, const int* index, int64_t top_k) {
  return outcome(copy_rows({from, to, RowIndex(index, from_rows, top_k), rows, row_bytes, from_stride}, nullptr));
}

static PackTokensParams packed(void* to, int64_t rows, RowIndex source, int num_experts, const int64_t* columns,
                               int num_columns) {
  PackTokensParams p = {to, source, nullptr, rows};
  p.num_experts = num_experts;
  for (const int64_t* c = columns; c < columns + 6 * num_columns; c += 6)
    p.add({reinterpret_cast<const void*>(c[0]), c[1], c[2], c[3], c[4], c[5] != 0});
  p.end_row();
  return p;
}

extern "C" const char* simt_pack_tokens(void* to, int64_t rows, int64_t from_rows, const int* index, int64_t top_k,
                                        int num_experts, const int64_t* columns, int num_columns) {
  return outcome(pack_tokens(packed(to, rows, RowIndex(index, from_rows, top_k), num_experts, columns, num_columns),
                             nullptr));
}

extern "C" const char* simt_quantize_and_pack(const void* x, int in, int64_t M, int64_t K, int64_t row_stride,
                                              int format, int rounding, int out, const int* inverse, int64_t top_k,
                                              const int* index, void* to, int64_t rows, int num_experts,
                                              const int64_t* columns, int num_columns) {
  QuantizeAndPackParams p = {};
  p.quantize_x = {.x = x, .in = InType(in), .row_stride = row_stride, .rows = M, .K = K, .format = FormatId(format),
                  .rounding = Rounding(rounding), .out = Fp8Type(out), .along_rows = true};
  p.rows = packed(to, rows, RowIndex(index, top_k ? M : 0, top_k ? top_k : 1), num_experts, columns, num_columns);
  p.rows.inverse = inverse;
  p.top_k = top_k;
  if (!can_quantize_and_pack(p)) return "not of this kernel";
  return outcome(quantize_and_pack(p, nullptr));
}

extern "C" const char* simt_permute_quantized(const void* q, int64_t q_stride, void* out, int64_t K, const void* scale,
                                              void* out_scale, const int* index, int64_t from_rows, int64_t top_k,
                                              const int* offs, int64_t E, int64_t P, int64_t words, bool blocked,
                                              int64_t row_stride, int64_t column_stride) {
  const RowIndex source(index, from_rows, top_k);
  return outcome(permute_quantized(
      {q, out, source, P, K, q_stride},
      {scale, out_scale, source, offs, E, P, words, blocked, row_stride, column_stride}, nullptr));
}

extern "C" const char* simt_token_groups(bool pad, const int* offs, const int* starts, int* padded_starts,
                                         int* padded_offs, int* source, int64_t E, int64_t M, int64_t P, int align) {
  const TokenGroupsParams p = {offs, starts, padded_starts, padded_offs, source, E, M, P, align};
  return outcome(pad ? pad_sources(p, nullptr) : unpad_sources(p, nullptr));
}

extern "C" const char* simt_swizzle_scales(bool back, const uint8_t* from, uint8_t* to, const int* offs, int* starts,
                                           int64_t E, int64_t R, int64_t C, int64_t row_stride, int64_t group_stride,
                                           int groups) {
  const SwizzleScalesParams p = {from, to, offs, starts, E, R, C, row_stride, group_stride, Groups(groups)};
  return outcome(back ? unswizzle_scales(p, nullptr) : swizzle_scales(p, nullptr));
}

extern "C" const char* simt_expand_scales(int64_t E, int64_t R, int64_t K, const Scales* scale, const int* offs,
                                          int groups, uint8_t* out) {
  return outcome(expand_scales({scale->get(), offs, out, E, R, K, Groups(groups)}, nullptr));
}

extern "C" const char* simt_permute_indices(const void* counts, bool counts_int64, int* indices, int* padded_offs,
                                            int* tokens_per_expert, int64_t R, int64_t E, int64_t M, int64_t P,
                                            int align, int empty) {
  return outcome(permute_indices({counts, counts_int64, indices, padded_offs, tokens_per_expert, R, E, M, P, align,
                                  empty}, nullptr));
}

extern "C" const char* simt_invert_indices(const int* indices, int64_t count, int* inverse, int64_t size) {
  return outcome(invert_indices(indices, count, inverse, size, nullptr));
}

extern "C" int64_t simt_sort_tokens_blocks(int64_t N) { return sort_tokens_blocks(N); }

extern "C" const char* simt_sort_tokens(const void* ids, bool is_int64, int64_t N, int64_t top_k, int64_t row_stride,
                                        int E, int* permutation, int* offs, int* inverse, int* counts) {
  const SortTokensParams p = {{ids, row_stride, is_int64}, permutation, offs, inverse, counts, N, top_k, E};
  return outcome(sort_tokens(p, nullptr));
}

extern "C" const char* simt_tokens_by_rank(const void* ids, bool is_int64, int64_t T, int64_t top_k, int64_t row_stride,
                                           int R, int L, int* by_rank, int64_t* counts) {
  const TokensByRankParams p = {{ids, row_stride, is_int64}, by_rank, counts, T, top_k, R, L};
  return outcome(tokens_by_rank(p, nullptr));
}

extern "C" const char* simt_choose_experts(const float* logits, const float* bias, int64_t* ids, float* scores,
                                           float* topk_logits, int64_t T, int64_t stride, int E, int top_k,
                                           int num_groups, int top_groups, int group_score, const void* given_ids,
                                           int64_t given_stride, bool is_int64, int scoring, bool normalize,
                                           double factor) {
  return outcome(choose_experts({logits, bias, ids, scores, topk_logits, T, stride, E, top_k, num_groups, top_groups,
                                 GroupScore(group_score), {given_ids, given_stride, is_int64}, Scoring(scoring),
                                 normalize, float(factor)}, nullptr));
}

extern "C" const char* simt_choose_experts_backward(const float* grad, const float* logits, const void* ids,
                                                    bool is_int64, void* dlogits, int64_t T, int64_t top_k, int E,
                                                    int64_t grad_stride, int64_t stride, int64_t ids_stride,
                                                    int scoring, bool normalize, double factor, bool of_chosen,
                                                    int parts) {
  return outcome(choose_experts_backward({grad, logits, {ids, ids_stride, is_int64}, dlogits, T, grad_stride, stride,
                                          E, top_k, Scoring(scoring), normalize, of_chosen, float(factor), parts},
                                         nullptr));
}

extern "C" const char* simt_combine(const void* y, const int* inverse, const void* scores, void* out, int64_t T,
                                    int64_t top_k, int64_t P, int64_t K, int64_t y_stride, int in, bool scores_f32) {
  const CombineParams p = {y, inverse, scores, out, T, top_k, P, K, y_stride, InType(in), scores_f32};
  return outcome(combine(p, nullptr));
}

// Rows of x in bfloat16, or in FP8 with scales.
static TokenRows token_rows(const void* x, int64_t stride, int fp8, const Scales* scale) {
  return scale ? TokenRows{x, stride, true, Fp8Type(fp8), scale->get()} : TokenRows{x, stride};
}

// Takes rows by index if there is an index.
extern "C" const char* simt_narrow_tokens(const void* x, int64_t T, int64_t x_stride, int fp8, const Scales* scale,
                                          const uint16_t* m, int64_t E, int64_t R, int64_t W, int64_t m_expert_stride,
                                          int64_t m_stride, const int* offs, const int* indices, int64_t top_k,
                                          uint16_t* out, int64_t P) {
  const RowIndex source = indices ? RowIndex(indices, T, top_k) : RowIndex();
  const TokenRows rows = token_rows(x, x_stride, fp8, scale);
  return outcome(narrow_tokens({rows, m, offs, source, out, P, E, R, W, m_expert_stride, m_stride}, nullptr));
}

extern "C" const char* simt_outer_tokens(const uint16_t* u, int64_t P, int64_t R, int64_t u_stride, const void* x,
                                         int64_t T, int64_t W, int64_t x_stride, int fp8, const Scales* scale,
                                         const int* offs, int64_t E, const float* scores, const int* indices,
                                         int64_t top_k, void* out, bool is_float32) {
  const RowIndex source = indices ? RowIndex(indices, T, top_k) : RowIndex();
  const TokenRows rows = token_rows(x, x_stride, fp8, scale);
  return outcome(outer_tokens({u, rows, offs, source, scores, out, P, E, R, W, u_stride, is_float32}, nullptr));
}

extern "C" const char* simt_cast_factor(const void* m, void* out, const int64_t* dims, double scaling, int in,
                                        int out_type) {
  const auto dim = [&](int i) { return FactorDim{dims[3 * i], dims[3 * i + 1], dims[3 * i + 2]}; };
  return outcome(cast_factor({m, out, {dim(0), dim(1), dim(2)}, float(scaling), InType(in), InType(out_type)},
                             nullptr));
}

extern "C" const char* simt_combine_backward(const void* grad, const void* y, const int* inverse, const void* scores,
                                             int* slot_of, void* grad_y, void* grad_scores, int64_t T, int64_t top_k,
                                             int64_t P, int64_t K, int64_t grad_stride, int64_t y_stride, int in,
                                             bool scores_f32) {
  const CombineBackwardParams p = {grad, y, inverse, scores, slot_of, grad_y, grad_scores, T, top_k, P, K, grad_stride,
                                   y_stride, InType(in), scores_f32};
  return outcome(combine_backward(p, nullptr));
}
