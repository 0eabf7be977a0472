// Moves scales of one byte from row-major matrices into the blocked layout of numerics/scale_layout.h, and back.
//
// swizzle:    blocked[blocked_offset(r, c)] = plain[r, c], zero in padding
// unswizzle:  plain[r, c] = blocked[blocked_offset(r, c)], zero if r or c is in no group
//
// Groups::kNone: E matrices [R, C]. kRows and kColumns: groups of the rows or the columns of one matrix [R, C], with
// ends in offs [E]. Each group is a separate blocked matrix, in room for any sizes; `starts` are the rows or columns
// of that room where the groups begin. The row-major side has stride 1 along C. The blocked side is contiguous and, if
// it is written, begins at a multiple of 16 bytes. No other alignment is required.
#pragma once
#include "numerics/scale_layout.h"

namespace moe_fp8 {

struct SwizzleScalesParams {
  const uint8_t* from;
  uint8_t* to;
  const int* offs;  // [E], null for Groups::kNone
  int* starts;      // [E], not written when null
  int64_t E, R, C;
  int64_t row_stride, group_stride;  // of the row-major side
  Groups groups;
};

// Size of the blocked side, taken as one matrix.
struct BlockedExtent { int64_t rows, columns; };
inline BlockedExtent blocked_extent(Groups groups, int64_t E, int64_t R, int64_t C) {
  switch (groups) {
    case Groups::kNone: return {E * padded_scale_rows(R), padded_scale_columns(C)};
    case Groups::kRows: return {grouped_scale_rows(R, E), padded_scale_columns(C)};
    default: return {padded_scale_rows(R), grouped_scale_columns(C, E)};
  }
}

int swizzle_scales(const SwizzleScalesParams& p, void* stream);
void swizzle_scales_cpu(const SwizzleScalesParams& p);
int unswizzle_scales(const SwizzleScalesParams& p, void* stream);
void unswizzle_scales_cpu(const SwizzleScalesParams& p);

}  // namespace moe_fp8
