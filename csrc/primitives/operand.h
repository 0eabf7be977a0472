// Reading quantized operands: decoding fp8, and finding scaling blocks.
#pragma once
#include "numerics/floats.h"
#include "numerics/operand_scales.h"
#include "primitives/cast.h"
#include "primitives/groups.h"

namespace moe_fp8 {

MOE_DEVICE float decode(Fp8Type type, uint8_t q) {
  switch (type) {
    case Fp8Type::kE4M3FN: return fp8_to_float<Fp8Type::kE4M3FN>(q);
    case Fp8Type::kE5M2: return fp8_to_float<Fp8Type::kE5M2>(q);
    case Fp8Type::kE4M3FNUZ: return fp8_to_float<Fp8Type::kE4M3FNUZ>(q);
    default: return fp8_to_float<Fp8Type::kE5M2FNUZ>(q);
  }
}

// Decodes byte i of a word of a native format; see kNativeE4M3.
template <bool kE5M2>
MOE_DEVICE float decode_native(uint32_t word, int i) {
  if constexpr (kImplementsFp8ToHalf) {
    uint32_t halves[2];
    fp8x4_to_f16x4<kE5M2>(word, halves);
    return half_to_float(halves[i / 2] >> (16 * (i % 2)) & 0xffffu);
  }
  return fp8_to_float<kE5M2 ? kNativeE5M2 : kNativeE4M3>(uint8_t(word >> (8 * i)));
}

// The scaling block of column `at` of K-group g. The table's positions were rounded up to kGroupScales.
MOE_DEVICE ColumnBlock block_of_group(const OperandScales& scales, const GroupTable& table, int g, int at) {
  if (scales.layout == ScaleLayout::kE8M0) return scales.block(0, table.row[g + 1], table.row[g] + at);
  const int first = scales.block_size ? table.pos[g] / scales.block_size : g;
  return scales.block(first, table.rows(g), at);
}

}  // namespace moe_fp8
