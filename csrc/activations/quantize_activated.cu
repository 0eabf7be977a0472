#include "activations/quantize_activated.h"

#include "activations/gates.h"
#include "activations/launch.h"
#include "quantize/row.h"

namespace moe_fp8 {
namespace {

// Bound by arithmetic: with its casts and those of h, an activation takes some 33 instructions on sm_90a. So a lane has
// four vectors of a part of h at once, which are bytes enough under way, and what is no arithmetic of theirs is done
// for all four together: a lane makes one of the scales, and tells it to the others.
using Part = Vectors<BF16>;
using Activated = PlainGates<Part, false>::Held;  // a vector
constexpr int n = Part::kElements, kVecsOfLane = 4;
constexpr int kThreadsOfRow = 256, kThreadsOfBlock = 128;  // at most; of a block of several teams

// ---- teams: so many neighbouring lanes of a wave have kVecs vectors each of kRows neighbouring rows ----------------

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

constexpr int64_t kMostFeatures = int64_t(kThreadsOfRow) * kVecsOfLane * n;

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
struct BlockTeam : Team<kBlock / n, 4, 4, 2> {
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
struct MxTeam : Team<kMxBlock / n, 4, 3, 2, 3> {
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

// ---- the rows of a team ---------------------------------------------------------------------------------------------

// From a lane's first vector of a row to number i of those that it has, and number i itself.
MOE_DEVICE int ahead(int i) { return i * int(blockDim.x); }
MOE_DEVICE int vec(int i) { return int(blockIdx.x * blockDim.x + threadIdx.x) + ahead(i); }

// h and a of `live` rows, by scales that lanes make of the amax that each of them knows.
template <class T, class Team, class Columns, class Held>
MOE_DEVICE void store_rows(const TeamsPlan& p, const Team& team, const Columns& columns, int64_t row0, int live,
                           const uint32_t (&amax)[Team::kOwn], const Held (&h)[Team::kRows][Team::kVecs],
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
  uint8_t* a_q = p.of_a.q + row0 * p.of_a.K + int64_t(vec(0)) * n;
  uint8_t* h_q[kParts];
#pragma unroll
  for (int part = 0; part < kParts; ++part) h_q[part] = p.of_h.q + row0 * p.of_h.K + columns.at(vec(0), part);
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
        if (r >= live || vec(i) >= p.h.F / n) break;
        store_cast<T>(p.of_a, a_q, ahead(i), a[r][i].part[0], of_a, cast);
        if (p.of_h.rows == 0) continue;
#pragma unroll
        for (int part = 0; part < kParts; ++part)
          store_cast<T>(p.of_h, h_q[part], columns.step / n * ahead(i), h[r][i].part[part], of_h[part], cast);
      }
      a_q += Team::kRowStep * p.of_a.K;
#pragma unroll
      for (int part = 0; part < kParts; ++part) h_q[part] += Team::kRowStep * p.of_h.K;
    }
  });
}

template <bool kGated, class Team>
MOE_DEVICE void quantize_rows(const TeamsPlan& p, Team& team, int64_t row0) {
  using Source = PlainGates<Part, kGated>;
  constexpr int kRows = Team::kRows, kVecs = Team::kVecs, kParts = Source::Columns::kParts;
  const Source source(p.h);
  const int vecs = int(p.h.F / n), lane = threadIdx.x % kWarpSize;
  const int64_t rest = ceil_div<int64_t>(p.of_a.rows - row0, Team::kRowStep);
  const int live = rest < kRows ? int(rest) : kRows;
  auto wave_has = [&](int i) { return i == 0 || kRows > 1 || vec(i) - lane < vecs; };

  typename Source::Held h[kRows][kVecs];
  // Behind the last vector is that once more: it adds nothing to the amax of its row, nor to that of another block.
  auto place = [&](int i) { return vec(i) < vecs ? vec(i) : vecs - 1; };
  const void* row = source.part.advanced(source.row(live > 0 ? row0 : 0), source.columns.at(place(0), 0));
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r > 0 && r < live) row = source.part.advanced(row, Team::kRowStep * p.h.stride);
#pragma unroll
    for (int i = 0; i < kVecs; ++i)
      if (wave_has(i)) h[r][i] = source.load(row, place(i) - place(0));
  }
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
        const Gates<n> g = known.values(row, h[r][i]);
        float values[n];
