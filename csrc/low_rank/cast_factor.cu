#include "low_rank/cast_factor.h"

#include "low_rank/policy.h"
#include "platform/launch.h"
#include "primitives/access_width.h"
#include "primitives/groups.h"

namespace moe_fp8 {
namespace {

// ---- the same order in m and out: a thread casts one unit of adjacent elements of out -------------------------------
template <class In>
MOE_DEVICE void load_vectors(const void* m, int64_t at, float scaling, float (&v)[kFactorVector]) {
  constexpr int n = VectorAccess<In>::kElements;
  const VectorAccess<In> access{InType{}};
  Vec16 raw[kFactorVector / n];
#pragma unroll
  for (int i = 0; i < kFactorVector / n; ++i) raw[i] = access.load_once(m, at + i * n);
#pragma unroll
  for (int i = 0; i < kFactorVector; ++i) v[i] = scaling * access.element(raw[i / n], i % n);
}
template <class Out>
MOE_DEVICE void store_vectors(void* out, int64_t at, const float (&v)[kFactorVector]) {
  constexpr int n = VectorAccess<Out>::kElements;
#pragma unroll
  for (int i = 0; i < kFactorVector; i += n) VectorAccess<Out>(InType{}).store(out, at + i, v + i);
}

// kElements: of a unit. Vectors need rows of whole vectors, with aligned addresses.
template <int kElements>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kFactorThreads, kFactorBlocks)
    cast_factor_rows_kernel(MOE_GRID_CONSTANT const CastFactorParams p) {
  const FactorDim &x = p.dims[0], &y = p.dims[1], &z = p.dims[2];
  const int64_t row_units = x.size / kElements, units = row_units * y.size * z.size;
  wait_for_previous_kernel();
#pragma unroll 1
  for (int64_t i = int64_t(blockIdx.x) * kFactorThreads + threadIdx.x; i < units;
       i += int64_t(gridDim.x) * kFactorThreads) {
    const int64_t row = i / row_units, at_x = (i - row * row_units) * kElements;
    const int64_t at_z = row / y.size, at_y = row - at_z * y.size;
    const bool given = at_x < x.given && at_y < y.given && at_z < z.given;
    const int64_t at = at_x * x.stride + at_y * y.stride + at_z * z.stride;
    float v[kElements] = {};
    if constexpr (kElements == kFactorVector) {
      if (given && p.in == InType::kF32) load_vectors<F32>(p.m, at, p.scaling, v);
      else if (given && p.in == InType::kBF16) load_vectors<BF16>(p.m, at, p.scaling, v);
      else if (given) load_vectors<F16>(p.m, at, p.scaling, v);
      if (p.out_type == InType::kF32) store_vectors<F32>(p.out, i * kElements, v);
      else if (p.out_type == InType::kBF16) store_vectors<BF16>(p.out, i * kElements, v);
      else store_vectors<F16>(p.out, i * kElements, v);
    } else {
      if (given) v[0] = p.scaling * to_float(p.in, load_bits(p.m, p.in, at));
      store_element(p.out, p.out_type, i, v[0]);
    }
  }
}

int cast_rows(const CastFactorParams& p, void* stream) {
  const FactorDim &x = p.dims[0], &y = p.dims[1], &z = p.dims[2];
  const uint64_t bits = uint64_t((y.stride | z.stride) * bytes_of(p.in)) | uintptr_t(p.m) | uintptr_t(p.out);
  const bool vectors = x.stride == 1 && (x.size | x.given) % kFactorVector == 0 && bits % sizeof(Vec16) == 0;
  const int64_t units = x.size * y.size * z.size / (vectors ? kFactorVector : 1);
  const Launch l = {dim3(grid_blocks(ceil_div<int64_t>(units, kFactorThreads), kFactorThreads)), dim3(kFactorThreads),
                    stream};
  return launch(vectors ? cast_factor_rows_kernel<kFactorVector> : cast_factor_rows_kernel<1>, l, p);
}

// ---- another order: a block transposes tiles through shared memory --------------------------------------------------
// THREAD MAP. A tile has 2^x_log2 elements along x, where out is fastest, and the rest along f, where m is fastest.
// Lanes read neighbours along f and write pairs of neighbours along x. Elements of a tile lie as [f][x]. place()
// permutes x, so that neither 32 words along f nor 16 pairs along x share a bank.
struct FactorTiles {
  const void* m;
  void* out;
  FactorDim x, f, batch;
  int64_t f_out, batch_out;  // strides of out
  float scaling;
  InType in, out_type;
  int x_log2, swizzle_left, swizzle_right, swizzle_mask;
  bool pairs;  // pairs along x are aligned in out

