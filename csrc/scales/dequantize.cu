#include "scales/dequantize.h"

#include "numerics/dispatch.h"
#include "platform/launch.h"
#include "platform/memory.h"
#include "primitives/access_width.h"
#include "primitives/operand.h"

namespace moe_fp8 {
namespace {

// blockDim.x threads share a row; a block has blockDim.y rows at once. A thread keeps its columns, so that it looks up
// their scaling block once. It takes kRows rows at a time, so that their loads are in flight together.
constexpr int kThreads = 256, kRows = 4;
// Steps of kRows rows that a thread takes. More with groups, because each block builds a table of them.
constexpr int kSteps = 4, kStepsWithGroups = 16;
constexpr int kMinBlocks = 16;  // a multiprocessor, if there are rows for them

// The part of a row that a thread writes at once: 16 bytes of out, or an element of a type known at run time.
template <class Out>
struct OutputVectors {
  static constexpr int kElements = 16 / sizeof(typename Out::Bits);

  static MOE_DEVICE Vec8 load(const uint8_t* q) {
    if constexpr (kElements == 8) return load_stream(reinterpret_cast<const Vec8*>(q));
    else return Vec8{{load_stream(reinterpret_cast<const uint32_t*>(q)), 0}};
  }
  static MOE_DEVICE void store(const DequantizeParams& p, int64_t at, const float (&v)[kElements]) {
    const Vec16 vec = VectorAccess<Out>::packed_vec(v);
    if constexpr (std::is_same_v<Out, BF16>) {
      if (p.for_quads) {
        auto* out = static_cast<typename Out::Bits*>(p.out) + at;
        store_stream(reinterpret_cast<Vec8*>(out), Vec8{{vec.w[0], vec.w[2]}});
        store_stream(reinterpret_cast<Vec8*>(out + in_quads(2)), Vec8{{vec.w[1], vec.w[3]}});
        return;
      }
    }
    store_stream(reinterpret_cast<Vec16*>(static_cast<typename Out::Bits*>(p.out) + at), vec);
  }
};
struct OutputElements {
  static constexpr int kElements = 1;

