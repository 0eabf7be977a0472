#include "primitives/elements.h"
#include "tokens/lanes_of_experts.h"

namespace moe_fp8 {
namespace {

constexpr size_t kUnaskedShared = 48 << 10;  // bytes that a block has on every chip unless it asks for more

struct ChooseBackward : ChooseExpertsBackwardParams {
  bool loads_vectors, stores_vectors;
};

// A slot a lane, and kSlots lanes a token: where slots are few, a wave has several tokens at once.
template <int kSlots>
struct Slot {
  static constexpr int kLanes = kSlots, kMostTokens = kLargestWarp / kSlots, n = 1;
  const int lane = threadIdx.x % kLanes;

  MOE_DEVICE int expert(int) const { return lane; }
  MOE_DEVICE void load(const float* row, int slots, bool, float missing, float (&x)[1]) const {
    x[0] = lane < slots ? row[lane] : missing;
  }
  // In the order of Lane's: fours of neighbours, then halves. Both lanes of an add have its bits.
  static MOE_DEVICE float sum(const float (&x)[1]) {
    float v = x[0] + as_float(shfl_xor(as_bits(x[0]), 1));
    v += as_float(shfl_xor(as_bits(v), 2));
#pragma unroll
    for (int mask = kLanes / 2; mask >= 4; mask /= 2) v += as_float(shfl_xor(as_bits(v), mask));
    return v + 0.f;
  }
  static MOE_DEVICE uint32_t max(uint32_t v) {
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) {
      const uint32_t other = shfl_xor(v, mask);
      v = other > v ? other : v;
    }
    return v;
  }
};

// What lanes have of a token's choice: of all experts, or of the slots alone.
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
      const float grad = slot < p.top_k ? p.grad[t * p.grad_stride + slot] : 0.f;  // on its way beside the id
      const bool found = id >= 0 && id < p.E;
      w[i] = found ? grad * p.factor : 0.f;
      logits[i] = found ? logits[i] : as_float(kMinusInfinity);
      bits |= uint32_t(found) << i;
      expert[i] = found && as_bits(logits[i]) != kMinusInfinity ? int(id) : -1;
    }
  }
};

// Four neighbours of a token's results, or those of them that there are. row: the token's, 4 E bytes of either kind.
MOE_DEVICE void store_four(const ChooseBackward& p, uint8_t* row, int at, const float* four) {
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

// A row of results from those of slots; row: E floats, rounded up to fours, of shared memory.
template <class L>
MOE_DEVICE void store_slots(const ChooseBackward& p, const L& lane, uint8_t* out, const Chosen<L>& chosen, float* row) {
  constexpr int kStep = 4 * L::kLanes;
  for (int e = 4 * lane.lane; e < p.E; e += kStep) *reinterpret_cast<Vec16*>(row + e) = Vec16{};
  wave_barrier();
#pragma unroll
  for (int i = 0; i < L::n; ++i)
    if (chosen.expert[i] >= 0) row[chosen.expert[i]] = chosen.w[i];
  wave_barrier();
  for (int e = 4 * lane.lane; e < p.E; e += kStep) {
    const Vec16 v = *reinterpret_cast<const Vec16*>(row + e);
    const float four[4] = {as_float(v.w[0]), as_float(v.w[1]), as_float(v.w[2]), as_float(v.w[3])};
    store_four(p, out, e, four);
  }
  wave_barrier();
}

template <class L>
constexpr int kBlocks = L::n == 1 ? 8 : L::n == 4 ? 4 : L::n == 8 ? 3 : L::n == 16 ? 2 : 1;  // as registers allow

// kOfChosen: L has the slots, which alone share the score; else all experts.
template <class L, bool kOfChosen>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, kBlocks<L>)
    choose_experts_backward_kernel(MOE_GRID_CONSTANT const ChooseBackward p) {
  constexpr int n = L::n, kTokens = kWarpSize / L::kLanes;  // of a wave
  MOE_DYNAMIC_SMEM(shared);
  float* const row = reinterpret_cast<float*>(shared) + threadIdx.x / L::kLanes * round_up(p.E, 4);
  const L lane;
  wait_for_previous_kernel();
  for (int64_t first = kTokens * first_row(); first < p.T; first += kTokens * rows_at_once()) {
    // Waves stay whole: lanes behind the last token have it too, and write the same.
    const int64_t own = first + threadIdx.x % kWarpSize / L::kLanes, t = own < p.T ? own : p.T - 1;
    float score[n], slope[n], terms[n];
    const int width = kOfChosen ? int(p.top_k) : p.E;
    lane.load(p.logits + t * p.stride, width, p.loads_vectors, as_float(kMinusInfinity), score);
    Chosen<L> chosen;
    if constexpr (kOfChosen) chosen.find_among_slots(p, lane, t, score);
    else chosen.find_among_experts(p, lane, t);
    score_logits<L>(p.scoring, score, slope);
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
    uint8_t* const out = static_cast<uint8_t*>(p.dlogits) + t * p.E * sizeof(float);
    if constexpr (kOfChosen) store_slots(p, lane, out, chosen, row);
    else lane.each_four(w, p.E, [&](const float* four, int at) { store_four(p, out, at, four); });
  }
}

template <class L>
size_t shared_of_block(int E) {  // for its rows, which are fewer where waves are larger than the host knows
  return kThreads / L::kLanes * round_up(E, 4) * sizeof(float);
}
template <class L>
int launch_of_chosen(const ChooseBackward& p, void* stream) {
  const int64_t waves = ceil_div<int64_t>(p.T, L::kMostTokens);
  return launch_on_rows(choose_experts_backward_kernel<L, true>, p, waves, stream, shared_of_block<L>(p.E));
}

}  // namespace

int choose_experts_backward(const ChooseExpertsBackwardParams& params, void* stream) {
  const ChooseBackward p = {params, is_of_fours(int(params.width()), params.T, params.stride, params.logits),
                            is_of_fours(params.E, 1, 0, params.dlogits)};
  if (!p.of_chosen)
    return with_room(p.E, [&](auto room) {
      return launch_on_rows(choose_experts_backward_kernel<Lane<decltype(room)::value>, false>, p, p.T, stream);
    });
  if (p.top_k <= 8 && shared_of_block<Slot<8>>(p.E) <= kUnaskedShared) return launch_of_chosen<Slot<8>>(p, stream);
  if (p.top_k <= 32) return launch_of_chosen<Slot<32>>(p, stream);
  return launch_of_chosen<Lane<kMaxExperts>>(p, stream);
}

}  // namespace moe_fp8
