// How the strips of all groups are dealt out. A strip is 128 bytes of columns by all rows of a group. A share is what a
// cluster of blocks works on at once: a strip, several short ones, or, in a team of clusters, a piece of a long one. A
// part is a block's.
#pragma once
#include "primitives/groups.h"
#include "quantize/progress.h"
#include "quantize/sources.h"

namespace moe_fp8 {

struct StripsPlan : QuantizeParams {
  int held;          // rows that a block's shared memory holds
  uint32_t strips;   // of a group
  int cluster_log2;  // blocks of a cluster
  int clusters;      // no team has more, so that all of it can run at once
  int room;          // rows of all strips that a cluster works on at once, where there are several
  int most;          // rows of a strip that a cluster works on alone
  bool last_first;   // groups from the last to the first
  bool rows_beside;  // the next kernel in the stream may run beside this one
  Pace pace;         // of that one and this
};

// A group's positions are [begin, end), counted from its q_t_offset. The last of the tokens' spans is the tail: rows
// without a group, of which it has none, and positions without rows.
struct Span {
  int rows;
  int begin, end;
};
// Who works on a group's strips: of a long one a team of clusters, each on a share of it, of short ones a cluster on
// several at once. Strips are split at lines of q_t, hence written in whole lines.
struct Split { int team, lines, together_log2; };  // clusters; lines of a share; strips
MOE_DEVICE Split split_of(const StripsPlan& p, const Span& g) {
  const int lines = line_tiles(g.begin, g.end), size = g.rows > 0 ? g.rows : g.end - g.begin;
  if (size > p.most) {
    const int wanted = (size - 1) / p.most + 1;  // no sum that may pass 2^31
    // No team runs beside one of more than half of all clusters, so that takes them all: less than twice as many.
    const int each = ceil_div(lines, 2 * wanted > p.clusters ? p.clusters : wanted);
    return {ceil_div(lines, each), each, 0};
  }
  int log2 = 0;
  while (log2 < p.cluster_log2 && int64_t(size) << (log2 + 1) <= p.room) ++log2;
  return {1, lines, log2};
}
MOE_DEVICE int shares_of(const StripsPlan& p, const Split& s) {
  return s.team * int((p.strips + (1u << s.together_log2) - 1) >> s.together_log2);
}

// The geometry of groups, as a type: TokenGroups from offs, ExpertGroups of equal size. In the order of work, at(i) is
// group number i, and shares_before(i) counts the shares of all groups before it.
template <Source kSource_>
struct TokenGroups {
  static constexpr Source kSource = kSource_;
  static MOE_HD constexpr int table_words(int64_t E) { return GroupTable::words(int(E)) + int(E) + 2; }

  const StripsPlan& p;
  GroupTable table;
  int* shares;

  MOE_DEVICE TokenGroups(int* shared, const StripsPlan& p)
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
  MOE_DEVICE int at(int i) const { return p.last_first ? count() - 1 - i : i; }
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
  // Groups that start anywhere count positions from their own start, as experts do: chunks never hold two groups.
  MOE_DEVICE int64_t q_t_offset(int e) const { return p.align % 16 ? table.pos[e] : 0; }
};
struct ExpertGroups {
  static constexpr Source kSource = Source::kInPlace;
  static MOE_HD constexpr int table_words(int64_t) { return 0; }

  const StripsPlan& p;
  int shares;  // of each expert

  MOE_DEVICE ExpertGroups(int*, const StripsPlan& p) : p(p), shares(shares_of(p, split_of(p, span(0)))) {}
  MOE_DEVICE int count() const { return int(p.E); }
  MOE_DEVICE int at(int i) const { return p.last_first ? count() - 1 - i : i; }
  MOE_DEVICE int shares_before(int i) const { return i * shares; }
  MOE_DEVICE int find(int share) const { return share / shares; }
  MOE_DEVICE Span span(int) const { return {int(p.rows), 0, int(p.rows)}; }
  MOE_DEVICE int64_t rows_before(int e) const { return e * p.rows; }
  MOE_DEVICE int64_t first_row(int e, int row) const { return e * p.group_stride + row * p.row_stride; }
  MOE_DEVICE int64_t q_t_offset(int e) const { return e * p.rows * p.K; }
};

// A block's part of what its cluster works on.
struct StripSlice {
  bool there;         // otherwise none is left
  int group, strip;
  uint32_t share;     // of all shares
  int rank, team;     // which of the strip's shares it is, and of how many that need one another's amax
  int block, blocks;  // which of those that work on the share's strip, and of how many
  int begin, end;     // positions of the whole group
  int line0, line1;   // the block's lines of q_t
  int64_t x;          // of its first row: kInPlace: the element in x; kByIndex: which row it is
  int skipped;        // rows of the group before it
  int rows;

  MOE_DEVICE int held(int most) const { return rows < most ? rows : most; }
};
// Of one of a cluster's 2^blocks_log2 blocks. Shares are numbered group by group, strip by strip, so that a team's are
// next to one another.
template <class Groups>
MOE_DEVICE StripSlice part_of(const StripsPlan& p, const Groups& groups, uint32_t share, int block, int blocks_log2) {
  StripSlice w = {};
  w.share = share;
  w.there = share < uint32_t(groups.shares_before(groups.count()));
  if (!w.there) return w;
  const int i = groups.find(int(share));
  w.group = groups.at(i);
  const Span g = groups.span(w.group);
  const Split split = split_of(p, g);
  const int of_group = int(share) - groups.shares_before(i);
  blocks_log2 -= split.together_log2;
  w.blocks = 1 << blocks_log2;
  w.block = block % w.blocks;
  w.strip = (of_group / split.team << split.together_log2) + (block >> blocks_log2);
  w.rank = of_group % split.team;
  w.team = g.rows > 0 ? split.team : 1;
  w.begin = g.begin;
  w.end = g.end;
  const int stop = w.strip < int(p.strips) ? line_tiles(g.begin, g.end) : 0, first = g.begin / kLine;
  const int line0 = w.rank * split.lines, line1 = Min{}(line0 + split.lines, stop);
  const int each = (line1 - line0 + w.blocks - 1) >> blocks_log2, skip = w.block * each;
  w.line0 = first + Min{}(line0 + skip, line1);
  w.line1 = first + Min{}(line0 + skip + each, line1);
  w.skipped = Max{}(w.line0 * kLine - g.begin, 0);
  if (w.line0 < w.line1) w.rows = Max{}(Min{}(w.line1 * kLine - g.begin, g.rows) - w.skipped, 0);
  w.x = groups.first_row(w.group, w.skipped);
  return w;
}

}  // namespace moe_fp8
