// The consumers: multiply what stages hold, and scale and store the sums.
#pragma once
#include "gemm/sm90/stages.h"

namespace moe_fp8::sm90 {

template <class T>
struct Consumer {
  uint32_t full, phase;  // barriers of the stages, and of the round under way
  uint32_t a, b;         // operands of the first stage
  uint32_t release;      // the barriers of empty stages, in the block of the cluster that this lane tells
  bool tells;            // a lane for each block

  // Read anew wherever it is wanted: kept from tile to tile, what follows from it takes the products' registers.
  static MOE_DEVICE int thread() {
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x - 128;
  }
  static MOE_DEVICE int group() { return thread() / 128; }
  static MOE_DEVICE int warp() { return thread() / 32; }
  static MOE_DEVICE int lane() { return thread() % 32; }
  // Of 128 rows of the tile, the first of the thread's two, which are 8 apart.
  static MOE_DEVICE int row() { return group() * kWgmmaRows + wgmma_row(thread() % 128); }

  MOE_DEVICE explicit Consumer(Shared<T>& shared) : full(shared_address(shared.full)), phase(0) {
    a = wgmma_operand(shared_address(shared.a) + int(shfl(uint32_t(group()), 0)) * kWgmmaRows * kDepth);
    b = wgmma_operand(shared_address(shared.b));
    release = in_block(shared_address(shared.empty), lane() & 1);
    tells = lane() < 2;
  }
  MOE_DEVICE void wait_full(int s) const { barrier_wait(full + 8 * s, phase); }
  MOE_DEVICE void wait_behind(int s) const {  // for the stage behind s
    barrier_wait(full + 8 * ((s + 1) % kStages), s == kStages - 1 ? phase ^ 1 : phase);
  }
  // By every warp, to both blocks: either copies for both.
  MOE_DEVICE void release_stage(int s) const {
    if (tells) barrier_arrive_in_cluster(release + 8 * s);
  }
  // Begins the products of a stage: of the warpgroup's rows from 128 * half of the tile on.
  template <int n>
  MOE_DEVICE void multiply(float (&sum)[n], int s, int half, bool accumulate) const {
    const uint32_t a_of = a + (s * T::kStageBytesA + half * 128 * kDepth) / 16, b_of = b + s * T::kStageBytesB / 16;
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kDepth / kWgmmaDepth; ++i)
      wgmma<T::kE5M2>(sum, a_of + i * kWgmmaStep, b_of + i * kWgmmaStep, accumulate || i > 0);
    wgmma_commit();
  }
  // A tile in which the warpgroup has nothing to multiply.
  MOE_DEVICE void step_over(int rounds) {
    for (int r = 0; r < rounds; ++r, phase ^= 1)
      for (int s = 0; s < kStages; ++s) {
        wait_full(s);
        __syncwarp();
        release_stage(s);
      }
  }
};

// In a tile's last stage, what follows a group of the sum belongs to the next one: zeros instead, by every warpgroup.
template <class T>
MOE_DEVICE void clear_rest(const Consumer<T>& c, Shared<T>& shared, int depth) {
  if (depth % kDepth == 0) return;
  const int s = (ceil_div(depth, kDepth) - 1) % kStages;
  const int first = depth % kDepth / 16, chunks = kDepth / 16 - first;  // of 16 bytes
  c.wait_full(s);
  uint8_t *a = shared.a[s] + c.group() * kWgmmaRows * kDepth, *b = shared.b[s];
#pragma unroll 1
  for (int i = c.thread() % 128; i < (T::kTileRows / 2 + T::kTileColumns) * chunks; i += 128) {
    const int r = i / chunks, row = r < T::kTileColumns ? r : r - T::kTileColumns, chunk = first + i % chunks;
    uint8_t* of_row = r < T::kTileColumns ? b + row * kDepth : a + (row / 64 * 128 + row % 64) * kDepth;
    *reinterpret_cast<Vec16*>(of_row + (chunk ^ (row & 7)) * 16) = Vec16{};
  }
  stores_before_copies();
  barrier_of(c.group(), 128);
}

