// Progress throttle: two concurrent kernels read the same rows of x, one along columns and one along rows. Each posts
// how many rows it has passed, and waits while it is too far ahead of its peer, so that the second reader finds x in
// the L2. No result depends on it. Every wait is bounded, because the peer may not be resident.
#pragma once
#include "platform/mailbox.h"
#include "quantize/geometries.h"
#include "quantize/policy.h"

namespace moe_fp8 {

struct ProgressThrottle {
  uint32_t* passed;   // [2] rows passed by the column kernel and by the row kernel, zeroed before; null: no throttle
  uint32_t max_lead;  // rows by which one kernel may be ahead
};
enum class PeerKernel { kColumns, kRows };

inline ProgressThrottle throttle_of(const QuantizeParams& p, RowOverlap overlap) {
  if (overlap != RowOverlap::kThrottled) return {};
  return {reinterpret_cast<uint32_t*>(p.scratch), uint32_t(ceil_div(kMaxLeadBytes, row_bytes(p)))};
}

MOE_DEVICE void post_progress(const ProgressThrottle& p, PeerKernel self, uint32_t row) {
  if (p.passed) atomicMax(p.passed + int(self), row);
}
// The peer's progress. Read it some time before the wait: the read takes as long as one of x.
MOE_DEVICE uint32_t peer_progress(const ProgressThrottle& p, PeerKernel self) {
  return p.passed ? peek_word(p.passed + 1 - int(self)) : 0;
}
// Waits until the peer is at most max_lead rows behind `row`, for at most kMaxPolls polls. A peer that has posted
// nothing may not be resident: it is not waited for. Returns false if the peer has not moved since `seen` was read.
MOE_DEVICE bool wait_for_peer(const ProgressThrottle& p, PeerKernel self, uint32_t row, uint32_t seen) {
  const uint32_t first = seen;
  for (int i = 0; seen > 0 && row > seen && row - seen > p.max_lead; ++i) {
    if (i == kMaxPolls) return seen > first;
    seen = peer_progress(p, self);
  }
  return true;
}

}  // namespace moe_fp8
