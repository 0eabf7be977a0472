#include "gemm/mma/kernel.h"

namespace moe_fp8::mma {

template int launch_gemm<kMxBlock>(Types types, const ScaledGroupedMmParams& p, void* stream);

}  // namespace moe_fp8::mma
