// Teams: so many neighbouring lanes of a wave have kVecs vectors each of kRows neighbouring rows, or of rows so many
// apart. What they know of scales, and where these go, by format.
#pragma once
#include "activations/gates.h"
#include "activations/quantize_activated.h"
#include "quantize/row.h"

namespace moe_fp8 {

// Bound by arithmetic: with its casts and those of h, an activation takes some 33 instructions on sm_90a. So a lane has
// four vectors of a part of h at once, which are bytes enough under way, and what is no arithmetic of theirs is done
// for all four together: a lane makes one of the scales, and tells it to the others.
using Part = Vectors<BF16>;
using Activated = PlainGates<Part, false>::Held;  // a vector
constexpr int kFeaturesOfVec = Part::kElements, kVecsOfLane = 4;
constexpr int kThreadsOfRow = 256, kThreadsOfBlock = 128;  // at most; of a block of several teams

// A row of a team has kScales scales: of h, and number kOfA. A lane knows the amax of kOwn of them, from own_scale()
// on, of own_row(), as do all kAlike that it is one of.
template <int kLanes_, int kRows_, int kScales_, int kOfA_, int kOwn_ = 1>
struct Team {
  static constexpr int kLanes = kLanes_, kRows = kRows_, kScales = kScales_, kOfA = kOfA_, kVecs = kVecsOfLane / kRows;
  static constexpr int kOwn = kOwn_, kKnown = kScales / kOwn * kRows, kAlike = kLanes / kKnown;

  static MOE_DEVICE int lane() { return threadIdx.x % kLanes; }
  static MOE_DEVICE int own_scale() { return lane() / (kRows * kAlike) * kOwn; }
  static MOE_DEVICE int own_row() { return lane() / kAlike % kRows; }
  static MOE_DEVICE float told(float own, int scale, int row) {
    const int first_lane = threadIdx.x % kWarpSize / kLanes * kLanes;
    return as_float(shfl(as_bits(own), first_lane + (scale / kOwn * kRows + row) * kAlike));
  }
  static MOE_DEVICE float told_of_a(const float (&own)[kOwn], int row) { return told(own[kOfA % kOwn], kOfA, row); }

  // Rows that are neighbours.
  static constexpr int kRowStep = 1, kRowsOfUnit = 1;
  static constexpr int kThreads = kThreadsOfRow, kBlocks = 3;
  static MOE_DEVICE int64_t first_row(int64_t team) { return team * kRows; }
};

struct TeamsPlan : QuantizeActivatedParams { bool gated, blocked; };

constexpr int64_t kMostFeatures = int64_t(kThreadsOfRow) * kVecsOfLane * kFeaturesOfVec;

// A scale for a row of h and one for that of a. Where rows are long, waves of a block share one.
template <int kRows_>
struct WholeTeam : Team<kWarpSize, kRows_, 2, 1> {
  using Base = Team<kWarpSize, kRows_, 2, 1>;
  using Base::kKnown, Base::kOfA, Base::kRows;
  using Scale = ScaleF32;
  using Shared = uint32_t[2][kThreadsOfRow / 32][kKnown];  // by turns, for a wave may be ahead of others that read
  Shared& of_wave;
  int turn = 0;

  explicit MOE_DEVICE WholeTeam(Shared& shared) : of_wave(shared) {}

  MOE_DEVICE void amax(const uint32_t (&of_h)[kRows][2], const uint32_t (&of_a)[kRows], bool, uint32_t (&own_of)[1]) {
    uint32_t of[kKnown];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      of[r] = max_magnitude<BF16>(of_h[r][0], of_h[r][1]);
      of[kOfA * kRows + r] = of_a[r];
    }
    uint32_t& own = own_of[0];
    own = amax_of_rows<BF16, kWarpSize>(of, Base::lane());
    const int waves = blockDim.x / kWarpSize;
    if (waves == 1) return;
    auto* const of_team = of_wave[turn] + threadIdx.y * waves;
    const int known = Base::lane() / Base::kAlike;
    if (Base::lane() % Base::kAlike == 0) of_team[threadIdx.x / kWarpSize][known] = own;
    __syncthreads();
    for (int w = 0; w < waves; ++w) own = own > of_team[w][known] ? own : of_team[w][known];
    turn ^= 1;
  }
  static MOE_DEVICE float told_of_h(const float (&own)[1], int, bool, int row) { return Base::told(own[0], 0, row); }
  template <class Columns>
  static MOE_DEVICE void store(const TeamsPlan& p, const Columns&, int, int64_t row0, int live,
                               const Scale (&s)[1]) {
    const QuantizeParams& to = Base::own_scale() == kOfA ? p.of_a : p.of_h;
    if (threadIdx.x < kWarpSize && Base::lane() % Base::kAlike == 0 && Base::own_row() < live && to.rows > 0)
      static_cast<float*>(to.scale)[row0 + Base::own_row()] = s[0].dequant();
  }
};

