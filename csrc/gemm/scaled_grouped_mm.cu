#include "gemm/scaled_grouped_mm.h"

#include "platform/launch.h"
#include "platform/memory.h"
#include "primitives/operand.h"

namespace moe_fp8 {
namespace {

// Where no library has an fp8 grouped GEMM: dequantize into shared memory, multiply in float32. A block computes a
// 64 x 64 tile of one group, a thread 4 x 4 of it.
constexpr int kTileMN = 64, kTileK = 32, kPerThread = 4, kSide = kTileMN / kPerThread, kThreads = kSide * kSide;
constexpr int64_t kMaxBlocks = int64_t(1) << 30;
constexpr int kPitch = kTileMN + 4;  // transposed tiles, padded against bank conflicts

// Rows [row, row + 64) x sum indices [k, k + 32) of an operand, decoded, scaled if its scales are those of blocks, and
// transposed; zeros outside. Scales count the rows from scale_row.
MOE_DEVICE void load_tile(float (&tile)[kTileK][kPitch], const float (&values)[256], const uint8_t* base,
                          const OperandScales& scales, int64_t group, int64_t scale_row, ColumnBlock block,
                          int64_t stride, int64_t row, int64_t rows, int64_t k, int64_t k_end) {
  const int t = threadIdx.x, r = t / 4, first = t % 4 * 8;
  const uint8_t* p = base + (row + r) * stride + k + first;
  Vec8 v = {};
  if (row + r < rows) {
    if (k + first + 8 <= k_end && reinterpret_cast<uintptr_t>(p) % 8 == 0) {
      v = load_stream<Reuse::kSoon>(reinterpret_cast<const Vec8*>(p));
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (k + first + i < k_end) v.w[i / 4] |= uint32_t(p[i]) << (8 * (i % 4));
    }
  }
  const float scale = scales.block_size && row + r < rows ? scales.at(group, scale_row + row + r, block) : 1.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) tile[first + i][r] = values[(v.w[i / 4] >> (8 * (i % 4))) & 0xffu] * scale;
}

struct Operands {  // in shared memory
  float a_values[256], b_values[256];
  float a_tile[kTileK][kPitch], b_tile[kTileK][kPitch];
};

// Row tile `row_tile` and column tile `column_tile` of out; with groups of the sum, of group e of it.
MOE_DEVICE void multiply_tile(const ScaledGroupedMmParams& p, const GroupTable& table, Operands& shared, int e,
                              int64_t row_tile, int64_t column_tile) {
  int64_t m = row_tile * kTileMN, m_end = p.M, k = 0, k_end = p.K;
  if (p.groups_of_sum) {
    k = table.row[e];
    k_end = table.row[e + 1];
  } else {  // row tiles are counted over all groups; the tail is group E
    for (e = 0; e <= p.E; ++e) {
      const int tiles = ceil_div(table.rows(e), kTileMN);
      if (row_tile < tiles) break;
      row_tile -= tiles;
    }
    if (e > p.E) return;
    m = table.row[e] + row_tile * kTileMN;
    m_end = table.row[e + 1];
    if (e == p.E) k_end = 0;
  }
  const int64_t n = column_tile * kTileMN;
  const uint8_t* b = p.b + (p.groups_of_sum || e == p.E ? 0 : e * p.b_group_stride);

  float sum[kPerThread][kPerThread] = {};
  const int t = threadIdx.x, tm = t / kSide * kPerThread, tn = t % kSide * kPerThread;
  const int64_t a_group = p.groups_of_sum ? e : 0;
  const bool blocked_rows = p.scale_a.layout == ScaleLayout::kBlocked && !p.groups_of_sum;
  const int64_t scale_row = blocked_rows ? table.pos[e] - table.row[e] : 0;
  for (; k < k_end; k += kTileK) {  // within a block
    const ColumnBlock block = p.groups_of_sum ? block_of_group(p.scale_a, table, e, int(k) - table.row[e])
                                              : p.scale_a.block(0, int(p.K), int(k));
    load_tile(shared.a_tile, shared.a_values, p.a, p.scale_a, a_group, scale_row, block, p.a_stride, m, m_end, k,
              k_end);
    load_tile(shared.b_tile, shared.b_values, b, p.scale_b, e, 0, block, p.b_stride, n, p.N, k, k_end);
    __syncthreads();
#pragma unroll 4
    for (int kk = 0; kk < kTileK; ++kk) {
      float av[kPerThread], bv[kPerThread];
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        av[i] = shared.a_tile[kk][tm + i];
        bv[i] = shared.b_tile[kk][tn + i];
      }
#pragma unroll
      for (int i = 0; i < kPerThread; ++i)
#pragma unroll
        for (int j = 0; j < kPerThread; ++j) sum[i][j] = fmaf(av[i], bv[j], sum[i][j]);
    }
    __syncthreads();
  }

