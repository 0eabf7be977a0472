#include "activations/forward/bias_rows.h"
#include "activations/forward/row_map.h"
#include "primitives/wave_rows.h"

namespace moe_fp8 {
namespace {

// Number of a lane's vector i in its row, and the distance from the lane's vector 0 to its vector i.
MOE_DEVICE int vec_distance(int i) { return i * int(blockDim.x); }
MOE_DEVICE int vec_number(int i) { return int(blockIdx.x * blockDim.x + threadIdx.x) + vec_distance(i); }

// Stores h and a of the valid rows. Each lane computes the scales of the amaxes that it holds.
template <class T, class Map, class Layout>
MOE_DEVICE void store_rows(const QuantizeActivatedPlan& p, const Map& map, const Layout& layout, int row0,
                           int valid_rows, const uint32_t (&amax)[Map::kScalesPerLane], const typename Map::HVecs& h,
                           const ActivatedVec (&a)[Map::kRows][Map::kVecsPerRow]) {
  constexpr int kVectors = Layout::kVectors;
  typename Map::Scale s[Map::kScalesPerLane];
  float multiplier[Map::kScalesPerLane];
#pragma unroll
  for (int i = 0; i < Map::kScalesPerLane; ++i) {
    s[i] = T::template scale_of<typename Map::Scale>(p.quantize_a, amax[i]);
    multiplier[i] = s[i].multiplier;
  }
  map.store_scales(p, layout, vec_number(0), row0, valid_rows, s);
  uint8_t* a_q = p.quantize_a.q + int64_t(row0) * p.quantize_a.K + int64_t(vec_number(0)) * kFeaturesPerVec;
  uint8_t* h_q[kVectors];
#pragma unroll
  for (int vector = 0; vector < kVectors; ++vector)
    h_q[vector] = p.quantize_h.q + int64_t(row0) * p.quantize_h.K + layout.column(vec_number(0), vector);
  T::with_cast(p.quantize_a, [&](auto cast) {
#pragma unroll
    for (int r = 0; r < Map::kRows; ++r) {
      const float a_multiplier = map.broadcast_a(multiplier, r);
      float h_multiplier[kVectors];
#pragma unroll
      for (int vector = 0; vector < kVectors; ++vector)
        h_multiplier[vector] = map.broadcast_h(multiplier, vector, layout.interleaved, r);
#pragma unroll
      for (int i = 0; i < Map::kVecsPerRow; ++i) {
        if (r >= valid_rows || vec_number(i) >= p.h.F / kFeaturesPerVec) break;
        store_cast<T>(p.quantize_a, a_q, vec_distance(i), a[r][i].vectors[0], a_multiplier, cast);
        if (p.quantize_h.rows == 0) continue;
#pragma unroll
        for (int vector = 0; vector < kVectors; ++vector)
          store_cast<T>(p.quantize_h, h_q[vector], layout.step / kFeaturesPerVec * vec_distance(i),
                        h.at(r * Map::kVecsPerRow + i, vector), h_multiplier[vector], cast);
      }
      a_q += Map::kRowStride * p.quantize_a.K;
#pragma unroll
      for (int vector = 0; vector < kVectors; ++vector) h_q[vector] += Map::kRowStride * p.quantize_h.K;
    }
  });
}

// Adds the bias of group e, from column `at` of its row on, to a vector of h.
MOE_DEVICE void add_bias_to_vec(const GroupBias& bias, int e, int64_t columns, int64_t at, Vec16& h_vec) {
  const Vec16 bias_vec = e < bias.E ? *Access::vec(bias.values, e * columns + at) : Vec16{};
#pragma unroll
  for (int w = 0; w < 4; ++w)
    h_vec.w[w] = packed_bf16(element<BF16>(h_vec.w[w], 0) + element<BF16>(bias_vec.w[w], 0),
                             element<BF16>(h_vec.w[w], 1) + element<BF16>(bias_vec.w[w], 1));
}

// Adds the bias of each row's group to the vectors of h.
template <class Map, class Layout, class Clamped>
MOE_DEVICE void add_bias_to_rows(const QuantizeActivatedPlan& p, typename Map::HVecs& h, const Layout& layout, int row0,
                                 Clamped clamped) {
#pragma unroll
  for (int r = 0; r < Map::kRows; ++r) {
    const int e = group_of_row(p.bias, row0 + r * Map::kRowStride);
#pragma unroll
    for (int i = 0; i < Map::kVecsPerRow; ++i) {
      h.next();
#pragma unroll
      for (int vector = 0; vector < Layout::kVectors; ++vector)
        add_bias_to_vec(p.bias, e, p.h.F * Layout::kVectors, layout.column(clamped(i), vector),
                        h.at(r * Map::kVecsPerRow + i, vector));
    }
  }
}

// Moves the maxima of ups to the lane groups of their scaling blocks, where these do not begin with the ups: see
// BlockwiseMap. The last lane group reads the ups of the neighbouring waves that share blocks with this wave. Lanes
// behind the last gates have ups in their place, and no part in the maxima of a.
template <bool kBias, class Map, class Reader>
MOE_DEVICE void shift_ups(const QuantizeActivatedPlan& p, const Map& map, const Reader& reader, int row0,
                          int valid_rows, int vecs, uint32_t (&h_max)[Map::kRows][Map::kHMaxima],
                          uint32_t (&a_max)[Map::kRows]) {
  const int v = Min{}(vecs + map.outer_vec(vec_number(0)), 2 * vecs - 1);
#pragma unroll
  for (int r = 0; r < Map::kRows; ++r) {
    const int row = row0 + r * Map::kRowStride, e = kBias ? group_of_row(p.bias, row) : 0;
    Vec16 outer = {};
    if (r < valid_rows && map.is_last_group()) {
      outer = load_stream(Access::vec(reader.row(row), int64_t(v) * kFeaturesPerVec));
      if constexpr (kBias) add_bias_to_vec(p.bias, e, 2 * p.h.F, int64_t(v) * kFeaturesPerVec, outer);
    }
    map.shift_ups(h_max[r], max_vec<BF16>(outer));
    if (vec_number(0) >= vecs) a_max[r] = 0;
  }
}

template <bool kGated, bool kBias, class Map>
MOE_DEVICE void quantize_rows(const QuantizeActivatedPlan& p, Map& map, typename Map::HVecs& h, int row0) {
  using Reader = PlainReader<Access, kGated>;
  constexpr int kRows = Map::kRows, kVecs = Map::kVecsPerRow, kVectors = Reader::Layout::kVectors;
  const typename Reader::Layout layout(p.h);
  const int vecs = int(p.h.F / kFeaturesPerVec), lane = threadIdx.x % kWarpSize;
  const int valid_rows = Min{}(ceil_div(int(p.quantize_a.rows) - row0, Map::kRowStride), kRows);
  auto wave_has = [&](int i) { return i == 0 || kRows > 1 || vec_number(i) - lane < vecs; };

  // A lane behind the last vector repeats it. That changes no amax, neither of its row nor of another block. If a block
  // has gates and ups, lanes behind the last gates read the ups that follow in memory instead, and repeat other ups.
  if constexpr (kGated && Map::kShiftsUps) map.place_ups(layout.interleaved, vecs);
  const int vecs_to_read = map.shifts_ups() ? 2 * vecs : vecs;
  auto clamped = [&](int i) { return vec_number(i) < vecs_to_read ? vec_number(i) : vecs_to_read - 1; };
  auto lane_layout = layout;
  if (map.shifts_ups()) lane_layout.vector_stride -= Max{}(clamped(0) - (vecs - 1), 0) * kFeaturesPerVec;
  const Reader reader(p.h, lane_layout);
  const void* row = reader.access.address(reader.row(valid_rows > 0 ? row0 : 0), reader.layout.column(clamped(0), 0));
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r > 0 && r < valid_rows) row = reader.access.address(row, Map::kRowStride * p.h.stride);
#pragma unroll
    for (int i = 0; i < kVecs; ++i)
      if (wave_has(i))
#pragma unroll
        for (int vector = 0; vector < kVectors; ++vector)
          h.load(r * kVecs + i, vector, Access::vec(row, reader.layout.column(clamped(i) - clamped(0), vector)));
  }
  h.wait();
  if constexpr (kBias) add_bias_to_rows<Map>(p, h, reader.layout, row0, clamped);
  ActivatedVec a[kRows][kVecs];
  uint32_t h_max[kRows][Map::kHMaxima] = {}, a_max[kRows] = {};
  auto accumulate = [&](uint32_t& max, const Vec16& vec, int i) {
    max = i == 0 ? max_vec<BF16>(vec) : max_vec<BF16>(max, vec);
  };
  auto activate = [&](auto activation, const Reader& reader) {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int i = 0; i < kVecs; ++i) {
        if (!wave_has(i)) break;
        h.next();
        typename Reader::Raw raw;
#pragma unroll
        for (int vector = 0; vector < kVectors; ++vector) raw.vectors[vector] = h.at(r * kVecs + i, vector);
        const GateUp<kFeaturesPerVec> g = reader.decode(row, raw);
        float values[kFeaturesPerVec];
#pragma unroll
        for (int j = 0; j < kFeaturesPerVec; ++j)
          values[j] = activated<decltype(activation)::value>(g.gate[j], g.up[j], p.h.clamp);
        a[r][i] = {{Access::packed_vec(values)}};
        accumulate(a_max[r], a[r][i].vectors[0], i);
#pragma unroll
        for (int vector = 0; vector < kVectors; ++vector) accumulate(h_max[r][vector], raw.vectors[vector], i);
      }
  };
  std::conditional_t<kGated, GatedActivations, UngatedActivations>::dispatch(p.activation, [&](auto activation) {
    reader.with_static_order([&](const Reader& reader) { activate(activation, reader); });
  });
  if constexpr (kGated && Map::kShiftsUps)
    if (map.shifts_ups()) shift_ups<kBias>(p, map, reader, row0, valid_rows, vecs, h_max, a_max);
  uint32_t amax[Map::kScalesPerLane];
  map.reduce(h_max, a_max, layout.interleaved, amax);
  const auto store = [&](auto types) {
    store_rows<decltype(types)>(p, map, layout, row0, valid_rows, amax, h, a);
  };
  if (is_e5m2(p.quantize_a.out)) store(Vectorized<BF16, Fp8Variant::kE5M2>{});
  else store(Vectorized<BF16, Fp8Variant::kE4M3>{});
}

