// Queries and calls for the bindings in ops/, which include no CUDA header.
#pragma once
#include <cstdint>

namespace moe_fp8 {

bool native_fnuz();        // the device's fp8 instructions are FNUZ, so the default dtype is float8_e4m3fnuz
int compute_capability();  // CUDA: 90 for Hopper; other vendors: 0

// Returns 0 or the runtime's error code.
int fill_bytes_async(void* p, int byte, int64_t bytes, void* stream);
const char* error_string(int code);

}  // namespace moe_fp8
