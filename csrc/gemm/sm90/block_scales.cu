#include "gemm/sm90/kernel.h"

namespace moe_fp8::sm90 {

int launch_block_scales(const Args& args, bool out_float32, void* stream) {
  return launch_with<Grouped::kRows, Scales::kBlocks>(args, out_float32, stream);
}

}  // namespace moe_fp8::sm90
