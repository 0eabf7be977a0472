// Inputs of the kernels that quantize gradients without storing them, and the gradients of eight features of a row.
#pragma once
#include "activations/backward/quantize_activated_backward.h"
#include "activations/gates.h"
#include "activations/policy.h"
#include "primitives/transpose.h"
#include "quantize/types.h"

namespace moe_fp8 {

// The rows of a chunk of 16 positions along tokens, all of one group: `count` of them from `row` on.
struct alignas(16) ChunkRows { int group, row, count, unused; };

struct GradientInputs {
  ActivateBackwardParams gradients;
  float* gathered_scores;   // [P], scratch; written if `gradients` has scores by slot
  const float* row_scores;  // [P], scores by row; null: ones
  int projections;          // of h: 2 (gate and up), or 1
  int vecs;                 // of eight features, in a projection of a row
  uint32_t h_stride;        // in vectors of eight elements
  uint32_t da_stride;       // in vectors of eight elements
};

// The kernels quantize projections + 1 outputs of F features each: the projections of dh, and a, which comes last.
struct GradientsPlan : GradientInputs {
  QuantizeParams quantize_dh, quantize_a;
  ChunkRows* chunks;   // [positions / 16]
  float* multipliers;  // [E, outputs, F]
  uint32_t* amax;      // [E, outputs, 8, F / 8], float32 bits; this order makes the atomics of neighbours coalesce
  int* starts;         // [E + 2], first rows of groups; the last two are the start and the end of the tail
  int rows_per_block;  // of the pass by rows
  int row_blocks;      // blocks of a cluster that share a row in the pass by rows
  int row_threads;     // threads of a row in each of these blocks
  int row_waves;       // waves of a row in all of them
  float* dots;         // [row_waves, P], parts of dscores; null: one block has the whole row, and sums them
  float* partial_sums;  // [positions / 16, F, projections], sums of dh over the rows of a chunk; null: not wanted
};

// A stride below this fits 32 bits, counted in vectors, so that an offset takes one short multiplication.
constexpr int64_t kMaxStride = int64_t(1) << 34;
MOE_DEVICE uint64_t offset(int row, uint32_t stride) { return uint64_t(uint32_t(row)) * stride; }

// Runs before the passes, which have no registers for the slot of a row. Gathers the scores of slots by row, and clears
// dscores, because a slot may have no row.
MOE_DEVICE void gather_scores(const GradientInputs& p, int64_t thread, int64_t threads) {
  const ActivateBackwardParams& backward = p.gradients;
  if (!backward.slots.at) return;
  for (int64_t row = thread; row < backward.P; row += threads) p.gathered_scores[row] = backward.score(row);
  for (int64_t slot = thread; slot < backward.num_slots(); slot += threads) backward.dscores[slot] = 0;
}

// Columns of all outputs in all groups.
MOE_HD int64_t grouped_columns(const GradientsPlan& p) {
  return p.quantize_dh.E * (p.projections + 1) * p.gradients.h.F;
}

// The blocks of MX formats are of 32 columns, but in the blocked layout four of them are neighbours.
inline bool has_whole_blocks(const ActivateBackwardParams& p) {
  return ups_begin_a_block(p.h, p.activation, kBlock);
}

using GradientTypes = Vectorized<BF16, Fp8Variant::kRuntime>;
constexpr int kFeatures = 8;      // of a vector
constexpr int kMagnitudes = 128;  // values of an fp8 byte without its sign
constexpr int64_t kMaxTeamFeatures = kMaxRowTeam * kFeatures;  // of a row in one block

// Words of gathered_scores, which begins the scratch and fills whole 16-byte vectors.
inline int64_t score_words(const ActivateBackwardParams& p) { return p.slots.at ? round_up<int64_t>(p.P, 4) : 0; }
inline GradientInputs gradient_inputs(const ActivateBackwardParams& p, float* scratch) {
  GradientInputs inputs = {p, scratch, p.slots.at ? scratch : p.scores, is_gated(p.activation) ? 2 : 1};
  inputs.gradients.h.interleaved &= inputs.projections > 1;
  inputs.vecs = int(p.h.F / kFeatures);
  inputs.h_stride = uint32_t(p.h.stride / kFeatures);
  inputs.da_stride = uint32_t(p.da_stride / kFeatures);
  return inputs;
}

// Light curves leave registers for more rows or features in flight.
MOE_HD constexpr bool is_light(Curve curve) { return curve != Curve::kClampedSilu && curve != Curve::kGelu; }

// Eight features of a row: h in the chip's E4M3, its scales and da, as they lie in memory, and their gradients. An
// interleaved h is one vector of 16 columns; otherwise gates and ups are a vector of 8 columns each.
template <Activation kActivation, bool kInterleaved_>
struct Gradients {
  static constexpr bool kGated = is_gated(kActivation), kInterleaved = kInterleaved_;
  using Features = Fp8Features<kGated>;
  static constexpr int kProjections = kGated ? 2 : 1, kOutputs = kProjections + 1;
  static constexpr int kColumns = Features::kColumns;
  static constexpr Curve kCurve = kActivations[int(kActivation)].curve;
  static constexpr bool kLight = is_light(kCurve);
  using HVec = std::conditional_t<kInterleaved, Vec16, Vec8>;
  static constexpr int kVectors = kColumns / sizeof(HVec);
  using Pairs = uint32_t[kColumns / 2];  // pairs of neighbouring columns of dh, in bfloat16
  Features h;
  Vec16 da;
  float scale[kVectors], score;

