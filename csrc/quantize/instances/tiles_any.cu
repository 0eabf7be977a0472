#include "quantize/tiles.h"

namespace moe_fp8 {

template int launch_tiles<ScaleType::kF32, Generic>(const QuantizeParams&, void*);
template int launch_tiles<ScaleType::kE8M0, Generic>(const QuantizeParams&, void*);

}  // namespace moe_fp8
