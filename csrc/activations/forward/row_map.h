// Maps threads to vectors of h, and lanes to the scales that they compute: one map for each kind of scale.
//
// THREAD MAP. A row team is the blockDim.x threads of one threadIdx.y. It has kRows rows at once. A lane group is
// kLanes neighbouring lanes that reduce together: they share a scaling block or, if a row has one scale, are a wave.
//
//   map             rows of a team      vectors of each row in thread t          lane group
//   RowwiseMap<R>   R neighbours        4 / R: t, t + blockDim.x, ...            a wave; waves meet in shared memory
//   BlockwiseMap    4 neighbours        t                                        16 lanes: 128 features
//   MxMap           4, 32 apart         t                                        4 lanes: 32 features
//
// With the last two maps, a row team is one wave and has one vector of each row a lane; blockIdx.x has the next ones.
//
// After the reduction, a lane of a lane group holds the amax for this scale of this row (h0 and h1 are scales of h):
//
//   RowwiseMap<4>   lane    0..3   4..7  8..11 12..15 16..19 20..23 24..27 28..31
//   (32 lanes)      row       0      1     2      3      0      1      2      3
//                   scale     h0     h0    h0     h0     a      a      a      a
//
//   BlockwiseMap    lane     0  1  2  3     4  5  6  7     8  9 10 11    12 13 14 15
//                   row      0  1  2  3     0  1  2  3     0  1  2  3     0  1  2  3
//                   scale        h0             h1             a            none
//
//   MxMap           lane     0  1  2  3
//                   row      0  1  2  3
//                   scale   h0, h1 and a
#pragma once
#include "activations/forward/quantize_activated.h"
#include "activations/gates.h"
#include "activations/policy.h"
#include "quantize/row.h"

namespace moe_fp8 {

// The kernel is bound by arithmetic: with the casts of a and h, an activation takes some 33 instructions on sm_90a.
// So a lane has kVecsPerLane vectors of a projection of h at once, which are enough bytes in flight. Work that is not
// arithmetic on vectors is done once for all four: a lane computes one scale and broadcasts it.
using Access = VectorAccess<BF16>;
using ActivatedVec = PlainReader<Access, false>::Raw;
constexpr int kFeaturesPerVec = Access::kElements;

// The vectors of h that a lane keeps from load to cast, in registers or in shared memory: vector n of a projection.
// next() comes before the reads of each n.
struct RegisterVecs {
  struct Shared {};
  Vec16 vecs[kVecsPerLane][2];

  explicit MOE_DEVICE RegisterVecs(Shared&) {}
  MOE_DEVICE Vec16& at(int n, int vector) { return vecs[n][vector]; }
  MOE_DEVICE const Vec16& at(int n, int vector) const { return vecs[n][vector]; }
  MOE_DEVICE void load(int n, int vector, const Vec16* from) { vecs[n][vector] = load_stream(from); }
  MOE_DEVICE void wait() const {}
  MOE_DEVICE void next() const {}
};
struct SharedVecs {
  using Shared = Vec16[kVecsPerLane][2][kTeamBlockThreads];
  Shared& vecs;

  explicit MOE_DEVICE SharedVecs(Shared& shared) : vecs(shared) {}
  MOE_DEVICE Vec16& at(int n, int vector) const { return vecs[n][vector][threadIdx.y * blockDim.x + threadIdx.x]; }
  MOE_DEVICE void load(int n, int vector, const Vec16* from) const {
    copy_to_shared<Reuse::kNotBeforeStores>(&at(n, vector), from);
  }
  MOE_DEVICE void wait() const {
    commit_copies();
    wait_copies();
  }
  MOE_DEVICE void next() const { wave_barrier(); }  // keeps the compiler from reading ahead into registers
};

// Every row of a lane group has kScales scales: scale kAScale is for a, the others are for h. After the reduction a
// lane holds kScalesPerLane amaxes of row row_of_lane(), from scale scale_of_lane() on. kReplicas neighbouring lanes
// hold the same values.
template <int kLanes_, int kRows_, int kScales_, int kAScale_, int kScalesPerLane_ = 1>
struct RowMap {
  static constexpr int kLanes = kLanes_, kRows = kRows_, kScales = kScales_, kAScale = kAScale_;
  static constexpr int kScalesPerLane = kScalesPerLane_, kVecsPerRow = kVecsPerLane / kRows;
  static constexpr int kHolders = kScales / kScalesPerLane * kRows;  // lanes that hold different values
  static constexpr int kReplicas = kLanes / kHolders;