// Scales of rows. A round, of whose stages kLive are loaded. One stage's products are under way while the next one is
// waited for; `begun`: there was a round before, whose last stage is `held`.
template <int kLive, class T, int n>
MOE_DEVICE void multiply_round(Consumer<T>& c, float (&sum)[n], bool begun, bool held) {
#pragma unroll
  for (int s = 0; s < kStages; ++s) {
    c.wait_full(s);
    if (s < kLive) {
      c.multiply(sum, s, 0, begun || s > 0);
      wgmma_wait<1>();
      if (s > 0) c.release_stage(s - 1);
      else if (held) c.release_stage(kStages - 1);
    } else {
      if (s == kLive) {
        wgmma_wait<0>();
        c.release_stage(s - 1);
      }
      c.release_stage(s);
    }
  }
  c.phase ^= 1;
}
template <class T, int n>
MOE_DEVICE void multiply_rows(Consumer<T>& c, Shared<T>& shared, const Tile& tile, float (&sum)[n]) {
  const int steps = steps_of(tile);
  int left = steps;
#pragma unroll 1
  for (; left > kStages; left -= kStages) multiply_round<kStages>(c, sum, left < steps, left < steps);
  const bool begun = left < steps, held = begun && !T::kSumGroups;
  if (T::kSumGroups) {  // holding a stage while waiting for the last one, which may be loaded into it, would never end
    wgmma_wait<0>();
    if (begun) c.release_stage(kStages - 1);
    clear_rest(c, shared, tile.depth);
  }
  if (left == 4) {
    multiply_round<4>(c, sum, begun, held);
    wgmma_wait<0>();
    c.release_stage(kStages - 1);
  } else if (left == 3) {
    multiply_round<3>(c, sum, begun, held);
  } else if (left == 2) {
    multiply_round<2>(c, sum, begun, held);
  } else {
    multiply_round<1>(c, sum, begun, held);
  }
  pin_registers(sum);
}

// Where the scales of blocks are in the first stage: of the thread's first row and of its first column. Where groups
// are of rows, all columns have the same, one of four: `first` is its place in the first stage, each stage moves on.
template <class T>
struct BlockScales {
  uint32_t of_rows, of_columns;
  int first;

