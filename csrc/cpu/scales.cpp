#include "scales/swizzle_scales.h"

#include <cstring>

#include "cpu/groups.h"
#include "cpu/parallel.h"
#include "scales/expand_scales.h"

namespace moe_fp8 {
namespace {

struct RowBlock {  // up to 128 rows of a matrix
  int64_t plain, blocked;  // offsets of its first byte in the plain and in the blocked layout
  int64_t rows, columns;
};

// The row blocks of all matrices and groups. Writes p.starts.
std::vector<RowBlock> row_blocks(const SwizzleScalesParams& p) {
  const BlockedExtent extent = blocked_extent(p.groups, p.E, p.R, p.C);
  std::vector<RowBlock> blocks;
  auto add = [&](int64_t plain, int64_t blocked, int64_t rows, int64_t columns) {
    for (int64_t r = 0; r < rows && columns > 0; r += kScaleRows) {
      blocks.push_back({plain + r * p.row_stride, blocked, std::min<int64_t>(kScaleRows, rows - r), columns});
      blocked += kScaleRows * padded_scale_columns(columns);
    }
  };
  if (p.groups == Groups::kNone) {
    for (int64_t e = 0; e < p.E; ++e)
      add(e * p.group_stride, e * padded_scale_rows(p.R) * extent.columns, p.R, p.C);
    return blocks;
  }
  const bool m_grouped = p.groups == Groups::kRows;
  int64_t blocked_start = 0;
  for_each_group(safe_ends(p.offs, p.E, m_grouped ? p.R : p.C), [&](int64_t e, int64_t start, int64_t size) {
    if (p.starts) p.starts[e] = int(blocked_start);
    if (m_grouped) add(start * p.row_stride, blocked_start * extent.columns, size, p.C);
    else add(start, blocked_start * extent.rows, p.R, size);
    blocked_start += m_grouped ? padded_scale_rows(size) : padded_scale_columns(size);
  });
  return blocks;
}

// Moves every run of columns that is contiguous in both layouts.
void move(const SwizzleScalesParams& p, bool swizzle, int64_t out_bytes) {
  if (out_bytes) std::memset(p.to, 0, out_bytes);
  const std::vector<RowBlock> blocks = row_blocks(p);
  int64_t scales = 0;
  for (const RowBlock& b : blocks) scales += b.rows * b.columns;
  parallel(int64_t(blocks.size()), scales, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const RowBlock b = blocks[i];
      for (int64_t r = 0; r < b.rows; ++r)
        for (int64_t c = 0; c < b.columns; c += kScaleColumns) {
          const int64_t blocked = b.blocked + blocked_offset(r, c, padded_scale_columns(b.columns));
          const int64_t plain = b.plain + r * p.row_stride + c, bytes = b.columns - c;
          uint8_t* to = p.to + (swizzle ? blocked : plain);
          const uint8_t* from = p.from + (swizzle ? plain : blocked);
          if (bytes >= kScaleColumns) std::memcpy(to, from, kScaleColumns);  // a constant size: inlined
          else std::memcpy(to, from, bytes);
        }
    }
  });
}

struct ScaleMatrix {
  int64_t e, row, rows;  // the matrix, its first row among the scales, and its rows
  int64_t columns;       // elements of a row
  int first_block;
  int64_t blocked;       // the offset of its first byte
};

std::vector<ScaleMatrix> scale_matrices(const ExpandScalesParams& p, const BlockedExtent& extent) {
  std::vector<ScaleMatrix> matrices;
  if (p.groups == Groups::kNone) {
    for (int64_t e = 0; e < p.E; ++e)
      matrices.push_back({e, 0, p.R, p.K, 0, e * padded_scale_rows(p.R) * extent.columns});
    return matrices;
  }
  const bool m_grouped = p.groups == Groups::kRows;
  int64_t blocked_start = 0;
  for_each_group(safe_ends(p.offs, p.E, m_grouped ? p.R : p.K), [&](int64_t, int64_t start, int64_t size) {
    if (m_grouped) matrices.push_back({0, start, size, p.K, 0, blocked_start * extent.columns});
    else matrices.push_back({0, 0, p.R, size, int(blocked_start / kScaleColumns), blocked_start * extent.rows});
    blocked_start += m_grouped ? padded_scale_rows(size) : ceil_div<int64_t>(size, kBlock) * kScaleColumns;
  });
  return matrices;
}

}  // namespace

void expand_scales_cpu(const ExpandScalesParams& p) {
  const BlockedExtent extent = blocked_extent(p.groups, p.E, p.R, ceil_div<int64_t>(p.K, kMxBlock));
  const int64_t bytes = extent.rows * extent.columns;
  if (bytes) std::memset(p.out, 0, bytes);
  const std::vector<ScaleMatrix> matrices = scale_matrices(p, extent);
  const auto expand = [&](const ScaleMatrix& m, int64_t begin, int64_t end) {
    const int64_t count = ceil_div<int64_t>(m.columns, kBlock), columns = ceil_div<int64_t>(m.columns, kMxBlock);
    for (int64_t r = begin; r < end; ++r)
      for (int64_t b = 0; b < count; ++b) {
        const ColumnScales scales = p.scale.scales_of_column({m.first_block, int(count), int(b)});
        const int64_t at = b * kScaleColumns;
        std::memset(p.out + m.blocked + blocked_offset(r, at, count * kScaleColumns),
                    e8m0_of_power(scales.bits(m.e, m.row + r)), std::min<int64_t>(kScaleColumns, columns - at));
      }
  };
  for (const ScaleMatrix& m : matrices)
    parallel(m.rows, m.rows * ceil_div<int64_t>(m.columns, kMxBlock),
             [&](int64_t begin, int64_t end) { expand(m, begin, end); });
}

void swizzle_scales_cpu(const SwizzleScalesParams& p) {
  const BlockedExtent extent = blocked_extent(p.groups, p.E, p.R, p.C);
  move(p, true, extent.rows * extent.columns);
}
void unswizzle_scales_cpu(const SwizzleScalesParams& p) {
  move(p, false, (p.groups == Groups::kNone ? p.E : 1) * p.R * p.C);
}

}  // namespace moe_fp8
