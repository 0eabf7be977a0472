// The first pass: dh along rows, dscores, and the amax of every column of a group.
#include "activations/backward/gradients.h"
#include "platform/launch.h"
#include "quantize/row.h"

namespace moe_fp8 {
namespace {

constexpr int kUsualThreads = 128;  // of a block of several teams
constexpr int kMostRows = 4;        // of a team at once
// Blocks: of threads that a multiprocessor has registers for, so many in turn, that all end about together; but each
// walks so many times a team's rows, for in the end it brings its maxima to memory.
constexpr int kHeldThreads = 512, kTurns = 12, kLeastWalks = 4;

// What a wave tells its team of a row.
struct alignas(8) OfRow { uint32_t amax; float dot; };
// In turns: who is late may still read what was said before.
struct TeamWords { OfRow of[2][kMostRows][kMostTeam / 32]; };
// The gates of a row have one scale, so at most 256 points of the curve are theirs.
struct alignas(8) TeamPoints { Point of[kMostRows][2 * kMagnitudes]; };
constexpr int kMostTeams = kUsualThreads / 32;

// A team of threads walks rows, a vector each and some rows at once. Every kRows-th lane of a wave has a share in one
// of them, and ends up with what is of that row.
template <class T, class G, bool kTabled>
struct TeamWalk {
  static constexpr int kParts = G::kParts, kRows = G::kLight ? kMostRows : 2;
  static_assert(kMostTeam / kWarpSize <= kWarpSize / kRows);
  using Pairs = typename G::Pairs;

  const GradientsPlan& p;
  TeamWords& words;
  TeamPoints& points;  // where kTabled
  int v;               // the thread's vector
  bool there;          // whether the row has so many; otherwise v is its last one
  uint32_t turn = 0;

  MOE_DEVICE void find_points(const G (&g)[kRows]) const {
    for (int t = threadIdx.x; t < kRows * kMagnitudes; t += blockDim.x) {
      float scale = g[0].scale[0];
#pragma unroll
      for (int i = 1; i < kRows; ++i)
        if (t >= i * kMagnitudes) scale = g[i].scale[0];
      G::find_points(points.of[t / kMagnitudes], t % kMagnitudes, scale);
    }
    barrier();
  }
  static MOE_DEVICE int own_row() { return number_of_lane<kRows>(threadIdx.x); }
  static MOE_DEVICE int lane_of_share() { return threadIdx.x % kWarpSize / kRows; }
  static MOE_DEVICE int wave() { return threadIdx.x / kWarpSize; }
  static MOE_DEVICE int waves() { return blockDim.x / kWarpSize; }
  static MOE_DEVICE void barrier() {
    if (waves() > 1) __syncthreads();
    else wave_barrier();
  }
  // Gradients of a row, and the thread's part of dscores.
  MOE_DEVICE float round_row(const G& g, const Point* points, Pairs& dh, uint32_t (&a)[kFeatures / 2]) const {
    const auto gradient = [&](int j) {
      if constexpr (kTabled) return g.of(j, points);
      else return g.of(j);
    };
    const float dot = g.round(gradient, dh, a);
    return there ? dot : 0;
  }
  // To the team, what the wave knows of the lane's row.
  MOE_DEVICE const OfRow* tell(uint32_t amax, const float (&dot)[kRows]) {
    OfRow* of_row = words.of[turn++ & 1][own_row()];
    const OfRow told = {amax, neighbour_sums(dot)};
    if (lane_of_share() == 0) of_row[wave()] = told;
    return of_row;
  }
  // Its scale; that and dscores in memory.
  MOE_DEVICE ScaleF32 finish(const OfRow* of_row, int row) {
    const int first_lane = threadIdx.x % kRows;
    barrier();
    OfRow told = {};
    if (lane_of_share() < waves()) told = of_row[lane_of_share()];
#pragma unroll
    for (int mask = kWarpSize / 2; mask >= kRows; mask /= 2) told.amax = Max{}(told.amax, shfl_xor(told.amax, mask));
    const ScaleF32 s = T::template scale_of<ScaleF32>(p.of_dh, told.amax);
    if (wave() > 0) return s;
    float sum = 0;  // in the order of activate_backward.cu
    for (int w = 0; w < waves(); ++w) sum += as_float(shfl(as_bits(told.dot), first_lane + w * kRows));
    if (lane_of_share() == 0) {
      if (const int slot = p.gradients.slot(row); slot >= 0)
        store_element(p.gradients.dscores, InType::kF32, slot, sum);
      store_stream(static_cast<float*>(p.of_dh.scale) + row, s.dequant());
    }
    return s;
  }
  template <class Cast>
  MOE_DEVICE void store(const Pairs& dh, int row, float m, Cast cast) const {
    uint8_t* q = p.of_dh.q + offset(row, uint32_t(p.of_dh.K));
#pragma unroll
    for (int i = 0, pair = 0; i < G::kPieces; ++i) {
      typename G::Neighbours bytes;
#pragma unroll
      for (uint32_t& word : bytes.w) {
        word = cast_words<BF16>(dh + pair, m, m, m, m, cast);
        pair += 2;
      }
      store_stream(G::piece(p, q, v, i), bytes);
    }
  }
  // The block's rows from first to stop, which are of group e. Behind the last row it comes once more: the same maxima
  // and the same bytes.
  MOE_DEVICE void walk(int first, int stop, int e) {
    const int teams = blockDim.y, own = own_row();
    Pairs most_of_dh = {};
    uint32_t most_of_a[kFeatures / 2] = {};
    const auto row = [&](int begin, int i) { return Min{}(begin + int(threadIdx.y) + i * teams, stop - 1); };
    G g[kRows];
    const auto load = [&](int begin) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) g[i] = G::template load<Reuse::kSoon>(p, row(begin, i), v);
    };
    load(first);
    for (int begin = first; begin < stop; begin += kRows * teams) {
      if constexpr (kTabled) find_points(g);
      Pairs dh[kRows];
      uint32_t amax = 0;
      float dot[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        uint32_t a[kFeatures / 2], of_row = 0;
        dot[i] = round_row(g[i], points.of[i], dh[i], a);
#pragma unroll
        for (int w = 0; w < G::kColumns / 2; ++w) {
          most_of_dh[w] = max_magnitude<BF16>(most_of_dh[w], dh[i][w]);
          of_row = max_magnitude<BF16>(of_row, dh[i][w]);
        }
#pragma unroll
        for (int w = 0; w < kFeatures / 2; ++w) most_of_a[w] = max_magnitude<BF16>(most_of_a[w], a[w]);
        if (const uint32_t of_wave = warp_max(amax_bits<BF16>(of_row)); i == own) amax = of_wave;
      }
      const OfRow* of_row = tell(amax, dot);
      load(begin + kRows * teams);  // under way while the team agrees on scales, and casts
      const ScaleF32 s = finish(of_row, row(begin, own));
      T::with_cast(p.of_dh, [&](auto cast) {
#pragma unroll
        for (int i = 0; i < kRows; ++i)
          store(dh[i], row(begin, i), as_float(shfl(as_bits(s.multiplier), number_of_lane<kRows>(i))), cast);
      });
    }
    if (!there || e >= p.of_dh.E) return;
    const int64_t F = p.gradients.h.F;
    uint32_t* told = p.amax + e * (kParts + 1) * F + v;
    const auto raise = [&](int part, int j, uint32_t most) { atomicMax(told + part * F + j * p.vecs, most); };
#pragma unroll
    for (int c = 0; c < G::kColumns; ++c)
      raise(G::part_of(c), G::feature_of(c), magnitude_bits<BF16>(most_of_dh[c / 2], c % 2));
#pragma unroll
    for (int j = 0; j < kFeatures; ++j) raise(kParts, j, magnitude_bits<BF16>(most_of_a[j / 2], j % 2));
  }
};

