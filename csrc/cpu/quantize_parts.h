// Parts of the quantizers' loops: elements, rows and panels of columns. They are written so that compilers vectorize
// them.
#pragma once
#include <cstring>
#include <type_traits>
#include <vector>

#include "numerics/scale.h"
#include "quantize/quantize.h"

namespace moe_fp8 {

// ---- elements ------------------------------------------------------------------------------------------------------
// |x| as an integer, where finite < Inf < NaN. It is signed, because SSE2 has no unsigned 16-bit maximum or comparison.
template <class In>
using Magnitude = std::make_signed_t<typename In::Bits>;
template <class In>
Magnitude<In> magnitude(typename In::Bits bits) { return bits & typename In::Bits(In::kMagnitudeMask); }
template <class In>
bool is_finite(Magnitude<In> magnitude) { return magnitude < Magnitude<In>(In::kInfinity); }
// second: whether the rounding is second_rounding() of the type of scales.
template <class In, Fp8Type kOut, class Scale>
auto scale_of(Magnitude<In> amax, bool second) {
  return Scale::template from_amax<kOut>(as_bits(In::to_float(amax)), second);
}

// Scales over the batch come from finite values only: a value that is not finite becomes NaN, and no other value does.
struct BatchScale : ScaleF32 {};

// Casts x times the multiplier m of its block, which is not NaN.
template <class In, Fp8Type kOut, class Scale>
uint8_t cast(typename In::Bits x, float m) {
  const float scaled = In::to_float(x) * m;
  if constexpr (std::is_same_v<Scale, BatchScale>) {
    // A mask, because compilers do not vectorize a branch here.
    const int32_t finite = (int32_t(as_bits(In::to_float(x)) & 0x7fffffffu) - 0x7f800000) >> 31;
    return uint8_t((fp8_from_scaled<kOut>(scaled) & finite) | (Fp8<kOut>::kNan & ~finite));
  }
  if constexpr (std::is_same_v<Scale, ScaleF32>) return fp8_from_scaled<kOut>(scaled);
  constexpr float kMax = Fp8<kOut>::kMax;  // if the E8M0 scale was rounded down, `scaled` is up to twice this
  return fp8_from_scaled<kOut>(scaled > kMax ? kMax : scaled < -kMax ? -kMax : scaled);
}

// Casts n elements of a row that share the multiplier m.
template <class In, Fp8Type kOut, class Scale>
void cast_row(const typename In::Bits* __restrict x, int64_t n, float m, uint8_t* __restrict q) {
  if (m != m) std::memset(q, Fp8<kOut>::kNan, n);
  else for (int64_t k = 0; k < n; ++k) q[k] = cast<In, kOut, Scale>(x[k], m);
}

// Quantizes n elements of a row that share a scale.
template <class In, Fp8Type kOut, class Scale>
Scale quantize_row(const typename In::Bits* __restrict x, int64_t n, bool second, uint8_t* __restrict q) {
  Magnitude<In> amax = 0;
  for (int64_t k = 0; k < n; ++k) amax = std::max(amax, magnitude<In>(x[k]));
  const Scale s = scale_of<In, kOut, Scale>(amax, second);
  cast_row<In, kOut, Scale>(x, n, s.multiplier, q);
  return s;
}

// ---- rows of x -----------------------------------------------------------------------------------------------------
// rows(e, r): row r of expert e. Without experts, e is 0.
template <class Bits>
class Rows {
 public:
  explicit Rows(const QuantizeParams& p)
      : base_(static_cast<const Bits*>(p.x)), row_stride_(p.row_stride), group_stride_(p.group_stride),
        index_(p.index), zeros_(p.index.at && p.rows ? p.K : 0) {}
  const Bits* operator()(int64_t e, int64_t r) const {
    if (index_.at == nullptr) return base_ + e * group_stride_ + r * row_stride_;
    const int64_t row = index_.row(r);
    return row < 0 ? zeros_.data() : base_ + row * row_stride_;
  }

