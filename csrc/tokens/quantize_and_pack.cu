#include "tokens/quantize_and_pack.h"

#include "platform/launch.h"
#include "primitives/group_table.h"
#include "quantize/geometries.h"
#include "quantize/row.h"
#include "tokens/columns.h"

namespace moe_fp8 {
namespace {

using Types = Fast<BF16, Kind::kEither>;
// The threads of a block share a token, and hold it while it goes to several rows.
constexpr int kVecs = 4, kMaxThreads = 1024;
constexpr int64_t kLongest = int64_t(kMaxThreads) * kVecs * Types::kVec;  // elements
constexpr int kRowsOfBlock = 64;             // that get their ids and scores, or zeros
constexpr int64_t kMaxBlocks = 1 << 21;      // HIP has fewer than 2^32 threads a launch
enum : int { kValues, kScales, kOthers };    // columns

struct MessagesPlan : QuantizeAndPackParams {
  int64_t first, fillers;  // block that the launch begins with; blocks that have no token
  int lanes;               // that share a scale; 0: all of the block
  ScaleType scale_type;
};

// The columns that are not of the token's values; of no token, all.
MOE_DEVICE void fill_row(const PackTokensParams& p, int64_t row) {
  const int64_t source = p.source.row(row);
  for (int i = source < 0 ? kValues : kOthers; i < p.num_columns; ++i) {
    const Column& c = p.columns[i];
    with_units(p, c, [&](auto load) {
      copy_units(p, c, row, source, threadIdx.x % kWarpSize, c.padded_units, kWarpSize, load);
    });
  }
}

// Vectors of a token that the thread has, and the scales of those.
template <class Scale>
struct Quantized {
  Vec8 q[kVecs];
  typename Scale::Stored scale[kVecs];
};
template <class Scale>
MOE_DEVICE Quantized<Scale> quantize_vectors(const MessagesPlan& p, const RowTeam& team, const Vec16 (&x)[kVecs]) {
  uint32_t amax[kVecs], of_all = 0;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    amax[i] = amax_bits<BF16>(max_vec<BF16>(x[i]));
    for (int mask = 1; mask < p.lanes; mask *= 2) amax[i] = Max{}(amax[i], shfl_xor(amax[i], mask));
    of_all = Max{}(of_all, amax[i]);
  }
  if (p.lanes == 0) of_all = team.max(of_all);
  Quantized<Scale> quantized;
  Types::with_cast(p.of_x, [&](auto cast) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const auto s = Types::scale_of<Scale>(p.of_x, p.lanes ? amax[i] : of_all);
      const float m = s.multiplier;
      quantized.scale[i] = s.stored();
#pragma unroll
      for (int w = 0; w < 2; ++w) quantized.q[i].w[w] = cast_words<BF16>(x[i].w + 2 * w, m, m, m, m, cast);
    }
  });
  return quantized;
}

MOE_DEVICE void clear_rest(uint8_t* column, const Column& c, int64_t bytes, int thread) {
  if (bytes + thread < c.padded_units * bytes_of(c.unit)) column[bytes + thread] = 0;
}
template <class Scale>
MOE_DEVICE void store_vectors(const MessagesPlan& p, const RowTeam& team, const Quantized<Scale>& of, uint8_t* row) {
  using Stored = typename Scale::Stored;
  const Column &values = p.rows.columns[kValues], &scales = p.rows.columns[kScales];
  auto* q = reinterpret_cast<Vec8*>(row + values.offset);
  auto* scale = reinterpret_cast<Stored*>(row + scales.offset);
  const int vecs = int(p.of_x.K / Types::kVec), sharing = p.lanes ? p.lanes : vecs;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int v = i * team.count + team.rank;
    if (v >= vecs) break;
    store_stream(q + v, of.q[i]);
    if (v % sharing == 0) scale[v / sharing] = of.scale[i];
  }
  clear_rest(row + values.offset, values, p.of_x.K, team.rank);
  clear_rest(row + scales.offset, scales, ceil_div(vecs, sharing) * int64_t(sizeof(Stored)), team.rank);
}

template <class Scale>
MOE_DEVICE void send_token(const MessagesPlan& p, int64_t token) {
  __shared__ uint32_t of_wave[kMaxThreads / 32];
  const RowTeam team = {int(threadIdx.x), int(blockDim.x), of_wave};
  const int slots = int(token * p.top_k), lane = threadIdx.x % kWarpSize;
  const auto row_of = [&](int64_t j) {  // -1: none, or that of a later slot
    const int row = j < p.top_k ? p.inverse[slots + j] : -1;
    return row >= 0 && row < p.rows.rows && p.rows.source.at[row] == slots + j ? row : -1;
  };
  int own = row_of(lane);
  const auto* of_token = find_element<Types>(p.of_x, token * p.of_x.row_stride);
  Vec16 x[kVecs];
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int v = i * team.count + team.rank;
    x[i] = v < p.of_x.K / Types::kVec ? load_vec<Types>(p.of_x, of_token, v) : Vec16{};
  }
  const Quantized<Scale> quantized = quantize_vectors<Scale>(p, team, x);
  for (int64_t first = 0; first < p.top_k; first += kWarpSize) {
    if (first > 0) own = row_of(first + lane);
    for (int j = 0; j < kWarpSize && first + j < p.top_k; ++j)
      if (const int row = int(shfl(uint32_t(own), j)); row >= 0)
        store_vectors<Scale>(p, team, quantized, static_cast<uint8_t*>(p.rows.to) + row * p.rows.row_bytes);
  }
}

MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kMaxThreads, 1) quantize_and_pack_kernel(MOE_GRID_CONSTANT const MessagesPlan p) {
  const int64_t block = p.first + blockIdx.x;
  wait_for_previous_kernel();
  if (block < p.fillers) {
    const int64_t rows = p.rows.rows, end = (block + 1) * kRowsOfBlock < rows ? (block + 1) * kRowsOfBlock : rows;
    for (int64_t row = block * kRowsOfBlock + threadIdx.x / kWarpSize; row < end; row += blockDim.x / kWarpSize)
      fill_row(p.rows, row);
  } else if (p.scale_type == ScaleType::kF32) {
    send_token<ScaleF32>(p, block - p.fillers);
  } else {
    send_token<ScaleE8M0>(p, block - p.fillers);
  }
}

}  // namespace

bool can_quantize_and_pack(const QuantizeAndPackParams& p) {
  return p.of_x.in == InType::kBF16 && p.of_x.K > 0 && p.of_x.K <= kLongest && rows_are_fast(p.of_x);
}

int quantize_and_pack(const QuantizeAndPackParams& p, void* stream) {
  if (p.rows.rows == 0) return 0;
  const Format& f = format_of(p.of_x.format);
  const int64_t vecs = p.of_x.K / Types::kVec, fillers = ceil_div<int64_t>(p.rows.rows, kRowsOfBlock);
  const int threads = int(round_up<int64_t>(ceil_div<int64_t>(vecs, kVecs), kLargestWarp));
  const int64_t blocks = fillers + p.of_x.rows;
  for (MessagesPlan plan = {p, 0, fillers, f.block / Types::kVec, f.scale_type}; plan.first < blocks;
       plan.first += kMaxBlocks) {
    const int64_t left = blocks - plan.first;
    const dim3 grid(unsigned(left < kMaxBlocks ? left : kMaxBlocks));
    if (const int e = launch(quantize_and_pack_kernel, {grid, dim3(threads), stream}, plan)) return e;
  }
  return 0;
}

}  // namespace moe_fp8
