// Scales of one byte, from row-major matrices into the blocked layout of numerics/scale_layout.h and back.
//
// swizzle:    blocked[blocked_offset(r, c)] = plain[r, c], zero where no scale stands
// unswizzle:  plain[r, c] = blocked[blocked_offset(r, c)], zero where r or c is of no group
//
// Groups::kNone: E matrices [R, C]. kRows and kColumns: groups of the rows or the columns of one matrix [R, C], ends in
// offs [E]; each is a blocked matrix of its own, in room for any sizes, and `starts` say in which row or column of that
// room it begins. The row-major side has stride 1 along C, the blocked side is contiguous and, where it is written,
// begins at a multiple of 16 bytes. No other alignment is asked for.
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

// Of the blocked side, all matrices in one.
struct BlockedExtent { int64_t rows, columns; };
inline BlockedExtent blocked_extent(Groups groups, int64_t E, int64_t R, int64_t C) {
  switch (groups) {
    case Groups::kNone: return {E * padded_scale_rows(R), padded_scale_columns(C)};
    case Groups::kRows: return {grouped_scale_rows(R, E), padded_scale_columns(C)};
    default: return {padded_scale_rows(R), grouped_scale_columns(C, E)};
  }
}

// 0, or the runtime's error code.
int swizzle_scales(const SwizzleScalesParams& p, void* stream);
int unswizzle_scales(const SwizzleScalesParams& p, void* stream);

}  // namespace moe_fp8
