// How the strips of all groups are dealt out: a strip is 128 bytes of columns by all rows of a group, a part of it the
// rows that one block of a cluster works on.
#pragma once
#include "platform/clusters.h"
#include "primitives/group_table.h"
#include "quantize/sources.h"

namespace moe_fp8 {

struct StripsPlan : QuantizeParams {
  int held;          // rows that a block's shared memory holds
  int strips;        // of a group
  int cluster_log2;  // blocks of a cluster
  bool last_first;   // groups from the last to the first
  bool rows_beside;  // the next kernel in the stream may run beside this one
};

// The geometry of groups, as a type: TokenGroups from offs, ExpertGroups of equal size. A group's positions are
// [begin, end), counted from its q_t_offset. The last of the tokens' spans is the tail: rows without a group, positions
// without rows.
struct Span {
  int rows;
  int begin, end;
};
template <Source kSource_>
struct TokenGroups {
  static constexpr Source kSource = kSource_;
  static MOE_HD constexpr int table_words(int64_t E) { return GroupTable::words(int(E)); }

  const StripsPlan& p;
  GroupTable table;

  MOE_DEVICE TokenGroups(int* shared, const StripsPlan& p) : p(p), table(shared, int(p.E)) {
    build_group_table(table, p.offs, int(p.E), int(p.rows), int(p.positions), p.align);
    const int threads = blockDim.x * blockDim.y, t = threadIdx.y * blockDim.x + threadIdx.x;
    if (blockIdx.x == 0)
      for (int e = t; e < p.E; e += threads) p.padded_offs[e] = table.pos[e + 1];
  }
  MOE_DEVICE int count() const { return int(p.E) + 1; }
  MOE_DEVICE bool is_tail(int e) const { return e == p.E; }
  MOE_DEVICE Span span(int e) const {
    const int first = int(q_t_offset(e));
    return {table.rows(e), table.pos[e] - first, table.pos[e + 1] - first};
  }
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

  MOE_DEVICE ExpertGroups(int*, const StripsPlan& p) : p(p) {}
  MOE_DEVICE int count() const { return int(p.E); }
  MOE_DEVICE bool is_tail(int) const { return false; }
  MOE_DEVICE Span span(int) const { return {int(p.rows), 0, int(p.rows)}; }
  MOE_DEVICE int64_t first_row(int e, int row) const { return e * p.group_stride + row * p.row_stride; }
  MOE_DEVICE int64_t q_t_offset(int e) const { return e * p.rows * p.K; }
};

// The strips that a cluster works on, one after the other: unit number first, first + step, ... of E * strips.
struct Unit {
  int group, strip;
  MOE_DEVICE Unit(int first, int strips) : group(first / strips), strip(first % strips) {}
  MOE_DEVICE void advance(const Unit& step, int strips) {
    group += step.group;
    strip += step.strip;
    if (strip >= strips) {
      strip -= strips;
      ++group;
    }
  }
};

// The rows of a strip that this block works on. Blocks split a strip at lines of q_t, hence write whole lines.
struct Part {
  int group, strip;
  int begin, end;    // positions of the whole group
  int line0, line1;  // this block's lines of q_t
  int64_t x;         // of its first row: kInPlace: the element in x; kByIndex: which row it is
  int skipped;       // rows of the group before it
  int rows;

  MOE_DEVICE int held(int most) const { return rows < most ? rows : most; }
};
template <class Groups>
MOE_DEVICE Part part_of(const StripsPlan& p, const Groups& groups, const Unit& u) {
  Part w = {};
  w.group = u.group;
  w.strip = u.strip;
  if (u.group >= groups.count()) return w;  // past the last one: no rows
  if (p.last_first) w.group = groups.count() - 1 - u.group;
  const Span g = groups.span(w.group);
  w.begin = g.begin;
  w.end = g.end;
  const int lines = line_tiles(g.begin, g.end), first = g.begin / kLine;
  const int each = (lines + (1 << p.cluster_log2) - 1) >> p.cluster_log2, skip = int(cluster_rank()) * each;
  w.line0 = first + (skip < lines ? skip : lines);
  w.line1 = first + (skip + each < lines ? skip + each : lines);
  w.skipped = w.line0 * kLine > g.begin ? w.line0 * kLine - g.begin : 0;
  const int stop = w.line1 * kLine - g.begin, rows = groups.is_tail(w.group) ? 0 : g.rows;
  w.rows = w.line0 < w.line1 ? (stop < rows ? stop : rows) - w.skipped : 0;
  if (w.rows < 0) w.rows = 0;
  w.x = groups.first_row(w.group, w.skipped);
  return w;
}

}  // namespace moe_fp8
