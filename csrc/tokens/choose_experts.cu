#include "tokens/lanes_of_experts.h"

namespace moe_fp8 {
namespace {

struct Choose : ChooseExpertsParams {
  bool vectors;
  int group_size;
  uint32_t multiplier;  // expert / group_size = expert * multiplier >> kShift, exact up to kMaxExperts
};
constexpr int kShift = 20;

template <int kExperts>
constexpr int kBlocks = kExperts <= 128 ? 4 : kExperts <= 256 ? 3 : kExperts <= 512 ? 2 : 1;  // as registers allow

// A wave's part of shared memory, where there are groups.
template <int kExperts>
constexpr int kBytesOfWave = kExperts * (sizeof(uint32_t) + sizeof(uint8_t));

// Keys of experts whose group has no part in the choice become kNever.
template <class L>
MOE_DEVICE void leave_out_groups(const Choose& p, const L& lane, uint32_t (&key)[L::n], uint32_t* keys, uint8_t* kept) {
  lane.each_four(key, p.E, [&](const uint32_t* four, int at) {
    *reinterpret_cast<Vec16*>(keys + at) = Vec16{{four[0], four[1], four[2], four[3]}};
  });
  wave_barrier();
  for (int g = lane.lane; g < p.num_groups; g += kWarpSize) {
    uint32_t* const group = keys + g * p.group_size;
    uint32_t first = 0, second = 0;
    int at = g % p.group_size;  // lanes begin at different experts, in different banks
    for (int i = 0; i < p.group_size; ++i) {
      const uint32_t k = group[at], less = k < first ? k : first;
      first = k > first ? k : first;
      second = less > second ? less : second;
      at = at + 1 == p.group_size ? 0 : at + 1;
    }
    group[0] = p.group_size == 1 ? first : ordered(unordered(first) + unordered(second));
  }
  wave_barrier();
  for (int g = lane.lane; g < p.num_groups; g += kWarpSize) {
    const uint32_t mine = keys[g * p.group_size];
    int before = 0;
    for (int o = 0; o < p.num_groups; ++o) {
      const uint32_t other = keys[o * p.group_size];
      before += other > mine || (other == mine && o < g);
    }
    kept[g] = before < p.top_groups;
  }
  wave_barrier();
#pragma unroll
  for (int i = 0; i < L::n; ++i)
    if (lane.expert(i) < p.E && !kept[uint32_t(lane.expert(i)) * p.multiplier >> kShift]) key[i] = kNever;
}

template <int kExperts>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, kBlocks<kExperts>) choose_experts_kernel(MOE_GRID_CONSTANT const Choose p) {
  using L = Lane<kExperts>;
  constexpr int n = L::n;
  MOE_DYNAMIC_SMEM(shared);
  auto* const keys = reinterpret_cast<uint32_t*>(shared + threadIdx.x / kWarpSize * kBytesOfWave<kExperts>);
  auto* const kept = reinterpret_cast<uint8_t*>(keys + kExperts);
  const L lane;
  wait_for_previous_kernel();
  for (int64_t t = first_row(); t < p.T; t += rows_at_once()) {
    float score[n], unused[n], bias[n] = {};
    lane.load(p.logits + t * p.stride, p.E, p.vectors, as_float(kMinusInfinity), score);
    score_logits<L>(p.scoring, score, unused);
    if (p.bias) lane.load(p.bias, p.E, p.vectors, 0.f, bias);
    uint32_t key[n];
#pragma unroll
    for (int i = 0; i < n; ++i) key[i] = lane.expert(i) < p.E ? ordered(score[i] + bias[i]) : kNever;
    if (p.top_groups < p.num_groups) leave_out_groups(p, lane, key, keys, kept);

    // The key of an expert that is chosen becomes the number of its slot.
    for (int slot = 0; slot < p.top_k; ++slot) {
      uint32_t most = key[0];
#pragma unroll
      for (int i = 1; i < n; ++i) most = key[i] > most ? key[i] : most;
      most = warp_max(most);
      uint32_t first = ~0u;
#pragma unroll
      for (int i = n - 1; i >= 0; --i) first = key[i] == most ? uint32_t(lane.expert(i)) : first;
      first = ~warp_max(~first);
#pragma unroll
      for (int i = 0; i < n; ++i) key[i] = uint32_t(lane.expert(i)) == first ? uint32_t(slot) : key[i];
    }

    const auto chosen = [&](int i) { return key[i] < uint32_t(p.top_k); };
    float sum = 1.f;
    if (p.normalize) {
      float of_chosen[n];
#pragma unroll
      for (int i = 0; i < n; ++i) of_chosen[i] = chosen(i) ? score[i] : 0.f;
      sum = L::sum(of_chosen) + kLeastSum;
    }
#pragma unroll
    for (int i = 0; i < n; ++i) {
      if (!chosen(i)) continue;
      p.ids[t * p.top_k + key[i]] = lane.expert(i);
      const float share = p.normalize ? score[i] / sum : score[i];
      p.scores[t * p.top_k + key[i]] = as_float(F32::from_float(share * p.factor));
    }
  }
}

}  // namespace

int choose_experts(const ChooseExpertsParams& params, void* stream) {
  Choose p = {params, is_of_fours(params.E, params.T, params.stride, params.logits, params.bias),
              params.E / params.num_groups, 0};
  p.multiplier = uint32_t(ceil_div(1 << kShift, p.group_size));
  return with_room(p.E, [&](auto room) {
    constexpr int kExperts = decltype(room)::value;
    const size_t shared = p.top_groups < p.num_groups ? kThreads / kSmallestWarp * kBytesOfWave<kExperts> : 0;
    return launch_on_rows(choose_experts_kernel<kExperts>, p, p.T, stream, shared);
  });
}

}  // namespace moe_fp8
