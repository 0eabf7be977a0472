#include "scales/swizzle_scales.h"

#include "platform/launch.h"
#include "platform/memory.h"
#include "primitives/groups.h"

namespace moe_fp8 {
namespace {

// A chunk is four neighbouring blocks of scales, 128 rows by 16 columns, of which a thread has a line: 16 columns of
// the rows r, r + 32, r + 64 and r + 96. A block of threads takes four chunks at a time, which follow one another along
// the rows: four threads side by side share rows (64 bytes of each), eight follow one another down a block (128 bytes).
constexpr int kChunkBlocks = 4, kChunk = kChunkBlocks * kScaleColumns, kLines = 32, kLineRows = kScaleRows / kLines;
constexpr int kTileChunks = 4, kThreads = kTileChunks * kLines;
constexpr int kMostBlocksEach = 6;       // of a multiprocessor, that registers are for
static_assert(sizeof(Vec16) == kChunk && kLineRows == 4 && kChunkBlocks == 4, "words are transposed 4 by 4");

// 32-bit counts: 2^32 chunks are eight terabytes of scales.
struct Task {
  SwizzleScalesParams p;
  BlockedExtent extent;
  bool back;  // from blocked scales to plain ones
  uint32_t row_blocks_each, row_blocks, row_chunks, tiles;  // row_chunks: of a row of blocks
};

// Blocks of scales that follow one another in the blocked layout: the rest of one matrix, from a block on to the right.
struct Piece {
  int64_t blocked, plain;  // offsets of the first one's first scale
  int rows, columns;       // that the matrix has from there on, at most 0: padding only
  int blocks;
  bool unowned;            // behind all groups: zeros on both sides

