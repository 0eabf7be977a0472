// Shared memory through which a consumer warp transposes its accumulators into whole rows of out.
#pragma once
#include "gemm/sm90/pipeline/consumer.h"

namespace moe_fp8::sm90 {

// Per warp: 16 rows of 128 bytes, whose 16-byte chunks are swizzled. For a transposed out, 64 columns of 32 bytes.
struct Staging {
  uint8_t rows[kConsumerWarps][16 * 128];
};

// Stages 8 * eights columns of float32, from column 8 * first_eight on. Floats are stored one by one: a store of two
// needs an even register and the next, and accumulators in such pairs collide in the register banks with the products
// that are added to them.
template <class Value>
MOE_DEVICE void stage_floats(uint8_t* staging, int lane, int first_eight, int eights, Value& value) {
  const int r = lane / 4, q = lane % 4;
#pragma unroll
  for (int j = 0; j < eights; ++j)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint8_t* to = staging + (r + 8 * h) * 128 + ((2 * j + q / 2) ^ r) * 16 + q % 2 * 8;
#pragma unroll
      for (int i = 0; i < 2; ++i) reinterpret_cast<volatile float*>(to)[i] = value(h, first_eight + j, i);
    }
}
// Reads one chunk of rows line, line + 4, line + 8 and line + 12, after all lanes have staged.
MOE_DEVICE void read_staged(const uint8_t* staging, int line, int chunk, Vec16 (&chunks)[4]) {
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int r = 4 * i + line;
    chunks[i] = *reinterpret_cast<const Vec16*>(staging + r * 128 + (chunk ^ (r & 7)) * 16);
  }
  __syncwarp();
}

// The chunk of a transposed out that holds 16 bytes of rows, the first or second `half` of 16, of a column. The halves
// of every other four columns are swapped, so that eight columns lie in different banks.
MOE_DEVICE int transposed_chunk(int column, int half) { return 2 * column + (half ^ (column / 4 % 2)); }

}  // namespace moe_fp8::sm90
