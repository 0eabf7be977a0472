#include <cmath>
#include <cstdio>
#include <locale>
#include <sstream>

#include "activations/forward/add_bias.h"
#include "activations/forward/quantize_activated.h"
#include "activations/backward/quantize_activated_backward.h"
#include "activations/backward/sum_groups.h"
#include "ops/operands.h"
#include "ops/quantize.h"

namespace moe_fp8 {
namespace {

constexpr const char *kActivate = "activate", *kAddBias = "add_bias", *kSumGroups = "sum_groups",
                     *kQuantize = "quantize_activated",
                     *kBackward = "activate_backward", *kQuantizeBackward = "quantize_activated_backward",
                     *kQuantizeBackwardRows = "quantize_activated_backward_rows";

// An activation as a call names it: by a name of kActivations, or as "clamped_swiglu(limit, alpha, offset)".
struct Gate {
  std::string_view name;
  Activation activation;
  Clamp clamp = {};
};
Gate check_activation(const char* op, std::string_view name) {
  constexpr std::string_view kClamped = "clamped_swiglu(";
  if (name.substr(0, kClamped.size()) == kClamped) {
    std::istringstream text(std::string(name.substr(kClamped.size())));
    text.imbue(std::locale::classic());  // a decimal point, whatever the program's locale
    double limit = 0, alpha = 0, offset = 0;  // rounded twice, as Python rounds them
    char comma = 0, second_comma = 0, end = 0;
    text >> limit >> comma >> alpha >> second_comma >> offset >> end;
    const bool has_form = text && comma == ',' && second_comma == ',' && end == ')' && text.peek() == EOF;
    const Clamp clamp = {float(alpha), float(limit), float(offset)};
    const bool is_finite = std::isfinite(clamp.limit) && std::isfinite(clamp.alpha) && std::isfinite(clamp.offset);
    if (has_form && is_finite && limit > 0) return {name, Activation::kClampedSwiglu, clamp};
  }
  const auto name_of = [](int i) { return kActivations[i].name; };
  return {name, Activation(check_choice(op, "activation", name, kNumActivations, name_of))};
}
int64_t check_features(const char* op, const Tensor& h, const Gate& gate) {
  if (!is_gated(gate.activation)) return h.sizes[1];
  if (h.sizes[1] % 2)
    fail(op, ": h must have an even number of columns with activation '", gate.name, "', got ", h.sizes[1]);
  return h.sizes[1] / 2;
}

GateRows gates_of(const char* op, const Tensor& h, InType in, const Gate& gate, bool interleaved) {
  return {h.data, h.strides[0], check_features(op, h, gate), in, {}, {}, interleaved, gate.clamp};
}

// The checked bias of the rows of x, by the groups that end at offs.
GroupBias check_bias(Name arg, const Tensor& bias, const Tensor& x, const Tensor& offs) {
  check_dtype_of_like(arg, bias, x);
  check_sizes(arg, bias, {offs.sizes[0], x.sizes[1]});
  return {bias.data, ints(offs), int(offs.sizes[0])};
}

// The checked arguments of the gradient ops. The scales of h are checked with their format.
ActivateBackwardParams check_gradients(const char* op, const Tensor& grad, const Tensor& h, std::string_view activation,
                                       const std::optional<Tensor>& scores, const std::optional<Tensor>& h_scale,
                                       const std::optional<Tensor>& indices, bool interleaved) {
  check_dtypes({op, "h"}, h_scale ? Dtypes::kFp8 : Dtypes::kInput, h.dtype);
  if (!h_scale) check_dtype_of_like({op, "grad"}, grad, h);
  ActivateBackwardParams p = {};
  const Gate gate = check_activation(op, activation);
  p.activation = gate.activation;
  p.P = h.sizes[0];
  p.in = in_type(grad);
  p.h = gates_of(op, h, p.in, gate, interleaved);
  check_sizes({op, "grad"}, grad, {p.P, p.h.F});
  if (scores && !indices) check_size({op, "scores"}, *scores, 0, p.P);
  if (indices) {
    if (!scores) fail(op, ": scores must be given with indices, got None");
    p.slots = check_indices(op, *indices, scores->sizes[0], 1);
    check_size({op, "indices"}, *indices, 0, p.P);
    validate_distinct({op, "indices"}, *indices);
  }
  if (h_scale) p.h.fp8 = fp8_type(h);
  p.da = grad.data;
  p.da_stride = grad.strides[0];
  p.scores = scores ? scores->as<float>() : nullptr;
  return p;
}
OperandScales check_h_scale(const char* op, const Tensor& h, const Tensor& h_scale, std::string_view format) {
  const Format& f = format_of(check_format(op, format));
  return scales_of_rows({op, "h_scale"}, h_scale, f, h.sizes, 1, h.sizes[0], h.sizes[1], kNoGroups);
}
// The quantizer of grad_h along rows. Sets the scales of h, which have its format.
QuantizeParams quantizer_of_gradients(const char* op, ActivateBackwardParams& gradients, const Tensor& h,
                                      const std::optional<Tensor>& h_scale, std::string_view format, const Tensor& offs,
                                      std::optional<std::string_view> rounding) {
  QuantizeParams p = {};
  p.format = check_format(op, format);
  if (h_scale) gradients.h.scale = check_h_scale(op, h, *h_scale, format);
  p.rounding = check_rounding(op, format_of(p.format), rounding);
  p.in = gradients.in;
  p.rows = gradients.P;
  p.row_stride = p.K = h.sizes[1];
  p.along_rows = true;
  validate_offs(op, offs, gradients.P);
  return p;
}
// Allocates and computes the gradients before any cast, and points p at them.
struct GradientOutputs { Handle grad_h, a; };
GradientOutputs compute_gradients(const Call& call, const Tensor& grad, const Tensor& h, ActivateBackwardParams& p) {
  GradientOutputs o = {call.empty({p.P, h.sizes[1]}, grad.dtype), call.empty({p.P, p.h.F}, grad.dtype)};
  p.dh = data(o.grad_h);
  p.a = data(o.a);
  MOE_FP8_RUN(call, activate_backward, p);
  return o;
}
void run_sum_groups(const Call& call, SumGroupsParams p) {
  Handle scratch;
  if (call.on_gpu()) {
    scratch = call.empty({partial_words(p)}, kFloat32);
    p.scratch = data<float>(scratch);
  }
  MOE_FP8_RUN(call, sum_groups, p);
}
// Quantizes x, which has been computed, into new outputs.
Outputs quantize_computed(const Call& call, QuantizeParams& p, const void* x) {
  p.x = x;
  Outputs o = outputs_of(call, p);
  run_quantize(call, p);
  return o;
}

}  // namespace

Results<1> activate_op(const Tensor& h, std::string_view activation, bool interleaved) {
  const Gate gate = check_activation(kActivate, activation);
  const GateRows gates = gates_of(kActivate, h, in_type(h), gate, interleaved);
  const Call call(kActivate, "h", h);
  Handle a = call.empty({h.sizes[0], gates.F}, h.dtype);
  const ActivateParams p = {gates, data(a), h.sizes[0], gate.activation};
  MOE_FP8_RUN(call, activate, p);
  return results(a);
}

Results<1> add_bias_op(const Tensor& x, const Tensor& bias, const Tensor& offs) {
  validate_offs(kAddBias, offs, x.sizes[0]);
  const GroupBias group_bias = check_bias({kAddBias, "bias"}, bias, x, offs);
  const Call call(kAddBias, "x", x);
  Handle out = call.empty({x.sizes[0], x.sizes[1]}, x.dtype);
  const AddBiasParams p = {x.data, group_bias, data(out), x.sizes[0], x.sizes[1], x.strides[0], in_type(x)};
  MOE_FP8_RUN(call, add_bias, p);
  return results(out);
}

Results<1> sum_groups_op(const Tensor& x, const Tensor& offs, const std::optional<Tensor>& scores,
                         const std::optional<Tensor>& indices, std::optional<int64_t> top_k) {
  const SortedRows rows = check_rows(kSumGroups, x, indices, top_k);
  validate_offs(kSumGroups, offs, rows.count);
  if (scores) check_size({kSumGroups, "scores"}, *scores, 0, rows.slots);
  const int64_t E = offs.sizes[0], N = x.sizes[1];
  check_extent(kSumGroups, "x", rows.count, E, kRowsOfPartial);
  const Call call(kSumGroups, "x", x);
  Handle out = call.empty({E, N}, kFloat32);
  run_sum_groups(call, {x.data, ints(offs), int(E), data<float>(out), nullptr, rows.count, N, x.strides[0], in_type(x),
                        rows.source, scores ? scores->as<float>() : nullptr});
  return results(out);
}

Results<4> quantize_activated_op(const Tensor& h, std::string_view activation, std::string_view format,
                                 const std::optional<Tensor>& bias, const std::optional<Tensor>& offs,
                                 bool interleaved, bool keep_h, std::optional<int32_t> dtype,
                                 std::optional<std::string_view> rounding) {
  QuantizeActivatedParams p = {};
  const Gate gate = check_activation(kQuantize, activation);
  p.activation = gate.activation;
  p.h = gates_of(kQuantize, h, in_type(h), gate, interleaved);
  QuantizeParams &a = p.quantize_a, &h_params = p.quantize_h;
  a.format = check_format(kQuantize, format);
  const Format& f = format_of(a.format);
  a.rounding = check_rounding(kQuantize, f, rounding);
  a.in = p.h.in;
  a.rows = h.sizes[0];
  if (offs) validate_offs(kQuantize, *offs, a.rows);
  if (bias && !offs) fail(kQuantize, ": offs must be given with bias, got None");
  if (bias) p.bias = check_bias({kQuantize, "bias"}, *bias, h, *offs);
  const Call call(kQuantize, "h", h);
  a.out = check_fp8(call, kQuantize, dtype);
  a.along_rows = true;
  h_params = a;  // h has no groups: only the scales of a may be grouped
  h_params.rows = keep_h ? a.rows : 0;
  h_params.K = h.sizes[1];
  h_params.x = h.data;
  h_params.row_stride = p.h.stride;
  a.row_stride = a.K = p.h.F;
  if (offs && f.blocked()) set_groups(a, kQuantize, "h", *offs, std::nullopt);

  Outputs a_outputs = outputs_of(call, a), h_outputs = outputs_of(call, h_params);
  const auto all_results = [&] { return results(a_outputs.q, a_outputs.scale, h_outputs.q, h_outputs.scale); };
  if constexpr (kGpuBuild) {
    if (call.on_gpu() && can_quantize_activated(p)) {
      const Handle scratch = scratch_of(call, a);
      call.check(quantize_activated(p, call.stream()));
      return all_results();
    }
  }
  Handle with_bias;
  if (bias) {
    with_bias = call.empty({a.rows, h.sizes[1]}, h.dtype);
    const AddBiasParams add_params = {h.data, p.bias, data(with_bias), a.rows, h.sizes[1], h.strides[0], p.h.in};
    MOE_FP8_RUN(call, add_bias, add_params);
    p.h.h = h_params.x = data(with_bias);
    p.h.stride = h_params.row_stride = h.sizes[1];
  }
  const Handle values = call.empty({a.rows, a.K}, h.dtype);
  const ActivateParams activate_params = {p.h, data(values), a.rows, p.activation};
  MOE_FP8_RUN(call, activate, activate_params);
  a.x = data(values);
  run_quantize(call, a);
  run_quantize(call, h_params);
  return all_results();
}

Results<3> activate_backward_op(const Tensor& grad, const Tensor& h, std::string_view activation,
                                const std::optional<Tensor>& scores, const std::optional<Tensor>& h_scale,
                                const std::optional<std::string_view>& format, const std::optional<Tensor>& indices,
                                bool interleaved) {
  check_both_or_none(kBackward, "h_scale", h_scale.has_value(), "format", format.has_value());
  ActivateBackwardParams p = check_gradients(kBackward, grad, h, activation, scores, h_scale, indices, interleaved);
  if (h_scale) p.h.scale = check_h_scale(kBackward, h, *h_scale, *format);
  const Call call(kBackward, "h", h);
  Handle grad_scores = call.empty({p.num_slots()}, kFloat32);
  p.dscores = data<float>(grad_scores);
  GradientOutputs o = compute_gradients(call, grad, h, p);
  return results(o.grad_h, o.a, grad_scores);
}

Results<9> quantize_activated_backward_op(const Tensor& grad, const Tensor& h, std::string_view activation,
                                          std::string_view format, const Tensor& offs,
                                          const std::optional<Tensor>& scores, const std::optional<Tensor>& h_scale,
                                          const std::optional<Tensor>& indices, bool interleaved,
                                          std::optional<int64_t> align, std::optional<int32_t> dtype,
                                          std::optional<int32_t> grad_dtype, std::optional<std::string_view> rounding,
                                          std::string_view amax, bool sum_grad_h) {
  constexpr const char* kOp = kQuantizeBackward;
  QuantizeActivatedBackwardParams p = {};
  ActivateBackwardParams& gradients = p.gradients;
  gradients = check_gradients(kOp, grad, h, activation, scores, h_scale, indices, interleaved);
  QuantizeParams &quantize_dh = p.quantize_dh, &quantize_a = p.quantize_a;
  quantize_dh = quantizer_of_gradients(kOp, gradients, h, h_scale, format, offs, rounding);
  const Amax a_amax = check_amax(kOp, format_of(quantize_dh.format), amax);
  quantize_dh.along_tokens = true;
  set_groups(quantize_dh, kOp, "h", offs, align);
  const Call call(kOp, "h", h);
  quantize_dh.out = quantize_a.out = check_fp8(call, kOp, dtype);
  quantize_a = quantize_dh;
  quantize_a.along_rows = false;
  quantize_a.row_stride = quantize_a.K = gradients.h.F;
  quantize_a.x_rows = quantize_a.rows;
  quantize_a.amax = a_amax;
  if (grad_dtype) quantize_dh.out = check_fp8(call, kOp, grad_dtype, "grad_dtype");
  Handle grad_scores = call.empty({gradients.num_slots()}, kFloat32);
  gradients.dscores = data<float>(grad_scores);
  Handle grad_bias = call.empty({sum_grad_h ? quantize_dh.E : 0, h.sizes[1]}, kFloat32);
  if (sum_grad_h) p.dh_sums = data<float>(grad_bias);
  Outputs a, grad_h;
  const auto all_results = [&] {
    return results(grad_h.q, grad_h.scale, grad_h.q_t, grad_h.scale_t, a.q_t, a.scale_t, a.padded_offs, grad_scores,
                   grad_bias);
  };
  if constexpr (kGpuBuild) {
    if (call.on_gpu() && can_quantize_activated_backward(p)) {
      a = outputs_of(call, quantize_a);
      quantize_dh.padded_offs = quantize_a.padded_offs;
      grad_h = outputs_of(call, quantize_dh);
      const Handle scratch = call.empty({scratch_words(p)}, kInt32);
      p.scratch = data<int>(scratch);
      call.check(quantize_activated_backward(p, call.stream()));
      return all_results();
    }
  }
  GradientOutputs values = compute_gradients(call, grad, h, gradients);
  a = quantize_computed(call, quantize_a, gradients.a);
  values.a = {};  // freed before the outputs of grad_h are allocated
  quantize_dh.padded_offs = quantize_a.padded_offs;
  grad_h = quantize_computed(call, quantize_dh, gradients.dh);
  if (sum_grad_h)
    run_sum_groups(call, {gradients.dh, ints(offs), int(quantize_dh.E), p.dh_sums, nullptr, gradients.P, h.sizes[1],
                          h.sizes[1], gradients.in, {}, nullptr});
  return all_results();
}

Results<5> quantize_activated_backward_rows_op(
    const Tensor& grad, const Tensor& h, std::string_view activation, std::string_view format, const Tensor& offs,
    const std::optional<Tensor>& scores, const std::optional<Tensor>& h_scale, const std::optional<Tensor>& indices,
    bool interleaved, bool keep_grad_h, bool keep_a, std::optional<int32_t> dtype,
    std::optional<std::string_view> rounding) {
  constexpr const char* kOp = kQuantizeBackwardRows;
  QuantizeActivatedBackwardParams p = {};
  ActivateBackwardParams& gradients = p.gradients;
  gradients = check_gradients(kOp, grad, h, activation, scores, h_scale, indices, interleaved);
  QuantizeParams& quantize_dh = p.quantize_dh;
  quantize_dh = quantizer_of_gradients(kOp, gradients, h, h_scale, format, offs, rounding);
  const Call call(kOp, "h", h);
  quantize_dh.out = check_fp8(call, kOp, dtype);
  if (format_of(quantize_dh.format).blocked()) set_groups(quantize_dh, kOp, "h", offs, std::nullopt);
  Outputs out = outputs_of(call, quantize_dh);
  Handle grad_scores = call.empty({gradients.num_slots()}, kFloat32);
  gradients.dscores = data<float>(grad_scores);
  GradientOutputs kept = {call.empty({keep_grad_h ? gradients.P : 0, h.sizes[1]}, grad.dtype),
                          call.empty({keep_a ? gradients.P : 0, gradients.h.F}, grad.dtype)};
  const auto all_results = [&] { return results(out.q, out.scale, kept.grad_h, kept.a, grad_scores); };
  if constexpr (kGpuBuild) {
    if (call.on_gpu() && can_quantize_activated_backward(p)) {
      if (keep_grad_h) gradients.dh = data(kept.grad_h);
      if (keep_a) gradients.a = data(kept.a);
      const Handle scratch = call.empty({scratch_words(p)}, kInt32);
      p.scratch = data<int>(scratch);
      call.check(quantize_activated_backward(p, call.stream()));
      return all_results();
    }
  }
  GradientOutputs values = compute_gradients(call, grad, h, gradients);
  quantize_dh.x = gradients.dh;
  run_quantize(call, quantize_dh);
  if (keep_grad_h) kept.grad_h = std::move(values.grad_h);
  if (keep_a) kept.a = std::move(values.a);
  return all_results();
}

}  // namespace moe_fp8

MOE_FP8_REGISTER(activate)
MOE_FP8_REGISTER(add_bias)
MOE_FP8_REGISTER(sum_groups)
MOE_FP8_REGISTER(quantize_activated)
MOE_FP8_REGISTER(activate_backward)
MOE_FP8_REGISTER(quantize_activated_backward)
MOE_FP8_REGISTER(quantize_activated_backward_rows)
