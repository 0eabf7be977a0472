// The epilogue that adds to out: out = RN(RN32(out + product)). For K-grouped products; empty groups keep their out.
#pragma once
#include "gemm/sm90/epilogue/staging.h"

namespace moe_fp8::sm90 {

struct Add {
  static constexpr bool kServesMGrouped = false, kServesKGrouped = true, kAddsLowRank = false;
  struct Args {};
  static Args make_args(const ScaledGroupedMmParams&) { return {}; }
  template <class T>
  using Storage = Staging;

  // Brings the tile's part of out to the L2 while the tile is multiplied, a row per thread.
  template <class T>
  static MOE_DEVICE void prefetch_tile(const typename T::KernelArgs& p, const Consumer<T>& c, const Tile& tile) {
    static_assert(T::kTileM <= 128 * kConsumers);
    const int columns = up_to(tile.columns, T::kTileN);
    if (c.thread() >= tile.rows || columns <= 0) return;
    const auto* row = static_cast<const uint8_t*>(p.out) + (tile.out_row + c.thread()) * (int64_t(p.N) * p.out_bytes);
    bulk_prefetch(row + int64_t(tile.column) * p.out_bytes, columns * p.out_bytes);
  }

  template <class T, class Value>
  static MOE_DEVICE void finish_tile(const typename T::KernelArgs& p, const Consumer<T>& c, const Tile& tile,
                                     SharedStorage<T>& shared, int row_half, Value value) {
    if (p.out_bytes == 4) add_tile<4, T>(p, c, tile, shared, row_half, value);
    else add_tile<2, T>(p, c, tile, shared, row_half, value);
  }

  template <class T>
  static MOE_DEVICE void finish_empty_tile(const typename T::KernelArgs&, const Consumer<T>&, const Tile&,
                                           SharedStorage<T>&) {}

 private:
  // Adds sums to four neighbouring columns of out.
  static MOE_DEVICE Vec16 add_four(Vec16 old, Vec16 sums) {
#pragma unroll
    for (int i = 0; i < 4; ++i) old.w[i] = as_bits(as_float(old.w[i]) + as_float(sums.w[i]));
    return old;
  }
  static MOE_DEVICE Vec8 add_four(Vec8 old, Vec16 sums) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      old.w[i] = to_bf16x2(element<BF16>(old.w[i], 0) + as_float(sums.w[2 * i]),
                           element<BF16>(old.w[i], 1) + as_float(sums.w[2 * i + 1]));
    return old;
  }

  // Like Store's store_tile, but sums stay float32 until they are added, 32 columns at a time. The next columns of out
  // are loaded only when these are stored, because registers do not suffice for both.
  template <int kElement, class T, class Value>
  static MOE_DEVICE void add_tile(const typename T::KernelArgs& p, const Consumer<T>& c, const Tile& tile,
                                  SharedStorage<T>& shared, int row_half, Value value) {
    using Four = std::conditional_t<kElement == 4, Vec16, Vec8>;
    constexpr int kColumns = 32, kEights = kColumns / 8;
    constexpr int kSlices = T::kTileN / kColumns;
    const int warp = c.warp(), lane = c.lane(), first_row = 16 * warp + 128 * row_half, rows = tile.rows - first_row;
    const int columns = up_to(tile.columns, T::kTileN);
    const int line = lane / 8, chunk = lane % 8;
    const int64_t pitch = int64_t(p.N) * kElement;
    uint8_t* out = static_cast<uint8_t*>(p.out) + (tile.out_row + first_row + line) * pitch +
                   int64_t(tile.column) * kElement;
    // Calls act(i, address) for the lane's four columns in each of its rows that belong to the tile.
    const auto for_each_row = [&](int slice, auto act) {
      if (slice * kColumns + chunk * 4 >= columns) return;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (4 * i + line < rows)
          act(i, reinterpret_cast<Four*>(out + 4 * i * pitch + (slice * kColumns + chunk * 4) * kElement));
    };
    Four old[4] = {};  // never read unset, but without the zeros the compiler keeps it in memory
    const auto load = [&](int slice) { for_each_row(slice, [&](int i, const Four* from) { old[i] = *from; }); };
    load(0);
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      if (slice * kColumns >= columns) break;
      Vec16 sums[4];
      stage_floats(shared.epilogue.rows[warp], lane, slice * kEights, kEights, value);
      read_staged(shared.epilogue.rows[warp], line, chunk, sums);
      for_each_row(slice, [&](int i, Four* to) { *to = add_four(old[i], sums[i]); });
      if (slice + 1 < kSlices) load(slice + 1);
    }
  }
};

}  // namespace moe_fp8::sm90
