#include "kernels/quantize_rowwise.h"

#include "kernels/quantize_rows.h"

namespace moe_fp8 {

int quantize_rowwise(const QuantizeRowwiseParams& p, void* stream) { return launch_rows<Rows::kInPlace>(p, stream); }

}  // namespace moe_fp8
