// The part of the emulator that does not depend on a kernel: memory, blocks, launches, and faults of device code.
//
// Headers only declare these functions. Compiled in every kernel's object, they would take most of its compiler's time.
#include <hip/hip_runtime.h>

#include <dlfcn.h>
#include <link.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <stdexcept>
#include <thread>

namespace simt {

// ---- memory ---------------------------------------------------------------------------------------------------------
namespace {

// Mappings whose last page is inaccessible. Released mappings are kept for the next launch, because new pages cost a
// page fault each.
class Mappings {
 public:
  static Mappings& all() {
    static Mappings* const mappings = new Mappings;  // never destroyed, because threads may end in any order
    return *mappings;
  }
  unsigned char* take(size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (const auto found = free_.find(bytes); found != free_.end()) {
      unsigned char* const base = found->second;
      free_.erase(found);
      return base;
    }
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* const base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (base == MAP_FAILED) throw std::runtime_error("simt: out of memory");
    const size_t page = sysconf(_SC_PAGESIZE);
    mprotect(static_cast<unsigned char*>(base) + bytes - page, page, PROT_NONE);
    return static_cast<unsigned char*>(base);
  }
  void give_back(unsigned char* base, size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (free_.count(bytes) < kMostOfASize) free_.emplace(bytes, base);
    else munmap(base, bytes);
  }

 private:
  static constexpr size_t kMostOfASize = 16;
  std::mutex mutex_;
  std::multimap<size_t, unsigned char*> free_;
};

}  // namespace

GuardedPages::GuardedPages(size_t bytes) : bytes_((bytes + kSharedAlign - 1) / kSharedAlign * kSharedAlign) {
  const size_t page = sysconf(_SC_PAGESIZE);
  mapped_ = (bytes_ + page - 1) / page * page + page;
  base_ = Mappings::all().take(mapped_);
  end_ = base_ + mapped_ - page;
}
GuardedPages::~GuardedPages() { Mappings::all().give_back(base_, mapped_); }

ByteRange thread_locals_around(void* member) {
  struct Search {
    uintptr_t member;
    ByteRange found;
  } search{reinterpret_cast<uintptr_t>(member), {}};
  dl_iterate_phdr(
      [](dl_phdr_info* module, size_t, void* data) {
        Search& search = *static_cast<Search*>(data);
        for (int i = 0; i < module->dlpi_phnum; ++i) {
          const uintptr_t begin = reinterpret_cast<uintptr_t>(module->dlpi_tls_data);
          const size_t bytes = module->dlpi_phdr[i].p_memsz;
          if (module->dlpi_phdr[i].p_type != PT_TLS || search.member - begin >= bytes) continue;
          search.found = {module->dlpi_tls_data, bytes};
          return 1;
        }
        return 0;
      },
      &search);
  return search.found;
}

// ---- the state of a launch ------------------------------------------------------------------------------------------
std::string text(const dim3& d) {
  return std::to_string(d.x) + "," + std::to_string(d.y) + "," + std::to_string(d.z);
}

unsigned setting(const char* variable, unsigned otherwise) {
  const char* value = getenv(variable);
  return value ? unsigned(atoi(value)) : otherwise;
}

bool Launch::expired() const {
  timespec used;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
  return used.tv_sec >= seconds_at_most;
}

void Launch::fail(const std::string& why) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (!failed.exchange(true)) error = why;
}

// ---- a block --------------------------------------------------------------------------------------------------------
std::string Site::text() const {
  const char* slash = strrchr(file, '/');
  return std::string(what) + " at " + (slash ? slash + 1 : file) + ":" + std::to_string(line);
}

Block::Block(Launch& launch)
    : launch_(launch),
      fibers_(new Fiber[launch.threads()]),
      stacks_(kStackBytes * launch.threads()),
      shared_(launch.shared_bytes),
      statics_(thread_locals_around(&current)) {}
Block::~Block() = default;