 private:
  const Bits* base_;
  int64_t row_stride_, group_stride_;
  RowIndex index_;
  std::vector<Bits> zeros_;
};

// Rows of an expert from row `first` and column `column` on. Several callers pass this one type to the functions below,
// so the compiler makes one instance of these functions and not one for the lambda of each caller.
template <class Bits>
struct PanelRows {
  const Rows<Bits>& rows;
  int64_t expert, first, column;
  const Bits* operator()(int64_t r) const { return rows(expert, first + r) + column; }
};

// ---- panels of 64 columns: their tiles are cast row by row, then transposed 8 by 8 ---------------------------------
constexpr int kPanel = 64, kTileRows = 64;

// Transposes 8 x 8 bytes: byte j of t[i] and byte i of t[j] change places. It exchanges 4 x 4, then 2 x 2, then 1 x 1
// blocks.
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

// Casts `rows` rows of a panel from row `first` on. row_of(r): the first element of row r in the panel. m: multipliers
// of the columns.
template <class In, Fp8Type kOut, class Scale, class RowOf>
void cast_tile(RowOf row_of, int64_t first, int rows, int columns, const float* __restrict m,
               uint8_t* __restrict q_t, int64_t q_t_stride) {
  alignas(64) uint8_t q[kTileRows][kPanel];
  for (int r = 0; r < rows; ++r) {
    const typename In::Bits* __restrict row = row_of(first + r);
    for (int c = 0; c < columns; ++c) q[r][c] = cast<In, kOut, Scale>(row[c], m[c]);
  }
  for (int c0 = 0; c0 < columns; c0 += 8)
    for (int r0 = 0; r0 < rows; r0 += 8) {  // bytes beyond rows and columns are transposed too, but not stored
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
// Casts all rows of a panel. A column whose multiplier is NaN becomes NaN.
template <class In, Fp8Type kOut, class Scale, class RowOf>
void cast_panel(RowOf row_of, int64_t rows, int columns, const float* __restrict m, uint8_t* __restrict q_t,
                int64_t q_t_stride) {
  for (int64_t r = 0; r < rows; r += kTileRows)
    cast_tile<In, kOut, Scale>(row_of, r, int(std::min<int64_t>(kTileRows, rows - r)), columns, m, q_t + r, q_t_stride);
  for (int c = 0; c < columns; ++c)
    if (m[c] != m[c]) std::memset(q_t + c * q_t_stride, Fp8<kOut>::kNan, rows);
}
template <class In, class RowOf>
Magnitude<In> amax_of_square(RowOf row_of, int64_t rows, int64_t columns) {
  Magnitude<In> amax = 0;
  for (int64_t r = 0; r < rows; ++r) {
    const typename In::Bits* __restrict row = row_of(r);
    for (int64_t c = 0; c < columns; ++c) amax = std::max(amax, magnitude<In>(row[c]));
  }
  return amax;
}
// Computes the multipliers m of a panel's columns. Calls store(c, scale) for each column.
template <class In, Fp8Type kOut, class Scale, class RowOf, class StoreScale>
void scale_panel(RowOf row_of, int64_t rows, int columns, bool second, float* __restrict m, StoreScale store) {
  Magnitude<In> amax[kPanel] = {};
  for (int64_t r = 0; r < rows; ++r) {
    const typename In::Bits* __restrict row = row_of(r);
    for (int c = 0; c < columns; ++c) {
      const Magnitude<In> value = magnitude<In>(row[c]);
      const bool counts = !std::is_same_v<Scale, BatchScale> || is_finite<In>(value);
      amax[c] = std::max(amax[c], counts ? value : Magnitude<In>(0));
    }
  }
  for (int c = 0; c < columns; ++c) {
    const auto s = scale_of<In, kOut, Scale>(amax[c], second);
    m[c] = s.multiplier;
    store(c, s.stored());
  }
}

}  // namespace moe_fp8
