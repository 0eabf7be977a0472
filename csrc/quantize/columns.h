// One scale per column of each group, strip by strip (column_schedule.h). The blocks of a cluster are co-resident and
// wait for one another. The clusters of a team may not be: a waiter that has polled long enough recomputes the missing
// maxima.
#pragma once
#include <climits>

#include "platform/launch.h"
#include "quantize/geometries.h"
#include "quantize/column_strip.h"
#include "quantize/policy.h"

namespace moe_fp8 {

// Small blocks of tokens work in teams, small blocks of experts in clusters. Support for both would take the shared
// memory of 40 rows.
template <class Groups, class Types, int kThreadRows,
          bool kLarge = kThreadRows == kLargeThreadRows, bool kExperts = std::is_same_v<Groups, ExpertGroups>>
using ColumnTraitsOf = ColumnTraits<Types, kThreadRows, Groups::kSource, Types::kVectorized && (kLarge || kExperts),
                             Types::kVectorized && (kLarge || !kExperts)>;
// Blocks of a multiprocessor for which there are registers. The casts of float16 take more of them on sm_89.
template <class T>
constexpr int kResidentBlocks = T::kThreadRows == kSmallThreadRows && T::Types::kVectorized && kCastsInHardware &&
                                        !(kCudaArch == 890 && std::is_same_v<typename T::Types::In, F16>)
                                    ? kSmallBlocks
                                    : 1;

// Percent of the shared memory that are left to the rows that run concurrently.
inline int reserved_percent(const QuantizeParams& p, RowOverlap overlap) {
  if (overlap == RowOverlap::kNone) return 0;
  if (overlap == RowOverlap::kThrottled)
    return row_bytes(p) > kShortThrottledBytes ? kReservedThrottled : kReservedThrottledShort;
  int i = 0;
  while (average_rows(p) > kReserved[i].rows) ++i;
  return p.index.at ? kReserved[i].percent_by_index : kReserved[i].percent;
}

// How many rows of x, counted as work, come before a slice.
template <class Groups>
MOE_DEVICE uint32_t rows_past(const ColumnsPlan& p, const Groups& groups, const StripSlice& w) {
  const int64_t shares = int64_t(w.strip) * w.team_size + w.team_rank, all = int64_t(p.strips) * w.team_size;
  return uint32_t(groups.rows_before(w.group) + groups.span(w.group).rows * shares / all);
}

// Called by all threads: the leader of the cluster acts, and the others wait for it at the next barrier. seen: the
// progress of the rows one slice ago, or kPeerGone after a wait in which they did not move. Rows that may not be
// resident are not waited for again.
constexpr uint32_t kPeerGone = ~0u;
MOE_DEVICE bool is_cluster_leader() { return threadIdx.x == 0 && threadIdx.y == 0 && cluster_rank() == 0; }
template <class Groups>
MOE_DEVICE void throttle_columns(const ColumnsPlan& p, const Groups& groups, const StripSlice& w, uint32_t& seen) {
  if (!is_cluster_leader()) return;
  const uint32_t past = rows_past(p, groups, w);
  post_progress(p.throttle, PeerKernel::kColumns, past);
  if (seen == kPeerGone) return;
  const bool moves = wait_for_peer(p.throttle, PeerKernel::kColumns, past, seen);
  seen = moves ? peer_progress(p.throttle, PeerKernel::kColumns) : kPeerGone;
}

// A bound above the block's size caps registers: docs/kernels/quantize.md.
template <class T>
constexpr int kThreadsBound = T::kThreadRows == kLargeThreadRows ? kLargeThreadsBound : T::kThreads;

template <class Groups, class T>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreadsBound<T>, kResidentBlocks<T>)
    quantize_columns_kernel(MOE_GRID_CONSTANT const ColumnsPlan p) {
  MOE_DYNAMIC_SMEM(smem);
  Vec16* ring = reinterpret_cast<Vec16*>(smem);
  auto& shared = *reinterpret_cast<ColumnShared<T>*>(ring + p.ring_rows * kChunks);
  wait_for_previous_kernel();
  if (p.rows_overlap) allow_next_kernel();
  const Groups groups(reinterpret_cast<int*>(&shared + 1), p);
  if constexpr (T::kClusters)
    if (p.cluster_log2 > 0) {
      if (threadIdx.y == 0 && threadIdx.x < 2) cluster_mailbox_init(shared.mailbox[threadIdx.x]);
      cluster_barrier();  // before it, a mailbox must not be written
    }

  auto slice = [&](uint32_t iteration) -> StripSlice& { return shared.slices[iteration % (2 * kSlicesAhead)]; };
  auto schedule = [&](uint32_t first) {  // called by all; lanes of one row of threads compute a slice each
    const uint32_t iteration = first + threadIdx.x;
    if (threadIdx.y != T::kThreadRows - 1 || threadIdx.x >= kSlicesAhead) return;
    const uint32_t share = (blockIdx.x >> p.cluster_log2) + iteration * (gridDim.x >> p.cluster_log2);
    slice(iteration) = slice_of(p, groups, share, int(cluster_rank()), p.cluster_log2);
  };
  schedule(0);
  __syncthreads();
  copy_to_ring<T>(p, slice(0), 0, slice(0).resident_rows(p.ring_rows), ring, 0);
  commit_copies();
  int base = 0, buffer = 0;
  uint32_t rows_seen = 0, exchanges = 0;
  for (uint32_t iteration = 0; slice(iteration).valid; ++iteration) {
    const StripSlice w = slice(iteration);
    const StripSlice& w_shared = slice(iteration);  // for code outside of loops: registers are short
    const StripSlice& next = slice(iteration + 1);
    if constexpr (T::kThrottled)
      if (p.throttle.passed) throttle_columns(p, groups, w, rows_seen);
    const bool exceeds_ring = w.rows > p.ring_rows;  // the ring then moves along the slice
    const int length = round_up(w.rows, kChunkRows);
    const int next_base = exceeds_ring ? (base + length) % p.ring_rows : ring_row(p, base + length);
    int resident = w.resident_rows(p.ring_rows), copied = 0;
    auto copy_next = [&](int freed) {  // fills free rows of the ring: first with rows of this slice, then of the next
      if (exceeds_ring) {
        const int end = freed < w.rows - p.ring_rows ? p.ring_rows + freed : w.rows;  // the sum may pass 2^31
        copy_to_ring<T>(p, w, resident, end, ring, (base + resident) % p.ring_rows - resident);
        resident = end;
      }
      const int end = next.resident_rows(p.ring_rows - length + freed);
      if (end > copied) copy_to_ring<T>(p, next, copied, end, ring, next_base);
      copied = Max{}(copied, end);
      commit_copies();
    };
    // Large groups copy ahead before the amax, small groups after it: docs/kernels/quantize.md.
    if (T::kThreadRows == kLargeThreadRows || (T::kClusters && p.cluster_log2 > 0) || w.line0 == w.line1) copy_next(0);
    else commit_copies();
    reduce_slice<T>(p, w, ring, base, shared);
    __syncthreads();
    if (iteration % kSlicesAhead == 0) schedule(iteration + kSlicesAhead);  // no thread still reads earlier slices
    uint32_t amax = 0;
    if (threadIdx.y == 0) amax = amax_of_cluster<T>(w_shared, shared, exchanges);
    if constexpr (T::kTeams)
      if (w_shared.team_size > 1) {
        if (threadIdx.y == 0 && cluster_rank() == 0) post_word(mailbox_of(p, w_shared.share), amax);
        receive_team_amax<T>(p, groups, w_shared, shared);
        __syncthreads();
        if (threadIdx.y == 0) amax = team_amax_of<T>(shared);
      }
    if (threadIdx.y == 0) make_scales<T>(p, w_shared, amax, shared);
    __syncthreads();
    uint8_t* q_t = p.q_t + groups.q_t_offset(w.group);
    for (int line = w.line0; line < w.line1; line += T::kLines, buffer ^= 1) {
      cast_lines<T>(p, w, line, ring, base, shared.multiplier, shared.stage[buffer]);
      __syncthreads();
      const int rows_cast = (line + T::kLines) * kLine - w.begin - w.skipped;
      copy_next(rows_cast < length ? rows_cast : length);
      if (exceeds_ring) {
        if (p.ring_rows >= (kPendingCopies + 1) * T::kLines * kLine) wait_copies<kPendingCopies>();
        else wait_copies<0>();
        __syncthreads();
        while (base + rows_cast >= p.ring_rows) base -= p.ring_rows;
      }
      store_lines<T>(p, w, q_t, line, shared.stage[buffer]);
    }
    base = next_base;
    if (w_shared.blocks > 1) ++exchanges;
  }
  if constexpr (T::kThrottled)
    if (is_cluster_leader()) post_progress(p.throttle, PeerKernel::kColumns, uint32_t(INT_MAX));  // releases the rows
  if (p.cluster_log2 > 0) cluster_barrier();  // a block must not exit while words for its mailbox are in flight
}

