// Memory that detects misuse: pages with a guard behind them, and the bytes of this module's thread_locals.
#pragma once
#include <cstddef>

namespace simt {

constexpr unsigned char kPoison = 0xcd;  // uninitialised shared memory
constexpr size_t kSharedAlign = 128;

// Memory of `bytes`, rounded up to the alignment of shared memory, that ends where an inaccessible page begins.
class GuardedPages {
 public:
  explicit GuardedPages(size_t bytes);
  ~GuardedPages();
  GuardedPages(const GuardedPages&) = delete;
  GuardedPages& operator=(const GuardedPages&) = delete;

  size_t bytes() const { return bytes_; }
  unsigned char* begin() { return end_ - bytes_; }
  unsigned char* end() { return end_; }
  bool guards(const void* address) const { return address >= end_ && address < base_ + mapped_; }

 private:
  size_t bytes_, mapped_;
  unsigned char *base_, *end_;
};

struct ByteRange {
  void* begin = nullptr;
  size_t bytes = 0;
};

// The calling thread's copy of the thread_locals of the program or library that contains this code. `member` is one of
// them, so that the copy exists.
ByteRange thread_locals_around(void* member);

}  // namespace simt
