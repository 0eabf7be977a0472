// Rows of token groups on their way between a layout without gaps and one in which every group is padded.
//
// pad:    to [P, ...]: row padded_starts[e] + i is row i of group e; every other row is zero
// unpad:  to [M, ...]: row i of group e is row padded_starts[e] + i of from; rows of no group are zero
//
// Groups are consecutive rows of the layout without gaps, their ends in offs [E]. When padding, the places follow from
// the sizes and `align`, and are written to padded_starts and padded_offs, unless they are given in `starts`. A place
// out of range is not followed: the row is zero. Rows are row_bytes of any dtype; `to` is contiguous.
#pragma once
#include <cstdint>

namespace moe_fp8 {

struct CopyTokenGroupsParams {
  const void* from;
  void* to;
  const int* offs;    // [E]
  const int* starts;  // [E]; null: pad by align
  int* padded_starts;  // [E] each, written when starts is null
  int* padded_offs;
  int64_t E, M, P;
  int64_t row_bytes, from_stride;  // bytes
  int align;
};

// 0, or the runtime's error code.
int pad_token_groups(const CopyTokenGroupsParams& p, void* stream);
int unpad_token_groups(const CopyTokenGroupsParams& p, void* stream);

}  // namespace moe_fp8
