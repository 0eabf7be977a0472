// What both passes over h and da share: where rows and groups are, and the gradients of eight features of a row.
#pragma once
#include "activations/gates.h"
#include "activations/quantize_activated_backward.h"
#include "primitives/transpose.h"
#include "quantize/types.h"

namespace moe_fp8 {

// The rows of 16 positions along tokens, which are of one group: `count` of them from `row` on.
struct alignas(16) Slot { int group, row, count, unused; };

struct GradientsPlan : QuantizeActivatedBackwardParams {
  int parts;           // of h: gates, and ups if there are any; a is one more
  Slot* slots;         // [positions / 16]
  float* multipliers;  // [E, parts + 1, F]
  uint32_t* amax;      // likewise, float32 bits; of a part [8, F / 8], so that neighbours' maxima are neighbours
  int* starts;         // [E + 2], of groups' rows; the last two are the tail's start and end
  uint32_t h_stride;   // vectors of eight features
  uint32_t da_stride;  // likewise
  int share;           // rows of a block of the first pass
};

// Strides are such that 32 bits hold them in vectors: a short multiplication.
constexpr int64_t kLongestStride = int64_t(1) << 34;
MOE_DEVICE uint64_t offset(int row, uint32_t stride) { return uint64_t(uint32_t(row)) * stride; }

// Of dh and of a, in all groups.
MOE_HD int64_t columns_of_groups(const GradientsPlan& p) { return p.of_dh.E * (p.parts + 1) * p.gradients.h.F; }

using GradientTypes = Fast<BF16, Kind::kEither>;
constexpr int kFeatures = 8;    // of a vector
constexpr int kMostTeam = 256;  // threads that share a row in the first pass, a vector each
constexpr int64_t kMostFeatures = kMostTeam * kFeatures;

// h, of the chip's E4M3 with a scale a row, and da of eight features of a row.
template <Activation kActivation>
struct Gradients {
  static constexpr bool kGated = is_gated(kActivation);
  static constexpr int kParts = kGated ? 2 : 1;
  // Whether fewer are at work at once, for want of registers.
  static constexpr bool kClamped = kActivations[int(kActivation)].curve == Curve::kClampedSilu;
  Vec8 part[kParts];
  Vec16 da;
  float scale, score;

  // Number v of those of a row.
  template <Reuse kReuse>
  static MOE_DEVICE Gradients load(const GradientsPlan& p, int row, int v) {
    const ActivateBackwardParams& of = p.gradients;
    const GateColumns<kFeatures, kGated> columns(of.h);
    Gradients g;
#pragma unroll
    for (int i = 0; i < kParts; ++i)
      g.part[i] = load_stream<kReuse>(static_cast<const Vec8*>(of.h.h) + columns.at(v, i) / kFeatures +
                                      offset(row, p.h_stride));
    g.da = load_stream<kReuse>(static_cast<const Vec16*>(of.da) + v + offset(row, p.da_stride));
    g.scale = static_cast<const float*>(of.h.scale.data)[row];
    g.score = of.scores ? of.scores[row] : 1.f;
    return g;
  }
  // Gates and ups that lie in turns, apart.
  MOE_DEVICE void separate(bool interleaved) {
    if constexpr (kGated) {
      if (!interleaved) return;
      constexpr int n = sizeof(Vec8) / 4;
      uint32_t gates[n], ups[n];
#pragma unroll
      for (int i = 0; i < n; ++i) {
        const uint32_t first = part[2 * i / n].w[2 * i % n], other = part[2 * i / n].w[2 * i % n + 1];
        gates[i] = pick_bytes(first, other, 0x6420);
        ups[i] = pick_bytes(first, other, 0x7531);
      }
#pragma unroll
      for (int i = 0; i < n; ++i) {
        part[0].w[i] = gates[i];
        part[1].w[i] = ups[i];
      }
    }
  }
  MOE_DEVICE float value(int i, int j) const {
    return decode_native<false>(part[i].w[j / 4], j % 4) * scale;
  }
  MOE_DEVICE float da_of(int j) const { return element<BF16>(da.w[j / 2], j % 2); }
  // Features n, n + 1, ... in the place of the first.
  template <int n>
  MOE_DEVICE void advance() {
#pragma unroll
    for (int i = 0; i < kParts; ++i) shift<n>(part[i].w);
    shift<2 * n>(da.w);
  }
  template <int kBytes, int kWords>
  static MOE_DEVICE void shift(uint32_t (&w)[kWords]) {
#pragma unroll
    for (int i = 0; i + kBytes / 4 < kWords; ++i) {
      if constexpr (kBytes % 4 == 0) w[i] = w[i + kBytes / 4];
      else w[i] = i + 1 < kWords ? pick_bytes(w[i], w[i + 1], 0x5432) : w[i] >> 16;
    }
  }
  // Of feature j.
  MOE_DEVICE ActivationGradient of(int j) const {
    return activation_gradient<kActivation>(value(0, j), kGated ? value(kParts - 1, j) : 0.f, score * da_of(j));
  }
};

int launch_gradient_rows(GradientsPlan plan, void* stream);
int launch_gradient_columns(const GradientsPlan& plan, void* stream);

}  // namespace moe_fp8
