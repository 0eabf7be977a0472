#include "quantize/batch_columns.h"

namespace moe_fp8 {
namespace {

// Step 4. Moves bytes by index and transposes them. A block moves two tiles of 128 positions, one below the other, by
// 128 columns, so that a column is stored 256 bytes at a time. All positions of a panel of columns come before the next
// panel: a panel of x is x_rows * 128 bytes, which the L2 still has when the next slot of a token reads them.
constexpr int kMovedPositions = 2 * kLine, kMoveRows = kMovedPositions / kChunkRows, kMoveThreads = kMoveRows * kLanes;
using MoveStage = TransposeStage<kBlock, 4>;

// Loads the rows of the 16 positions of this row of threads, four columns per lane.
MOE_DEVICE void load_moved(const BatchColumnsPlan& p, int first, int column, uint32_t (&v)[kChunkRows]) {
  const int at = first + threadIdx.y * kChunkRows + threadIdx.x % kChunkRows;
  const int lane_source = at < p.positions ? p.source[at] : -1;
  const int lane = threadIdx.y * kLanes % kWarpSize;  // the first lane of this row of threads, in its wave
  const uint32_t stride = uint32_t(p.stride);  // 31 bits hold it and a row number: the multiplication is short
  const uint8_t* from = p.cast + column;
  const bool valid = column < p.stride;
#pragma unroll
  for (int i = 0; i < kChunkRows; ++i) {
    const int source = int(shfl(uint32_t(lane_source), lane + i));
    v[i] = 0;
    if (valid && source >= 0)
      v[i] = load_stream<Reuse::kSoon>(reinterpret_cast<const uint32_t*>(from + uint64_t(uint32_t(source)) * stride));
  }
}
template <bool kWhole>
MOE_DEVICE void store_moved(const BatchColumnsPlan& p, int first, int column, MoveStage (&stage)[2]) {
  const int t = threadIdx.y * kLanes + threadIdx.x, chunk_of_thread = t % kMoveRows;
  const int at = first + chunk_of_thread * kChunkRows, count = int(p.positions) - at;
  if (count <= 0) return;
#pragma unroll
  for (int c = t / kMoveRows; c < kBlock; c += kMoveThreads / kMoveRows) {
    if (column + c >= p.K) return;
    const Vec16 chunk = stage[chunk_of_thread / kLineChunks].at(c, chunk_of_thread % kLineChunks);
    store_chunk<kWhole>(p.q_t + int64_t(column + c) * p.positions + at, chunk, count);
  }
}
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kMoveThreads, kMoveBlocks)
    move_columns_kernel(MOE_GRID_CONSTANT const BatchColumnsPlan p) {
  __shared__ MoveStage stage[2];
  wait_for_previous_kernel();
  const int64_t tiles = ceil_div(p.positions, int64_t(kMovedPositions)), tile = p.moved + blockIdx.x;
  const int first = int(tile % tiles) * kMovedPositions, column = int(tile / tiles) * kBlock;
  uint32_t v[kChunkRows];
  load_moved(p, first, column + int(threadIdx.x) * 4, v);
  stage_chunks(v, stage[threadIdx.y / kLineChunks]);
  __syncthreads();
  if (p.positions % kChunkRows == 0) store_moved<true>(p, first, column, stage);
  else store_moved<false>(p, first, column, stage);
}

}  // namespace

template <class In>
int launch_batch_columns(const QuantizeParams& p, void* stream) {
  using T = TypesOf<In>;
  BatchColumnsPlan plan = {p};
  plan.stride = batch_stride(p);
  plan.cast = reinterpret_cast<uint8_t*>(p.scratch);
  plan.source = p.scratch + p.x_rows * (plan.stride / 4);
  plan.amax = reinterpret_cast<uint32_t*>(plan.source + p.positions);
  plan.is_used = reinterpret_cast<int*>(plan.amax + p.K);
  const bool fused = p.along_rows && std::is_same_v<In, BF16> && p.x_rows && p.K && p.K <= kLongestBatchRow;
  if (p.along_rows && !fused)
    if (const int e = launch_rows<In>(rows_of_batch(p), RowOverlap::kNone, stream)) return e;
  if (p.K)
    if (const int e = fill_bytes(plan.amax, 0, 4 * (p.K + p.x_rows), stream)) return e;
  const int64_t multiprocessors = device().multiprocessors;
  const Launch sources_launch = {dim3(unsigned(multiprocessors * kSourceBlocks)), dim3(kSourceThreads), stream};
  if (const int e = launch(find_sources_kernel, sources_launch, plan)) return e;
  if (p.K == 0) return 0;
  plan.panels = uint32_t(ceil_div<int64_t>(plan.stride, kLanes * T::kVec));
  const int64_t max_ranges = ceil_div<int64_t>(p.x_rows, kThreadRows);
  int64_t ranges = multiprocessors * kColumnBlocks / plan.panels;  // all resident
  if (ranges > max_ranges) ranges = max_ranges;
  plan.ranges = int(ranges < 1 ? 1 : ranges);
  plan.range_rows = int(ceil_div<int64_t>(p.x_rows, plan.ranges));
  const Launch columns_launch = {dim3(plan.panels * plan.ranges), dim3(kLanes, kThreadRows), stream};
  if (const int e = fused ? launch_batch_rows(plan, stream) : launch(find_amax_kernel<T>, columns_launch, plan))
    return e;
  if (const int e = launch(quantize_batch_columns_kernel<T>, columns_launch, plan)) return e;
  const int64_t moves = ceil_div(p.positions, int64_t(kMovedPositions)) * ceil_div(p.K, int64_t(kBlock));
  for (; plan.moved < moves; plan.moved += max_grid_blocks(kMoveThreads)) {
    const Launch l = {dim3(grid_blocks(moves - plan.moved, kMoveThreads)), dim3(kLanes, kMoveRows), stream};
    if (const int e = launch(move_columns_kernel, l, plan)) return e;
  }
  return 0;
}

template int launch_batch_columns<BF16>(const QuantizeParams&, void*);
template int launch_batch_columns<F16>(const QuantizeParams&, void*);
template int launch_batch_columns<F32>(const QuantizeParams&, void*);
template int launch_batch_columns<Generic>(const QuantizeParams&, void*);

}  // namespace moe_fp8
