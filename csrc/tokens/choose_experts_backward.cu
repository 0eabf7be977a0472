#include "tokens/lanes_of_experts.h"

namespace moe_fp8 {
namespace {

struct ChooseBackward : ChooseExpertsBackwardParams {
  bool vectors;
};

// What a wave has of a token's choice: of all experts, or of the slots alone.
template <class L>
struct Chosen {
  float w[L::n] = {};  // the gradient of the score, times the factor
  uint32_t bits = 0;   // a bit an element
  int expert[L::n];    // of a slot: whose gradient may be another than 0, or none

  MOE_DEVICE bool operator()(int i) const { return bits >> i & 1; }
  MOE_DEVICE void find_among_experts(const ChooseBackward& p, const L& lane, int64_t t) {
    for (int64_t first = 0; first < p.top_k; first += kWarpSize) {
      const int64_t slot = first + lane.lane;
      const int64_t id = slot < p.top_k ? p.id(t, slot) : -1;
      const uint32_t expert = id >= 0 && id < p.E ? uint32_t(id) : ~0u;
      const uint32_t grad = as_bits(slot < p.top_k ? p.grad[t * p.grad_stride + slot] * p.factor : 0.f);
      const int slots = p.top_k - first < kWarpSize ? int(p.top_k - first) : kWarpSize;
      for (int j = 0; j < slots; ++j) {
        const uint32_t of_slot = shfl(expert, j);
        const float h = as_float(shfl(grad, j));
#pragma unroll
        for (int i = 0; i < L::n; ++i) {
          const bool found = uint32_t(lane.expert(i)) == of_slot;
          w[i] = found ? h : w[i];
          bits |= uint32_t(found) << i;
        }
      }
    }
  }
  // Logits of slots without an expert become -Inf.
  MOE_DEVICE void find_among_slots(const ChooseBackward& p, const L& lane, int64_t t, float (&logits)[L::n]) {
#pragma unroll
    for (int i = 0; i < L::n; ++i) {
      const int slot = lane.expert(i);
      const int64_t id = slot < p.top_k ? p.id(t, slot) : -1;
      const bool found = id >= 0 && id < p.E;
      w[i] = found ? p.grad[t * p.grad_stride + slot] * p.factor : 0.f;
      logits[i] = found ? logits[i] : as_float(kMinusInfinity);
      bits |= uint32_t(found) << i;
      expert[i] = found && as_bits(logits[i]) != kMinusInfinity ? int(id) : -1;
    }
  }
};

// A row of results from those of slots; row: E floats of the wave's shared memory.
template <class L>
MOE_DEVICE void store_slots(const ChooseBackward& p, const L& lane, int64_t t, const Chosen<L>& chosen, float* row) {
  for (int e = lane.lane; e < p.E; e += kWarpSize) row[e] = 0.f;
  wave_barrier();
#pragma unroll
  for (int i = 0; i < L::n; ++i)
    if (chosen.expert[i] >= 0) row[chosen.expert[i]] = as_float(F32::from_float(chosen.w[i]));
  wave_barrier();
  float* const out = p.dlogits + t * p.E;
  if (p.vectors) {
    for (int e = 4 * lane.lane; e < p.E; e += 4 * kWarpSize)
      *reinterpret_cast<Vec16*>(out + e) = *reinterpret_cast<const Vec16*>(row + e);
  } else {
    for (int e = lane.lane; e < p.E; e += kWarpSize) out[e] = row[e];
  }
  wave_barrier();
}

// kExperts: those that share the score. kOfChosen: the slots alone do.
template <int kExperts, bool kOfChosen>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, kBlocks<kExperts>)
    choose_experts_backward_kernel(MOE_GRID_CONSTANT const ChooseBackward p) {
  using L = Lane<kExperts>;
  constexpr int n = L::n;
  MOE_DYNAMIC_SMEM(shared);
  float* const row = reinterpret_cast<float*>(shared) + threadIdx.x / kWarpSize * round_up(p.E, 4);
  const L lane;
  wait_for_previous_kernel();
  for (int64_t t = first_row(); t < p.T; t += rows_at_once()) {
    float score[n], slope[n], terms[n];
    lane.load(p.logits + t * p.stride, kOfChosen ? int(p.top_k) : p.E, p.vectors, as_float(kMinusInfinity), score);
    Chosen<L> chosen;
    if constexpr (kOfChosen) chosen.find_among_slots(p, lane, t, score);
    else chosen.find_among_experts(p, lane, t);
    L::score(p.scoring, score, slope);
    auto& w = chosen.w;
    const auto sum_of_chosen = [&](auto term) {
#pragma unroll
      for (int i = 0; i < n; ++i) terms[i] = chosen(i) ? term(i) : 0.f;
      return L::sum(terms);
    };
    if (p.normalize) {
      const float sum = sum_of_chosen([&](int i) { return score[i]; }) + kLeastSum;
      const float mean = sum_of_chosen([&](int i) { return w[i] * (score[i] / sum); });
#pragma unroll
      for (int i = 0; i < n; ++i) w[i] = chosen(i) ? (w[i] - mean) / sum : 0.f;
    }
    if (p.scoring == Scoring::kSoftmax) {
      const float mean = sum_of_chosen([&](int i) { return w[i] * score[i]; });
#pragma unroll
      for (int i = 0; i < n; ++i) w[i] = score[i] * (w[i] - mean);
    } else {
#pragma unroll
      for (int i = 0; i < n; ++i) w[i] = chosen(i) ? w[i] * slope[i] : 0.f;
    }
    if constexpr (kOfChosen) store_slots(p, lane, t, chosen, row);
    else lane.store(p.dlogits + t * p.E, p.E, p.vectors, w);
  }
}

}  // namespace

int choose_experts_backward(const ChooseExpertsBackwardParams& params, void* stream) {
  ChooseBackward p = {params, is_of_fours(params.E, params.T, params.stride, params.logits, params.dlogits)};
  if (!p.of_chosen)
    return with_room(p.E, [&](auto room) {
      return launch_on_rows(choose_experts_backward_kernel<decltype(room)::value, false>, p, p.T, stream);
    });
  p.vectors = p.vectors && p.top_k % 4 == 0;
  const size_t shared = kThreads / kSmallestWarp * round_up(p.E, 4) * sizeof(float);
  constexpr auto kOfFew = choose_experts_backward_kernel<128, true>;
  constexpr auto kOfMany = choose_experts_backward_kernel<kMaxExperts, true>;
  return launch_on_rows(p.top_k <= 128 ? kOfFew : kOfMany, p, p.T, stream, shared);
}

}  // namespace moe_fp8
