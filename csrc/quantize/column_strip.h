// A strip waits in the shared memory of a cluster between amax and cast, so that x is read once. A lane handles a word
// of columns: two 16-bit columns or one of 32 bits.
#pragma once
#include "platform/clusters.h"
#include "platform/memory.h"
#include "platform/mailbox.h"
#include "platform/waves.h"
#include "primitives/row_reduce.h"
#include "primitives/transpose.h"
#include "quantize/column_schedule.h"
#include "quantize/policy.h"

namespace moe_fp8 {

constexpr int kStripBytes = 128, kChunks = kStripBytes / 16;

template <class Types_, int kThreadRows_, Source kSource_, bool kClusters_, bool kTeams_>
struct ColumnTraits {
  using Types = Types_;  // Vectorized or Generic
  using In = typename Types::In;
  static constexpr Source kSource = kSource_;
  static constexpr int kThreadRows = kThreadRows_, kThreads = kThreadRows * kLanes;
  static constexpr bool kClusters = kClusters_, kTeams = kTeams_;  // whether blocks may share a strip, and clusters
  static constexpr bool kThrottled = kClusters && kSource == Source::kInPlace;  // rows may run concurrently: rows.h
  static constexpr int kLines = kThreadRows / kLineChunks;  // lines of q_t that are cast at once
  static constexpr int kColumns = kStripBytes / 4 * kPerWord<In>;
  static constexpr int kRowStep = kThreads / kChunks;       // rows that the threads touch at once, 16 bytes each
};
template <class T>
using RowBits = const typename T::Types::Bits*;

template <class T>
using StripStage = TransposeStage<T::kColumns, kPerWord<typename T::In>>;

// Words that blocks receive from one another.
template <class T, bool = T::kTeams>
struct TeamWords { uint32_t team_amax[T::kThreadRows][kLanes]; };  // maxima that a row of threads has received
template <class T>
struct TeamWords<T, false> {};
template <bool kClusters>
struct ClusterWords { ClusterMailbox mailbox[2]; };
template <>
struct ClusterWords<false> {};

// Shared memory of a block, besides the ring and the group table.
template <class T>
struct ColumnShared : TeamWords<T>, ClusterWords<T::kClusters> {
  StripStage<T> stage[2][T::kLines];
  alignas(16) uint32_t thread_row_amax[T::kThreadRows][kLanes];  // one word of columns per lane
  float multiplier[T::kColumns];
  StripSlice slices[2 * kSlicesAhead];
};

// Thread t touches the rows that are t / kChunks modulo kRowStep. Returns the first of them from `begin` on.
template <class T>
MOE_DEVICE int first_row_from(int begin) {
  const int t = threadIdx.y * kLanes + threadIdx.x;
  return begin + ((t / kChunks - begin) & (T::kRowStep - 1));
}

// Walks the rows of a slice at `column`. next(r), called for first, first + step, ..., returns row r. for_each() calls
// f(r, row r) for the thread's rows from begin to end.
template <class T, Source = T::kSource>
struct RowWalk {
  const ColumnsPlan& p;
  RowBits<T> x;
  int64_t step;

  MOE_DEVICE RowWalk(const ColumnsPlan& p, const StripSlice& w, int first, int step, int64_t column)
      : p(p), x(find_element<typename T::Types>(p, w.x + first * p.row_stride + column)), step(step * p.row_stride) {}
  MOE_DEVICE RowBits<T> next(int) {
    const auto row = x;
    x = T::Types::advance(p, x, step);
    return row;
  }
  template <class F>
  static MOE_DEVICE void for_each(const ColumnsPlan& p, const StripSlice& w, int64_t column, int begin, int end, F f) {
    const int first = first_row_from<T>(begin);
    RowWalk walk(p, w, first, T::kRowStep, column);
#pragma unroll 4
    for (int r = first; r < end; r += T::kRowStep) f(r, walk.next(r));
  }
};
template <class T>
struct RowWalk<T, Source::kByIndex> {  // a null row is a row of zeros
  const ColumnsPlan& p;
  const StripSlice& w;
  int64_t column;

