// Runs a grid: a pool of OS threads takes its blocks in order.
#pragma once
#include <dlfcn.h>
#include <signal.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <thread>
#include <vector>

#include "block.h"

namespace simt {

// If a device thread touches forbidden memory, or reaches undefined behaviour at a trap of the compiler, the launch
// ends instead of the process. The handler leaves on the fiber's own stack.
class FaultsToFailures {
 public:
  FaultsToFailures() {
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    for (int i = 0; i < kCount; ++i) sigaction(kSignals[i], &action, &previous_[i]);
  }
  ~FaultsToFailures() {
    for (int i = 0; i < kCount; ++i) sigaction(kSignals[i], &previous_[i], nullptr);
  }

 private:
  static constexpr int kCount = 4;
  static constexpr int kSignals[kCount] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
  struct sigaction previous_[kCount];

  static void on_fault(int signal, siginfo_t* info, void* context) {
    if (!current) {  // no fiber runs here: fault again, without a handler
      ::signal(signal, SIG_DFL);
      return;
    }
    const std::string why =
        signal == SIGFPE   ? "division by zero"
        : signal == SIGILL ? "undefined behaviour (misaligned access, index, shift or overflow)"
                           : current->fault_text(info->si_addr);
    current->fail(why + where(context));
  }

  static std::string where([[maybe_unused]] void* context) {
#if defined(__x86_64__)
    const greg_t pc = static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP];
    Dl_info module;
    if (dladdr(reinterpret_cast<void*>(pc), &module)) {
      char text[400];
      const auto offset = static_cast<unsigned long>(pc - reinterpret_cast<greg_t>(module.dli_fbase));
      snprintf(text, sizeof text, ", addr2line -Cfie %s 0x%lx", module.dli_fname, offset);
      return text;
    }
#endif
    return "";
  }
};

// Returns the error, or an empty string.
inline std::string run(Launch& launch, unsigned os_threads) {
  const FaultsToFailures guard;
  const auto worker = [&launch] {
    Block block(launch);
    for (uint64_t i; !launch.failed && (i = launch.next_block++) < launch.blocks();)
      block.run(dim3(i % launch.grid.x, i / launch.grid.x % launch.grid.y, i / launch.grid.x / launch.grid.y));
    current = nullptr;
  };
  // Never on the calling thread: its thread_locals may be the host code's.
  std::vector<std::thread> pool;
  for (unsigned i = 0; i < os_threads; ++i) pool.emplace_back(worker);
  for (std::thread& thread : pool) thread.join();
  return launch.error;
}

// `function()` runs in every thread of every block.
template <class F>
std::string run(dim3 grid, dim3 block, size_t shared_bytes, const F& function, unsigned cluster) {
  Launch launch{grid, block, shared_bytes, [](const void* f) { (*static_cast<const F*>(f))(); }, &function, cluster};
  const uint64_t cores = std::max(setting("SIMT_THREADS", std::thread::hardware_concurrency()), cluster);
  return run(launch, unsigned(std::min(cores, launch.blocks())));
}

}  // namespace simt
