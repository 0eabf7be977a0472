#include "gemm/scaled_grouped_mm.h"

#include <algorithm>

#include "platform/launch.h"
#include "platform/memory.h"
#include "primitives/groups.h"

namespace moe_fp8 {
namespace {

constexpr int kThreads = 256;

struct PrepareOffs {
  const int* offs;
  int* safe_offs;
  int E, limit, multiple;
};
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, 1) prepare_offs_kernel(MOE_GRID_CONSTANT const PrepareOffs p) {
  __shared__ int end[kMaxExperts];
  const int t = threadIdx.x;
  wait_for_previous_kernel();
  clamp_and_scan_offs(end, p.offs, p.E, p.limit, 1);  // the last end is stored as it is, so rounding comes later
  for (int e = t; e < p.E; e += kThreads) p.safe_offs[e] = end[e] / p.multiple * p.multiple;
  if (t == 0) p.safe_offs[p.E] = end[p.E - 1];
}

// Zeros the rows from *first on. If `first` is null, a row is a whole group, and row blockIdx.y is zeroed if its group
// is empty.
struct ZeroRows {
  uint32_t* out;
  const int *first, *ends;  // one of them is null
  int64_t rows, row_words;
};
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, 1) zero_rows_kernel(MOE_GRID_CONSTANT const ZeroRows p) {
  wait_for_previous_kernel();
  const int e = blockIdx.y;
  if (p.ends && p.ends[e] != (e ? p.ends[e - 1] : 0)) return;
  const int64_t first = p.ends ? e : *p.first, end = (p.ends ? e + 1 : p.rows) * p.row_words;
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = first * p.row_words + int64_t(blockIdx.x) * kThreads + threadIdx.x; i < end; i += step) p.out[i] = 0;
}

struct AddGroups {
  Vec16* out;
  const Vec16* product;
  const int* ends;
  int64_t group_eights;  // vectors of 8 elements in a group
  bool out_float32, product_float32;
};
// Loads eight neighbouring elements as float32: two vectors of float32, or one of bfloat16.
MOE_DEVICE void load_eight(const Vec16* from, int64_t i, bool is_float32, float (&v)[8]) {
  const Vec16 first = from[is_float32 ? 2 * i : i], second = is_float32 ? from[2 * i + 1] : Vec16{};
  for (int j = 0; j < 8; ++j)
    v[j] = !is_float32 ? element<BF16>(first.w[j / 2], j % 2) : as_float(j < 4 ? first.w[j] : second.w[j - 4]);
}
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, 1) add_groups_kernel(MOE_GRID_CONSTANT const AddGroups p) {
  wait_for_previous_kernel();
  const int e = blockIdx.y;
  if (p.ends[e] == (e ? p.ends[e - 1] : 0)) return;
  const int64_t end = (e + 1) * p.group_eights, step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = e * p.group_eights + int64_t(blockIdx.x) * kThreads + threadIdx.x; i < end; i += step) {
    float sum[8], added[8];
    load_eight(p.product, i, p.product_float32, added);
    load_eight(p.out, i, p.out_float32, sum);
    for (int j = 0; j < 8; ++j) sum[j] += added[j];
    if (p.out_float32) {
      for (int half = 0; half < 2; ++half) {
        Vec16 four;
        for (int j = 0; j < 4; ++j) four.w[j] = as_bits(sum[4 * half + j]);
        p.out[2 * i + half] = four;
      }
    } else {
      Vec16 eight;
      for (int j = 0; j < 4; ++j)
        eight.w[j] = BF16::from_float(sum[2 * j]) | uint32_t(BF16::from_float(sum[2 * j + 1])) << 16;
      p.out[i] = eight;
    }
  }
}

// A block adds to tiles of kRankRows x kRankColumns, and holds kRankDepth elements along r in shared memory. A thread
// has eight neighbouring columns of every kRankLines-th row.
constexpr int kRankRows = 64, kRankColumns = 128, kRankDepth = 32;
constexpr int kRankLines = kThreads / (kRankColumns / 8), kRankLaneRows = kRankRows / kRankLines;

struct AddLowRank {
  LowRankTerm term;
  const int* offs;
  void* out;
  int E, M, N;
  bool out_float32;
};
struct RankTile {
  float a[kRankRows][kRankDepth], b[kRankDepth][kRankColumns];
};

// Adds eight sums to out, or as many as there are columns.
template <class Float>
MOE_DEVICE void add_eight(typename Float::Bits* out, const float (&sum)[8], int columns) {
  for (int j = 0; j < 8 && j < columns; ++j) out[j] = Float::from_float(Float::to_float(out[j]) + sum[j]);
}

