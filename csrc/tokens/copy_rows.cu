#include "tokens/copy_rows.h"

#include "tokens/pieces.h"

namespace moe_fp8 {
namespace {

MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kMostThreadsOfPieces, 1) copy_rows_kernel(MOE_GRID_CONSTANT const PiecesPlan p) {
  wait_for_previous_kernel();
  copy_piece(p, int(blockIdx.y), blockIdx.x, gridDim.x);
}

// The same of several columns, and of units of any size: a block has a piece of one column.
struct PackTokensPlan : PackTokensParams {
  int64_t piece;  // bytes
  int pieces[kMaxColumns];
};

MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kMostThreadsOfPieces, 1)
    pack_tokens_kernel(MOE_GRID_CONSTANT const PackTokensPlan p) {
  int column = 0, piece = blockIdx.y;
  while (piece >= p.pieces[column]) piece -= p.pieces[column++];
  const Column& c = p.columns[column];
  wait_for_previous_kernel();
  with_units(p, c, [&](auto load) {
    const int64_t of_piece = p.piece / int64_t(sizeof(typename decltype(load)::Type)), begin = piece * of_piece;
    const int64_t end = begin + of_piece < c.padded_units ? begin + of_piece : c.padded_units;
#pragma unroll 1
    for (int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y; row < p.rows; row += gridDim.x * blockDim.y)
      copy_units(p, c, row, p.token(row), begin + threadIdx.x, end, blockDim.x, load);
  });
}

}  // namespace

// By the widest unit that rows, their distances and both pointers are multiples of.
int copy_rows(const CopyRowsParams& p, void* stream) {
  if (p.rows == 0 || p.row_bytes == 0) return 0;
  const uint64_t all = bits_of(p);
  if (all % sizeof(Vec16) == 0) {
    const PiecesPlan plan = {p, piece_of(p.source, p.row_bytes)};
    const int64_t pieces = ceil_div(p.row_bytes, plan.piece);
    return launch(copy_rows_kernel, launch_of(p.rows, p.row_bytes, plan.piece, pieces, sizeof(Vec16), stream), plan);
  }
  const Unit unit = widest_unit(int64_t(all));
  const int64_t units = p.row_bytes / bytes_of(unit);
  PackTokensParams packed = {p.to, p.source, nullptr, p.rows, p.row_bytes};
  packed.columns[packed.num_columns++] = {p.from, p.from_stride, bytes_of(unit), 0, units, units, unit};
  return pack_tokens(packed, stream);
}

int pack_tokens(const PackTokensParams& p, void* stream) {
  if (p.rows == 0 || p.row_bytes == 0) return 0;
  PackTokensPlan plan = {p, piece_of(p.source, p.row_bytes)};
  int64_t pieces = 0;
  for (int i = 0; i < p.num_columns; ++i) {
    const Column& c = p.columns[i];
    plan.pieces[i] = int(ceil_div<int64_t>(c.padded_units * bytes_of(c.unit), plan.piece));
    pieces += plan.pieces[i];
  }
  const int unit = bytes_of(p.columns[0].unit);
  return launch(pack_tokens_kernel, launch_of(p.rows, p.row_bytes, plan.piece, pieces, unit, stream), plan);
}

}  // namespace moe_fp8