  static MOE_DEVICE int lane() { return threadIdx.x % kLanes; }
  static MOE_DEVICE int scale_of_lane() { return lane() / (kRows * kReplicas) * kScalesPerLane; }
  static MOE_DEVICE int row_of_lane() { return lane() / kReplicas % kRows; }
  // The `value` of a lane that holds this scale of this row.
  static MOE_DEVICE float broadcast(float value, int scale, int row) {
    const int first_lane = threadIdx.x % kWarpSize / kLanes * kLanes;
    return as_float(shfl(as_bits(value), first_lane + (scale / kScalesPerLane * kRows + row) * kReplicas));
  }
  static MOE_DEVICE float broadcast_a(const float (&values)[kScalesPerLane], int row) {
    return broadcast(values[kAScale % kScalesPerLane], kAScale, row);
  }

  // The rows of a team are kRowStride apart. Teams cover the rows padded to a multiple of kRowMultiple.
  static constexpr int kRowStride = 1, kRowMultiple = 1;
  static MOE_DEVICE int first_row(int team) { return team * kRows; }

  static constexpr bool kShiftsUps = false;  // only BlockwiseMap can
  static constexpr int kHMaxima = 2;         // of a row of h in a lane
  static constexpr MOE_DEVICE bool shifts_ups() { return false; }

  using HVecs = RegisterVecs;
  static constexpr int kMaxThreads = kTeamBlockThreads;     // of a block
  static constexpr int kThreadsWanted = kActivatedThreads;  // of a multiprocessor
};

struct QuantizeActivatedPlan : QuantizeActivatedParams { bool gated, blocked; int blocks; };

constexpr int64_t kMaxForwardFeatures = int64_t(kMaxThreadsPerRow) * kVecsPerLane * kFeaturesPerVec;

// A row has a scale for h and one for a. The waves of a block share a long row.
template <int kRows_>
struct RowwiseMap : RowMap<kWarpSize, kRows_, 2, 1> {
  using Base = RowMap<kWarpSize, kRows_, 2, 1>;
  using Base::kAScale, Base::kHolders, Base::kRows;
  using Scale = ScaleF32;
  static constexpr int kMaxThreads = kRows > 1 ? kTeamBlockThreads : kMaxThreadsPerRow;
  using Shared = uint32_t[kMaxThreads / 32][kHolders];
  Shared& wave_amax;

  explicit MOE_DEVICE RowwiseMap(Shared& shared) : wave_amax(shared) {}

  MOE_DEVICE void reduce(const uint32_t (&h_max)[kRows][2], const uint32_t (&a_max)[kRows], bool,
                         uint32_t (&amax)[1]) {
    uint32_t words[kHolders];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      words[r] = max_magnitude<BF16>(h_max[r][0], h_max[r][1]);
      words[kAScale * kRows + r] = a_max[r];
    }
    const int lane = Base::lane(), wave = threadIdx.x / kWarpSize, waves = blockDim.x / kWarpSize;
    uint32_t* const partials = wave_amax[threadIdx.y * waves] + lane / Base::kReplicas;
    amax[0] = reduce_waves<kHolders>(amax_of_rows<BF16, kWarpSize>(words, lane), lane % Base::kReplicas == 0, partials,
                                     wave, waves, MaxU32{});
  }
  static MOE_DEVICE float broadcast_h(const float (&values)[1], int, bool, int row) {
    return Base::broadcast(values[0], 0, row);
  }
  template <class Layout>
  static MOE_DEVICE void store_scales(const QuantizeActivatedPlan& p, const Layout&, int, int row0, int valid_rows,
                                      const Scale (&s)[1]) {
    const QuantizeParams& to = Base::scale_of_lane() == kAScale ? p.quantize_a : p.quantize_h;
    if (threadIdx.x < kWarpSize && Base::lane() % Base::kReplicas == 0 && Base::row_of_lane() < valid_rows &&
        to.rows > 0)
      *row_scales(to).at(row0 + Base::row_of_lane(), 0) = s[0].stored();
  }
};

// 128 features have a scale for gates, one for ups and one for a. If h is interleaved, h0 covers the columns of the
// lower half of the lanes, and h1 the columns of the upper half. The last four lanes hold no scale. Rows that pad a
// column of scales get scales of zero.
//
// SHIFTED UPS. If gates and ups are halves and F is no multiple of 128, a block has the last gates and the first ups.
// The blocks of ups begin at lane up_lane of every lane group. Before the reduction, ups move up_lane lanes down:
//
//   ups of lanes      0 .. up_lane - 1     up_lane .. 15 + up_lane     ...     the last 16 - up_lane
//   their block       begins before the    the block of the first      ...     goes on behind the
//                     wave: A              lane group                          wave: B
//
// The last lane group holds the wave's part of blocks A and B. Its lanes also read the vectors of A and B that other
// waves hold. Its scale h1 is the scale of A. The place without a scale holds the scale of B. The wave stores the scale
// of B and not of A, which is block B of the wave before, or the block of the last gates.
struct BlockwiseMap : RowMap<kBlock / kFeaturesPerVec, 4, 4, 2> {
  using Scale = ScaleF32;
  struct Shared {};
  static constexpr bool kShiftsUps = true;
  static constexpr int kHMaxima = 3;
  static constexpr int kUpScale = 1, kOuterScale = 3;
  int up_lane = 0;
  explicit MOE_DEVICE BlockwiseMap(Shared&) {}