  static constexpr MOE_DEVICE int column(int projection, int j) {
    return column_of<kFeatures, kInterleaved>(projection, j);
  }
  static constexpr MOE_DEVICE int projection_of(int c) { return kInterleaved ? c % 2 : c / kFeatures; }
  static constexpr MOE_DEVICE int feature_of(int c) { return kInterleaved ? c / 2 : c % kFeatures; }
  // The address of vector i of features 8 v to 8 v + 7, in a row of h, or of a matrix like it, that begins at `row`.
  template <class Bytes>
  static MOE_DEVICE auto vector_at(const GradientInputs& p, Bytes* row, int v, int i) {
    using Vector = std::conditional_t<std::is_const_v<Bytes>, const HVec, HVec>;
    return reinterpret_cast<Vector*>(row) + v + i * p.vecs;
  }

  // scale_of(i) gives the scale of vector i.
  template <Reuse kReuse, class ScaleOf>
  static MOE_DEVICE Gradients load(const GradientInputs& p, int row, int v, ScaleOf scale_of) {
    const ActivateBackwardParams& backward = p.gradients;
    Gradients g;
    const auto* h = static_cast<const uint8_t*>(backward.h.h) + offset(row, p.h_stride) * kFeatures;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) g.h.template load<HVec, kReuse>(i, vector_at(p, h, v, i));
    g.da = load_stream<kReuse>(static_cast<const Vec16*>(backward.da) + v + offset(row, p.da_stride));
#pragma unroll
    for (int i = 0; i < kVectors; ++i) g.scale[i] = scale_of(i);
    g.score = p.row_scores ? p.row_scores[row] : 1.f;
    return g;
  }
  // For an h with one float scale a row.
  template <Reuse kReuse>
  static MOE_DEVICE Gradients load(const GradientInputs& p, int row, int v) {
    const float scale = static_cast<const float*>(p.gradients.h.scale.data)[row];
    return load<kReuse>(p, row, v, [&](int) { return scale; });
  }
  MOE_DEVICE float value(int projection, int j) const {
    const int c = column(projection, j);
    return h.template value<false>(c) * scale[c / int(sizeof(HVec))];
  }
  MOE_DEVICE float da_value(int j) const { return element<BF16>(da.w[j / 2], j % 2); }
  MOE_DEVICE float up(int j) const { return kGated ? value(kProjections - 1, j) : 0.f; }
  // The gradient of feature j.
  MOE_DEVICE ActivationGradient gradient(const GradientInputs& p, int j) const {
    return activation_gradient<kActivation>(value(0, j), up(j), score * da_value(j), p.gradients.h.clamp);
  }
  // The same gradient, from a table of the curve for this row, which is indexed by the byte of the gate.
  MOE_DEVICE ActivationGradient gradient(const GradientInputs& p, int j, const Point* table) const {
    const Point& gate = table[h.byte(column(0, j))];
    return activation_gradient<kActivation>(gate, up(j), score * da_value(j), p.gradients.h.clamp);
  }
  // Rounds dh and scores * a of all eight features; gradient_of(j) is the gradient of feature j. Returns the eight
  // features' part of dscores.
  template <class GradientOf>
  MOE_DEVICE float round(GradientOf gradient_of, Pairs& dh, uint32_t (&a)[kFeatures / 2]) const {
    float dot = 0;
#pragma unroll
    for (int w = 0; w < kFeatures / 2; ++w) {
      const ActivationGradient lo = gradient_of(2 * w), hi = gradient_of(2 * w + 1);
      dot = fmaf(da_value(2 * w + 1), hi.a, fmaf(da_value(2 * w), lo.a, dot));
      a[w] = packed_bf16(score * lo.a, score * hi.a);
      if constexpr (kInterleaved) {
        dh[2 * w] = packed_bf16(lo.gate, lo.up);
        dh[2 * w + 1] = packed_bf16(hi.gate, hi.up);
      } else {
        dh[w] = packed_bf16(lo.gate, hi.gate);
        if constexpr (kProjections > 1) dh[kFeatures / 2 + w] = packed_bf16(lo.up, hi.up);
      }
    }
    return dot;
  }
  // Casts and stores dh along a row; m has a multiplier for each vector.
  template <class Cast>
  static MOE_DEVICE void store(const GradientInputs& p, const QuantizeParams& to, const Pairs& dh, int row, int v,
                               const float (&m)[kVectors], Cast cast) {
    uint8_t* q = to.q + offset(row, uint32_t(to.K));
#pragma unroll
    for (int i = 0, pair = 0; i < kVectors; ++i) {
      HVec bytes;
#pragma unroll
      for (uint32_t& word : bytes.w) {
        word = cast_words<BF16>(dh + pair, m[i], m[i], m[i], m[i], cast);
        pair += 2;
      }
      store_stream(vector_at(p, q, v, i), bytes);
    }
  }
  // Stores dh and scores * a in bfloat16, where they are wanted.
  MOE_DEVICE void keep(const GradientInputs& p, int row, int v, const Pairs& dh,
                       const uint32_t (&a)[kFeatures / 2]) const {
    const ActivateBackwardParams& backward = p.gradients;
    if (backward.dh) {
      Vec16* to = static_cast<Vec16*>(backward.dh) + offset(row, uint32_t(kProjections * p.vecs));
#pragma unroll
      for (int c = 0; c < kProjections; ++c)
        store_stream(to + (kInterleaved ? kProjections * v + c : v + c * p.vecs),
                     Vec16{{dh[4 * c], dh[4 * c + 1], dh[4 * c + 2], dh[4 * c + 3]}});
    }
    if (backward.a)
      store_stream(static_cast<Vec16*>(backward.a) + offset(row, uint32_t(p.vecs)) + v,
                   Vec16{{a[0], a[1], a[2], a[3]}});
  }
  // Fills the two entries of a table for a gate of these bits and for its negative. The negative of a FNUZ zero is NaN.
  static MOE_DEVICE void tabulate(const GradientInputs& p, Point* table, int bits, float scale) {
    const Clamp& clamp = p.gradients.h.clamp;
    const int negated = bits | kMagnitudes;
    const float gate = decode_native<false>(uint32_t(bits), 0) * scale;
    table[bits] = curve_at<kCurve>(gate, clamp);
    const bool symmetric = kHardwareFp8 != HardwareFp8::kFNUZ;
    table[negated] = curve_at<kCurve>(symmetric ? -gate : decode_native<false>(uint32_t(negated), 0) * scale, clamp);
  }
  // Shifts the registers so that feature n becomes feature 0.
  template <int n>
  MOE_DEVICE void advance() {
    h.template advance<kInterleaved, n>();
    shift_bytes<2 * n, 0, 4>(da.w);
  }
};