  const bool tail = e == p.E, scaled = p.scale_a.block_size > 0;
  const int64_t out0 = a_group * p.M;
  const bool empty = p.groups_of_sum && table.rows(e) == 0;  // 0 even where the scale of nothing is not finite
#pragma unroll
  for (int i = 0; i < kPerThread; ++i)
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const int64_t mm = m + tm + i, nn = n + tn + j;
      if (mm >= m_end || nn >= p.N) continue;
      float v = tail || empty ? 0.f : sum[i][j];
      if (!tail && !empty && !scaled) v = v * p.scale_a.at(a_group, mm, {}) * p.scale_b.at(e, nn, {});
      const int64_t at = (out0 + mm) * p.N + nn;
      if (p.adds && empty) continue;
      if (p.out_float32) {
        float& to = static_cast<float*>(p.out)[at];
        to = p.adds ? to + v : v;
      } else {
        uint16_t& to = static_cast<uint16_t*>(p.out)[at];
        to = BF16::from_float(p.adds ? BF16::to_float(to) + v : v);
      }
    }
}

// At most so many row tiles, whatever the groups are.
MOE_HD int64_t row_tiles(const ScaledGroupedMmParams& p) {
  return ceil_div<int64_t>(p.M, kTileMN) + (p.groups_of_sum ? 0 : p.E);
}
MOE_HD int64_t all_tiles(const ScaledGroupedMmParams& p) {
  return row_tiles(p) * ceil_div<int64_t>(p.N, kTileMN) * (p.groups_of_sum ? p.E : 1);
}

MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, 1)
    scaled_grouped_mm_kernel(MOE_GRID_CONSTANT const ScaledGroupedMmParams p) {
  __shared__ Operands shared;
  __shared__ int table_words[GroupTable::words(kMaxExperts)];
  const int t = threadIdx.x;
  wait_for_previous_kernel();
  shared.a_values[t] = decode(p.a_type, uint8_t(t));
  shared.b_values[t] = decode(p.b_type, uint8_t(t));
  const GroupTable table(table_words, int(p.E));
  const int extent = int(p.groups_of_sum ? p.K : p.M);
  build_group_table(table, p.offs, int(p.E), extent, extent, p.scale_a.block_size ? kGroupScales : 1);
  const int64_t rows = row_tiles(p), columns = ceil_div<int64_t>(p.N, kTileMN);
  for (int64_t tile = blockIdx.x; tile < all_tiles(p); tile += gridDim.x)
    multiply_tile(p, table, shared, int(tile / rows / columns), tile % rows, tile / rows % columns);
}

struct PrepareOffs {
  const int* offs;
  int* safe_offs;
  int E, limit, multiple;
};
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, 1) prepare_offs_kernel(MOE_GRID_CONSTANT const PrepareOffs p) {
  __shared__ int end[kMaxExperts];
  const int t = threadIdx.x;
  wait_for_previous_kernel();
  for (int e = t; e < p.E; e += kThreads) end[e] = clamp_offset(p.offs[e], p.limit);
  __syncthreads();
  block_scan(end, p.E, Max{});
  for (int e = t; e < p.E; e += kThreads) p.safe_offs[e] = end[e] / p.multiple * p.multiple;
  if (t == 0) p.safe_offs[p.E] = end[p.E - 1];
}

