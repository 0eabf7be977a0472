#include "kernels/quantize_rowcol.h"

#include "kernels/quantize_both.h"

namespace moe_fp8 {

int quantize_rowcol(const QuantizeRowcolParams& p, void* stream) {
  return quantize_both<TokenGroups>(p, 1, p.E ? p.rows / p.E : 0, stream);
}
int quantize_weight(const QuantizeRowcolParams& p, void* stream) {
  return quantize_both<ExpertGroups>(p, p.E, p.rows, stream);
}

}  // namespace moe_fp8
