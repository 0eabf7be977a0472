#include "gemm/sm90/kernel.h"

namespace moe_fp8::sm90 {

template int launch_gemm<Scales::kBlocks, Fp8Type::kE4M3FN, StoreLowRank>(const ScaledGroupedMmParams&, int*, void*);
template int launch_gemm<Scales::kBlocks, Fp8Type::kE5M2, StoreLowRank>(const ScaledGroupedMmParams&, int*, void*);

}  // namespace moe_fp8::sm90
