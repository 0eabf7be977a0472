// The producers: a thread starts the copies of operands, another, or a warp, those of their scales. Rows of a that are
// taken by index are copied by warps: the copy engine has boxes alone.
#pragma once
#include "gemm/sm90/plan.h"

namespace moe_fp8::sm90 {

// Waits for the stages of all tiles in turn, and for one behind the last: fill(tile, turn, k, stage) arms each.
template <class T, class Fill>
MOE_DEVICE void for_each_stage(const Args& p, Shared<T>& shared, Fill fill) {
  const uint32_t empty = shared_address(shared.empty);
  uint32_t phase = 1;  // the one before a barrier's first: stages are empty to begin with
  TilesInTurn<T> tiles(p, shared);
  for (int turn = 0;; turn = (turn + 1) % kTurns) {
    const Tile tile = tiles.next(turn);
    const int first = first_stage<T>(p, turn), stages = tile.there ? stages_of<T>(p, tile) : 1;
    for (int k = 0; k < stages; ++k) {
      const int s = (first + k) % kStages;
      barrier_wait(empty + 8 * s, phase);
      if (s == kStages - 1) phase ^= 1;
      fill(tile, turn, k, s);
    }
    if (!tile.there) return;
  }
}

template <class T>
MOE_DEVICE void produce_operands(const Args& p, Shared<T>& shared) {
  const int rank = int(cluster_rank());
  const uint32_t a_of = shared_address(shared.a), b_of = shared_address(shared.b);
  const uint32_t full_of = shared_address(shared.full);
  for_each_stage(p, shared, [&](const Tile& tile, int turn, int k, int s) {
    const uint32_t full = full_of + 8 * s;
    if (!is_planned<T>(p) && k == 0) shared.tiles[turn] = tile;
    if (k >= steps_of<T>(tile)) return barrier_arrive(full);
    const int at = tile.first + k * T::kStageDepth;
    const auto copy_a = [&](int box, auto copy) {
      copy(a_of + s * T::kStageBytesA + box * kWgmmaRows * T::kStageDepth, p.a, at, tile.row_of_a + box * kWgmmaRows,
           full);
    };
    const auto copy_b = [&](int box, auto copy) {
      copy(b_of + s * T::kStageBytesB + box * T::kBoxColumns * kDepth, p.b, at * T::kBytesB,
           tile.row_of_b + box * T::kBoxColumns, full);
    };
    const int boxes_of_a = by_index<T>(p) ? 0 : tile.rows > 128 ? 4 : 2;
    barrier_arrive_expecting(full, boxes_of_a * kWgmmaRows * T::kStageDepth + T::kStageBytesB);
    if (tile.beside) {
      for (int i = 0; i < boxes_of_a / 2; ++i) copy_a(boxes_of_a / 2 * rank + i, copy_box_to_both);
      for (int i = 0; i < T::kTileColumns / T::kBoxColumns; ++i) copy_b(i, copy_box);
    } else {
      for (int i = 0; i < boxes_of_a; ++i) copy_a(i, copy_box);
      copy_b(rank, copy_box_to_both);
    }
  });
}

// The scales of blocks in a tile's stage; what offsets say is not trusted.
MOE_DEVICE int block_of(const Args& p, const Tile& tile, int k) {
  return up_to(tile.first_block + k, p.scale_blocks - 1);
}

// Of a: where the blocked scales of a tile's rows begin. Those of a group of rows lie behind all groups before it, each
// padded to whole blocks of 128 rows; a block's groups come in their order.
template <class T>
class MxScales {
 public:
  MOE_DEVICE MxScales(const Args& p, const gemm::GroupBounds& groups) : p_(p), groups_(groups) {}
  MOE_DEVICE const uint8_t* of(const Tile& tile) {
    const auto* all = reinterpret_cast<const uint8_t*>(p_.scale_a);
    if constexpr (T::kSumGroups) {
      const int64_t column = int64_t(tile.first_block) * kScaleColumns, line = ceil_div(tile.depth, kGroupScales);
      return all + column * p_.scale_a_stride + tile.row_of_a / kScaleRows * line * kScaleBytes;
    } else {
      for (; expert_ < tile.expert; ++expert_)
        before_ += ceil_div(groups_.end[expert_ + 1] - groups_.end[expert_], kScaleRows);
      const int64_t row = before_ + (tile.row_of_a - groups_.end[expert_]) / kScaleRows;
      return all + row * ceil_div(p_.scale_blocks, kScaleColumns) * kScaleBytes;
    }
  }

