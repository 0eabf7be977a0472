#include "tokens/permute_quantized.h"

#include "primitives/groups.h"
#include "tokens/pieces.h"

namespace moe_fp8 {
namespace {

// Of scales neighbouring threads have neighbouring rows, whose words lie together in column-major ones and a line of a
// block apart in blocked ones. A thread holds some words of a row, which in messages from other ranks lie together: one
// load. Blocks stay, for each makes a table of the groups.
constexpr int kThreads = 256, kHeld = 4, kWordsEach = 2 * kHeld, kBlocksEach = 8;
constexpr int kBlocks = 8;  // of a multiprocessor: what counts for copies is bytes in flight
constexpr int64_t kMostAlongWords = 1 << 10, kMostCopies = 1 << 23;  // HIP has fewer than 2^32 threads a launch

struct PermuteQuantizedPlan {
  PiecesPlan rows;
  PermuteScalesParams scales;
  uint32_t along_lines, along_words;  // blocks that have scales
  uint32_t along_rows;                // those that have a piece of rows

  MOE_HD uint32_t of_scales() const { return along_lines * along_words; }
};

MOE_DEVICE uint32_t load_word(const PermuteScalesParams& p, int64_t at) {
  const auto* word = static_cast<const uint32_t*>(p.from) + at;
  if (reinterpret_cast<uintptr_t>(word) % sizeof *word == 0) return load_stream<Reuse::kSoon>(word);
  const auto* bytes = reinterpret_cast<const uint8_t*>(word);
  return bytes[0] | bytes[1] << 8 | bytes[2] << 16 | uint32_t(bytes[3]) << 24;
}

// Words of a row of `from` from the first one on; zeros behind the last, and where there is no row.
MOE_DEVICE void load_words(const PermuteScalesParams& p, int64_t row, uint32_t first, uint32_t (&held)[kHeld]) {
  if (row >= 0 && !p.blocked && p.column_stride == 1 && first + kHeld <= p.words) {
    const auto* words = static_cast<const uint32_t*>(p.from) + p.word_of_from(row, first);
    if (reinterpret_cast<uintptr_t>(words) % sizeof(Vec16) == 0) {
      const Vec16 loaded = load_stream<Reuse::kSoon>(reinterpret_cast<const Vec16*>(words));
#pragma unroll
      for (int i = 0; i < kHeld; ++i) held[i] = loaded.w[i];
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < kHeld; ++i)
    held[i] = row >= 0 && first + i < p.words ? load_word(p, p.word_of_from(row, first + i)) : 0u;
}

// The row of P that a line of `to` has; P: none.
MOE_DEVICE int row_of_line(const PermuteScalesParams& p, const GroupTable& table, int line) {
  if (!p.offs) return line < p.P ? line : int(p.P);
  const int e = GroupTable::find(table.pos, int(p.E), line), at = line - table.pos[e];
  return e < p.E && at < table.rows(e) ? table.row[e] + at : int(p.P);
}

MOE_DEVICE void permute_scales(const PermuteQuantizedPlan& plan, int* table_words) {
  const PermuteScalesParams& p = plan.scales;
  const uint32_t of_lines = blockIdx.x % plan.along_lines, of_words = blockIdx.x / plan.along_lines;
  const GroupTable table(table_words, int(p.E));
  const uint32_t threads = blockDim.x * blockDim.y, t = threadIdx.y * blockDim.x + threadIdx.x;
  const int64_t lines = p.lines();
  if (p.offs) build_group_table(table, p.offs, int(p.E), int(p.P), int(lines), kScaleRows);
#pragma unroll 1
  for (uint32_t line = of_lines * threads + t; line < lines; line += plan.along_lines * threads) {
    const int row = row_of_line(p, table, int(line));
    const int64_t source = row < p.P ? p.source.row(row) : -1;
#pragma unroll 1
    for (uint32_t first = of_words * kHeld; first < p.words; first += plan.along_words * kHeld) {
      uint32_t held[kHeld];
      load_words(p, source, first, held);
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        if (first + i >= p.words) break;
        const int64_t to = p.word_of_to(line, first + i);
        if (to < p.extent()) store_stream(static_cast<uint32_t*>(p.to) + to, held[i]);
      }
    }
  }
}

// The first blocks have scales, for they take longest; the others have rows, piece by piece.
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, kBlocks)
    permute_quantized_kernel(MOE_GRID_CONSTANT const PermuteQuantizedPlan p) {
  __shared__ int table_words[GroupTable::words(kMaxExperts)];
  wait_for_previous_kernel();
  if (blockIdx.x < p.of_scales()) return permute_scales(p, table_words);
  const uint32_t block = blockIdx.x - p.of_scales();
  copy_piece(p.rows, int(block / p.along_rows), block % p.along_rows, p.along_rows);
}

}  // namespace

// Rows that are not of whole vectors, and those without scales, are another kernel's.
int permute_quantized(const CopyRowsParams& rows, const PermuteScalesParams& scales, void* stream) {
  const bool together = scales.extent() > 0 && rows.rows > 0 && bits_of(rows) % sizeof(Vec16) == 0;
  if (!together)
    if (const int e = copy_rows(rows, stream)) return e;
  if (scales.extent() == 0) return 0;
  PermuteQuantizedPlan p = {{rows, piece_of(rows.source, rows.row_bytes)}, scales};
  const int64_t lines = ceil_div<int64_t>(scales.lines(), kThreads), most = kBlocksEach * device().multiprocessors;
  const int64_t words = ceil_div<int64_t>(scales.words, kWordsEach);
  p.along_lines = uint32_t(lines < most ? lines : most);
  p.along_words = uint32_t(words < kMostAlongWords ? words : kMostAlongWords);
  Launch l = {dim3(p.of_scales()), dim3(kThreads), stream};
  if (together) {
    const int64_t pieces = ceil_div(rows.row_bytes, p.rows.piece);
    l = launch_of(rows.rows, rows.row_bytes, p.rows.piece, 1, sizeof(Vec16), stream, kThreads);
    p.along_rows = uint32_t(l.grid.x < kMostCopies / pieces ? l.grid.x : kMostCopies / pieces);
    l.grid.x = p.of_scales() + p.along_rows * unsigned(pieces);
  }
  return launch(permute_quantized_kernel, l, p);
}

}  // namespace moe_fp8
