#include "activations/forward/row_map.h"
#include "activations/launch.h"

namespace moe_fp8 {
namespace {

// From a lane's first vector of a row to number i of those that it has, and number i itself.
MOE_DEVICE int ahead(int i) { return i * int(blockDim.x); }
MOE_DEVICE int vec(int i) { return int(blockIdx.x * blockDim.x + threadIdx.x) + ahead(i); }

// h and a of `live` rows, by scales that lanes make of the amax that each of them knows.
template <class T, class Team, class Columns>
MOE_DEVICE void store_rows(const TeamsPlan& p, const Team& team, const Columns& columns, int row0, int live,
                           const uint32_t (&amax)[Team::kOwn], const typename Team::Held& h,
                           const Activated (&a)[Team::kRows][Team::kVecs]) {
  constexpr int kParts = Columns::kParts;
  typename Team::Scale s[Team::kOwn];
  float multiplier[Team::kOwn];
#pragma unroll
  for (int i = 0; i < Team::kOwn; ++i) {
    s[i] = T::template scale_of<typename Team::Scale>(p.of_a, amax[i]);
    multiplier[i] = s[i].multiplier;
  }
  team.store(p, columns, vec(0), row0, live, s);
  uint8_t* a_q = p.of_a.q + int64_t(row0) * p.of_a.K + int64_t(vec(0)) * kFeaturesOfVec;
  uint8_t* h_q[kParts];
#pragma unroll
  for (int part = 0; part < kParts; ++part) h_q[part] = p.of_h.q + int64_t(row0) * p.of_h.K + columns.at(vec(0), part);
  T::with_cast(p.of_a, [&](auto cast) {
#pragma unroll
    for (int r = 0; r < Team::kRows; ++r) {
      const float of_a = team.told_of_a(multiplier, r);
      float of_h[kParts];
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        of_h[part] = team.told_of_h(multiplier, part, columns.interleaved, r);
#pragma unroll
      for (int i = 0; i < Team::kVecs; ++i) {
        if (r >= live || vec(i) >= p.h.F / kFeaturesOfVec) break;
        store_cast<T>(p.of_a, a_q, ahead(i), a[r][i].part[0], of_a, cast);
        if (p.of_h.rows == 0) continue;
#pragma unroll
        for (int part = 0; part < kParts; ++part)
          store_cast<T>(p.of_h, h_q[part], columns.step / kFeaturesOfVec * ahead(i), h.at(r * Team::kVecs + i, part),
                        of_h[part], cast);
      }
      a_q += Team::kRowStep * p.of_a.K;
#pragma unroll
      for (int part = 0; part < kParts; ++part) h_q[part] += Team::kRowStep * p.of_h.K;
    }
  });
}

template <bool kGated, class Team>
MOE_DEVICE void quantize_rows(const TeamsPlan& p, Team& team, typename Team::Held& h, int row0) {
  using Source = PlainGates<Access, kGated>;
  constexpr int kRows = Team::kRows, kVecs = Team::kVecs, kParts = Source::Columns::kParts;
  const Source source(p.h);
  const int vecs = int(p.h.F / kFeaturesOfVec), lane = threadIdx.x % kWarpSize;
  const int live = Min{}(ceil_div(int(p.of_a.rows) - row0, Team::kRowStep), kRows);
  auto wave_has = [&](int i) { return i == 0 || kRows > 1 || vec(i) - lane < vecs; };

  // Behind the last vector is that once more: it adds nothing to the amax of its row, nor to that of another block.
  auto place = [&](int i) { return vec(i) < vecs ? vec(i) : vecs - 1; };
  const void* row = source.part.advanced(source.row(live > 0 ? row0 : 0), source.columns.at(place(0), 0));
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r > 0 && r < live) row = source.part.advanced(row, Team::kRowStep * p.h.stride);
#pragma unroll
    for (int i = 0; i < kVecs; ++i)
      if (wave_has(i))
#pragma unroll
        for (int part = 0; part < kParts; ++part)
          h.load(r * kVecs + i, part, Access::vec(row, source.columns.at(place(i) - place(0), part)));
  }
  h.wait();
  Activated a[kRows][kVecs];
  uint32_t of_h[kRows][2] = {}, of_a[kRows] = {};
  auto add = [&](uint32_t& most, const Vec16& vec, int i) {
    most = i == 0 ? max_vec<BF16>(vec) : max_vec<BF16>(most, vec);
  };
  auto activate = [&](auto activation, const Source& known) {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int i = 0; i < kVecs; ++i) {
        if (!wave_has(i)) break;
        h.next();
        typename Source::Held held;
#pragma unroll
        for (int part = 0; part < kParts; ++part) held.part[part] = h.at(r * kVecs + i, part);
        const Gates<kFeaturesOfVec> g = known.values(row, held);
        float values[kFeaturesOfVec];
#pragma unroll
        for (int j = 0; j < kFeaturesOfVec; ++j) values[j] = activated<decltype(activation)::value>(g.gate[j], g.up[j]);
        a[r][i] = {{Access::rounded(values)}};
        add(of_a[r], a[r][i].part[0], i);
#pragma unroll
        for (int part = 0; part < kParts; ++part) add(of_h[r][part], held.part[part], i);
      }
  };
  std::conditional_t<kGated, Gated, Ungated>::with(p.activation, [&](auto activation) {
    source.known([&](const Source& known) { activate(activation, known); });
  });
  uint32_t amax[Team::kOwn];
  team.amax(of_h, of_a, source.columns.interleaved, amax);
  if (is_e5m2(p.of_a.out)) store_rows<Vectorized<BF16, Fp8Variant::kE5M2>>(p, team, source.columns, row0, live, amax, h, a);
  else store_rows<Vectorized<BF16, Fp8Variant::kE4M3>>(p, team, source.columns, row0, live, amax, h, a);
}

