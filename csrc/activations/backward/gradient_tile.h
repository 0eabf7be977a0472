// Formats with blocks, from one read: a tile of 128 rows by 128 features. It has two parts of dh, or one, and one of a,
// each of 128 columns. They wait in shared memory, in bfloat16, until the amax of every column is known; from there on
// each is a tile of quantize/tile.h.
#pragma once
#include "activations/backward/gradients.h"
#include "quantize/tiles.h"

namespace moe_fp8 {

// A tile of all parts, as dh's first one along K, and which blocks its group has along the rows.
struct PlacedTile {
  QuantizedTile tile;
  int first, count;
};

struct GradientTilesPlan : GradientInputs {
  TilesPlan dh, a;
  PlacedTile* placed;
  float* dots;  // [F / 128, rows], of dscores
  int tiles;    // that there may be along the rows
  bool has_float_scales;

  // Of a part of h's features, in units of tiles; part `parts` is a.
  MOE_DEVICE int across_of(int part, int across) const {
    if (part == parts) return across;
    return gradients.h.interleaved ? 2 * across + part : across + part * int(a.tiles_across);
  }
};

using FloatScales = TileScales<ScaleType::kF32>;
using MxScales = TileScales<ScaleType::kE8M0>;
template <class Scales>
using OfDh = TileTraits<GradientTypes, Scales, Scaling::kRowsAndColumns, TokenTiles>;
template <class Scales>
using OfA = TileTraits<Vectorized<BF16, Fp8Variant::kE4M3>, Scales, Scaling::kColumns, TokenTiles>;

template <class T, int kParts>
struct GradientTile {
  static constexpr int kVecs = kBlock / kFeatures;  // of a row of a part
  struct Access {
    union {
      alignas(16) uint32_t thread_row_amax[kTileThreadRows][kBlock / 2];
      float row_multiplier[kBlock][T::kBlocks];  // when multipliers of columns are made
    };
    alignas(16) float multiplier[T::kBlocks][kBlock];
  };
  Vec16 waiting[kParts + 1][kBlock][kVecs];
  Access of[kParts + 1];
  QuantizedTile tiles[kParts + 1];

