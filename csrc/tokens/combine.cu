#include "tokens/combine.h"

#include "numerics/dispatch.h"
#include "numerics/groups.h"
#include "platform/launch.h"
#include "platform/memory.h"
#include "platform/waves.h"
#include "primitives/access_width.h"
#include "tokens/invert.h"
#include "tokens/policy.h"

namespace moe_fp8 {
namespace {

// blockDim.x threads share a row, or one of the `splits` of a long row; a block has blockDim.y rows at once.

struct BlockShape {
  int64_t splits;  // of a row
  int threads, rows;
};
BlockShape shape_for(int64_t vecs) {
  const int64_t splits = vecs > kCombineThreads ? ceil_div<int64_t>(vecs, kCombineThreads) : 1;
  const int64_t even = round_up<int64_t>(ceil_div<int64_t>(vecs, splits), kMaxWarpSize);
  const int threads = even < kMaxWarpSize ? kMaxWarpSize : even < kCombineThreads ? int(even) : kCombineThreads;
  return {splits, threads, splits == 1 ? kCombineThreads / threads : 1};
}

// ---- access to rows, and to the scores that weight them -------------------------------------------------------------
template <class In>
struct SlotVectorAccess : VectorAccess<In> {
  using VectorAccess<In>::VectorAccess;
  static constexpr int kBackwardBlocks = std::is_same_v<In, F16> ? kCombineBackwardBlocksF16 : kCombineBackwardBlocks;
  MOE_DEVICE float score(const void* scores, bool f32, int64_t slot) const { return score_of<In>(scores, f32, slot); }
};
struct SlotElementAccess : ElementAccess {
  using ElementAccess::ElementAccess;
  static constexpr int kBackwardBlocks = kCombineBackwardBlocks;
  MOE_DEVICE float score(const void* scores, bool f32, int64_t slot) const {
    const InType score_type = f32 ? InType::kF32 : type;
    return scores ? to_float(score_type, load_bits(scores, score_type, slot)) : 1.f;
  }
};

// ---- forward -------------------------------------------------------------------------------------------------------
struct CombinePlan : CombineParams {
  unsigned splits;
};

// A slot of a token: its row of y, or -1, and its score. Each of kCombineSlots lanes has one slot.
struct Slot {
  int row;
  float score;
};
template <class Access>
MOE_DEVICE Slot load_slot(const CombinePlan& p, const Access& access, uint32_t token, uint32_t first) {
  const uint32_t j = first + threadIdx.x % kCombineSlots, at = token * uint32_t(p.top_k) + j;
  if (token >= uint32_t(p.T) || j >= uint32_t(p.top_k)) return {-1, 0.f};
  const int row = p.inverse[at];
  const float score = access.score(p.scores, p.scores_f32, at);
  return row >= 0 && row < p.P ? Slot{row, score} : Slot{-1, 0.f};
}

// Blocks stay resident and take token after token. A wave has a split of one token's rows, and loads the next token's
// slots while these rows are in flight (docs/kernels/tokens.md).
template <class Access>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kCombineThreads, kCombineBlocks)
    combine_kernel(MOE_GRID_CONSTANT const CombinePlan p) {
  constexpr int n = Access::kElements;
  const Access access(p.in);
  wait_for_previous_kernel();
  const auto T = uint32_t(p.T), top_k = uint32_t(p.top_k), tokens = gridDim.x / p.splits * blockDim.y;
  const int64_t column = (int64_t(blockIdx.x % p.splits) * blockDim.x + threadIdx.x) * n;
  const bool valid = column < p.K;
  uint32_t token = blockIdx.x / p.splits * blockDim.y + threadIdx.y;
  Slot slot = load_slot(p, access, token, 0);
#pragma unroll 1
  for (; token < T; token += tokens) {
    float sum[n] = {};
#pragma unroll 1
    for (uint32_t j = 0; j < top_k; j += kCombineSlots) {
      typename Access::Raw y[kCombineSlots];
#pragma unroll
      for (int s = 0; s < kCombineSlots; ++s) {
        const int row = int(shfl(uint32_t(slot.row), s));
        y[s] = row >= 0 && valid ? access.load_once(p.y, row * p.y_stride + column) : typename Access::Raw{};
      }
      const uint32_t scores = as_bits(slot.score);
      const bool last = j + kCombineSlots >= top_k;
      slot = load_slot(p, access, last ? token + tokens : token, last ? 0 : j + kCombineSlots);
#pragma unroll
      for (int s = 0; s < kCombineSlots; ++s) {
        const float score = as_float(shfl(scores, s));
#pragma unroll
        for (int i = 0; i < n; ++i) sum[i] += score * access.element(y[s], i);
      }
    }
    if (valid) access.store(p.out, token * p.K + column, sum);
  }
}

// ---- backward: by tokens, so that a row of grad is read once -------------------------------------------------------
struct CombineBackwardPlan : CombineBackwardParams {
  bool vectors;  // rows are whole vectors
  int64_t first;
};

// kDots: the gradient of the scores is wanted. Without it the kernel takes fewer registers (docs/kernels/tokens.md).
template <class Access, bool kDots>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kCombineThreads, Access::kBackwardBlocks)
    combine_backward_kernel(MOE_GRID_CONSTANT const CombineBackwardPlan p) {
  constexpr int n = Access::kElements, kSlots = kCombineBackwardSlots;
  __shared__ float wave_dots[kCombineThreads / 32][kSlots];
  const Access access(p.in);
  const bool has_grad_y = !kDots || p.grad_y;
  const int waves = blockDim.x / kWarpSize, first_wave = threadIdx.y * waves;
  wait_for_previous_kernel();
  const int64_t token = p.first + int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  const int64_t vecs = token < p.T ? p.K / n : 0, top_k = token < p.T ? p.top_k : 0, slot = token * p.top_k;
  for (int64_t j = 0; j < p.top_k; j += kSlots) {
    int row[kSlots];
    float score[kSlots], dot[kSlots] = {};
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      row[s] = j + s < top_k ? p.inverse[slot + j + s] : -1;
      if (row[s] >= p.P) row[s] = -1;
    }
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      if (row[s] >= 0 && has_grad_y && p.slot_of[row[s]] != slot + j + s) row[s] = -1;
      score[s] = row[s] >= 0 ? access.score(p.scores, p.scores_f32, slot + j + s) : 0.f;
    }
    for (int64_t v = threadIdx.x; v < vecs; v += blockDim.x) {
      const typename Access::Raw g = access.load(p.grad, token * p.grad_stride + v * n);
      typename Access::Raw y[kSlots];
#pragma unroll
      for (int s = 0; s < kSlots; ++s)
        y[s] = kDots && row[s] >= 0 ? access.load_once(p.y, row[s] * p.y_stride + v * n) : typename Access::Raw{};
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        if (row[s] < 0) continue;
        float out[n];
#pragma unroll
        for (int i = 0; i < n; ++i) dot[s] += access.element(g, i) * access.element(y[s], i);
        if (!has_grad_y) continue;
#pragma unroll
        for (int i = 0; i < n; ++i) out[i] = score[s] * access.element(g, i);
        access.store(p.grad_y, row[s] * p.K + v * n, out);
      }
    }
    if constexpr (kDots) {
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        dot[s] = wave_sum(dot[s]);
        if (threadIdx.x % kWarpSize == 0) wave_dots[first_wave + threadIdx.x / kWarpSize][s] = dot[s];
      }
      __syncthreads();
      const int s = threadIdx.x;
      if (s < kSlots && j + s < top_k) {
        float sum = 0;
        for (int w = 0; w < waves; ++w) sum += wave_dots[first_wave + w][s];
        store_element(p.grad_scores, p.scores_f32 ? InType::kF32 : p.in, slot + j + s, sum);
      }
      __syncthreads();
    }
  }
}

MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kCombineThreads, 1)
    zero_unused_rows_kernel(MOE_GRID_CONSTANT const CombineBackwardPlan p) {
  wait_for_previous_kernel();
  const int lane = threadIdx.x % kWarpSize;
  const int64_t first = int64_t(blockIdx.x) * kCombineThreads + threadIdx.x - lane, row = first + lane;
  const LaneMask unused = ballot(row < p.P && p.slot_of[row] < 0);
  const auto clear = [&](auto zero) {
    const int64_t vecs = p.K * bytes_of(p.in) / int64_t(sizeof(zero));
    for (int i = 0; i < kWarpSize; ++i) {
      if (!(unused >> i & 1)) continue;
      auto* to = static_cast<decltype(zero)*>(p.grad_y) + (first + i) * vecs;
      for (int64_t v = lane; v < vecs; v += kWarpSize) store_stream(to + v, zero);
    }
  };
  if (p.vectors) clear(Vec16{});
  else clear(uint16_t{});
}

// Calls f with SlotVectorAccess if `bits`, the addresses and distances in bytes, are multiples of 16.
template <class F>
int dispatch_access(InType in, uint64_t bits, F f) {
  if (bits % 16 != 0) return f(SlotElementAccess(in));
  return dispatch_in(in, [&](auto in_tag) { return f(SlotVectorAccess<decltype(in_tag)>(in)); });
}

}  // namespace