  static MOE_DEVICE Vec8 load(const uint8_t* q) { return Vec8{{load_stream(q), 0}}; }
  static MOE_DEVICE void store(const DequantizeParams& p, int64_t at, const float (&v)[1]) {
    store_element(p.out, p.out_type, at, v[0]);
  }
};
// The place of column k in a row of out.
MOE_DEVICE int64_t place_of(const DequantizeParams& p, int64_t k) {
  return p.for_quads ? k - k % 16 + in_quads(int(k % 16)) : k;
}

struct ScaleColumn {
  ColumnBlock block;
  bool valid;  // false: columns are grouped, and this one is in no group
};
MOE_DEVICE ScaleColumn scale_column_of(const DequantizeParams& p, const GroupTable& table, int k) {
  if (p.groups != Groups::kColumns) return {p.scale.block(0, int(p.K), k), true};
  const int g = GroupTable::find(table.row, p.num_groups, k);
  if (g >= p.num_groups) return {{}, false};
  return {block_of_group(p.scale, table, g, k - table.row[g]), true};
}

struct MatrixRow {
  int64_t e, row;
};
// Row `row` of matrix e; rows past the last one belong to the next matrices. Rarely divides.
MOE_DEVICE MatrixRow matrix_row(const DequantizeParams& p, int64_t e, int64_t row) {
  if (row < p.rows) return {e, row};
  const int64_t matrices = row / p.rows;
  return {e + matrices, row - matrices * p.rows};
}

struct ScaleRow {
  int64_t row;
  bool valid;  // false: rows are grouped, and this one is in no group
};
MOE_DEVICE ScaleRow scale_row_of(const DequantizeParams& p, const GroupTable& table, int64_t row) {
  if (p.groups != Groups::kRows) return {row, true};
  const int g = GroupTable::find(table.row, p.num_groups, int(row));
  return {row + table.pos[g] - table.row[g], g < p.num_groups};
}

// Dequantizes columns of several blocks, one by one.
MOE_DEVICE void dequantize_elements(const DequantizeParams& p, const GroupTable& table, const float* values, int k,
                                    int k_end) {
  const int64_t rows = p.E * p.rows, step = gridDim.y * blockDim.y;
  for (; k < k_end; ++k) {
    const ScaleColumn c = scale_column_of(p, table, k);
    for (int64_t i = blockIdx.y * blockDim.y + threadIdx.y; i < rows; i += step) {
      const MatrixRow at = matrix_row(p, 0, i);
      const ScaleRow scale = scale_row_of(p, table, at.row);
      float v[1] = {};
      if (scale.valid && c.valid)
        v[0] = values[p.q[at.e * p.group_stride + at.row * p.row_stride + k]] * p.scale.at(at.e, scale.row, c.block);
      OutputElements::store(p, i * p.K + place_of(p, k), v);
    }
  }
}

template <class Access>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, 1) dequantize_kernel(MOE_GRID_CONSTANT const DequantizeParams p) {
  constexpr int kElements = Access::kElements;
  __shared__ float values[256];
  __shared__ int table_words[GroupTable::words(kMaxExperts)];
  static_assert(kThreads == 256);
  const int t = threadIdx.y * blockDim.x + threadIdx.x;
  values[t] = decode(p.type, uint8_t(t));
  wait_for_previous_kernel();
  const GroupTable table(table_words, p.num_groups);
  const int extent = int(p.groups == Groups::kRows ? p.rows : p.K);
  if (p.groups != Groups::kNone)
    build_group_table(table, p.offs, p.num_groups, extent, extent, kGroupScales, p.multiple);
  __syncthreads();

  const int64_t k = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * kElements;
  if (k >= p.K) return;
  const ScaleColumn first = scale_column_of(p, table, int(k));
  const ScaleColumn last = scale_column_of(p, table, int(k) + kElements - 1);
  const bool one_block = first.valid == last.valid && first.block.first == last.block.first &&
                         first.block.at == last.block.at;
  if (!one_block) return dequantize_elements(p, table, values, int(k), int(k) + kElements);
  const ColumnScales scales = p.scale.scales_of_column(first.block);
  const int64_t rows = p.E * p.rows, rows_per_grid = kRows * blockDim.y, place = place_of(p, k);
  for (int64_t begin = blockIdx.y * rows_per_grid + threadIdx.y; begin < rows; begin += gridDim.y * rows_per_grid) {
    Vec8 q[kRows];
    uint32_t scale_bits[kRows];
    MatrixRow at = matrix_row(p, 0, begin);
#pragma unroll
    for (int r = 0; r < kRows; ++r, at = matrix_row(p, at.e, at.row + blockDim.y)) {
      q[r] = {};
      scale_bits[r] = 0;
      if (begin + r * blockDim.y >= rows || !first.valid) continue;
      const ScaleRow scale = scale_row_of(p, table, at.row);
      if (!scale.valid) continue;
      q[r] = Access::load(p.q + at.e * p.group_stride + at.row * p.row_stride + k);
      scale_bits[r] = scales.bits(at.e, scale.row);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = begin + r * blockDim.y;
      if (row >= rows) break;
      const float scale = scales.value(scale_bits[r]);
      float v[kElements];
#pragma unroll
      for (int i = 0; i < kElements; ++i) v[i] = values[q[r].w[i / 4] >> (8 * (i % 4)) & 0xffu] * scale;
      Access::store(p, row * p.K + place, v);
    }
  }
}

template <class Access>
int launch_with(const DequantizeParams& p, void* stream) {
  const int64_t vecs = ceil_div<int64_t>(p.K, Access::kElements);
  const int64_t max_x = kThreads / (Access::kElements == 1 ? 1 : 2);
  int x = 1;
  while (x < max_x && x < vecs) x *= 2;
  const int y = kThreads / x;
  const int64_t grid_x = ceil_div<int64_t>(vecs, x), steps = ceil_div<int64_t>(p.E * p.rows, kRows * y);
  const int64_t min_grid_y = ceil_div<int64_t>(kMinBlocks * device().multiprocessors, grid_x);
  int64_t grid_y = ceil_div<int64_t>(steps, p.groups == Groups::kNone ? kSteps : kStepsWithGroups);
  if (grid_y < min_grid_y) grid_y = steps < min_grid_y ? steps : min_grid_y;
  if (grid_y > kMaxGridBlocksY) grid_y = kMaxGridBlocksY;
  if (grid_y > max_grid_blocks(kThreads) / grid_x) grid_y = max_grid_blocks(kThreads) / grid_x;
  return launch(dequantize_kernel<Access>, {dim3(unsigned(grid_x), unsigned(grid_y)), dim3(x, y), stream}, p);
}

}  // namespace

int dequantize(const DequantizeParams& p, void* stream) {
  if (p.E * p.rows * p.K == 0) return 0;
  return dispatch_in(p.out_type, [&](auto out) {
    using Access = OutputVectors<decltype(out)>;
    const uint64_t bits = p.K | p.row_stride | p.group_stride | reinterpret_cast<uintptr_t>(p.q);
    const bool aligned = bits % Access::kElements == 0 && reinterpret_cast<uintptr_t>(p.out) % 16 == 0;
    return aligned ? launch_with<Access>(p, stream) : launch_with<OutputElements>(p, stream);
  });
}

}  // namespace moe_fp8