  // Words of chunk `at` of the columns of a row of threads.
  MOE_DEVICE Vec16* thread_row_amax(int part, int at) {
    return reinterpret_cast<Vec16*>(of[part].thread_row_amax[threadIdx.y]) + at;
  }
  // In the place of what waited, two parts by turns.
  MOE_DEVICE TileStage<T>& stage(int part) { return reinterpret_cast<TileStage<T>&>(waiting[part % 2]); }
};
// Two blocks a multiprocessor: one reads while the other one stores. Chips without the room go the long way.
template <class T, int kParts>
MOE_HD constexpr bool has_room(int shared) {
  return 2 * int(sizeof(GradientTile<T, kParts>) + kReservedShared) <= shared;
}

// The 16 rows of a row of threads, a vector a lane. Behind the last row it comes once more.
template <class G, class T, class B>
MOE_DEVICE void differentiate_rows(const GradientTilesPlan& p, const QuantizedTile& tile, B& shared) {
  constexpr int kParts = G::kParts, kVecs = B::kVecs, kRowsAtOnce = kLanes / kVecs;
  constexpr int kHeld = G::kLight ? 4 : 2, kSteps = kChunkRows / kRowsAtOnce;
  const int vec = threadIdx.x % kVecs, v = tile.across * kVecs + vec, last = tile.rows - 1;
  struct Chunk { int part, at; };  // of eight columns
  // The thread's: those of dh lie in both parts, or, of gates and ups in turns, side by side in one; a's is the last.
  const auto chunk_of = [&](int i) {
    const int at = 2 * vec + i;
    return G::kInterleaved && i < kParts ? Chunk{at / kVecs, at % kVecs} : Chunk{i, vec};
  };
  const auto local = [&](int step) {
    return int(threadIdx.y) * kChunkRows + step * kRowsAtOnce + int(threadIdx.x) / kVecs;
  };
  const auto load = [&](int step) {
    const int row = int(tile.first_row) + Min{}(local(step), last);
    RowScales scales = p.gradients.h.scale.of_row(row);
    if (std::is_same_v<typename T::Scale, ScaleF32>) scales.is_float = true, scales.block4_stride = 0;
    else scales.is_float = false;
    // A part is whole tiles, so that from every block it is as far to that of the other part.
    const int64_t first = scales.offset(uint32_t(v * (G::kColumns / G::kPieces)) / T::Format::kSize);
    const int64_t apart = scales.offset(uint32_t(p.vecs * kFeatures) / T::Format::kSize);
    return G::template load<Reuse::kNone>(p, row, v, [&](int i) {
      return scales.value(scales.bits_at(first + i * apart));
    });
  };
  Vec16 most[kParts + 1] = {};
  const auto add = [](Vec16& most, const Vec16& values) {
#pragma unroll
    for (int w = 0; w < 4; ++w) most.w[w] = max_magnitude<BF16>(most.w[w], values.w[w]);
  };
  G g[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) g[i] = load(i);
#pragma unroll 1
  for (int step = 0; step < kSteps; step += kHeld) {
    float dots[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      wave_barrier();  // one row's values after the other's: for both at once there are no registers
      typename G::Pairs dh;
      Vec16 a;
      dots[i] = g[i].round([&](int j) { return g[i].of(j); }, dh, a.w);
      if (step + kHeld < kSteps) g[i] = load(step + kHeld + i);
      const int row = local(step + i);
#pragma unroll
      for (int c = 0; c < kParts; ++c) {
        const Vec16 values = {{dh[4 * c], dh[4 * c + 1], dh[4 * c + 2], dh[4 * c + 3]}};
        const Chunk chunk = chunk_of(c);
        shared.waiting[chunk.part][row][chunk.at] = values;
        add(most[c], values);
      }
      shared.waiting[kParts][row][vec] = a;
      add(most[kParts], a);
    }
    const float dot = neighbour_sums<kVecs>(dots);
    const int row = local(step + number_of_lane<kHeld>(vec));
    if (vec < kHeld && row <= last) store_stream(p.dots + tile.across * p.dh.rows + tile.first_row + row, dot);
  }
#pragma unroll
  for (int c = 0; c <= kParts; ++c) {
    Vec16 other;
#pragma unroll
    for (int w = 0; w < 4; ++w) other.w[w] = shfl_xor(most[c].w[w], kVecs);
    add(most[c], other);
    const Chunk chunk = chunk_of(c);
    if (int(threadIdx.x) < kVecs) *shared.thread_row_amax(chunk.part, chunk.at) = most[c];
  }
}
template <class Activations, class T, class B>
MOE_DEVICE void differentiate(const GradientTilesPlan& p, const QuantizedTile& tile, B& shared) {
  if (in_thread_row(tile.rows) > 0) {
    with_gradients<Activations>(p, [&](auto of) {
      differentiate_rows<typename decltype(of)::Type, T>(p, tile, shared);
    });
  } else if (int(threadIdx.x) < B::kVecs) {
#pragma unroll
    for (int part = 0; part <= Activations::kParts; ++part) *shared.thread_row_amax(part, threadIdx.x) = Vec16{};
  }
}

// The lane's columns of 16 rows.
template <class T, class B>
MOE_DEVICE void read_part(const B& shared, int part, TileWords<T>& v) {
#pragma unroll
  for (int i = 0; i < kChunkRows; ++i) {
    const auto* row = reinterpret_cast<const Vec8*>(shared.waiting[part][threadIdx.y * kChunkRows + i]);
    const Vec8 words = row[threadIdx.x];
    v[i][0] = words.w[0];
    v[i][1] = words.w[1];
  }
}
template <class T, class B>
MOE_DEVICE void make_multipliers(const TilesPlan& p, B& shared) {
  if (T::kBlocks == 1 && p.of_squares()) make_square_multiplier<T>(p, shared);
  else make_column_multipliers<T>(p, shared);
}
template <class T, class B>
MOE_DEVICE void cast_part_along_rows(const TilesPlan& p, const QuantizedTile& tile, const TileWords<T>& v, B& shared) {
  if (in_wave(tile.rows) <= 0) return;
  make_row_multipliers<T>(p, v, shared);
  cast_rows<T>(p, tile, v, shared);
}

}  // namespace moe_fp8
