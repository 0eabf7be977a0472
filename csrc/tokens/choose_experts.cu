#include "tokens/lanes_of_experts.h"

namespace moe_fp8 {
namespace {

struct Choose : ChooseExpertsParams {
  bool vectors;
  int bytes_of_wave;  // of shared memory
  int group_size;
  uint32_t multiplier;  // expert / group_size = expert * multiplier >> kShift, exact up to kMaxExperts
};
constexpr int kShift = 20;

template <int kExperts>
constexpr int kBlocks = kExperts <= 128 ? 6 : kExperts <= 256 ? 4 : kExperts <= 512 ? 3 : 2;  // as registers allow

// A wave's part of shared memory: a number of 4 bytes an expert, keys before the choice and then scores; behind them
// whether a group has a part in the choice, and then the expert of each slot.
int bytes_of_wave(const ChooseExpertsParams& p) {
  const int groups = p.top_groups < p.num_groups ? p.num_groups : 0, slots = p.top_k * int(sizeof(uint16_t));
  return round_up(p.E, 4) * int(sizeof(float)) + round_up(groups > slots ? groups : slots, 16);
}

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
  wave_barrier();  // slots come where kept is
}

template <int kExperts>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, kBlocks<kExperts>) choose_experts_kernel(MOE_GRID_CONSTANT const Choose p) {
  using L = Lane<kExperts>;
  constexpr int n = L::n;
  MOE_DYNAMIC_SMEM(shared);
  unsigned char* const of_wave = shared + threadIdx.x / kWarpSize * p.bytes_of_wave;
  auto* const keys = reinterpret_cast<uint32_t*>(of_wave);
  auto* const scores = reinterpret_cast<float*>(of_wave);
  uint8_t* const kept = of_wave + round_up(p.E, 4) * sizeof(float);
  auto* const slots = reinterpret_cast<uint16_t*>(kept);
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

    // The key of an expert that is chosen becomes kChosen.
    for (int slot = 0; slot < p.top_k; ++slot) {
      uint32_t most = key[0];
#pragma unroll
      for (int i = 1; i < n; ++i) most = key[i] > most ? key[i] : most;
      most = warp_max(most);
      uint32_t left = 0;  // ~expert: the largest is that of the smallest
#pragma unroll
      for (int i = n - 1; i >= 0; --i) left = key[i] == most ? ~uint32_t(lane.expert(i)) : left;
      const uint32_t first = ~warp_max(left);
#pragma unroll
      for (int i = 0; i < n; ++i) key[i] = uint32_t(lane.expert(i)) == first ? kChosen : key[i];
      if (lane.lane == 0) slots[slot] = uint16_t(first);
    }

    float sum = 1.f;
    if (p.normalize) {
      float of_chosen[n];
#pragma unroll
      for (int i = 0; i < n; ++i) of_chosen[i] = key[i] == kChosen ? score[i] : 0.f;
      sum = L::sum(of_chosen) + kLeastSum;
    }
    // A slot a lane: one division and three stores for all slots, not for each of a lane's experts.
    lane.each_four(score, p.E, [&](const float* four, int at) {
      *reinterpret_cast<Vec16*>(scores + at) =
          Vec16{{as_bits(four[0]), as_bits(four[1]), as_bits(four[2]), as_bits(four[3])}};
    });
    wave_barrier();
#pragma unroll 1
    for (int slot = lane.lane; slot < p.top_k; slot += kWarpSize) {
      const int expert = slots[slot];
      const float share = p.normalize ? scores[expert] / sum : scores[expert];
      const float logit = p.logits[t * p.stride + expert], of_slot = share * p.factor;
      p.ids[t * p.top_k + slot] = expert;
      p.scores[t * p.top_k + slot] = as_float(F32::from_float(of_slot));
      p.topk_logits[t * p.top_k + slot] = as_float(F32::from_float(logit + 0.f * of_slot));
    }
    wave_barrier();
  }
}

}  // namespace

int choose_experts(const ChooseExpertsParams& params, void* stream) {
  Choose p = {params, is_of_fours(params.E, params.T, params.stride, params.logits, params.bias),
              bytes_of_wave(params), params.E / params.num_groups, 0};
  p.multiplier = uint32_t(ceil_div(1 << kShift, p.group_size));
  return with_room(p.E, [&](auto room) {
    const size_t shared = kThreads / kSmallestWarp * p.bytes_of_wave;
    return launch_on_rows(choose_experts_kernel<decltype(room)::value>, p, p.T, stream, shared);
  });
}

}  // namespace moe_fp8
