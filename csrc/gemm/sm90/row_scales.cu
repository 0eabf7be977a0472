#include "gemm/sm90/kernel.h"

namespace moe_fp8::sm90 {

int launch_row_scales(const Args& args, bool groups_of_sum, bool out_float32, void* stream) {
  return groups_of_sum ? launch_with<Grouped::kSum, Scales::kRows>(args, out_float32, stream)
                       : launch_with<Grouped::kRows, Scales::kRows>(args, out_float32, stream);
}

}  // namespace moe_fp8::sm90
