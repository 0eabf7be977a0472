#include "activations/backward/quantize_activated_backward.h"

#include "activations/backward/gradients.h"
#include "activations/backward/sum_groups.h"
#include "platform/launch.h"
#include "primitives/groups.h"

namespace moe_fp8 {
namespace {

// Runs before the pass by rows: places groups and the rows of positions, clears the maxima, and gathers scores.
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kGradientPlaceThreads, 1)
    place_chunks_kernel(MOE_GRID_CONSTANT const GradientsPlan p) {
  __shared__ int words[GroupTable::words(kMaxExperts)];
  const int E = int(p.quantize_dh.E), positions = int(p.quantize_dh.positions);
  const GroupTable groups(words, E);
  wait_for_previous_kernel();
  build_group_table(groups, p.quantize_dh.offs, E, int(p.quantize_dh.rows), positions, p.quantize_dh.align);
  if (blockIdx.x == 0) {
    for (int e = threadIdx.x; e < E; e += kGradientPlaceThreads) p.quantize_dh.padded_offs[e] = groups.pos[e + 1];
    for (int e = threadIdx.x; e < E + 2; e += kGradientPlaceThreads) p.starts[e] = groups.row[e];
  }
  const int64_t threads = int64_t(gridDim.x) * kGradientPlaceThreads;
  const int64_t thread = int64_t(blockIdx.x) * kGradientPlaceThreads + threadIdx.x;
  for (int64_t i = thread; i < positions / kChunkRows; i += threads) {
    const int at = int(i) * kChunkRows, e = GroupTable::find(groups.pos, E, at), first = at - groups.pos[e];
    const int rows = e < E ? groups.rows(e) - first : 0;
    p.chunks[i] = {e, groups.row[e] + first, Max{}(0, Min{}(rows, kChunkRows)), 0};
  }
  for (int64_t i = thread; i < grouped_columns(p); i += threads) p.amax[i] = 0;
  gather_scores(p, thread, threads);
}

// Runs between the passes: turns the amax of every column of a group into its multiplier and its scale. If several
// blocks have a row, it sums their parts of dscores, in the order of activate_backward.cu.
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kGradientPlaceThreads, 1)
    scale_batch_columns_kernel(MOE_GRID_CONSTANT const GradientsPlan p) {
  const int64_t F = p.gradients.h.F, columns = (p.projections + 1) * F;
  const int64_t threads = int64_t(gridDim.x) * kGradientPlaceThreads;
  wait_for_previous_kernel();
  for (int64_t i = int64_t(blockIdx.x) * kGradientPlaceThreads + threadIdx.x; i < grouped_columns(p); i += threads) {
    const int64_t e = i / columns;
    const int column = int(i % columns), output = int(column / F), f = int(column % F);
    const uint32_t amax = p.amax[e * columns + output * F + f % kFeatures * p.vecs + f / kFeatures];
    const bool is_a = output == p.projections;
    const QuantizeParams& to = is_a ? p.quantize_a : p.quantize_dh;
    const ScaleF32 s = GradientTypes::scale_of<ScaleF32>(to, amax);
    const int64_t stored_column = is_a ? f : p.gradients.h.interleaved ? 2 * f + output : column;
    static_cast<float*>(to.scale_t)[e * to.K + stored_column] = s.stored();
    p.multipliers[i] = s.multiplier;
  }
  if (!p.dots) return;
  const int64_t rows = p.gradients.P;
  for (int64_t row = int64_t(blockIdx.x) * kGradientPlaceThreads + threadIdx.x; row < rows; row += threads) {
    const int slot = p.gradients.slot(row);
    if (slot < 0) continue;
    float sum = 0;
    for (int wave = 0; wave < p.row_waves; ++wave) sum += p.dots[wave * rows + row];
    store_element(p.gradients.dscores, InType::kF32, slot, sum);
  }
}