  MOE_DEVICE BlockScales(const Args& p, Shared<T>& shared, const Tile& tile, int row, int lane)
      : of_rows(shared_address(shared.scale_a) + 4 * ((tile.row_of_a & 3) + row)),
        of_columns(shared_address(shared.scale_b) + (T::kSumGroups ? 8 * (lane % 4) : 0)),
        first((tile.expert * ceil_div(p.N, kDepth) + tile.column / kDepth) * steps_of(tile) & 3) {}
  MOE_DEVICE void load_rows(int s, int half, float (&row)[2]) const {
    const uint32_t at = of_rows + (s * (T::kTileRows + 4) + 128 * half) * 4;
    row[0] = load_shared(at);
    row[1] = load_shared(at + 8 * 4);
  }
  MOE_DEVICE void load_columns(int s, float (&column)[T::kTileColumns / 4]) const {
    const uint32_t at = of_columns + s * int(sizeof(Shared<T>::scale_b[0]));
    if constexpr (T::kSumGroups) {
#pragma unroll
      for (int i = 0; i < T::kTileColumns / 4; i += 2) load_shared(at + 16 * i, column[i], column[i + 1]);
    } else {
      const float of_all = load_shared(at + (first + s & 3) * 4);
#pragma unroll
      for (float& f : column) f = of_all;
    }
  }
};
// Promoted: products of a stage that is full, of 128 rows of the tile at a time. kHalves: of the tile's rows, those in
// which the warpgroup has any. `behind`: whether to wait for the next stage meanwhile.
template <int kHalves, class T>
MOE_DEVICE void promote_stage(const Consumer<T>& c, float (&sum)[2][T::kTileColumns / 2],
                              float (&product)[T::kTileColumns / 2], int s, const BlockScales<T>& scales, bool behind) {
  constexpr int kSums = T::kTileColumns / 2;
  float column[T::kTileColumns / 4];
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    c.multiply(product, s, half, false);
    float scale[kSums];
    if constexpr (T::kBlockScales) {
      float row[2];
      scales.load_rows(s, half, row);
      if (half == 0) scales.load_columns(s, column);
#pragma unroll
      for (int i = 0; i < kSums; ++i) scale[i] = row[i / 2 % 2] * column[i / 4 * 2 + i % 2];
      if (T::kSumGroups) pin_registers(scale);  // multiplied while the tensor cores are busy
    }
    if (half == kHalves - 1 && behind) c.wait_behind(s);
    wgmma_wait<0>();
    pin_registers(product);
    if (half == kHalves - 1) {
      __syncwarp();  // the scales are read as well, by all lanes
      c.release_stage(s);
    }
#pragma unroll
    for (int i = 0; i < kSums; ++i)
      sum[half][i] = T::kBlockScales ? fmaf(product[i], scale[i], sum[half][i]) : sum[half][i] + product[i];
  }
}
template <int kHalves, class T>
MOE_DEVICE void multiply_promoted(const Args& p, Consumer<T>& c, Shared<T>& shared, const Tile& tile,
                                  float (&sum)[2][T::kTileColumns / 2]) {
#pragma unroll
  for (int i = 0; i < T::kTileColumns / 2; ++i) sum[0][i] = sum[1][i] = 0.f;
  const BlockScales<T> scales(p, shared, tile, c.row(), c.lane());
  float product[T::kTileColumns / 2];
  int left = steps_of(tile);
#pragma unroll 1
  for (; left > kStages; left -= kStages) {
#pragma unroll
    for (int s = 0; s < kStages; ++s) promote_stage<kHalves>(c, sum, product, s, scales, true);
    c.phase ^= 1;
  }
  if (T::kSumGroups) clear_rest(c, shared, tile.depth);
#pragma unroll
  for (int s = 0; s < kStages; ++s) {
    const bool behind = s < kStages - 1;
    if (s < left) {
      promote_stage<kHalves>(c, sum, product, s, scales, behind);
    } else {
      c.release_stage(s);
      if (behind) c.wait_behind(s);
    }
  }
  c.phase ^= 1;
}

// A warp's 16 rows, of 128 of the tile, 128 bytes of columns at a time, by way of shared memory, so that lines of out
// are stored whole. value(h, j, i): of the thread's row `8 h` further, column 8 j + i of its two.
template <class T, class Value>
MOE_DEVICE void store_tile(const Args& p, const Consumer<T>& c, const Tile& tile, Shared<T>& shared, int half,
                           Value value) {
  constexpr int kElement = T::kFloat ? 4 : 2, kColumns = 128 / kElement;
  const int warp = c.warp(), lane = c.lane(), first = 16 * warp + 128 * half, rows = tile.rows - first;
  const int columns = up_to(tile.columns, T::kTileColumns);
  const int line = lane / 8, chunk = lane % 8;  // of 16 bytes
  const int64_t pitch = int64_t(p.N) * kElement;
  uint8_t* out = static_cast<uint8_t*>(p.out) + (tile.row + first + line) * pitch + int64_t(tile.column) * kElement;
  uint8_t* staging = shared.staging[warp];
  const uint32_t stage = shared_address(staging);
#pragma unroll
  for (int piece = 0; piece < ceil_div(T::kTileColumns, kColumns); ++piece) {
    if (piece * kColumns >= columns) break;
    constexpr int kEights = kColumns / 8;  // of columns
    const int eights = up_to(T::kTileColumns / 8 - piece * kEights, kEights);
    if constexpr (T::kFloat) {
      const int r = lane / 4, q = lane % 4;
#pragma unroll
      for (int j = 0; j < eights; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          auto* to = reinterpret_cast<float2*>(staging + (r + 8 * h) * 128 + ((2 * j + q / 2) ^ r) * 16 + q % 2 * 8);
          *to = make_float2(value(h, piece * kEights + j, 0), value(h, piece * kEights + j, 1));
        }
    } else {
      const int matrix = lane / 8, r = matrix % 2 * 8 + lane % 8;
      auto word = [&](int h, int j) {
        return to_bf16x2(value(h, piece * kEights + j, 0), value(h, piece * kEights + j, 1));
      };
#pragma unroll
      for (int j = 0; j < eights; j += 2)
        store_matrices(stage + r * 128 + ((j + matrix / 2) ^ (r & 7)) * 16, word(0, j), word(1, j), word(0, j + 1),
                       word(1, j + 1));
    }
    __syncwarp();
    Vec16 held[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = 4 * i + line;
      held[i] = *reinterpret_cast<const Vec16*>(staging + r * 128 + (chunk ^ (r & 7)) * 16);
    }
    __syncwarp();
    if (piece * kColumns + chunk * (16 / kElement) < columns) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (4 * i + line < rows)
          *reinterpret_cast<Vec16*>(out + 4 * i * pitch + piece * 128 + chunk * 16) = held[i];
    }
  }
}

