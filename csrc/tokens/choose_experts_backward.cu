#include "primitives/elements.h"
#include "primitives/row_reduce.h"
#include "tokens/expert_lanes.h"

namespace moe_fp8 {
namespace {

constexpr size_t kDefaultShared = 48 << 10;  // bytes that a block has on every chip without asking for more

struct ChooseExpertsBackwardPlan : ChooseExpertsBackwardParams {
  bool loads_vectors, stores_vectors;
};

// The slots of a token, one a lane. kSlots lanes are a token: a wave has several tokens at once if slots are few.
// Offers what ExpertLanes offers, with slots in place of experts.
template <int kSlots>
struct SlotLanes {
  static constexpr int kLanes = kSlots, kMaxTokensPerWave = kMaxWarpSize / kSlots, kPerLane = 1;
  const int lane = threadIdx.x % kLanes;

  MOE_DEVICE int expert(int) const { return lane; }
  MOE_DEVICE void load(const float* row, int slots, bool, float missing, float (&x)[1]) const {
    x[0] = lane < slots ? row[lane] : missing;
  }
  // In the order of ExpertLanes: fours of neighbours, then halves. Both lanes of an addition get the same bits.
  static MOE_DEVICE float sum(const float (&x)[1]) {
    const float four = reduce_lanes<4, 1, LaneOrder::kNearFirst>(x[0], SumF32{});
    return reduce_lanes<kLanes, 4>(four, SumF32{}) + 0.f;
  }
  static MOE_DEVICE uint32_t max(uint32_t v) { return reduce_lanes<kLanes>(v, MaxU32{}); }
};

// A lane's elements of a token's choice. L spreads all experts, or the slots alone.
template <class L>
struct Choice {
  static constexpr int n = L::kPerLane;
  float w[n] = {};    // the gradient of the score, times the factor
  uint32_t bits = 0;  // a bit an element: whether it is chosen
  int expert[n];      // of a slot whose gradient may differ from 0, else -1

