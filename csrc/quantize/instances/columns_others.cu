#include "quantize/columns.h"

namespace moe_fp8 {

template int launch_columns<F16>(const QuantizeParams&, RowOverlap, void*);
template int launch_columns<F32>(const QuantizeParams&, RowOverlap, void*);
template int launch_columns<Generic>(const QuantizeParams&, RowOverlap, void*);

}  // namespace moe_fp8
