#include "scales/expand_scales.h"

#include "platform/launch.h"
#include "platform/memory.h"
#include "primitives/groups.h"
#include "scales/swizzle_scales.h"

namespace moe_fp8 {
namespace {

// 32 threads share an atom. Each writes a line, 16 bytes: the scales of the rows r, r + 32, r + 64 and r + 96, four
// times each. Lines of neighbouring threads are contiguous, and so are their rows in column-major scales.
constexpr int kLines = 32, kLineRows = kScaleRows / kLines, kThreads = 256, kAtoms = kThreads / kLines;
constexpr int kResidentBlocks = 4;  // of a multiprocessor; each builds a table of groups, if there are groups
static_assert(sizeof(Vec16) * kLines == kScaleBytes && kBlock == kMxBlock * kScaleColumns);

struct ExpandPlan {
  ExpandScalesParams p;
  BlockedExtent extent;
  uint32_t row_blocks, blocks;  // atoms of a matrix, down and across; with groups of columns, `blocks` is not used
  uint32_t atoms;
};

// The scales of an atom.
struct Atom {
  int64_t e, row;  // the matrix, and the first row among its scales
  int rows;        // that the matrix has from there on; 0 or less: padding only
  int columns;     // of blocks of 32, likewise
  ColumnBlock block;
};

MOE_DEVICE Atom atom_at(const ExpandPlan& plan, const GroupTable& table, uint32_t i) {
  const ExpandScalesParams& p = plan.p;
  if (p.groups == Groups::kColumns) {
    const uint32_t column = i / plan.row_blocks;  // of atoms: a group has as many as it has blocks of 128
    const int e = table.find(table.pos, int(p.E), int(column * kBlock));
    if (e >= p.E) return {};
    const int first = table.pos[e] / kBlock, count = table.pos[e + 1] / kBlock - first;
    const uint32_t in_group = i - uint32_t(first) * plan.row_blocks;
    const int64_t row = int64_t(in_group / count) * kScaleRows;
    const int at = int(in_group % count);
    return {0, row, int(p.R - row), ceil_div(table.rows(e), kMxBlock) - at * kScaleColumns, {first, count, at}};
  }
  const int at = int(i % plan.blocks), count = int(plan.blocks);
  const int columns = int(ceil_div<int64_t>(p.K, kMxBlock)) - at * kScaleColumns;
  const uint32_t row_block = i / plan.blocks;
  if (p.groups == Groups::kNone) {
    const int64_t row = int64_t(row_block % plan.row_blocks) * kScaleRows;
    return {row_block / plan.row_blocks, row, int(p.R - row), columns, {0, count, at}};
  }
  const int first = int(row_block) * kScaleRows, e = table.find(table.pos, int(p.E), first);
  if (e >= p.E) return {};
  const int row = first - table.pos[e];
  return {0, int64_t(table.row[e]) + row, table.rows(e) - row, columns, {0, count, at}};
}

MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, kResidentBlocks)
    expand_scales_kernel(MOE_GRID_CONSTANT const ExpandPlan plan) {
  MOE_DYNAMIC_SMEM(smem);
  const ExpandScalesParams& p = plan.p;
  wait_for_previous_kernel();
  allow_next_kernel();
  const GroupTable table(reinterpret_cast<int*>(smem), int(p.E));
  if (p.groups == Groups::kRows)
    build_group_table(table, p.offs, int(p.E), int(p.R), int(plan.extent.rows), kScaleRows);
  if (p.groups == Groups::kColumns)
    build_group_table(table, p.offs, int(p.E), int(p.K), int(p.K + p.E * kBlock), kBlock);
  const int line = threadIdx.x % kLines;
  const int64_t bytes = plan.extent.rows * plan.extent.columns;
#pragma unroll 1
  for (uint32_t i = blockIdx.x * kAtoms + threadIdx.x / kLines; i < plan.atoms; i += gridDim.x * kAtoms) {
    const int64_t to = int64_t(i) * kScaleBytes + line * int(sizeof(Vec16));
    if (to >= bytes) continue;  // the last atom may be a part
    const Atom atom = atom_at(plan, table, i);
    uint32_t bits[kLineRows] = {};
    if (atom.rows > 0 && atom.columns > 0) {
      const ColumnScales scales = p.scale.scales_of_column(atom.block);
#pragma unroll
      for (int j = 0; j < kLineRows; ++j)
        if (line + kLines * j < atom.rows) bits[j] = scales.bits(atom.e, atom.row + line + kLines * j);
    }
    const int columns = atom.columns > 0 ? atom.columns : 0;
    const uint32_t valid = columns >= kScaleColumns ? ~0u : (1u << (8 * columns)) - 1;
    Vec16 vec;
#pragma unroll
    for (int j = 0; j < kLineRows; ++j)
      vec.w[j] = line + kLines * j < atom.rows ? e8m0_of_power(bits[j]) * 0x01010101u & valid : 0;
    store_words(p.out + to, vec, bytes - to);  // room for groups of rows may end within a line
  }
}

}  // namespace

int expand_scales(const ExpandScalesParams& p, void* stream) {
  ExpandPlan plan = {p, blocked_extent(p.groups, p.E, p.R, ceil_div<int64_t>(p.K, kMxBlock)), 0, 0, 0};
  plan.row_blocks = uint32_t(padded_scale_rows(p.R) / kScaleRows);
  plan.blocks = uint32_t(ceil_div<int64_t>(p.K, kBlock));
  plan.atoms = uint32_t(ceil_div<int64_t>(plan.extent.rows * plan.extent.columns, kScaleBytes));
  if (plan.atoms == 0) return 0;
  const int64_t wanted = ceil_div<int64_t>(plan.atoms, kAtoms);
  const int64_t most = p.groups == Groups::kNone ? max_grid_blocks(kThreads)
                                                 : int64_t(kResidentBlocks) * device().multiprocessors;
  Launch l = {dim3(unsigned(wanted < most ? wanted : most)), dim3(kThreads), stream};
  if (p.groups != Groups::kNone) l.shared = 4 * GroupTable::words(int(p.E));
  return launch(expand_scales_kernel, l, plan);
}

}  // namespace moe_fp8
