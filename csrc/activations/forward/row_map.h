// Teams: so many neighbouring lanes of a wave have kVecs vectors each of kRows neighbouring rows, or of rows so many
// apart. What they know of scales, and where these go, by format.
#pragma once
#include "activations/gates.h"
#include "activations/forward/quantize_activated.h"
#include "quantize/row.h"

namespace moe_fp8 {

// Bound by arithmetic: with its casts and those of h, an activation takes some 33 instructions on sm_90a. So a lane has
// four vectors of a part of h at once, which are bytes enough under way, and what is no arithmetic of theirs is done
// for all four together: a lane makes one of the scales, and tells it to the others.
using Access = VectorAccess<BF16>;
using Activated = PlainGates<Access, false>::Held;  // a vector
constexpr int kFeaturesOfVec = Access::kElements, kVecsOfLane = 4;
constexpr int kThreadsOfRow = 256, kThreadsOfBlock = 128;  // at most; of a block of several teams

// What a lane has of h, from its load to its cast: number n of its vectors, of either part. next() comes before each.
struct InRegisters {
  struct Shared {};
  Vec16 vecs[kVecsOfLane][2];

  explicit MOE_DEVICE InRegisters(Shared&) {}
  MOE_DEVICE const Vec16& at(int n, int part) const { return vecs[n][part]; }
  MOE_DEVICE void load(int n, int part, const Vec16* from) { vecs[n][part] = load_stream(from); }
  MOE_DEVICE void wait() const {}
  MOE_DEVICE void next() const {}
};
struct InShared {
  using Shared = Vec16[kVecsOfLane][2][kThreadsOfBlock];
  Shared& vecs;

  explicit MOE_DEVICE InShared(Shared& shared) : vecs(shared) {}
  MOE_DEVICE Vec16& at(int n, int part) const { return vecs[n][part][threadIdx.y * blockDim.x + threadIdx.x]; }
  MOE_DEVICE void load(int n, int part, const Vec16* from) const {
    copy_to_shared<Reuse::kNotBeforeStores>(&at(n, part), from);
  }
  MOE_DEVICE void wait() const {
    commit_copies();
    wait_copies();
  }
  MOE_DEVICE void next() const { wave_barrier(); }  // what is read before its turn takes registers
};

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
  static MOE_DEVICE int first_row(int team) { return team * kRows; }

  using Held = InRegisters;
  static constexpr int kThreads = kThreadsOfBlock, kResident = 768;  // of a block; of a multiprocessor
};

struct TeamsPlan : QuantizeActivatedParams { bool gated, blocked; int blocks; };

constexpr int64_t kMostFeatures = int64_t(kThreadsOfRow) * kVecsOfLane * kFeaturesOfVec;

// A scale for a row of h and one for that of a. Where rows are long, waves of a block share one.
template <int kRows_>
struct WholeTeam : Team<kWarpSize, kRows_, 2, 1> {
  using Base = Team<kWarpSize, kRows_, 2, 1>;
  using Base::kKnown, Base::kOfA, Base::kRows;
  using Scale = ScaleF32;
  static constexpr int kThreads = kRows > 1 ? kThreadsOfBlock : kThreadsOfRow;
  using Shared = uint32_t[kThreads / 32][kKnown];
  Shared& of_wave;

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
    auto* const of_team = of_wave + threadIdx.y * waves;
    const int known = Base::lane() / Base::kAlike;
    if (Base::lane() % Base::kAlike == 0) of_team[threadIdx.x / kWarpSize][known] = own;
    __syncthreads();
    for (int w = 0; w < waves; ++w) own = own > of_team[w][known] ? own : of_team[w][known];
  }
  static MOE_DEVICE float told_of_h(const float (&own)[1], int, bool, int row) { return Base::told(own[0], 0, row); }
  template <class Columns>
  static MOE_DEVICE void store(const TeamsPlan& p, const Columns&, int, int row0, int live,
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
  static MOE_DEVICE void store(const TeamsPlan& p, const Columns& columns, int v, int row0, int live,
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

  // Lanes that make three scales and hold h have registers for 512 threads; without h for 1024: [262144, 768] takes 396
  // us on an H200, not 417. Other teams hold it, 768 threads: out of shared memory rows of 2048 took a fifth longer.
  using Held = std::conditional_t<kCopiesInBackground, InShared, InRegisters>;
  static constexpr int kResident = 1024;

  static constexpr int kRowStep = kScaleRows / kRows, kRowsOfUnit = kScaleRows;
  static MOE_DEVICE int first_row(int team) { return team / kRowStep * kScaleRows + team % kRowStep; }

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
  static MOE_DEVICE void store(const TeamsPlan& p, const Columns& columns, int v, int row0, int,
                               const Scale (&s)[kOwn]) {
    const uint32_t block = uint32_t(v) / kLanes, of_part = uint32_t(p.h.F) / kMxBlock;
    if (block >= of_part) return;
    const int row = row0 + own_row() * kRowStep;
    with_scales_of(p, p.of_a, row, [&](auto store) { store(block, s[kOfA]); });
    with_scales_of(p, p.of_h, row, [&](auto store) {
#pragma unroll
      for (int part = 0; part < Columns::kParts; ++part)
        store(columns.interleaved ? block * 2 + part : block + part * of_part, s[part]);
    });
  }

 private:
  // f(store) if the row has scales: store(column, scale).
  template <class F>
  static MOE_DEVICE void with_scales_of(const TeamsPlan& p, const QuantizeParams& to, int row, F f) {
    const bool there = row < int(to.rows);
    if (to.rows == 0 || (!there && (!p.blocked || to.scratch))) return;
    const int place = to.scratch ? to.scratch[row] : row;  // of groups; -1: of none
    if (place < 0) return;
    const uint32_t at = place, columns = uint32_t(to.K) / kMxBlock;
    uint8_t* const scales = static_cast<uint8_t*>(to.scale);
    uint8_t* const of_row = scales + (p.blocked ? blocked_offset(at, 0, columns) : uint64_t(at) * columns);
    f([&](uint32_t column, Scale s) {
      store_stream(of_row + (p.blocked ? blocked_offset(0, column, columns) : column), there ? s.stored() : uint8_t(0));
    });
  }
};

}  // namespace moe_fp8
