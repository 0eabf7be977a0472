// What all passes over h and da share: where rows and groups are, and the gradients of eight features of a row.
#pragma once
#include "activations/gates.h"
#include "activations/backward/quantize_activated_backward.h"
#include "primitives/transpose.h"
#include "quantize/types.h"

namespace moe_fp8 {

// The rows of a chunk of 16 positions along tokens, which are of one group: `count` of them from `row` on.
struct alignas(16) ChunkRows { int group, row, count, unused; };

// What gradients are computed from.
struct GradientInputs {
  ActivateBackwardParams gradients;
  float* taken_scores;  // [P], where those of gradients are of slots
  const float* scores;  // [P], of rows; null: ones
  int parts;           // of h: gates, and ups if there are any; a is one more
  int vecs;            // of eight features, in a part of a row
  uint32_t h_stride;   // likewise
  uint32_t da_stride;  // likewise
};

struct GradientsPlan : GradientInputs {
  QuantizeParams of_dh, of_a;
  ChunkRows* chunks;   // [positions / 16]
  float* multipliers;  // [E, parts + 1, F]
  uint32_t* amax;      // likewise, float32 bits; of a part [8, F / 8], so that neighbours' maxima are neighbours
  int* starts;         // [E + 2], of groups' rows; the last two are the tail's start and end
  int share;           // rows of a block of the first pass
};

// Strides are such that 32 bits hold them in vectors: a short multiplication.
constexpr int64_t kLongestStride = int64_t(1) << 34;
MOE_DEVICE uint64_t offset(int row, uint32_t stride) { return uint64_t(uint32_t(row)) * stride; }

// Before the passes, which have no registers for a row's slot: scores of slots by rows, and zeros, for slots without a
// row.
MOE_DEVICE void take_scores(const GradientInputs& p, int64_t thread, int64_t threads) {
  const ActivateBackwardParams& of = p.gradients;
  if (!of.slots.at) return;
  for (int64_t row = thread; row < of.P; row += threads) p.taken_scores[row] = of.score(row);
  for (int64_t slot = thread; slot < of.num_slots(); slot += threads) of.dscores[slot] = 0;
}

// Of dh and of a, in all groups.
MOE_HD int64_t columns_of_groups(const GradientsPlan& p) { return p.of_dh.E * (p.parts + 1) * p.gradients.h.F; }

using GradientTypes = Vectorized<BF16, Fp8Variant::kRuntime>;
constexpr int kFeatures = 8;      // of a vector
constexpr int kMagnitudes = 128;  // that an fp8 element may have
constexpr int kMostTeam = 256;    // threads that share a row in the first pass, a vector each
constexpr int64_t kMostFeatures = kMostTeam * kFeatures;

// Of scratch that begins with taken_scores, in whole vectors.
inline int64_t score_words(const ActivateBackwardParams& p) { return p.slots.at ? round_up<int64_t>(p.P, 4) : 0; }
inline GradientInputs gradient_inputs(const ActivateBackwardParams& p, float* scratch) {
  GradientInputs inputs = {p, scratch, p.slots.at ? scratch : p.scores, is_gated(p.activation) ? 2 : 1};
  inputs.gradients.h.interleaved &= inputs.parts > 1;
  inputs.vecs = int(p.h.F / kFeatures);
  inputs.h_stride = uint32_t(p.h.stride / kFeatures);
  inputs.da_stride = uint32_t(p.da_stride / kFeatures);
  return inputs;
}

// h, of the chip's E4M3 with a scale a row, and da of eight features of a row. Columns of h are numbered as they lie in
// registers and, eight or sixteen neighbours at a time, in memory; kInTurns: gates and ups are neighbours.
template <Activation kActivation, bool kInTurns>
struct Gradients {
  static constexpr bool kGated = is_gated(kActivation), kInterleaved = kInTurns;
  static constexpr int kParts = kGated ? 2 : 1, kColumns = kParts * kFeatures;
  // Others have fewer at work at once, for want of registers.
  static constexpr Curve kCurve = kActivations[int(kActivation)].curve;
  static constexpr bool kLight = kCurve != Curve::kClampedSilu && kCurve != Curve::kGelu;
  using Neighbours = std::conditional_t<kInTurns, Vec16, Vec8>;
  static constexpr int kPieces = kColumns / sizeof(Neighbours);
  using Pairs = uint32_t[kColumns / 2];  // of columns of dh, in bfloat16
  Neighbours h[kPieces];
  Vec16 da;
  float scale[kPieces], score;

  static constexpr MOE_DEVICE int column(int part, int j) { return kInTurns ? 2 * j + part : part * kFeatures + j; }
  static constexpr MOE_DEVICE int part_of(int c) { return kInTurns ? c % 2 : c / kFeatures; }
  static constexpr MOE_DEVICE int feature_of(int c) { return kInTurns ? c / 2 : c % kFeatures; }
  // Of number v of those of a row: their piece i, in rows that begin at h.
  template <class Bytes>
  static MOE_DEVICE auto piece(const GradientInputs& p, Bytes* h, int v, int i) {
    using Piece = std::conditional_t<std::is_const_v<Bytes>, const Neighbours, Neighbours>;
    return reinterpret_cast<Piece*>(h) + v + i * p.vecs;
  }

