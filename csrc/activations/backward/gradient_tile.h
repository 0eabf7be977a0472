// The gradients of a tile of 128 rows by 128 features, for formats with blocks: one read of h and da. The last tile of
// a row may have fewer features. It repeats its last vector, which is in the last scaling block of every output and so
// changes no maximum. What the vector gives a second time has no column, and is not stored.
//
// A tile has kOutputs outputs of 128 columns each: a projection of dh each, then a. Their values wait in shared memory,
// in bfloat16, until the amax of every column is known. From there on each output is a tile of quantize/tile.h.
#pragma once
#include "activations/backward/gradients.h"
#include "activations/backward/sum_groups.h"
#include "quantize/tiles.h"

namespace moe_fp8 {

// A tile of all outputs, placed as the first output of dh in tile column 0, and the blocks of its group along the rows.
struct PlacedTile {
  QuantizedTile tile;
  int first, count;
};

struct GradientTilesPlan : GradientInputs {
  TilesPlan dh, a;
  PlacedTile* placed;
  float* dots;  // [tiles of a row, rows], parts of dscores
  float* partial_sums;  // [2 * tiles, columns of dh], sums of the halves of a tile; null: not wanted
  int tiles;    // the most that there may be along the rows
  bool has_float_scales;

  // The tile column of an output, for tile column `across` of the features. The last tile of an interleaved h may have
  // no columns of its second output, whose tile column then is behind the last one.
  MOE_DEVICE int tile_column(int output, int across) const {
    if (output == projections) return across;
    return gradients.h.interleaved ? 2 * across + output : across + output * int(a.tiles_across);
  }
};

using FloatScales = TileScales<ScaleType::kF32>;
using MxScales = TileScales<ScaleType::kE8M0>;
template <class Scales>
using DhTraits = TileTraits<GradientTypes, Scales, Scaling::kRowsAndColumns, TokenTiles>;
template <class Scales>
using ATraits = TileTraits<Vectorized<BF16, Fp8Variant::kE4M3>, Scales, Scaling::kColumns, TokenTiles>;

template <class T, int kOutputs>
struct GradientTile {
  static constexpr int kVecs = kBlock / kFeatures;  // of a row of an output
  struct OutputScaling {
    union {
      alignas(16) uint32_t thread_row_amax[kTileThreadRows][kBlock / 2];
      float row_multiplier[kBlock][T::kBlocks];  // written once the multipliers of columns exist
    };
    alignas(16) float multiplier[T::kBlocks][kBlock];
  };
  Vec16 values[kOutputs][kBlock][kVecs];
  OutputScaling scaling[kOutputs];
  QuantizedTile tiles[kOutputs];