// Calls f with TypeOf a type of Gradients. A kernel calls this once, outside of its loops.
template <class Activations, class F>
MOE_DEVICE void with_gradients(const GradientInputs& p, F f) {
  Activations::dispatch(p.gradients.activation, [&](auto activation) {
    constexpr Activation kActivation = decltype(activation)::value;
    if constexpr (kIsGated<kActivation>)
      if (p.gradients.h.interleaved) return f(TypeOf<Gradients<kActivation, true>>{});
    f(TypeOf<Gradients<kActivation, false>>{});
  });
}

// ---- the passes: by rows and by columns for scales of whole rows, by tiles for scales of blocks. Along rows only, the
// pass by rows, or by blocks of rows ----------------------------------------------------------------------------------
int launch_gradient_rows(const GradientsPlan& plan, void* stream);
int launch_gradient_columns(const GradientsPlan& plan, void* stream);
int launch_gradient_row_blocks(const QuantizeActivatedBackwardParams& p, void* stream);
int launch_gradient_tiles(const QuantizeActivatedBackwardParams& p, void* stream);
// True if the kernels of blocks take these sizes on this GPU. The caller has checked the types.
bool can_take_gradient_row_blocks(const QuantizeActivatedBackwardParams& p);
bool can_take_gradient_tiles(const QuantizeActivatedBackwardParams& p);
// Words of scratch behind the scores.
int64_t gradient_row_blocks_words(const QuantizeActivatedBackwardParams& p);
int64_t gradient_tiles_words(const QuantizeActivatedBackwardParams& p);

}  // namespace moe_fp8
