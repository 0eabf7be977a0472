#include "tokens/combine.h"

#include "numerics/dispatch.h"
#include "numerics/groups.h"
#include "platform/launch.h"
#include "platform/memory.h"
#include "platform/waves.h"
#include "primitives/access_width.h"
#include "tokens/invert.h"

namespace moe_fp8 {
namespace {

// blockDim.x threads share a row, or one of the parts of a long one; blockDim.y rows share a block. Each thread has a
// vector of the rows of so many slots on its way at a time. kBlocks: of a multiprocessor, of kThreads threads.
constexpr int kThreads = 256;
constexpr int kSlots = 8, kBlocks = 3;
constexpr int kSlotsBackward = 4;
constexpr int64_t kMaxBlocks = 1 << 22;  // of a launch of backward; HIP has 2^32 threads

struct BlockShape {
  int64_t parts;  // of a row
  int threads, rows;
};
BlockShape shape_for(int64_t vecs) {
  const int64_t parts = vecs > kThreads ? ceil_div<int64_t>(vecs, kThreads) : 1;
  const int64_t even = round_up<int64_t>(ceil_div<int64_t>(vecs, parts), kLargestWarp);
  const int threads = even < kLargestWarp ? kLargestWarp : even < kThreads ? int(even) : kThreads;
  return {parts, threads, parts == 1 ? kThreads / threads : 1};
}

MOE_HD int bytes_of(InType in) { return in == InType::kF32 ? 4 : 2; }

// ---- parts of rows, and the scores that come with them -------------------------------------------------------------
template <class In>
struct SlotVectors : VectorAccess<In> {
  using VectorAccess<In>::VectorAccess;
  static constexpr int kBlocksBackward = std::is_same_v<In, F16> ? 2 : 3;  // its conversions take more registers
  MOE_DEVICE float score(const void* scores, bool f32, int64_t slot) const { return score_of<In>(scores, f32, slot); }
};
struct SlotElements : ElementAccess {
  using ElementAccess::ElementAccess;
  static constexpr int kBlocksBackward = 3;
  MOE_DEVICE float score(const void* scores, bool f32, int64_t slot) const {
    const InType of_scores = f32 ? InType::kF32 : type;
    return scores ? to_float(of_scores, load_bits(scores, of_scores, slot)) : 1.f;
  }
};

// ---- forward -------------------------------------------------------------------------------------------------------
struct Combine : CombineParams {
  unsigned parts;
};

// A slot of a token: its row of y, -1 where there is none, and its score. Of kSlots slots a lane has one.
struct Slot {
  int row;
  float score;
};
template <class Access>
MOE_DEVICE Slot find_slot(const Combine& p, const Access& part, uint32_t token, uint32_t first) {
  const uint32_t j = first + threadIdx.x % kSlots, at = token * uint32_t(p.top_k) + j;
  if (token >= uint32_t(p.T) || j >= uint32_t(p.top_k)) return {-1, 0.f};
  const int row = p.inverse[at];
  const float score = part.score(p.scores, p.scores_f32, at);
  return row >= 0 && row < p.P ? Slot{row, score} : Slot{-1, 0.f};
}

// A multiprocessor's blocks stay on it and walk tokens. A wave has a part of one token's rows, and looks up the next
// one's slots while those are under way: on an H200, after GEMMs, [32768, 8] of 4096 columns took 636 us, not 747, and
// [24576, 8] of 1536 181, not 210.
template <class Access>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, kBlocks) combine_kernel(MOE_GRID_CONSTANT const Combine p) {
  constexpr int n = Access::kElements;
  const Access part(p.in);
  wait_for_previous_kernel();
  const auto T = uint32_t(p.T), top_k = uint32_t(p.top_k), tokens = gridDim.x / p.parts * blockDim.y;
  const int64_t column = (int64_t(blockIdx.x % p.parts) * blockDim.x + threadIdx.x) * n;
  const bool there = column < p.K;
  uint32_t token = blockIdx.x / p.parts * blockDim.y + threadIdx.y;
  Slot slot = find_slot(p, part, token, 0);
#pragma unroll 1
  for (; token < T; token += tokens) {
    float sum[n] = {};
#pragma unroll 1
    for (uint32_t j = 0; j < top_k; j += kSlots) {
      typename Access::Held held[kSlots];
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        const int row = int(shfl(uint32_t(slot.row), s));
        held[s] = row >= 0 && there ? part.load_once(p.y, row * p.y_stride + column) : typename Access::Held{};
      }
      const uint32_t scores = as_bits(slot.score);
      const bool last = j + kSlots >= top_k;
      slot = find_slot(p, part, last ? token + tokens : token, last ? 0 : j + kSlots);
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        const float score = as_float(shfl(scores, s));
#pragma unroll
        for (int i = 0; i < n; ++i) sum[i] += score * part.element(held[s], i);
      }
    }
    if (there) part.store(p.out, token * p.K + column, sum);
  }
}

