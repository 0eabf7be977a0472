// How the strips of all groups are dealt out. A strip is 128 bytes of columns by all rows of a group. A cluster of
// blocks works on one, or, in a team of clusters, on a share of one that is too long; a part is a block's.
#pragma once
#include "primitives/group_table.h"
#include "quantize/pace.h"
#include "quantize/sources.h"

namespace moe_fp8 {

struct StripsPlan : QuantizeParams {
  int held;          // rows that a block's shared memory holds
  uint32_t strips;   // of a group
  int cluster_log2;  // blocks of a cluster
  int most;          // rows of a strip that a cluster works on alone
  int most_shares;   // of a longer one: no more than clusters, so that all of a team can run at once
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
// Strips are split at lines of q_t, hence written in whole lines.
struct Split { int shares, lines; };  // shares of so many lines
MOE_DEVICE Split split_of(const StripsPlan& p, const Span& g) {
  const int lines = line_tiles(g.begin, g.end), size = g.rows > 0 ? g.rows : g.end - g.begin;
  if (size <= p.most) return {1, lines};
  const int each = ceil_div(lines, Min{}(ceil_div(size, p.most), p.most_shares));
  return {ceil_div(lines, each), each};
}

// The geometry of groups, as a type: TokenGroups from offs, ExpertGroups of equal size. In the order of work, at(i) is
// group number i, and shares_before(i) counts the shares of one strip of each group before it.
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
    for (int i = t; i < count(); i += threads) shares[i + 1] = split_of(p, span(at(i))).shares;
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
  int shares;  // of each strip

  MOE_DEVICE ExpertGroups(int*, const StripsPlan& p) : p(p), shares(split_of(p, span(0)).shares) {}
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
struct Part {
  bool there;        // otherwise none is left
  int group, strip;
  uint32_t share;    // of all shares of strips
  int rank, team;    // which of the strip's shares it is, and of how many that need one another's amax
  int begin, end;    // positions of the whole group
  int line0, line1;  // the block's lines of q_t
  int64_t x;         // of its first row: kInPlace: the element in x; kByIndex: which row it is
  int skipped;       // rows of the group before it
  int rows;

  MOE_DEVICE int held(int most) const { return rows < most ? rows : most; }
};
// Of one of 2^blocks_log2 blocks. Shares are numbered group by group, strip by strip, so that a team's are next to one
// another.
template <class Groups>
MOE_DEVICE Part part_of(const StripsPlan& p, const Groups& groups, uint32_t share, int block, int blocks_log2) {
  Part w = {};
  w.share = share;
  w.there = share < uint32_t(groups.shares_before(groups.count())) * p.strips;
  if (!w.there) return w;
  const int i = groups.find(int(share / p.strips));
  w.group = groups.at(i);
  const Span g = groups.span(w.group);
  const Split split = split_of(p, g);
  const uint32_t of_group = share - uint32_t(groups.shares_before(i)) * p.strips;
  w.strip = int(of_group / uint32_t(split.shares));
  w.rank = int(of_group % uint32_t(split.shares));
  w.team = g.rows > 0 ? split.shares : 1;
  w.begin = g.begin;
  w.end = g.end;
  const int stop = line_tiles(g.begin, g.end), first = g.begin / kLine;
  const int line0 = w.rank * split.lines, line1 = Min{}(line0 + split.lines, stop);
  const int each = (line1 - line0 + (1 << blocks_log2) - 1) >> blocks_log2, skip = block * each;
  w.line0 = first + Min{}(line0 + skip, line1);
  w.line1 = first + Min{}(line0 + skip + each, line1);
  w.skipped = Max{}(w.line0 * kLine - g.begin, 0);
  if (w.line0 < w.line1) w.rows = Max{}(Min{}(w.line1 * kLine - g.begin, g.rows) - w.skipped, 0);
  w.x = groups.first_row(w.group, w.skipped);
  return w;
}

}  // namespace moe_fp8
