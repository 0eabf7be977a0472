// The schedule of strips.
//
//   strip   128 bytes of columns by all rows of a group: the columns that a cluster scales at once
//   share   the work of one cluster at a time: a strip, several short strips, or, in a team, some lines of a long strip
//   slice   the part of a share that one block holds
//   team    the clusters that share a long strip; their column maxima meet in mailboxes
//
//              columns (128 bytes)                a cluster of 4 blocks, one strip      a team of 2 clusters
//            +--------+--------+---                +--------+ block 0: slice            +--------+ cluster 0: share
//   rows of  | strip  | strip  |                   |        | block 1: slice            |        |
//   a group  |   0    |   1    |                   |        | block 2: slice            +--------+ cluster 1: share
//            +--------+--------+---                +--------+ block 3: slice            +--------+
#pragma once
#include "primitives/groups.h"
#include "quantize/progress.h"
#include "quantize/sources.h"

namespace moe_fp8 {

struct ColumnsPlan : QuantizeParams {
  int ring_rows;         // rows that a block's shared memory holds
  uint32_t strips;       // strips of a group
  int cluster_log2;      // log2 of the blocks of a cluster
  int clusters;          // resident clusters: no team has more, so that a team can run at once
  int packed_rows;       // of a cluster's rows, how many several short strips may fill together
  int max_unsplit_rows;  // rows of the longest strip that one cluster takes
  bool reversed_groups;  // whether groups come from the last to the first
  bool rows_overlap;     // whether the next kernel in the stream may run concurrently
  ProgressThrottle throttle;  // between these two kernels
};

// A group's positions are [begin, end), counted from its q_t_offset. The last span of tokens is the tail. It has
// positions without rows, and no rows: rows of no group are not quantized along tokens.
struct Span {
  int rows;
  int begin, end;
};
// How the strips of a group are shared. A team of clusters takes a long strip, each cluster a share of it. A cluster
// takes several short strips together. Strips are split at lines of q_t, so that stores write whole lines.
struct Split {
  int team_size;    // clusters
  int lines;        // lines of a share
  int strips_log2;  // log2 of the strips of a share
};
MOE_DEVICE Split split_of(const ColumnsPlan& p, const Span& g) {
  const int lines = line_tiles(g.begin, g.end), size = g.rows > 0 ? g.rows : g.end - g.begin;
  if (size > p.max_unsplit_rows) {
    const int wanted_size = (size - 1) / p.max_unsplit_rows + 1;  // a sum would pass 2^31
    // A team of more than half of all clusters leaves no room for another team. Such a team takes all clusters.
    const int share_lines = ceil_div(lines, 2 * wanted_size > p.clusters ? p.clusters : wanted_size);
    return {ceil_div(lines, share_lines), share_lines, 0};
  }
  int log2 = 0;
  while (log2 < p.cluster_log2 && int64_t(size) << (log2 + 1) <= p.packed_rows) ++log2;
  return {1, lines, log2};
}
MOE_DEVICE int shares_of(const ColumnsPlan& p, const Split& s) {
  return s.team_size * int((p.strips + (1u << s.strips_log2) - 1) >> s.strips_log2);
}

// Groups as a type: TokenGroups come from offs, ExpertGroups have equal sizes. at(i) is the group that comes i-th, and
// shares_before(i) counts the shares of all groups before it.
template <Source kSource_>
struct TokenGroups {
  static constexpr Source kSource = kSource_;
  static MOE_HD constexpr int table_words(int64_t E) { return GroupTable::words(int(E)) + int(E) + 2; }

  const ColumnsPlan& p;
  GroupTable table;
  int* shares;

