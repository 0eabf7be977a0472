// copy_rows: to [rows, ...]: row p is row source.row(p) of from, zeros where that is none.
//
// Rows are row_bytes of any dtype; `to` is contiguous, from_stride in bytes. No alignment is asked of either.
//
// pack_tokens: to [rows, row_bytes] of bytes: row p has the columns of token(p) side by side, zeros where that is none:
// source.row(p), unless an inverse has its slot in another row. Columns begin at multiples of kColumnAlign in the order
// of the table, and behind the end of one are zeros; of a table that end_row() closes, rows and `to` begin at multiples
// of kRowAlign. Ids come as int32 from 1 on: id + 1 of one in [0, num_experts), else 0.
#pragma once
#include "numerics/groups.h"

namespace moe_fp8 {

struct CopyRowsParams {
  const void* from;
  void* to;
  RowIndex source;
  int64_t rows, row_bytes, from_stride;
};

// What a thread moves at once: so many bytes of a column, or an id.
enum class Unit : uint8_t { k1, k2, k4, k16, kInt32Id, kInt64Id };
MOE_HD constexpr int bytes_of(Unit unit) {  // in `to`
  return unit == Unit::k1 ? 1 : unit == Unit::k2 ? 2 : unit == Unit::k16 ? 16 : 4;
}

inline Unit widest_unit(int64_t bytes) {  // of which they are a multiple
  return bytes % 16 == 0 ? Unit::k16 : bytes % 4 == 0 ? Unit::k4 : bytes % 2 == 0 ? Unit::k2 : Unit::k1;
}

struct Column {
  const void* from;
  int64_t row_stride, unit_stride;  // bytes of from
  int64_t offset;                   // bytes of a row of `to`
  int64_t units, padded_units;
  Unit unit;
};

// Elements [rows, width] of so many bytes each.
struct ColumnSource {
  const void* from;
  int64_t size, row_stride, stride, width;
  bool ids;  // int32, or int64
};

constexpr int kMaxColumns = 4;
// Bytes: of a sector, and of what memory reads at once. On an H200 rows of 7,168 that are 7,264 apart came to 4 slots
// each in 442 us, 7,296 apart in 399.
constexpr int kColumnAlign = 32, kRowAlign = 64;
struct PackTokensParams {
  void* to;
  RowIndex source;
  const int* inverse;  // of a slot its row, or null
  int64_t rows, row_bytes;
  Column columns[kMaxColumns];
  int num_columns, num_experts;

  MOE_HD int64_t token(int64_t row) const {
    const uint32_t slot = uint32_t(source.at[row]);
    return slot < source.limit && (!inverse || inverse[slot] == row) ? source.row_of(slot) : -1;
  }
  // Of the widest units that its elements allow.
  void add(const ColumnSource& of) {
    Column c = {of.from, of.row_stride * of.size, of.stride * of.size, row_bytes, of.width, 0, widest_unit(of.size)};
    if (of.ids) {
      c.unit = of.size == sizeof(int64_t) ? Unit::kInt64Id : Unit::kInt32Id;
    } else if (of.stride == 1 || of.width <= 1) {
      c.unit = widest_unit(int64_t(reinterpret_cast<uintptr_t>(of.from)) | c.row_stride | of.width * of.size);
      c.unit_stride = bytes_of(c.unit);
      c.units = of.width * of.size / c.unit_stride;
    }
    const int64_t unit = bytes_of(c.unit), bytes = round_up<int64_t>(c.units * unit, kColumnAlign);
    c.padded_units = bytes / unit;
    columns[num_columns++] = c;
    row_bytes += bytes;
  }
  // Behind the last column.
  void end_row() {
    Column& last = columns[num_columns - 1];
    last.padded_units += (round_up<int64_t>(row_bytes, kRowAlign) - row_bytes) / bytes_of(last.unit);
    row_bytes = round_up<int64_t>(row_bytes, kRowAlign);
  }
};

// 0, or the runtime's error code.
int copy_rows(const CopyRowsParams& p, void* stream);
int pack_tokens(const PackTokensParams& p, void* stream);

template <class Id>
MOE_HD uint32_t id_from_one(Id id, int num_experts) { return id >= 0 && id < num_experts ? uint32_t(id) + 1 : 0; }

}  // namespace moe_fp8
