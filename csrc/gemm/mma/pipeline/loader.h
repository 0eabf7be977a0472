// The loader: from operands in global memory to the stages in shared memory.
#pragma once
#include "gemm/mma/pipeline/shared_storage.h"

namespace moe_fp8::mma {

// Loads up to 16 bytes from any address; zeros follow them.
MOE_DEVICE Vec16 load_bytes(const uint8_t* from, int count) {
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

// A thread's share of every stage: one chunk in some rows of both operands, and the scales of one row and one column.
// fetch() starts the loads of a stage, complete() writes to the stage whatever passed through registers.
template <class T>
class Loader {
 public:
  MOE_DEVICE Loader(const ScaledGroupedMmParams& p, SharedStorage<T>& shared) : p_(p), shared_(shared) {}

  // Starts a tile: its first stage is complete afterwards, up to copies in flight, and the second one is fetched.
  MOE_DEVICE void begin(const gemm::Tile& tile) {
    const int t = threadIdx.x, row = t / kChunks, chunk = t % kChunks * 16;
    const int column = b_column(row);
    const uint8_t* b = p_.b + (p_.k_grouped ? 0 : tile.expert * p_.b_group_stride);
    a_ = p_.a + (tile.a_row + row) * p_.a_stride + tile.k_begin + chunk;
    b_ = b + (tile.column + column) * p_.b_stride + tile.k_begin + chunk;
    rows_left_ = tile.rows - row;
    columns_left_ = tile.columns - column;
    k_size_ = tile.k_size;
    first_chunk_ = chunk_index<T>(row, t % kChunks);
    const bool aligned = (reinterpret_cast<uintptr_t>(a_) | reinterpret_cast<uintptr_t>(b_)) % 16 == 0;
    const int last = k_size_ - k_size_ % kStageK, bytes_left = k_size_ - last - chunk;  // of the last stage's chunk
    vector_k_ = !aligned ? 0 : bytes_left > 0 && bytes_left < 16 ? last : k_size_;
    if constexpr (T::kBlock > 0) begin_scales(tile);
    fetch(0);
    complete(0);
    fetch(1);
  }

  MOE_DEVICE void fetch(int k_tile) {
    const int k = k_tile * kStageK, stage = k_tile % T::kStages;
    const int left = k_size_ - k - int(threadIdx.x) % kChunks * 16;
    if (k >= vector_k_ && k < k_size_)
      for_each_chunk(k, stage, [&](int i, Vec16& shared, const uint8_t* from, bool valid) {
        keep(i, shared, load_bytes(from, valid ? left : 0));
      });
    for_each_chunk(k, stage, [&](int i, Vec16& shared, const uint8_t* from, bool valid) {
      const auto* chunk = reinterpret_cast<const Vec16*>(from);
      if constexpr (kHasAsyncCopies) copy_or_zero(&shared, chunk, k < vector_k_, valid && left > 0);
      else if (k < vector_k_) keep(i, shared, valid && left > 0 ? load_stream<Reuse::kSoon>(chunk) : Vec16{});
    });
    if constexpr (T::kBlock > 0)
      if (k < k_size_ && k_tile % T::kStagesPerScale == 0) fetch_scales(k);
    commit_copies();
  }

  MOE_DEVICE void complete(int k_tile) {
    if (k_tile * kStageK >= k_size_) return;
    const int t = threadIdx.x, stage = k_tile % T::kStages, slot = scale_slot<T>(k_tile);
    if constexpr (!kHasAsyncCopies) {
#pragma unroll
      for (int i = 0; i < kChunksA; ++i) shared_.a[stage][first_chunk_ + i * kRows * kChunks] = fetched_[i];
#pragma unroll
      for (int i = 0; i < kChunksB; ++i) shared_.b[stage][first_chunk_ + i * kRows * kChunks] = fetched_[kChunksA + i];
    }
    if (T::kBlock > 0 && k_tile % T::kStagesPerScale == 0)
#pragma unroll
      for (int i = 0; i < T::kStageScales; ++i) {
        if (t < T::kTileM) shared_.scale_a[slot][i][scale_index<T>(t)] = scale(row_scales_, k_tile, i);
        if (t < T::kTileN) shared_.scale_b[slot][i][scale_index<T>(t)] = scale(column_scales_, k_tile, i);
      }
  }

 private:
  static constexpr int kStageK = T::kStageK, kChunks = T::kChunks;
  using ScaleWord = std::conditional_t<T::kTakesScales, uint32_t, float>;  // four scales, or one
  static constexpr int kScaleWords = T::kTakesScales ? T::kStageScales / 4 : T::kStageScales;
  static constexpr int kRows = kThreads / kChunks, kChunksA = T::kTileM / kRows, kChunksB = T::kTileN / kRows;
  static_assert(T::kTileM <= kThreads && T::kTileN <= kThreads);
  static_assert(kRows % 16 == 0, "a thread's chunks are all aligned, or none");

  MOE_DEVICE void keep(int i, Vec16& shared, const Vec16& chunk) {
    if constexpr (kHasAsyncCopies) shared = chunk;
    else fetched_[i] = chunk;
  }
  // Calls act(i, place in shared memory, address in global memory, whether the row exists) for the thread's chunks.
  template <class Act>
  MOE_DEVICE void for_each_chunk(int k, int stage, Act act) {
#pragma unroll
    for (int i = 0; i < kChunksA; ++i)
      act(i, shared_.a[stage][first_chunk_ + i * kRows * kChunks], a_ + i * kRows * p_.a_stride + k,
          i * kRows < rows_left_);
#pragma unroll
    for (int i = 0; i < kChunksB; ++i)
      act(kChunksA + i, shared_.b[stage][first_chunk_ + i * kRows * kChunks], b_ + i * kRows * p_.b_stride + k,
          i * kRows < columns_left_);
  }
  MOE_DEVICE void begin_scales(const gemm::Tile& tile) {
    const int t = threadIdx.x;
    const bool k_grouped = p_.k_grouped, padded = !k_grouped && p_.scale_a.layout == ScaleLayout::kBlocked;
    expert_ = tile.expert;
    const int column = T::kTakesScales ? b_column(t) : t;
    row_ = t < tile.rows ? tile.a_row + t : -1;
    column_ = column < tile.columns ? tile.column + column : -1;
    padding_rows_ = padded ? padded_rows_before(tile.expert) - shared_.groups.offsets[tile.expert] : 0;
    // E8M0 scales along K lie by position, unless they are blocked.
    const bool by_position = k_grouped && p_.scale_a.layout == ScaleLayout::kE8M0;
    first_block_ = by_position ? tile.k_begin / T::kBlock : tile.first_scale_block * (kGroupScales / T::kBlock);
    blocks_ = ceil_div(tile.k_size, T::kBlock);
  }
  MOE_DEVICE void fetch_scales(int k) {
    if constexpr (T::kTakesScales) {
      const ColumnBlock block = {first_block_, blocks_, k / T::kBlock};
      row_scales_[0] = row_ >= 0 ? p_.scale_a.four_bits_at(0, row_ + padding_rows_, block) : 0;
      column_scales_[0] = column_ >= 0 ? p_.scale_b.four_bits_at(expert_, column_, block) : 0;
    } else {
#pragma unroll
      for (int i = 0; i < T::kStageScales; ++i) {
        const ColumnBlock block = {first_block_, blocks_, k / T::kBlock + i};
        const bool valid = block.at < blocks_;
        row_scales_[i] = valid && row_ >= 0 ? p_.scale_a.at(0, row_ + padding_rows_, block) : 0.f;
        column_scales_[i] = valid && column_ >= 0 ? p_.scale_b.at(expert_, column_, block) : 0.f;
      }
    }
  }
  // Scale i of a stage. Behind the end of K it is 0 (kTakesScales: the byte 0, 2^-127), so that the zeros there are not
  // multiplied by a NaN that lies behind the scales.
  MOE_DEVICE typename T::Scale scale(const ScaleWord (&words)[kScaleWords], int k_tile, int i) const {
    if constexpr (!T::kTakesScales) return words[i];
    else return k_tile * T::kStageScales + i < blocks_ ? uint8_t(words[0] >> (8 * i)) : uint8_t(0);
  }
  // Blocked scales of M-grouped products: every group is padded to whole blocks, one per row of tiles.
  MOE_DEVICE int padded_rows_before(int expert) const {
    static_assert(T::kTileM == kGroupScales);
    return T::kTileM * (shared_.groups.units_before(expert) / typename T::Units(p_, 0).width);
  }

  const ScaledGroupedMmParams& p_;
  SharedStorage<T>& shared_;
  const uint8_t *a_, *b_;
  int rows_left_, columns_left_;  // from the thread's first row or column to the end of the tile
  int k_size_, vector_k_;         // K of the tile; up to vector_k_ the thread's chunks are whole and aligned
  int first_chunk_;               // index of the thread's first chunk in a stage
  Vec16 fetched_[kHasAsyncCopies ? 1 : kChunksA + kChunksB];

  // Block scales: the thread's row and column, -1 for none; rows of padding before the group; range of blocks.
  int expert_, row_, column_, padding_rows_, first_block_, blocks_;
  ScaleWord row_scales_[kScaleWords], column_scales_[kScaleWords];
};

}  // namespace moe_fp8::mma