 private:
  const Args& p_;
  const gemm::GroupBounds& groups_;
  int expert_ = 0, before_ = 0;  // blocks of the groups before it
};
// A block of them for two stages.
template <class T>
MOE_DEVICE void produce_mx_scales(const Args& p, Shared<T>& shared) {
  static_assert(2 * T::kStageDepth == kGroupScales && T::kTileRows == kScaleRows && kStages % 2 == 0);
  const uint32_t full_of = shared_address(shared.full);
  MxScales<T> scales(p, shared.groups);
  const uint8_t* from = nullptr;
  for_each_stage(p, shared, [&](const Tile& tile, int, int k, int s) {
    const uint32_t full = full_of + 8 * s;
    if (k % 2 != 0 || k >= steps_of<T>(tile)) return barrier_arrive(full);
    if (k == 0) from = scales.of(tile);
    barrier_arrive_expecting(full, kScaleBytes);
    copy_bytes(shared_address(shared.scale_a[s]), from + k / 2 * kScaleBytes, kScaleBytes, full);
  });
}

// The scale that all columns of a tile have in a stage, of the next stages in the lanes of a warp. A thread that loads
// one for every stage, or begins a copy of 16 bytes, is late: on an H200 the tensor cores were busy for 84 or 81% of
// the time, with this for 88%.
template <class T>
class SquareScales {
 public:
  MOE_DEVICE SquareScales(const Args& p, int lane) : p_(p), lane_(lane) {}
  // By all lanes, for the stages of a tile in turn: lane `k % 32` has that of stage k.
  MOE_DEVICE float of(const Tile& tile, int k) {
    if (k == 0) next_ = load(tile, lane_);
    if (k % 32 == 0) {
      held_ = next_;
      next_ = load(tile, k + 32 + lane_);
    }
    return held_;
  }

 private:
  MOE_DEVICE float load(const Tile& tile, int k) const {
    if (k >= steps_of<T>(tile) || tile.columns <= 0) return 0.f;
    const int square = tile.column / kDepth;
    if (T::kSumGroups) return p_.scale_b[int64_t(block_of(p_, tile, k)) * p_.scale_b_stride + square];
    return p_.scale_b[(int64_t(tile.expert) * ceil_div(p_.N, kDepth) + square) * p_.scale_blocks + k];
  }

