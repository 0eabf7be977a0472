// One thread block: a fiber per thread, barriers and wave exchanges as rendezvous.
//
// A fiber runs until it waits, so the order of threads is fixed and results repeat. A rendezvous needs every thread of
// its wave or block at the same source line. Otherwise (divergence, an early return, a deadlock) the launch ends with a
// message. Races on memory are not modelled. But waves run ahead of one another as far as barriers let them, in rising
// and in falling order, so that a missing barrier mostly shows in the results.
#pragma once
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fiber.h"
#include "launch_state.h"
#include "memory.h"

namespace simt {

constexpr unsigned kWave = SIMT_WARP, kMaxWaves = kMaxThreads / kWave;
static_assert(kWave == 32 || kWave == 64, "a wave has 32 or 64 lanes");

// The place where threads meet. As a default argument it names the line that wrote the barrier or shuffle.
struct Site {
  const char* what;
  const char* file;
  int line;

  static constexpr Site here(const char* what, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {what, file, line};
  }
  bool operator==(const Site& other) const {
    return what == other.what && line == other.line && (file == other.file || !strcmp(file, other.file));
  }
  std::string text() const;
};

struct Fiber {
  Context context;
  dim3 index;
  unsigned linear;
  Fiber* next;
  const Site* waits_at;  // null while the thread runs, is ready, or has returned
  // Asynchronous copies in flight: groups, all but the last committed.
  std::vector<std::vector<std::function<void()>>> begun;
  uint64_t in_team;  // a digest of the operations that its team performs together
  bool fenced;       // whether an asynchronous operation may use its registers
};

// Mixes twice; otherwise the upper bits of two consecutive words could cancel.
inline uint64_t mix(uint64_t digest, uint64_t word) {
  for (const uint64_t with : {word, uint64_t(0)}) {
    digest = (digest ^ with) * 0x9e3779b97f4a7c15;
    digest ^= digest >> 32;
  }
  return digest;
}

class FiberQueue {
 public:
  bool empty() const { return !first_; }
  Fiber* pop() {
    Fiber* fiber = first_;
    first_ = fiber->next;
    return fiber;
  }
  void push(Fiber* fiber, bool front = false) {
    FiberQueue one;
    one.first_ = one.last_ = fiber;
    fiber->next = nullptr;
    take_all(one, front);
  }
  void take_all(FiberQueue& other, bool front) {
    if (other.empty()) return;
    if (empty()) {
      *this = other;
    } else if (front) {
      other.last_->next = first_;
      first_ = other.first_;
    } else {
      last_->next = other.first_;
      last_ = other.last_;
    }
    other.first_ = nullptr;
  }

 private:
  Fiber *first_ = nullptr, *last_ = nullptr;
};

// The threads of a wave or of a block, and the number of them that wait at a rendezvous.
struct Rendezvous {
  unsigned members = 0, returned = 0, arrived = 0, round = 0;
  Site site{};
  FiberQueue waiting;
};

// Two sets of slots alternate: a lane can be one exchange ahead of the slowest reader, never two.
struct Wave : Rendezvous {
  uint64_t slots[2][kWave];
};

inline thread_local Block* current = nullptr;

// Belongs to one OS thread, which runs blocks with it one after another.
class Block {
 public:
  explicit Block(Launch& launch);
  ~Block();
  void run(dim3 index);

  // ---- the functions of a device thread ----
  const dim3& thread_index() const { return running_->index; }
  const dim3& block_index() const { return index_; }
  const dim3& block_size() const { return launch_.block; }
  const dim3& grid_size() const { return launch_.grid; }
  unsigned lane() const { return running_->linear % kWave; }
  unsigned char* dynamic_shared() { return shared_.end() - shared_.bytes(); }

  void barrier(const Site& site) { meet(block_, site); }
  void wave_barrier(const Site& site) { meet(running_wave(), site); }

  // Returns the number of threads that voted true.
  unsigned barrier_count(bool vote, const Site& site);

