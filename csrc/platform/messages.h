// Words that the blocks of one grid send one another through memory. The grid must run as one (Launch::together), and
// the words be zero before it begins.
#pragma once
#include <cstdint>

#include "platform/compiler.h"

namespace moe_fp8 {

constexpr uint32_t kSent = 1u << 31;  // the word is there; what is sent loses this bit

MOE_DEVICE void send_word(uint32_t* to, uint32_t word) {
#if defined(MOE_CUDA)
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(word | kSent) : "memory");
#else
  __atomic_store_n(to, word | kSent, __ATOMIC_RELAXED);
#endif
}
MOE_DEVICE uint32_t receive_word(const uint32_t* from) {
  uint32_t word;
  do {
#if defined(MOE_CUDA)
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
#else
    word = __atomic_load_n(from, __ATOMIC_RELAXED);
#endif
  } while (!(word & kSent));
  return word ^ kSent;
}

}  // namespace moe_fp8