  const Args& p_;
  int lane_;
  float held_ = 0.f, next_ = 0.f;
};
// Of every stage, by a warp whose lanes take stages in turn.
template <class T>
MOE_DEVICE void produce_block_scales(const Args& p, Shared<T>& shared) {
  const uint32_t full_of = shared_address(shared.full);
  const int lane = int(threadIdx.x) % 32;
  SquareScales<T> squares(p, lane);
  for_each_stage(p, shared, [&](const Tile& tile, int, int k, int s) {
    const uint32_t full = full_of + 8 * s;
    const float square = T::kColumnScales ? 0.f : squares.of(tile, k);
    __syncwarp();  // a lane that is behind would not see how often a stage was empty
    if (lane != k % 32) return;
    if (tile.columns <= 0 || k >= steps_of<T>(tile)) return barrier_arrive(full);
    const int64_t block = block_of(p, tile, k);
    const int columns = T::kColumnScales ? up_to(tile.columns, T::kTileColumns) : 0;
    const int row = tile.row_of_a & ~3, rows = up_to(round_up(p.M, 4) - row, T::kTileRows + 4);
    if (!T::kColumnScales) shared.scale_b[s][0] = square;
    barrier_arrive_expecting(full, 4 * (rows + columns));
    copy_bytes(shared_address(shared.scale_a[s]), p.scale_a + block * p.scale_a_stride + row, 4 * rows, full);
    if (T::kColumnScales)
      copy_bytes(shared_address(shared.scale_b[s]), p.scale_b + block * p.scale_b_stride + tile.column, 4 * columns,
                 full);
  });
}
// Of the columns of "rowwise", once a tile.
template <class T>
MOE_DEVICE void produce_tile_scales(const Args& p, Shared<T>& shared) {
  const uint32_t full_of = shared_address(shared.full);
  for_each_stage(p, shared, [&](const Tile& tile, int turn, int k, int s) {
    const uint32_t full = full_of + 8 * s;
    if (k > 0 || tile.columns <= 0 || tile.depth == 0) return barrier_arrive(full);
    const int columns = up_to(tile.columns, T::kTileColumns);
    const float* of_columns = p.scale_b + int64_t(tile.expert) * p.N + tile.column;
    barrier_arrive_expecting(full, 4 * columns);
    copy_bytes(shared_address(shared.scale_b[turn]), of_columns, 4 * columns, full);
  });
}

// By kRowWarps warps, each of some of every eight rows of a tile, a chunk of 16 bytes a lane. Few instructions a copy
// are what lets two warps keep pace with the tensor cores: where rows begin is looked up once a tile.
template <class T>
MOE_DEVICE void produce_rows(const Args& p, Shared<T>& shared) {
  constexpr int kChunks = kDepth / 16, kOfWarp = kSwizzledRows / kRowWarps, kOfLane = T::kTileRows / kSwizzledRows;
  static_assert(kChunks * kOfWarp == 32);
  const int lane = int(threadIdx.x) % 32, first_of_warp = int(threadIdx.x) / 32 % kRowWarps * kOfWarp;
  const int first = first_of_warp + lane / kChunks, of_lane = lane % kChunks * 16;  // row, byte of it
  const uint32_t to = shared_address(shared.a) + first * kDepth + (of_lane ^ first * 16);
  const uint32_t full_of = shared_address(shared.full);
  for_each_stage(p, shared, [&](const Tile& tile, int, int k, int s) {
    if (k == 0) {
      __syncwarp();  // the tile before is copied
#pragma unroll 1
      for (int n = lane; n < kOfWarp * kOfLane; n += 32) {
        const int i = first_of_warp + n / kOfLane, j = n % kOfLane, r = j * kSwizzledRows + i;
        const int64_t row = r < tile.rows ? p.index.row(tile.row + r) : -1;
        shared.source[i][j] = row < 0 ? kNoRow : uint32_t(row * (p.row_stride / 16));
      }
      __syncwarp();
    }
    if (k < steps_of<T>(tile)) {
      const int at = k * kDepth + of_lane;
      const uint8_t* from = p.rows + at;
      pin_register(from);  // else it is added up for every copy
#pragma unroll 1
      for (int j = 0; j < kOfLane; j += 4) {
        const Vec16 source = *reinterpret_cast<const Vec16*>(&shared.source[first][j]);
        const uint32_t to_row = to + s * T::kStageBytesA + j * kSwizzledRows * kDepth;
#pragma unroll
        for (int i = 0; i < 4; ++i)
          copy_chunk(to_row + i * kSwizzledRows * kDepth, from + uint64_t(source.w[i]) * 16,
                     source.w[i] != kNoRow && at < p.K);
      }
    }
    barrier_arrive_behind_copies(full_of + 8 * s);
  });
}

}  // namespace moe_fp8::sm90
