// What the torch side asks of the current device and its runtime.
#pragma once
#include <cstdint>

namespace moe_fp8 {

bool native_fnuz();        // its fp8 instructions are FNUZ: the default format is float8_e4m3fnuz
int compute_capability();  // CUDA: 90 for Hopper; 0 on other vendors' devices

// 0, or the runtime's error code.
int fill_bytes_async(void* p, int byte, int64_t bytes, void* stream);
const char* error_string(int code);

}  // namespace moe_fp8