// T is not used: its name tells the report of instructions what the kernel casts to.
template <class T, class Map, bool kBias>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(Map::kMaxThreads, Map::kThreadsWanted / Map::kMaxThreads)
    quantize_activated_kernel(MOE_GRID_CONSTANT const QuantizeActivatedPlan p) {
  __shared__ typename Map::Shared shared;
  __shared__ typename Map::HVecs::Shared shared_h;
  Map map(shared);
  typename Map::HVecs h(shared_h);
  wait_for_previous_kernel();
  const int block = int(blockIdx.z * gridDim.y + blockIdx.y);
  if (block >= p.blocks) return;
  const int row = Map::first_row(block * int(blockDim.y) + int(threadIdx.y));
  if (p.gated) quantize_rows<true, kBias>(p, map, h, row);
  else quantize_rows<false, kBias>(p, map, h, row);
}

template <class Map>
int launch_map(const QuantizeActivatedParams& p, int team_threads, int64_t grid_x, void* stream) {
  // A team of several waves synchronizes with __syncthreads(), so it is a whole block.
  const int teams = team_threads == kMaxWarpSize ? kTeamBlockThreads / team_threads : 1;
  const int64_t rows = round_up<int64_t>(p.quantize_a.rows, Map::kRowMultiple);
  const int blocks = int(ceil_div<int64_t>(rows, teams * Map::kRows));
  const int grid_z = ceil_div(blocks, kMaxGridBlocksY);  // the last blocks along z may have no rows
  const dim3 grid(unsigned(grid_x), unsigned(ceil_div(blocks, grid_z)), unsigned(grid_z));
  const QuantizeActivatedPlan plan = {p, is_gated(p.activation), format_of(p.quantize_a.format).blocked(), blocks};
  using Types = Vectorized<BF16, Fp8Variant::kRuntime>;
  const Launch l = {grid, dim3(team_threads, teams), stream};
  return p.bias.values ? launch(quantize_activated_kernel<Types, Map, true>, l, plan)
                       : launch(quantize_activated_kernel<Types, Map, false>, l, plan);
}

}  // namespace