  MOE_DEVICE RowWalk(const ColumnsPlan& p, const StripSlice& w, int, int, int64_t column)
      : p(p), w(w), column(column) {}
  MOE_DEVICE RowBits<T> next(int r) const { return at(looked_up(r)); }
  MOE_DEVICE int looked_up(int r) const {
    // Vectorized kernels know that there is an index: behind a branch, loads would be issued one by one.
    return int(T::Types::kVectorized ? p.index.row(w.x + r) : source_row(p.index, w.x + r));
  }
  MOE_DEVICE RowBits<T> at(int source) const {
    return source < 0 ? nullptr : find_element<typename T::Types>(p, column + source * p.row_stride);
  }
  // Called by whole waves with the same begin and end. An index takes as long to load as a row, and the threads of a
  // row share it: each lane looks up one index, and shuffles hand them round.
  template <class F>
  static MOE_DEVICE void for_each(const ColumnsPlan& p, const StripSlice& w, int64_t column, int begin, int end, F f) {
    constexpr int kRows = kWarpSize / kChunks;  // rows of a wave at once
    const RowWalk walk(p, w, 0, 0, column);
    const int lane = (threadIdx.y * kLanes + threadIdx.x) % kWarpSize, first = first_row_from<T>(begin);
    const int lane_row = int(shfl(first, lane % kRows * kChunks)) + lane / kRows * T::kRowStep;
#pragma unroll 1
    for (int offset = 0; begin + offset < end; offset += kChunks * T::kRowStep) {
      const uint32_t looked_up = lane_row + offset < end ? walk.looked_up(lane_row + offset) : -1;
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        const int r = first + offset + i * T::kRowStep, source = int(shfl(looked_up, i * kRows + lane / kChunks));
        if (r < end) f(r, walk.at(source));
      }
    }
  }
};
template <class T>
MOE_DEVICE constexpr bool is_zero_row(const void* row) { return T::kSource == Source::kByIndex && row == nullptr; }

// The block's shared memory is a ring of p.ring_rows rows. A slice starts at its row `base`. Slices start and end at
// multiples of 16 rows, so that a chunk never wraps.
MOE_DEVICE int ring_row(const ColumnsPlan& p, int row) { return row < p.ring_rows ? row : row - p.ring_rows; }

// Starts the copies of the rows [begin, end) of a slice; thread t copies chunk t % kChunks of each of its rows.
template <class T>
MOE_DEVICE void copy_to_ring(const ColumnsPlan& p, const StripSlice& w, int begin, int end, Vec16* ring, int base) {
  const int t = threadIdx.y * kLanes + threadIdx.x, chunk = t % kChunks;
  const int64_t column = int64_t(w.strip) * T::kColumns + chunk * T::Types::kVec;
  RowWalk<T>::for_each(p, w, column, begin, end, [&](int r, RowBits<T> row) {
    Vec16* to = ring + ring_row(p, base + r) * kChunks + chunk;
    if (column >= p.K || is_zero_row<T>(row)) *to = Vec16{};
    else copy_words<typename T::Types>(p, to, row, p.K - column);
  });
}

// Loads 16 rows of the slice, from `first` on: a word of columns per lane. Rows and columns out of range are zeros.
template <class T>
MOE_DEVICE void load_chunk_rows(const ColumnsPlan& p, const StripSlice& w, int first, uint32_t (&v)[kChunkRows][1]) {
  const int64_t column = int64_t(w.strip) * T::kColumns + threadIdx.x * kPerWord<typename T::In>;
  RowWalk<T> walk(p, w, first, 1, column);
#pragma unroll
  for (int i = 0; i < kChunkRows; ++i) {
    v[i][0] = 0;
    if (first + i >= w.rows || column >= p.K) continue;
    const auto row = walk.next(first + i);
    if (!is_zero_row<T>(row)) v[i][0] = load_words<typename T::Types, uint32_t>(p, row, p.K - column);
  }
}

