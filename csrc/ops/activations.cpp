#include "activations/quantize_activated.h"
#include "cpu/activations.h"
#include "ops/operands.h"
#include "ops/quantize.h"

namespace moe_fp8 {
namespace {

constexpr const char *kActivate = "activate", *kQuantize = "quantize_activated", *kBackward = "activate_backward";

Activation check_activation(const char* op, std::string_view name) {
  std::string names;
  for (int i = 0; i < kNumActivations; ++i) {
    if (name == kActivations[i].name) return Activation(i);
    names += (i == 0 ? "'" : i + 1 < kNumActivations ? ", '" : " or '") + std::string(kActivations[i].name) + "'";
  }
  fail(op, ": activation must be ", names, ", got '", name, "'");
}
int64_t check_features(const char* op, const Tensor& h, Activation activation) {
  if (!is_gated(activation)) return h.sizes[1];
  if (h.sizes[1] % 2)
    fail(op, ": h must have an even number of columns with activation '", kActivations[int(activation)].name,
         "', got ", h.sizes[1]);
  return h.sizes[1] / 2;
}

GateRows gates_of(const char* op, const Tensor& h, InType in, Activation activation, bool interleaved) {
  GateRows gates = {};
  gates.h = h.data;
  gates.stride = h.strides[0];
  gates.F = check_features(op, h, activation);
  gates.in = in;
  gates.interleaved = interleaved;
  return gates;
}

void run(const Call& call, const Tensor& h, const ActivateParams& p) {
#if defined(MOE_FP8_GPU)
  if (h.on_gpu()) return call.check(activate(p, call.stream()));
#endif
  activate_cpu(p);
}
void run(const Call& call, const Tensor& h, const ActivateBackwardParams& p) {
#if defined(MOE_FP8_GPU)
  if (h.on_gpu()) return call.check(activate_backward(p, call.stream()));
#endif
  activate_backward_cpu(p);
}

OperandScales check_h_scale(const Tensor& h, const std::optional<Tensor>& h_scale,
                            const std::optional<std::string_view>& format) {
  constexpr const Argument& kScale = argument(kBackward, "h_scale");
  if (!h_scale) {
    if (format) fail(kBackward, ": h_scale must be given with format, got None");
    return {};
  }
  check(kScale, *h_scale, h);
  if (!format) fail(kBackward, ": format must be given with h_scale, got None");
  const Format& f = format_of(check_format(kBackward, *format));
  return scales_of_rows(kScale, *h_scale, f, h.sizes, 1, h.sizes[0], h.sizes[1], kNoGroups);
}

}  // namespace

Results<1> activate_op(const Tensor& h, std::string_view activation, bool interleaved) {
  constexpr const Argument& kH = argument(kActivate, "h");
  check(kH, h);
  ActivateParams p = {};
  p.activation = check_activation(kActivate, activation);
  p.P = h.sizes[0];
  p.h = gates_of(kActivate, h, in_type(h), p.activation, interleaved);
  const Call call(kActivate, "h", h);
  Handle a = call.empty({p.P, p.h.F}, h.dtype);
  p.a = data(a);
  run(call, h, p);
  return results(a);
}

Results<4> quantize_activated_op(const Tensor& h, std::string_view activation, std::string_view format,
                                 const std::optional<Tensor>& offs, bool interleaved, bool keep_h,
                                 std::optional<int32_t> dtype, std::optional<std::string_view> rounding) {
  constexpr const Argument &kH = argument(kQuantize, "h"), &kOffs = argument(kQuantize, "offs");
  check(kH, h);
  QuantizeActivatedParams p = {};
  p.activation = check_activation(kQuantize, activation);
  p.h = gates_of(kQuantize, h, in_type(h), p.activation, interleaved);
  QuantizeParams &a = p.of_a, &of_h = p.of_h;
  a.format = check_format(kQuantize, format);
  const Format& f = format_of(a.format);
  a.rounding = check_rounding(kQuantize, f, rounding);
  a.in = p.h.in;
  a.rows = h.sizes[0];
  if (offs) check_offs(kOffs, *offs, h, a.rows);
  const Call call(kQuantize, "h", h);
  a.out = check_fp8(call, kQuantize, dtype);
  a.along_rows = true;
  of_h = a;  // without groups, which scales of a alone may lie by
  of_h.rows = keep_h ? a.rows : 0;
  of_h.K = h.sizes[1];
  of_h.x = h.data;
  of_h.row_stride = p.h.stride;
  a.row_stride = a.K = p.h.F;
  const bool grouped = offs && f.blocked();
  if (grouped) set_groups(a, kQuantize, "h", *offs, std::nullopt);
  auto outputs = [&](QuantizeParams& to, int64_t groups) {
    Handle q = call.empty({to.rows, to.K}, to.out);
    Handle scale = call.empty(scales_along_rows(f, to.rows, to.K, groups), f.scale_type);
    to.q = data<uint8_t>(q);
    to.scale = data(scale);
    return std::pair(std::move(q), std::move(scale));
  };
  auto [q, scale] = outputs(a, grouped ? a.E : kNoGroups);
  auto [h_q, h_scale] = outputs(of_h, kNoGroups);
#if defined(MOE_FP8_GPU)
  if (h.on_gpu() && can_quantize_activated(p)) {
    call.check(quantize_activated(p, call.stream()));
    return results(q, scale, h_q, h_scale);
  }
#endif
  const Handle values = call.empty({a.rows, a.K}, h.dtype), scratch = scratch_of(call, h, a);
  run(call, h, {p.h, data(values), a.rows, p.activation});
  a.x = data(values);
  run(call, h, a);
  run(call, h, of_h);
  return results(q, scale, h_q, h_scale);
}

Results<3> activate_backward_op(const Tensor& h, const Tensor& da, std::string_view activation,
                                const std::optional<Tensor>& scores, const std::optional<Tensor>& h_scale,
                                const std::optional<std::string_view>& format, bool interleaved) {
  constexpr const Argument &kH = argument(kBackward, "h"), &kDa = argument(kBackward, "da"),
                           &kScores = argument(kBackward, "scores");
  Argument of_h = kH;
  of_h.dtypes = h_scale ? Dtypes::kFp8 : Dtypes::kInput;
  check(of_h, h);
  check(kDa, da, h);
  if (!h_scale && da.dtype != h.dtype)
    fail(kBackward, ": da must be, like h, ", dtype_name(h.dtype), ", got ", dtype_name(da.dtype));
  ActivateBackwardParams p = {};
  p.activation = check_activation(kBackward, activation);
  p.P = h.sizes[0];
  p.in = in_type(da);
  p.h = gates_of(kBackward, h, p.in, p.activation, interleaved);
  const int64_t sizes[] = {p.P, p.h.F};
  check_sizes(kDa, da, sizes, 2);
  if (scores) {
    check(kScores, *scores, h);
    check_size(kScores, *scores, 0, p.P);
  }
  p.h.scale = check_h_scale(h, h_scale, format);
  const Call call(kBackward, "h", h);
  Handle dh = call.empty({p.P, h.sizes[1]}, da.dtype), a = call.empty({p.P, p.h.F}, da.dtype);
  Handle dscores = call.empty({p.P}, kFloat32);
  if (h_scale) p.h.fp8 = fp8_type(h);
  p.da = da.data;
  p.da_stride = da.strides[0];
  p.scores = scores ? scores->as<float>() : nullptr;
  p.dh = data(dh);
  p.a = data(a);
  p.dscores = data<float>(dscores);
  run(call, h, p);
  return results(dh, a, dscores);
}

}  // namespace moe_fp8

MOE_FP8_REGISTER(activate)
MOE_FP8_REGISTER(quantize_activated)
MOE_FP8_REGISTER(activate_backward)
