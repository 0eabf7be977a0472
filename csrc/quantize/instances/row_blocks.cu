#include "quantize/row_blocks.h"

namespace moe_fp8 {

template int launch_row_blocks<BF16>(const QuantizeParams&, void*);
template int launch_row_blocks<F16>(const QuantizeParams&, void*);
template int launch_row_blocks<F32>(const QuantizeParams&, void*);
template int launch_row_blocks<Generic>(const QuantizeParams&, void*);

}  // namespace moe_fp8
