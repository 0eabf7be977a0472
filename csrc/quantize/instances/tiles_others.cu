#include "quantize/tiles.h"

namespace moe_fp8 {

template int launch_tiles<ScaleType::kF32, F16>(const QuantizeParams&, void*);
template int launch_tiles<ScaleType::kE8M0, F16>(const QuantizeParams&, void*);
template int launch_tiles<ScaleType::kF32, F32>(const QuantizeParams&, void*);
template int launch_tiles<ScaleType::kE8M0, F32>(const QuantizeParams&, void*);

}  // namespace moe_fp8
