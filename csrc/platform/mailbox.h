// Notes: words that the blocks of one grid send one another through memory, which is zero before it begins. Nothing
// says that the sender runs while the receiver waits.
#pragma once
#include <cstdint>

#include "platform/compiler.h"

namespace moe_fp8 {

constexpr uint32_t kFullBit = 1u << 31;  // the word is there; what is sent loses this bit

MOE_DEVICE void post_word(uint32_t* to, uint32_t word) {
#if defined(MOE_CUDA)
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(word | kFullBit) : "memory");
#else
  __atomic_store_n(to, word | kFullBit, __ATOMIC_RELAXED);
#endif
}
MOE_DEVICE uint32_t peek_word(const uint32_t* from) {
#if defined(MOE_CUDA)
  uint32_t word;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
  return word;
#else
  return __atomic_load_n(from, __ATOMIC_RELAXED);
#endif
}
// One look at it; false: it is not there yet.
MOE_DEVICE bool poll_word(const uint32_t* from, uint32_t& word) {
  const uint32_t seen = peek_word(from);
  word = seen & ~kFullBit;
  return seen & kFullBit;
}

}  // namespace moe_fp8
