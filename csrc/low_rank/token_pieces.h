// The 16 bytes that a lane loads of a row of x: 8 columns of bfloat16, or 16 columns of FP8 and their scale.
#pragma once
#include "low_rank/tokens.h"
#include "platform/mma.h"
#include "primitives/elements.h"
#include "primitives/operand.h"

namespace moe_fp8 {

// Element w of a row of x as a float, for kernels that take any strides.
MOE_DEVICE float element(const TokenRows& x, int64_t token, int64_t w) {
  if (!x.is_fp8) return BF16::to_float(x.bfloat16(token)[w]);
  const float scale = x.scales(token)[x.scale_at(w)];
  return BF16::to_float(BF16::from_float(decode(x.type, x.fp8(token)[w]) * scale));
}

struct Bf16Piece {
  static constexpr int kColumns = 8, kEights = kColumns / 8;
  using Row = const uint16_t*;
  Vec16 bytes;

  static MOE_DEVICE Row row(const TokenRows& x, int64_t token) { return x.bfloat16(token); }
  static MOE_DEVICE Bf16Piece load(const TokenRows&, Row row, int64_t column) {
    return {*reinterpret_cast<const Vec16*>(row + column)};
  }
  MOE_DEVICE const Vec16& eight(int) const { return bytes; }  // eight columns in bfloat16
};

template <bool kE5M2>
struct Fp8Piece {
  static constexpr int kColumns = 16, kEights = kColumns / 8;
  struct Row { const uint8_t* q; const float* scales; };
  Vec16 bytes;
  float scale;

  static MOE_DEVICE Row row(const TokenRows& x, int64_t token) { return {x.fp8(token), x.scales(token)}; }
  static MOE_DEVICE Fp8Piece load(const TokenRows& x, Row row, int64_t column) {
    return {*reinterpret_cast<const Vec16*>(row.q + column), row.scales[x.scale_at(column)]};
  }
  MOE_DEVICE Vec16 eight(int i) const {
    Vec16 columns;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const uint32_t four = bytes.w[2 * i + w / 2];
      const int at = w % 2 * 2;
      columns.w[w] = packed_bf16(decode_native<kE5M2>(four, at) * scale, decode_native<kE5M2>(four, at + 1) * scale);
    }
    return columns;
  }
};

#if defined(MOE_MMA_SYNC)
// Whether rows consist of whole pieces at multiples of 16 bytes, in a type that the GPU converts.
inline bool has_pieces(const TokenRows& x, int64_t W) {
  if (x.is_fp8 && x.type != kNativeE4M3 && x.type != kNativeE5M2) return false;
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && (W | x.stride) % (x.is_fp8 ? 16 : 8) == 0;
}

// Calls function(piece) with a piece of x.
template <class F>
int dispatch_pieces(const TokenRows& x, const F& function) {
  if (!x.is_fp8) return function(Bf16Piece{});
  return x.type == kNativeE4M3 ? function(Fp8Piece<false>{}) : function(Fp8Piece<true>{});
}
#endif

}  // namespace moe_fp8