int combine(const CombineParams& params, void* stream) {
  CombinePlan p = {params};
  const uint64_t bytes = bytes_of(p.in);
  const uint64_t bits = reinterpret_cast<uintptr_t>(p.y) | reinterpret_cast<uintptr_t>(p.out) | p.K * bytes |
                        (p.P > 1 ? p.y_stride * bytes : 0);
  return dispatch_access(p.in, bits, [&](auto access) {
    using Access = decltype(access);
    if (p.T == 0 || p.K == 0) return 0;
    const BlockShape shape = shape_for(p.K / Access::kElements);
    p.splits = unsigned(shape.splits);
    const int64_t resident =
        device().multiprocessors * (kCombineBlocks * kCombineThreads / (shape.threads * shape.rows));
    const int64_t blocks = ceil_div<int64_t>(p.T, shape.rows);
    const int64_t max_blocks = resident < shape.splits ? 1 : resident / shape.splits;
    const dim3 grid(unsigned((blocks < max_blocks ? blocks : max_blocks) * shape.splits));
    return launch(combine_kernel<Access>, {grid, dim3(shape.threads, shape.rows), stream}, p);
  });
}

int combine_backward(const CombineBackwardParams& params, void* stream) {
  CombineBackwardPlan p = {params};
  if (!p.grad_y && !p.grad_scores) return 0;
  if (p.grad_y)
    if (const int e = invert_indices(p.inverse, p.T * p.top_k, p.slot_of, p.P, stream)) return e;
  const uint64_t bytes = bytes_of(p.in);
  const uint64_t bits = reinterpret_cast<uintptr_t>(p.grad) | reinterpret_cast<uintptr_t>(p.y) |
                        reinterpret_cast<uintptr_t>(p.grad_y) | p.K * bytes |
                        (p.T > 1 ? p.grad_stride * bytes : 0) | (p.y && p.P > 1 ? p.y_stride * bytes : 0);
  if (p.grad_y && p.P > 0 && p.K > 0) {
    const Launch l = {dim3(unsigned(ceil_div<int64_t>(p.P, kCombineThreads))), dim3(kCombineThreads), stream};
    p.vectors = bits % 16 == 0;
    if (const int e = launch(zero_unused_rows_kernel, l, p)) return e;
  }
  return dispatch_access(p.in, bits, [&](auto access) {
    using Access = decltype(access);
    const BlockShape shape = shape_for(p.K / Access::kElements);
    auto* const kernel = p.grad_scores ? combine_backward_kernel<Access, true> : combine_backward_kernel<Access, false>;
    const int block_threads = shape.threads * shape.rows;
    for (; p.first < p.T && p.top_k > 0; p.first += max_grid_blocks(block_threads) * shape.rows) {
      const dim3 grid(grid_blocks(ceil_div<int64_t>(p.T - p.first, shape.rows), block_threads));
      if (const int e = launch(kernel, {grid, dim3(shape.threads, shape.rows), stream}, p)) return e;
    }
    return 0;
  });
}

}  // namespace moe_fp8
