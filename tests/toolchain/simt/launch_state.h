// State that all blocks of one launch share.
#pragma once
#include <atomic>
#include <cstdint>
#include <ctime>
#include <memory>
#include <mutex>
#include <string>

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace simt {

constexpr unsigned kMaxThreads = 1024, kMaxCluster = 16;

std::string text(const dim3& d);

// The number that an environment variable holds.
unsigned setting(const char* variable, unsigned otherwise);

// Lets another OS thread run.
void yield();

class Block;

// Blocks that run at the same time, each on its own OS thread, and access one another's shared memory.
struct Cluster {
  std::atomic<Block*> blocks[kMaxCluster];
  std::atomic<unsigned> arrived;  // arrivals at all barriers, one barrier after the other
};

struct Launch {
  dim3 grid, block;
  size_t shared_bytes;
  void (*body)(const void* argument);  // runs once in every thread
  const void* argument;
  unsigned cluster = 1;  // blocks per cluster
  std::unique_ptr<Cluster[]> clusters{cluster > 1 ? new Cluster[blocks() / cluster]() : nullptr};
  const time_t seconds_at_most = setting("SIMT_TIMEOUT", 60);
  std::atomic<uint64_t> next_block{0};
  std::atomic<bool> failed{false};
  std::string error{};
  std::mutex mutex{};

  unsigned threads() const { return block.x * block.y * block.z; }
  uint64_t blocks() const { return uint64_t(grid.x) * grid.y * grid.z; }

  // Whether the calling OS thread, which does nothing else, has run for too long. The time in which other processes ran
  // does not count: on a busy machine, that time may be longer than the limit.
  bool expired() const;

  // The first failure is the cause of the others.
  void fail(const std::string& why);
};

}  // namespace simt
