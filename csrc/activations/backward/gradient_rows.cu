// The pass by rows: dh along rows, dscores, and the amax of every column of a group.
//
// THREAD MAP. A row team is the blockDim.x threads of one threadIdx.y, which are whole waves. Thread t has features 8 t
// to 8 t + 7. A team has kRows rows in flight, blockDim.y apart. After a wave's reduction, lane l holds the partials of
// row reduce_scatter_sum_index<kRows>(l). Every kRows-th lane holds the same row; lane l has rank l / kRows among
// them.
//
//   kRows 4     lane   0  1  2  3    4  5  6  7    8 ...
//               row    0  2  1  3    0  2  1  3    0 ...
//               rank   0  0  0  0    1  1  1  1    2 ...
//
// A longer row than a block's kMaxRowTeam threads can hold is the row of a cluster: its blocks have equal numbers of
// waves, one team each, which exchange their maxima through shared memory. Their parts of dscores go to memory: the
// kernel that runs next sums them.
#include "activations/backward/gradients.h"
#include "platform/clusters.h"
#include "platform/launch.h"
#include "quantize/row.h"

namespace moe_fp8 {
namespace {

// A wave's partial results for a row.
struct alignas(8) RowPartial { uint32_t amax; float dot; };
// Double-buffered: a slow wave may still read the previous rows' values.
struct TeamPartials { RowPartial rows[2][kMaxRowPassRows][kMaxRowTeam / 32]; };
// All gates of a row have one scale, so they take at most 256 values of the curve.
struct alignas(8) CurveTables { Point rows[kMaxRowPassRows][2 * kMagnitudes]; };
constexpr int kMaxRowTeams = kRowPassBlockThreads / 32;
// The amax of every wave of a row, in each block of a cluster. Double-buffered, as TeamPartials.
struct ClusterAmax { uint32_t rows[2][kMaxRowPassRows][kMaxRowCluster * kMaxRowTeam / 32]; };

// kRowsOnly: columns are not wanted, and dh and a may be, in bfloat16.
template <class T, class G, bool kTabulated, bool kCluster, bool kRowsOnly>
struct RowTeamPass {
  static constexpr int kOutputs = G::kOutputs, kRows = row_pass_rows(G::kLight || (kTabulated && kCluster));
  static_assert(kMaxRowTeam / kWarpSize <= kWarpSize / kRows);
  using Pairs = typename G::Pairs;

  const GradientsPlan& p;
  std::conditional_t<kCluster, ClusterAmax, TeamPartials>& partials;
  CurveTables& tables;  // used if kTabulated
  int v;                // the thread's vector
  bool valid;           // false: the row has no vector for this thread, which repeats the last one
  uint32_t step = 0;

