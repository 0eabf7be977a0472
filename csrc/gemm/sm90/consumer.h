// The consumers: multiply what stages hold, and scale and store the sums.
#pragma once
#include "gemm/sm90/stages.h"

namespace moe_fp8::sm90 {

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
  // Of the tile, the first of the thread's two rows, which are 8 apart.
  static MOE_DEVICE int row() { return group() * kWgmmaRows + wgmma_row(thread() % 128); }

  MOE_DEVICE explicit Consumer(Shared& shared) : full(shared_address(shared.full)), phase(0) {
    a = wgmma_operand(shared_address(shared.a) + group() * kWgmmaRows * kDepth);
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
  // Begins the products of a stage with the columns from 128 * half on.
  template <int n>
  MOE_DEVICE void multiply(float (&sum)[n], int s, int half, bool accumulate) const {
    const uint32_t a_of = a + s * (kStageBytesA / 16), b_of = b + s * (kStageBytesB / 16) + half * (kStageBytesB / 32);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kDepth / kWgmmaDepth; ++i)
      wgmma_e4m3(sum, a_of + i * kWgmmaStep, b_of + i * kWgmmaStep, accumulate || i > 0);
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
MOE_DEVICE void clear_rest(const Consumer& c, Shared& shared, int depth) {
  if (depth % kDepth == 0) return;
  const int s = (ceil_div(depth, kDepth) - 1) % kStages;
  const int first = depth % kDepth / 16, chunks = kDepth / 16 - first;  // of 16 bytes
  c.wait_full(s);
  uint8_t *a = shared.a[s] + c.group() * kWgmmaRows * kDepth, *b = shared.b[s];
#pragma unroll 1
  for (int i = c.thread() % 128; i < (kWgmmaRows + kTileColumns) * chunks; i += 128) {
    const int r = i / chunks, row = r < kWgmmaRows ? r : r - kWgmmaRows, chunk = first + i % chunks;
    *reinterpret_cast<Vec16*>((r < kWgmmaRows ? a : b) + row * kDepth + (chunk ^ (row & 7)) * 16) = Vec16{};
  }
  stores_before_copies();
  barrier_of(c.group(), 128);
}

// Scales of rows. A round, of whose stages kLive are loaded. One stage's products are under way while the next one is
// waited for; `begun`: there was a round before, whose last stage is `held`.
template <int kLive, int n>
MOE_DEVICE void multiply_round(Consumer& c, float (&sum)[n], bool begun, bool held) {
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
MOE_DEVICE void multiply_rows(Consumer& c, Shared& shared, const Tile& tile, float (&sum)[n]) {
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
}

// Scales of blocks: of a stage, products of 128 columns at a time, promoted into `sum`. kHalves: of the tile's columns.
struct BlockScales {
  uint32_t a, b;  // of the thread's first row, of the columns: in the first stage
  int first[2];   // of either half of the columns: where its blocks begin among all, modulo 4
};
// A stage that is full; `behind`: whether to wait for the next one meanwhile.
template <int kHalves>
MOE_DEVICE void promote_stage(const Consumer& c, float (&sum)[2][64], float (&product)[64], int s,
                              const BlockScales& scales, bool behind) {
  c.multiply(product, s, 0, false);
  const uint32_t of_rows = scales.a + s * sizeof(Shared::scale_a[0]);
  const float low = load_shared(of_rows), high = load_shared(of_rows + 8 * 4);
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    if (h > 0) c.multiply(product, s, h, false);
    const float of_half = load_shared(scales.b + (s * 2 + h) * 16 + (scales.first[h] + s & 3) * 4);
    const float scale[2] = {low * of_half, high * of_half};
    if (h == kHalves - 1 && behind) c.wait_behind(s);
    wgmma_wait<0>();
    pin_registers(product);
    if (h == kHalves - 1) {
      __syncwarp();  // the scales are read as well, by all lanes
      c.release_stage(s);
    }
#pragma unroll
    for (int i = 0; i < 64; ++i) sum[h][i] = fmaf(product[i], scale[i / 2 % 2], sum[h][i]);
  }
}
template <int kHalves>
MOE_DEVICE void multiply_blocks(const Args& p, Consumer& c, Shared& shared, const Tile& tile, float (&sum)[2][64]) {
#pragma unroll
  for (int i = 0; i < 64; ++i) sum[0][i] = sum[1][i] = 0.f;
  const int steps = steps_of(tile);
  const int rows = ceil_div(p.N, kDepth), row_of_blocks = tile.expert * rows + tile.column / kDepth;
  const BlockScales scales = {shared_address(shared.scale_a) + 4 * ((tile.row_of_a & 3) + c.row()),
                              shared_address(shared.scale_b),
                              {row_of_blocks * steps & 3, (row_of_blocks + 1) * steps & 3}};
  float product[64];
  int left = steps;
#pragma unroll 1
  for (; left > kStages; left -= kStages) {
#pragma unroll
    for (int s = 0; s < kStages; ++s) promote_stage<kHalves>(c, sum, product, s, scales, true);
    c.phase ^= 1;
  }
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

// A warp's 16 rows, 128 bytes of columns at a time, by way of shared memory, so that lines of out are stored whole.
// value(h, j, i): of the thread's row `8 h` further, column 8 j + i of its two.
template <class T, class Value>
MOE_DEVICE void store_tile(const Args& p, const Consumer& c, const Tile& tile, Shared& shared, Value value) {
  constexpr int kElement = T::kFloat ? 4 : 2, kColumns = 128 / kElement, kPieces = kTileColumns / kColumns;
  const int warp = c.warp(), lane = c.lane(), first = 16 * warp, rows = tile.rows - first;
  const int columns = up_to(tile.columns, kTileColumns);
  const int line = lane / 8, chunk = lane % 8;  // of 16 bytes
  const int64_t pitch = int64_t(p.N) * kElement;
  uint8_t* out = static_cast<uint8_t*>(p.out) + (tile.row + first + line) * pitch + int64_t(tile.column) * kElement;
  uint8_t* staging = shared.staging[warp];
  const uint32_t stage = shared_address(staging);
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    if (piece * kColumns >= columns) break;
    if constexpr (T::kFloat) {
      const int r = lane / 4, q = lane % 4;
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          auto* to = reinterpret_cast<float2*>(staging + (r + 8 * h) * 128 + ((2 * j + q / 2) ^ r) * 16 + q % 2 * 8);
          *to = make_float2(value(h, piece * 4 + j, 0), value(h, piece * 4 + j, 1));
        }
    } else {
      const int matrix = lane / 8, r = matrix % 2 * 8 + lane % 8;
      auto word = [&](int h, int j) { return to_bf16x2(value(h, piece * 8 + j, 0), value(h, piece * 8 + j, 1)); };
#pragma unroll
      for (int j = 0; j < 8; j += 2)
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

template <class T>
MOE_DEVICE void consume(const Args& p, Shared& shared) {
  Consumer c(shared);
  for (int turn = 0;; turn ^= 1) {
    const Tile& tile = shared.tiles[turn];
    c.wait_full(0);
    if (!tile.there) return;
    const bool mine = tile.rows > c.group() * kWgmmaRows && tile.columns > 0;
    if (!mine || (T::kSumGroups && tile.depth == 0)) {
      c.step_over(rounds_of(tile));
      if (mine) store_tile<T>(p, c, tile, shared, [](int, int, int) { return 0.f; });
      continue;
    }
    const bool wide = tile.columns > kTileColumns / 2;
    if constexpr (T::kBlockScales) {
      float sum[2][64];
      if (wide) multiply_blocks<2>(p, c, shared, tile, sum);
      else multiply_blocks<1>(p, c, shared, tile, sum);
      store_tile<T>(p, c, tile, shared, [&](int h, int j, int i) { return sum[j / 16][j % 16 * 4 + 2 * h + i]; });
    } else {
      float sum[128], of_row[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) of_row[h] = c.row() + 8 * h < tile.rows ? p.scale_a[tile.row + c.row() + 8 * h] : 0.f;
      if (wide) multiply_rows<T>(c, shared, tile, sum);
      else multiply_rows<T>(c, shared, tile, reinterpret_cast<float(&)[64]>(sum));
      const float* of_columns = shared.of_columns[turn] + 2 * (c.lane() % 4);
      store_tile<T>(p, c, tile, shared, [&](int h, int j, int i) {
        return sum[j * 4 + 2 * h + i] * of_row[h] * of_columns[8 * j + i];
      });
    }
  }
}

}  // namespace moe_fp8::sm90
