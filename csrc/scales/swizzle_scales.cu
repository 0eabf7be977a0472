#include "scales/swizzle_scales.h"

#include "platform/launch.h"
#include "platform/memory.h"
#include "primitives/groups.h"

namespace moe_fp8 {
namespace {

// THREAD MAP. A chunk is four neighbouring blocks of scales: 128 rows by 16 columns. A thread has a line of a chunk: 16
// columns of the rows r, r + 32, r + 64 and r + 96. A tile is four chunks, which follow one another along the rows.
//
//   thread    0  1  2  3  | 4  5  6  7  | ...     4 threads read 64 neighbouring bytes of each of four rows;
//   chunk     0  1  2  3  | 0  1  2  3  | ...     8 threads of a chunk write 128 neighbouring bytes of a block
//   line r    0  0  0  0  | 1  1  1  1  | ...
constexpr int kChunkBlocks = 4, kChunk = kChunkBlocks * kScaleColumns, kLines = 32, kLineRows = kScaleRows / kLines;
constexpr int kTileChunks = 4, kThreads = kTileChunks * kLines;
constexpr int kResidentBlocks = 6;  // of a multiprocessor, against registers
constexpr int kRowGroupBlocks = 4;  // of a multiprocessor, with groups of rows: each builds a table of groups
static_assert(sizeof(Vec16) == kChunk && kLineRows == 4 && kChunkBlocks == 4, "words are transposed 4 by 4");

// 32-bit counts: 2^32 chunks are eight terabytes of scales.
struct SwizzlePlan {
  SwizzleScalesParams p;
  BlockedExtent extent;
  bool unswizzles;  // from blocked scales to plain ones
  uint32_t matrix_row_blocks, row_blocks;  // rows of blocks, of a matrix and of all
  uint32_t row_chunks, tiles;              // chunks of a row of blocks; tiles of all
};

// Blocks of scales that are contiguous in the blocked layout: the rest of a matrix's row of blocks, from a block on.
struct BlockRun {
  int64_t blocked, plain;  // offsets of the first scale
  int rows, columns;       // of the matrix, from there on; 0 or less: padding only
  int blocks;
  bool is_tail;            // behind the last group: zeros on both sides

