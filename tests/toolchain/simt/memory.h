// Memory that detects misuse: pages with a guard behind them, and the bytes of this module's thread_locals.
#pragma once
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <stdexcept>

namespace simt {

constexpr unsigned char kPoison = 0xcd;  // uninitialised shared memory
constexpr size_t kSharedAlign = 128;

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

// Memory of `bytes`, rounded up to the alignment of shared memory, that ends where an inaccessible page begins.
class GuardedPages {
 public:
  explicit GuardedPages(size_t bytes) : bytes_((bytes + kSharedAlign - 1) / kSharedAlign * kSharedAlign) {
    const size_t page = sysconf(_SC_PAGESIZE);
    mapped_ = (bytes_ + page - 1) / page * page + page;
    base_ = Mappings::all().take(mapped_);
    end_ = base_ + mapped_ - page;
  }
  ~GuardedPages() { Mappings::all().give_back(base_, mapped_); }
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
inline ByteRange thread_locals_around(void* member) {
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

}  // namespace simt
