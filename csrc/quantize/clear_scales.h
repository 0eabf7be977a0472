// Clears the parts of blocked scales that belong to no scaling block.
#pragma once
#include "platform/memory.h"

namespace moe_fp8 {

// Zeroes the bytes [from, to), shared by `threads` threads. `from` is a multiple of 16, `to` a multiple of 4.
MOE_DEVICE void clear_scales(uint8_t* scale, int64_t from, int64_t to, int64_t thread, int64_t threads) {
  for (int64_t i = from + 16 * thread; i + 16 <= to; i += 16 * threads)
    store_stream(reinterpret_cast<Vec16*>(scale + i), Vec16{});
  const int64_t rest = to - (to - from) % 16 + 4 * thread;
  if (rest < to) store_stream(reinterpret_cast<uint32_t*>(scale + rest), 0u);
}

}  // namespace moe_fp8