  MOE_DEVICE void tabulate(const G (&g)[kRows]) const {
    for (int t = threadIdx.x; t < kRows * kMagnitudes; t += blockDim.x) {
      float scale = g[0].scale[0];
#pragma unroll
      for (int i = 1; i < kRows; ++i)
        if (t >= i * kMagnitudes) scale = g[i].scale[0];
      G::tabulate(p, tables.rows[t / kMagnitudes], t % kMagnitudes, scale);
    }
    team_barrier();
  }
  static MOE_DEVICE int row_of_lane() { return reduce_scatter_sum_index<kRows>(threadIdx.x); }
  static MOE_DEVICE int rank_of_lane() { return threadIdx.x % kWarpSize / kRows; }
  static MOE_DEVICE int wave() { return threadIdx.x / kWarpSize; }
  static MOE_DEVICE int waves() { return blockDim.x / kWarpSize; }
  static MOE_DEVICE void team_barrier() {  // a team of several waves is a whole block
    if (waves() > 1) __syncthreads();
    else wave_barrier();
  }
  // Rounds the gradients of a row. Returns the thread's part of dscores.
  MOE_DEVICE float round_row(const G& g, const Point* table, Pairs& dh, uint32_t (&a)[kFeatures / 2]) const {
    const auto gradient_of = [&](int j) {
      if constexpr (kTabulated) return g.gradient(p, j, table);
      else return g.gradient(p, j);
    };
    const float dot = g.round(gradient_of, dh, a);
    return valid ? dot : 0;
  }
  // Posts the wave's partials of the lane's row to the team. Returns the partials of all waves for that row.
  MOE_DEVICE auto* post(uint32_t amax, const float (&dot)[kRows], [[maybe_unused]] int row) {
    auto* row_partials = partials.rows[step++ & 1][row_of_lane()];
    const RowPartial partial = {amax, reduce_scatter_sum(dot)};
    if constexpr (kCluster) {
      const int row_wave = int(cluster_rank()) * waves() + wave();
      if (rank_of_lane() == 0) {
        for (uint32_t rank = 0; rank < cluster_size(); ++rank) cluster_store(row_partials + row_wave, amax, rank);
        store_stream(p.dots + row_wave * p.gradients.P + row, partial.dot);
      }
      cluster_arrive();
    } else {
      if (rank_of_lane() == 0) row_partials[wave()] = partial;
    }
    return row_partials;
  }
  // Combines the maxima of the lane's row, and stores its scale. Returns the scale.
  MOE_DEVICE ScaleF32 finish(const uint32_t* wave_amax, int row) {
    cluster_wait_for_all();
    uint32_t amax = 0;
    for (int w = rank_of_lane(); w < p.row_waves; w += kWarpSize / kRows) amax = MaxU32{}(amax, wave_amax[w]);
    amax = reduce_lanes<kWarpSize, kRows>(amax, MaxU32{});
    const ScaleF32 s = T::template scale_of<ScaleF32>(p.quantize_dh, amax);
    if (cluster_rank() == 0 && wave() == 0 && rank_of_lane() == 0)
      store_stream(row_scales(p.quantize_dh).at(row, 0), s.stored());
    return s;
  }
  // Combines the partials of the lane's row, and stores its scale and dscores. Returns the scale.
  MOE_DEVICE ScaleF32 finish(const RowPartial* row_partials, int row) {
    const int first_lane = threadIdx.x % kRows;
    team_barrier();
    RowPartial partial = {};
    if (rank_of_lane() < waves()) partial = row_partials[rank_of_lane()];
    const uint32_t amax = reduce_lanes<kWarpSize, kRows>(partial.amax, MaxU32{});
    const ScaleF32 s = T::template scale_of<ScaleF32>(p.quantize_dh, amax);
    if (wave() > 0) return s;
    float sum = 0;  // in the order of activate_backward.cu
    for (int w = 0; w < waves(); ++w) sum += as_float(shfl(as_bits(partial.dot), first_lane + w * kRows));
    if (rank_of_lane() == 0) {
      if (const int slot = p.gradients.slot(row); slot >= 0)
        store_element(p.gradients.dscores, InType::kF32, slot, sum);
      store_stream(row_scales(p.quantize_dh).at(row, 0), s.stored());
    }
    return s;
  }
  template <class Cast>
  MOE_DEVICE void store(const Pairs& dh, int row, float m, Cast cast) const {
    float multipliers[G::kVectors];
#pragma unroll
    for (float& multiplier : multipliers) multiplier = m;
    G::store(p, p.quantize_dh, dh, row, v, multipliers, cast);
  }
  // Computes the block's rows from first to stop, all of group e. Out-of-range rows repeat the last row: same maxima,
  // same bytes, no branch.
  MOE_DEVICE void run(int first, int stop, int e) {
    const int teams = blockDim.y, lane_row = row_of_lane();
    Pairs dh_max = {};
    uint32_t a_max[kFeatures / 2] = {};
    const auto row = [&](int begin, int i) { return Min{}(begin + int(threadIdx.y) + i * teams, stop - 1); };
    G g[kRows];
    const auto load = [&](int begin) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) g[i] = G::template load<Reuse::kSoon>(p, row(begin, i), v);
    };
    load(first);
    for (int begin = first; begin < stop; begin += kRows * teams) {
      if constexpr (kTabulated) tabulate(g);
      Pairs dh[kRows];
      uint32_t lane_amax = 0;
      float dot[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        uint32_t a[kFeatures / 2], row_max = 0;
        dot[i] = round_row(g[i], tables.rows[i], dh[i], a);
#pragma unroll
        for (int w = 0; w < G::kColumns / 2; ++w) {
          if constexpr (!kRowsOnly) dh_max[w] = max_magnitude<BF16>(dh_max[w], dh[i][w]);
          row_max = max_magnitude<BF16>(row_max, dh[i][w]);
        }
        if constexpr (kRowsOnly) {
          g[i].keep(p, row(begin, i), v, dh[i], a);
        } else {
#pragma unroll
          for (int w = 0; w < kFeatures / 2; ++w) a_max[w] = max_magnitude<BF16>(a_max[w], a[w]);
        }
        if (const uint32_t wave_amax = wave_max(amax_bits<BF16>(row_max)); i == lane_row) lane_amax = wave_amax;
      }
      const auto* row_partials = post(lane_amax, dot, row(begin, lane_row));
      load(begin + kRows * teams);  // in flight while the team combines its partials, and casts
      const ScaleF32 s = finish(row_partials, row(begin, lane_row));
      T::with_cast(p.quantize_dh, [&](auto cast) {
#pragma unroll
        for (int i = 0; i < kRows; ++i)
          store(dh[i], row(begin, i), as_float(shfl(as_bits(s.multiplier), reduce_scatter_sum_index<kRows>(i))), cast);
      });
    }
    if (kRowsOnly || !valid || e >= p.quantize_dh.E) return;
    const int64_t F = p.gradients.h.F;
    uint32_t* amax = p.amax + e * kOutputs * F + v;
    const auto raise = [&](int output, int j, uint32_t max) { atomicMax(amax + output * F + j * p.vecs, max); };
#pragma unroll
    for (int c = 0; c < G::kColumns; ++c)
      raise(G::projection_of(c), G::feature_of(c), magnitude_bits<BF16>(dh_max[c / 2], c % 2));
#pragma unroll
    for (int j = 0; j < kFeatures; ++j) raise(kOutputs - 1, j, magnitude_bits<BF16>(a_max[j / 2], j % 2));
  }
};

