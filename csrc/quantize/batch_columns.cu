#include "quantize/batch_columns.h"

namespace moe_fp8 {
namespace {

// Step 4. Bytes by index, transposed: two tiles of 128 positions, one below the other, by 128 columns a block, so that
// a column is stored 256 bytes at a time. All positions of a panel of columns come before the next panel: a panel of x
// is x_rows * 128 bytes, which the L2 still has when the next slot of a token reads them.
constexpr int kMoved = 2 * kLine, kMoveRows = kMoved / kChunkRows, kMoveThreads = kMoveRows * kLanes;
constexpr int kMoveBlocks = 3;           // of a multiprocessor
constexpr int64_t kMostMoves = 1 << 22;  // blocks of a launch; HIP has fewer than 2^32 threads
using MoveStage = TransposeStage<kBlock, 4>;

// The rows of the 16 positions of a row of threads, four bytes of columns a lane.
MOE_DEVICE void load_moved(const ColumnsPlan& p, int first, int column, uint32_t (&v)[kChunkRows]) {
  const int at = first + threadIdx.y * kChunkRows + threadIdx.x % kChunkRows;
  const int mine = at < p.positions ? p.source[at] : -1;
  const int lane = threadIdx.y * kLanes % kWarpSize;  // of the wave: the first of this row of threads
  const uint32_t stride = uint32_t(p.stride);         // which 31 bits hold, as they do a row: a short multiplication
  const uint8_t* from = p.cast + column;
  const bool there = column < p.stride;
#pragma unroll
  for (int i = 0; i < kChunkRows; ++i) {
    const int source = int(shfl(uint32_t(mine), lane + i));
    v[i] = 0;
    if (there && source >= 0)
      v[i] = load_stream<Reuse::kSoon>(reinterpret_cast<const uint32_t*>(from + uint64_t(uint32_t(source)) * stride));
  }
}
template <bool kWhole>
MOE_DEVICE void store_moved(const ColumnsPlan& p, int first, int column, MoveStage (&stage)[2]) {
  const int t = threadIdx.y * kLanes + threadIdx.x, of_row = t % kMoveRows;
  const int at = first + of_row * kChunkRows, there = int(p.positions) - at;
  if (there <= 0) return;
#pragma unroll
  for (int c = t / kMoveRows; c < kBlock; c += kMoveThreads / kMoveRows) {
    if (column + c >= p.K) return;
    const Vec16 chunk = stage[of_row / kLineChunks].at(c, of_row % kLineChunks);
    store_chunk<kWhole>(p.q_t + int64_t(column + c) * p.positions + at, chunk, there);
  }
}
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kMoveThreads, kMoveBlocks)
    move_columns_kernel(MOE_GRID_CONSTANT const ColumnsPlan p) {
  __shared__ MoveStage stage[2];
  wait_for_previous_kernel();
  const int64_t tiles = ceil_div(p.positions, int64_t(kMoved)), tile = p.moved + blockIdx.x;
  const int first = int(tile % tiles) * kMoved, column = int(tile / tiles) * kBlock;
  uint32_t v[kChunkRows];
  load_moved(p, first, column + int(threadIdx.x) * 4, v);
  stage_chunks(v, stage[threadIdx.y / kLineChunks]);
  __syncthreads();
  if (p.positions % kChunkRows == 0) store_moved<true>(p, first, column, stage);
  else store_moved<false>(p, first, column, stage);
}

}  // namespace

template <class In>
int launch_columns(const QuantizeParams& p, void* stream) {
  using T = TypesOf<In>;
  ColumnsPlan plan = {p};
  plan.stride = batch_stride(p);
  plan.cast = reinterpret_cast<uint8_t*>(p.scratch);
  plan.source = p.scratch + p.x_rows * (plan.stride / 4);
  plan.amax = reinterpret_cast<uint32_t*>(plan.source + p.positions);
  plan.taken = reinterpret_cast<int*>(plan.amax + p.K);
  const bool at_once = p.along_rows && std::is_same_v<In, BF16> && p.x_rows && p.K && p.K <= kLongestBatchRow;
  if (p.along_rows && !at_once)
    if (const int e = launch_rows<In>(rows_of_batch(p), Beside::kNo, stream)) return e;
  if (p.K)
    if (const int e = fill_bytes(plan.amax, 0, 4 * (p.K + p.x_rows), stream)) return e;
  const int64_t multiprocessors = device().multiprocessors;
  const Launch of_sources = {dim3(unsigned(multiprocessors * kSourceBlocks)), dim3(kSourceThreads), stream};
  if (const int e = launch(find_sources_kernel, of_sources, plan)) return e;
  if (p.K == 0) return 0;
  plan.panels = uint32_t(ceil_div<int64_t>(plan.stride, kLanes * T::kVec));
  const int64_t most = ceil_div<int64_t>(p.x_rows, kThreadRows);
  int64_t shares = multiprocessors * kColumnBlocks / plan.panels;  // that run at once
  if (shares > most) shares = most;
  plan.shares = int(shares < 1 ? 1 : shares);
  plan.share = int(ceil_div<int64_t>(p.x_rows, plan.shares));
  const Launch of_x = {dim3(plan.panels * plan.shares), dim3(kLanes, kThreadRows), stream};
  if (const int e = at_once ? launch_batch_rows(plan, stream) : launch(find_amax_kernel<T>, of_x, plan)) return e;
  if (const int e = launch(quantize_columns_kernel<T>, of_x, plan)) return e;
  const int64_t moves = ceil_div(p.positions, int64_t(kMoved)) * ceil_div(p.K, int64_t(kBlock));
  for (; plan.moved < moves; plan.moved += kMostMoves) {
    const int64_t rest = moves - plan.moved;
    const Launch l = {dim3(unsigned(rest < kMostMoves ? rest : kMostMoves)), dim3(kLanes, kMoveRows), stream};
    if (const int e = launch(move_columns_kernel, l, plan)) return e;
  }
  return 0;
}

template int launch_columns<BF16>(const QuantizeParams&, void*);
template int launch_columns<F16>(const QuantizeParams&, void*);
template int launch_columns<F32>(const QuantizeParams&, void*);
template int launch_columns<Generic>(const QuantizeParams&, void*);

}  // namespace moe_fp8
