#include "tokens/permute_scales.h"

#include "platform/launch.h"
#include "platform/memory.h"
#include "primitives/group_table.h"

namespace moe_fp8 {
namespace {

// Neighbouring threads have neighbouring rows, whose words lie together in column-major scales and a line of a block
// apart in blocked ones. A thread holds some words of a row, which in messages from other ranks lie together: one load.
// Blocks stay, for each makes a table of the groups.
constexpr int kThreads = 256, kHeld = 4, kWordsEach = 2 * kHeld, kBlocksEach = 8;

MOE_DEVICE uint32_t load_word(const PermuteScalesParams& p, int64_t at) {
  const auto* word = static_cast<const uint32_t*>(p.from) + at;
  if (reinterpret_cast<uintptr_t>(word) % sizeof *word == 0) return load_stream<Reuse::kSoon>(word);
  const auto* bytes = reinterpret_cast<const uint8_t*>(word);
  return bytes[0] | bytes[1] << 8 | bytes[2] << 16 | uint32_t(bytes[3]) << 24;
}

// Words of a row of `from` from the first one on; zeros behind the last, and where there is no row.
MOE_DEVICE void load_words(const PermuteScalesParams& p, int64_t row, int64_t first, uint32_t (&held)[kHeld]) {
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
MOE_DEVICE int64_t row_of_line(const PermuteScalesParams& p, const GroupTable& table, int64_t line) {
  if (!p.offs) return line < p.P ? line : p.P;
  const int e = GroupTable::find(table.pos, int(p.E), int(line)), at = int(line) - table.pos[e];
  return e < p.E && at < table.rows(e) ? table.row[e] + at : p.P;
}

MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, 1) permute_scales_kernel(MOE_GRID_CONSTANT const PermuteScalesParams p) {
  __shared__ int table_words[GroupTable::words(kMaxExperts)];
  wait_for_previous_kernel();
  const GroupTable table(table_words, int(p.E));
  const int64_t lines = p.lines(), extent = p.extent();
  if (p.offs) build_group_table(table, p.offs, int(p.E), int(p.P), int(lines), kScaleRows);
#pragma unroll 1
  for (int64_t line = int64_t(blockIdx.x) * kThreads + threadIdx.x; line < lines; line += gridDim.x * kThreads) {
    const int64_t row = row_of_line(p, table, line), source = row < p.P ? p.source.row(row) : -1;
#pragma unroll 1
    for (int64_t first = blockIdx.y * kHeld; first < p.words; first += gridDim.y * kHeld) {
      uint32_t held[kHeld];
      load_words(p, source, first, held);
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const int64_t to = p.word_of_to(line, first + i);
        if (first + i < p.words && to < extent) store_stream(static_cast<uint32_t*>(p.to) + to, held[i]);
      }
    }
  }
}

}  // namespace

int permute_scales(const PermuteScalesParams& p, void* stream) {
  if (p.extent() == 0) return 0;
  const int64_t wanted = ceil_div<int64_t>(p.lines(), kThreads), most = kBlocksEach * device().multiprocessors;
  const int64_t along_words = ceil_div<int64_t>(p.words, kWordsEach), most_along_words = 65535;
  const dim3 grid(unsigned(wanted < most ? wanted : most),
                  unsigned(along_words < most_along_words ? along_words : most_along_words));
  return launch(permute_scales_kernel, {grid, dim3(kThreads), stream}, p);
}

}  // namespace moe_fp8
