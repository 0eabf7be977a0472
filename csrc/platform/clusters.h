// Thread-block clusters. They exist from Hopper on; elsewhere a cluster is one block.
#pragma once
#include <cstdint>

#include "platform/memory.h"

namespace moe_fp8 {

// cluster_arrive() and cluster_wait_for_all() are the halves of a cluster_barrier(), for work in between. What a thread
// wrote before it arrives, also by cluster_store(), all threads of the cluster see once they have waited.
// cluster_store() writes to this place in the shared memory of block `rank`, which must have begun and not ended.
#if (defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900) || defined(MOE_SIMT)
constexpr bool kHasClusters = true;
#else
constexpr bool kHasClusters = false;  // of several blocks
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
MOE_DEVICE uint32_t cluster_size() {
  uint32_t n;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(n));
  return n;
}
MOE_DEVICE uint32_t cluster_rank() {
  uint32_t r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
MOE_DEVICE void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
MOE_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
MOE_DEVICE void cluster_wait_for_all() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
MOE_DEVICE void cluster_store(uint32_t* shared, uint32_t word, uint32_t rank) {
  asm volatile("{.reg .b32 to;\n"
               "mapa.shared::cluster.u32 to, %0, %2;\n"
               "st.shared::cluster.u32 [to], %1;}"
               ::"r"(shared_address(shared)), "r"(word), "r"(rank) : "memory");
}
#elif defined(MOE_SIMT)
MOE_DEVICE uint32_t cluster_size() { return simt::current->cluster_size(); }
MOE_DEVICE uint32_t cluster_rank() { return simt::current->cluster_rank(); }
MOE_DEVICE void cluster_barrier() { simt::current->cluster_barrier(simt::Site::here("cluster_barrier")); }
MOE_DEVICE void cluster_arrive() {}
MOE_DEVICE void cluster_wait_for_all() { cluster_barrier(); }
MOE_DEVICE void cluster_store(uint32_t* shared, uint32_t word, uint32_t rank) {
  *reinterpret_cast<uint32_t*>(simt::current->in_cluster(shared, rank, sizeof word)) = word;
}
#else
MOE_DEVICE uint32_t cluster_size() { return 1; }
MOE_DEVICE uint32_t cluster_rank() { return 0; }
MOE_DEVICE void cluster_barrier() { __syncthreads(); }
MOE_DEVICE void cluster_arrive() {}
MOE_DEVICE void cluster_wait_for_all() { __syncthreads(); }
MOE_DEVICE void cluster_store(uint32_t* shared, uint32_t word, uint32_t) { *shared = word; }
#endif

// Mailbox of a block for an all-gather over its cluster: every block posts one message of 32 words, a word per lane, to
// every block. A message arrives in words[rank of the sender] and completes on `barrier`, so a receiver waits for
// nothing else. Two mailboxes in alternation suffice: a sender is at most one message ahead of a receiver.
struct ClusterMailbox {
  uint64_t barrier;
  uint64_t unused;  // keeps words aligned to 16 bytes
  uint32_t words[16][32];
};
// Called by one thread, before a cluster_barrier().
MOE_DEVICE void cluster_mailbox_init(ClusterMailbox& mailbox) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;"
               ::"r"(shared_address(&mailbox.barrier)) : "memory");
#endif
}
// Called by 32 lanes.
MOE_DEVICE void cluster_post(ClusterMailbox& mailbox, uint32_t word, int lane) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const uint32_t size = cluster_size(), barrier = shared_address(&mailbox.barrier);
  const uint32_t to = shared_address(&mailbox.words[cluster_rank()][lane]);
  if (lane == 0)
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 ::"r"(barrier), "r"(size * 32 * 4) : "memory");
  for (uint32_t rank = 0; rank < size; ++rank)
    asm volatile("{.reg .b32 to, barrier;\n"
                 "mapa.shared::cluster.u32 to, %0, %3;\n"
                 "mapa.shared::cluster.u32 barrier, %1, %3;\n"
                 "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [to], %2, [barrier];}"
                 ::"r"(to), "r"(barrier), "r"(word), "r"(rank) : "memory");
#else
  mailbox.words[0][lane] = word;
#endif
}
// Waits for the messages of all blocks. phase: parity of the number of exchanges that this mailbox has completed.
MOE_DEVICE void cluster_wait(ClusterMailbox& mailbox, uint32_t phase) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("{.reg .pred done;\n"
               "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
               "@!done bra again;}"
               ::"r"(shared_address(&mailbox.barrier)), "r"(phase) : "memory");
#endif
}

}  // namespace moe_fp8