#pragma unroll
        for (int j = 0; j < n; ++j) values[j] = activated<decltype(activation)::value>(g.gate[j], g.up[j]);
        a[r][i] = {{Part::rounded(values)}};
        add(of_a[r], a[r][i].part[0], i);
#pragma unroll
        for (int part = 0; part < kParts; ++part) add(of_h[r][part], h[r][i].part[part], i);
      }
  };
  std::conditional_t<kGated, Gated, Ungated>::with(p.activation, [&](auto activation) {
    source.known([&](const Source& known) { activate(activation, known); });
  });
  uint32_t amax[Team::kOwn];
  team.amax(of_h, of_a, source.columns.interleaved, amax);
  if (is_e5m2(p.of_a.out)) store_rows<Fast<BF16, Kind::kE5M2>>(p, team, source.columns, row0, live, amax, h, a);
  else store_rows<Fast<BF16, Kind::kE4M3>>(p, team, source.columns, row0, live, amax, h, a);
}

// T is for the name alone, which tells the report of instructions what the kernel casts to.
template <class T, class Team>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(Team::kThreads, Team::kBlocks)
    quantize_activated_kernel(MOE_GRID_CONSTANT const TeamsPlan p) {
  __shared__ typename Team::Shared shared;
  Team team(shared);
  wait_for_previous_kernel();
  const int64_t of_block = int64_t(blockDim.y) * Team::kRows;
  const auto quantize_all = [&](auto gated) {
    const int64_t rows = round_up<int64_t>(p.of_a.rows, Team::kRowsOfUnit);
    for (int64_t first = blockIdx.y * of_block; first < rows; first += gridDim.y * of_block)
      quantize_rows<decltype(gated)::value>(p, team, Team::first_row(first / Team::kRows + threadIdx.y));
  };
  if (p.gated) quantize_all(std::true_type{});
  else quantize_all(std::false_type{});
}

template <class Team>
int launch_teams(const QuantizeActivatedParams& p, int threads, int64_t across, void* stream) {
  const int teams = threads == kLargestWarp ? kThreadsOfBlock / threads : 1;  // that wait for one another have a block
  const int64_t blocks = ceil_div<int64_t>(round_up<int64_t>(p.of_a.rows, Team::kRowsOfUnit), teams * Team::kRows);
  const int64_t most = kMaxBlocks / across < 65535 ? kMaxBlocks / across + 1 : 65535;
  const Launch l = {dim3(unsigned(across), unsigned(blocks < most ? blocks : most)), dim3(threads, teams), stream};
  const TeamsPlan plan = {p, is_gated(p.activation), format_of(p.of_a.format).blocked()};
  return launch(quantize_activated_kernel<Fast<BF16, Kind::kEither>, Team>, l, plan);
}

}  // namespace

bool can_quantize_activated(const QuantizeActivatedParams& p) {
  const bool whole = format_of(p.of_a.format).block == 0;
  return p.of_a.rows > 0 && p.h.F > 0 && p.h.in == InType::kBF16 && is_fnuz(p.of_a.out) == device().native_fnuz &&
         is_of_vectors(p.h.h, p.h.stride, p.h.F, p.of_a.rows, 2) &&
         (whole ? p.h.F <= kMostFeatures : p.h.F % kBlock == 0);
}

int quantize_activated(const QuantizeActivatedParams& p, void* stream) {
  const int64_t waves = ceil_div<int64_t>(p.h.F / n, kLargestWarp);
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
