#include "gemm/scaled_grouped_mm.h"

#include "platform/launch.h"
#include "platform/memory.h"
#include "primitives/groups.h"

namespace moe_fp8 {
namespace {

constexpr int kThreads = 256;

struct PrepareOffs {
  const int* offs;
  int* safe_offs;
  int E, limit, multiple;
};
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, 1) prepare_offs_kernel(MOE_GRID_CONSTANT const PrepareOffs p) {
  __shared__ int end[kMaxExperts];
  const int t = threadIdx.x;
  wait_for_previous_kernel();
  clamp_and_scan_offs(end, p.offs, p.E, p.limit, 1);  // the last end is stored as it is, so rounding comes later
  for (int e = t; e < p.E; e += kThreads) p.safe_offs[e] = end[e] / p.multiple * p.multiple;
  if (t == 0) p.safe_offs[p.E] = end[p.E - 1];
}

// Zeros the rows from *first on. If `first` is null, a row is a whole group, and row blockIdx.y is zeroed if its group
// is empty.
struct ZeroRows {
  uint32_t* out;
  const int *first, *ends;  // one of them is null
  int64_t rows, row_words;
};
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, 1) zero_rows_kernel(MOE_GRID_CONSTANT const ZeroRows p) {
  wait_for_previous_kernel();
  const int e = blockIdx.y;
  if (p.ends && p.ends[e] != (e ? p.ends[e - 1] : 0)) return;
  const int64_t first = p.ends ? e : *p.first, end = (p.ends ? e + 1 : p.rows) * p.row_words;
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = first * p.row_words + int64_t(blockIdx.x) * kThreads + threadIdx.x; i < end; i += step) p.out[i] = 0;
}

struct AddGroups {
  Vec16* out;
  const Vec16* product;
  const int* ends;
  int64_t group_eights;  // vectors of 8 elements in a group
  bool out_float32, product_float32;
};
// Loads eight neighbouring elements as float32: two vectors of float32, or one of bfloat16.
MOE_DEVICE void load_eight(const Vec16* from, int64_t i, bool is_float32, float (&v)[8]) {
  const Vec16 first = from[is_float32 ? 2 * i : i], second = is_float32 ? from[2 * i + 1] : Vec16{};
  for (int j = 0; j < 8; ++j)
    v[j] = !is_float32 ? element<BF16>(first.w[j / 2], j % 2) : as_float(j < 4 ? first.w[j] : second.w[j - 4]);
}
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, 1) add_groups_kernel(MOE_GRID_CONSTANT const AddGroups p) {
  wait_for_previous_kernel();
  const int e = blockIdx.y;
  if (p.ends[e] == (e ? p.ends[e - 1] : 0)) return;
  const int64_t end = (e + 1) * p.group_eights, step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = e * p.group_eights + int64_t(blockIdx.x) * kThreads + threadIdx.x; i < end; i += step) {
    float sum[8], added[8];
    load_eight(p.product, i, p.product_float32, added);
    load_eight(p.out, i, p.out_float32, sum);
    for (int j = 0; j < 8; ++j) sum[j] += added[j];
    if (p.out_float32) {
      for (int half = 0; half < 2; ++half) {
        Vec16 four;
        for (int j = 0; j < 4; ++j) four.w[j] = as_bits(sum[4 * half + j]);
        p.out[2 * i + half] = four;
      }
    } else {
      Vec16 eight;
      for (int j = 0; j < 4; ++j)
        eight.w[j] = BF16::from_float(sum[2 * j]) | uint32_t(BF16::from_float(sum[2 * j + 1])) << 16;
      p.out[i] = eight;
    }
  }
}

}  // namespace

int prepare_offs(const int* offs, int* safe_offs, int E, int limit, int multiple, void* stream) {
  return launch(prepare_offs_kernel, {dim3(1), dim3(kThreads), stream},
                PrepareOffs{offs, safe_offs, E, limit, multiple});
}

int zero_rows(void* out, const int* first, int64_t rows, int64_t row_bytes, void* stream) {
  return launch(zero_rows_kernel, {dim3(2 * device().multiprocessors), dim3(kThreads), stream},
                ZeroRows{static_cast<uint32_t*>(out), first, nullptr, rows, row_bytes / 4});
}

int zero_empty_groups(void* out, const int* ends, int E, int64_t group_bytes, void* stream) {
  return launch(zero_rows_kernel, {dim3(16, unsigned(E)), dim3(kThreads), stream},
                ZeroRows{static_cast<uint32_t*>(out), nullptr, ends, E, group_bytes / 4});
}

int add_groups(void* out, bool out_float32, const void* product, bool product_float32, const int* ends, int E,
               int64_t group_size, void* stream) {
  const dim3 grid(unsigned(ceil_div(8 * device().multiprocessors, E)), unsigned(E));
  return launch(add_groups_kernel, {grid, dim3(kThreads), stream},
                AddGroups{static_cast<Vec16*>(out), static_cast<const Vec16*>(product), ends, group_size / 8,
                          out_float32, product_float32});
}

}  // namespace moe_fp8
