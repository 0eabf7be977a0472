// Thread-block clusters: Hopper and later; elsewhere a cluster is one block.
#pragma once
#include <cstdint>

#include "platform/compiler.h"

namespace moe_fp8 {

MOE_DEVICE uint32_t cluster_size() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t n;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(n));
  return n;
#elif defined(MOE_SIMT)
  return simt::current->cluster_size();
#else
  return 1;
#endif
}
MOE_DEVICE uint32_t cluster_rank() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
#elif defined(MOE_SIMT)
  return simt::current->cluster_rank();
#else
  return 0;
#endif
}
MOE_DEVICE void cluster_barrier() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#elif defined(MOE_SIMT)
  simt::current->cluster_barrier(simt::Site::here("cluster_barrier"));
#else
  __syncthreads();
#endif
}

// One note from every block of the cluster to every block: kLanes words each, sent and received by 32 lanes. The words
// arrive in inbox.words[sender]; an arrival counts on the inbox's barrier, so nothing else is waited for. Two
// inboxes used in turn suffice: a sender is at most one note ahead of a receiver.
struct ClusterInbox {
  uint64_t barrier;
  uint64_t unused;  // 16-byte alignment of what follows
  uint32_t words[16][32];
};
MOE_DEVICE void cluster_inbox_init(ClusterInbox& inbox) {  // by one thread, before a cluster_barrier()
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;"
               ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(&inbox.barrier))) : "memory");
#endif
}
MOE_DEVICE void cluster_send(ClusterInbox& inbox, uint32_t word, int lane) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const uint32_t size = cluster_size(), barrier = static_cast<uint32_t>(__cvta_generic_to_shared(&inbox.barrier));
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(&inbox.words[cluster_rank()][lane]));
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
  inbox.words[0][lane] = word;
#endif
}
MOE_DEVICE void cluster_wait(ClusterInbox& inbox, uint32_t phase) {  // phase: parity of the notes this inbox has had
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("{.reg .pred done;\n"
               "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
               "@!done bra again;}"
               ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(&inbox.barrier))), "r"(phase) : "memory");
#endif
}

}  // namespace moe_fp8