// Words of the sums of 16 rows, which fill whole 16-byte vectors.
int64_t partial_words(const QuantizeActivatedBackwardParams& p) {
  return p.dh_sums ? p.quantize_dh.positions / kChunkRows * p.quantize_dh.K : 0;
}
int threads_of_row(int vecs, int blocks) { return round_up(ceil_div(vecs, blocks), kMaxWarpSize); }
// The number of blocks to share a row that has the most vectors resident at once. Blocks that divide 512 threads do.
int best_row_blocks(int vecs) {
  int best = 0, most = 0;
  for (int blocks = ceil_div(vecs, kMaxRowTeam); blocks <= kMaxRowCluster; ++blocks) {
    const int resident = kRowPassBlocks * kMaxRowTeam / threads_of_row(vecs, blocks) * ceil_div(vecs, blocks);
    if (resident > most) best = blocks, most = resident;
  }
  return best;
}
GradientsPlan plan_of(const QuantizeActivatedBackwardParams& p) {
  auto* const scores = reinterpret_cast<float*>(p.scratch);
  GradientsPlan plan = {gradient_inputs(p.gradients, scores), p.quantize_dh, p.quantize_a};
  if (!p.quantize_dh.along_tokens) plan.quantize_dh.E = plan.quantize_dh.positions = 0;  // rows have no groups
  const int64_t columns = grouped_columns(plan);
  plan.partial_sums = p.dh_sums ? scores + score_words(p.gradients) : nullptr;
  plan.chunks = reinterpret_cast<ChunkRows*>(scores + score_words(p.gradients) + partial_words(p));
  plan.multipliers = reinterpret_cast<float*>(plan.chunks + plan.quantize_dh.positions / kChunkRows);
  plan.amax = reinterpret_cast<uint32_t*>(plan.multipliers + columns);
  plan.starts = reinterpret_cast<int*>(plan.amax + columns);
  plan.row_blocks = ceil_div(plan.vecs, kMaxRowTeam);
  if (plan.row_blocks > 1) plan.row_blocks = best_row_blocks(plan.vecs);
  plan.row_threads = threads_of_row(plan.vecs, plan.row_blocks);
  plan.row_waves = plan.row_blocks * plan.row_threads / kMinWarpSize;  // of any chip that has clusters
  if (plan.row_blocks > 1) plan.dots = reinterpret_cast<float*>(plan.starts + plan.quantize_dh.E + 2);
  return plan;
}

bool has_blocks(const QuantizeActivatedBackwardParams& p) { return format_of(p.quantize_dh.format).block != 0; }

}  // namespace

int64_t scratch_words(const QuantizeActivatedBackwardParams& p) {
  const int64_t words = score_words(p.gradients);
  const bool along_tokens = p.quantize_dh.along_tokens;
  if (has_blocks(p)) return words + (along_tokens ? gradient_tiles_words(p) : gradient_row_blocks_words(p));
  const GradientsPlan plan = plan_of(p);
  const int64_t chunk_words = plan.quantize_dh.positions / kChunkRows * (sizeof(ChunkRows) / 4);
  const int64_t dots = plan.row_blocks > 1 ? plan.row_waves * p.gradients.P : 0;
  return words + partial_words(p) + chunk_words + 2 * grouped_columns(plan) + plan.quantize_dh.E + 2 + dots;
}

bool can_quantize_activated_backward(const QuantizeActivatedBackwardParams& p) {
  const ActivateBackwardParams& g = p.gradients;
  const bool fnuz = device().native_fnuz;
  const Fp8Type native = fnuz ? Fp8Type::kE4M3FNUZ : Fp8Type::kE4M3FN;
  const bool along_tokens = p.quantize_dh.along_tokens;
  const bool types = g.h.scale.data && g.h.fp8 == native && is_fnuz(p.quantize_dh.out) == fnuz &&
                     (!along_tokens || p.quantize_a.out == native);
  const int64_t max_features = kMaxTeamFeatures * (device().has_clusters ? kMaxRowCluster : 1);
  const bool sizes = !has_blocks(p) ? g.h.F <= max_features
                     : along_tokens ? can_take_gradient_tiles(p)
                                    : can_take_gradient_row_blocks(p);
  const int vector_columns = g.h.interleaved && is_gated(g.activation) ? 2 * kFeatures : kFeatures;  // of h
  const bool strides = g.P == 1 || (g.h.stride < kMaxStride && g.da_stride < kMaxStride);
  return g.P > 0 && g.h.F > 0 && g.in == InType::kBF16 && types && sizes && strides &&
         (!along_tokens || (!p.quantize_a.has_batch_amax() && p.quantize_dh.align % kChunkRows == 0)) &&
         rows_are_vectorizable(g.h.h, g.h.stride, g.h.F, g.P, 1, vector_columns) &&
         rows_are_vectorizable(g.da, g.da_stride, g.h.F, g.P, 2);
}

int quantize_activated_backward(const QuantizeActivatedBackwardParams& p, void* stream) {
  const bool along_tokens = p.quantize_dh.along_tokens;
  if (has_blocks(p)) return along_tokens ? launch_gradient_tiles(p, stream) : launch_gradient_row_blocks(p, stream);
  const GradientsPlan plan = plan_of(p);
  const Launch few = {dim3(unsigned(device().multiprocessors)), dim3(kGradientPlaceThreads), stream};
  if (const int e = launch(place_chunks_kernel, few, plan)) return e;
  if (const int e = launch_gradient_rows(plan, stream)) return e;
  if (along_tokens || plan.dots)
    if (const int e = launch(scale_batch_columns_kernel, few, plan)) return e;
  if (!along_tokens) return 0;
  if (const int e = launch_gradient_columns(plan, stream)) return e;
  if (!p.dh_sums) return 0;
  const QuantizeParams& dh = p.quantize_dh;
  const bool by_feature = plan.projections > 1 && !plan.gradients.h.interleaved;
  return sum_partials({plan.partial_sums, kChunkRows, dh.align, by_feature, dh.offs, int(dh.E), dh.rows, dh.K,
                       p.dh_sums}, stream);
}

}  // namespace moe_fp8
