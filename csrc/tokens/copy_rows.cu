#include "tokens/copy_rows.h"

#include "tokens/row_segments.h"

namespace moe_fp8 {
namespace {

MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kMaxSegmentThreads, 1) copy_rows_kernel(MOE_GRID_CONSTANT const CopySegmentsPlan p) {
  wait_for_previous_kernel();
  copy_segment(p, int(blockIdx.y), blockIdx.x, gridDim.x);
}

// Blocks along y have the segments of one column after the other.
struct PackTokensPlan : PackTokensParams {
  int64_t segment;  // bytes
  int segments[kMaxColumns];
};

MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kMaxSegmentThreads, 1)
    pack_tokens_kernel(MOE_GRID_CONSTANT const PackTokensPlan p) {
  int column = 0, segment = blockIdx.y;
  while (segment >= p.segments[column]) segment -= p.segments[column++];
  const MessageColumn& c = p.columns[column];
  wait_for_previous_kernel();
  dispatch_unit(p, c, [&](auto load) {
    const int64_t units = p.segment / int64_t(sizeof(typename decltype(load)::Type)), begin = segment * units;
    const int64_t end = begin + units < c.padded_units ? begin + units : c.padded_units;
#pragma unroll 1
    for (int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y; row < p.rows; row += gridDim.x * blockDim.y)
      copy_units(p, c, row, p.token(row), begin + threadIdx.x, end, blockDim.x, load);
  });
}

}  // namespace

int copy_rows(const CopyRowsParams& p, void* stream) {
  if (p.rows == 0 || p.row_bytes == 0) return 0;
  const uint64_t bits = alignment_bits(p);
  if (bits % sizeof(Vec16) == 0) {
    const CopySegmentsPlan plan = {p, segment_bytes(p.source, p.row_bytes)};
    const int64_t segments = ceil_div(p.row_bytes, plan.segment);
    const Launch l = segment_launch(p.rows, p.row_bytes, plan.segment, segments, sizeof(Vec16), stream);
    return launch(copy_rows_kernel, l, plan);
  }
  const CopyUnit unit = widest_unit(int64_t(bits));
  const int64_t units = p.row_bytes / bytes_of(unit);
  PackTokensParams packed = {p.to, p.source, nullptr, p.rows, p.row_bytes};
  packed.columns[packed.num_columns++] = {p.from, p.from_stride, bytes_of(unit), 0, units, units, unit};
  return pack_tokens(packed, stream);
}

int pack_tokens(const PackTokensParams& p, void* stream) {
  if (p.rows == 0 || p.row_bytes == 0) return 0;
  PackTokensPlan plan = {p, segment_bytes(p.source, p.row_bytes)};
  int64_t segments = 0;
  for (int i = 0; i < p.num_columns; ++i) {
    const MessageColumn& c = p.columns[i];
    plan.segments[i] = int(ceil_div<int64_t>(c.padded_units * bytes_of(c.unit), plan.segment));
    segments += plan.segments[i];
  }
  const int unit = bytes_of(p.columns[0].unit);
  return launch(pack_tokens_kernel, segment_launch(p.rows, p.row_bytes, plan.segment, segments, unit, stream), plan);
}

}  // namespace moe_fp8
