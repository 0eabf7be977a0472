// The quantizers: rows of x, in groups or as experts, to fp8 along their features, along the tokens of each group, or
// both ways from one read.
//
//   amax  = max |x| over a scaling block             m, scale from amax by the format's rule (numerics/scale.h)
//   along rows:    q [rows, K]   q[r, k]          = cast(x[r, k] * m[r, block of k])
//   along tokens:  q_t [K, P]    q_t[k, pos(r)]   = cast(x[r, k] * m_t[k, block of r]),
//                  pos(r) = padded start of r's group + r - start of the group; every other byte of q_t is zero
//   weight:        x [E, rows, K], experts in place of groups: q [E, rows, K], q_t [E, K, rows], nothing padded
//   amax kBatch:   along tokens, with f.block == 0: amax = max |x[r, k]| over the finite values of the rows of all
//                  groups, and the same m_t[k] for every group; what is not finite becomes NaN. Along rows then those
//                  of x itself, q [x_rows, K]: each once, however many positions have it
//   amax kSquare:  along tokens, with f.block == 128: a block is of 128 columns, from a multiple of 128 on, too
//
// Scaling blocks and where scales lie: numerics/format.h. Blocks at an edge are short; blocks along tokens begin anew
// with every group. Scales (R: rows or K, C: blocks along the other), f the format:
//   f.block == 0    rows [rows], tokens [E, K], weight [E, rows] and [E, K]
//   kColumnMajor    rows [rows, C], tokens [K, B], of squares [ceil(K / 128), B]; columns scale_stride() of the first
//                   size apart, what lies between them zero, as are the scales of blocks without rows; B =
//                   block_extent(rows, E, align)
//   kRowMajor       rows [rows, C], tokens [K, P / f.block]
//   kBlocked        as one matrix [R, C], or by groups where offs are given: rows (M-groups) [grouped_scale_rows(rows,
//                   E), padded C], tokens (K-groups) [padded_scale_rows(K), grouped_scale_columns(P / f.block, E)]
//   weight          [E, ceil(rows / weight_rows), C] and [E, ceil(K / weight_rows), C'], row-major; kBlocked:
//                   [E, bytes of an expert's matrix]
#pragma once
#include "numerics/format.h"
#include "numerics/groups.h"

namespace moe_fp8 {

struct QuantizeParams {
  // Where rows come from. Strides are in elements, that along K is 1; no alignment is asked of x.
  const void* x;
  InType in;
  int64_t row_stride, group_stride;  // group_stride: between experts
  RowIndex index;                    // row r is row index.row(r) of x, zeros where that is none; at null: row r
  const int* offs;                   // [E], ends of groups; null without groups
  int64_t E, rows, K;                // rows: of all tokens, padding by index included, or of one expert
  bool weight;                       // E experts in place of groups
  int64_t x_rows;                    // of x, of the batch

  // What they become.
  FormatId format;
  Rounding rounding;
  Fp8Type out;
  Amax amax;                         // along tokens

  // Outputs; all are contiguous but for column-major scales.
  bool along_rows, along_tokens;     // which are wanted
  uint8_t* q;
  void* scale;
  uint8_t* q_t;
  void* scale_t;
  int* padded_offs;                  // [E], along tokens, of groups
  int64_t positions;                 // P; of a weight: rows
  int align;                         // of groups in q_t
  int* scratch;                      // scratch_words() of it, of a GPU

  MOE_HD bool of_batch() const { return amax == Amax::kBatch; }
  MOE_HD bool of_squares() const { return amax == Amax::kSquare; }
};

// What quantize() needs on a GPU beside its outputs. Of whole columns, what blocks tell one another: how far columns
// and rows are, of both; 32 words for each share of a strip, which is 128 bytes of columns, by so many rows. Of the
// batch, x in fp8, the row that every position has, every column's amax, and which rows any position has. Of rows in
// groups, the places of blocked scales.
constexpr int kLeastShare = 64;  // half of the rows that a team's cluster has room for, at least
inline int64_t note_words(const QuantizeParams& p, int rows_of_share) {
  const int64_t strips = ceil_div<int64_t>(p.K * (p.in == InType::kF32 ? 4 : 2), 128);
  const int64_t groups = p.weight ? p.E : p.E + 1, rows = p.weight ? p.E * p.rows : p.positions;
  return 32 * strips * (ceil_div<int64_t>(rows, rows_of_share) + groups);
}
// Two are told; a line of memory, for a share's notes behind them are one each.
inline int64_t pace_words(const QuantizeParams& p) { return p.along_rows ? 32 : 0; }
// Of the batch, x itself along rows.
inline QuantizeParams rows_of_batch(QuantizeParams p) {
  p.index = {};
  p.offs = nullptr;
  p.rows = p.x_rows;
  p.amax = Amax::kGroup;
  p.along_tokens = false;
  return p;
}
inline int64_t batch_stride(const QuantizeParams& p) { return round_up<int64_t>(p.K, 16); }  // bytes: of x's rows
inline int64_t batch_words(const QuantizeParams& p) {
  return p.K ? p.x_rows * (batch_stride(p) / 4 + 1) + p.positions + p.K : 0;
}
inline int64_t scratch_words(const QuantizeParams& p) {
  const Format& f = format_of(p.format);
  if (p.of_batch()) return batch_words(p);
  if (p.along_tokens && f.block == 0)
    return pace_words(p) + (p.rows > kLeastShare ? note_words(p, kLeastShare) : 0);
  if (p.along_tokens) return 0;
  return f.blocked() && p.offs ? p.rows : 0;
}

// On the current device. 0, or the runtime's error code.
int quantize(const QuantizeParams& p, void* stream);
// A part of it, for others that store scales: where rows in groups have theirs, if they are blocked, in scratch, and
// zeros between the groups. Null offs: there are no groups, as opposed to none of 0.
int place_rows(const QuantizeParams& p, void* stream);

}  // namespace moe_fp8