  MOE_DEVICE void next() {
    blocked += kScaleBytes;
    plain += kScaleColumns;
    columns -= kScaleColumns;
    --blocks;
  }
};

// Called before memory is touched. The next kernel may start now, because it waits in the same way.
MOE_DEVICE void begin() {
  wait_for_previous_kernel();
  allow_next_kernel();
}

// Maps blocks to the scales that they hold. E equal matrices need no data: blocks compute addresses while the previous
// kernel still runs. Groups begin by reading offs.
struct EqualMatrices {
  static int64_t max_blocks() { return max_grid_blocks(kThreads); }
  MOE_DEVICE EqualMatrices(const SwizzlePlan&, int*) {}
  MOE_DEVICE void before_access() const { begin(); }
  MOE_DEVICE BlockRun run_at(const SwizzlePlan& plan, uint32_t row_block, int column) const {
    const uint32_t e = row_block / plan.matrix_row_blocks;
    const int64_t row = int64_t(row_block % plan.matrix_row_blocks) * kScaleRows;
    return {blocked_offset(int64_t(row_block) * kScaleRows, column, plan.extent.columns),
            e * plan.p.group_stride + row * plan.p.row_stride + column, int(plan.p.R - row), int(plan.p.C - column),
            int(plan.extent.columns - column) / kScaleColumns, false};
  }
};

MOE_DEVICE GroupTable table_of(const SwizzlePlan& plan, int* shared, int64_t size, int64_t positions, int align) {
  begin();
  const GroupTable table(shared, int(plan.p.E));
  build_group_table(table, plan.p.offs, int(plan.p.E), int(size), int(positions), align);
  if (blockIdx.x == 0 && plan.p.starts)
    for (int e = threadIdx.x; e < plan.p.E; e += kThreads) plan.p.starts[e] = table.pos[e];
  return table;
}
// With groups, blocks stay resident, because each builds a table of groups. docs/kernels/scales.md has how many.
//
// The padded layout has room for all rows, so that rows of no group stand in it too, behind the others.
struct RowGroups {
  static int64_t max_blocks() { return kRowGroupBlocks * device().multiprocessors; }
  GroupTable table;
  MOE_DEVICE RowGroups(const SwizzlePlan& plan, int* shared)
      : table(table_of(plan, shared, plan.p.R, plan.extent.rows, kScaleRows)) {}
  MOE_DEVICE void before_access() const {}
  MOE_DEVICE BlockRun run_at(const SwizzlePlan& plan, uint32_t row_block, int column) const {
    const int first = int(row_block) * kScaleRows, e = table.find(table.pos, int(plan.p.E), first);
    const int row = first - table.pos[e];
    return {blocked_offset(first, column, plan.extent.columns), (table.row[e] + row) * plan.p.row_stride + column,
            table.rows(e) - row, int(plan.p.C - column), int(plan.extent.columns - column) / kScaleColumns,
            e == plan.p.E};
  }
};
struct ColumnGroups {
  static int64_t max_blocks() { return kResidentBlocks * device().multiprocessors; }
  GroupTable table;
  MOE_DEVICE ColumnGroups(const SwizzlePlan& plan, int* shared)
      : table(table_of(plan, shared, plan.p.C, plan.extent.columns, kScaleColumns)) {}
  MOE_DEVICE void before_access() const {}
  MOE_DEVICE BlockRun run_at(const SwizzlePlan& plan, uint32_t row_block, int column) const {
    const int e = table.find(table.pos, int(plan.p.E), column), at = column - table.pos[e];
    const int width = round_up(table.pos[e + 1] - table.pos[e], kScaleColumns);
    const int64_t row = int64_t(row_block) * kScaleRows;
    return {table.pos[e] * plan.extent.rows + blocked_offset(row, at, width),
            row * plan.p.row_stride + table.row[e] + at, int(plan.p.R - row), table.rows(e) - at,
            (width - at) / kScaleColumns, e == plan.p.E};
  }
};

MOE_DEVICE bool is_aligned(const void* p, int bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

// Loads up to four bytes from any address; the others are zeros.
MOE_DEVICE uint32_t load_word(const uint8_t* p, int bytes) {
  if (bytes >= 4 && is_aligned(p, 4)) return load_stream(reinterpret_cast<const uint32_t*>(p));
  uint32_t word = 0;
#pragma unroll
  for (int b = 0; b < 4; ++b)
    if (b < bytes) word |= uint32_t(load_stream(p + b)) << (8 * b);
  return word;
}
MOE_DEVICE void store_word(uint8_t* p, uint32_t word, int bytes) {
  if (bytes >= 4 && is_aligned(p, 4)) return store_stream(reinterpret_cast<uint32_t*>(p), word);
#pragma unroll
  for (int b = 0; b < 4; ++b)
    if (b < bytes) store_stream(p + b, uint8_t(word >> (8 * b)));
}

// 16 bytes at any address: three aligned words, and four bytes of the words before and behind them. One register holds
// these four edge bytes, each in its place.
struct UnalignedVec {
  int before;  // bytes of the first aligned word that precede the vector

  MOE_DEVICE explicit UnalignedVec(const void* p) : before(int(reinterpret_cast<uintptr_t>(p) % 4)) {}
  MOE_DEVICE int word(int i) const { return 4 * (i + 1) - before; }
  MOE_DEVICE int edge(int b) const { return b - before + (b < before ? 16 : 0); }
};
MOE_DEVICE uint32_t from_byte(uint32_t low, uint32_t high, int byte) {
  return uint32_t((uint64_t(high) << 32 | low) >> (8 * byte));
}
MOE_DEVICE Vec16 load_16(const uint8_t* p) {
  const UnalignedVec at(p);
  uint32_t edge = 0, w[3];
#pragma unroll
  for (int i = 0; i < 3; ++i) w[i] = load_stream(reinterpret_cast<const uint32_t*>(p + at.word(i)));
#pragma unroll
  for (int b = 0; b < 4; ++b) edge |= uint32_t(load_stream(p + at.edge(b))) << (8 * b);
  const int n = at.before;
  return {{from_byte(edge, w[0], n), from_byte(w[0], w[1], n), from_byte(w[1], w[2], n), from_byte(w[2], edge, n)}};
}
MOE_DEVICE void store_16(uint8_t* p, const Vec16& v) {
  const UnalignedVec at(p);
  const int n = 4 - at.before;
  const uint32_t edge = from_byte(v.w[3], v.w[0], n);
#pragma unroll
  for (int i = 0; i < 3; ++i)
    store_stream(reinterpret_cast<uint32_t*>(p + at.word(i)), from_byte(v.w[i], v.w[i + 1], n));
#pragma unroll
  for (int b = 0; b < 4; ++b) store_stream(p + at.edge(b), uint8_t(edge >> (8 * b)));
}
MOE_DEVICE Vec16 transposed(const Vec16 (&chunks)[4], int i) {
  return {{chunks[0].w[i], chunks[1].w[i], chunks[2].w[i], chunks[3].w[i]}};
}

// Swizzle and Unswizzle move a line between its place in a block and its rows. chunk() moves the line of four blocks
// that are whole to the right and aligned on the blocked side and, if `aligned`, on the plain side. block() moves the
// line of one block, which may end with its matrix. `rows` and `columns` count what the matrix has from there on.
// Nothing is read for the tail. `room`: bytes left on the blocked side.
struct Swizzle {
  static MOE_DEVICE void chunk(uint8_t* blocked, const uint8_t* plain, int64_t stride, int rows, bool is_tail,
                               bool aligned) {
    Vec16 row_vecs[kLineRows];
#pragma unroll
    for (int j = 0; j < kLineRows; ++j) {
      const uint8_t* row = plain + kLines * j * stride;
      const bool valid = kLines * j < rows && !is_tail;
      if (aligned) row_vecs[j] = valid ? load_stream(reinterpret_cast<const Vec16*>(row)) : Vec16{};
      else row_vecs[j] = valid ? load_16(row) : Vec16{};
    }
#pragma unroll
    for (int i = 0; i < kChunkBlocks; ++i)
      store_stream(reinterpret_cast<Vec16*>(blocked + i * kScaleBytes), transposed(row_vecs, i));
  }
  static MOE_DEVICE void block(uint8_t* blocked, const uint8_t* plain, int64_t stride, int rows, int columns,
                               bool is_tail, int64_t room) {
    Vec16 line;
#pragma unroll
    for (int j = 0; j < kLineRows; ++j)
      line.w[j] = kLines * j < rows && !is_tail ? load_word(plain + kLines * j * stride, columns) : 0;
    store_words(blocked, line, room);
  }
};
struct Unswizzle {
  static MOE_DEVICE void chunk(uint8_t* plain, const uint8_t* blocked, int64_t stride, int rows, bool is_tail,
                               bool aligned) {
    Vec16 block_vecs[kChunkBlocks];
#pragma unroll
    for (int i = 0; i < kChunkBlocks; ++i) {
      const Vec16* line = reinterpret_cast<const Vec16*>(blocked + i * kScaleBytes);
      block_vecs[i] = is_tail ? Vec16{} : load_stream(line);
    }
#pragma unroll
    for (int j = 0; j < kLineRows; ++j) {
      uint8_t* row = plain + kLines * j * stride;
      if (kLines * j >= rows) break;
      if (aligned) store_stream(reinterpret_cast<Vec16*>(row), transposed(block_vecs, j));
      else store_16(row, transposed(block_vecs, j));
    }
  }
  static MOE_DEVICE void block(uint8_t* plain, const uint8_t* blocked, int64_t stride, int rows, int columns,
                               bool is_tail) {
    Vec16 line = {};
    if (!is_tail) line = is_aligned(blocked, kChunk) ? load_stream(reinterpret_cast<const Vec16*>(blocked))
                                                     : load_16(blocked);
#pragma unroll
    for (int j = 0; j < kLineRows; ++j)
      if (kLines * j < rows) store_word(plain + kLines * j * stride, line.w[j], columns);
  }
};

template <class Matrices>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, kResidentBlocks)
    swizzle_scales_kernel(MOE_GRID_CONSTANT const SwizzlePlan plan) {
  MOE_DYNAMIC_SMEM(smem);
  const Matrices matrices(plan, reinterpret_cast<int*>(smem));
  const int line = threadIdx.x / kTileChunks;
  const int64_t stride = plan.p.row_stride, bytes = plan.extent.rows * plan.extent.columns;
  const bool blocked_aligned = is_aligned(plan.unswizzles ? plan.p.from : plan.p.to, kChunk);
  const bool rows_aligned = is_aligned(plan.unswizzles ? plan.p.to : plan.p.from, kChunk) && stride % kChunk == 0;
#pragma unroll 1
  for (uint32_t tile = blockIdx.x; tile < plan.tiles; tile += gridDim.x) {
    const uint32_t chunk = tile * kTileChunks + threadIdx.x % kTileChunks, row_block = chunk / plan.row_chunks;
    if (row_block >= plan.row_blocks) continue;
    int64_t column = int64_t(chunk % plan.row_chunks) * kChunk;
    BlockRun run = matrices.run_at(plan, row_block, int(column));
    const auto blocked = [&] { return run.blocked + line * kChunk; };
    const auto plain = [&] { return run.plain + line * stride; };
    if (blocked_aligned && run.blocks >= kChunkBlocks && run.columns >= kChunk &&
        run.blocked + kChunkBlocks * kScaleBytes <= bytes) {
      uint8_t* to = plan.p.to + (plan.unswizzles ? plain() : blocked());
      const uint8_t* from = plan.p.from + (plan.unswizzles ? blocked() : plain());
      const bool plain_aligned = rows_aligned && run.plain % kChunk == 0;
      matrices.before_access();
      if (plan.unswizzles) Unswizzle::chunk(to, from, stride, run.rows - line, run.is_tail, plain_aligned);
      else Swizzle::chunk(to, from, stride, run.rows - line, run.is_tail, plain_aligned);
      continue;
    }
    matrices.before_access();
#pragma unroll 1
    for (int i = 0; i < kChunkBlocks && column < plan.extent.columns; ++i, column += kScaleColumns) {
      if (run.blocks == 0) run = matrices.run_at(plan, row_block, int(column));  // a group of columns ended
      if (plan.unswizzles)
        Unswizzle::block(plan.p.to + plain(), plan.p.from + blocked(), stride, run.rows - line, run.columns,
                         run.is_tail);
      else
        Swizzle::block(plan.p.to + blocked(), plan.p.from + plain(), stride, run.rows - line, run.columns, run.is_tail,
                       bytes - blocked());
      run.next();
    }
  }
}

template <class Matrices>
int launch_with(const SwizzleScalesParams& p, bool unswizzles, void* stream) {
  SwizzlePlan plan = {p, blocked_extent(p.groups, p.E, p.R, p.C), unswizzles};
  plan.matrix_row_blocks = uint32_t(padded_scale_rows(p.R) / kScaleRows);
  plan.row_blocks = uint32_t(ceil_div<int64_t>(plan.extent.rows, kScaleRows));
  plan.row_chunks = uint32_t(ceil_div<int64_t>(plan.extent.columns, kChunk));
  plan.tiles = uint32_t(ceil_div<int64_t>(int64_t(plan.row_blocks) * plan.row_chunks, kTileChunks));
  if (plan.tiles == 0 && p.starts == nullptr) return 0;
  const int64_t max_blocks = Matrices::max_blocks();
  const unsigned blocks = unsigned(plan.tiles < max_blocks ? plan.tiles : max_blocks);
  Launch l = {dim3(blocks ? blocks : 1), dim3(kThreads), stream};
  if (p.groups != Groups::kNone) l.shared = 4 * GroupTable::words(int(p.E));
  return launch(swizzle_scales_kernel<Matrices>, l, plan);
}
int launch_for(const SwizzleScalesParams& p, bool unswizzles, void* stream) {
  switch (p.groups) {
    case Groups::kNone: return launch_with<EqualMatrices>(p, unswizzles, stream);
    case Groups::kRows: return launch_with<RowGroups>(p, unswizzles, stream);
    default: return launch_with<ColumnGroups>(p, unswizzles, stream);
  }
}

}  // namespace

int swizzle_scales(const SwizzleScalesParams& p, void* stream) { return launch_for(p, false, stream); }
int unswizzle_scales(const SwizzleScalesParams& p, void* stream) { return launch_for(p, true, stream); }

}  // namespace moe_fp8