// ---- backward: by tokens, so that a row of grad is read once -------------------------------------------------------
struct CombineBackward : CombineBackwardParams {
  bool vectors;  // whether rows are of whole vectors
  int64_t first;
};

// kDots: the gradient of the scores is wanted. Without it, fewer registers: on an H200 298 us instead of 352 for
// [65536, 7168] of bfloat16.
template <class Access, bool kDots>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, Access::kBlocksBackward)
    combine_backward_kernel(MOE_GRID_CONSTANT const CombineBackward p) {
  constexpr int n = Access::kElements;
  __shared__ float of_wave[kThreads / 32][kSlotsBackward];
  const Access part(p.in);
  const int waves = blockDim.x / kWarpSize, first_wave = threadIdx.y * waves;
  wait_for_previous_kernel();
  const int64_t token = p.first + int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  const int64_t vecs = token < p.T ? p.K / n : 0, top_k = token < p.T ? p.top_k : 0, slot = token * p.top_k;
  for (int64_t j = 0; j < p.top_k; j += kSlotsBackward) {
    int row[kSlotsBackward];
    float score[kSlotsBackward], dot[kSlotsBackward] = {};
#pragma unroll
    for (int s = 0; s < kSlotsBackward; ++s) {
      row[s] = j + s < top_k ? p.inverse[slot + j + s] : -1;
      if (row[s] >= p.P) row[s] = -1;
    }
#pragma unroll
    for (int s = 0; s < kSlotsBackward; ++s) {
      if (row[s] >= 0 && p.slot_of[row[s]] != slot + j + s) row[s] = -1;
      score[s] = row[s] >= 0 ? part.score(p.scores, p.scores_f32, slot + j + s) : 0.f;
    }
    for (int64_t v = threadIdx.x; v < vecs; v += blockDim.x) {
      const typename Access::Held g = part.load(p.grad, token * p.grad_stride + v * n);
      typename Access::Held held[kSlotsBackward];
#pragma unroll
      for (int s = 0; s < kSlotsBackward; ++s)
        held[s] = kDots && row[s] >= 0 ? part.load_once(p.y, row[s] * p.y_stride + v * n) : typename Access::Held{};
#pragma unroll
      for (int s = 0; s < kSlotsBackward; ++s) {
        if (row[s] < 0) continue;
        float out[n];
#pragma unroll
        for (int i = 0; i < n; ++i) dot[s] += part.element(g, i) * part.element(held[s], i);
#pragma unroll
        for (int i = 0; i < n; ++i) out[i] = score[s] * part.element(g, i);
        part.store(p.grad_y, row[s] * p.K + v * n, out);
      }
    }
    if constexpr (kDots) {
#pragma unroll
      for (int s = 0; s < kSlotsBackward; ++s) {
        dot[s] = wave_sum(dot[s]);
        if (threadIdx.x % kWarpSize == 0) of_wave[first_wave + threadIdx.x / kWarpSize][s] = dot[s];
      }
      __syncthreads();
      const int s = threadIdx.x;
      if (s < kSlotsBackward && j + s < top_k) {
        float sum = 0;
        for (int w = 0; w < waves; ++w) sum += of_wave[first_wave + w][s];
        store_element(p.grad_scores, p.scores_f32 ? InType::kF32 : p.in, slot + j + s, sum);
      }
      __syncthreads();
    }
  }
}

MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, 1) zero_unused_rows_kernel(MOE_GRID_CONSTANT const CombineBackward p) {
  wait_for_previous_kernel();
  const int lane = threadIdx.x % kWarpSize;
  const int64_t first = int64_t(blockIdx.x) * kThreads + threadIdx.x - lane, row = first + lane;
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

// f of SlotVectors where `bits`, addresses and distances in bytes, are multiples of 16.
template <class F>
int with_parts(InType in, uint64_t bits, F f) {
  if (bits % 16 != 0) return f(SlotElements(in));
  return dispatch_in(in, [&](auto in_tag) { return f(SlotVectors<decltype(in_tag)>(in)); });
}

}  // namespace

int combine(const CombineParams& params, void* stream) {
  Combine p = {params};
  const uint64_t bytes = bytes_of(p.in);
  const uint64_t bits = reinterpret_cast<uintptr_t>(p.y) | reinterpret_cast<uintptr_t>(p.out) | p.K * bytes |
                        (p.P > 1 ? p.y_stride * bytes : 0);
  return with_parts(p.in, bits, [&](auto part) {
    using Access = decltype(part);
    if (p.T == 0 || p.K == 0) return 0;
    const BlockShape shape = shape_for(p.K / Access::kElements);
    p.parts = unsigned(shape.parts);
    const int64_t held = device().multiprocessors * (kBlocks * kThreads / (shape.threads * shape.rows));
    const int64_t most = held < shape.parts ? 1 : held / shape.parts, blocks = ceil_div<int64_t>(p.T, shape.rows);
    const dim3 grid(unsigned((blocks < most ? blocks : most) * shape.parts));
    return launch(combine_kernel<Access>, {grid, dim3(shape.threads, shape.rows), stream}, p);
  });
}

int combine_backward(const CombineBackwardParams& params, void* stream) {
  CombineBackward p = {params};
  if (const int e = invert_indices(p.inverse, p.T * p.top_k, p.slot_of, p.P, stream)) return e;
  const uint64_t bytes = bytes_of(p.in);
  const uint64_t bits = reinterpret_cast<uintptr_t>(p.grad) | reinterpret_cast<uintptr_t>(p.y) |
                        reinterpret_cast<uintptr_t>(p.grad_y) | p.K * bytes |
                        (p.T > 1 ? p.grad_stride * bytes : 0) | (p.y && p.P > 1 ? p.y_stride * bytes : 0);
  if (p.P > 0 && p.K > 0) {
    const Launch l = {dim3(unsigned(ceil_div<int64_t>(p.P, kThreads))), dim3(kThreads), stream};
    p.vectors = bits % 16 == 0;
    if (const int e = launch(zero_unused_rows_kernel, l, p)) return e;
  }
  return with_parts(p.in, bits, [&](auto part) {
    using Access = decltype(part);
    const BlockShape shape = shape_for(p.K / Access::kElements);
    auto* const kernel = p.grad_scores ? combine_backward_kernel<Access, true> : combine_backward_kernel<Access, false>;
    for (; p.first < p.T && p.top_k > 0; p.first += kMaxBlocks * shape.rows) {
      const int64_t blocks = ceil_div<int64_t>(p.T - p.first, shape.rows);
      const dim3 grid(unsigned(blocks < kMaxBlocks ? blocks : kMaxBlocks));
      if (const int e = launch(kernel, {grid, dim3(shape.threads, shape.rows), stream}, p)) return e;
    }
    return 0;
  });
}

}  // namespace moe_fp8
