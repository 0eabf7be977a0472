// A third epilogue policy for Hopper's products, as a C function for ctypes. It activates, and finds the amax that a
// quantizing epilogue would need. The kernel is compiled unchanged, and no part of it knows this policy.
#include <hip/hip_runtime.h>

#include "gemm/sm90/kernel.h"

namespace {

using namespace moe_fp8;

float* amax_of_call;  // [rows of out, ceil(N / 128)]

struct ReluAmax : sm90::Store {
  struct Args {
    float* amax;
    int blocks;
  };
  static Args make_args(const ScaledGroupedMmParams& p) { return {amax_of_call, ceil_div(int(p.N), kBlock)}; }
  template <class T>
  struct Storage : sm90::Staging {
    float amax[sm90::kConsumerWarps][16][T::kTileN / kBlock];
  };

  template <class T, class Value>
  static void finish_tile(const typename T::KernelArgs& p, const sm90::Consumer<T>& c, const sm90::Tile& tile,
                          sm90::SharedStorage<T>& shared, int row_half, Value value) {
    const auto relu = [&](int h, int j, int i) { return fmaxf(value(h, j, i), 0.f); };
    auto& amax = shared.epilogue.amax[c.warp()];
    const int lane = c.lane();
    for (int block = 0; block < T::kTileN / kBlock; ++block)
      for (int h = 0; h < 2; ++h) {
        float row_amax = 0.f;
        for (int j = 16 * block; j < 16 * (block + 1); ++j)
          for (int i = 0; i < 2; ++i)
            if (8 * j + 2 * (lane % 4) + i < tile.columns) row_amax = fmaxf(row_amax, relu(h, j, i));
        for (int mask = 1; mask < 4; mask *= 2) row_amax = fmaxf(row_amax, as_float(shfl_xor(as_bits(row_amax), mask)));
        if (lane % 4 == 0) amax[lane / 4 + 8 * h][block] = row_amax;
      }
    __syncwarp();
    const int first_row = 16 * c.warp() + 128 * row_half, row = lane % 16, block = lane / 16;
    if (first_row + row < tile.rows && block < T::kTileN / kBlock && block * kBlock < tile.columns)
      p.epilogue.amax[int64_t(tile.out_row + first_row + row) * p.epilogue.blocks + tile.column / kBlock + block] =
          amax[row][block];
    __syncwarp();
    sm90::Store::finish_tile<T>(p, c, tile, shared, row_half, relu);
  }
};

}  // namespace

// Row scales: scale_a [M], or [E, M] if the product is K-grouped, scale_b [E, N].
extern "C" const char* simt_relu_amax(const uint8_t* a, int64_t M, int64_t K, const uint8_t* b, int64_t N,
                                      bool k_grouped, const float* scale_a, const float* scale_b, const int* offs,
                                      int64_t E, float* out, float* amax) {
  amax_of_call = amax;
  const ScaledGroupedMmParams p = {
      .a = a, .b = b, .scale_a = {scale_a}, .scale_b = {scale_b}, .offs = offs, .out = out, .E = E, .M = M, .N = N,
      .K = K, .a_stride = K, .b_stride = K, .b_group_stride = N * K, .k_grouped = k_grouped, .accumulate = false,
      .out_float32 = true, .a_type = Fp8Type::kE4M3FN, .b_type = Fp8Type::kE4M3FN, .index = {}};
  const int error = sm90::launch_gemm<sm90::Scales::kRows, Fp8Type::kE4M3FN, ReluAmax>(p, nullptr, nullptr);
  return error ? hipGetErrorString(hipError_t(error)) : nullptr;
}