  MOE_DEVICE int place(int at_f, int at_x) const {
    return at_f << x_log2 | (at_x ^ (at_f << swizzle_left >> swizzle_right & swizzle_mask));
  }
};

MOE_DEVICE void store_pair(const FactorTiles& p, int64_t at, float lo, float hi, bool has_hi) {
  if (!p.pairs) {
    store_element(p.out, p.out_type, at, lo);
    if (has_hi) store_element(p.out, p.out_type, at + 1, hi);
    return;
  }
  if (p.out_type == InType::kF32)
    store_stream(static_cast<Vec8*>(p.out) + at / 2, Vec8{{F32::from_float(lo), F32::from_float(hi)}});
  else
    store_stream(static_cast<uint32_t*>(p.out) + at / 2,
                 p.out_type == InType::kBF16 ? packed<BF16>(lo, hi) : packed<F16>(lo, hi));
}

MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kFactorThreads, kFactorTileBlocks)
    cast_factor_tiles_kernel(MOE_GRID_CONSTANT const FactorTiles p) {
  constexpr int kElements = (1 << kFactorTileLog2) / kFactorThreads;  // of a thread
  __shared__ Vec8 pairs[(1 << kFactorTileLog2) / 2];
  auto* const words = reinterpret_cast<uint32_t*>(pairs);
  const int f_log2 = kFactorTileLog2 - p.x_log2, thread = int(threadIdx.x);
  const int64_t x_tiles = ceil_div<int64_t>(p.x.size, 1 << p.x_log2);
  const int64_t f_tiles = ceil_div<int64_t>(p.f.size, 1 << f_log2);
  wait_for_previous_kernel();
#pragma unroll 1
  for (int64_t tile = blockIdx.x; tile < x_tiles * f_tiles * p.batch.size; tile += gridDim.x) {
    const int64_t of_x = tile / x_tiles, batch = of_x / f_tiles;
    const int64_t first_x = (tile - of_x * x_tiles) << p.x_log2, first_f = (of_x - batch * f_tiles) << f_log2;
    {
      const int f = thread & ((1 << f_log2) - 1), x = thread >> f_log2, step = kFactorThreads >> f_log2;
      const int64_t at = batch * p.batch.stride + (first_f + f) * p.f.stride + (first_x + x) * p.x.stride;
      const int64_t left = batch < p.batch.given && first_f + f < p.f.given ? p.x.given - first_x - x : 0;
#pragma unroll 1
      for (int first = 0; first < kElements * step; first += kFactorLoads * step) {
        uint32_t bits[kFactorLoads];
#pragma unroll
        for (int i = 0; i < kFactorLoads; ++i) {
          const int dx = first + i * step;
          bits[i] = dx < left ? load_bits(p.m, p.in, at + dx * p.x.stride) : 0;
        }
#pragma unroll
        for (int i = 0; i < kFactorLoads; ++i) {
          const int dx = first + i * step;
          words[p.place(f, x + dx)] = as_bits(dx < left ? p.scaling * to_float(p.in, bits[i]) : 0.f);
        }
      }
    }
    __syncthreads();
    const int x = 2 * (thread & ((1 << p.x_log2) / 2 - 1)), f = thread >> (p.x_log2 - 1);
    const int step = kFactorThreads >> (p.x_log2 - 1);
#pragma unroll
    for (int i = 0; i < kElements / 2; ++i) {
      const int row = f + i * step, place = p.place(row, x);
      if (first_f + row >= p.f.size || first_x + x >= p.x.size) continue;
      const Vec8 pair = pairs[place / 2];
      const uint32_t lo = place % 2 ? pair.w[1] : pair.w[0], hi = place % 2 ? pair.w[0] : pair.w[1];
      store_pair(p, batch * p.batch_out + (first_f + row) * p.f_out + first_x + x, as_float(lo), as_float(hi),
                 first_x + x + 1 < p.x.size);
    }
    __syncthreads();  // the next tile overwrites this one
  }
}

