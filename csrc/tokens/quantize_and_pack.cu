#include "tokens/quantize_and_pack.h"

#include "platform/launch.h"
#include "primitives/groups.h"
#include "quantize/geometries.h"
#include "quantize/row.h"
#include "tokens/message_columns.h"

namespace moe_fp8 {
namespace {

// The threads of a block share a token. It stays in shared memory while it goes to several rows, and each thread casts
// kPackElements elements at once. docs/kernels/tokens.md has what else was measured.
using Types = Vectorized<BF16, Fp8Variant::kRuntime>;
constexpr int kVecs = kPackElements / Types::kVec;
constexpr int64_t kMaxElements = 16384;  // of a token
constexpr int64_t kMaxTokenRows = 256;
enum : int { kValues, kScales, kOthers };  // columns

struct QuantizeAndPackPlan : QuantizeAndPackParams {
  int64_t first_block;      // of the launch
  int64_t clearing_blocks;  // the first blocks, which have no token
  int scale_threads;        // threads that share a scale; 0: all of the block
  ScaleType scale_type;
};
struct TokenRows { int count, at[kMaxTokenRows]; };

// Copies all columns from `column` on to a row. source: the token, or -1 for zeros.
MOE_DEVICE void copy_columns(const PackTokensParams& p, int column, int64_t row, int64_t source, int thread,
                             int threads) {
  for (; column < p.num_columns; ++column) {
    const MessageColumn& c = p.columns[column];
    dispatch_unit(p, c, [&](auto load) { copy_units(p, c, row, source, thread, c.padded_units, threads, load); });
  }
}
// Clears the rows without a token, of a row a thread from `first` on. A wave clears one row at a time.
MOE_DEVICE void clear_rows(const PackTokensParams& p, int64_t first) {
  const int64_t row = first + threadIdx.x;
  const int lane = threadIdx.x % kWarpSize;
  for (LaneMask left = ballot(row < p.rows && p.token(row) < 0); left; left &= left - 1)
    copy_columns(p, kValues, row - lane + popcount((left & -left) - 1), -1, lane, kWarpSize);
}

// Finds the rows of a token. Called by one wave.
MOE_DEVICE void find_rows(const QuantizeAndPackPlan& p, int64_t token, TokenRows& rows) {
  const int lane = threadIdx.x, slots = int(token * p.top_k);
  int count = 0;
  for (int first = 0; first < p.top_k; first += kWarpSize) {
    const int row = first + lane < p.top_k ? p.rows.inverse[slots + first + lane] : -1;
    const bool valid = row >= 0 && row < p.rows.rows && p.rows.source.at[row] == slots + first + lane;
    const LaneMask valid_lanes = ballot(valid);
    if (valid) rows.at[count + popcount(valid_lanes & ((LaneMask(1) << lane) - 1))] = row;
    count += popcount(valid_lanes);
  }
  if (lane == 0) rows.count = count;
}

MOE_DEVICE void clear_padding(uint8_t* column, const MessageColumn& c, int64_t bytes, int thread) {
  if (bytes + thread < c.padded_units * bytes_of(c.unit)) column[bytes + thread] = 0;
}
// The elements of a token that a thread casts at once.
struct CastVec {
  Vec16 x[kVecs];
  MOE_DEVICE uint32_t amax() const { return amax_bits<BF16>(max_vec<BF16>(max_vec<BF16>(x[0]), x[1])); }
  template <class Cast>
  MOE_DEVICE Vec16 quantized(float m, Cast cast) const {
    Vec16 q;
#pragma unroll
    for (int i = 0; i < 4; ++i) q.w[i] = cast_words<BF16>(x[i / 2].w + i % 2 * 2, m, m, m, m, cast);
    return q;
  }
};
static_assert(kVecs == 2);

template <class T, class Scale>
MOE_DEVICE void send_token(const QuantizeAndPackPlan& p, int64_t token, CastVec* vecs, uint32_t* wave_amax,
                           TokenRows& rows) {
  using Stored = typename Scale::Stored;
  const RowTeam team = {int(threadIdx.x), int(blockDim.x), wave_amax};
  const int count = int(p.quantize_x.K / kPackElements), vecs_per_scale = p.scale_threads ? p.scale_threads : count;
  const auto* x = find_element<T>(p.quantize_x, token * p.quantize_x.row_stride);
  for (int v = team.rank; v < kVecs * count; v += team.count)
    copy_words<T>(p.quantize_x, vecs->x + v, x + v * T::kVec, T::kVec);
  commit_copies();
  if (team.rank < kWarpSize) find_rows(p, token, rows);
  wait_copies();
  __syncthreads();
  for (int r = 0; r < rows.count; ++r) copy_columns(p.rows, kOthers, rows.at[r], token, team.rank, team.count);

  Scale s = {};
  if (p.scale_threads == 0) {
    uint32_t amax = 0;
    for (int i = team.rank; i < count; i += team.count) amax = MaxU32{}(amax, vecs[i].amax());
    s = T::template scale_of<Scale>(p.quantize_x, team.max(amax));
  }
  const MessageColumn &values = p.rows.columns[kValues], &scales = p.rows.columns[kScales];
  auto* to = static_cast<uint8_t*>(p.rows.to);
  T::with_cast(p.quantize_x, [&](auto cast) {
    for (int first = 0; first < count; first += team.count) {
      const int i = first + team.rank;
      const CastVec vec = i < count ? vecs[i] : CastVec{};
      if (p.scale_threads) {
        const uint32_t amax = reduce_lanes(vec.amax(), p.scale_threads, MaxU32{});
        s = T::template scale_of<Scale>(p.quantize_x, amax);
      }
      if (i >= count) continue;
      const Vec16 q = vec.quantized(s.multiplier, cast);
      for (int r = 0; r < rows.count; ++r) {
        uint8_t* row = to + rows.at[r] * p.rows.row_bytes;
        store_stream(reinterpret_cast<Vec16*>(row + values.offset) + i, q);
        if (i % vecs_per_scale == 0)
          reinterpret_cast<Stored*>(row + scales.offset)[i / vecs_per_scale] = s.stored();
      }
    }
  });
  for (int r = 0; r < rows.count; ++r) {
    uint8_t* row = to + rows.at[r] * p.rows.row_bytes;
    clear_padding(row + values.offset, values, p.quantize_x.K, team.rank);
    clear_padding(row + scales.offset, scales, ceil_div(count, vecs_per_scale) * int64_t(sizeof(Stored)), team.rank);
  }
}

template <class T>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kPackThreads, kPackBlocks)
    quantize_and_pack_kernel(MOE_GRID_CONSTANT const QuantizeAndPackPlan p) {
  MOE_DYNAMIC_SMEM(smem);
  __shared__ uint32_t wave_amax[kPackThreads / 32];
  __shared__ TokenRows rows;
  auto* vecs = reinterpret_cast<CastVec*>(smem);
  const int64_t block = p.first_block + blockIdx.x, token = block - p.clearing_blocks;
  wait_for_previous_kernel();
  if (token < 0) clear_rows(p.rows, block * kPackThreads);
  else if (p.scale_type == ScaleType::kF32) send_token<T, ScaleF32>(p, token, vecs, wave_amax, rows);
  else send_token<T, ScaleE8M0>(p, token, vecs, wave_amax, rows);
}

}  // namespace