bool can_quantize_activated(const QuantizeActivatedParams& p) {
  const int block = format_of(p.quantize_a.format).block;
  const bool sizes = block == 0 ? p.h.F <= kMaxForwardFeatures  // BlockwiseMap shifts ups, MxMap does not
                                : block == kBlock || ups_begin_a_block(p.h, p.activation, block);
  return p.quantize_a.rows > 0 && p.h.F > 0 && p.h.in == InType::kBF16 &&
         is_fnuz(p.quantize_a.out) == device().native_fnuz &&
         rows_are_vectorizable(p.h.h, p.h.stride, p.h.F, p.quantize_a.rows, 2) &&
         rows_are_vectorizable(p.bias.values, 8, 8, p.bias.E, 2) && sizes;
}

int quantize_activated(const QuantizeActivatedParams& p, void* stream) {
  const int64_t waves = ceil_div<int64_t>(p.h.F / kFeaturesPerVec, kMaxWarpSize);  // of a vector a lane
  if (const Format& f = format_of(p.quantize_a.format); f.block) {
    if (f.scale_type == ScaleType::kF32) return launch_map<BlockwiseMap>(p, kMaxWarpSize, waves, stream);
    if (const int e = place_rows(p.quantize_a, stream)) return e;
    return launch_map<MxMap>(p, kMaxWarpSize, waves, stream);
  }
  if (waves == 1) return launch_map<RowwiseMap<4>>(p, kMaxWarpSize, 1, stream);
  if (waves == 2) return launch_map<RowwiseMap<2>>(p, kMaxWarpSize, 1, stream);
  return launch_map<RowwiseMap<1>>(p, kMaxWarpSize * int(ceil_div<int64_t>(waves, kVecsPerLane)), 1, stream);
}

}  // namespace moe_fp8