  MOE_DEVICE void place_ups(bool interleaved, int vecs) { up_lane = interleaved ? 0 : -vecs & (kLanes - 1); }
  MOE_DEVICE bool shifts_ups() const { return up_lane != 0; }
  static MOE_DEVICE bool is_last_group() { return threadIdx.x % kWarpSize >= kWarpSize - kLanes; }
  // The vector of ups that a lane of the last group reads for A or B. v is the lane's own vector.
  MOE_DEVICE int outer_vec(int v) const { return lane() < up_lane ? v + kLanes : v - kWarpSize; }
  // h_max: of the gates and the ups of a row in this lane. outer_max: of outer_vec(), in the last group.
  MOE_DEVICE void shift_ups(uint32_t (&h_max)[kHMaxima], uint32_t outer_max) const {
    const uint32_t ups = shfl(h_max[1], (threadIdx.x + up_lane) % kWarpSize);
    const bool in_b = lane() + up_lane < kLanes, outer_in_b = lane() < up_lane;
    h_max[1] = !is_last_group() ? ups : max_magnitude<BF16>(in_b ? 0 : ups, outer_in_b ? 0 : outer_max);
    h_max[2] = !is_last_group() ? 0 : max_magnitude<BF16>(in_b ? ups : 0, outer_in_b ? outer_max : 0);
  }

  static MOE_DEVICE int half() { return lane() / (kLanes / 2); }
  static MOE_DEVICE void reduce(const uint32_t (&h_max)[kRows][kHMaxima], const uint32_t (&a_max)[kRows],
                                bool interleaved, uint32_t (&amax)[1]) {
    uint32_t words[kHolders];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      words[r] = h_max[r][0];
      words[kUpScale * kRows + r] = h_max[r][1];
      words[kOuterScale * kRows + r] = h_max[r][2];
      words[kAScale * kRows + r] = a_max[r];
    }
    if (interleaved) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const uint32_t both = max_magnitude<BF16>(h_max[r][0], h_max[r][1]);
        words[r] = half() ? 0 : both;
        words[kRows + r] = half() ? both : 0;
      }
    }
    amax[0] = amax_of_rows<BF16, kLanes>(words, lane());
  }
  MOE_DEVICE float broadcast_h(const float (&values)[1], int vector, bool interleaved, int row) const {
    if (vector == 0 || !shifts_ups()) return broadcast(values[0], interleaved ? half() : vector, row);
    const int lane = threadIdx.x % kWarpSize, first_lane = (lane + kWarpSize - up_lane) % kWarpSize / kLanes * kLanes;
    const bool in_b = first_lane == kWarpSize - kLanes && lane >= up_lane;
    return as_float(shfl(as_bits(values[0]), first_lane + (in_b ? kOuterScale : kUpScale) * kRows + row));
  }
  template <class Layout>
  MOE_DEVICE void store_scales(const QuantizeActivatedPlan& p, const Layout& layout, int v, int row0, int valid_rows,
                               const Scale (&s)[1]) const {
    const int scale = scale_of_lane(), group = v / kLanes, groups = ceil_div(int(p.h.F), kBlock);
    const bool is_a = scale == kAScale;
    const QuantizeParams& to = is_a ? p.quantize_a : p.quantize_h;
    const bool is_up = Layout::kVectors > 1 && scale == (shifts_ups() && is_last_group() ? kOuterScale : kUpScale);
    if (group >= groups || (!is_a && !is_up && scale != 0) || to.rows == 0 || valid_rows <= 0) return;
    const int block = is_a ? group : layout.interleaved ? group * 2 + scale : group + is_up * groups;
    if (block * kBlock >= int(to.K)) return;  // h may end before the last block of a does
    const ScaleSink<Scale, ScaleOrder::kColumnMajor> sink(to.scale, scale_stride(p.quantize_a.rows));
    store_stream(sink.at(row0 + row_of_lane(), block), row_of_lane() < valid_rows ? s[0].stored() : 0.f);
  }
};