bool can_quantize_and_pack(const QuantizeAndPackParams& p) {
  const int64_t K = p.quantize_x.K;
  return p.quantize_x.in == InType::kBF16 && K > 0 && K <= kMaxElements && K % kPackElements == 0 &&
         p.top_k <= kMaxTokenRows && can_vectorize_rows(p.quantize_x);
}

int quantize_and_pack(const QuantizeAndPackParams& p, void* stream) {
  if (p.rows.rows == 0) return 0;
  const Format& f = format_of(p.quantize_x.format);
  const int64_t clearing_blocks = ceil_div<int64_t>(p.rows.rows, kPackThreads);
  const int64_t blocks = clearing_blocks + p.quantize_x.rows;
  for (QuantizeAndPackPlan plan = {p, 0, clearing_blocks, f.block / kPackElements, f.scale_type};
       plan.first_block < blocks; plan.first_block += max_grid_blocks(kPackThreads)) {
    const dim3 grid(grid_blocks(blocks - plan.first_block, kPackThreads));
    const Launch l = {grid, dim3(kPackThreads), stream, size_t(row_bytes(p.quantize_x))};
    if (const int e = launch(quantize_and_pack_kernel<Types>, l, plan)) return e;
  }
  return 0;
}

}  // namespace moe_fp8