// Of 128 rows of the tile, the scales of the thread's two.
MOE_DEVICE void load_row_scales(const Args& p, const Tile& tile, int row, float (&scale)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) scale[h] = row + 8 * h < tile.rows ? p.scale_a[tile.row + row + 8 * h] : 0.f;
}

template <class T>
MOE_DEVICE void consume_rows(const Args& p, Consumer<T>& c, Shared<T>& shared, const Tile& tile, int turn) {
  float sum[T::kTileColumns / 2], of_row[2];
  load_row_scales(p, tile, c.row(), of_row);
  if (tile.columns > T::kTileColumns / 2) multiply_rows(c, shared, tile, sum);
  else multiply_rows(c, shared, tile, reinterpret_cast<float(&)[T::kTileColumns / 4]>(sum));
  const float* of_columns = shared.scale_b[turn] + 2 * (c.lane() % 4);
  store_tile(p, c, tile, shared, 0, [&](int h, int j, int i) {
    return sum[j * 4 + 2 * h + i] * of_row[h] * of_columns[8 * j + i];
  });
}
template <class T>
MOE_DEVICE void consume_promoted(const Args& p, Consumer<T>& c, Shared<T>& shared, const Tile& tile, int turn) {
  float sum[2][T::kTileColumns / 2];
  const bool two = tile.rows > 128 + c.group() * kWgmmaRows;
  if (two) multiply_promoted<2>(p, c, shared, tile, sum);
  else multiply_promoted<1>(p, c, shared, tile, sum);
  const float* of_columns = shared.scale_b[turn] + 2 * (c.lane() % 4);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (half == 1 && !two) break;
    float of_row[2];
    if (!T::kBlockScales) load_row_scales(p, tile, c.row() + 128 * half, of_row);
    store_tile(p, c, tile, shared, half, [&](int h, int j, int i) {
      const float f = sum[half][j * 4 + 2 * h + i];
      return T::kBlockScales ? f : f * of_row[h] * of_columns[8 * j + i];
    });
  }
}

template <class T>
MOE_DEVICE void consume(const Args& p, Shared<T>& shared) {
  Consumer<T> c(shared);
  for (int turn = 0;; turn ^= 1) {
    const Tile& tile = shared.tiles[turn];
    c.wait_full(0);
    if (!tile.there) return;
    const bool mine = tile.rows > c.group() * kWgmmaRows && tile.columns > 0;
    if (!mine || (T::kSumGroups && tile.depth == 0)) {
      c.step_over(rounds_of(tile));
      for (int half = 0; mine && half < T::kTileRows / 128; ++half)
        store_tile(p, c, tile, shared, half, [](int, int, int) { return 0.f; });
    } else if constexpr (T::kPromoted) {
      consume_promoted(p, c, shared, tile, turn);
    } else {
      consume_rows(p, c, shared, tile, turn);
    }
  }
}

}  // namespace moe_fp8::sm90
