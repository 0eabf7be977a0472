#include "tokens/permute_quantized.h"

#include "primitives/groups.h"
#include "tokens/row_segments.h"

namespace moe_fp8 {
namespace {

// Neighbouring threads have the scales of neighbouring rows: such words are neighbours in a column-major matrix, and 16
// bytes apart in a blocked one. A thread has kScaleWords words of a row, which are one load in messages from other
// ranks, where the scales of a row lie together.
constexpr int64_t kMaxWordBlocks = 1 << 10;

struct PermuteQuantizedPlan {
  CopySegmentsPlan rows;
  PermuteScalesParams scales;
  uint32_t line_blocks, word_blocks;  // blocks of scales: along lines, and along the words of a row
  uint32_t row_blocks;                // blocks of a segment of rows

  MOE_HD uint32_t scale_blocks() const { return line_blocks * word_blocks; }
};

MOE_DEVICE uint32_t load_word(const PermuteScalesParams& p, int64_t at) {
  const auto* word = static_cast<const uint32_t*>(p.from) + at;
  if (reinterpret_cast<uintptr_t>(word) % sizeof *word == 0) return load_stream<Reuse::kSoon>(word);
  const auto* bytes = reinterpret_cast<const uint8_t*>(word);
  return bytes[0] | bytes[1] << 8 | bytes[2] << 16 | uint32_t(bytes[3]) << 24;
}

// Loads kScaleWords words of a row of `from`. Words behind the last one, or of row -1, are zeros.
MOE_DEVICE void load_words(const PermuteScalesParams& p, int64_t row, uint32_t first, uint32_t (&loaded)[kScaleWords]) {
  if (row >= 0 && !p.blocked && p.column_stride == 1 && first + kScaleWords <= p.words) {
    const auto* words = static_cast<const uint32_t*>(p.from) + p.word_of_from(row, first);
    if (reinterpret_cast<uintptr_t>(words) % sizeof(Vec16) == 0) {
      const Vec16 vec = load_stream<Reuse::kSoon>(reinterpret_cast<const Vec16*>(words));
#pragma unroll
      for (int i = 0; i < kScaleWords; ++i) loaded[i] = vec.w[i];
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < kScaleWords; ++i)
    loaded[i] = row >= 0 && first + i < p.words ? load_word(p, p.word_of_from(row, first + i)) : 0u;
}

// The row that a line of `to` holds, or P if it is padding.
MOE_DEVICE int row_of_line(const PermuteScalesParams& p, const GroupTable& table, int line) {
  if (!p.offs) return line < p.P ? line : int(p.P);
  const int e = GroupTable::find(table.pos, int(p.E), line), at = line - table.pos[e];
  return e < p.E && at < table.rows(e) ? table.row[e] + at : int(p.P);
}

MOE_DEVICE void permute_scales(const PermuteQuantizedPlan& plan, int* table_words) {
  const PermuteScalesParams& p = plan.scales;
  const uint32_t line_block = blockIdx.x % plan.line_blocks, word_block = blockIdx.x / plan.line_blocks;
  const GroupTable table(table_words, int(p.E));
  const uint32_t threads = blockDim.x * blockDim.y, t = threadIdx.y * blockDim.x + threadIdx.x;
  const int64_t lines = p.lines();
  if (p.offs) build_group_table(table, p.offs, int(p.E), int(p.P), int(lines), kScaleRows);
#pragma unroll 1
  for (uint32_t line = line_block * threads + t; line < lines; line += plan.line_blocks * threads) {
    const int row = row_of_line(p, table, int(line));
    const int64_t source = row < p.P ? p.source.row(row) : -1;
#pragma unroll 1
    for (uint32_t first = word_block * kScaleWords; first < p.words; first += plan.word_blocks * kScaleWords) {
      uint32_t words[kScaleWords];
      load_words(p, source, first, words);
#pragma unroll
      for (int i = 0; i < kScaleWords; ++i) {
        if (first + i >= p.words) break;
        const int64_t to = p.word_of_to(line, first + i);
        if (to < p.extent()) store_stream(static_cast<uint32_t*>(p.to) + to, words[i]);
      }
    }
  }
}

// The first blocks have scales, because these take longest. The others have rows, segment by segment.
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kPermuteThreads, kPermuteBlocks)
    permute_quantized_kernel(MOE_GRID_CONSTANT const PermuteQuantizedPlan p) {
  __shared__ int table_words[GroupTable::words(kMaxExperts)];
  wait_for_previous_kernel();
  if (blockIdx.x < p.scale_blocks()) return permute_scales(p, table_words);
  const uint32_t block = blockIdx.x - p.scale_blocks();
  copy_segment(p.rows, int(block / p.row_blocks), block % p.row_blocks, p.row_blocks);
}

}  // namespace

int permute_quantized(const CopyRowsParams& rows, const PermuteScalesParams& scales, void* stream) {
  // Rows that are not whole vectors, and rows without scales, are left to copy_rows().
  const bool fused = scales.extent() > 0 && rows.rows > 0 && alignment_bits(rows) % sizeof(Vec16) == 0;
  if (!fused)
    if (const int e = copy_rows(rows, stream)) return e;
  if (scales.extent() == 0) return 0;
  PermuteQuantizedPlan p = {{rows, segment_bytes(rows.source, rows.row_bytes)}, scales};
  const int64_t lines = ceil_div<int64_t>(scales.lines(), kPermuteThreads);
  const int64_t max_line_blocks = kScaleBlocks * device().multiprocessors;
  const int64_t words = ceil_div<int64_t>(scales.words, kScaleWordsPerThread);
  p.line_blocks = uint32_t(lines < max_line_blocks ? lines : max_line_blocks);
  p.word_blocks = uint32_t(words < kMaxWordBlocks ? words : kMaxWordBlocks);
  Launch l = {dim3(p.scale_blocks()), dim3(kPermuteThreads), stream};
  if (fused) {
    const int64_t segments = ceil_div(rows.row_bytes, p.rows.segment);
    l = segment_launch(rows.rows, rows.row_bytes, p.rows.segment, 1, sizeof(Vec16), stream, kPermuteThreads);
    const int64_t max_row_blocks = max_grid_blocks(kPermuteThreads) / segments;
    p.row_blocks = uint32_t(l.grid.x < max_row_blocks ? l.grid.x : max_row_blocks);
    l.grid.x = p.scale_blocks() + p.row_blocks * unsigned(segments);
  }
  return launch(permute_quantized_kernel, l, p);
}

}  // namespace moe_fp8