// Adds the term to rows [begin, end) of the tile, which are of expert e.
MOE_DEVICE void add_rows_of_expert(const AddLowRank& p, RankTile& tile, int first_row, int first_column, int e,
                                   int begin, int end) {
  const int t = threadIdx.x, line = t / (kRankColumns / 8), column = t % (kRankColumns / 8) * 8;
  float sum[kRankLaneRows][8] = {};
  for (int first = 0; first < p.term.rank; first += kRankDepth) {
    __syncthreads();
    for (int i = t; i < kRankRows * kRankDepth; i += kThreads) {
      const int row = i / kRankDepth, r = first + i % kRankDepth;
      const bool valid = row >= begin && row < end && r < p.term.rank;
      tile.a[row][i % kRankDepth] = valid ? BF16::to_float(p.term.a[(first_row + row) * p.term.a_stride + r]) : 0.f;
    }
    for (int i = t; i < kRankColumns * kRankDepth; i += kThreads) {
      const int n = i / kRankDepth, r = first + i % kRankDepth;
      const uint16_t* b = p.term.b + e * p.term.b_group_stride + (first_column + n) * p.term.b_stride + r;
      tile.b[i % kRankDepth][n] = first_column + n < p.N && r < p.term.rank ? BF16::to_float(*b) : 0.f;
    }
    __syncthreads();
    for (int r = 0; r < kRankDepth && first + r < p.term.rank; ++r)
#pragma unroll
      for (int i = 0; i < kRankLaneRows; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j)
          sum[i][j] = fmaf(tile.a[line + i * kRankLines][r], tile.b[r][column + j], sum[i][j]);
  }
  for (int i = 0; i < kRankLaneRows; ++i) {
    const int row = line + i * kRankLines;
    if (row < begin || row >= end) continue;
    const int64_t at = int64_t(first_row + row) * p.N + first_column + column;
    const int columns = p.N - first_column - column;
    if (p.out_float32) add_eight<F32>(static_cast<uint32_t*>(p.out) + at, sum[i], columns);
    else add_eight<BF16>(static_cast<uint16_t*>(p.out) + at, sum[i], columns);
  }
}
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, 2) add_low_rank_kernel(MOE_GRID_CONSTANT const AddLowRank p) {
  __shared__ int ends[kMaxExperts];
  __shared__ RankTile tile;
  wait_for_previous_kernel();
  clamp_and_scan_offs(ends, p.offs, p.E, p.M, 1);
  const int columns = ceil_div(p.N, kRankColumns), last = ends[p.E - 1];
  const int64_t tiles = int64_t(ceil_div(last, kRankRows)) * columns;
  for (int64_t i = blockIdx.x; i < tiles; i += gridDim.x) {
    const int first_row = int(i / columns) * kRankRows, first_column = int(i % columns) * kRankColumns;
    const int stop = last - first_row < kRankRows ? last - first_row : kRankRows;
    int e = GroupTable::find(ends, p.E - 1, first_row) + 1;  // the first group that ends behind first_row
    for (int begin = 0; begin < stop; ++e) {
      const int end = ends[e] - first_row < stop ? ends[e] - first_row : stop;
      if (end > begin) add_rows_of_expert(p, tile, first_row, first_column, e, begin, end);
      begin = end;
    }
  }
}

}  // namespace

int prepare_offs(const int* offs, int* safe_offs, int E, int limit, int multiple, void* stream) {
  return launch(prepare_offs_kernel, {dim3(1), dim3(kThreads), stream},
                PrepareOffs{offs, safe_offs, E, limit, multiple});
}

int zero_rows(void* out, const int* first, int64_t rows, int64_t row_bytes, void* stream) {
  return launch(zero_rows_kernel, {dim3(2 * device().multiprocessors), dim3(kThreads), stream},
                ZeroRows{static_cast<uint32_t*>(out), first, nullptr, rows, row_bytes / 4});
}

int add_low_rank(const ScaledGroupedMmParams& p, void* stream) {
  if (p.E == 0 || p.M == 0 || p.N == 0 || p.low_rank.rank == 0) return 0;
  const int64_t tiles = ceil_div<int64_t>(p.M, kRankRows) * ceil_div<int64_t>(p.N, kRankColumns);
  const unsigned blocks = unsigned(std::min<int64_t>(tiles, 4 * device().multiprocessors));
  return launch(add_low_rank_kernel, {dim3(blocks), dim3(kThreads), stream},
                AddLowRank{p.low_rank, p.offs, p.out, int(p.E), int(p.M), int(p.N), p.out_float32});
}

int zero_empty_groups(void* out, const int* ends, int E, int64_t group_bytes, void* stream) {
  return launch(zero_rows_kernel, {dim3(16, unsigned(E)), dim3(kThreads), stream},
                ZeroRows{static_cast<uint32_t*>(out), nullptr, ends, E, group_bytes / 4});
}

int add_groups(void* out, bool out_float32, const void* product, bool product_float32, const int* ends, int E,
               int64_t group_size, void* stream) {
  const dim3 grid(unsigned(ceil_div(8 * device().multiprocessors, E)), unsigned(E));
  return launch(add_groups_kernel, {grid, dim3(kThreads), stream},
                AddGroups{static_cast<Vec16*>(out), static_cast<const Vec16*>(product), ends, group_size / 8,
                          out_float32, product_float32});
}

}  // namespace moe_fp8
