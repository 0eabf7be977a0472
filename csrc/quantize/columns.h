// Columns that have a scale for every group, strip by strip. Blocks wait for one another inside a cluster, which the
// hardware starts and runs as one. Clusters of a team need not run at once: after a while, one helps itself.
#pragma once
#include <climits>

#include "platform/launch.h"
#include "quantize/geometries.h"
#include "quantize/column_strip.h"

namespace moe_fp8 {

// Every tile choice, with what it gave on an H200. Small groups: two to four blocks of 8 rows of threads a
// multiprocessor, as many as still hold two strips each, one in work and one on its way (130 rows a group: four blocks
// 0.70 of copy, three 0.66, two 0.56; 260 rows: four 0.64, three 0.77, two 0.79). Larger ones: one block of 16, in
// clusters that hold a third more rows than the average group has (0.80 to 0.86; clusters that just hold the strip 0.5
// to 0.7).
constexpr int kSmallBlocks = 4, kStripsHeld = 2, kMaxCluster = 16;

// Groups that are longer than a cluster holds are shared by a team of clusters, which tell one another their amax
// through memory; so are those that would leave no room for the next strip, in percent of what a cluster holds. A
// cluster works on several strips at once, a few blocks each, where it has room for them: a strip takes some 3 us
// however short it is. Of what even groups take, on an H200, with sizes that fall as 1 / rank^p, p = 0.6, 1, 1.5, and
// with 0.9 of all rows in one group: [131072, 4096] E = 16 0.86, 0.83, 0.81, 0.82; with one strip a cluster 0.87, 0.80,
// 0.76, 0.68; with a cluster for every strip 0.79, 0.65, 0.55. [262144, 2048] E = 128 0.89, 0.85, 0.74, 0.68; 0.88,
// 0.80, 0.70, 0.64; 0.67, 0.49, 0.37. Room of 60 to 100 percent in place of 70 gave the same. Shares that leave half a
// cluster free, teams that divide all clusters without rest, next strips brought as far as the L2: 0.02 to 0.2 less.
// Teams of single blocks hardly mind sizes, but take 1.1 to 1.2 times as long where groups are even: every strip then
// waits for words to come through memory.
constexpr int kAlone = 80, kTogether = 70;

// A part that is longer than the ring moves through it, read a second time: one group of 900,000 rows of 2048 takes
// 0.77 of what it takes where the second time goes past the ring. Copies of so many turns of lines may be under way
// behind those that the next turn needs.
constexpr int kBehind = 2;

// Small blocks of tokens work in teams, too, those of experts, which are all as long, in clusters: both would take the
// room of 40 rows. Likewise of what even groups take, p = 0.6, 1, 1.5: [16640, 2048] E = 128 0.84, 0.81, 0.74, where
// blocks that worked alone gave 0.73, 0.50, 0.31; [131072, 2048] E = 512 0.88, 0.78, 0.65, and 0.82, 0.51, 0.31. Even
// groups take 3 to 10% longer for it: 2 us to clear the notes, the rest in the kernel.
template <class Groups, class Types, int kThreadRows,
          bool kLarge = kThreadRows == kLargeThreadRows, bool kExperts = std::is_same_v<Groups, ExpertGroups>>
using TraitsOf = StripTraits<Types, kThreadRows, Groups::kSource, Types::kVectorized && (kLarge || kExperts),
                             Types::kVectorized && (kLarge || !kExperts)>;
template <class T>  // that registers are for
constexpr int kBlocks = T::kThreadRows == kSmallThreadRows && T::Types::kVectorized && kCastsInHardware ? kSmallBlocks : 1;

// With rows beside the columns, both must keep pace to share what either has read: the columns leave a part of the
// shared memory to the rows, the more the longer a strip takes, up to where a cluster of blocks works on it. Of copy on
// an H200 by KB of 228 left, at rows a group: 130: 40 0.67, 48 0.72, 56 0.68; 260: 64 0.69, 72 0.80, 80 0.75; 520: 72
// 0.73, 80 0.83, 96 0.69; 1408: 56 0.67, 72 0.77, 88 0.76; 4096: 56 0.67, 72 0.70, 80 0.66; 8192: 48 0.67, 56 0.71, 64
// 0.65; 16384: 40 0.65, 48 0.66, 56 0.65. Rows first and then columns: 0.52 to 0.64. Columns of rows that are taken by
// index take longer, so that the rows beside them need less: 260: 64 0.69, 72 0.62; 2048: 40 0.68, 48 0.61, 80 0.54;
// 8192: 40 0.55, 56 0.54; 16384: 32 0.56, 48 0.54, 64 0.44.
//
// Of experts, two small blocks a multiprocessor, of clusters that wait at different times. Both directions on an H200,
// so and by one large block: [128, 512, 1536] 127 and 140 us, [64, 1408, 2048] 231 and 236; in step [128, 1536, 2048]
// 473 and 518; call by call [16, 3072, 4096] 265 and 319, in step [128, 4096, 1024] 748 and 867, where clusters that
// hold a tenth more rows than an expert has took a fifth longer. But in step [128, 2048, 768] 305 and 290, [128, 2048,
// 4096] 1364 and 1245. Clusters of more than 8 were not tried.
constexpr int kBlocksBesideRows = 2, kMostOfSmall = 8;
constexpr int64_t kLeastOfSmall = 2048;  // bytes of a row
struct Spare { int64_t rows; int percent, percent_by_index; };
constexpr Spare kSpare[] = {{192, 21, 18}, {384, 32, 28}, {2048, 35, 18},
                            {6144, 32, 17}, {14336, 25, 17}, {INT64_MAX, 21, 14}};
// In step the rows need less, for they wait rather than fall behind: [128, 2048, 4096] at 18, 22, 26, 30 and 35 percent
// 1369, 1306, 1292, 1265 and 1534 us; in small blocks, call by call, [128, 4096, 1024] at 17, 20 and 23 percent 783,
// 750 and 918, [128, 1536, 2048] 589, 570 and 549.
constexpr int64_t kShortInStep = 4096;  // bytes of a row
constexpr int kSpareInStep = 28, kSpareOfShortInStep = 20;
inline int spare_beside(const QuantizeParams& p, Beside beside) {
  if (beside == Beside::kNo) return 0;
  if (beside == Beside::kInStep) return row_bytes(p) > kShortInStep ? kSpareInStep : kSpareOfShortInStep;
  int i = 0;
  while (average_rows(p) > kSpare[i].rows) ++i;
  return p.index.at ? kSpare[i].percent_by_index : kSpare[i].percent;
}

// How many rows' worth of x comes before a part.
template <class Groups>
MOE_DEVICE uint32_t rows_past(const StripsPlan& p, const Groups& groups, const StripSlice& w) {
  const int64_t shares = int64_t(w.strip) * w.team + w.rank, all = int64_t(p.strips) * w.team;
  return uint32_t(groups.rows_before(w.group) + groups.span(w.group).rows * shares / all);
}

// By a thread of each cluster, for which the others of it then wait. seen: where the rows were a turn ago; kGone: they
// stood still for as long as a wait takes, for they may not be running, and are waited for no more.
constexpr uint32_t kGone = ~0u;
MOE_DEVICE bool leads() { return threadIdx.x == 0 && threadIdx.y == 0 && cluster_rank() == 0; }
template <class Groups>
MOE_DEVICE void keep_in_step(const StripsPlan& p, const Groups& groups, const StripSlice& w, uint32_t& seen) {
  if (!leads()) return;
  const uint32_t past = rows_past(p, groups, w);
  tell_pace(p.pace, Walker::kColumns, past);
  if (seen == kGone) return;
  seen = keep_pace(p.pace, Walker::kColumns, past, seen) ? other_pace(p.pace, Walker::kColumns) : kGone;
}

// Threads of large blocks leave registers of the multiprocessor to the rows beside them: up to 96 each are theirs,
// where rows by index would take 115. With 105 each, rows started where the columns ended: both directions of even
// groups took 7 to 17% longer on an H200.
template <class T>
constexpr int kThreadsBounded = T::kThreadRows == kLargeThreadRows ? T::kThreads * 5 / 4 : T::kThreads;

template <class Groups, class T>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreadsBounded<T>, kBlocks<T>)
    quantize_strips_kernel(MOE_GRID_CONSTANT const StripsPlan p) {
  MOE_DYNAMIC_SMEM(smem);
  Vec16* ring = reinterpret_cast<Vec16*>(smem);
  auto& shared = *reinterpret_cast<StripShared<T>*>(ring + p.held * kChunks);
  wait_for_previous_kernel();
  if (p.rows_beside) allow_next_kernel();
  const Groups groups(reinterpret_cast<int*>(&shared + 1), p);
  if constexpr (T::kClusters)
    if (p.cluster_log2 > 0) {
      if (threadIdx.y == 0 && threadIdx.x < 2) cluster_inbox_init(shared.inbox[threadIdx.x]);
      cluster_barrier();  // nobody sends to an inbox that is not there
    }

  auto part = [&](uint32_t turn) -> StripSlice& { return shared.parts[turn % (2 * kPartsAhead)]; };
  auto schedule = [&](uint32_t first) {  // by lanes of one row of threads
    const uint32_t turn = first + threadIdx.x;
    if (threadIdx.y != T::kThreadRows - 1 || threadIdx.x >= kPartsAhead) return;
    const uint32_t share = (blockIdx.x >> p.cluster_log2) + turn * (gridDim.x >> p.cluster_log2);
    part(turn) = part_of(p, groups, share, int(cluster_rank()), p.cluster_log2);
  };
  schedule(0);
  __syncthreads();
  copy_to_ring<T>(p, part(0), 0, part(0).held(p.held), ring, 0);
  commit_copies();
  int base = 0, buffer = 0;
  uint32_t rows_seen = 0, told = 0;
  for (uint32_t turn = 0; part(turn).there; ++turn) {
    const StripSlice w = part(turn);
    const StripSlice& mine = part(turn);  // in shared memory; w is in registers, which suffice for what loops need
    const StripSlice& next = part(turn + 1);
    if constexpr (T::kInStep)
      if (p.pace.past) keep_in_step(p, groups, w, rows_seen);
    const bool longer = w.rows > p.held;  // than the ring, which then moves along
    const int length = round_up(w.rows, kChunkRows);
    const int next_base = longer ? (base + length) % p.held : ring_row(p, base + length);
    int own = w.held(p.held), copied = 0;
    auto copy_next = [&](int freed) {  // into what the strip leaves of the ring: its own rows, then the next strip's
      if (longer) {
        const int end = freed < w.rows - p.held ? p.held + freed : w.rows;  // the sum may pass 2^31
        copy_to_ring<T>(p, w, own, end, ring, (base + own) % p.held - own);
        own = end;
      }
      const int end = next.held(p.held - length + freed);
      if (end > copied) copy_to_ring<T>(p, next, copied, end, ring, next_base);
      copied = Max{}(copied, end);
      commit_copies();
    };
    // Before the amax, room permitting: from 0.64 to 0.82 of copy at large groups, from 0.78 to 0.72 at small ones.
    if (T::kThreadRows == kLargeThreadRows || (T::kClusters && p.cluster_log2 > 0) || w.line0 == w.line1) copy_next(0);
    else commit_copies();
    reduce_part<T>(p, w, ring, base, shared);
    __syncthreads();
    if (turn % kPartsAhead == 0) schedule(turn + kPartsAhead);  // nobody is left in the turns before
    uint32_t amax = 0;
    if (threadIdx.y == 0) amax = amax_of_cluster<T>(mine, shared, told);
    if constexpr (T::kTeams)
      if (mine.team > 1) {
        if (threadIdx.y == 0 && cluster_rank() == 0) post_word(note(p, mine.share), amax);
        hear_team<T>(p, groups, mine, shared);
        __syncthreads();
        if (threadIdx.y == 0) amax = amax_of_team<T>(shared);
      }
    if (threadIdx.y == 0) make_scales<T>(p, mine, amax, shared);
    __syncthreads();
    uint8_t* q_t = p.q_t + groups.q_t_offset(w.group);
    for (int line = w.line0; line < w.line1; line += T::kLines, buffer ^= 1) {
      cast_lines<T>(p, w, line, ring, base, shared.multiplier, shared.stage[buffer]);
      __syncthreads();
      const int cast = (line + T::kLines) * kLine - w.begin - w.skipped;  // rows
      copy_next(cast < length ? cast : length);
      if (longer) {
        if (p.held >= (kBehind + 1) * T::kLines * kLine) wait_copies<kBehind>();
        else wait_copies<0>();
        __syncthreads();
        while (base + cast >= p.held) base -= p.held;
      }
      store_lines<T>(p, w, q_t, line, shared.stage[buffer]);
    }
    base = next_base;
    if (mine.blocks > 1) ++told;
  }
  if constexpr (T::kInStep)
    if (leads()) tell_pace(p.pace, Walker::kColumns, uint32_t(INT_MAX));  // the others are about to end, too
  if (p.cluster_log2 > 0) cluster_barrier();  // nobody leaves while notes to it are under way
}

