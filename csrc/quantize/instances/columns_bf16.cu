#include "quantize/columns.h"

namespace moe_fp8 {

template int launch_strips<BF16>(const QuantizeParams&, Beside, void*);

}  // namespace moe_fp8