// A scale for 128 elements: of gates, of ups and of activations, or of the two halves of what is interleaved, which are
// those of the lanes. The last lanes of a team have none. Rows between columns of scales have scales of zero.
struct BlockTeam : Team<kBlock / kFeaturesOfVec, 4, 4, 2> {
  using Scale = ScaleF32;
  struct Shared {};
  explicit MOE_DEVICE BlockTeam(Shared&) {}

  static MOE_DEVICE int half() { return lane() / (kLanes / 2); }
  static MOE_DEVICE void amax(const uint32_t (&of_h)[kRows][2], const uint32_t (&of_a)[kRows], bool interleaved,
                              uint32_t (&own)[1]) {
    uint32_t of[kKnown] = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      of[r] = of_h[r][0];
      of[kRows + r] = of_h[r][1];
      of[kOfA * kRows + r] = of_a[r];
    }
    if (interleaved) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const uint32_t both = max_magnitude<BF16>(of_h[r][0], of_h[r][1]);
        of[r] = half() ? 0 : both;
        of[kRows + r] = half() ? both : 0;
      }
    }
    own[0] = amax_of_rows<BF16, kLanes>(of, lane());
  }
  static MOE_DEVICE float told_of_h(const float (&own)[1], int part, bool interleaved, int row) {
    return told(own[0], interleaved ? half() : part, row);
  }
  template <class Columns>
  static MOE_DEVICE void store(const TeamsPlan& p, const Columns& columns, int v, int64_t row0, int live,
                               const Scale (&s)[1]) {
    const int scale = own_scale(), parts = Columns::kParts, of_team = v / kLanes, of_part = int(p.h.F / kBlock);
    const bool of_a = scale == kOfA;
    const QuantizeParams& to = of_a ? p.of_a : p.of_h;
    if (of_team >= of_part || (!of_a && scale >= parts) || to.rows == 0 || live <= 0) return;
    const int64_t block = of_a ? of_team : columns.interleaved ? of_team * 2 + scale : of_team + scale * of_part;
    store_stream(static_cast<float*>(to.scale) + block * scale_stride(p.of_a.rows) + row0 + own_row(),
                 own_row() < live ? s[0].dequant() : 0.f);
  }
};

// E8M0 for 32 elements: likewise. Rows are 32 apart, so that their scales are neighbours where they are blocked; those
// behind the last have scales of zero there, but for what is in groups.
struct MxTeam : Team<kMxBlock / kFeaturesOfVec, 4, 3, 2, 3> {
  using Scale = ScaleE8M0;
  struct Shared {};
  explicit MOE_DEVICE MxTeam(Shared&) {}

  static constexpr int kRowStep = kScaleRows / kRows, kRowsOfUnit = kScaleRows;
  static constexpr int kThreads = kThreadsOfBlock, kBlocks = 3;
  static MOE_DEVICE int64_t first_row(int64_t team) { return team / kRowStep * kScaleRows + team % kRowStep; }

  static MOE_DEVICE int half() { return lane() / (kLanes / 2); }
  static MOE_DEVICE void amax(const uint32_t (&of_h)[kRows][2], const uint32_t (&of_a)[kRows], bool interleaved,
                              uint32_t (&own)[kOwn]) {
    uint32_t of[kScales][kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const uint32_t both = max_magnitude<BF16>(of_h[r][0], of_h[r][1]);
#pragma unroll
      for (int part = 0; part < 2; ++part) of[part][r] = !interleaved ? of_h[r][part] : half() == part ? both : 0;
      of[kOfA][r] = of_a[r];
    }
#pragma unroll
    for (int i = 0; i < kScales; ++i) own[i] = amax_of_rows<BF16, kLanes>(of[i], lane());
  }
  static MOE_DEVICE float told_of_h(const float (&own)[kOwn], int part, bool interleaved, int row) {
    const float first = told(own[0], 0, row), second = told(own[1], 1, row);
    return (interleaved ? half() : part) ? second : first;
  }
  template <class Columns>
  static MOE_DEVICE void store(const TeamsPlan& p, const Columns& columns, int v, int64_t row0, int,
                               const Scale (&s)[kOwn]) {
    const int block = v / kLanes, of_part = int(p.h.F / kMxBlock);
    const int64_t row = row0 + own_row() * kRowStep;
    if (block >= of_part) return;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const bool of_a = i == kOfA;
      const QuantizeParams& to = of_a ? p.of_a : p.of_h;
      if ((!of_a && i >= Columns::kParts) || to.rows == 0) continue;
      const int64_t column = of_a ? block : columns.interleaved ? block * 2 + i : block + i * of_part;
      const int64_t stride = to.K / kMxBlock;
      const uint8_t scale = row < to.rows ? s[i].stored() : uint8_t(0);
      auto* const scales = static_cast<uint8_t*>(to.scale);
      if (!p.blocked) {
        if (row < to.rows) store_stream(scales + row * stride + column, scale);
      } else if (const int64_t place = place_of(to, row); place >= 0) {
        store_stream(scales + blocked_offset(place, column, stride), scale);
      }
    }
  }

 private:
  static MOE_DEVICE int64_t place_of(const QuantizeParams& to, int64_t row) {
    if (!to.scratch) return row;
    return row < to.rows ? to.scratch[row] : -1;
  }
};

}  // namespace moe_fp8
