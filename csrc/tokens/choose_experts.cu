#include "tokens/expert_lanes.h"

namespace moe_fp8 {
namespace {

struct ChooseExpertsPlan : ChooseExpertsParams {
  bool vectors;
  int wave_bytes;  // of shared memory
  int group_size;
  uint32_t multiplier;  // expert / group_size = expert * multiplier >> kShift, exact up to kMaxExperts
};
constexpr int kShift = 20;
constexpr int kNoExpert = 0xffff;  // at a slot

// Bytes of shared memory of a wave: 4 for each expert, keys before the choice and scores after it. Behind them stands
// whether a group takes part in the choice, and later the expert of each slot.
int wave_bytes(const ChooseExpertsParams& p) {
  const int groups = p.top_groups < p.num_groups ? p.num_groups : 0, slots = p.top_k * int(sizeof(uint16_t));
  return round_up(p.E, 4) * int(sizeof(float)) + round_up(groups > slots ? groups : slots, 16);
}

// Sets the keys of experts to kNever if their group does not take part in the choice.
template <class L>
MOE_DEVICE void mask_groups(const ChooseExpertsPlan& p, const L& lane, uint32_t (&key)[L::kPerLane], uint32_t* keys,
                            uint8_t* selected) {
  lane.each_four(key, p.E, [&](const uint32_t* four, int at) {
    *reinterpret_cast<Vec16*>(keys + at) = Vec16{{four[0], four[1], four[2], four[3]}};
  });
  wave_barrier();
  for (int g = lane.lane; g < p.num_groups; g += kWarpSize) {
    uint32_t* const group = keys + g * p.group_size;
    uint32_t first = 0, second = 0;
    int at = g % p.group_size;  // lanes begin at different experts, to avoid bank conflicts
    for (int i = 0; i < p.group_size; ++i) {
      const uint32_t k = group[at], smaller = k < first ? k : first;
      first = k > first ? k : first;
      second = smaller > second ? smaller : second;
      at = at + 1 == p.group_size ? 0 : at + 1;
    }
    group[0] = group_key(p.group_score, p.group_size, first, second);
  }
  wave_barrier();
  for (int g = lane.lane; g < p.num_groups; g += kWarpSize) {
    const uint32_t own = keys[g * p.group_size];
    int rank = 0;
    for (int o = 0; o < p.num_groups; ++o) {
      const uint32_t other = keys[o * p.group_size];
      rank += other > own || (other == own && o < g);
    }
    selected[g] = rank < p.top_groups;
  }
  wave_barrier();
#pragma unroll
  for (int i = 0; i < L::kPerLane; ++i)
    if (lane.expert(i) < p.E && !selected[uint32_t(lane.expert(i)) * p.multiplier >> kShift]) key[i] = kNever;
  wave_barrier();  // slots reuse the memory of `selected`
}

// Writes the experts of the largest keys to slots. The key of a chosen expert becomes kChosen.
template <class L>
MOE_DEVICE void take_best(const ChooseExpertsPlan& p, const L& lane, uint32_t (&key)[L::kPerLane], uint16_t* slots) {
  constexpr int n = L::kPerLane;
  for (int slot = 0; slot < p.top_k; ++slot) {
    uint32_t max_key = key[0];
#pragma unroll
    for (int i = 1; i < n; ++i) max_key = key[i] > max_key ? key[i] : max_key;
    max_key = wave_max(max_key);
    uint32_t inverted = 0;  // ~expert: the smallest expert has the largest
#pragma unroll
    for (int i = n - 1; i >= 0; --i) inverted = key[i] == max_key ? ~uint32_t(lane.expert(i)) : inverted;
    const uint32_t first = ~wave_max(inverted);
#pragma unroll
    for (int i = 0; i < n; ++i) key[i] = uint32_t(lane.expert(i)) == first ? kChosen : key[i];
    if (lane.lane == 0) slots[slot] = uint16_t(first);
  }
}

// Writes the given experts, or kNoExpert, to slots. The key of a given expert becomes kChosen.
template <class L>
MOE_DEVICE void take_given(const ChooseExpertsPlan& p, const L& lane, int64_t t, uint32_t (&key)[L::kPerLane],
                           uint16_t* slots) {
  for (int first = 0; first < p.top_k; first += kWarpSize) {
    const int own_slot = first + lane.lane;
    const int64_t id = own_slot < p.top_k ? p.given_ids.at(t, own_slot) : -1;  // read once: others may write it
    const uint32_t own = id >= 0 && id < p.E ? uint32_t(id) : kNoExpert;
    if (own_slot < p.top_k) slots[own_slot] = uint16_t(own);
    const int count = p.top_k - first < kWarpSize ? p.top_k - first : kWarpSize;
    for (int j = 0; j < count; ++j) {
      const uint32_t expert = shfl(own, j);
#pragma unroll
      for (int i = 0; i < L::kPerLane; ++i) key[i] = uint32_t(lane.expert(i)) == expert ? kChosen : key[i];
    }
  }
}

template <int kExperts>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, choose_experts_blocks(kExperts))
    choose_experts_kernel(MOE_GRID_CONSTANT const ChooseExpertsPlan p) {
  using L = ExpertLanes<kExperts>;
  constexpr int n = L::kPerLane;
  MOE_DYNAMIC_SMEM(shared);
  unsigned char* const wave_shared = shared + threadIdx.x / kWarpSize * p.wave_bytes;
  auto* const keys = reinterpret_cast<uint32_t*>(wave_shared);
  auto* const scores = reinterpret_cast<float*>(wave_shared);
  uint8_t* const selected = wave_shared + round_up(p.E, 4) * sizeof(float);
  auto* const slots = reinterpret_cast<uint16_t*>(selected);
  const L lane;
  wait_for_previous_kernel();
  for (int64_t t = first_row(); t < p.T; t += rows_per_grid()) {
    float score[n], unused[n], bias[n] = {};
    lane.load(p.logits + t * p.stride, p.E, p.vectors, as_float(kMinusInfinity), score);
    score_logits<L>(p.scoring, score, unused);
    if (p.bias) lane.load(p.bias, p.E, p.vectors, 0.f, bias);
    uint32_t key[n];
#pragma unroll
    for (int i = 0; i < n; ++i) key[i] = lane.expert(i) < p.E ? ordered_key(score[i] + bias[i]) : kNever;
    if (p.given_ids.ids) {
      take_given(p, lane, t, key, slots);
    } else {
      if (p.top_groups < p.num_groups) mask_groups(p, lane, key, keys, selected);
      take_best(p, lane, key, slots);
    }

    float sum = 1.f;
    if (p.normalize) {
      float chosen_scores[n];
#pragma unroll
      for (int i = 0; i < n; ++i) chosen_scores[i] = key[i] == kChosen ? score[i] : 0.f;
      sum = L::sum(chosen_scores) + kSumEpsilon;
    }
    // A lane has a slot: one division and three stores for all slots, not for each of a lane's experts.
    lane.each_four(score, p.E, [&](const float* four, int at) {
      *reinterpret_cast<Vec16*>(scores + at) =
          Vec16{{as_bits(four[0]), as_bits(four[1]), as_bits(four[2]), as_bits(four[3])}};
    });
    wave_barrier();
#pragma unroll 1
    for (int slot = lane.lane; slot < p.top_k; slot += kWarpSize) {
      const int expert = slots[slot];
      float slot_score = 0, logit = 0;
      if (expert != kNoExpert) {
        slot_score = (p.normalize ? scores[expert] / sum : scores[expert]) * p.factor;
        logit = p.logits[t * p.stride + expert];
      }
      p.ids[t * p.top_k + slot] = expert == kNoExpert ? -1 : expert;
      p.scores[t * p.top_k + slot] = as_float(F32::from_float(slot_score));
      p.topk_logits[t * p.top_k + slot] = as_float(F32::from_float(logit + 0.f * slot_score));
    }
    wave_barrier();
  }
}

}  // namespace

int choose_experts(const ChooseExpertsParams& params, void* stream) {
  ChooseExpertsPlan p = {params, fours_are_aligned(params.E, params.T, params.stride, params.logits, params.bias),
                         wave_bytes(params), params.E / params.num_groups, 0};
  p.multiplier = uint32_t(ceil_div(1 << kShift, p.group_size));
  return dispatch_expert_count(p.E, [&](auto experts) {
    const size_t shared = kThreads / kMinWarpSize * p.wave_bytes;
    return launch_on_rows(choose_experts_kernel<decltype(experts)::value>, p, p.T, stream, shared);
  });
}

}  // namespace moe_fp8