  // Returns the value that lane `source` of the wave passed.
  template <class T>
  T exchange(T value, unsigned source, const Site& site) {
    static_assert(sizeof(T) <= sizeof(uint64_t), "a lane exchanges at most 8 bytes");
    Wave& wave = running_wave();
    if (source >= wave.members) fail_to_read(source, site);
    uint64_t* slots = wave.slots[wave.round & 1];
    memcpy(&slots[lane()], &value, sizeof value);
    meet(wave, site);
    memcpy(&value, &slots[source], sizeof value);
    return value;
  }

  // Returns the values that all lanes of the wave passed, by lane. Read them before the next exchange.
  const uint64_t* share(uint64_t value, const Site& site);

  uint64_t ballot(bool vote, const Site& site);

  // ---- clusters ----
  unsigned cluster_size() const { return launch_.cluster; }
  unsigned cluster_rank() const { return index_.x % launch_.cluster; }
  void cluster_barrier(const Site& site);
  // An address in the shared memory of the cluster's blocks as a number. The upper bits are the block's rank + 1, or 0
  // for the own block. The lower 24 bits are the offset from the start of its dynamic memory, which is at kWindow.
  static constexpr uint32_t kWindow = 16;
  uint32_t shared_address(const void* p);
  unsigned char* at(uint32_t address, size_t bytes, size_t alignment);
  // The same place in the dynamic shared memory of block `rank` of the cluster.
  unsigned char* in_cluster(const void* p, unsigned rank, size_t bytes);

  // ---- asynchronous operations: they run as late as possible, when they are waited for ----
  void begin(std::function<void()> work);
  // Copies 16 bytes, or zeros if the source is null. Until it is waited for, the destination is undefined.
  void copy_chunk(void* to, const void* from);
  void complete_group();
  bool fenced() const { return running_->fenced; }
  void fence(bool now) { running_->fenced = now; }
  void wait_but_for(size_t groups);

  // Returns the result of make(), which the key and the type identify. The result is kept for other threads that need
  // it soon, and stays valid until the next call.
  template <class T, class Make>
  const T* made_for(uint64_t key, Make make) {
    Made& made = made_[key % kMade];
    if (!made.values || made.key != key) made = {key, std::make_shared<std::vector<T>>(make())};
    return static_cast<const std::vector<T>*>(made.values.get())->data();
  }

  // Records an operation that all threads of a team of kTeam neighbours perform in the same order, without waiting for
  // one another. The records are compared when the block ends.
  static constexpr unsigned kTeam = 128;
  void do_in_team(uint64_t what) { running_->in_team = mix(running_->in_team, what); }

  // One iteration of a loop that waits for another thread's store. It lets other fibers run and, now and then because
  // it takes longer, other OS threads.
  void relax();

  std::string fault_text(const void* address) const;

  [[noreturn]] void fail(const std::string& why);

 private:
  struct Made {
    uint64_t key;
    std::shared_ptr<void> values;
  };

  Wave& running_wave() { return waves_[running_->linear / kWave]; }

  void meet(Rendezvous& r, const Site& site);
  [[noreturn]] void fail_to_read(unsigned lane, const Site& site);
  void run_next();
  void thread_main();
  [[noreturn]] void leave_for_home();
  std::string waiting_text() const;
  void poison_shared_memory();

  Launch& launch_;
  dim3 index_;
  unsigned live_ = 0;
  std::unique_ptr<Fiber[]> fibers_;
  GuardedPages stacks_, shared_;
  ByteRange statics_;
  static constexpr unsigned kTurnsAtOnce = 64;
  unsigned turns_ = 0;
  Wave waves_[kMaxWaves];
  Rendezvous block_;
  unsigned votes_[2];
  FiberQueue ready_;
  Fiber* running_ = nullptr;
  Context home_;
  Cluster* cluster_ = nullptr;
  unsigned cluster_barriers_ = 0;
  static constexpr unsigned kMade = 64;
  Made made_[kMade];
};

}  // namespace simt