// Finds the maximum over the rows of the slice, for every word of columns, and stores it in shared.thread_row_amax: one
// value per row of threads. Rows beyond the ring are read kReversedRows at a time, last first: the L2 then still has
// the first ones.
template <class T>
MOE_DEVICE void reduce_slice(const ColumnsPlan& p, const StripSlice& w, const Vec16* ring, int base,
                             ColumnShared<T>& shared) {
  using In = typename T::In;
  const int t = threadIdx.y * kLanes + threadIdx.x, chunk = t % kChunks, first = t / kChunks;
  const int64_t column = int64_t(w.strip) * T::kColumns + chunk * T::Types::kVec;
  const int resident = w.resident_rows(p.ring_rows);
  uint32_t amax[4] = {};
  auto reduce = [&](const Vec16& v) {
#pragma unroll
    for (int i = 0; i < 4; ++i) amax[i] = max_magnitude<In>(amax[i], v.w[i]);
  };
  for (int end = w.rows; end > resident; end -= kReversedRows)
    RowWalk<T>::for_each(p, w, column, Max{}(resident, end - kReversedRows), end, [&](int, RowBits<T> row) {
      if (column < p.K && !is_zero_row<T>(row)) reduce(load_words<typename T::Types, Vec16>(p, row, p.K - column));
    });
  // Copies of the next slice may stay in flight. A thread reduces only what it copied itself, so no barrier is needed.
  wait_copies<1>();
#pragma unroll 4
  for (int r = first; r < resident; r += T::kRowStep) reduce(ring[ring_row(p, base + r) * kChunks + chunk]);
#pragma unroll
  for (int i = 0; i < 4; ++i)
    amax[i] = reduce_lanes<kLanes, kChunks, LaneOrder::kNearFirst>(amax[i], MaxMagnitude<In>{});
  Vec16* words = reinterpret_cast<Vec16*>(shared.thread_row_amax[threadIdx.y]);
  if (threadIdx.x < kChunks) words[chunk] = Vec16{{amax[0], amax[1], amax[2], amax[3]}};
}

// Called by one row of threads. Returns the cluster's maximum of the lane's columns. `exchanges` counts the exchanges
// so far: it selects one of two mailboxes, and its phase.
template <class T>
MOE_DEVICE uint32_t amax_of_cluster(const StripSlice& w, ColumnShared<T>& shared, uint32_t exchanges) {
  using In = typename T::In;
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < T::kThreadRows; ++i) amax = max_magnitude<In>(amax, shared.thread_row_amax[i][threadIdx.x]);
  if constexpr (T::kClusters) {
    if (w.blocks == 1) return amax;
    ClusterMailbox& mailbox = shared.mailbox[exchanges & 1];
    cluster_post(mailbox, amax, threadIdx.x);
    cluster_wait(mailbox, exchanges >> 1 & 1);
    const int first = int(cluster_rank()) - w.block;
    for (int i = 0; i < w.blocks; ++i) amax = max_magnitude<In>(amax, mailbox.words[first + i][threadIdx.x]);
  }
  return amax;
}

// The lane's mailbox of a share. It receives the share's maximum from its cluster, or from a waiter that recomputed it.
// The sign bits of the maximum mean nothing.
MOE_DEVICE uint32_t* mailbox_of(const ColumnsPlan& p, uint32_t share) {
  return reinterpret_cast<uint32_t*>(p.scratch) + int64_t(share) * kLanes + threadIdx.x;
}
// Called by one row of threads. Returns the maximum of a share, which its cluster posts. That cluster may not start
// before ours has ended. After kMaxMailboxPolls polls this row therefore recomputes the maximum itself, and polls
// meanwhile.
template <class T, class Groups>
MOE_DEVICE uint32_t amax_of_share(const ColumnsPlan& p, const Groups& groups, uint32_t share) {
  uint32_t* mailbox = mailbox_of(p, share);
  uint32_t amax = 0, word, v[kChunkRows][1];
  for (int i = 0; i < kMaxMailboxPolls; ++i)
    if (poll_word(mailbox, word)) return word;
  const StripSlice whole = slice_of(p, groups, share, 0, 0);
  for (int row = 0; row < whole.rows; row += kChunkRows) {
    load_chunk_rows<T>(p, whole, row, v);
    if (poll_word(mailbox, word)) return word;
#pragma unroll
    for (int i = 0; i < kChunkRows; ++i) amax = max_magnitude<typename T::In>(amax, v[i][0]);
  }
  post_word(mailbox, amax);
  return amax;
}
// Called by all threads. Receives the maxima of the team in shared.team_amax; a row of threads receives one share in
// kThreadRows.
template <class T, class Groups>
MOE_DEVICE void receive_team_amax(const ColumnsPlan& p, const Groups& groups, const StripSlice& w,
                                  ColumnShared<T>& shared) {
  uint32_t amax = 0;
  for (int rank = threadIdx.y; rank < w.team_size; rank += T::kThreadRows)
    amax = max_magnitude<typename T::In>(amax, amax_of_share<T>(p, groups, w.share - w.team_rank + rank));
  shared.team_amax[threadIdx.y][threadIdx.x] = amax;
}
// Called by one row of threads. Returns the team's maximum of the lane's columns.
template <class T>
MOE_DEVICE uint32_t team_amax_of(ColumnShared<T>& shared) {
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < T::kThreadRows; ++i) amax = max_magnitude<typename T::In>(amax, shared.team_amax[i][threadIdx.x]);
  return amax;
}

