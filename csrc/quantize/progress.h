// Two kernels that read the same rows of x side by side, one along columns and one along rows, keep in step: what
// either has read, the other finds in the L2. Each tells through memory how many rows it has come past, and waits for
// the other where it is too far ahead. No result depends on it, and every wait ends: nothing says that the other runs.
#pragma once
#include "platform/mailbox.h"
#include "quantize/geometries.h"

namespace moe_fp8 {

struct Pace {
  uint32_t* past;  // rows that the columns and the rows have come past, zero before both begin; null: nobody waits
  uint32_t ahead;  // rows that one may have come past before the other
};
enum class Walker { kColumns, kRows };

constexpr int64_t kMostAhead = 1 << 20;  // bytes of x
constexpr int kPaceLooks = 256;          // at the other, until a wait ends: some 100 us

inline Pace pace_of(const QuantizeParams& p, Beside beside) {
  if (beside != Beside::kInStep) return {};
  return {reinterpret_cast<uint32_t*>(p.scratch), uint32_t(ceil_div(kMostAhead, row_bytes(p)))};
}

MOE_DEVICE void tell_pace(const Pace& p, Walker mine, uint32_t row) {
  if (p.past) atomicMax(p.past + int(mine), row);
}
// Where the other is: to be asked some time before the wait, for that takes as long as a read of x.
MOE_DEVICE uint32_t other_pace(const Pace& p, Walker mine) {
  return p.past ? peek_word(p.past + 1 - int(mine)) : 0;
}
// Who has told nothing is not waited for. False: the other stands where it stood when `seen` was.
MOE_DEVICE bool keep_pace(const Pace& p, Walker mine, uint32_t row, uint32_t seen) {
  const uint32_t first = seen;
  for (int i = 0; seen > 0 && row > seen && row - seen > p.ahead; ++i) {
    if (i == kPaceLooks) return seen > first;
    seen = other_pace(p, mine);
  }
  return true;
}

}  // namespace moe_fp8
