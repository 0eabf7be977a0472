// faults_hopper NAME: runs one small kernel of Hopper's instructions on a cluster of two blocks, most of them wrong in
// some way, and prints what the launch returned.
#include <hip/hip_runtime.h>

#include <cstdio>

#include "platform/clusters.h"
#include "platform/tma.h"
#include "platform/wgmma.h"

namespace {

using namespace moe_fp8;

constexpr unsigned kThreads = 128;
constexpr int kColumns = 96, kOperand = kColumns * 128;  // bytes of rows of 128
constexpr size_t kShared = 1024 + 2 * kOperand;
alignas(16) uint8_t ones[kOperand], twos[kOperand];  // in E4M3

struct Shared {
  uint32_t base;  // 1024 bytes from the window on: a barrier before it, an operand behind
  uint32_t barrier() const { return base - 8; }
};

void fill(uint32_t to, const uint8_t* from, uint32_t barrier) {
  if (threadIdx.x == 0) {
    barrier_arrive_expecting(barrier, kOperand);
    copy_bytes(to, from, kOperand, barrier);
  }
}

using Sum = float[kColumns / 2];
void multiply(Sum& sum, uint32_t a, uint32_t b) {
  wgmma_fence();
  wgmma<false>(sum, wgmma_operand(a), wgmma_operand(b), false);
  wgmma_commit();
}

template <void (*arrive)(uint32_t)>
void copy_one_chunk(Shared s, unsigned* out) {
  if (threadIdx.x > 0) return barrier_wait(s.barrier(), 0);
  copy_chunk(s.base, ones, true);
  arrive(s.barrier());
  barrier_wait(s.barrier(), 0);
  *out = __builtin_bit_cast(unsigned, load_shared(s.base));
}

struct Case {
  const char* name;
  void (*kernel)(Shared, unsigned*);
  bool leaves = false;  // without waiting for the other block
};

const Case kCases[] = {
    {"product",
     [](Shared s, unsigned* out) {
       fill(s.base, ones, s.barrier());
       barrier_wait(s.barrier(), 0);
       Sum sum;
       multiply(sum, s.base, s.base);
       wgmma_wait<0>();
       *out = unsigned(sum[0]);
     }},
    {"operand that is filled again too early",
     [](Shared s, unsigned* out) {
       fill(s.base, ones, s.barrier());
       barrier_wait(s.barrier(), 0);
       Sum sum;
       multiply(sum, s.base, s.base);
       __syncthreads();
       fill(s.base, twos, s.barrier());
       barrier_wait(s.barrier(), 1);
       wgmma_wait<0>();
     }},
    {"operand that is filled too late",
     [](Shared s, unsigned*) {
       Sum sum;
       multiply(sum, s.base, s.base);
       fill(s.base, ones, s.barrier());
       barrier_wait(s.barrier(), 0);
       wgmma_wait<0>();
     }},
    {"operand between two patterns",
     [](Shared s, unsigned*) {
       Sum sum;
       multiply(sum, s.base, s.base + 128);
     }},
    {"product without a fence",
     [](Shared s, unsigned*) {
       Sum sum;
       multiply(sum, s.base, s.base);
       wgmma_wait<0>();
       wgmma<false>(sum, wgmma_operand(s.base), wgmma_operand(s.base), true);
     }},
    {"product of one warp",
     [](Shared s, unsigned*) {
       Sum sum;
       if (threadIdx.x < 32) multiply(sum, s.base, s.base);
     }},
    {"products of other operands",
     [](Shared s, unsigned*) {
       Sum sum;
       multiply(sum, s.base + threadIdx.x / 64 * 1024, s.base);
     }},
    {"sum that is read too early",
     [](Shared s, unsigned* out) {
       fill(s.base, ones, s.barrier());
       barrier_wait(s.barrier(), 0);
       Sum sum = {};
       multiply(sum, s.base, s.base);
       wgmma_wait<1>();
       *out = unsigned(sum[0]);
     }},
    {"copy to the other block",
     [](Shared s, unsigned* out) {
       if (threadIdx.x == 0) {
         const uint32_t other = cluster_rank() ^ 1;
         barrier_arrive_expecting(s.barrier(), 16);
         copy_bytes(in_block(s.base, other), other ? twos : ones, 16, in_block(s.barrier(), other));
       }
       barrier_wait(s.barrier(), 0);
       float word;
       if (cluster_rank() == 1) memcpy(out, &(word = load_shared(s.base)), 4);
     }},
    {"chunk that is waited for", copy_one_chunk<barrier_arrive_behind_copies>},
    {"chunk that is not", copy_one_chunk<barrier_arrive>},
    {"fewer bytes than announced",
     [](Shared s, unsigned*) {
       if (threadIdx.x == 0) {
         barrier_arrive_expecting(s.barrier(), 32);
         copy_bytes(s.base, ones, 16, s.barrier());
       }
       barrier_wait(s.barrier(), 0);
     }},
    {"too many arrivals",
     [](Shared s, unsigned*) {
       if (threadIdx.x > 0) return;
       barrier_arrive_expecting(s.barrier(), 16);
       barrier_arrive(s.barrier());
     }},
    {"block that is not there", [](Shared s, unsigned*) { barrier_arrive_in_cluster(in_block(s.barrier(), 2)); }},
    {"wait in another block", [](Shared s, unsigned*) { barrier_wait(in_block(s.barrier(), 1), 0); }},
    {"block that has ended",
     [](Shared s, unsigned*) {
       if (cluster_rank() == 0 || threadIdx.x > 0) return;
       std::this_thread::sleep_for(std::chrono::milliseconds(200));
       barrier_arrive_in_cluster(in_block(s.barrier(), 0));
     }, true},
    {"copy beyond shared memory",
     [](Shared s, unsigned*) { copy_bytes(s.base + 2 * kOperand, ones, 32, s.barrier()); }},
    {"copy to no chunk", [](Shared s, unsigned*) { copy_bytes(s.base + 8, ones, 16, s.barrier()); }},
    {"copy of no chunk", [](Shared s, unsigned*) { copy_bytes(s.base, ones + 8, 16, s.barrier()); }},
};

}  // namespace

int main(int, char** argv) {
  memset(ones, 0x38, sizeof ones);
  memset(twos, 0x40, sizeof twos);
  for (const Case& c : kCases) {
    if (strcmp(c.name, argv[1])) continue;
    unsigned out = 0;
    const auto kernel = [&] {
      HIP_DYNAMIC_SHARED(unsigned char, smem)
      const Shared s = {shared_address(smem + (-shared_address(smem) & 1023))};
      if (threadIdx.x == 0) barrier_init(s.barrier(), 1);
      cluster_barrier();
      c.kernel(s, &out);
      if (!c.leaves) cluster_barrier();
    };
    const hipError_t code = simt::launch(dim3(2), dim3(kThreads), kShared, kernel, 2);
    if (code == hipSuccess) printf("ok %x\n", out);
    else printf("error %d: %s\n", code, hipGetErrorString(code));
    return 0;
  }
  return 1;
}