void Block::run(dim3 index) {
  index_ = index;
  live_ = launch_.threads();
  poison_shared_memory();
  block_ = {};
  block_.members = live_;
  const uint64_t linear = index.x + launch_.grid.x * (index.y + uint64_t(launch_.grid.y) * index.z);
  if (launch_.cluster > 1) {
    cluster_ = &launch_.clusters[linear / launch_.cluster];
    cluster_->blocks[cluster_rank()] = this;
  }
  cluster_barriers_ = 0;
  for (unsigned w = 0; w * kWave < live_; ++w) {
    static_cast<Rendezvous&>(waves_[w]) = {};
    waves_[w].members = live_ - w * kWave < kWave ? live_ - w * kWave : kWave;
  }
  ready_ = {};
  const dim3 size = launch_.block;
  for (unsigned i = 0; i < live_; ++i) {
    Fiber& fiber = fibers_[i];
    fiber.linear = i;
    fiber.index = dim3(i % size.x, i / size.x % size.y, i / (size.x * size.y));
    fiber.waits_at = nullptr;
    fiber.begun.clear();
    fiber.in_team = 0;
    fiber.fenced = false;
    fiber.context.prepare(stacks_.end() - kStackBytes * i, [] { current->thread_main(); });
    ready_.push(&fiber, (index.x + index.y + index.z) % 2);
  }
  running_ = ready_.pop();
  home_.switch_to(running_->context);
  if (cluster_) cluster_->blocks[cluster_rank()] = nullptr;
}

unsigned Block::barrier_count(bool vote, const Site& site) {
  unsigned& votes = votes_[block_.round & 1];
  if (block_.arrived == 0) votes = 0;
  votes += vote;
  meet(block_, site);
  return votes;
}

const uint64_t* Block::share(uint64_t value, const Site& site) {
  Wave& wave = running_wave();
  uint64_t* slots = wave.slots[wave.round & 1];
  slots[lane()] = value;
  meet(wave, site);
  return slots;
}

uint64_t Block::ballot(bool vote, const Site& site) {
  Wave& wave = running_wave();
  uint64_t* slots = wave.slots[wave.round & 1];
  slots[lane()] = vote;
  meet(wave, site);
  uint64_t votes = 0;
  for (unsigned i = 0; i < wave.members; ++i) votes |= slots[i] << i;
  return votes;
}

void Block::cluster_barrier(const Site& site) {
  barrier(site);
  if (running_->linear == 0 && launch_.cluster > 1) {
    ++cluster_->arrived;
    const unsigned all = launch_.cluster * ++cluster_barriers_;
    while (cluster_->arrived < all) relax();
  }
  barrier(site);
}

uint32_t Block::shared_address(const void* p) {
  const auto* at = static_cast<const unsigned char*>(p);
  if (at < dynamic_shared() || at > shared_.end()) fail("an address that is not in dynamic shared memory");
  return uint32_t(at - dynamic_shared()) + kWindow;
}

unsigned char* Block::at(uint32_t address, size_t bytes, size_t alignment) {
  const uint32_t rank = address >> 24, place = (address & 0xffffff) - kWindow;
  if (rank > launch_.cluster) fail("no such block in the cluster");
  if (address % alignment) fail("misaligned address in shared memory");
  Block* block = rank == 0 ? this : cluster_->blocks[rank - 1].load();
  if (!block) fail("a block of the cluster that has not begun or has ended");
  if (place > shared_.bytes() || bytes > shared_.bytes() - place) fail(fault_text(shared_.end()));
  return block->dynamic_shared() + place;
}

unsigned char* Block::in_cluster(const void* p, unsigned rank, size_t bytes) {
  if (launch_.cluster == 1 && rank == 0) return at(shared_address(p), bytes, bytes);
  return at(shared_address(p) | (rank + 1) << 24, bytes, bytes);
}

void Block::begin(std::function<void()> work) {
  if (running_->begun.empty()) running_->begun.emplace_back();
  running_->begun.back().push_back(std::move(work));
}

void Block::copy_chunk(void* to, const void* from) {
  memset(to, kPoison, 16);
  begin([to, from] {
    if (from) memcpy(to, from, 16);
    else memset(to, 0, 16);
  });
}

void Block::complete_group() { running_->begun.emplace_back(); }

void Block::wait_but_for(size_t groups) {
  for (auto& begun = running_->begun; begun.size() > groups + 1; begun.erase(begun.begin()))
    for (const auto& work : begun.front()) work();
}

void Block::relax() {
  if (launch_.failed) leave_for_home();
  const bool is_long = ++turns_ % kTurnsAtOnce == 0;
  if (is_long && launch_.expired()) fail("no end in sight: still waiting for others at the time limit");
  if (is_long || ready_.empty()) std::this_thread::yield();
  if (ready_.empty()) return;
  ready_.push(running_);
  run_next();
}

std::string Block::fault_text(const void* address) const {
  if (!shared_.guards(address)) return "access out of bounds";
  return "access beyond the " + std::to_string(launch_.shared_bytes) + " bytes of dynamic shared memory";
}

