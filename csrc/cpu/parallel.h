// Runs CPU loops on torch's threads.
#pragma once
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace moe_fp8 {

constexpr int64_t kGrainElements = 1 << 17;  // 0.1 ms: smaller shares gain nothing, and lose if cores are busy

// During its lifetime the thread computes with subnormals, whatever torch.set_flush_denormal() set. So results equal
// the results of other devices, and do not depend on the thread that computes them.
class KeepSubnormals {
 public:
  KeepSubnormals() : before_(mode()) { set_mode(before_ & ~kFlush); }
  ~KeepSubnormals() { set_mode(before_); }
  KeepSubnormals(const KeepSubnormals&) = delete;

 private:
#if defined(__SSE__)
  using Mode = unsigned;
  static constexpr Mode kFlush = 0x8040;  // flush subnormal results, and subnormal operands
  static Mode mode() { return _mm_getcsr(); }
  static void set_mode(Mode mode) { _mm_setcsr(mode); }
#elif defined(__aarch64__)
  using Mode = uint64_t;
  static constexpr Mode kFlush = 1 << 24;
  static Mode mode() {
    Mode mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void set_mode(Mode mode) { asm volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }
#else
  using Mode = int;
  static constexpr Mode kFlush = 0;
  static Mode mode() { return 0; }
  static void set_mode(Mode) {}
#endif
  Mode before_;
};

// Calls f(begin, end) for ranges that make up [0, n). The n items have `elements` elements in total.
template <class F>
void parallel(int64_t n, int64_t elements, const F& f) {
  auto run = [&f](int64_t begin, int64_t end) {
    const KeepSubnormals keep;
    f(begin, end);
  };
  if (n == 0) return;
  if (elements <= kGrainElements) return run(0, n);
  torch::stable::parallel_for(0, n, std::max<int64_t>(1, n * kGrainElements / elements), run);
}

}  // namespace moe_fp8
