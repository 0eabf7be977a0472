#include "kernels/combine.h"

#include "kernels/dispatch.h"
#include "kernels/invert.h"
#include "numerics/groups.h"

namespace moe_fp8 {
namespace {

// blockDim.x threads share a row, or one of the parts of a long one; blockDim.y rows share a block. Each thread has a
// vector of the rows of so many slots on its way at a time, and a multiprocessor as many blocks as registers allow.
constexpr int kThreads = 256;
constexpr int kSlots = 8, kBlocks = 3;
constexpr int kSlotsBackward = 4;
template <class In>
constexpr int kBlocksBackward = std::is_same_v<In, F16> ? 2 : 3;  // its conversions take more registers
constexpr int64_t kMaxParts = 1 << 16, kMaxBlocks = 1 << 22;  // of a launch; HIP has 2^32 threads

struct Tile {
  int64_t parts;
  int threads, rows;
};
Tile tile_for(int64_t vecs) {
  int64_t parts = ceil_div<int64_t>(vecs, kThreads);
  parts = parts < 1 ? 1 : parts < kMaxParts ? parts : kMaxParts;
  const int64_t even = round_up<int64_t>(ceil_div<int64_t>(vecs, parts), kLargestWarp);
  const int threads = even < kLargestWarp ? kLargestWarp : even < kThreads ? int(even) : kThreads;
  return {parts, threads, parts == 1 ? kThreads / threads : 1};
}

// ---- vectors of elements: 16 bytes, or a single one ----------------------------------------------------------------
template <class In, class Vec>
constexpr int kElements = sizeof(Vec) / sizeof(typename In::Bits);

template <class In>
MOE_DEVICE float element_of(const Vec16& v, int i) { return element<In>(v.w[i / kPerWord<In>], i % kPerWord<In>); }
template <class In>
MOE_DEVICE float element_of(typename In::Bits v, int) { return In::to_float(v); }

template <class In>
MOE_DEVICE void store_floats(Vec16* to, const float* f) {
  Vec16 v = {};
#pragma unroll
  for (int i = 0; i < kElements<In, Vec16>; ++i)
    v.w[i / kPerWord<In>] |= uint32_t(In::from_float(f[i])) << (16 * (i % kPerWord<In>));
  store_stream(to, v);
}
template <class In>
MOE_DEVICE void store_floats(typename In::Bits* to, const float* f) { store_stream(to, In::from_float(*f)); }

template <class Vec>
MOE_DEVICE const Vec* vecs_at(const void* rows, int64_t row, int64_t row_bytes) {
  return reinterpret_cast<const Vec*>(static_cast<const char*>(rows) + row * row_bytes);
}

// ---- forward -------------------------------------------------------------------------------------------------------
struct Combine : CombineParams {
  int64_t first;  // token of the launch
  unsigned parts;
};

template <class In, class Vec>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, kBlocks) combine_kernel(MOE_GRID_CONSTANT const Combine p) {
  constexpr int n = kElements<In, Vec>, kBytes = sizeof(typename In::Bits);
  wait_for_previous_kernel();
  const int64_t token = p.first + int64_t(blockIdx.x / p.parts) * blockDim.y + threadIdx.y;
  if (token >= p.T) return;
  const int64_t vecs = p.K / n, step = int64_t(p.parts) * blockDim.x, slot = token * p.top_k;
  for (int64_t v = int64_t(blockIdx.x % p.parts) * blockDim.x + threadIdx.x; v < vecs; v += step) {
    float sum[n] = {};
    for (int64_t j = 0; j < p.top_k; j += kSlots) {
      int row[kSlots];
      float score[kSlots];
      Vec held[kSlots];
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        row[s] = j + s < p.top_k ? p.inverse[slot + j + s] : -1;
        if (row[s] >= p.P) row[s] = -1;
      }
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        held[s] = row[s] >= 0 ? load_stream(vecs_at<Vec>(p.y, row[s], p.y_stride * kBytes) + v) : Vec{};
        score[s] = row[s] >= 0 ? score_of<In>(p.scores, p.scores_f32, slot + j + s) : 0.f;
      }
#pragma unroll
      for (int s = 0; s < kSlots; ++s)
#pragma unroll
        for (int i = 0; i < n; ++i) sum[i] += score[s] * element_of<In>(held[s], i);
    }
    store_floats<In>(static_cast<Vec*>(p.out) + token * vecs + v, sum);
  }
}

// ---- backward: by tokens, so that a row of grad is read once -------------------------------------------------------
struct CombineBackward : CombineBackwardParams {
  int64_t first;
};

MOE_DEVICE float wave_sum(float v) {
  for (int mask = kWarpSize / 2; mask > 0; mask >>= 1) v += as_float(shfl_xor(as_bits(v), mask));
  return v;
}

