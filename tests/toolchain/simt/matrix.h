// Matrix instructions, as the vendors' manuals deal out rows, columns and elements of the sum to lanes.
//
// Products are exact; they are added to d one at a time, in float32, by rising k. Hardware adds in orders, and with
// intermediate formats, that are not published: kernels must not rely on any.
#pragma once
#include "block.h"
#include "fp8.h"

namespace simt {

inline float half_to_float(unsigned bits) {
  const int exponent = int(bits >> 10 & 31), mantissa = int(bits & 1023);
  const float sign = bits & 0x8000 ? -1.f : 1.f;
  if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
  return sign * std::ldexp(float(exponent ? mantissa | 1024 : mantissa), (exponent ? exponent : 1) - 25);
}

// Elements as lanes hold them: 8 bytes of fp8, numbered as instructions number those, or 4 16-bit floats.
enum class Held { kE4M3, kE5M2, kHalf };
inline float held_value(Held held, uint64_t lane, int i) {
  if (held == Held::kHalf) return half_to_float(unsigned(lane >> (16 * i) & 0xffff));
  return fp8_to_float(unsigned(lane >> (8 * i) & 0xff), held == Held::kE4M3 ? 3 : 2);
}

// 16 rows and columns. Lane r + 16 * q holds elements q * n .. q * n + n - 1 of row r of a, of column r of b, n = 8 or 4;
// d[i] of the same lane is of row 4 * q + i, column r.
inline void mfma_16x16(float* d, Held held_a, uint64_t a, Held held_b, uint64_t b, const Site& site) {
  const int n = held_a == Held::kHalf ? 4 : 8, lane = int(current->lane()), r = lane % 16, q = lane / 16;
  float of_a[4][32];
  const uint64_t* lanes = current->share(a, site);
  for (int i = 0; i < 4; ++i)
    for (int k = 0; k < 4 * n; ++k) of_a[i][k] = held_value(held_a, lanes[4 * q + i + 16 * (k / n)], k % n);
  lanes = current->share(b, site);
  for (int i = 0; i < 4; ++i)
    for (int k = 0; k < 4 * n; ++k) d[i] += of_a[i][k] * held_value(held_b, lanes[r + 16 * (k / n)], k % n);
}

// Likewise 128 elements of fp8, with E8M0 scales of blocks of 32. Lane r + 16 * q holds elements 16 * q .. 16 * q + 15
// of both halves, and of the same row and column the scale of block q, elements 32 * q .. 32 * q + 31, most of which
// lie in other lanes. Source: AMD's own test of that chip, test/mx_mfma_op of ROCm/composable_kernel.
//
// The products of a block are added from zero on by rising k, that sum is multiplied by the block's scales, rounded to
// float32 and added to d, block by block; each step in float32. A scale of 255 makes d NaN.
inline void mfma_scale_16x16x128(float* d, Held held_a, const uint64_t (&a)[4], unsigned scale_a, Held held_b,
                                 const uint64_t (&b)[4], unsigned scale_b, const Site& site) {
  const int lane = int(current->lane()), r = lane % 16, q = lane / 16;
  float of_a[4][128], of_b[128];
  for (int eight = 0; eight < 4; ++eight) {
    const int at = 64 * (eight / 2) + 8 * (eight % 2);
    const uint64_t* lanes = current->share(a[eight], site);
    for (int i = 0; i < 4; ++i)
      for (int k = 0; k < 32; ++k)
        of_a[i][at + 16 * (k / 8) + k % 8] = held_value(held_a, lanes[4 * q + i + 16 * (k / 8)], k % 8);
    lanes = current->share(b[eight], site);
    for (int k = 0; k < 32; ++k)
      of_b[at + 16 * (k / 8) + k % 8] = held_value(held_b, lanes[r + 16 * (k / 8)], k % 8);
  }
  const uint64_t* lanes = current->share(scale_a | uint64_t(scale_b) << 32, site);
  for (int i = 0; i < 4; ++i)
    for (int block = 0; block < 4; ++block) {
      float sum = 0;
      for (int k = 32 * block; k < 32 * block + 32; ++k) sum += of_a[i][k] * of_b[k];
      const int e = int(lanes[4 * q + i + 16 * block] & 0xff), f = int(lanes[r + 16 * block] >> 32 & 0xff);
      d[i] += e == 255 || f == 255 ? NAN : float(std::ldexp(double(sum), e + f - 254));
    }
}

// 16 rows and 8 columns. Lane 4 * g + t holds of a rows g and g + 8, in registers 0, 2 and 1, 3, of b column g; of each,
// registers are elements t * n .. t * n + n - 1 of the first and of the second half of the sum, n = 4 or 2. d is of the
// same rows, two each, columns 2 * t and 2 * t + 1.
inline void mma_16x8(float (&d)[4], Held held_a, const uint32_t (&a)[4], Held held_b, const uint32_t (&b)[2],
                     const Site& site) {
  const int n = held_a == Held::kHalf ? 2 : 4, lane = int(current->lane()), g = lane / 4, t = lane % 4;
  const auto value = [n](Held held, const uint64_t* lanes, int of, int k) {
    const int half = k / (4 * n), in_half = k % (4 * n);
    return held_value(held, lanes[4 * of + in_half / n], half * n + in_half % n);
  };
  float of_a[2][32];
  for (int row = 0; row < 2; ++row) {
    const uint64_t* lanes = current->share(a[row] | uint64_t(a[row + 2]) << 32, site);
    for (int k = 0; k < 8 * n; ++k) of_a[row][k] = value(held_a, lanes, g, k);
  }
  const uint64_t* lanes = current->share(b[0] | uint64_t(b[1]) << 32, site);
  for (int i = 0; i < 4; ++i)
    for (int k = 0; k < 8 * n; ++k) d[i] += of_a[i / 2][k] * value(held_b, lanes, 2 * t + i % 2, k);
}
inline void mma_m16n8k32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], bool e5m2,
                         Site at = Site::here("mma")) {
  mma_16x8(d, e5m2 ? Held::kE5M2 : Held::kE4M3, a, Held::kE4M3, b, at);
}
inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Site at = Site::here("mma")) {
  mma_16x8(d, Held::kHalf, a, Held::kHalf, b, at);
}

}  // namespace simt
