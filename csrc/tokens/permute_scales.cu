#include "tokens/permute_scales.h"

#include "platform/launch.h"
#include "platform/memory.h"
#include "primitives/group_table.h"

namespace moe_fp8 {
namespace {

// Neighbouring threads have neighbouring rows, whose words lie together in column-major scales and a line of a block
// apart in blocked ones. Blocks stay, for each makes a table of the groups.
constexpr int kThreads = 256, kWordsEach = 8, kBlocksEach = 8;

MOE_DEVICE uint32_t load_word(const PermuteScalesParams& p, int64_t at) {
  const auto* word = static_cast<const uint32_t*>(p.from) + at;
  if (reinterpret_cast<uintptr_t>(word) % sizeof *word == 0) return load_stream<Reuse::kSoon>(word);
  const auto* bytes = reinterpret_cast<const uint8_t*>(word);
  return bytes[0] | bytes[1] << 8 | bytes[2] << 16 | uint32_t(bytes[3]) << 24;
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
    for (int64_t word = blockIdx.y; word < p.words; word += gridDim.y) {
      const int64_t to = p.word_of_to(line, word);
      if (to < extent)
        store_stream(static_cast<uint32_t*>(p.to) + to, source < 0 ? 0u : load_word(p, p.word_of_from(source, word)));
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