template <class In, class Vec, bool kDots>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, kBlocksBackward<In>)
    combine_backward_kernel(MOE_GRID_CONSTANT const CombineBackward p) {
  constexpr int n = kElements<In, Vec>, kBytes = sizeof(typename In::Bits);
  __shared__ float of_wave[kThreads / 32][kSlotsBackward];
  const int waves = blockDim.x / kWarpSize, first_wave = threadIdx.y * waves;
  wait_for_previous_kernel();
  const int64_t token = p.first + int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  const int64_t vecs = token < p.T ? p.K / n : 0, top_k = token < p.T ? p.top_k : 0, slot = token * p.top_k;
  const Vec* grad = vecs_at<Vec>(p.grad, token, p.grad_stride * kBytes);
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
      score[s] = row[s] >= 0 ? score_of<In>(p.scores, p.scores_f32, slot + j + s) : 0.f;
    }
    for (int64_t v = threadIdx.x; v < vecs; v += blockDim.x) {
      const Vec g = grad[v];
      Vec held[kSlotsBackward];
#pragma unroll
      for (int s = 0; s < kSlotsBackward; ++s)
        held[s] = kDots && row[s] >= 0 ? load_stream(vecs_at<Vec>(p.y, row[s], p.y_stride * kBytes) + v) : Vec{};
#pragma unroll
      for (int s = 0; s < kSlotsBackward; ++s) {
        if (row[s] < 0) continue;
        float out[n];
#pragma unroll
        for (int i = 0; i < n; ++i) dot[s] += element_of<In>(g, i) * element_of<In>(held[s], i);
#pragma unroll
        for (int i = 0; i < n; ++i) out[i] = score[s] * element_of<In>(g, i);
        store_floats<In>(static_cast<Vec*>(p.grad_y) + row[s] * vecs + v, out);
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
        const int64_t at = slot + j + s;
        if (p.scores_f32) static_cast<uint32_t*>(p.grad_scores)[at] = F32::from_float(sum);
        else static_cast<typename In::Bits*>(p.grad_scores)[at] = In::from_float(sum);
      }
      __syncthreads();
    }
  }
}

template <class Vec>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, 1) zero_unused_rows_kernel(MOE_GRID_CONSTANT const CombineBackward p) {
  wait_for_previous_kernel();
  const int lane = threadIdx.x % kWarpSize;
  const int64_t first = int64_t(blockIdx.x) * kThreads + threadIdx.x - lane, row = first + lane;
  const LaneMask unused = ballot(row < p.P && p.slot_of[row] < 0);
  const int64_t vecs = p.K * (p.in == InType::kF32 ? 4 : 2) / int64_t(sizeof(Vec));
  for (int i = 0; i < kWarpSize; ++i) {
    if (!(unused >> i & 1)) continue;
    Vec* to = static_cast<Vec*>(p.grad_y) + (first + i) * vecs;
    for (int64_t v = lane; v < vecs; v += kWarpSize) store_stream(to + v, Vec{});
  }
}

// f(In{}, Vec{}) with the vector that `bits`, addresses and distances in bytes, are multiples of.
template <class F>
int with_vectors(InType in, uint64_t bits, F f) {
  return dispatch_in(in, [&](auto in_tag) {
    using In = decltype(in_tag);
    return bits % 16 == 0 ? f(in_tag, Vec16{}) : f(in_tag, typename In::Bits{});
  });
}

}  // namespace

int combine(const CombineParams& params, void* stream) {
  Combine p = {params};
  const uint64_t bytes = p.in == InType::kF32 ? 4 : 2;
  const uint64_t bits = reinterpret_cast<uintptr_t>(p.y) | reinterpret_cast<uintptr_t>(p.out) | p.K * bytes |
                        (p.P > 1 ? p.y_stride * bytes : 0);
  return with_vectors(p.in, bits, [&](auto in, auto vec) {
    using In = decltype(in);
    using Vec = decltype(vec);
    const Tile tile = tile_for(p.K / kElements<In, Vec>);
    p.parts = unsigned(tile.parts);
    const int64_t most = kMaxBlocks / tile.parts;
    for (; p.first < p.T && p.K > 0; p.first += most * tile.rows) {
      int64_t blocks = ceil_div<int64_t>(p.T - p.first, tile.rows);
      if (blocks > most) blocks = most;
      const Launch l = {dim3(unsigned(blocks * tile.parts)), dim3(tile.threads, tile.rows), stream};
      if (const int e = launch(combine_kernel<In, Vec>, l, p)) return e;
    }
    return 0;
  });
}

int combine_backward(const CombineBackwardParams& params, void* stream) {
  CombineBackward p = {params};
  if (const int e = invert_indices(p.inverse, p.T * p.top_k, p.slot_of, p.P, stream)) return e;
  const uint64_t bytes = p.in == InType::kF32 ? 4 : 2;
  const uint64_t bits = reinterpret_cast<uintptr_t>(p.grad) | reinterpret_cast<uintptr_t>(p.y) |
                        reinterpret_cast<uintptr_t>(p.grad_y) | p.K * bytes |
                        (p.T > 1 ? p.grad_stride * bytes : 0) | (p.y && p.P > 1 ? p.y_stride * bytes : 0);
  return with_vectors(p.in, bits, [&](auto in, auto vec) {
    using In = decltype(in);
    using Vec = decltype(vec);
    if (p.P > 0 && p.K > 0) {
      const Launch l = {dim3(unsigned(ceil_div<int64_t>(p.P, kThreads))), dim3(kThreads), stream};
      if (const int e = launch(zero_unused_rows_kernel<Vec>, l, p)) return e;
    }
    const Tile tile = tile_for(p.K / kElements<In, Vec>);
    auto* const kernel =
        p.grad_scores ? combine_backward_kernel<In, Vec, true> : combine_backward_kernel<In, Vec, false>;
    for (; p.first < p.T && p.top_k > 0; p.first += kMaxBlocks * tile.rows) {
      const int64_t blocks = ceil_div<int64_t>(p.T - p.first, tile.rows);
      const dim3 grid(unsigned(blocks < kMaxBlocks ? blocks : kMaxBlocks));
      if (const int e = launch(kernel, {grid, dim3(tile.threads, tile.rows), stream}, p)) return e;
    }
    return 0;
  });
}

}  // namespace moe_fp8
