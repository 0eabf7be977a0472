#include "tokens/expert_columns.h"

#include "primitives/access_width.h"
#include "primitives/groups.h"
#include "primitives/wave_rows.h"
#include "tokens/policy.h"

namespace moe_fp8 {
namespace {

// Every block makes a table of the groups first. Blocks stay, and take row after row.
dim3 table_grid(int64_t blocks) {
  const int64_t max_blocks = kExpertColumnBlocks * device().multiprocessors;
  return dim3(unsigned(blocks < max_blocks ? blocks : max_blocks));
}

// begins [E + 1]: the first row of each group, and the end of the last. Called by the whole block; ends with a barrier.
MOE_DEVICE void find_begins(int* begins, const int* offs, int E, int rows) {
  if (threadIdx.x == 0) begins[0] = 0;
  clamp_and_scan_offs(begins + 1, offs, E, rows, 1);
  __syncthreads();
}

// ---- take: a thread has one unit of a row --------------------------------------------------------------------------
template <class Unit>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, kExpertColumnBlocks)
    take_expert_columns_kernel(MOE_GRID_CONSTANT const TakeExpertColumnsParams p) {
  __shared__ int begins[kMaxExperts + 1];
  wait_for_previous_kernel();
  const int E = int(p.E);
  find_begins(begins, p.offs, E, int(p.P));
  const int64_t units = p.row_bytes / int64_t(sizeof(Unit)), step = int64_t(gridDim.x) * kThreads;
#pragma unroll 1
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < p.P * units; i += step) {
    const int64_t row = i / units;
    const int e = GroupTable::find(begins, E, int(row));
    const int64_t token = e < E ? p.source.row(row) : -1;
    Unit value = {};
    if (token >= 0) {
      const auto* x = static_cast<const char*>(p.x) + token * p.x_stride + e * p.row_bytes;
      value = load_stream<Reuse::kSoon>(reinterpret_cast<const Unit*>(x) + i % units);
    }
    store_stream(static_cast<Unit*>(p.out) + i, value);
  }
}

// ---- spread: a wave has a token ------------------------------------------------------------------------------------
struct ColumnSlot {
  int row, group;  // group -1: the slot is left out
  float score;
};
MOE_DEVICE ColumnSlot load_slot(const SpreadExpertColumnsParams& p, const int* begins, int64_t token, int64_t j) {
  if (j >= p.top_k) return {0, -1, 0.f};
  const int64_t at = token * p.top_k + j;
  const int row = p.inverse[at];
  if (row < 0 || row >= p.P) return {0, -1, 0.f};
  const int e = GroupTable::find(begins, int(p.E), row);
  return {row, e < p.E ? e : -1, p.scores ? p.scores[at] : 1.f};
}

template <class Access>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, kExpertColumnBlocks)
    spread_expert_columns_kernel(MOE_GRID_CONSTANT const SpreadExpertColumnsParams p) {
  constexpr int n = Access::kElements;
  __shared__ int begins[kMaxExperts + 1];
  const Access access(p.in);
  const int lane = threadIdx.x % kWarpSize, expert_vecs = int(p.R / n), top_k = int(p.top_k);
  const int64_t vecs = p.E * expert_vecs;
  wait_for_previous_kernel();
  find_begins(begins, p.offs, int(p.E), int(p.P));
#pragma unroll 1
  for (int64_t token = first_row(); token < p.T; token += rows_per_grid()) {
    ColumnSlot slot = load_slot(p, begins, token, lane);
#pragma unroll 1
    for (int64_t first_vec = 0; first_vec < vecs; first_vec += kWarpSize) {
      const int64_t v = first_vec + lane, column = v % expert_vecs * n;
      const int e = int(v / expert_vecs);
      float sum[n] = {};
#pragma unroll 1
      for (int first = 0; first < top_k; first += kWarpSize) {
        if (top_k > kWarpSize) slot = load_slot(p, begins, token, first + lane);
        const int count = top_k - first < kWarpSize ? top_k - first : kWarpSize;
#pragma unroll 1
        for (int s = 0; s < count; ++s) {
          const int group = int(shfl(uint32_t(slot.group), s)), row = int(shfl(uint32_t(slot.row), s));
          const float score = as_float(shfl(as_bits(slot.score), s));
          if (group != e) continue;
          const typename Access::Raw y = access.load(p.y, row * p.y_stride + column);
#pragma unroll
          for (int i = 0; i < n; ++i) sum[i] += score * access.element(y, i);
        }
      }
      if (v < vecs) access.store(p.out, (token * vecs + v) * n, sum);
    }
  }
}

template <class Unit>
int take(const TakeExpertColumnsParams& p, void* stream) {
  const int64_t units = p.P * (p.row_bytes / int64_t(sizeof(Unit)));
  const Launch l = {table_grid(ceil_div<int64_t>(units, kThreads)), dim3(kThreads), stream};
  return launch(take_expert_columns_kernel<Unit>, l, p);
}

}  // namespace

int take_expert_columns(const TakeExpertColumnsParams& p, void* stream) {
  if (p.P == 0 || p.row_bytes == 0) return 0;
  const uint64_t bits = reinterpret_cast<uintptr_t>(p.x) | uint64_t(p.row_bytes) | uint64_t(p.x_stride);
  if (bits % 16 == 0) return take<Vec16>(p, stream);
  if (bits % 4 == 0) return take<uint32_t>(p, stream);
  return bits % 2 == 0 ? take<uint16_t>(p, stream) : take<uint8_t>(p, stream);
}

int spread_expert_columns(const SpreadExpertColumnsParams& p, void* stream) {
  if (p.T == 0 || p.E * p.R == 0) return 0;
  const bool vectorized = p.in == InType::kBF16 && (reinterpret_cast<uintptr_t>(p.y) | uint64_t(2 * p.R) |
                                                    uint64_t(p.P > 1 ? 2 * p.y_stride : 0)) % 16 == 0;
  auto* const kernel = vectorized ? spread_expert_columns_kernel<VectorAccess<BF16>>
                                  : spread_expert_columns_kernel<ElementAccess>;
  const Launch l = {table_grid(ceil_div<int64_t>(p.T, kThreads / kMaxWarpSize)), dim3(kThreads), stream};
  return launch(kernel, l, p);
}

}  // namespace moe_fp8