struct ZeroRows {
  uint32_t* out;
  const int* first;
  int64_t rows, row_words;
};
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, 1) zero_rows_kernel(MOE_GRID_CONSTANT const ZeroRows p) {
  wait_for_previous_kernel();
  const int64_t end = p.rows * p.row_words, step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = *p.first * p.row_words + int64_t(blockIdx.x) * kThreads + threadIdx.x; i < end; i += step)
    p.out[i] = 0;
}

struct ZeroEmptyGroups {
  uint32_t* out;
  const int* ends;
  int64_t group_words;
};
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, 1) zero_empty_groups_kernel(MOE_GRID_CONSTANT const ZeroEmptyGroups p) {
  wait_for_previous_kernel();
  const int e = blockIdx.y;
  if (p.ends[e] != (e ? p.ends[e - 1] : 0)) return;
  uint32_t* out = p.out + e * p.group_words;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < p.group_words; i += int64_t(gridDim.x) * kThreads)
    out[i] = 0;
}

struct AddGroups {
  Vec16* out;
  const Vec16* product;
  const int* ends;
  int64_t group_vectors;  // of product
  bool out_float32;
};
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, 1) add_groups_kernel(MOE_GRID_CONSTANT const AddGroups p) {
  wait_for_previous_kernel();
  const int e = blockIdx.y;
  if (p.ends[e] == (e ? p.ends[e - 1] : 0)) return;
  const int64_t end = (e + 1) * p.group_vectors, step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = e * p.group_vectors + int64_t(blockIdx.x) * kThreads + threadIdx.x; i < end; i += step) {
    const Vec16 added = load_stream(p.product + i);
    if (p.out_float32) {
      for (int half = 0; half < 2; ++half) {
        Vec16 sum = p.out[2 * i + half];
        for (int j = 0; j < 4; ++j)
          sum.w[j] = as_bits(as_float(sum.w[j]) + element<BF16>(added.w[2 * half + j / 2], j % 2));
        p.out[2 * i + half] = sum;
      }
    } else {
      Vec16 sum = p.out[i];
      auto add = [&](int j, int k) { return element<BF16>(sum.w[j], k) + element<BF16>(added.w[j], k); };
      for (int j = 0; j < 4; ++j) sum.w[j] = BF16::from_float(add(j, 0)) | uint32_t(BF16::from_float(add(j, 1))) << 16;
      p.out[i] = sum;
    }
  }
}

}  // namespace

int scaled_grouped_mm(const ScaledGroupedMmParams& p, void* stream) {
  int64_t blocks = all_tiles(p);
  if (blocks == 0) return 0;
  if (blocks > kMaxBlocks) blocks = kMaxBlocks;
  return launch(scaled_grouped_mm_kernel, {dim3(unsigned(blocks)), dim3(kThreads), stream}, p);
}

int prepare_offs(const int* offs, int* safe_offs, int E, int limit, int multiple, void* stream) {
  return launch(prepare_offs_kernel, {dim3(1), dim3(kThreads), stream},
                PrepareOffs{offs, safe_offs, E, limit, multiple});
}

int zero_rows(void* out, const int* first, int64_t rows, int64_t row_bytes, void* stream) {
  return launch(zero_rows_kernel, {dim3(2 * device().multiprocessors), dim3(kThreads), stream},
                ZeroRows{static_cast<uint32_t*>(out), first, rows, row_bytes / 4});
}

int zero_empty_groups(void* out, const int* ends, int E, int64_t group_bytes, void* stream) {
  return launch(zero_empty_groups_kernel, {dim3(16, unsigned(E)), dim3(kThreads), stream},
                ZeroEmptyGroups{static_cast<uint32_t*>(out), ends, group_bytes / 4});
}

int add_groups(void* out, bool out_float32, const void* product, const int* ends, int E, int64_t group_size,
               void* stream) {
  const dim3 grid(unsigned(ceil_div(8 * device().multiprocessors, E)), unsigned(E));
  return launch(add_groups_kernel, {grid, dim3(kThreads), stream},
                AddGroups{static_cast<Vec16*>(out), static_cast<const Vec16*>(product), ends, group_size / 8,
                          out_float32});
}

}  // namespace moe_fp8
