// permute_pad_quantize_rowwise, permute_pad_quantize_rowcol: quantize_rowwise and quantize_rowcol of rows that are
// taken from x by index on the way: row p of [P, K] is row index.row(p) of x, zeros where that is none. The permuted
// rows themselves are never written. Params are those ops' own, with `index` set; rows: P.
#pragma once
#include "kernels/quantize_rowcol.h"
#include "kernels/quantize_rowwise.h"

namespace moe_fp8 {

// 0, or the runtime's error code.
int permute_pad_quantize_rowwise(const QuantizeRowwiseParams& p, void* stream);
int permute_pad_quantize_rowcol(const QuantizeRowcolParams& p, void* stream);

}  // namespace moe_fp8
