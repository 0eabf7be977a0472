// Matrix instructions, with the vendors' layout of rows, columns and elements of the sum over lanes.
//
// Products are exact. They are added to d one at a time, in float32, with rising k. The order and the intermediate
// formats of the hardware are not published, and kernels must not rely on any.
#pragma once
#include <vector>

#include "block.h"
#include "fp8.h"

namespace simt {

inline float half_to_float(unsigned bits) {
  const int exponent = int(bits >> 10 & 31), mantissa = int(bits & 1023);
  const float sign = bits & 0x8000 ? -1.f : 1.f;
  if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
  return sign * std::ldexp(float(exponent ? mantissa | 1024 : mantissa), (exponent ? exponent : 1) - 25);
}

// Used by functions that run for every element of a product. Checks of shifts and addresses would take half of their
// time, and n <= in_lane makes them right.
#define SIMT_UNCHECKED __attribute__((no_sanitize("undefined")))

// Elements of a lane: 8 bytes of fp8, in the order of the instruction, or four 16-bit floats.
enum class Held { kE4M3, kE5M2, kHalf, kBfloat16 };

// A table from bits to values, because computing powers of two would take most of a product's time.
class ElementAccess {
 public:
  explicit ElementAccess(Held held)
      : in_lane(held == Held::kHalf || held == Held::kBfloat16 ? 4 : 8), bits_(64 / in_lane), values_(table(held)) {}

  // Decodes the first n elements of a lane.
  SIMT_UNCHECKED void read(uint64_t lane, int n, float* to) const {
    for (int i = 0; i < n; ++i) to[i] = values_[lane >> (bits_ * i) & ((1u << bits_) - 1)];
  }

  const int in_lane;

 private:
  template <class Value>
  static std::vector<float> values(unsigned bits, Value value) {
    std::vector<float> of(size_t(1) << bits);
    for (unsigned i = 0; i < of.size(); ++i) of[i] = value(i);
    return of;
  }
  static const float* table(Held held) {
    static const auto e4m3 = values(8, [](unsigned code) { return fp8_to_float(code, 3); });
    static const auto e5m2 = values(8, [](unsigned code) { return fp8_to_float(code, 2); });
    static const auto half = values(16, half_to_float);
    static const auto bfloat16 = values(16, [](unsigned bits) {
      const uint32_t word = bits << 16;
      float f;
      std::memcpy(&f, &word, sizeof f);
      return f;
    });
    switch (held) {
      case Held::kE4M3: return e4m3.data();
      case Held::kE5M2: return e5m2.data();
      case Held::kHalf: return half.data();
      default: return bfloat16.data();
    }
  }

  const int bits_;
  const float* const values_;
};

// d[i] += the products of n elements of a[i] and b[i]. Four sums run side by side, because additions to one sum wait
// for each other.
SIMT_UNCHECKED inline void add_products(float* d, const float* const (&a)[4], const float* const (&b)[4], int n) {
  float d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];
  for (int k = 0; k < n; ++k) {
    d0 += a[0][k] * b[0][k];
    d1 += a[1][k] * b[1][k];
    d2 += a[2][k] * b[2][k];
    d3 += a[3][k] * b[3][k];
  }
  d[0] = d0, d[1] = d1, d[2] = d2, d[3] = d3;
}

// 16 rows and columns. Lane r + 16 * q holds elements q * n .. q * n + n - 1 of row r of a and of column r of b, with n
// = 8 or 4. d[i] of this lane is row 4 * q + i of column r.
inline void mfma_16x16(float* d, ElementAccess a_is, uint64_t a, ElementAccess b_is, uint64_t b, const Site& site) {
  const int n = a_is.in_lane, lane = int(current->lane()), r = lane % 16, q = lane / 16;
  float of_a[4][32], of_b[32];
  const uint64_t* lanes = current->share(a, site);
  for (int i = 0; i < 4; ++i)
    for (int part = 0; part < 4; ++part) a_is.read(lanes[4 * q + i + 16 * part], n, &of_a[i][n * part]);
  lanes = current->share(b, site);
  for (int part = 0; part < 4; ++part) b_is.read(lanes[r + 16 * part], n, &of_b[n * part]);
  add_products(d, {of_a[0], of_a[1], of_a[2], of_a[3]}, {of_b, of_b, of_b, of_b}, 4 * n);
}