  MOE_DEVICE bool chosen(int i) const { return bits >> i & 1; }
  MOE_DEVICE void find_among_experts(const ChooseExpertsBackwardPlan& p, const L& lane, int64_t t) {
    for (int64_t first = 0; first < p.top_k; first += kWarpSize) {
      const int64_t slot = first + lane.lane;
      const int64_t id = slot < p.top_k ? p.ids.at(t, slot) : -1;
      const uint32_t expert = id >= 0 && id < p.E ? uint32_t(id) : ~0u;
      const uint32_t grad = as_bits(slot < p.top_k ? p.grad[t * p.grad_stride + slot] * p.factor : 0.f);
      const int slots = p.top_k - first < kWarpSize ? int(p.top_k - first) : kWarpSize;
      for (int j = 0; j < slots; ++j) {
        const uint32_t slot_expert = shfl(expert, j);
        const float h = as_float(shfl(grad, j));
#pragma unroll
        for (int i = 0; i < n; ++i) {
          const bool found = uint32_t(lane.expert(i)) == slot_expert;
          w[i] = found ? h : w[i];
          bits |= uint32_t(found) << i;
        }
      }
    }
  }
  // Sets the logits of slots without an expert to -Inf.
  MOE_DEVICE void find_among_slots(const ChooseExpertsBackwardPlan& p, const L& lane, int64_t t, float (&logits)[n]) {
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const int slot = lane.expert(i);
      const int64_t id = slot < p.top_k ? p.ids.at(t, slot) : -1;
      const float grad = slot < p.top_k ? p.grad[t * p.grad_stride + slot] : 0.f;  // in flight together with the id
      const bool found = id >= 0 && id < p.E;
      w[i] = found ? grad * p.factor : 0.f;
      logits[i] = found ? logits[i] : as_float(kMinusInfinity);
      bits |= uint32_t(found) << i;
      expert[i] = found && as_bits(logits[i]) != kMinusInfinity ? int(id) : -1;
    }
  }
};

// Stores four neighbours of a token's results, or fewer at the end. row: the token's 4 E bytes, of either dtype.
MOE_DEVICE void store_four(const ChooseExpertsBackwardPlan& p, uint8_t* row, int at, const float* four) {
  if (p.parts == 1) {
    float* const out = reinterpret_cast<float*>(row) + at;
    Vec16 v;
#pragma unroll
    for (int i = 0; i < 4; ++i) v.w[i] = F32::from_float(four[i]);
    if (p.stores_vectors) {
      *reinterpret_cast<Vec16*>(out) = v;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (at + i < p.E) out[i] = as_float(v.w[i]);
    }
    return;
  }
  uint16_t* out = reinterpret_cast<uint16_t*>(row) + at;
  float rest[4] = {four[0], four[1], four[2], four[3]};
#pragma unroll
  for (int part = 0; part < 2; ++part, out += p.E) {
    const Vec8 v = {{packed<BF16>(rest[0], rest[1]), packed<BF16>(rest[2], rest[3])}};
#pragma unroll
    for (int i = 0; i < 4; ++i) rest[i] -= element<BF16>(v.w[i / 2], i % 2);
    if (p.stores_vectors) {
      *reinterpret_cast<Vec8*>(out) = v;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (at + i < p.E) out[i] = uint16_t(v.w[i / 2] >> 16 * (i % 2));
    }
  }
}

// Scatters the results of slots to their experts and stores the row. row: shared memory for round_up(E, 4) floats.
template <class L>
MOE_DEVICE void store_slots(const ChooseExpertsBackwardPlan& p, const L& lane, uint8_t* out, const Choice<L>& choice,
                            float* row) {
  constexpr int kStep = 4 * L::kLanes;
  for (int e = 4 * lane.lane; e < p.E; e += kStep) *reinterpret_cast<Vec16*>(row + e) = Vec16{};
  wave_barrier();
#pragma unroll
  for (int i = 0; i < L::kPerLane; ++i)
    if (choice.expert[i] >= 0) row[choice.expert[i]] = choice.w[i];
  wave_barrier();
  for (int e = 4 * lane.lane; e < p.E; e += kStep) {
    const Vec16 v = *reinterpret_cast<const Vec16*>(row + e);
    const float four[4] = {as_float(v.w[0]), as_float(v.w[1]), as_float(v.w[2]), as_float(v.w[3])};
    store_four(p, out, e, four);
  }
  wave_barrier();
}

// kChosenOnly: L spreads the slots, which alone share the score. Otherwise L spreads all experts.
template <class L, bool kChosenOnly>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, choose_experts_backward_blocks(L::kPerLane))
    choose_experts_backward_kernel(MOE_GRID_CONSTANT const ChooseExpertsBackwardPlan p) {
  constexpr int n = L::kPerLane, kWaveTokens = kWarpSize / L::kLanes;
  MOE_DYNAMIC_SMEM(shared);
  float* const row = reinterpret_cast<float*>(shared) + threadIdx.x / L::kLanes * round_up(p.E, 4);
  const L lane;
  wait_for_previous_kernel();
  for (int64_t first = kWaveTokens * first_row(); first < p.T; first += kWaveTokens * rows_per_grid()) {
    // Waves stay whole: lanes behind the last token repeat it, and store the same bytes.
    const int64_t token = first + threadIdx.x % kWarpSize / L::kLanes, t = token < p.T ? token : p.T - 1;
    float score[n], slope[n], terms[n];
    const int width = kChosenOnly ? int(p.top_k) : p.E;
    lane.load(p.logits + t * p.stride, width, p.loads_vectors, as_float(kMinusInfinity), score);
    Choice<L> choice;
    if constexpr (kChosenOnly) choice.find_among_slots(p, lane, t, score);
    else choice.find_among_experts(p, lane, t);
    score_logits<L>(p.scoring, score, slope);
    auto& w = choice.w;
    const auto sum_over_chosen = [&](auto term) {
#pragma unroll
      for (int i = 0; i < n; ++i) terms[i] = choice.chosen(i) ? term(i) : 0.f;
      return L::sum(terms);
    };
    if (p.normalize) {
      const float sum = sum_over_chosen([&](int i) { return score[i]; }) + kSumEpsilon;
      const float mean = sum_over_chosen([&](int i) { return w[i] * (score[i] / sum); });
#pragma unroll
      for (int i = 0; i < n; ++i) w[i] = choice.chosen(i) ? (w[i] - mean) / sum : 0.f;
    }
    if (p.scoring == Scoring::kSoftmax) {
      const float mean = sum_over_chosen([&](int i) { return w[i] * score[i]; });
#pragma unroll
      for (int i = 0; i < n; ++i) w[i] = score[i] * (w[i] - mean);
    } else {
#pragma unroll
      for (int i = 0; i < n; ++i) w[i] = choice.chosen(i) ? w[i] * slope[i] : 0.f;
    }
    uint8_t* const out = static_cast<uint8_t*>(p.dlogits) + t * p.E * sizeof(float);
    if constexpr (kChosenOnly) store_slots(p, lane, out, choice, row);
    else lane.each_four(w, p.E, [&](const float* four, int at) { store_four(p, out, at, four); });
  }
}

// Bytes of shared memory for a row of each token of a block. Larger waves than the host assumes need less.
template <class L>
size_t block_shared(int E) {
  return kThreads / L::kLanes * round_up(E, 4) * sizeof(float);
}
template <class L>
int launch_chosen_only(const ChooseExpertsBackwardPlan& p, void* stream) {
  const int64_t waves = ceil_div<int64_t>(p.T, L::kMaxTokensPerWave);
  return launch_on_rows(choose_experts_backward_kernel<L, true>, p, waves, stream, block_shared<L>(p.E));
}

}  // namespace

int choose_experts_backward(const ChooseExpertsBackwardParams& params, void* stream) {
  const ChooseExpertsBackwardPlan p = {
      params, fours_are_aligned(int(params.width()), params.T, params.stride, params.logits),
      fours_are_aligned(params.E, 1, 0, params.dlogits)};
  if (!p.chosen_only)
    return dispatch_expert_count(p.E, [&](auto experts) {
      using L = ExpertLanes<decltype(experts)::value>;
      return launch_on_rows(choose_experts_backward_kernel<L, false>, p, p.T, stream);
    });
  if (p.top_k <= 8 && block_shared<SlotLanes<8>>(p.E) <= kDefaultShared)
    return launch_chosen_only<SlotLanes<8>>(p, stream);
  if (p.top_k <= 32) return launch_chosen_only<SlotLanes<32>>(p, stream);
  return launch_chosen_only<ExpertLanes<kMaxExperts>>(p, stream);
}

}  // namespace moe_fp8