// Computes the rows of block, or cluster, number `at`.
template <class T, class Activations, bool kTabulated, bool kCluster, bool kRowsOnly, class Partials>
MOE_DEVICE void quantize_gradient_rows(const GradientsPlan& p, Partials& partials, CurveTables& tables, int v, int at) {
  const int begin = at * p.rows_per_block;
  const int end = begin + Min{}(p.rows_per_block, int(p.quantize_dh.rows) - begin);
  with_gradients<Activations>(p, [&](auto type) {
    using G = typename decltype(type)::Type;
    RowTeamPass<T, G, kTabulated, kCluster, kRowsOnly> pass = {p, partials, tables, Min{}(v, p.vecs - 1), v < p.vecs};
    for (int first = begin; first < end;) {
      const int e = GroupTable::find(p.starts, int(p.quantize_dh.E), first), stop = Min{}(p.starts[e + 1], end);
      pass.run(first, stop, e);
      first = stop;
    }
  });
}
template <class T, class Activations, bool kTabulated, bool kRowsOnly>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kMaxRowTeam, kRowPassBound)
    quantize_gradient_rows_kernel(MOE_GRID_CONSTANT const GradientsPlan p) {
  __shared__ TeamPartials partials[kMaxRowTeams];
  __shared__ CurveTables tables[kTabulated ? kMaxRowTeams / 2 : 1];  // a tabulated team has two waves at least
  wait_for_previous_kernel();
  quantize_gradient_rows<T, Activations, kTabulated, false, kRowsOnly>(
      p, partials[threadIdx.y], tables[kTabulated ? threadIdx.y : 0], threadIdx.x, int(blockIdx.x));
}
template <class T, class Activations, bool kTabulated, bool kRowsOnly>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kMaxRowTeam, kRowPassBound)
    quantize_gradient_long_rows_kernel(MOE_GRID_CONSTANT const GradientsPlan p) {
  if constexpr (kHasClusters) {
    MOE_DYNAMIC_SMEM(smem);  // which cluster_store() needs
    __shared__ CurveTables tables;
    wait_for_previous_kernel();
    cluster_barrier();  // before it, cluster_store() may find a block that has not begun
    quantize_gradient_rows<T, Activations, kTabulated, true, kRowsOnly>(
        p, *reinterpret_cast<ClusterAmax*>(smem), tables, int(cluster_rank() * blockDim.x + threadIdx.x),
        int(blockIdx.x / cluster_size()));
  }
}

template <bool kRowsOnly>
int launch_rows(GradientsPlan p, void* stream) {
  const int team_threads = p.row_threads;
  const bool shares_block = p.row_blocks == 1 && team_threads < kRowPassBlockThreads;
  const int teams = shares_block ? kRowPassBlockThreads / team_threads : 1;
  const int64_t rows = p.quantize_dh.rows;
  const int64_t blocks = int64_t(device().multiprocessors) * kRowPassRounds * kRowPassResidentThreads /
                         (team_threads * teams * p.row_blocks);
  p.rows_per_block = int(round_up<int64_t>(ceil_div(rows, blocks), kMinRowPassSteps * kMaxRowPassRows * teams));
  const auto grid = unsigned(ceil_div<int64_t>(rows, p.rows_per_block) * p.row_blocks);
  const Launch l = {dim3(grid), dim3(team_threads, teams), stream, p.row_blocks > 1 ? sizeof(ClusterAmax) : 0,
                    p.row_blocks};
  const bool gated = is_gated(p.gradients.activation);
  const auto launch_with = [&](auto activations, auto tabulated) {
    using Activations = decltype(activations);
    constexpr bool kTabulated = decltype(tabulated)::value;
    if constexpr (kTabulated || Activations::kProjections == 1)
      if (p.row_blocks > 1)
        return launch(quantize_gradient_long_rows_kernel<GradientTypes, Activations, kTabulated, kRowsOnly>, l, p);
    return launch(quantize_gradient_rows_kernel<GradientTypes, Activations, kTabulated, kRowsOnly>, l, p);
  };
  if (!gated) return launch_with(UngatedActivations{}, std::false_type{});
  // A row of one wave has hardly more gates than a table has entries: slower with one (docs/kernels/activations.md).
  if (p.row_blocks == 1 && team_threads <= kMaxWarpSize)
    return launch_with(GatedActivations{}, std::false_type{});
  return launch_with(GatedActivations{}, std::true_type{});
}

}  // namespace

int launch_gradient_rows(const GradientsPlan& plan, void* stream) {
  return plan.quantize_dh.along_tokens ? launch_rows<false>(plan, stream) : launch_rows<true>(plan, stream);
}

}  // namespace moe_fp8
