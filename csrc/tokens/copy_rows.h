// copy_rows: row p of `to` [rows, ...] is row source.row(p) of `from`, or zeros if there is no such row.
//
// A row is row_bytes bytes of any dtype. `to` is contiguous; from_stride is in bytes. Neither needs an alignment.
//
// pack_tokens: `to` [rows, row_bytes] holds messages. Row p has the columns of token(p) side by side, or zeros if
// token(p) is -1. token(p) is source.row(p), or -1 if `inverse` puts its slot into another row. Columns follow one
// another in the order of the table, each at a multiple of kColumnAlign bytes with zeros behind its end. end_row()
// makes a row a multiple of kRowAlign bytes; `to` then begins at such a multiple. Ids become int32: id + 1 of an id in
// [0, num_experts), else 0.
#pragma once
#include "numerics/groups.h"

namespace moe_fp8 {

struct CopyRowsParams {
  const void* from;
  void* to;
  RowIndex source;
  int64_t rows, row_bytes, from_stride;
};

// The unit that a thread copies at once: bytes, or an id.
enum class CopyUnit : uint8_t { k1, k2, k4, k16, kInt32Id, kInt64Id };
MOE_HD constexpr int bytes_of(CopyUnit unit) {  // in `to`
  return unit == CopyUnit::k1 ? 1 : unit == CopyUnit::k2 ? 2 : unit == CopyUnit::k16 ? 16 : 4;
}

// The widest unit that divides `bytes`.
inline CopyUnit widest_unit(int64_t bytes) {
  return bytes % 16 == 0 ? CopyUnit::k16 : bytes % 4 == 0 ? CopyUnit::k4
                                        : bytes % 2 == 0  ? CopyUnit::k2
                                                          : CopyUnit::k1;
}

struct MessageColumn {
  const void* from;
  int64_t row_stride, unit_stride;  // bytes, in `from`
  int64_t offset;                   // bytes, from the begin of a row of `to`
  int64_t units, padded_units;
  CopyUnit unit;
};

// Elements [rows, width] of `size` bytes each; strides are in elements.
struct MessageColumnSource {
  const void* from;
  int64_t size, row_stride, stride, width;
  bool ids;  // elements are ids, int32 or int64 by their size
};

constexpr int kMaxColumns = 4;
// Bytes: a sector, and the unit of a DRAM read. Rows at multiples of 64 are read faster (docs/kernels/tokens.md).
constexpr int kColumnAlign = 32, kRowAlign = 64;
struct PackTokensParams {
  void* to;
  RowIndex source;
  const int* inverse;  // the row of each slot, or null
  int64_t rows, row_bytes;
  MessageColumn columns[kMaxColumns];
  int num_columns, num_experts;

  MOE_HD int64_t token(int64_t row) const {
    const uint32_t slot = uint32_t(source.at[row]);
    return slot < source.limit && (!inverse || inverse[slot] == row) ? source.row_of(slot) : -1;
  }
  // Appends a column, in the widest units that its strides allow.
  void add(const MessageColumnSource& column) {
    MessageColumn c = {column.from, column.row_stride * column.size, column.stride * column.size, row_bytes,
                       column.width, 0, widest_unit(column.size)};
    if (column.ids) {
      c.unit = column.size == sizeof(int64_t) ? CopyUnit::kInt64Id : CopyUnit::kInt32Id;
    } else if (column.stride == 1 || column.width <= 1) {
      const int64_t bytes = column.width * column.size;
      c.unit = widest_unit(int64_t(reinterpret_cast<uintptr_t>(column.from)) | c.row_stride | bytes);
      c.unit_stride = bytes_of(c.unit);
      c.units = bytes / c.unit_stride;
    }
    const int64_t unit = bytes_of(c.unit), bytes = round_up<int64_t>(c.units * unit, kColumnAlign);
    c.padded_units = bytes / unit;
    columns[num_columns++] = c;
    row_bytes += bytes;
  }
  // Pads the row behind its last column.
  void end_row() {
    MessageColumn& last = columns[num_columns - 1];
    last.padded_units += (round_up<int64_t>(row_bytes, kRowAlign) - row_bytes) / bytes_of(last.unit);
    row_bytes = round_up<int64_t>(row_bytes, kRowAlign);
  }
};

int copy_rows(const CopyRowsParams& p, void* stream);
void copy_rows_cpu(const CopyRowsParams& p);
int pack_tokens(const PackTokensParams& p, void* stream);
void pack_tokens_cpu(const PackTokensParams& p);

template <class Id>
MOE_HD uint32_t one_based_id(Id id, int num_experts) { return id >= 0 && id < num_experts ? uint32_t(id) + 1 : 0; }

}  // namespace moe_fp8