// T is for the name alone, which tells the report of instructions what the kernel casts to.
template <class T, class Team>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(Team::kThreads, Team::kResident / Team::kThreads)
    quantize_activated_kernel(MOE_GRID_CONSTANT const TeamsPlan p) {
  __shared__ typename Team::Shared shared;
  __shared__ typename Team::Held::Shared of_h;
  Team team(shared);
  typename Team::Held h(of_h);
  wait_for_previous_kernel();
  const int block = int(blockIdx.z * gridDim.y + blockIdx.y);
  if (block >= p.blocks) return;
  const int row = Team::first_row(block * int(blockDim.y) + int(threadIdx.y));
  if (p.gated) quantize_rows<true>(p, team, h, row);
  else quantize_rows<false>(p, team, h, row);
}

constexpr int kMostBlocks = 65535;  // along y; there are more along z, and some too many

template <class Team>
int launch_teams(const QuantizeActivatedParams& p, int threads, int64_t across, void* stream) {
  const int teams = threads == kLargestWarp ? kThreadsOfBlock / threads : 1;  // that wait for one another have a block
  const int blocks = int(ceil_div<int64_t>(round_up<int64_t>(p.of_a.rows, Team::kRowsOfUnit), teams * Team::kRows));
  const int deep = ceil_div(blocks, kMostBlocks);
  const dim3 grid(unsigned(across), unsigned(ceil_div(blocks, deep)), unsigned(deep));
  const TeamsPlan plan = {p, is_gated(p.activation), format_of(p.of_a.format).blocked(), blocks};
  return launch(quantize_activated_kernel<Vectorized<BF16, Fp8Variant::kRuntime>, Team>, {grid, dim3(threads, teams), stream}, plan);
}

}  // namespace

bool can_quantize_activated(const QuantizeActivatedParams& p) {
  const bool whole = format_of(p.of_a.format).block == 0;
  return p.of_a.rows > 0 && p.h.F > 0 && p.h.in == InType::kBF16 && is_fnuz(p.of_a.out) == device().native_fnuz &&
         is_of_vectors(p.h.h, p.h.stride, p.h.F, p.of_a.rows, 2) &&
         (whole ? p.h.F <= kMostFeatures : p.h.F % kBlock == 0);
}

int quantize_activated(const QuantizeActivatedParams& p, void* stream) {
  const int64_t waves = ceil_div<int64_t>(p.h.F / kFeaturesOfVec, kLargestWarp);
  if (const Format& f = format_of(p.of_a.format); f.block) {
    if (f.scale_type == ScaleType::kF32) return launch_teams<BlockTeam>(p, kLargestWarp, waves, stream);
    if (const int e = place_rows(p.of_a, stream)) return e;
    return launch_teams<MxTeam>(p, kLargestWarp, waves, stream);
  }
  if (waves == 1) return launch_teams<WholeTeam<4>>(p, kLargestWarp, 1, stream);
  if (waves == 2) return launch_teams<WholeTeam<2>>(p, kLargestWarp, 1, stream);
  return launch_teams<WholeTeam<1>>(p, kLargestWarp * int(ceil_div<int64_t>(waves, kVecsOfLane)), 1, stream);
}

}  // namespace moe_fp8