// 32 features have the three scales that 128 features have in BlockwiseMap, in E8M0. A team's rows are 32 apart,
// because the blocked layout makes the scales of such rows neighbours. In this layout padding rows get scales of zero.
// If rows are in groups, place_rows() has cleared the padding already.
struct MxMap : RowMap<kMxBlock / kFeaturesPerVec, 4, 3, 2, 3> {
  using Scale = ScaleE8M0;
  struct Shared {};
  explicit MOE_DEVICE MxMap(Shared&) {}

  // A lane computes three scales. If it also held h in registers, a multiprocessor would have 512 threads, not 1024.
  using HVecs = std::conditional_t<kHasAsyncCopies, SharedVecs, RegisterVecs>;
  static constexpr int kThreadsWanted = kMxActivatedThreads;

  static constexpr int kRowStride = kScaleRows / kRows, kRowMultiple = kScaleRows;
  static MOE_DEVICE int first_row(int team) { return team / kRowStride * kScaleRows + team % kRowStride; }

  static MOE_DEVICE int half() { return lane() / (kLanes / 2); }
  static MOE_DEVICE void reduce(const uint32_t (&h_max)[kRows][2], const uint32_t (&a_max)[kRows], bool interleaved,
                                uint32_t (&amax)[kScalesPerLane]) {
    uint32_t words[kScales][kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const uint32_t both = max_magnitude<BF16>(h_max[r][0], h_max[r][1]);
#pragma unroll
      for (int i = 0; i < 2; ++i) words[i][r] = !interleaved ? h_max[r][i] : half() == i ? both : 0;
      words[kAScale][r] = a_max[r];
    }
#pragma unroll
    for (int i = 0; i < kScales; ++i) amax[i] = amax_of_rows<BF16, kLanes>(words[i], lane());
  }
  static MOE_DEVICE float broadcast_h(const float (&values)[kScalesPerLane], int vector, bool interleaved, int row) {
    const float first = broadcast(values[0], 0, row), second = broadcast(values[1], 1, row);
    return (interleaved ? half() : vector) ? second : first;
  }
  template <class Layout>
  static MOE_DEVICE void store_scales(const QuantizeActivatedPlan& p, const Layout& layout, int v, int row0, int,
                                      const Scale (&s)[kScalesPerLane]) {
    const uint32_t block = uint32_t(v) / kLanes, blocks = ceil_div(uint32_t(p.h.F), uint32_t(kMxBlock));
    if (block >= blocks) return;
    const int row = row0 + row_of_lane() * kRowStride;
    with_scale_row(p, p.quantize_a, row, block + 1 == blocks, [&](auto store) { store(block, s[kAScale]); });
    with_scale_row(p, p.quantize_h, row, block + 1 == blocks, [&](auto store) {
#pragma unroll
      for (int i = 0; i < Layout::kVectors; ++i)
        store(layout.interleaved ? block * 2 + i : block + i * blocks, s[i]);
    });
  }

 private:
  // Calls f with store(column, scale), unless the row has no place among the scales. If ends_row, it also stores the
  // zeros behind the last scale that fill its 128x4 atom. The address of the row is computed once. With a ScaleSink it
  // is computed for each scale, and the kernel took 1 to 4% longer on an H200.
  template <class F>
  static MOE_DEVICE void with_scale_row(const QuantizeActivatedPlan& p, const QuantizeParams& to, int row,
                                        bool ends_row, F f) {
    const bool valid = row < int(to.rows);
    if (to.rows == 0 || (!valid && (!p.blocked || to.scratch))) return;
    const int place = to.scratch ? to.scratch[row] : row;  // scratch: the places of rows in groups; -1: of no group
    if (place < 0) return;
    const uint32_t at = place, columns = ceil_div(uint32_t(to.K), uint32_t(kMxBlock));
    const uint32_t stride = p.blocked ? round_up(columns, uint32_t(kScaleColumns)) : columns;
    uint8_t* const scales = static_cast<uint8_t*>(to.scale);
    uint8_t* const row_scales = scales + (p.blocked ? blocked_offset(at, 0, stride) : uint64_t(at) * stride);
    const auto at_column = [&](uint32_t column) {
      return row_scales + (p.blocked ? blocked_offset(0, column, stride) : column);
    };
    f([&](uint32_t column, Scale s) {
      if (column >= columns) return;  // an interleaved h may end in the middle of the last block of a
      store_stream(at_column(column), valid ? s.stored() : uint8_t(0));
    });
    if (ends_row)
#pragma unroll 1
      for (uint32_t column = columns; column < stride; ++column) store_stream(at_column(column), uint8_t(0));
  }
};

}  // namespace moe_fp8
