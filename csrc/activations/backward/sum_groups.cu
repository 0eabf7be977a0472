// Two kernels: x -> sums of 64 rows, and these, or sums of 16 rows that another kernel wrote -> sums of groups.
#include "activations/backward/sum_groups.h"

#include "activations/gates.h"
#include "activations/policy.h"
#include "platform/launch.h"
#include "primitives/groups.h"
#include "primitives/transpose.h"

namespace moe_fp8 {
namespace {

constexpr int kPartialThreadRows = kRowsOfPartial / kChunkRows;

// THREAD MAP. A block has 64 rows of a group by 32 vectors of columns. Row of threads y has rows 16 y to 16 y + 15.
template <class Access>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kLanes* kPartialThreadRows, kSumGroupsBlocks)
    sum_rows_kernel(MOE_GRID_CONSTANT const SumGroupsParams p) {
  constexpr int n = Access::kElements;
  __shared__ int words[GroupTable::words(kMaxExperts)];
  __shared__ float sums[kPartialThreadRows][kLanes * n];
  const GroupTable groups(words, p.E);
  const Access access(p.in);
  wait_for_previous_kernel();
  build_group_table(groups, p.offs, p.E, int(p.rows), 0, kRowsOfPartial);
  const int64_t first_column = int64_t(blockIdx.x) * kLanes * n, column = first_column + threadIdx.x * n;
  const int partials = groups.pos[p.E] / kRowsOfPartial;
  for (int at = blockIdx.y; at < partials; at += gridDim.y) {
    const int e = GroupTable::find(groups.pos, p.E, at * kRowsOfPartial);
    const int in_group = at * kRowsOfPartial - groups.pos[e] + int(threadIdx.y) * kChunkRows;
    const int rows = column < p.N ? groups.rows(e) - in_group : 0;
    const int64_t first = groups.row[e] + in_group;
    SumGroupsParams::Row row[kChunkRows];
    typename Access::Raw raw[kChunkRows];
#pragma unroll
    for (int r = 0; r < kChunkRows; ++r) {
      row[r] = {-1, 0.f};
      if (r < rows) row[r] = p.row(first + r);
    }
#pragma unroll
    for (int r = 0; r < kChunkRows; ++r)
      if (row[r].at >= 0) raw[r] = access.load_once(p.x, int64_t(row[r].at) * p.x_stride + column);
#pragma unroll
    for (int j = 0; j < n; ++j) {
      float fours[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const auto value = [&](int at) {
          const int r = 4 * i + at;
          return row[r].at >= 0 ? row[r].score * access.element(raw[r], j) : 0.f;
        };
        fours[i] = (value(0) + value(1)) + (value(2) + value(3));
      }
      sums[threadIdx.y][threadIdx.x * n + j] = (fours[0] + fours[1]) + (fours[2] + fours[3]);
    }
    __syncthreads();
    for (int c = threadIdx.y * kLanes + threadIdx.x; c < kLanes * n; c += kLanes * kPartialThreadRows)
      if (first_column + c < p.N)
        p.scratch[at * p.N + first_column + c] = (sums[0][c] + sums[1][c]) + (sums[2][c] + sums[3][c]);
    __syncthreads();
  }
}

// The sum of four times as many rows as a partial sum has, or of kTimes fours of fours. Partial sums from `count` on
// are +0.
template <int kTimes>
MOE_DEVICE float sum_fours(const float* partials, int64_t stride, int count) {
  if constexpr (kTimes == 0) {
    return count > 0 ? *partials : 0.f;
  } else {
    constexpr int kStep = 1 << 2 * (kTimes - 1);
    const auto part = [&](int i) {
      return sum_fours<kTimes - 1>(partials + i * kStep * stride, stride, count - i * kStep);
    };
    const float a = part(0), b = part(1), c = part(2), d = part(3);
    return (a + b) + (c + d);
  }
}

// THREAD MAP. A block has 32 columns, and kSumThreadRows sums of 256 rows at a time, one for each row of threads.
template <int kRows>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kLanes* kSumThreadRows, 1)
    sum_partials_kernel(MOE_GRID_CONSTANT const PartialSums p) {
  constexpr int kTimes = kRows == kChunkRows ? 2 : 1, kPartials = kRowsOfSum / kRows;
  __shared__ int words[GroupTable::words(kMaxExperts)];
  __shared__ float sums[kSumThreadRows][kLanes];
  const GroupTable groups(words, p.E);
  wait_for_previous_kernel();
  build_group_table(groups, p.offs, p.E, int(p.x_rows), 0, p.align);
  const int64_t column = int64_t(blockIdx.x) * kLanes + threadIdx.x;
  const bool valid = column < p.N;
  const int64_t to = p.by_feature ? column % 2 * (p.N / 2) + column / 2 : column;
  for (int e = blockIdx.y; e < p.E; e += gridDim.y) {
    const int count = ceil_div(groups.rows(e), kRows), steps = ceil_div(count, kPartials);
    const float* const partials = p.partials + groups.pos[e] / kRows * p.N + column;
    float sum = 0;
    for (int first = 0; first < steps; first += kSumThreadRows) {
      const int at = (first + int(threadIdx.y)) * kPartials;
      if (at < count)
        sums[threadIdx.y][threadIdx.x] = sum_fours<kTimes>(partials + at * p.N, p.N, valid ? count - at : 0);
      __syncthreads();
      if (threadIdx.y == 0)
        for (int i = 0; i < Min{}(kSumThreadRows, steps - first); ++i) sum += sums[i][threadIdx.x];
      __syncthreads();
    }
    if (threadIdx.y == 0 && valid) store_element(p.out, InType::kF32, e * p.N + to, sum);
  }
}

template <class Access>
int launch_sum_rows(const SumGroupsParams& p, void* stream) {
  const auto across = unsigned(ceil_div<int64_t>(p.N, kLanes * Access::kElements));
  const int64_t partials = partial_words(p) / p.N;
  const int64_t wanted = ceil_div<int64_t>(int64_t(device().multiprocessors) * kSumGroupsRounds, across);
  const int64_t along = wanted < partials ? wanted : partials;
  const dim3 grid(across, unsigned(along < kMaxGridBlocksY ? along : kMaxGridBlocksY));
  return launch(sum_rows_kernel<Access>, {grid, dim3(kLanes, kPartialThreadRows), stream}, p);
}

}  // namespace

int sum_groups(const SumGroupsParams& p, void* stream) {
  if (p.E == 0 || p.N == 0) return 0;
  const bool vectorized = p.in == InType::kBF16 && rows_are_vectorizable(p.x, p.x_stride, p.N, p.rows, 2);
  const int e = vectorized ? launch_sum_rows<VectorAccess<BF16>>(p, stream) : launch_sum_rows<ElementAccess>(p, stream);
  if (e) return e;
  return sum_partials({p.scratch, kRowsOfPartial, kRowsOfPartial, false, p.offs, p.E, p.rows, p.N, p.out}, stream);
}

int sum_partials(const PartialSums& p, void* stream) {
  if (p.E == 0 || p.N == 0) return 0;
  const Launch l = {dim3(unsigned(ceil_div<int64_t>(p.N, kLanes)), unsigned(p.E)), dim3(kLanes, kSumThreadRows),
                    stream};
  return p.rows == kChunkRows ? launch(sum_partials_kernel<kChunkRows>, l, p)
                              : launch(sum_partials_kernel<kRowsOfPartial>, l, p);
}

}  // namespace moe_fp8