  MOE_DEVICE void next() {
    blocked += kScaleBytes;
    plain += kScaleColumns;
    columns -= kScaleColumns;
    --blocks;
  }
};

// Before memory is touched. The next kernel may start then: it waits likewise.
MOE_DEVICE void begin() {
  wait_for_previous_kernel();
  allow_next_kernel();
}

// What stands in which block of scales: E matrices, whose addresses are known while the kernel ahead still runs, or
// groups, which begin by reading offs.
struct EqualMatrices {
  static int64_t most_blocks() { return 1 << 21; }  // HIP has fewer than 2^32 threads a launch
  MOE_DEVICE EqualMatrices(const Task&, int*) {}
  MOE_DEVICE void before_access() const { begin(); }
  MOE_DEVICE Piece piece(const Task& t, uint32_t row_block, int column) const {
    const uint32_t e = row_block / t.row_blocks_each;
    const int64_t row = int64_t(row_block % t.row_blocks_each) * kScaleRows;
    return {blocked_offset(int64_t(row_block) * kScaleRows, column, t.extent.columns),
            e * t.p.group_stride + row * t.p.row_stride + column, int(t.p.R - row), int(t.p.C - column),
            int(t.extent.columns - column) / kScaleColumns, false};
  }
};

MOE_DEVICE GroupTable table_of(const Task& t, int* shared, int64_t size, int64_t positions, int align) {
  begin();
  const GroupTable table(shared, int(t.p.E));
  build_group_table(table, t.p.offs, int(t.p.E), int(size), int(positions), align);
  if (blockIdx.x == 0 && t.p.starts)
    for (int e = threadIdx.x; e < t.p.E; e += kThreads) t.p.starts[e] = table.pos[e];
  return table;
}
// Blocks stay and build a table of groups each. On an H200 with 4, 6 and 8 a multiprocessor, over several runs:
// m_groups of [131072, 224] E = 8 19.1 to 20.5, 18.7 to 23.1 and 23.2 us; k_groups of [7168, 4096] E = 8 20.1, 19.0 to
// 21.0 and 22.9.
//
// The padded layout has room for all rows, so that those of no group stand in it too, behind the others.
struct RowGroups {
  static int64_t most_blocks() { return 4 * device().multiprocessors; }
  GroupTable table;
  MOE_DEVICE RowGroups(const Task& t, int* shared)
      : table(table_of(t, shared, t.p.R, t.extent.rows, kScaleRows)) {}
  MOE_DEVICE void before_access() const {}
  MOE_DEVICE Piece piece(const Task& t, uint32_t row_block, int column) const {
    const int first = int(row_block) * kScaleRows, e = table.find(table.pos, int(t.p.E), first);
    const int row = first - table.pos[e];
    return {blocked_offset(first, column, t.extent.columns), (table.row[e] + row) * t.p.row_stride + column,
            table.rows(e) - row, int(t.p.C - column), int(t.extent.columns - column) / kScaleColumns, e == t.p.E};
  }
};
struct ColumnGroups {
  static int64_t most_blocks() { return kMostBlocksEach * device().multiprocessors; }
  GroupTable table;
  MOE_DEVICE ColumnGroups(const Task& t, int* shared)
      : table(table_of(t, shared, t.p.C, t.extent.columns, kScaleColumns)) {}
  MOE_DEVICE void before_access() const {}
  MOE_DEVICE Piece piece(const Task& t, uint32_t row_block, int column) const {
    const int e = table.find(table.pos, int(t.p.E), column), at = column - table.pos[e];
    const int width = round_up(table.pos[e + 1] - table.pos[e], kScaleColumns);
    const int64_t row = int64_t(row_block) * kScaleRows;
    return {table.pos[e] * t.extent.rows + blocked_offset(row, at, width), row * t.p.row_stride + table.row[e] + at,
            int(t.p.R - row), table.rows(e) - at, (width - at) / kScaleColumns, e == t.p.E};
  }
};

MOE_DEVICE bool is_aligned(const void* p, int bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

// Up to four bytes from any address, then zeros.
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

// 16 bytes at any address: three words of memory are theirs alone, and four bytes of the words before and behind those,
// which one register holds, each byte in its place.
struct Span16 {
  int before;  // bytes of the first word that are not theirs

  MOE_DEVICE explicit Span16(const void* p) : before(int(reinterpret_cast<uintptr_t>(p) % 4)) {}
  MOE_DEVICE int word(int i) const { return 4 * (i + 1) - before; }
  MOE_DEVICE int edge(int b) const { return b - before + (b < before ? 16 : 0); }
};
MOE_DEVICE uint32_t from_byte(uint32_t low, uint32_t high, int byte) {
  return uint32_t((uint64_t(high) << 32 | low) >> (8 * byte));
}
MOE_DEVICE Vec16 load_16(const uint8_t* p) {
  const Span16 at(p);
  uint32_t edge = 0, w[3];
#pragma unroll
  for (int i = 0; i < 3; ++i) w[i] = load_stream(reinterpret_cast<const uint32_t*>(p + at.word(i)));
#pragma unroll
  for (int b = 0; b < 4; ++b) edge |= uint32_t(load_stream(p + at.edge(b))) << (8 * b);
  const int n = at.before;
  return {{from_byte(edge, w[0], n), from_byte(w[0], w[1], n), from_byte(w[1], w[2], n), from_byte(w[2], edge, n)}};
}
MOE_DEVICE void store_16(uint8_t* p, const Vec16& v) {
  const Span16 at(p);
  const int n = 4 - at.before;
  const uint32_t edge = from_byte(v.w[3], v.w[0], n);
#pragma unroll
  for (int i = 0; i < 3; ++i)
    store_stream(reinterpret_cast<uint32_t*>(p + at.word(i)), from_byte(v.w[i], v.w[i + 1], n));
#pragma unroll
  for (int b = 0; b < 4; ++b) store_stream(p + at.edge(b), uint8_t(edge >> (8 * b)));
}
MOE_DEVICE void store_line(uint8_t* p, const Vec16& line, int64_t room) {
  if (room >= int64_t(sizeof(Vec16))) return store_stream(reinterpret_cast<Vec16*>(p), line);
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (4 * i < room) store_stream(reinterpret_cast<uint32_t*>(p) + i, line.w[i]);
}
MOE_DEVICE Vec16 transposed(const Vec16 (&chunks)[4], int i) {
  return {{chunks[0].w[i], chunks[1].w[i], chunks[2].w[i], chunks[3].w[i]}};
}

// Both move a line, from its place in its block to its first row or back: chunk(), of four blocks that are whole to the
// right, aligned as blocked and, if `aligned`, as rows; block(), of one that ends where its matrix does. `rows` and
// `columns` are those from there on; of a piece that nobody owns nothing is read. `room`: bytes of the blocked side.
struct Swizzle {
  static MOE_DEVICE void chunk(uint8_t* blocked, const uint8_t* plain, int64_t stride, int rows, bool unowned,
                               bool aligned) {
    Vec16 of_row[kLineRows];
#pragma unroll
    for (int j = 0; j < kLineRows; ++j) {
      const uint8_t* row = plain + kLines * j * stride;
      const bool there = kLines * j < rows && !unowned;
      if (aligned) of_row[j] = there ? load_stream(reinterpret_cast<const Vec16*>(row)) : Vec16{};
      else of_row[j] = there ? load_16(row) : Vec16{};
    }
#pragma unroll
    for (int i = 0; i < kChunkBlocks; ++i)
      store_stream(reinterpret_cast<Vec16*>(blocked + i * kScaleBytes), transposed(of_row, i));
  }
  static MOE_DEVICE void block(uint8_t* blocked, const uint8_t* plain, int64_t stride, int rows, int columns,
                               bool unowned, int64_t room) {
    Vec16 line;
#pragma unroll
    for (int j = 0; j < kLineRows; ++j)
      line.w[j] = kLines * j < rows && !unowned ? load_word(plain + kLines * j * stride, columns) : 0;
    store_line(blocked, line, room);
  }
};
struct Unswizzle {
  static MOE_DEVICE void chunk(uint8_t* plain, const uint8_t* blocked, int64_t stride, int rows, bool unowned,
                               bool aligned) {
    Vec16 of_block[kChunkBlocks];
#pragma unroll
    for (int i = 0; i < kChunkBlocks; ++i) {
      const Vec16* line = reinterpret_cast<const Vec16*>(blocked + i * kScaleBytes);
      of_block[i] = unowned ? Vec16{} : load_stream(line);
    }
#pragma unroll
    for (int j = 0; j < kLineRows; ++j) {
      uint8_t* row = plain + kLines * j * stride;
      if (kLines * j >= rows) break;
      if (aligned) store_stream(reinterpret_cast<Vec16*>(row), transposed(of_block, j));
      else store_16(row, transposed(of_block, j));
    }
  }
  static MOE_DEVICE void block(uint8_t* plain, const uint8_t* blocked, int64_t stride, int rows, int columns,
                               bool unowned) {
    Vec16 line = {};
    if (!unowned) line = is_aligned(blocked, kChunk) ? load_stream(reinterpret_cast<const Vec16*>(blocked))
                                                     : load_16(blocked);
#pragma unroll
    for (int j = 0; j < kLineRows; ++j)
      if (kLines * j < rows) store_word(plain + kLines * j * stride, line.w[j], columns);
  }
};

template <class Geometry>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, kMostBlocksEach) swizzle_scales_kernel(MOE_GRID_CONSTANT const Task t) {
  MOE_DYNAMIC_SMEM(smem);
  const Geometry groups(t, reinterpret_cast<int*>(smem));
  const int line = threadIdx.x / kTileChunks;
  const int64_t stride = t.p.row_stride, bytes = t.extent.rows * t.extent.columns;
  const bool blocked_aligned = is_aligned(t.back ? t.p.from : t.p.to, kChunk);
  const bool rows_aligned = is_aligned(t.back ? t.p.to : t.p.from, kChunk) && stride % kChunk == 0;
#pragma unroll 1
  for (uint32_t tile = blockIdx.x; tile < t.tiles; tile += gridDim.x) {
    const uint32_t chunk = tile * kTileChunks + threadIdx.x % kTileChunks, row_block = chunk / t.row_chunks;
    if (row_block >= t.row_blocks) continue;
    int64_t column = int64_t(chunk % t.row_chunks) * kChunk;
    Piece q = groups.piece(t, row_block, int(column));
    const auto blocked = [&] { return q.blocked + line * kChunk; };
    const auto plain = [&] { return q.plain + line * stride; };
    if (blocked_aligned && q.blocks >= kChunkBlocks && q.columns >= kChunk &&
        q.blocked + kChunkBlocks * kScaleBytes <= bytes) {
      uint8_t* to = t.p.to + (t.back ? plain() : blocked());
      const uint8_t* from = t.p.from + (t.back ? blocked() : plain());
      const bool plain_aligned = rows_aligned && q.plain % kChunk == 0;
      groups.before_access();
      if (t.back) Unswizzle::chunk(to, from, stride, q.rows - line, q.unowned, plain_aligned);
      else Swizzle::chunk(to, from, stride, q.rows - line, q.unowned, plain_aligned);
      continue;
    }
    groups.before_access();
#pragma unroll 1
    for (int i = 0; i < kChunkBlocks && column < t.extent.columns; ++i, column += kScaleColumns) {
      if (q.blocks == 0) q = groups.piece(t, row_block, int(column));  // a group of columns ended
      if (t.back) Unswizzle::block(t.p.to + plain(), t.p.from + blocked(), stride, q.rows - line, q.columns, q.unowned);
      else Swizzle::block(t.p.to + blocked(), t.p.from + plain(), stride, q.rows - line, q.columns, q.unowned,
                          bytes - blocked());
      q.next();
    }
  }
}

template <class Geometry>
int launch_with(const SwizzleScalesParams& p, bool back, void* stream) {
  Task t = {p, blocked_extent(p.groups, p.E, p.R, p.C), back};
  t.row_blocks_each = uint32_t(padded_scale_rows(p.R) / kScaleRows);
  t.row_blocks = uint32_t(ceil_div<int64_t>(t.extent.rows, kScaleRows));
  t.row_chunks = uint32_t(ceil_div<int64_t>(t.extent.columns, kChunk));
  t.tiles = uint32_t(ceil_div<int64_t>(int64_t(t.row_blocks) * t.row_chunks, kTileChunks));
  if (t.tiles == 0 && p.starts == nullptr) return 0;
  const int64_t most = Geometry::most_blocks();
  const unsigned blocks = unsigned(t.tiles < most ? t.tiles : most);
  Launch l = {dim3(blocks ? blocks : 1), dim3(kThreads), stream};
  if (p.groups != Groups::kNone) l.shared = 4 * GroupTable::words(int(p.E));
  return launch(swizzle_scales_kernel<Geometry>, l, t);
}
int launch_for(const SwizzleScalesParams& p, bool back, void* stream) {
  switch (p.groups) {
    case Groups::kNone: return launch_with<EqualMatrices>(p, back, stream);
    case Groups::kRows: return launch_with<RowGroups>(p, back, stream);
    default: return launch_with<ColumnGroups>(p, back, stream);
  }
}

}  // namespace

int swizzle_scales(const SwizzleScalesParams& p, void* stream) { return launch_for(p, false, stream); }
int unswizzle_scales(const SwizzleScalesParams& p, void* stream) { return launch_for(p, true, stream); }

}  // namespace moe_fp8