  // The amax words of chunk `chunk` of an output's columns, over the rows of a row of threads.
  MOE_DEVICE Vec16* thread_row_amax(int output, int chunk) {
    return reinterpret_cast<Vec16*>(scaling[output].thread_row_amax[threadIdx.y]) + chunk;
  }
  // Reuses the memory of values; two outputs alternate.
  MOE_DEVICE TileStage<T>& stage(int output) { return reinterpret_cast<TileStage<T>&>(values[output % 2]); }
};
// True if kGradientTileBlocks blocks fit a multiprocessor. Otherwise callers quantize gradients from memory.
template <class T, int kOutputs>
MOE_HD constexpr bool has_room(int shared) {
  return kGradientTileBlocks * int(sizeof(GradientTile<T, kOutputs>) + kReservedShared) <= shared;
}

// Computes the 16 rows of a row of threads; a lane has a vector of eight features of some of them. Out-of-range rows
// repeat the last row: the same maxima, no branch.
template <class G, class T, class Shared>
MOE_DEVICE void differentiate_rows(const GradientTilesPlan& p, const QuantizedTile& tile, Shared& shared) {
  constexpr int kProjections = G::kProjections, kOutputs = G::kOutputs, kVecs = Shared::kVecs;
  constexpr int kRowsAtOnce = kLanes / kVecs, kSteps = kChunkRows / kRowsAtOnce;
  constexpr int kInFlight = tile_rows_in_flight(G::kLight);
  const int vec = threadIdx.x % kVecs, number = tile.across * kVecs + vec, last = tile.rows - 1;
  const int v = Min{}(number, p.vecs - 1);
  struct Chunk { int output, number; };  // eight columns
  // The chunk of the thread's vector i: its eight features in each projection of dh, or, if h is interleaved, two
  // neighbouring chunks of one output; the last vector is a's.
  const auto chunk_of = [&](int i) {
    const int at = 2 * vec + i;
    return G::kInterleaved && i < kProjections ? Chunk{at / kVecs, at % kVecs} : Chunk{i, vec};
  };
  const auto row_in_tile = [&](int step) {
    return int(threadIdx.y) * kChunkRows + step * kRowsAtOnce + int(threadIdx.x) / kVecs;
  };
  const auto load = [&](int step) {
    const int row = int(tile.first_row) + Min{}(row_in_tile(step), last);
    RowScales scales = p.gradients.h.scale.scales_of_row(row);
    if (std::is_same_v<typename T::Scale, ScaleF32>) scales.is_float = true, scales.block4_stride = 0;
    else scales.is_float = false;
    // If projections are halves, each is whole tiles. So the scales of the second are at a fixed distance.
    const int64_t first = scales.offset(uint32_t(v * (G::kColumns / G::kVectors)) / T::Format::kSize);
    const int64_t distance = scales.offset(uint32_t(p.vecs * kFeatures) / T::Format::kSize);
    return G::template load<Reuse::kNone>(p, row, v, [&](int i) {
      return scales.value(scales.bits_at(first + i * distance));
    });
  };
  Vec16 max[kOutputs] = {};
  const auto accumulate = [](Vec16& max, const Vec16& values) {
#pragma unroll
    for (int w = 0; w < 4; ++w) max.w[w] = max_magnitude<BF16>(max.w[w], values.w[w]);
  };
  G g[kInFlight];
#pragma unroll
  for (int i = 0; i < kInFlight; ++i) g[i] = load(i);
#pragma unroll 1
  for (int step = 0; step < kSteps; step += kInFlight) {
    float dots[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      wave_barrier();  // one row's values after the other's: there are no registers for both at once
      typename G::Pairs dh;
      Vec16 a;
      dots[i] = g[i].round([&](int j) { return g[i].gradient(p, j); }, dh, a.w);
      if (number >= p.vecs) dots[i] = 0;
      if (step + kInFlight < kSteps) g[i] = load(step + kInFlight + i);
      const int row = row_in_tile(step + i);
#pragma unroll
      for (int c = 0; c < kProjections; ++c) {
        const Vec16 values = {{dh[4 * c], dh[4 * c + 1], dh[4 * c + 2], dh[4 * c + 3]}};
        const Chunk chunk = chunk_of(c);
        shared.values[chunk.output][row][chunk.number] = values;
        accumulate(max[c], values);
      }
      shared.values[kProjections][row][vec] = a;
      accumulate(max[kProjections], a);
    }
    const float dot = reduce_scatter_sum<kVecs>(dots);
    const int row = row_in_tile(step + reduce_scatter_sum_index<kInFlight>(vec));
    if (vec < kInFlight && row <= last) store_stream(p.dots + tile.across * p.dh.rows + tile.first_row + row, dot);
  }
#pragma unroll
  for (int c = 0; c < kOutputs; ++c) {
#pragma unroll
    for (int w = 0; w < 4; ++w) max[c].w[w] = reduce_lanes<kLanes, kVecs>(max[c].w[w], MaxMagnitude<BF16>{});
    const Chunk chunk = chunk_of(c);
    if (int(threadIdx.x) < kVecs) *shared.thread_row_amax(chunk.output, chunk.number) = max[c];
  }
}
template <class Activations, class T, class Shared>
MOE_DEVICE void differentiate(const GradientTilesPlan& p, const QuantizedTile& tile, Shared& shared) {
  if (in_thread_row(tile.rows) > 0) {
    with_gradients<Activations>(p, [&](auto type) {
      differentiate_rows<typename decltype(type)::Type, T>(p, tile, shared);
    });
  } else if (int(threadIdx.x) < Shared::kVecs) {
#pragma unroll
    for (int output = 0; output <= Activations::kProjections; ++output)
      *shared.thread_row_amax(output, threadIdx.x) = Vec16{};
  }
}

// Sums each half of a tile's rows, for every column of dh. A thread has a word, two columns, of a half.
template <int kProjections, class Shared>
MOE_DEVICE void sum_halves(const GradientTilesPlan& p, int along, const Shared& shared) {
  constexpr int kWords = kBlock / 2, kHalf = kRowsOfPartial, kHalves = kBlock / kHalf;
  for (int at = threadIdx.y * kLanes + threadIdx.x; at < kProjections * kHalves * kWords; at += kTileThreads) {
    const int word = at % kWords, half = at / kWords % kHalves, output = at / (kHalves * kWords);
    const QuantizedTile& tile = shared.tiles[output];
    const int rows = tile.group_rows - half * kHalf;
    const int64_t column = int64_t(tile.across) * kBlock + 2 * word;
    if (rows <= 0 || column >= p.dh.K) continue;
    const auto* const words = reinterpret_cast<const uint32_t*>(shared.values[output][half * kHalf]) + word;
    float chunks[kHalf / kChunkRows][2];
#pragma unroll
    for (int chunk = 0; chunk < kHalf / kChunkRows; ++chunk) {
      float fours[4][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int first = chunk * kChunkRows + 4 * i;
        uint32_t w[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) w[r] = first + r < rows ? words[(first + r) * kWords] : 0;
#pragma unroll
        for (int c = 0; c < 2; ++c)
          fours[i][c] = (element<BF16>(w[0], c) + element<BF16>(w[1], c)) +
                        (element<BF16>(w[2], c) + element<BF16>(w[3], c));
      }
#pragma unroll
      for (int c = 0; c < 2; ++c) chunks[chunk][c] = (fours[0][c] + fours[1][c]) + (fours[2][c] + fours[3][c]);
    }
    Vec8 sums;
#pragma unroll
    for (int c = 0; c < 2; ++c)
      sums.w[c] = as_bits((chunks[0][c] + chunks[1][c]) + (chunks[2][c] + chunks[3][c]));
    *reinterpret_cast<Vec8*>(p.partial_sums + (int64_t(along) * kHalves + half) * p.dh.K + column) = sums;
  }
}

// Reads the lane's columns of 16 rows of an output.
template <class T, class Shared>
MOE_DEVICE void read_output(const Shared& shared, int output, TileWords<T>& v) {
#pragma unroll
  for (int i = 0; i < kChunkRows; ++i) {
    const auto* row = reinterpret_cast<const Vec8*>(shared.values[output][threadIdx.y * kChunkRows + i]);
    const Vec8 words = row[threadIdx.x];
    v[i][0] = words.w[0];
    v[i][1] = words.w[1];
  }
}
template <class T, class Scaling>
MOE_DEVICE void make_multipliers(const TilesPlan& p, Scaling& scaling) {
  if (T::kBlocks == 1 && p.has_square_amax()) make_square_multiplier<T>(p, scaling);
  else make_column_multipliers<T>(p, scaling);
}
template <class T, class Scaling>
MOE_DEVICE void cast_output_rows(const TilesPlan& p, const QuantizedTile& tile, const TileWords<T>& v,
                                 Scaling& scaling) {
  if (in_wave(tile.rows) <= 0) return;
  make_row_multipliers<T>(p, v, scaling);
  cast_rows<T>(p, tile, v, scaling);
}

}  // namespace moe_fp8
