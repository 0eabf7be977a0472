// Rows of token groups on their way between a layout without gaps and one in which every group is padded.
//
// pad:    to [P, ...]: row padded_starts[e] + i is row i of group e; every other row is zero
// unpad:  to [M, ...]: row i of group e is row padded_starts[e] + i of from; rows of no group are zero
//
// Groups are consecutive rows of the layout without gaps, their ends in offs [E]. When padding, the places follow from
// the sizes and `align`, and are written to padded_starts and padded_offs, unless they are given in `starts`. A place
// out of range is not followed: the row is zero. What is written here is the index of every row's source, for
// copy_rows; -1 stands for zeros.
#pragma once
#include <cstdint>

namespace moe_fp8 {

struct TokenGroupsParams {
  const int* offs;     // [E]
  const int* starts;   // [E]; null: pad by align
  int* padded_starts;  // [E] each, written when starts is null
  int* padded_offs;
  int* source;         // [P], or [M] when unpadding; null: rows without elements, which need places alone
  int64_t E, M, P;
  int align;
};

// 0, or the runtime's error code.
int pad_sources(const TokenGroupsParams& p, void* stream);
int unpad_sources(const TokenGroupsParams& p, void* stream);

}  // namespace moe_fp8