int log2_of_side(int64_t size) {
  int log2 = kMinFactorSideLog2;
  while (int64_t(1) << log2 < size) ++log2;
  return log2;
}

// f: the dimension in which m is fastest, 1 or 2.
int cast_tiles(const CastFactorParams& p, int f, void* stream) {
  constexpr int kHalf = kFactorTileLog2 / 2, kBanksLog2 = 5;
  const FactorDim *d = p.dims, &x = d[0];
  const int64_t out_strides[kFactorDims] = {1, x.size, x.size * d[1].size};
  const int x_side = log2_of_side(x.size), f_side = log2_of_side(d[f].size);
  const int x_log2 = x_side < kHalf ? x_side : f_side < kHalf ? kFactorTileLog2 - f_side : kHalf;
  const int f_log2 = kFactorTileLog2 - x_log2, side = 1 << (x_log2 < kBanksLog2 ? x_log2 : kBanksLog2);
  const FactorTiles tiles = {
      .m = p.m, .out = p.out, .x = x, .f = d[f], .batch = d[3 - f], .f_out = out_strides[f],
      .batch_out = out_strides[3 - f], .scaling = p.scaling, .in = p.in, .out_type = p.out_type, .x_log2 = x_log2,
      .swizzle_left = f_log2 < kBanksLog2 ? kBanksLog2 - f_log2 : 0,
      .swizzle_right = x_log2 < kBanksLog2 ? kBanksLog2 - x_log2 : 0, .swizzle_mask = side - 1,
      .pairs = x.size % 2 == 0 && uintptr_t(p.out) % (2 * bytes_of(p.out_type)) == 0};
  const int64_t count =
      ceil_div<int64_t>(x.size, 1 << x_log2) * ceil_div<int64_t>(d[f].size, 1 << f_log2) * tiles.batch.size;
  return launch(cast_factor_tiles_kernel, {dim3(grid_blocks(count, kFactorThreads)), dim3(kFactorThreads), stream},
                tiles);
}

// ---- which of the two -----------------------------------------------------------------------------------------------
// Whether two neighbours among the dimensions of out are one dimension in m, too.
bool is_one(const FactorDim& inner, const FactorDim& outer) {
  return inner.given == inner.size && outer.stride == inner.size * inner.stride &&
         inner.size * outer.size < int64_t(1) << 31;
}
CastFactorParams collapsed(const CastFactorParams& p) {
  CastFactorParams result = p;
  int count = 0;
  for (const FactorDim& d : p.dims) {
    FactorDim* const last = count ? &result.dims[count - 1] : nullptr;
    if (d.size == 1) continue;
    if (last && is_one(*last, d)) *last = {last->size * d.size, last->size * d.given, last->stride};
    else result.dims[count++] = d;
  }
  while (count < kFactorDims) result.dims[count++] = {1, 1, 0};
  return result;
}
// The dimension in which neighbours are nearest in m.
int fastest_dim(const FactorDim (&dims)[kFactorDims]) {
  const auto stride = [&](int i) { return dims[i].given > 1 && dims[i].stride > 0 ? dims[i].stride : INT64_MAX; };
  int fastest = 0;
  for (int i = 1; i < kFactorDims; ++i)
    if (stride(i) < stride(fastest)) fastest = i;
  return fastest;
}

}  // namespace

int cast_factor(const CastFactorParams& p, void* stream) {
  int64_t elements = 1, given = 1;
  for (const FactorDim& d : p.dims) {
    elements *= d.size;
    given = d.given == 0 ? 0 : given;
  }
  if (elements == 0) return 0;
  if (given == 0) return fill_bytes(p.out, 0, size_t(elements) * bytes_of(p.out_type), stream);
  const CastFactorParams q = collapsed(p);
  const int fastest = fastest_dim(q.dims);
  return fastest == 0 ? cast_rows(q, stream) : cast_tiles(q, fastest, stream);
}

}  // namespace moe_fp8
