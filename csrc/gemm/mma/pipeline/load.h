// From operands to the stages in shared memory.
#pragma once
#include "gemm/mma/tiles.h"

namespace moe_fp8::mma {

// Up to 16 bytes from any address, zeros behind them.
MOE_DEVICE Vec16 gather_bytes(const uint8_t* from, int count) {
  Vec16 v = {};
  const int n = count < 16 ? count : 16;
#pragma unroll 1
  for (int i = 0; i < n; ++i) {
    const uint32_t byte = uint32_t(from[i]) << (8 * (i % 4));
    v.w[0] |= i / 4 == 0 ? byte : 0;
    v.w[1] |= i / 4 == 1 ? byte : 0;
    v.w[2] |= i / 4 == 2 ? byte : 0;
    v.w[3] |= i / 4 == 3 ? byte : 0;
  }
  return v;
}

// A thread's share of every stage: a chunk of some rows of both operands, and the scales of a row and of a column.
// fetch() starts what takes long, land() puts what came by way of registers into the stage.
template <class T>
class Loader {
 public:
  MOE_DEVICE Loader(const ScaledGroupedMmParams& p, Shared<T>& shared) : p_(p), shared_(shared) {}

  MOE_DEVICE void begin(const gemm::Tile& tile) {
    const int t = threadIdx.x, row = t / kChunks, chunk = t % kChunks * 16;
    const int column = column_of_b(row);
    const uint8_t* b = p_.b + (p_.groups_of_sum ? 0 : tile.expert * p_.b_group_stride);
    a_ = p_.a + (tile.row_of_a + row) * p_.a_stride + tile.first + chunk;
    b_ = b + (tile.column + column) * p_.b_stride + tile.first + chunk;
    rows_ = tile.rows - row;
    columns_ = tile.columns - column;
    depth_ = tile.depth;
    place_ = place_of<T>(row, t % kChunks);
    const bool aligned = (reinterpret_cast<uintptr_t>(a_) | reinterpret_cast<uintptr_t>(b_)) % 16 == 0;
    const int last = depth_ - depth_ % kDepth, of_last = depth_ - last - chunk;  // of its chunk in the last stage
    copied_ = !aligned ? 0 : of_last > 0 && of_last < 16 ? last : depth_;
    if constexpr (T::kBlock > 0) begin_scales(tile);
    fetch(0);
    land(0);
    fetch(1);
  }

  MOE_DEVICE void fetch(int step) {
    const int at = step * kDepth, stage = step % T::kStages, left = depth_ - at - int(threadIdx.x) % kChunks * 16;
    if (at >= copied_ && at < depth_)
      for_each_chunk(at, stage, [&](int i, Vec16& shared, const uint8_t* from, bool there) {
        keep(i, shared, gather_bytes(from, there ? left : 0));
      });
    for_each_chunk(at, stage, [&](int i, Vec16& shared, const uint8_t* from, bool there) {
      const auto* chunk = reinterpret_cast<const Vec16*>(from);
      if constexpr (kCopiesInBackground) copy_or_clear(&shared, chunk, at < copied_, there && left > 0);
      else if (at < copied_) keep(i, shared, there && left > 0 ? load_stream<Reuse::kSoon>(chunk) : Vec16{});
    });
    if constexpr (T::kBlock > 0)
      if (at < depth_ && step % T::kStagesOfScale == 0) fetch_scales(at);
    commit_copies();
  }

  MOE_DEVICE void land(int step) {
    if (step * kDepth >= depth_) return;
    const int t = threadIdx.x, stage = step % T::kStages, of_scales = place_of_scales<T>(step);
    if constexpr (!kCopiesInBackground) {
#pragma unroll
      for (int i = 0; i < kOfA; ++i) shared_.a[stage][place_ + i * kRows * kChunks] = held_[i];
#pragma unroll
      for (int i = 0; i < kOfB; ++i) shared_.b[stage][place_ + i * kRows * kChunks] = held_[kOfA + i];
    }
    if (T::kBlock > 0 && step % T::kStagesOfScale == 0)
#pragma unroll
      for (int i = 0; i < T::kScales; ++i) {
        if (t < T::kTileRows) shared_.scale_a[of_scales][i][place_of_scale<T>(t)] = scale(of_row_, step, i);
        if (t < T::kTileColumns) shared_.scale_b[of_scales][i][place_of_scale<T>(t)] = scale(of_column_, step, i);
      }
  }