// Called by one row of threads. Makes the scales of the strip's columns over the whole group.
template <class T>
MOE_DEVICE void make_scales(const ColumnsPlan& p, const StripSlice& w, uint32_t amax, ColumnShared<T>& shared) {
  using In = typename T::In;
#pragma unroll
  for (int c = 0; c < kPerWord<In>; ++c) {
    const auto s = T::Types::template scale_of<ScaleF32>(p, magnitude_bits<In>(amax, c));
    const int local = threadIdx.x * kPerWord<In> + c;
    const int64_t column = int64_t(w.strip) * T::kColumns + local;
    shared.multiplier[local] = s.multiplier;
    if (w.block == 0 && w.team_rank == 0 && column < p.K && w.group < p.E)
      *column_scales(p).at(column, w.group) = s.stored();
  }
}

// Casts the lines [line, line + kLines) of q_t, 16 positions per row of threads. Positions of other blocks are left
// alone.
template <class T>
MOE_DEVICE void cast_lines(const ColumnsPlan& p, const StripSlice& w, int line, const Vec16* ring, int base,
                           const float* multiplier, StripStage<T> (&stages)[T::kLines]) {
  using In = typename T::In;
  const int position = line * kLine + threadIdx.y * kChunkRows;
  if (position < w.begin || position >= w.end || position >= w.line1 * kLine) return;
  StripStage<T>& stage = stages[threadIdx.y / kLineChunks];
  const int first = position - w.begin - w.skipped, rows = w.rows - first;
  uint32_t v[kChunkRows][1];
  const uint32_t* words = reinterpret_cast<const uint32_t*>(ring + ring_row(p, base + first) * kChunks) + threadIdx.x;
  if (T::Types::kStaticVariant && rows >= kChunkRows) {  // with kRuntime, both forms would spill registers
#pragma unroll
    for (int i = 0; i < kChunkRows; ++i) v[i][0] = words[i * kLanes];
    return T::Types::with_cast(p, [&](auto cast) { cast_chunks<In, true>(v, rows, multiplier, stage, cast); });
  }
#pragma unroll
  for (int i = 0; i < kChunkRows; ++i) v[i][0] = i < rows ? words[i * kLanes] : 0;
  T::Types::with_cast(p, [&](auto cast) { cast_chunks<In, false>(v, rows, multiplier, stage, cast); });
}

template <class T>
MOE_DEVICE void store_lines(const ColumnsPlan& p, const StripSlice& w, uint8_t* q_t, int line,
                            StripStage<T> (&stages)[T::kLines]) {
  constexpr int kThreads = T::kThreads / T::kLines;  // of a line
  constexpr int kStep = kThreads / kLineChunks;      // columns at once
  const int t = threadIdx.y * kLanes + threadIdx.x, line_of_thread = t / kThreads, chunk = t % kLineChunks;
  const int position = (line + line_of_thread) * kLine + chunk * kChunkRows, local = t % kThreads / kLineChunks;
  if (position < w.begin || position >= w.end || position >= w.line1 * kLine) return;
  StripStage<T>& stage = stages[line_of_thread];
  int64_t column = int64_t(w.strip) * T::kColumns + local;
  uint8_t* out = q_t + column * p.positions + position;
#pragma unroll
  for (int i = 0; i < T::kColumns; i += kStep, column += kStep, out += kStep * p.positions) {
    if (column >= p.K) return;
    store_chunk<T::Types::kVectorized>(out, stage.at(local + i, chunk), w.end - position);
  }
}

}  // namespace moe_fp8
