#include "kernels/permute_quantize.h"

#include "kernels/quantize_both.h"

namespace moe_fp8 {

int permute_pad_quantize_rowwise(const QuantizeRowwiseParams& p, void* stream) {
  return launch_rows<Rows::kByIndex>(p, stream);
}
int permute_pad_quantize_rowcol(const QuantizeRowcolParams& p, void* stream) {
  return quantize_both<IndexedGroups>(p, 1, p.E ? p.rows / p.E : 0, stream);
}

}  // namespace moe_fp8
