#include "quantize/quantize.h"

#include "numerics/dispatch.h"
#include "platform/launch.h"
#include "primitives/groups.h"
#include "primitives/scale_sink.h"
#include "quantize/geometries.h"
#include "quantize/types.h"

namespace moe_fp8 {
namespace {

// Finds the place of every row among blocked scales by groups. Clears the last 128x4 blocks of each group, which the
// group may not fill, and the room behind the last group.
constexpr int kPlaceThreads = 256;
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kPlaceThreads, 1) place_rows_kernel(MOE_GRID_CONSTANT const QuantizeParams p) {
  __shared__ int words[GroupTable::words(kMaxExperts)];
  const int E = int(p.E), rows = int(p.rows);
  const GroupTable groups(words, E);
  wait_for_previous_kernel();
  build_group_table(groups, p.offs, E, rows, 0, kScaleRows);
  auto* scale = static_cast<uint8_t*>(p.scale);
  const int64_t stride = padded_scale_columns(ceil_div<int64_t>(p.K, kMxBlock));
  const int64_t threads = int64_t(gridDim.x) * kPlaceThreads;
  const int64_t thread = int64_t(blockIdx.x) * kPlaceThreads + threadIdx.x;
  for (int64_t r = thread; r < rows; r += threads) {
    const int e = GroupTable::find(groups.row, E, int(r));
    p.scratch[r] = e < E ? groups.pos[e] + int(r) - groups.row[e] : -1;
  }
  for (int e = blockIdx.x; e < E; e += gridDim.x)
    if (groups.rows(e) % kScaleRows != 0)
      clear_scales(scale, (groups.pos[e + 1] - kScaleRows) * stride, groups.pos[e + 1] * stride, threadIdx.x,
                   kPlaceThreads);
  clear_scales(scale, groups.pos[E] * stride, grouped_scale_rows(p.rows, p.E) * stride, thread, threads);
}
// Also for outputs along tokens, if there are any: columns of q_t are whole 16-byte vectors too.
bool can_vectorize_tokens(const QuantizeParams& p) {
  const bool whole = !p.along_tokens || (p.positions % 16 == 0 && (p.weight || p.align % 16 == 0));
  return can_vectorize_rows(p) && whole;
}
// Calls f(In{}) for a vectorized kernel, else f(Generic{}).
template <class F>
int dispatch(const QuantizeParams& p, bool fast, F f) { return fast ? dispatch_in(p.in, f) : f(Generic{}); }

// Runs both directions concurrently and in the same order of rows, so that the second reader finds x in the L2. Where
// the kernels cannot overlap, the rows start when the columns end.
int quantize_rows_and_groups(const QuantizeParams& p, void* stream) {
  const bool both = p.along_rows && p.along_tokens && can_vectorize_rows(p);
  const RowOverlap overlap = both ? row_overlap_of(p, can_vectorize_tokens(p)) : RowOverlap::kNone;
  if (p.along_tokens) {
    const int e = dispatch(p, can_vectorize_tokens(p), [&](auto in) {
      return launch_columns<decltype(in)>(p, overlap, stream);
    });
    if (e) return e;
  }
  if (!p.along_rows) return 0;
  return dispatch(p, can_vectorize_rows(p), [&](auto in) { return launch_rows<decltype(in)>(p, overlap, stream); });
}

}  // namespace

int place_rows(const QuantizeParams& p, void* stream) {
  const bool by_groups = p.offs || p.scratch;  // offs is null if there are no groups, scratch if there are no rows
  if (!by_groups || !format_of(p.format).blocked() || p.K == 0) return 0;
  return launch(place_rows_kernel, {dim3(unsigned(device().multiprocessors)), dim3(kPlaceThreads), stream}, p);
}

bool can_vectorize_rows(const QuantizeParams& p) {
  const bool native = is_fnuz(p.out) == device().native_fnuz;
  const int n = 16 / bytes_of(p.in);
  const bool strides = p.row_stride % n == 0 && (!p.weight || p.group_stride % n == 0);
  const bool one_row = !p.index.at && p.rows == 1 && (!p.weight || p.E == 1);
  return native && reinterpret_cast<uintptr_t>(p.x) % 16 == 0 && p.K % n == 0 && (strides || one_row);
}

int quantize(const QuantizeParams& p, void* stream) {
  const Format& format = format_of(p.format);
  if (p.has_batch_amax())
    return dispatch(p, can_vectorize_rows(p), [&](auto in) { return launch_batch_columns<decltype(in)>(p, stream); });
  if (format.block == 0) return quantize_rows_and_groups(p, stream);
  if (p.along_tokens || p.weight)
    return dispatch(p, can_vectorize_tokens(p), [&](auto in) {
      using In = decltype(in);
      return format.scale_type == ScaleType::kF32 ? launch_tiles<ScaleType::kF32, In>(p, stream)
                                                  : launch_tiles<ScaleType::kE8M0, In>(p, stream);
    });
  if (const int e = place_rows(p, stream)) return e;
  return dispatch(p, can_vectorize_rows(p), [&](auto in) { return launch_row_blocks<decltype(in)>(p, stream); });
}

}  // namespace moe_fp8
