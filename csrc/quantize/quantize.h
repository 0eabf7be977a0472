// The quantizers: rows of x, in groups or as experts, to fp8 along their features, along the tokens of each group, or
// both ways from one read.
//
//   amax  = max |x| over a scaling block             m, scale from amax by the format's rule (numerics/scale.h)
//   along rows:    q [rows, K]   q[r, k]          = cast(x[r, k] * m[r, block of k])
//   along tokens:  q_t [K, P]    q_t[k, pos(r)]   = cast(x[r, k] * m_t[k, block of r]),
//                  pos(r) = padded start of r's group + r - start of the group; every other byte of q_t is zero
//   weight:        x [E, rows, K], experts in place of groups: q [E, rows, K], q_t [E, K, rows], nothing padded. A
//                  direction that is not wanted is not written
//   amax kBatch:   along tokens, with f.block == 0: amax = max |x[r, k]| over the finite values of the rows of all
//                  groups, and the same m_t[k] for every group; values that are not finite become NaN. Along rows, the
//                  rows of x itself are quantized, q [x_rows, K]: each once, however many positions have it
//   amax kSquare:  along tokens, with f.block == 128: a block is of 128 columns, from a multiple of 128 on, too
//
// Scaling blocks and where scales lie: numerics/format.h. Blocks at an edge are short; blocks along tokens begin anew
// with every group. Scales (R: rows or K, C: blocks along the other), f the format:
//   f.block == 0    rows [rows], tokens [E, K], weight [E, rows] and [E, K]
//   kColumnMajor    rows [rows, C], tokens [K, B], of squares [ceil(K / 128), B]; columns scale_stride() of the first
//                   size apart, with zeros between them and as the scales of blocks without rows; B =
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
  // The source of rows. Strides are in elements; the stride along K is 1. x may have any alignment.
  const void* x;
  InType in;
  int64_t row_stride, group_stride;  // group_stride: between experts
  RowIndex index;                    // row r is row index.row(r) of x, or zeros; without an index it is row r
  const int* offs;                   // [E], ends of groups; null without groups
  int64_t E, rows, K;                // rows: of all tokens, padding by index included, or of one expert
  bool weight;                       // E experts in place of groups
  int64_t x_rows;                    // rows of x, for kBatch

  // The format of the outputs.
  FormatId format;
  Rounding rounding;
  Fp8Type out;
  Amax amax;                         // which values share a scale along tokens

  // Outputs. All are contiguous, except column-major scales.
  bool along_rows, along_tokens;     // which outputs are wanted
  uint8_t* q;
  void* scale;
  uint8_t* q_t;
  void* scale_t;
  int* padded_offs;                  // [E], along tokens, of groups
  int64_t positions;                 // P, or the rows of a weight
  int align;                         // to which groups are padded in q_t
  int* scratch;                      // scratch_words() words on a GPU

  MOE_HD bool has_batch_amax() const { return amax == Amax::kBatch; }
  MOE_HD bool has_square_amax() const { return amax == Amax::kSquare; }
};
inline int64_t row_bytes(const QuantizeParams& p) { return p.K * bytes_of(p.in); }
MOE_HD int64_t rows_of(const QuantizeParams& p) { return p.weight ? p.E * p.rows : p.rows; }  // of all experts

// Scratch memory that quantize() needs on a GPU, in words:
//   columns        the throttle of the two kernels, then a mailbox of 32 words for each share of a strip
//   batch columns  x in fp8, the row of x of every position, the amax of every column, and which rows are used
//   rows in groups the places of blocked scales
constexpr int kMinShareRows = 64;  // fewest rows of a share, if a team splits a strip
inline int64_t mailbox_words(const QuantizeParams& p, int rows_of_share) {
  const int64_t strips = ceil_div<int64_t>(row_bytes(p), 128);
  const int64_t groups = p.weight ? p.E : p.E + 1, rows = p.weight ? p.E * p.rows : p.positions;
  return 32 * strips * (ceil_div<int64_t>(rows, rows_of_share) + groups);
}
// The throttle has two words. It takes a line of memory, because the mailboxes behind it begin at lines.
inline int64_t throttle_words(const QuantizeParams& p) { return p.along_rows ? 32 : 0; }
// The parameters of the rows of x themselves, for kBatch.
inline QuantizeParams rows_of_batch(QuantizeParams p) {
  p.index = {};
  p.offs = nullptr;
  p.rows = p.x_rows;
  p.amax = Amax::kGroup;
  p.along_tokens = false;
  return p;
}
inline int64_t batch_stride(const QuantizeParams& p) { return round_up<int64_t>(p.K, 16); }  // bytes
inline int64_t batch_words(const QuantizeParams& p) {
  return p.K ? p.x_rows * (batch_stride(p) / 4 + 1) + p.positions + p.K : 0;
}
inline int64_t scratch_words(const QuantizeParams& p) {
  const Format& f = format_of(p.format);
  if (p.has_batch_amax()) return batch_words(p);
  if (p.along_tokens && f.block == 0)
    return throttle_words(p) + (p.rows > kMinShareRows ? mailbox_words(p, kMinShareRows) : 0);
  if (p.along_tokens) return 0;
  return f.blocked() && p.offs ? p.rows : 0;
}

int quantize(const QuantizeParams& p, void* stream);
void quantize_cpu(const QuantizeParams& p);
// A part of quantize(), for kernels elsewhere that store scales. If scales are blocked, it writes the place of every
// row in groups to scratch, and zeros between the groups. Null offs mean no groups, which differs from zero groups.
int place_rows(const QuantizeParams& p, void* stream);

}  // namespace moe_fp8
