#include "quantize/columns.h"

namespace moe_fp8 {

template int launch_columns<BF16>(const QuantizeParams&, RowOverlap, void*);

}  // namespace moe_fp8
