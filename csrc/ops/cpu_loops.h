// The quantizing loops of the CPU, multi-threaded: the same five steps and the same numerics as the kernels, written
// so that compilers vectorise them for any x86-64 or Arm.
#pragma once
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "numerics/groups.h"
#include "numerics/scale.h"

namespace moe_fp8 {

constexpr int64_t kGrainElements = 1 << 17;  // 0.1 ms: sharing less gains nothing and loses where cores are busy

// f(begin, end) over [0, n), n items of `elements` elements altogether.
template <class F>
void parallel(int64_t n, int64_t elements, const F& f) {
  if (elements <= kGrainElements) return f(0, n);
  torch::stable::parallel_for(0, n, std::max<int64_t>(1, n * kGrainElements / elements), f);
}

// |x| as an integer: finite < Inf < NaN. Signed, because SSE2 has no unsigned maximum of 16 bits and no such compare.
template <class In>
using Magnitude = std::make_signed_t<typename In::Bits>;
template <class In>
Magnitude<In> magnitude(typename In::Bits bits) { return bits & typename In::Bits(In::kMagnitudeMask); }
template <class In, Fp8Type kOut, class Scale = ScaleF32>
Scale scale_of(Magnitude<In> amax, bool rule) {
  return Scale::template from_amax<kOut>(as_bits(In::to_float(amax)), rule);
}

// An element times the multiplier of its block, which is no NaN, cast.
template <class In, Fp8Type kOut, class Scale = ScaleF32>
uint8_t cast(typename In::Bits x, float m) {
  const float f = In::to_float(x);
  if constexpr (std::is_same_v<Scale, ScaleF32>) return fp8_from_scaled<kOut>(f * m);
  // Tiny blocks have multipliers that make something of subnormals, which this thread may have been told to take for
  // zero: from their significand, whose unit is 2^-149.
  const uint32_t bits = as_bits(f) & 0x7fffffffu;
  const float unit = m * 0x1p-100f * 0x1p-49f, tiny = float(int32_t(bits)) * unit;
  const float scaled = bits < 0x800000u ? as_float(as_bits(tiny) | (as_bits(f) & 0x80000000u)) : f * m;
  constexpr float kMax = Fp8<kOut>::kMax;  // rounded down, a scale leaves up to twice as much
  return fp8_from_scaled<kOut>(scaled > kMax ? kMax : scaled < -kMax ? -kMax : scaled);
}

template <class In, Fp8Type kOut, class Scale = ScaleF32>
Scale quantize_row(const typename In::Bits* __restrict x, int64_t K, bool rule, uint8_t* __restrict q) {
  Magnitude<In> amax = 0;
  for (int64_t k = 0; k < K; ++k) amax = std::max(amax, magnitude<In>(x[k]));
  const Scale s = scale_of<In, kOut, Scale>(amax, rule);
  if (s.multiplier != s.multiplier) std::memset(q, Fp8<kOut>::kNan, K);
  else for (int64_t k = 0; k < K; ++k) q[k] = cast<In, kOut, Scale>(x[k], s.multiplier);
  return s;
}

// row_of(r) is row r's first element; q is contiguous.
template <class In, Fp8Type kOut, class RowOf>
void rowwise_loop(RowOf row_of, int64_t rows, int64_t K, bool pow2, uint8_t* q, float* scale) {
  parallel(rows, rows * K, [=](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      scale[r] = quantize_row<In, kOut>(row_of(r), K, pow2, q + r * K).dequant();
  });
}

// ---- columns: strips of 64, whose tiles are cast row by row and then transposed 8 by 8 ----------------------
constexpr int kStrip = 64, kTileRows = 64;

// Rows of 8 bytes to columns: t[i] becomes the bytes i of all. Three exchanges of ever smaller blocks.
inline void transpose8(uint64_t (&t)[8]) {
  auto exchange = [&t](int rows, uint64_t mask) {
    for (int i = 0; i < 8; ++i) {
      if (i & rows) continue;
      const uint64_t moved = ((t[i] >> (8 * rows)) ^ t[i + rows]) & mask;
      t[i] ^= moved << (8 * rows);
      t[i + rows] ^= moved;
    }
  };
  exchange(4, 0x00000000ffffffffu);
  exchange(2, 0x0000ffff0000ffffu);
  exchange(1, 0x00ff00ff00ff00ffu);
}

// row_of(r): the first element of row r of the group, in the strip.
template <class In, Fp8Type kOut, class Scale, class RowOf>
void cast_tile(RowOf row_of, int64_t first, int rows, int columns, const float* __restrict m,
               uint8_t* __restrict q_t, int64_t q_t_stride) {
  alignas(64) uint8_t q[kTileRows][kStrip];
  for (int r = 0; r < rows; ++r) {
    const typename In::Bits* __restrict row = row_of(first + r);
    for (int c = 0; c < columns; ++c) q[r][c] = cast<In, kOut, Scale>(row[c], m[c]);
  }
  for (int c0 = 0; c0 < columns; c0 += 8)
    for (int r0 = 0; r0 < rows; r0 += 8) {  // what lies beyond rows and columns is transposed along, but not stored
      uint64_t t[8];
      for (int i = 0; i < 8; ++i) std::memcpy(&t[i], &q[r0 + i][c0], 8);
      transpose8(t);
      uint8_t* out = q_t + c0 * q_t_stride + r0;
      if (c0 + 8 <= columns && r0 + 8 <= rows) {
        for (int i = 0; i < 8; ++i) std::memcpy(out + i * q_t_stride, &t[i], 8);
      } else {
        for (int i = 0; i < std::min(8, columns - c0); ++i)
          std::memcpy(out + i * q_t_stride, &t[i], std::min(8, rows - r0));
      }
    }
}

struct GroupRows {
  int64_t first;    // as row_of wants it
  int64_t rows;
  int64_t q_t;      // offset of its first byte in row 0 of the transposed output, or its first row of one in place
  int64_t scale_t;  // offset of its scales
};

// Multipliers of the columns of a strip, and their scales: store(c, scale).
template <class In, Fp8Type kOut, class Scale, class RowOf, class StoreScale>
void scale_strip(RowOf row_of, int64_t rows, int columns, bool rule, float* __restrict m, StoreScale store) {
  Magnitude<In> amax[kStrip] = {};
  for (int64_t r = 0; r < rows; ++r) {
    const typename In::Bits* __restrict row = row_of(r);
    for (int c = 0; c < columns; ++c) amax[c] = std::max(amax[c], magnitude<In>(row[c]));
  }
  for (int c = 0; c < columns; ++c) {
    const Scale s = scale_of<In, kOut, Scale>(amax[c], rule);
    m[c] = s.multiplier;
    store(c, s.stored());
  }
}
// The strip's bytes, transposed.
template <class In, Fp8Type kOut, class Scale = ScaleF32, class RowOf>
void cast_strip_transposed(RowOf row_of, int64_t rows, int columns, const float* __restrict m,
                           uint8_t* __restrict q_t, int64_t q_t_stride) {
  for (int64_t r = 0; r < rows; r += kTileRows)
    cast_tile<In, kOut, Scale>(row_of, r, int(std::min<int64_t>(kTileRows, rows - r)), columns, m, q_t + r, q_t_stride);
  for (int c = 0; c < columns; ++c)
    if (m[c] != m[c]) std::memset(q_t + c * q_t_stride, Fp8<kOut>::kNan, rows);
}

// Columns of every group: store_scale(g, k, scale) of each, and store(g, k, columns, row_of, multipliers) of each
// strip. Strips are the outer index of the work, so that threads share even a single group. row_of(first, r) is the
// first element of row r of the group that begins at `first`.
template <class In, Fp8Type kOut, class Scale = ScaleF32, class RowOf, class StoreScale, class Store>
void strips_loop(RowOf row_of, const std::vector<GroupRows>& groups, int64_t K, bool rule, StoreScale store_scale,
                 Store store) {
  const int64_t E = int64_t(groups.size());
  int64_t rows = E;
  for (const GroupRows& g : groups) rows += g.rows;
  parallel(ceil_div<int64_t>(K, kStrip) * E, rows * K, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const GroupRows& g = groups[unit % E];
      const int64_t k = unit / E * kStrip;
      const int columns = int(std::min<int64_t>(kStrip, K - k));
      auto row_of_strip = [&, k](int64_t r) { return row_of(g.first, r) + k; };
      float m[kStrip] = {};
      scale_strip<In, kOut, Scale>(row_of_strip, g.rows, columns, rule, m,
                                   [&](int c, auto scale) { store_scale(g, k + c, scale); });
      store(g, k, columns, row_of_strip, m);
    }
  });
}
// Transposed; bytes of q_t that belong to no row are left alone.
template <class In, Fp8Type kOut, class Scale, class RowOf, class StoreScale>
void transposed_loop(RowOf row_of, const std::vector<GroupRows>& groups, int64_t K, bool rule, uint8_t* q_t,
                     int64_t q_t_stride, StoreScale store_scale) {
  strips_loop<In, kOut, Scale>(row_of, groups, K, rule, store_scale,
                               [=](const GroupRows& g, int64_t k, int columns, auto row_of_strip, const float* m) {
                                 cast_strip_transposed<In, kOut, Scale>(row_of_strip, g.rows, columns, m,
                                                                        q_t + g.q_t + k * q_t_stride, q_t_stride);
                               });
}
template <class In, Fp8Type kOut, class RowOf>
void colwise_loop(RowOf row_of, const std::vector<GroupRows>& groups, int64_t K, bool pow2, uint8_t* q_t,
                  int64_t q_t_stride, float* scale_t) {
  transposed_loop<In, kOut, ScaleF32>(
      row_of, groups, K, pow2, q_t, q_t_stride,
      [=](const GroupRows& g, int64_t k, float scale) { scale_t[g.scale_t + k] = scale; });
}

