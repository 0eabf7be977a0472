// dequantize: q [E, rows, K] fp8, a scale for every block of a row -> out [E, rows, K], contiguous.
//
//   out[e, r, k] = RN(RN32(q[e, r, k] * scale(e, r, k))), to nearest even in out's dtype
//
// Groups::kNone:     block k / block_size of row r; rows may share scales (tiles of 128 x 128)
// Groups::kRows:     E = 1; offs [groups] are ends of groups of rows. Row i of group g has the scales of row
//                    sum_{f<g} round_up(size_f, 128) + i; rows behind the last group are zero
// Groups::kColumns:  E = 1; offs [groups] are ends of groups of columns. Every group begins a new block. Its number is
//                    sum_{f<g} round_up(size_f, 128) / block_size for group g, or g if block_size is 0. In the layout
//                    kE8M0, groups do not matter: column k has block k / block_size. Columns behind the last group
//                    are zero
//
// group_stride and row_stride of q are in elements. Any size and alignment is allowed. offs may hold anything; they are
// rounded down to `multiple`.
//
// for_quads: for a bfloat16 out and a K that is a multiple of 16. Element k of every 16 lies at in_quads(k), so that
// thread q of a quad multiplies the four elements from 4 q on (gemm/sm90/pipeline/mainloop_mx.h).
#pragma once
#include "numerics/floats.h"
#include "numerics/operand_scales.h"

namespace moe_fp8 {

struct DequantizeParams {
  const uint8_t* q;
  OperandScales scale;
  const int* offs;
  void* out;
  int64_t E, rows, K;
  int64_t group_stride, row_stride;
  int num_groups;
  Groups groups;
  Fp8Type type;
  InType out_type;
  bool for_quads = false;
  int multiple = 1;
};

MOE_HD constexpr int in_quads(int k) { return k / 4 * 2 + k % 2 + k / 2 % 2 * 8; }

int dequantize(const DequantizeParams& p, void* stream);
void dequantize_cpu(const DequantizeParams& p);

}  // namespace moe_fp8
