#include "quantize/strips.h"

namespace moe_fp8 {

template int launch_strips<F16>(const QuantizeParams&, bool, void*);
template int launch_strips<F32>(const QuantizeParams&, bool, void*);
template int launch_strips<Any>(const QuantizeParams&, bool, void*);

}  // namespace moe_fp8