 private:
  static constexpr int kDepth = T::kDepth, kChunks = T::kChunks;
  using Fetched = std::conditional_t<T::kTakesScales, uint32_t, float>;  // four scales, or one
  static constexpr int kFetched = T::kTakesScales ? T::kScales / 4 : T::kScales;
  static constexpr int kRows = kThreads / kChunks, kOfA = T::kTileRows / kRows, kOfB = T::kTileColumns / kRows;
  static_assert(T::kTileRows <= kThreads && T::kTileColumns <= kThreads);
  static_assert(kRows % 16 == 0, "a thread's chunks are all aligned, or none");

  MOE_DEVICE void keep(int i, Vec16& shared, const Vec16& chunk) {
    if constexpr (kCopiesInBackground) shared = chunk;
    else held_[i] = chunk;
  }
  // Calls act(i, its place in shared memory, where it comes from, whether there is such a row) for the thread's chunks.
  template <class Act>
  MOE_DEVICE void for_each_chunk(int at, int stage, Act act) {
#pragma unroll
    for (int i = 0; i < kOfA; ++i)
      act(i, shared_.a[stage][place_ + i * kRows * kChunks], a_ + i * kRows * p_.a_stride + at, i * kRows < rows_);
#pragma unroll
    for (int i = 0; i < kOfB; ++i)
      act(kOfA + i, shared_.b[stage][place_ + i * kRows * kChunks], b_ + i * kRows * p_.b_stride + at,
          i * kRows < columns_);
  }
  MOE_DEVICE void begin_scales(const gemm::Tile& tile) {
    const int t = threadIdx.x;
    const bool sum = p_.groups_of_sum, padded = !sum && p_.scale_a.layout == ScaleLayout::kBlocked;
    expert_ = tile.expert;
    const int column = T::kTakesScales ? column_of_b(t) : t;  // of a position's, or itself
    row_ = t < tile.rows ? tile.row_of_a + t : -1;
    column_ = column < tile.columns ? tile.column + column : -1;
    skipped_ = padded ? rows_padded_before(tile.expert) - shared_.groups.end[tile.expert] : 0;
    // E8M0 of a sum, but for blocked ones, lie by position.
    const bool by_position = sum && p_.scale_a.layout == ScaleLayout::kE8M0;
    first_block_ = by_position ? tile.first / T::kBlock : tile.first_block * (kGroupScales / T::kBlock);
    blocks_ = ceil_div(tile.depth, T::kBlock);
  }
  MOE_DEVICE void fetch_scales(int at) {
    if constexpr (T::kTakesScales) {
      const ColumnBlock block = {first_block_, blocks_, at / T::kBlock};
      of_row_[0] = row_ >= 0 ? p_.scale_a.four_at(0, row_ + skipped_, block) : 0;
      of_column_[0] = column_ >= 0 ? p_.scale_b.four_at(expert_, column_, block) : 0;
    } else {
#pragma unroll
      for (int i = 0; i < T::kScales; ++i) {
        const ColumnBlock block = {first_block_, blocks_, at / T::kBlock + i};
        const bool there = block.at < blocks_;
        of_row_[i] = there && row_ >= 0 ? p_.scale_a.at(0, row_ + skipped_, block) : 0.f;
        of_column_[i] = there && column_ >= 0 ? p_.scale_b.at(expert_, column_, block) : 0.f;
      }
    }
  }
  // Number i of a stage. Zeros behind the sum are multiplied by no NaN that lies there.
  MOE_DEVICE typename T::Scale scale(const Fetched (&fetched)[kFetched], int step, int i) const {
    if constexpr (!T::kTakesScales) return fetched[i];
    else return step * T::kScales + i < blocks_ ? uint8_t(fetched[0] >> (8 * i)) : uint8_t(0);
  }
  // Blocked scales of a group of rows fill blocks of their own, as many as there are tiles below one another.
  MOE_DEVICE int rows_padded_before(int expert) const {
    static_assert(T::kTileRows == kGroupScales);
    return T::kTileRows * (shared_.groups.before[expert] / typename T::Units(p_, 0).across);
  }

  const ScaledGroupedMmParams& p_;
  Shared<T>& shared_;
  const uint8_t *a_, *b_;
  int rows_, columns_;  // what is left from the thread's first on
  int depth_, copied_;  // of the sum; up to where chunks of the thread are copied, whole and aligned
  int place_;           // of its first chunk in a stage
  Vec16 held_[kCopiesInBackground ? 1 : kOfA + kOfB];

  // Scales of blocks: whose, of which blocks, and what was fetched.
  int expert_, row_, column_, skipped_, first_block_, blocks_;
  Fetched of_row_[kFetched], of_column_[kFetched];
};

}  // namespace moe_fp8::mma
