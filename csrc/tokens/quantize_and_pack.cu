#include "tokens/quantize_and_pack.h"

#include "platform/launch.h"
#include "primitives/groups.h"
#include "quantize/geometries.h"
#include "quantize/row.h"
#include "tokens/columns.h"

namespace moe_fp8 {
namespace {

using Types = Vectorized<BF16, Fp8Variant::kRuntime>;
// The threads of a block share a token, which they hold in shared memory while it goes to several rows; a thread casts
// 16 elements at once, for rows are stored 16 bytes at a time. [16384, 7168] for 2 ranks on an H200: 148 us, of blocks
// of 128 elements 150. Stored 8 bytes at a time they took 160 and 180, and where tokens were held in registers 160 and
// 168. To leave the L2 after what is stored (Reuse::kNotBeforeStores) gives 145, but it is what follows that reads the
// L2: a dispatch over ranks took 1,191 us, not 1,131.
constexpr int kThreads = 128, kBlocks = 10, kElements = 16, kVecs = kElements / Types::kVec;
constexpr int64_t kLongest = 16384;     // elements of a token
constexpr int64_t kMostRows = 256;      // of a token
constexpr int64_t kMaxBlocks = 1 << 24;  // HIP has fewer than 2^32 threads a launch
enum : int { kValues, kScales, kOthers };  // columns

struct MessagesPlan : QuantizeAndPackParams {
  int64_t first, clearers;  // block that the launch begins with; blocks that have no token
  int lanes;                // that share a scale; 0: all of the block
  ScaleType scale_type;
};
struct Rows { int count, at[kMostRows]; };  // of a token

// Columns from `column` on, of token `source` or of none.
MOE_DEVICE void copy_columns(const PackTokensParams& p, int column, int64_t row, int64_t source, int thread,
                             int threads) {
  for (; column < p.num_columns; ++column) {
    const Column& c = p.columns[column];
    with_units(p, c, [&](auto load) { copy_units(p, c, row, source, thread, c.padded_units, threads, load); });
  }
}
// Those of no token, of as many rows as there are threads.
MOE_DEVICE void clear_rows(const PackTokensParams& p, int64_t first) {
  const int64_t own = first + threadIdx.x;
  const int lane = threadIdx.x % kWarpSize;
  for (LaneMask left = ballot(own < p.rows && p.token(own) < 0); left; left &= left - 1)
    copy_columns(p, kValues, own - lane + popcount((left & -left) - 1), -1, lane, kWarpSize);
}

// By one wave.
MOE_DEVICE void find_rows(const MessagesPlan& p, int64_t token, Rows& rows) {
  const int lane = threadIdx.x, slots = int(token * p.top_k);
  int count = 0;
  for (int first = 0; first < p.top_k; first += kWarpSize) {
    const int row = first + lane < p.top_k ? p.rows.inverse[slots + first + lane] : -1;
    const bool own = row >= 0 && row < p.rows.rows && p.rows.source.at[row] == slots + first + lane;
    const LaneMask owned = ballot(own);
    if (own) rows.at[count + popcount(owned & ((LaneMask(1) << lane) - 1))] = row;
    count += popcount(owned);
  }
  if (lane == 0) rows.count = count;
}

MOE_DEVICE void clear_rest(uint8_t* column, const Column& c, int64_t bytes, int thread) {
  if (bytes + thread < c.padded_units * bytes_of(c.unit)) column[bytes + thread] = 0;
}
// Elements of a row, of a thread.
struct Piece {
  Vec16 of_x[kVecs];
  MOE_DEVICE uint32_t amax() const { return amax_bits<BF16>(max_vec<BF16>(max_vec<BF16>(of_x[0]), of_x[1])); }
  template <class Cast>
  MOE_DEVICE Vec16 quantized(float m, Cast cast) const {
    Vec16 q;
#pragma unroll
    for (int i = 0; i < 4; ++i) q.w[i] = cast_words<BF16>(of_x[i / 2].w + i % 2 * 2, m, m, m, m, cast);
    return q;
  }
};
static_assert(kVecs == 2);

template <class T, class Scale>
MOE_DEVICE void send_token(const MessagesPlan& p, int64_t token, Piece* pieces, uint32_t* of_wave, Rows& rows) {
  using Stored = typename Scale::Stored;
  const RowTeam team = {int(threadIdx.x), int(blockDim.x), of_wave};
  const int count = int(p.of_x.K / kElements), sharing = p.lanes ? p.lanes : count;  // pieces; of a scale
  const auto* of_token = find_element<T>(p.of_x, token * p.of_x.row_stride);
  for (int v = team.rank; v < kVecs * count; v += team.count)
    copy_words<T>(p.of_x, pieces->of_x + v, of_token + v * T::kVec, T::kVec);
  commit_copies();
  if (team.rank < kWarpSize) find_rows(p, token, rows);
  wait_copies();
  __syncthreads();
  for (int r = 0; r < rows.count; ++r) copy_columns(p.rows, kOthers, rows.at[r], token, team.rank, team.count);

  Scale s = {};
  if (p.lanes == 0) {
    uint32_t amax = 0;
    for (int i = team.rank; i < count; i += team.count) amax = Max{}(amax, pieces[i].amax());
    s = T::template scale_of<Scale>(p.of_x, team.max(amax));
  }
  const Column &values = p.rows.columns[kValues], &scales = p.rows.columns[kScales];
  auto* to = static_cast<uint8_t*>(p.rows.to);
  T::with_cast(p.of_x, [&](auto cast) {
    for (int first = 0; first < count; first += team.count) {
      const int i = first + team.rank;
      const Piece piece = i < count ? pieces[i] : Piece{};
      if (p.lanes) {
        uint32_t amax = piece.amax();
        for (int mask = 1; mask < p.lanes; mask *= 2) amax = Max{}(amax, shfl_xor(amax, mask));
        s = T::template scale_of<Scale>(p.of_x, amax);
      }
      if (i >= count) continue;
      const Vec16 q = piece.quantized(s.multiplier, cast);
      for (int r = 0; r < rows.count; ++r) {
        uint8_t* row = to + rows.at[r] * p.rows.row_bytes;
        store_stream(reinterpret_cast<Vec16*>(row + values.offset) + i, q);
        if (i % sharing == 0) reinterpret_cast<Stored*>(row + scales.offset)[i / sharing] = s.stored();
      }
    }
  });
  for (int r = 0; r < rows.count; ++r) {
    uint8_t* row = to + rows.at[r] * p.rows.row_bytes;
    clear_rest(row + values.offset, values, p.of_x.K, team.rank);
    clear_rest(row + scales.offset, scales, ceil_div(count, sharing) * int64_t(sizeof(Stored)), team.rank);
  }
}

template <class T>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, kBlocks)
    quantize_and_pack_kernel(MOE_GRID_CONSTANT const MessagesPlan p) {
  MOE_DYNAMIC_SMEM(held);
  __shared__ uint32_t of_wave[kThreads / 32];
  __shared__ Rows rows;
  auto* pieces = reinterpret_cast<Piece*>(held);
  const int64_t block = p.first + blockIdx.x, token = block - p.clearers;
  wait_for_previous_kernel();
  if (token < 0) clear_rows(p.rows, block * kThreads);
  else if (p.scale_type == ScaleType::kF32) send_token<T, ScaleF32>(p, token, pieces, of_wave, rows);
  else send_token<T, ScaleE8M0>(p, token, pieces, of_wave, rows);
}

}  // namespace

bool can_quantize_and_pack(const QuantizeAndPackParams& p) {
  const int64_t K = p.of_x.K;
  return p.of_x.in == InType::kBF16 && K > 0 && K <= kLongest && K % kElements == 0 && p.top_k <= kMostRows &&
         rows_are_fast(p.of_x);
}

int quantize_and_pack(const QuantizeAndPackParams& p, void* stream) {
  if (p.rows.rows == 0) return 0;
  const Format& f = format_of(p.of_x.format);
  const int64_t clearers = ceil_div<int64_t>(p.rows.rows, kThreads), blocks = clearers + p.of_x.rows;
  for (MessagesPlan plan = {p, 0, clearers, f.block / kElements, f.scale_type}; plan.first < blocks;
       plan.first += kMaxBlocks) {
    const int64_t left = blocks - plan.first;
    const dim3 grid(unsigned(left < kMaxBlocks ? left : kMaxBlocks));
    const Launch l = {grid, dim3(kThreads), stream, size_t(row_bytes(p.of_x))};
    if (const int e = launch(quantize_and_pack_kernel<Types>, l, plan)) return e;
  }
  return 0;
}

}  // namespace moe_fp8