// How many blocks hold a strip, from the average group; any choice is right for any groups.
struct StripShape {
  int thread_rows, blocks;  // of a block; of a multiprocessor
  int cluster;              // blocks
  int held;                 // rows a block; negative: does not fit
  int64_t shared;           // bytes a block
};
template <class Groups, class T>
StripShape shape_with(int blocks, int64_t E, int spare) {
  StripShape s = {T::kThreadRows, blocks, 1};
  s.shared = int64_t(device().shared_per_multiprocessor) * (100 - spare) / 100 / blocks;
  s.shared -= kReservedShared + kStaticShared;
  const int64_t most = device().shared_per_block - kStaticShared;
  if (s.shared > most) s.shared = most;
  const int64_t rest = s.shared - int64_t(sizeof(StripShared<T>)) - 4 * Groups::table_words(E);
  s.held = int(rest / kStripBytes / kChunkRows * kChunkRows);
  if (s.held < T::kLines * kLine) s.held = -1;  // what is cast at once
  return s;
}
template <class Groups, class Types>
StripShape shape_for(const QuantizeParams& p, Beside beside) {
  using Small = TraitsOf<Groups, Types, kSmallThreadRows>;
  const int64_t average = average_rows(p);
  const int spare = spare_beside(p, beside);
  const auto grow = [](StripShape& s, int64_t rows, int most) {
    while (s.cluster < most && int64_t(s.cluster) * s.held < rows) s.cluster *= 2;
  };
  if (beside != Beside::kNo) {
    StripShape s = shape_with<Groups, Small>(kBlocksBesideRows, p.E, spare);
    const bool fits = row_bytes(p) >= kLeastOfSmall && (beside == Beside::kYes || row_bytes(p) <= kShortInStep);
    if (Small::kClusters && device().has_clusters && fits) grow(s, average, kMostOfSmall);
    if (average <= int64_t(s.cluster) * s.held) return s;
  } else {
    for (int blocks = kSmallBlocks; blocks > 1; --blocks) {
      const StripShape s = shape_with<Groups, Small>(blocks, p.E, 0);
      if (average * kStripsHeld <= s.held) return s;
    }
  }
  const auto alone = [&](auto of_traits) {
    using T = typename decltype(of_traits)::Type;
    const StripShape s = shape_with<Groups, T>(1, p.E, spare);
    return s.held < 0 ? shape_with<Groups, T>(1, p.E, 0) : s;
  };
  if (!Types::kVectorized || !device().has_clusters) return alone(TypeOf<Small>{});
  StripShape s = alone(TypeOf<TraitsOf<Groups, Types, kLargeThreadRows>>{});
  grow(s, average + average / 3, kMaxCluster);
  return s;
}