  MOE_DEVICE TokenGroups(int* shared, const ColumnsPlan& p)
      : p(p), table(shared, int(p.E)), shares(shared + GroupTable::words(int(p.E))) {
    build_group_table(table, p.offs, int(p.E), int(p.rows), int(p.positions), p.align);
    const int threads = blockDim.x * blockDim.y, t = threadIdx.y * blockDim.x + threadIdx.x;
    if (blockIdx.x == 0)
      for (int e = t; e < p.E; e += threads) p.padded_offs[e] = table.pos[e + 1];
    if (t == 0) shares[0] = 0;
    for (int i = t; i < count(); i += threads) shares[i + 1] = shares_of(p, split_of(p, span(at(i))));
    __syncthreads();
    block_scan(shares + 1, count(), Sum{});
  }
  MOE_DEVICE int count() const { return int(p.E) + 1; }
  MOE_DEVICE int at(int i) const { return p.reversed_groups ? count() - 1 - i : i; }
  MOE_DEVICE int shares_before(int i) const { return shares[i]; }
  MOE_DEVICE int find(int share) const { return GroupTable::find(shares, int(p.E), share); }
  MOE_DEVICE Span span(int e) const {
    const int first = int(q_t_offset(e));
    return {e == p.E ? 0 : table.rows(e), table.pos[e] - first, table.pos[e + 1] - first};
  }
  MOE_DEVICE int64_t rows_before(int e) const { return table.row[e]; }
  MOE_DEVICE int64_t first_row(int e, int row) const {
    return (table.row[e] + int64_t(row)) * (kSource == Source::kInPlace ? p.row_stride : 1);
  }
  // If groups start at any position, a group's positions are counted from its start, so that no chunk holds two groups.
  MOE_DEVICE int64_t q_t_offset(int e) const { return p.align % 16 ? table.pos[e] : 0; }
};
struct ExpertGroups {
  static constexpr Source kSource = Source::kInPlace;
  static MOE_HD constexpr int table_words(int64_t) { return 0; }

  const ColumnsPlan& p;
  int shares;  // shares of each expert

  MOE_DEVICE ExpertGroups(int*, const ColumnsPlan& p) : p(p), shares(shares_of(p, split_of(p, span(0)))) {}
  MOE_DEVICE int count() const { return int(p.E); }
  MOE_DEVICE int at(int i) const { return p.reversed_groups ? count() - 1 - i : i; }
  MOE_DEVICE int shares_before(int i) const { return i * shares; }
  MOE_DEVICE int find(int share) const { return share / shares; }
  MOE_DEVICE Span span(int) const { return {int(p.rows), 0, int(p.rows)}; }
  MOE_DEVICE int64_t rows_before(int e) const { return e * p.rows; }
  MOE_DEVICE int64_t first_row(int e, int row) const { return e * p.group_stride + row * p.row_stride; }
  MOE_DEVICE int64_t q_t_offset(int e) const { return e * p.rows * p.K; }
};

// A block's part of its cluster's share.
struct StripSlice {
  bool valid;         // false: no work is left
  int group, strip;
  uint32_t share;     // number among all shares
  int team_rank, team_size;  // number of the share in its team, and shares of the team
  int block, blocks;  // number of the block among the blocks of the strip, and their count
  int begin, end;     // positions of the group
  int line0, line1;   // lines of q_t that the block writes
  int64_t x;          // the first row: as an element of x (kInPlace), or as a row number (kByIndex)
  int skipped;        // rows of the group before the slice
  int rows;

  MOE_DEVICE int resident_rows(int ring_rows) const { return rows < ring_rows ? rows : ring_rows; }
};
// The slice of one of a cluster's 2^blocks_log2 blocks. Shares are numbered group by group and strip by strip, so that
// the shares of a team are neighbours.
template <class Groups>
MOE_DEVICE StripSlice slice_of(const ColumnsPlan& p, const Groups& groups, uint32_t share, int block, int blocks_log2) {
  StripSlice w = {};
  w.share = share;
  w.valid = share < uint32_t(groups.shares_before(groups.count()));
  if (!w.valid) return w;
  const int i = groups.find(int(share));
  w.group = groups.at(i);
  const Span g = groups.span(w.group);
  const Split split = split_of(p, g);
  const int in_group = int(share) - groups.shares_before(i);
  blocks_log2 -= split.strips_log2;
  w.blocks = 1 << blocks_log2;
  w.block = block % w.blocks;
  w.strip = (in_group / split.team_size << split.strips_log2) + (block >> blocks_log2);
  w.team_rank = in_group % split.team_size;
  w.team_size = g.rows > 0 ? split.team_size : 1;
  w.begin = g.begin;
  w.end = g.end;
  const int stop = w.strip < int(p.strips) ? line_tiles(g.begin, g.end) : 0, first = g.begin / kLine;
  const int line0 = w.team_rank * split.lines, line1 = Min{}(line0 + split.lines, stop);
  const int slice_lines = (line1 - line0 + w.blocks - 1) >> blocks_log2, skip = w.block * slice_lines;
  w.line0 = first + Min{}(line0 + skip, line1);
  w.line1 = first + Min{}(line0 + skip + slice_lines, line1);
  w.skipped = Max{}(w.line0 * kLine - g.begin, 0);
  if (w.line0 < w.line1) w.rows = Max{}(Min{}(w.line1 * kLine - g.begin, g.rows) - w.skipped, 0);
  w.x = groups.first_row(w.group, w.skipped);
  return w;
}

}  // namespace moe_fp8
