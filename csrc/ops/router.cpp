#include "tokens/choose_experts.h"

#include "ops/checks.h"

namespace moe_fp8 {
namespace {

constexpr const char *kChoose = "choose_experts", *kBackward = "choose_experts_backward";

}  // namespace

Results<3> choose_experts_op(const Tensor& logits, int64_t top_k, const std::optional<Tensor>& bias,
                             std::string_view scoring, bool normalize, double scaling_factor, int64_t num_groups,
                             int64_t top_groups, std::string_view group_score,
                             const std::optional<Tensor>& given_ids) {
  const int64_t T = logits.sizes[0], E = logits.sizes[1];
  if (bias) check_size({kChoose, "bias"}, *bias, 0, E);
  const auto rule = Scoring(check_choice(kChoose, "scoring", scoring, kScorings));
  const auto group_rule = GroupScore(check_choice(kChoose, "group_score", group_score, kGroupScores));
  if (num_groups < 1 || E % num_groups)
    fail(kChoose, ": num_groups must divide the ", E, " experts, got ", num_groups);
  check_range(kChoose, "top_groups", top_groups, 1, num_groups);
  const int64_t eligible = E / num_groups * top_groups;
  if (top_k < 1 || top_k > eligible)
    fail(kChoose, ": top_k must be from 1 to the ", eligible, " experts of a choice, got ", top_k);
  if (given_ids) {
    check_sizes({kChoose, "given_ids"}, *given_ids, {T, top_k});
    validate_ids({kChoose, "given_ids"}, *given_ids, E);
  }
  const SlotIds given =
      given_ids ? SlotIds{given_ids->data, given_ids->strides[0], given_ids->dtype == kInt64} : SlotIds{};
  const Call call(kChoose, "logits", logits);
  Handle ids = call.empty({T, top_k}, kInt64), scores = call.empty({T, top_k}, kFloat32),
         topk_logits = call.empty({T, top_k}, kFloat32);
  const float* const biases = bias ? bias->as<float>() : nullptr;
  const ChooseExpertsParams p = {logits.as<float>(), biases, data<int64_t>(ids), data<float>(scores),
                                 data<float>(topk_logits), T, logits.strides[0], int(E), int(top_k), int(num_groups),
                                 int(top_groups), group_rule, given, rule, normalize, float(scaling_factor)};
  MOE_FP8_RUN(call, choose_experts, p);
  return results(ids, scores, topk_logits);
}

Results<1> choose_experts_backward_op(const Tensor& grad, const Tensor& logits, const Tensor& topk_ids,
                                      std::optional<int64_t> num_experts, std::string_view scoring, bool normalize,
                                      double scaling_factor, int64_t parts) {
  const int64_t T = logits.sizes[0], E = num_experts.value_or(logits.sizes[1]);
  check_size({kBackward, "grad"}, grad, 0, T);
  check_sizes({kBackward, "topk_ids"}, topk_ids, grad.sizes, 2);
  if (num_experts) {
    if (E < 1 || E > kMaxExperts)
      fail(kBackward, ": num_experts must be None or from 1 to ", kMaxExperts, ", got ", E);
    if (!normalize) fail(kBackward, ": normalize must be True with num_experts, got False");
    check_size({kBackward, "logits"}, logits, 1, grad.sizes[1]);
  }
  const auto rule = Scoring(check_choice(kBackward, "scoring", scoring, kScorings));
  if (parts != 1 && parts != 2) fail(kBackward, ": parts must be 1 or 2, got ", parts);
  validate_ids({kBackward, "topk_ids"}, topk_ids, E);
  const Call call(kBackward, "grad", grad);
  Handle grad_logits = parts == 1 ? call.empty({T, E}, kFloat32) : call.empty({T, parts, E}, kBFloat16);
  if (E == 0) return results(grad_logits);
  const ChooseExpertsBackwardParams p = {
      grad.as<float>(), logits.as<float>(), {topk_ids.data, topk_ids.strides[0], topk_ids.dtype == kInt64},
      data(grad_logits), T, grad.strides[0], logits.strides[0], int(E), grad.sizes[1], rule, normalize,
      num_experts.has_value(), float(scaling_factor), int(parts)};
  MOE_FP8_RUN(call, choose_experts_backward, p);
  return results(grad_logits);
}

}  // namespace moe_fp8

MOE_FP8_REGISTER(choose_experts)
MOE_FP8_REGISTER(choose_experts_backward)