  // scale_of(i): that of piece i.
  template <Reuse kReuse, class ScaleOf>
  static MOE_DEVICE Gradients load(const GradientInputs& p, int row, int v, ScaleOf scale_of) {
    const ActivateBackwardParams& of = p.gradients;
    Gradients g;
    const auto* h = static_cast<const uint8_t*>(of.h.h) + offset(row, p.h_stride) * kFeatures;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) g.h[i] = load_stream<kReuse>(piece(p, h, v, i));
    g.da = load_stream<kReuse>(static_cast<const Vec16*>(of.da) + v + offset(row, p.da_stride));
#pragma unroll
    for (int i = 0; i < kPieces; ++i) g.scale[i] = scale_of(i);
    g.score = p.scores ? p.scores[row] : 1.f;
    return g;
  }
  // Of an h with a scale a row.
  template <Reuse kReuse>
  static MOE_DEVICE Gradients load(const GradientInputs& p, int row, int v) {
    const float scale = static_cast<const float*>(p.gradients.h.scale.data)[row];
    return load<kReuse>(p, row, v, [&](int) { return scale; });
  }
  MOE_DEVICE float value(int part, int j) const {
    constexpr int n = sizeof(Neighbours);
    const int c = column(part, j);
    return decode_native<false>(h[c / n].w[c % n / 4], c % 4) * scale[c / n];
  }
  MOE_DEVICE float da_of(int j) const { return element<BF16>(da.w[j / 2], j % 2); }
  MOE_DEVICE float up(int j) const { return kGated ? value(kParts - 1, j) : 0.f; }
  // Of feature j.
  MOE_DEVICE ActivationGradient of(int j) const {
    return activation_gradient<kActivation>(value(0, j), up(j), score * da_of(j));
  }
  // The same, from the points of a row, by the byte of its gate.
  MOE_DEVICE ActivationGradient of(int j, const Point* points) const {
    constexpr int n = sizeof(Neighbours);
    const int c = column(0, j);
    return activation_gradient<kActivation>(points[h[c / n].w[c % n / 4] >> c % 4 * 8 & 0xff], up(j), score * da_of(j));
  }
  // Of all eight, where gradient(j) is that of feature j, rounded: dh and scores * a. Returns their part of dscores.
  template <class GradientOf>
  MOE_DEVICE float round(GradientOf gradient, Pairs& dh, uint32_t (&a)[kFeatures / 2]) const {
    float dot = 0;
#pragma unroll
    for (int w = 0; w < kFeatures / 2; ++w) {
      const ActivationGradient lo = gradient(2 * w), hi = gradient(2 * w + 1);
      dot = fmaf(da_of(2 * w + 1), hi.a, fmaf(da_of(2 * w), lo.a, dot));
      a[w] = packed_bf16(score * lo.a, score * hi.a);
      if constexpr (kInterleaved) {
        dh[2 * w] = packed_bf16(lo.gate, lo.up);
        dh[2 * w + 1] = packed_bf16(hi.gate, hi.up);
      } else {
        dh[w] = packed_bf16(lo.gate, hi.gate);
        if constexpr (kParts > 1) dh[kFeatures / 2 + w] = packed_bf16(lo.up, hi.up);
      }
    }
    return dot;
  }
  // Of a gate of these bits in a row of this scale, and of its negative. A FNUZ zero's negative is NaN.
  static MOE_DEVICE void find_points(Point* points, int bits, float scale) {
    const int negated = bits | kMagnitudes;
    const float gate = decode_native<false>(uint32_t(bits), 0) * scale;
    points[bits] = point_of<kCurve>(gate);
    const bool alike = kHardwareFp8 != HardwareFp8::kFNUZ;
    points[negated] = point_of<kCurve>(alike ? -gate : decode_native<false>(uint32_t(negated), 0) * scale);
  }
  // Features n, n + 1, ... in the place of the first.
  template <int n>
  MOE_DEVICE void advance() {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) shift<kInTurns ? 2 * n : n>(h[i].w);
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
};

// f(a type of Gradients), once, outside of loops.
template <class Activations, class F>
MOE_DEVICE void with_gradients(const GradientInputs& p, F f) {
  Activations::with(p.gradients.activation, [&](auto activation) {
    constexpr Activation kActivation = decltype(activation)::value;
    if constexpr (kIsGated<kActivation>)
      if (p.gradients.h.interleaved) return f(TypeOf<Gradients<kActivation, true>>{});
    f(TypeOf<Gradients<kActivation, false>>{});
  });
}

int launch_gradient_rows(GradientsPlan plan, void* stream);
int launch_gradient_columns(const GradientsPlan& plan, void* stream);

}  // namespace moe_fp8