// Rows of tokens: as they lie, or taken by index with a row of zeros where there is none.
template <class Bits>
struct TokenRows {
  const Bits* base;
  int64_t stride;
  const Bits* operator()(int64_t r) const { return base + r * stride; }
  const Bits* operator()(int64_t first, int64_t r) const { return (*this)(first + r); }
};
template <class Bits>
struct IndexedRows {
  const Bits* base;
  int64_t stride;
  RowIndex index;
  const Bits* zeros;  // K of them
  const Bits* operator()(int64_t p) const {
    const int64_t r = index.row(p);
    return r < 0 ? zeros : base + r * stride;
  }
  const Bits* operator()(int64_t first, int64_t r) const { return (*this)(first + r); }
};

// offs made safe, as the kernels' group table does it: exclusive ends, clamped and monotonic.
inline std::vector<int> safe_ends(const int* offs, int64_t E, int64_t rows) {
  std::vector<int> ends(E);
  int previous = 0;
  for (int64_t e = 0; e < E; ++e) ends[e] = previous = std::max(previous, clamp_offset(offs[e], int(rows)));
  return ends;
}
// Groups of token rows and their places in the padded layout, K scales each; writes padded_offs.
inline std::vector<GroupRows> token_groups(const int* offs, int64_t E, int64_t rows, int64_t align, int64_t K,
                                           int* padded_offs) {
  std::vector<GroupRows> groups(E);
  int64_t start = 0, position = 0;
  for (int64_t e = 0; e < E; ++e) {
    const int64_t end = std::max<int64_t>(start, clamp_offset(offs[e], int(rows)));
    groups[e] = {start, end - start, position, e * K};
    position += round_up(end - start, align);
    padded_offs[e] = int(position);
    start = end;
  }
  return groups;
}

}  // namespace moe_fp8