template <class Groups, class T>
int launch_shape(const QuantizeParams& p, const StripShape& shape, Beside beside, void* stream) {
  constexpr auto kKernel = quantize_strips_kernel<Groups, T>;
  if (const int e = allow_large<kKernel>()) return e;
  int clusters = 0, cluster = shape.cluster;  // smaller ones where the chip, or our slice of it, has no such
  while (cluster > 1 && (clusters = resident_clusters<kKernel>(T::kThreads, cluster)) == 0) cluster /= 2;
  if (cluster == 1) clusters = device().multiprocessors;
  clusters *= shape.blocks;
  const auto strips = p.K ? uint32_t(ceil_div<int64_t>(p.K, T::kColumns)) : 1;
  StripsPlan plan = {p, shape.held, strips};
  plan.clusters = clusters;
  plan.most = INT_MAX;
  plan.last_first = p.along_rows && beside == Beside::kNo;
  plan.rows_beside = beside != Beside::kNo;
  while (1 << plan.cluster_log2 < cluster) ++plan.cluster_log2;
  Launch l = {dim3(clusters * cluster), dim3(kLanes, T::kThreadRows), stream};
  l.shared = shape.shared;
  l.cluster = cluster;
  const int64_t held = int64_t(shape.held) * cluster, alone = held * kAlone / 100;
  const int64_t most = average_rows(p) > alone ? held : alone;
  plan.room = int(held * kTogether / 100);
  if (T::kInStep) plan.pace = pace_of(p, beside);
  if (p.scratch) plan.scratch = p.scratch + pace_words(p);  // notes come behind it
  int64_t zeros = plan.pace.past ? pace_words(p) : 0;
  if (T::kTeams && p.scratch && p.K > 0 && most >= 2 * kLeastShare && p.rows > most) {
    plan.most = int(most);
    zeros = pace_words(p) + note_words(p, plan.most / 2);  // see split_of()
  }
  if (const int e = fill_bytes(p.scratch, 0, 4 * zeros, stream)) return e;
  return launch(kKernel, l, plan);
}

template <class In>
int launch_strips(const QuantizeParams& p, Beside beside, void* stream) {
  return dispatch_types<In>(p, [&](auto types) {
    using Types = decltype(types);
    auto run = [&](auto of_groups) {
      using Groups = typename decltype(of_groups)::Type;
      const StripShape shape = shape_for<Groups, Types>(p, beside);
      if constexpr (Types::kVectorized)
        if (shape.thread_rows == kLargeThreadRows)
          return launch_shape<Groups, TraitsOf<Groups, Types, kLargeThreadRows>>(p, shape, beside, stream);
      return launch_shape<Groups, TraitsOf<Groups, Types, kSmallThreadRows>>(p, shape, beside, stream);
    };
    if (p.weight) return run(TypeOf<ExpertGroups>{});
    if constexpr (Types::kVectorized)
      if (!p.index.at) return run(TypeOf<TokenGroups<Source::kInPlace>>{});
    return run(TypeOf<TokenGroups<Source::kByIndex>>{});  // of either source
  });
}

}  // namespace moe_fp8
