// Stackful coroutines: each has a stack and the registers that a call preserves.
#pragma once
#include <cstddef>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace simt {

constexpr size_t kStackBytes = 64 << 10;

#if defined(__x86_64__)

// swapcontext makes two system calls per switch, and a test run makes tens of millions of switches.
extern "C" void simt_switch(void** save_sp, void* load_sp);
asm(R"(
.text
.weak simt_switch
.type simt_switch, @function
simt_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");

class Context {
 public:
  void prepare(void* stack_end, void (*entry)()) {
    void** sp = static_cast<void**>(stack_end);
    *--sp = nullptr;  // the place of a return address, so that `entry` has the stack alignment of a call
    *--sp = reinterpret_cast<void*>(entry);
    for (int saved = 0; saved < 6; ++saved) *--sp = nullptr;
    sp_ = sp;
  }
  void switch_to(Context& other) { simt_switch(&sp_, other.sp_); }

 private:
  void* sp_ = nullptr;
};

#else

class Context {
 public:
  void prepare(void* stack_end, void (*entry)()) {
    getcontext(&context_);
    context_.uc_stack.ss_sp = static_cast<char*>(stack_end) - kStackBytes;
    context_.uc_stack.ss_size = kStackBytes;
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
  }
  void switch_to(Context& other) { swapcontext(&context_, &other.context_); }

 private:
  ucontext_t context_;
};

#endif

}  // namespace simt
