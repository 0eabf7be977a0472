#include "quantize/columns.h"

namespace moe_fp8 {

template int launch_strips<F16>(const QuantizeParams&, Beside, void*);
template int launch_strips<F32>(const QuantizeParams&, Beside, void*);
template int launch_strips<Generic>(const QuantizeParams&, Beside, void*);

}  // namespace moe_fp8
