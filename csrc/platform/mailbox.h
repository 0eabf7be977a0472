// Mailbox: 32-bit messages between blocks through global memory. Zero means empty; bit 31 means full. The sender may
// not be resident, so a receiver must never spin without bound.
#pragma once
#include <cstdint>

#include "platform/compiler.h"

namespace moe_fp8 {

constexpr uint32_t kFullBit = 1u << 31;  // a message loses this bit

MOE_DEVICE void post_word(uint32_t* mailbox, uint32_t message) {
#if defined(MOE_CUDA)
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(mailbox), "r"(message | kFullBit) : "memory");
#else
  __atomic_store_n(mailbox, message | kFullBit, __ATOMIC_RELAXED);
#endif
}
// Returns the message with its full bit, or 0.
MOE_DEVICE uint32_t peek_word(const uint32_t* mailbox) {
#if defined(MOE_CUDA)
  uint32_t word;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(mailbox) : "memory");
  return word;
#else
  return __atomic_load_n(mailbox, __ATOMIC_RELAXED);
#endif
}
// Reads the mailbox once. Returns whether it is full, and then the message without its full bit.
MOE_DEVICE bool poll_word(const uint32_t* mailbox, uint32_t& message) {
  const uint32_t word = peek_word(mailbox);
  message = word & ~kFullBit;
  return word & kFullBit;
}

}  // namespace moe_fp8