// The launch shape, chosen from the average group. Every shape is right for any groups.
struct StripShape {
  int thread_rows, blocks;  // rows of threads of a block, blocks of a multiprocessor
  int cluster;              // blocks of a cluster
  int ring_rows;            // rows that a block holds; -1: the shape does not fit
  int64_t shared;           // bytes of shared memory of a block
};
template <class Groups, class T>
StripShape shape_with(int blocks, int64_t E, int reserved) {
  StripShape s = {T::kThreadRows, blocks, 1};
  s.shared = int64_t(device().shared_per_multiprocessor) * (100 - reserved) / 100 / blocks;
  s.shared -= kReservedShared + kStaticShared;
  const int64_t max_shared = device().shared_per_block - kStaticShared;
  if (s.shared > max_shared) s.shared = max_shared;
  const int64_t rest = s.shared - int64_t(sizeof(ColumnShared<T>)) - 4 * Groups::table_words(E);
  s.ring_rows = int(rest / kStripBytes / kChunkRows * kChunkRows);
  if (s.ring_rows < T::kLines * kLine) s.ring_rows = -1;  // fewer rows than are cast at once
  return s;
}
template <class Groups, class Types>
StripShape shape_for(const QuantizeParams& p, RowOverlap overlap) {
  using Small = ColumnTraitsOf<Groups, Types, kSmallThreadRows>;
  const int64_t average = average_rows(p);
  const int reserved = reserved_percent(p, overlap);
  const auto grow = [](StripShape& s, int64_t rows, int max_blocks) {
    while (s.cluster < max_blocks && int64_t(s.cluster) * s.ring_rows < rows) s.cluster *= 2;
  };
  if (overlap != RowOverlap::kNone) {
    StripShape s = shape_with<Groups, Small>(kBlocksWithRows, p.E, reserved);
    const bool fits = row_bytes(p) >= kMinSmallClusterBytes &&
                      (overlap == RowOverlap::kConcurrent || row_bytes(p) <= kShortThrottledBytes);
    if (Small::kClusters && device().has_clusters && fits) grow(s, average, kMaxSmallCluster);
    if (average <= int64_t(s.cluster) * s.ring_rows) return s;
  } else {
    for (int blocks = kSmallBlocks; blocks > 1; --blocks) {
      const StripShape s = shape_with<Groups, Small>(blocks, p.E, 0);
      if (average * kMinStripsInRing <= s.ring_rows) return s;
    }
  }
  const auto one_block = [&](auto traits) {
    using T = typename decltype(traits)::Type;
    const StripShape s = shape_with<Groups, T>(1, p.E, reserved);
    return s.ring_rows < 0 ? shape_with<Groups, T>(1, p.E, 0) : s;
  };
  if (!Types::kVectorized || !device().has_clusters) return one_block(TypeOf<Small>{});
  StripShape s = one_block(TypeOf<ColumnTraitsOf<Groups, Types, kLargeThreadRows>>{});
  grow(s, average + average / 3, kMaxCluster);
  return s;
}

