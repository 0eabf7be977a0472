// faults_hopper NAME: runs one small kernel with Hopper's instructions on a cluster of two blocks, often with a
// deliberate fault, and prints the launch's result.
#include <hip/hip_runtime.h>

#include <cstdio>
#include <thread>

#include "platform/clusters.h"
#include "platform/tma.h"
#include "platform/wgmma.h"

namespace {

using namespace moe_fp8;

constexpr unsigned kThreads = 128;
constexpr int kColumns = 96, kOperand = kColumns * 128;  // bytes of rows of 128
constexpr size_t kShared = 1024 + 2 * kOperand;
alignas(16) uint8_t ones[kOperand], twos[kOperand];  // in E4M3
constexpr int kColumnsBF16 = 128, kOperandBF16 = kColumnsBF16 * 128;  // bytes, of rows of 64 elements
alignas(16) uint16_t units[kColumnsBF16][64];  // in bfloat16: row r is 1 at r % 16
alignas(16) uint8_t words[16][64];             // all bytes of word i are i
CUtensorMap map_of_units, map_of_words;

struct Shared {
  uint32_t base;  // 1024 bytes into the window: a barrier lies before it, an operand behind it
  uint32_t barrier() const { return base - 8; }
};

void fill(uint32_t to, const uint8_t* from, uint32_t barrier) {
  if (threadIdx.x == 0) {
    barrier_arrive_expect_tx(barrier, kOperand);
    bulk_copy(to, from, kOperand, barrier);
  }
}

using Sum = float[kColumns / 2];
void multiply(Sum& sum, uint32_t a, uint32_t b) {
  wgmma_fence();
  wgmma<false>(sum, wgmma_operand(a), wgmma_operand(b), false);
  wgmma_commit();
}

// Elements of a, which are a function of the row and the position in the sum. All are small integers.
template <class Number>
void fill_registers(uint32_t (&a)[4], Number number) {
  const int t = int(threadIdx.x), row = wgmma_row(t);
  for (int i = 0; i < 4; ++i) {
    const int r = row + i % 2 * 8, k = 2 * (t % 4) + i / 2 * 8;
    a[i] = to_bf16x2(float(number(r, k)), float(number(r, k + 1)));
  }
}
void fill_units(Shared s) {
  if (threadIdx.x == 0) {
    barrier_arrive_expect_tx(s.barrier(), kOperandBF16);
    tma_load_box(s.base, map_of_units, 0, 0, s.barrier());
  }
  barrier_wait(s.barrier(), 0);
}
using SumBF16 = float[kColumnsBF16 / 2];
void multiply(SumBF16& sum, const uint32_t (&a)[4], uint32_t b, bool accumulate) {
  wgmma_fence();
  wgmma_bf16(sum, a, wgmma_operand(b), accumulate);
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
  bool leaves = false;  // does not wait for the other block
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
    {"product of registers",  // row r is 64 k + r from two products, one of which has more digits than bfloat16
     [](Shared s, unsigned* out) {
       fill_units(s);
       uint32_t rows[4], places[4];
       SumBF16 sum;
       fill_registers(rows, [](int r, int) { return r; });
       multiply(sum, rows, s.base, false);
       fill_registers(places, [](int, int k) { return 64 * k; });
       multiply(sum, places, s.base + 32, true);
       wgmma_wait<0>();
       bool right = true;
       for (int i = 0; i < kColumnsBF16 / 2; ++i) {
         const int r = wgmma_row(int(threadIdx.x)) + i / 2 % 2 * 8;
         const int column = i / 4 * 8 + 2 * (int(threadIdx.x) % 4) + i % 2;
         right = right && sum[i] == float(64 * (column % 16) + r);
       }
       const int all = __syncthreads_count(right);
       *out = unsigned(all);
     }},
    {"registers that change too early",
     [](Shared s, unsigned*) {
       fill_units(s);
       uint32_t a[4] = {};
       SumBF16 sum;
       multiply(sum, a, s.base, false);
       a[3] = 1;
       wgmma_wait<0>();
     }},
    {"registers that change in time",
     [](Shared s, unsigned* out) {
       fill_units(s);
       uint32_t a[4] = {}, b[4];
       SumBF16 sum;
       multiply(sum, a, s.base, false);
       fill_registers(b, [](int, int) { return 2; });
       multiply(sum, b, s.base, true);
       wgmma_wait<1>();
       a[3] = 1;
       wgmma_wait<0>();
       *out = unsigned(sum[0]);
     }},
    {"operand beside registers that is filled again too early",
     [](Shared s, unsigned*) {
       fill_units(s);
       const uint32_t a[4] = {};
       SumBF16 sum;
       multiply(sum, a, s.base, false);
       __syncthreads();
       fill(s.base, ones, s.barrier());
       barrier_wait(s.barrier(), 1);
       wgmma_wait<0>();
     }},
    {"product of registers without a fence",
     [](Shared s, unsigned*) {
       const uint32_t a[4] = {};
       SumBF16 sum;
       multiply(sum, a, s.base, false);
       wgmma_wait<0>();
       wgmma_bf16(sum, a, wgmma_operand(s.base), true);
     }},
    {"product of registers of one warp",
     [](Shared s, unsigned*) {
       const uint32_t a[4] = {};
       SumBF16 sum;
       if (threadIdx.x < 32) multiply(sum, a, s.base, false);
     }},
    {"matrices of rows of 64 bytes",
     [](Shared s, unsigned* out) {
       if (threadIdx.x == 0) {
         barrier_arrive_expect_tx(s.barrier(), sizeof words);
         tma_load_box(s.base, map_of_words, 0, 0, s.barrier());
       }
       barrier_wait(s.barrier(), 0);
       const int lane = int(threadIdx.x) % 32, row = lane % 16;
       bool right = true;
       for (int half = 0; half < 2; ++half) {
         uint32_t w[4];
         load_matrices(w, s.base + row * 64 + ((2 * half + lane / 16) ^ row / 2 % 4) * 16);
         for (int i = 0; i < 4; ++i) {
           const int r = lane / 4 + i % 2 * 8, chunk = 2 * half + i / 2;
           right = right && w[i] == 0x01010101u * uint32_t(16 * r + 4 * chunk + lane % 4);
         }
       }
       const int all = __syncthreads_count(right);
       *out = unsigned(all);
     }},
    {"matrix beside shared memory", [](Shared s, unsigned*) {
       uint32_t w[4];
       load_matrices(w, s.base + 2 * kOperand + 16);
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
         barrier_arrive_expect_tx(s.barrier(), 16);
         bulk_copy(cluster_address(s.base, other), other ? twos : ones, 16, cluster_address(s.barrier(), other));
       }
       barrier_wait(s.barrier(), 0);
       float word;
       if (cluster_rank() == 1) memcpy(out, &(word = load_shared(s.base)), 4);
     }},
    {"word to the other block",
     [](Shared s, unsigned* out) {
       if (threadIdx.x == 0) {
         const uint32_t other = cluster_rank() ^ 1;
         barrier_arrive_expect_tx(s.barrier(), 4);
         store_async(cluster_address(s.base, other), other ? 7 : 5, cluster_address(s.barrier(), other));
       }
       barrier_wait_for_cluster(s.barrier(), 0);
       float word;
       if (cluster_rank() == 1) memcpy(out, &(word = load_shared(s.base)), 4);
     }},
    {"chunk that is waited for", copy_one_chunk<barrier_arrive_after_copies>},
    {"chunk that is not", copy_one_chunk<barrier_arrive>},
    {"fewer bytes than announced",
     [](Shared s, unsigned*) {
       if (threadIdx.x == 0) {
         barrier_arrive_expect_tx(s.barrier(), 32);
         bulk_copy(s.base, ones, 16, s.barrier());
       }
       barrier_wait(s.barrier(), 0);
     }},
    {"too many arrivals",
     [](Shared s, unsigned*) {
       if (threadIdx.x > 0) return;
       barrier_arrive_expect_tx(s.barrier(), 16);
       barrier_arrive(s.barrier());
     }},
    {"block that is not there",
     [](Shared s, unsigned*) { barrier_arrive_in_cluster(cluster_address(s.barrier(), 2)); }},
    {"wait in another block", [](Shared s, unsigned*) { barrier_wait(cluster_address(s.barrier(), 1), 0); }},
    {"block that has ended",
     [](Shared s, unsigned*) {
       if (cluster_rank() == 0 || threadIdx.x > 0) return;
       std::this_thread::sleep_for(std::chrono::milliseconds(200));
       barrier_arrive_in_cluster(cluster_address(s.barrier(), 0));
     }, true},
    {"copy beyond shared memory",
     [](Shared s, unsigned*) { bulk_copy(s.base + 2 * kOperand, ones, 32, s.barrier()); }},
    {"copy to no chunk", [](Shared s, unsigned*) { bulk_copy(s.base + 8, ones, 16, s.barrier()); }},
    {"copy of no chunk", [](Shared s, unsigned*) { bulk_copy(s.base, ones + 8, 16, s.barrier()); }},
};

}  // namespace

int main(int, char** argv) {
  memset(ones, 0x38, sizeof ones);
  memset(twos, 0x40, sizeof twos);
  for (int r = 0; r < kColumnsBF16; ++r)
    for (int k = 0; k < 64; ++k) units[r][k] = k % 16 == r % 16 ? 0x3f80 : 0;
  for (int i = 0; i < int(sizeof words); ++i) words[i / 64][i % 64] = uint8_t(i / 4);
  make_tensor_map(&map_of_units, units, kColumnsBF16, 128, 128, kColumnsBF16);
  make_tensor_map(&map_of_words, words, 16, 64, 64, 16, 64);
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