void Block::fail(const std::string& why) {
  launch_.fail(why + " (block " + text(index_) + ", thread " + text(running_->index) + ")");
  leave_for_home();
}

void Block::fail_to_read(unsigned lane, const Site& site) {
  fail(site.text() + " reads lane " + std::to_string(lane) + ", which is not there");
}

void Block::meet(Rendezvous& r, const Site& site) {
  if (r.returned) fail(site.text() + " after " + std::to_string(r.returned) + " of its threads returned");
  if (r.arrived == 0) r.site = site;
  if (!(r.site == site)) fail("divergence: " + site.text() + " while others wait in " + r.site.text());
  if (++r.arrived == r.members) {
    r.arrived = 0;
    ++r.round;
    ready_.take_all(r.waiting, &r != &block_);
    return;
  }
  Fiber* me = running_;
  me->waits_at = &r.site;
  r.waiting.push(me, r.round % 2);
  run_next();
  me->waits_at = nullptr;
}

void Block::run_next() {
  if (ready_.empty()) fail("deadlock: " + waiting_text());
  Fiber* from = running_;
  running_ = ready_.pop();
  from->context.switch_to(running_->context);
}

void Block::thread_main() {
  launch_.body(launch_.argument);
  for (Rendezvous* r : {static_cast<Rendezvous*>(&running_wave()), &block_}) {
    ++r->returned;
    if (r->arrived) fail("a thread returned while others wait in " + r->site.text());
  }
  if (--live_ == 0) {
    for (unsigned i = 0; i < launch_.threads(); ++i)
      if (fibers_[i].in_team != fibers_[i / kTeam * kTeam].in_team) fail("warps of a warpgroup did not act as one");
    leave_for_home();
  }
  run_next();
}

// Nothing unwinds the remaining fibers: device code owns no resources.
void Block::leave_for_home() {
  running_->context.switch_to(home_);
  __builtin_unreachable();
}

std::string Block::waiting_text() const {
  std::map<std::string, unsigned> counts;
  for (unsigned i = 0; i < launch_.threads(); ++i)
    if (fibers_[i].waits_at) ++counts[fibers_[i].waits_at->text()];
  std::string text;
  for (const auto& [site, count] : counts)
    text += (text.empty() ? "" : ", ") + std::to_string(count) + " threads wait in " + site;
  return text;
}

// Every thread_local of this module is a __shared__ array, except `current`.
void Block::poison_shared_memory() {
  if (statics_.begin) memset(statics_.begin, kPoison, statics_.bytes);
  memset(dynamic_shared(), kPoison, shared_.bytes());
  current = this;
}

void yield() { std::this_thread::yield(); }

// ---- a launch -------------------------------------------------------------------------------------------------------
namespace {

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
std::string run(Launch& launch, unsigned os_threads) {
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

}  // namespace

std::string run(dim3 grid, dim3 block, size_t shared_bytes, void (*body)(const void*), const void* argument,
                unsigned cluster) {
  Launch launch{grid, block, shared_bytes, body, argument, cluster};
  const uint64_t cores = std::max(setting("SIMT_THREADS", std::thread::hardware_concurrency()), cluster);
  return run(launch, unsigned(std::min(cores, launch.blocks())));
}

// ---- the host's functions -------------------------------------------------------------------------------------------
LastError last_error;

hipError_t finish(hipError_t code, const std::string& text) {
  if (code != hipSuccess) last_error = {code, text};
  return code;
}

hipError_t check(dim3 grid, dim3 block, size_t shared_bytes, unsigned cluster) {
  const uint64_t blocks = uint64_t(grid.x) * grid.y * grid.z, threads = uint64_t(block.x) * block.y * block.z;
  const std::string shape = "grid " + text(grid) + ", block " + text(block);
  if (!blocks || !threads || threads > kMaxThreads || grid.y > 65535 || grid.z > 65535 ||
      uint64_t(grid.x) * block.x > UINT32_MAX || grid.x % cluster || cluster > kMaxCluster)
    return finish(hipErrorInvalidConfiguration, "invalid configuration: " + shape);
  if (shared_bytes > size_t(kMaxSharedBytes))
    return finish(hipErrorInvalidValue, std::to_string(shared_bytes) + " bytes of shared memory, at most " +
                                            std::to_string(kMaxSharedBytes) + " exist");
  return hipSuccess;
}

}  // namespace simt
