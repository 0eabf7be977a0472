#include "gemm/scaled_grouped_mm.h"

#include "platform/launch.h"
#include "platform/memory.h"
#include "primitives/group_table.h"

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
  for (int e = t; e < p.E; e += kThreads) end[e] = clamp_offset(p.offs[e], p.limit);
  __syncthreads();
  block_scan(end, p.E, Max{});
  for (int e = t; e < p.E; e += kThreads) p.safe_offs[e] = end[e] / p.multiple * p.multiple;
  if (t == 0) p.safe_offs[p.E] = end[p.E - 1];
}

struct ZeroRows {
  uint32_t* out;
  const int* first;
  int64_t rows, row_words;
};
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, 1) zero_rows_kernel(MOE_GRID_CONSTANT const ZeroRows p) {
  wait_for_previous_kernel();
  const int64_t end = p.rows * p.row_words, step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = *p.first * p.row_words + int64_t(blockIdx.x) * kThreads + threadIdx.x; i < end; i += step)
    p.out[i] = 0;
}

struct ZeroEmptyGroups {
  uint32_t* out;
  const int* ends;
  int64_t group_words;
};
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, 1) zero_empty_groups_kernel(MOE_GRID_CONSTANT const ZeroEmptyGroups p) {
  wait_for_previous_kernel();
  const int e = blockIdx.y;
  if (p.ends[e] != (e ? p.ends[e - 1] : 0)) return;
  uint32_t* out = p.out + e * p.group_words;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < p.group_words; i += int64_t(gridDim.x) * kThreads)
    out[i] = 0;
}

struct AddGroups {
  Vec16* out;
  const Vec16* product;
  const int* ends;
  int64_t group_vectors;  // of product
  bool out_float32;
};
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, 1) add_groups_kernel(MOE_GRID_CONSTANT const AddGroups p) {
  wait_for_previous_kernel();
  const int e = blockIdx.y;
  if (p.ends[e] == (e ? p.ends[e - 1] : 0)) return;
  const int64_t end = (e + 1) * p.group_vectors, step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = e * p.group_vectors + int64_t(blockIdx.x) * kThreads + threadIdx.x; i < end; i += step) {
    const Vec16 added = load_stream(p.product + i);
    if (p.out_float32) {
      for (int half = 0; half < 2; ++half) {
        Vec16 sum = p.out[2 * i + half];
        for (int j = 0; j < 4; ++j)
          sum.w[j] = as_bits(as_float(sum.w[j]) + element<BF16>(added.w[2 * half + j / 2], j % 2));
        p.out[2 * i + half] = sum;
      }
    } else {
      Vec16 sum = p.out[i];
      auto add = [&](int j, int k) { return element<BF16>(sum.w[j], k) + element<BF16>(added.w[j], k); };
      for (int j = 0; j < 4; ++j) sum.w[j] = BF16::from_float(add(j, 0)) | uint32_t(BF16::from_float(add(j, 1))) << 16;
      p.out[i] = sum;
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
                ZeroRows{static_cast<uint32_t*>(out), first, rows, row_bytes / 4});
}

int zero_empty_groups(void* out, const int* ends, int E, int64_t group_bytes, void* stream) {
  return launch(zero_empty_groups_kernel, {dim3(16, unsigned(E)), dim3(kThreads), stream},
                ZeroEmptyGroups{static_cast<uint32_t*>(out), ends, group_bytes / 4});
}

int add_groups(void* out, bool out_float32, const void* product, const int* ends, int E, int64_t group_size,
               void* stream) {
  const dim3 grid(unsigned(ceil_div(8 * device().multiprocessors, E)), unsigned(E));
  return launch(add_groups_kernel, {grid, dim3(kThreads), stream},
                AddGroups{static_cast<Vec16*>(out), static_cast<const Vec16*>(product), ends, group_size / 8,
                          out_float32});
}

}  // namespace moe_fp8
