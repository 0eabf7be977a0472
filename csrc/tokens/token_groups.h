// Moves the rows of token groups between a compact layout, without gaps, and a layout in which every group is padded.
//
// pad:    to [P, ...]: row padded_starts[e] + i is row i of group e; every other row is zero
// unpad:  to [M, ...]: row i of group e is row padded_starts[e] + i of from; rows of no group are zero
//
// Groups are consecutive rows of the compact layout, with ends in offs [E]. pad derives the places of groups from their
// sizes and `align`, and writes them to padded_starts and padded_offs, unless `starts` gives them. A place out of range
// is not followed: the row is zero. The kernels here write the index of every row's source, for copy_rows(); -1 stands
// for zeros.
#pragma once
#include <cstdint>

namespace moe_fp8 {

struct TokenGroupsParams {
  const int* offs;     // [E]
  const int* starts;   // [E]; null: pad by align
  int* padded_starts;  // [E] each, written when starts is null
  int* padded_offs;
  int* source;         // [P], or [M] to unpad; null: rows have no elements, only places are wanted
  int64_t E, M, P;
  int align;
};

int pad_sources(const TokenGroupsParams& p, void* stream);
void pad_sources_cpu(const TokenGroupsParams& p);
int unpad_sources(const TokenGroupsParams& p, void* stream);
void unpad_sources_cpu(const TokenGroupsParams& p);

}  // namespace moe_fp8
