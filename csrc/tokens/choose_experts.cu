#include "tokens/choose_experts.h"

#include "numerics/floats.h"
#include "platform/memory.h"
#include "primitives/wave_rows.h"

namespace moe_fp8 {
namespace {

constexpr uint32_t kMinusInfinity = 0xff800000u;

// What a lane has of a token's kExperts: fours of neighbours, which are a wave's fours apart.
//
//   experts   0..3    4..7   ...  4W-4..4W-1 | 4W..4W+3  ...
//   lane       0       1             W - 1   |    0      ...
template <int kExperts>
struct Lane {
  static constexpr int kFours = kExperts / 4 > kWarpSize ? kExperts / 4 / kWarpSize : 1, n = 4 * kFours;
  const int lane = threadIdx.x % kWarpSize;

  MOE_DEVICE int expert(int i) const { return 4 * (i / 4 * kWarpSize + lane) + i % 4; }  // rises with i

  // f(values, expert of the first) of every four that begins before expert `end`.
  template <class T, class F>
  MOE_DEVICE void each_four(T (&values)[n], int end, F f) const {
#pragma unroll
    for (int v = 0; v < kFours; ++v)
      if (expert(4 * v) < end) f(values + 4 * v, expert(4 * v));
  }
  // vectors: whether fours are whole and lie at multiples of 16 bytes.
  MOE_DEVICE void load(const float* row, int E, bool vectors, float missing, float (&x)[n]) const {
#pragma unroll
    for (int i = 0; i < n; ++i) x[i] = missing;
    each_four(x, E, [&](float* four, int at) {
      if (vectors) {
        const Vec16 v = *reinterpret_cast<const Vec16*>(row + at);
#pragma unroll
        for (int i = 0; i < 4; ++i) four[i] = as_float(v.w[i]);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) four[i] = at + i < E ? row[at + i] : missing;
      }
    });
  }
  MOE_DEVICE void store(float* row, int E, bool vectors, float (&x)[n]) const {
    each_four(x, E, [&](const float* four, int at) {
      if (vectors) {
        Vec16 v;
#pragma unroll
        for (int i = 0; i < 4; ++i) v.w[i] = F32::from_float(four[i]);
        *reinterpret_cast<Vec16*>(row + at) = v;
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (at + i < E) row[at + i] = as_float(F32::from_float(four[i]));
      }
    });
  }

  // Over all experts; all lanes have it.
  static MOE_DEVICE float sum(const float (&x)[n]) {
    float fours[kFours];
#pragma unroll
    for (int v = 0; v < kFours; ++v) fours[v] = (x[4 * v] + x[4 * v + 1]) + (x[4 * v + 2] + x[4 * v + 3]);
#pragma unroll
    for (int half = kFours / 2; half > 0; half /= 2)
#pragma unroll
      for (int v = 0; v < half; ++v) fours[v] += fours[v + half];
    return wave_sum(fours[0]) + 0.f;  // no -0
  }

  // Logits become scores; slope: their derivatives, of sigmoid alone.
  static MOE_DEVICE void score(Scoring scoring, float (&x)[n], float (&slope)[n]) {
    if (scoring == Scoring::kSigmoid) {
#pragma unroll
      for (int i = 0; i < n; ++i) {
        const Sigmoid s = sigmoid_scores(x[i]);
        x[i] = s.of_x;
        slope[i] = s.of_x * s.of_minus_x;
      }
      return;
    }
    float most = x[0];  // a NaN that it passes by is one of the terms, and so in their sum
#pragma unroll
    for (int i = 1; i < n; ++i) most = x[i] > most ? x[i] : most;
    most = unordered(warp_max(ordered(most)));
#pragma unroll
    for (int i = 0; i < n; ++i) x[i] = softmax_term(x[i], most);
    const float scale = 1.f / sum(x);
#pragma unroll
    for (int i = 0; i < n; ++i) x[i] *= scale;
  }
};

// ---- forward -------------------------------------------------------------------------------------------------------
struct Choose : ChooseExpertsParams {
  bool vectors;
  int group_size;
  uint32_t multiplier;  // expert / group_size = expert * multiplier >> kShift, exact up to kMaxExperts
};
constexpr int kShift = 20;

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
constexpr int kBlocks = kExperts <= 128 ? 4 : kExperts <= 256 ? 3 : kExperts <= 512 ? 2 : 1;  // as registers allow

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
    L::score(p.scoring, score, unused);
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

// ---- backward ------------------------------------------------------------------------------------------------------
struct ChooseBackward : ChooseExpertsBackwardParams {
  bool vectors;
};

// What a wave has of a token's choice: of all experts, or of the slots alone.
template <class L>
struct Chosen {
  float w[L::n] = {};   // the gradient of the score, times the factor
  uint32_t bits = 0;    // a bit an element
  uint32_t stored = 0;  // likewise, of slots: whose gradient may be another than 0

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
      stored |= uint32_t(found && as_bits(logits[i]) != kMinusInfinity) << i;
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
    if (chosen.stored >> i & 1) row[p.id(t, lane.expert(i))] = as_float(F32::from_float(chosen.w[i]));
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

// Whether fours of experts lie at multiples of 16 bytes in all of these, and between rows.
bool is_of_fours(int E, int64_t T, int64_t stride, const void* a, const void* b) {
  const uint64_t between = T > 1 ? stride * sizeof(float) : 0;
  return E % 4 == 0 && (reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) | between) % 16 == 0;
}

// f(constant): the experts that a wave has room for.
template <class F>
int with_room(int E, F f) {
  if (E <= 128) return f(std::integral_constant<int, 128>{});
  if (E <= 256) return f(std::integral_constant<int, 256>{});
  if (E <= 512) return f(std::integral_constant<int, 512>{});
  return f(std::integral_constant<int, kMaxExperts>{});
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
