#include "gemm/mma/grouped_gemm.h"

#include "gemm/mma/traits.h"
#include "platform/device.h"

namespace moe_fp8::mma {
namespace {

Types types_of(const ScaledGroupedMmParams& p) {
  const bool fnuz = native_fnuz();
  if (p.b_type != (fnuz ? Fp8Type::kE4M3FNUZ : Fp8Type::kE4M3FN)) return Types::kAny;
  if (p.a_type == p.b_type) return Types::kE4M3;
  return p.a_type == (fnuz ? Fp8Type::kE5M2FNUZ : Fp8Type::kE5M2) ? Types::kE5M2 : Types::kAny;
}

// If mma.sync takes FP8, the precision of its sums is not published. Products of 16-bit floats are summed in float32.
bool may_sum_in_fewer_bits() { return compute_capability() == 89 || compute_capability() >= 120; }

}  // namespace

int grouped_gemm(const ScaledGroupedMmParams& p, bool fast, void* stream) {
  if (p.M == 0 || p.N == 0 || (p.k_grouped && p.E == 0)) return 0;
  switch (p.scale_a.block_size) {
    case 0: return launch_gemm<0>(fast || !may_sum_in_fewer_bits() ? types_of(p) : Types::kAny, p, stream);
    case kBlock: return launch_gemm<kBlock>(types_of(p), p, stream);
    default: return launch_gemm<kMxBlock>(types_of(p), p, stream);
  }
}

}  // namespace moe_fp8::mma