// The same for 128 elements of fp8, with E8M0 scales of blocks of 32. Lane r + 16 * q holds elements 16 * q .. 16 * q +
// 15 of both halves. It also holds, for its row and column, the scale of block q, elements 32 * q .. 32 * q + 31. Other
// lanes hold most of these elements. Source: AMD's own test of that chip, test/mx_mfma_op of ROCm/composable_kernel.
//
// The products of a block are added from zero on with rising k. Their sum is multiplied by the block's scales, rounded
// to float32 and added to d, block by block. Each step is in float32. A scale of 255 makes d NaN.
inline void mfma_scale_16x16x128(float* d, ElementAccess a_is, const uint64_t (&a)[4], unsigned scale_a, ElementAccess b_is,
                                 const uint64_t (&b)[4], unsigned scale_b, const Site& site) {
  const int lane = int(current->lane()), r = lane % 16, q = lane / 16;
  float of_a[4][128], of_b[128];
  for (int eight = 0; eight < 4; ++eight) {
    const int at = 64 * (eight / 2) + 8 * (eight % 2);
    const uint64_t* lanes = current->share(a[eight], site);
    for (int i = 0; i < 4; ++i)
      for (int part = 0; part < 4; ++part) a_is.read(lanes[4 * q + i + 16 * part], 8, &of_a[i][at + 16 * part]);
    lanes = current->share(b[eight], site);
    for (int part = 0; part < 4; ++part) b_is.read(lanes[r + 16 * part], 8, &of_b[at + 16 * part]);
  }
  const uint64_t* lanes = current->share(scale_a | uint64_t(scale_b) << 32, site);
  for (int block = 0; block < 4; ++block) {
    const int at = 32 * block;
    const float* const b_at = of_b + at;
    float sums[4] = {};
    add_products(sums, {of_a[0] + at, of_a[1] + at, of_a[2] + at, of_a[3] + at}, {b_at, b_at, b_at, b_at}, 32);
    for (int i = 0; i < 4; ++i) {
      const int e = int(lanes[4 * q + i + 16 * block] & 0xff), f = int(lanes[r + 16 * block] >> 32 & 0xff);
      d[i] += e == 255 || f == 255 ? NAN : float(std::ldexp(double(sums[i]), e + f - 254));
    }
  }
}

// 16 rows and 8 columns. Lane 4 * g + t holds rows g (registers 0 and 2) and g + 8 (1 and 3) of a, and column g of b.
// In each pair, one register has elements t * n .. t * n + n - 1 of the first half of the sum, and one of the second
// half, with n = 4 or 2. d has the same rows, two elements each, in columns 2 * t and 2 * t + 1.
inline void mma_16x8(float (&d)[4], ElementAccess a_is, const uint32_t (&a)[4], ElementAccess b_is, const uint32_t (&b)[2],
                     const Site& site) {
  const int n = a_is.in_lane / 2, lane = int(current->lane()), g = lane / 4, t = lane % 4;
  const auto read = [n](const ElementAccess& is, const uint64_t* lanes, int of, float* to) {
    for (int part = 0; part < 4; ++part) {
      is.read(lanes[4 * of + part], n, &to[n * part]);
      is.read(lanes[4 * of + part] >> 32, n, &to[n * (4 + part)]);
    }
  };
  float of_a[2][32], of_b[2][32];
  for (int row = 0; row < 2; ++row) read(a_is, current->share(a[row] | uint64_t(a[row + 2]) << 32, site), g, of_a[row]);
  const uint64_t* lanes = current->share(b[0] | uint64_t(b[1]) << 32, site);
  for (int column = 0; column < 2; ++column) read(b_is, lanes, 2 * t + column, of_b[column]);
  add_products(d, {of_a[0], of_a[0], of_a[1], of_a[1]}, {of_b[0], of_b[1], of_b[0], of_b[1]}, 8 * n);
}
inline void mma_m16n8k32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], bool e5m2,
                         Site at = Site::here("mma")) {
  mma_16x8(d, ElementAccess(e5m2 ? Held::kE5M2 : Held::kE4M3), a, ElementAccess(Held::kE4M3), b, at);
}
inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Held held,
                         Site at = Site::here("mma")) {
  mma_16x8(d, ElementAccess(held), a, ElementAccess(held), b, at);
}


// Word i of a lane belongs to matrix i, 8 rows of 16 bytes. Lanes 8 * i .. 8 * i + 7 hold the addresses of its rows.
// The word is in row lane / 4, from byte lane % 4 * 4 on.
inline void load_matrices(uint32_t (&word)[4], const void* row, Site at = Site::here("ldmatrix")) {
  const unsigned lane = current->lane();
  const uint64_t* rows = current->share(reinterpret_cast<uint64_t>(row), at);
  for (unsigned i = 0; i < 4; ++i)
    word[i] = reinterpret_cast<const uint32_t*>(rows[8 * i + lane / 4])[lane % 4];
}

}  // namespace simt
