// From the registers of consumers onto what out holds.
#pragma once
#include "gemm/sm90/epilogue/store.h"

namespace moe_fp8::sm90 {

// What the tile will be added to, a row a thread: it comes to the L2 while the tile is multiplied.
template <class T>
MOE_DEVICE void prefetch_tile(const Args& p, const Consumer<T>& c, const Tile& tile) {
  static_assert(T::kTileRows <= 128 * kConsumers);
  const int columns = up_to(tile.columns, T::kTileColumns);
  if (c.thread() >= tile.rows || columns <= 0) return;
  const auto* row = static_cast<const uint8_t*>(p.out) + (tile.row + c.thread()) * (int64_t(p.N) * p.element);
  prefetch_bytes(row + int64_t(tile.column) * p.element, columns * p.element);
}

// Four neighbouring columns of out, and the sums that are added to them.
MOE_DEVICE Vec16 added(Vec16 old, Vec16 sums) {
#pragma unroll
  for (int i = 0; i < 4; ++i) old.w[i] = as_bits(as_float(old.w[i]) + as_float(sums.w[i]));
  return old;
}
MOE_DEVICE Vec8 added(Vec8 old, Vec16 sums) {
#pragma unroll
  for (int i = 0; i < 2; ++i)
    old.w[i] = to_bf16x2(element<BF16>(old.w[i], 0) + as_float(sums.w[2 * i]),
                         element<BF16>(old.w[i], 1) + as_float(sums.w[2 * i + 1]));
  return old;
}

// As store_tile, but sums are float32 until they are added, 32 columns at a time. What the next of them are added to is
// loaded when these are done: registers for both at once are not left.
template <int kElement, class T, class Value>
MOE_DEVICE void add_tile(const Args& p, const Consumer<T>& c, const Tile& tile, Shared<T>& shared, int half,
                         Value value) {
  using Four = std::conditional_t<kElement == 4, Vec16, Vec8>;
  constexpr int kColumns = 32, kEights = kColumns / 8;
  constexpr int kPieces = T::kTileColumns / kColumns;
  const int warp = c.warp(), lane = c.lane(), first = 16 * warp + 128 * half, rows = tile.rows - first;
  const int columns = up_to(tile.columns, T::kTileColumns);
  const int line = lane / 8, chunk = lane % 8;
  const int64_t pitch = int64_t(p.N) * kElement;
  uint8_t* out = static_cast<uint8_t*>(p.out) + (tile.row + first + line) * pitch + int64_t(tile.column) * kElement;
  const auto for_each_mine = [&](int piece, auto act) {
    if (piece * kColumns + chunk * 4 >= columns) return;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (4 * i + line < rows)
        act(i, reinterpret_cast<Four*>(out + 4 * i * pitch + (piece * kColumns + chunk * 4) * kElement));
  };
  Four old[4] = {};  // never read unset, but the compiler keeps it in memory unless it sees that
  const auto load = [&](int piece) { for_each_mine(piece, [&](int i, const Four* from) { old[i] = *from; }); };
  load(0);
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    if (piece * kColumns >= columns) break;
    Vec16 sums[4];
    stage_floats(shared.staging[warp], lane, piece * kEights, kEights, value);
    take_staged(shared.staging[warp], line, chunk, sums);
    for_each_mine(piece, [&](int i, Four* to) { *to = added(old[i], sums[i]); });
    if (piece + 1 < kPieces) load(piece + 1);
  }
}

}  // namespace moe_fp8::sm90