template <class Groups, class T>
int launch_shape(const QuantizeParams& p, const StripShape& shape, RowOverlap overlap, void* stream) {
  constexpr auto kKernel = quantize_columns_kernel<Groups, T>;
  if (const int e = raise_kernel_limits<kKernel>()) return e;
  int clusters = 0, cluster = shape.cluster;  // smaller if the chip, or the MIG slice, has no cluster so large
  while (cluster > 1 && (clusters = resident_clusters<kKernel>(T::kThreads, cluster)) == 0) cluster /= 2;
  if (cluster == 1) clusters = device().multiprocessors;
  clusters *= shape.blocks;
  const auto strips = p.K ? uint32_t(ceil_div<int64_t>(p.K, T::kColumns)) : 1;
  ColumnsPlan plan = {p, shape.ring_rows, strips};
  plan.clusters = clusters;
  plan.max_unsplit_rows = INT_MAX;
  plan.reversed_groups = p.along_rows && overlap == RowOverlap::kNone;
  plan.rows_overlap = overlap != RowOverlap::kNone;
  while (1 << plan.cluster_log2 < cluster) ++plan.cluster_log2;
  Launch l = {dim3(clusters * cluster), dim3(kLanes, T::kThreadRows), stream};
  l.shared = shape.shared;
  l.cluster = cluster;
  const int64_t cluster_rows = int64_t(shape.ring_rows) * cluster, limit = cluster_rows * kUnsplitPercent / 100;
  const int64_t max_unsplit_rows = average_rows(p) > limit ? cluster_rows : limit;
  plan.packed_rows = int(cluster_rows * kPackedPercent / 100);
  if (T::kThrottled) plan.throttle = throttle_of(p, overlap);
  if (p.scratch) plan.scratch = p.scratch + throttle_words(p);  // mailboxes come behind it
  int64_t zeros = plan.throttle.passed ? throttle_words(p) : 0;
  if (T::kTeams && p.scratch && p.K > 0 && max_unsplit_rows >= 2 * kMinShareRows && p.rows > max_unsplit_rows) {
    plan.max_unsplit_rows = int(max_unsplit_rows);
    zeros = throttle_words(p) + mailbox_words(p, plan.max_unsplit_rows / 2);  // see split_of()
  }
  if (const int e = fill_bytes(p.scratch, 0, 4 * zeros, stream)) return e;
  return launch(kKernel, l, plan);
}

template <class In>
int launch_columns(const QuantizeParams& p, RowOverlap overlap, void* stream) {
  return dispatch_types<In>(p, [&](auto types) {
    using Types = decltype(types);
    auto run = [&](auto groups) {
      using Groups = typename decltype(groups)::Type;
      const StripShape shape = shape_for<Groups, Types>(p, overlap);
      if constexpr (Types::kVectorized)
        if (shape.thread_rows == kLargeThreadRows)
          return launch_shape<Groups, ColumnTraitsOf<Groups, Types, kLargeThreadRows>>(p, shape, overlap, stream);
      return launch_shape<Groups, ColumnTraitsOf<Groups, Types, kSmallThreadRows>>(p, shape, overlap, stream);
    };
    if (p.weight) return run(TypeOf<ExpertGroups>{});
    if constexpr (Types::kVectorized)
      if (!p.index.at) return run(TypeOf<TokenGroups<Source::kInPlace>>{});
    return run(TypeOf<TokenGroups<Source::kByIndex>>{});  // serves both sources
  });
}

}  // namespace moe_fp8