template <class T, class Activations, bool kTabled>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kMostTeam, 2)
    quantize_gradient_rows_kernel(MOE_GRID_CONSTANT const GradientsPlan p) {
  __shared__ TeamWords words[kMostTeams];
  __shared__ TeamPoints points[kTabled ? kMostTeams / 2 : 1];
  const int v = threadIdx.x;
  const int begin = int(blockIdx.x) * p.share, end = begin + Min{}(p.share, int(p.of_dh.rows) - begin);
  wait_for_previous_kernel();
  with_gradients<Activations>(p, [&](auto of) {
    using G = typename decltype(of)::Type;
    TeamWalk<T, G, kTabled> walk = {
        p, words[threadIdx.y], points[kTabled ? threadIdx.y : 0], Min{}(v, p.vecs - 1), v < p.vecs};
    for (int first = begin; first < end;) {
      const int e = GroupTable::find(p.starts, int(p.of_dh.E), first), stop = Min{}(p.starts[e + 1], end);
      walk.walk(first, stop, e);
      first = stop;
    }
  });
}

}  // namespace

int launch_gradient_rows(GradientsPlan p, void* stream) {
  const int threads = round_up(p.vecs, kLargestWarp);
  const int teams = threads < kUsualThreads ? kUsualThreads / threads : 1;
  const int64_t rows = p.of_dh.rows;
  const int64_t shares = int64_t(device().multiprocessors) * kTurns * kHeldThreads / (threads * teams);
  p.share = int(round_up<int64_t>(ceil_div(rows, shares), kLeastWalks * kMostRows * teams));
  const Launch of_rows = {dim3(unsigned(ceil_div<int64_t>(rows, p.share))), dim3(threads, teams), stream};
  const auto launch_rows = [&](auto activations, auto tabled) {
    return launch(quantize_gradient_rows_kernel<GradientTypes, decltype(activations), tabled.value>, of_rows, p);
  };
  if (!is_gated(p.gradients.activation)) return launch_rows(Ungated{}, std::false_type{});
  // One wave has hardly more gates than they may have points: [196608, 256] took 283 us by these, 272 without.
  if (threads <= kLargestWarp) return launch_rows(Gated{}, std::false_type{});
  return launch_rows(Gated{}, std::true_type{});
}

}  // namespace moe_fp8
