#include "platform/device.h"

#include "platform/launch.h"

namespace moe_fp8 {

bool native_fnuz() { return device().native_fnuz; }
int compute_capability() { return device().sm; }
int fill_bytes_async(void* p, int byte, int64_t bytes, void* stream) {
  return fill_bytes(p, byte, size_t(bytes), stream);
}
const char* error_string(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

}  // namespace moe_fp8
