// Quantizes a row that several threads hold in registers or in shared memory, so that x is read once.
#pragma once
#include "primitives/row_reduce.h"
#include "quantize/sources.h"

namespace moe_fp8 {

// Vector number v of a row, and the store of its cast.
template <class T, Reuse kReuse = Reuse::kSoon>
MOE_DEVICE Vec16 load_vec(const QuantizeParams& p, const typename T::Bits* row, int v) {
  const int64_t k = int64_t(v) * T::kVec;
  return load_words<T, Vec16, kReuse>(p, T::advance(p, row, k), p.K - k);
}
template <class T, class Cast>
MOE_DEVICE void store_cast(const QuantizeParams& p, uint8_t* row, int v, const Vec16& vec, float multiplier,
                           Cast cast) {
  using In = typename T::In;
  constexpr int kWords = T::kVec / 4;
  const float m = multiplier;
  uint32_t q[kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) q[i] = cast_words<In>(vec.w + i * 4 / kPerWord<In>, m, m, m, m, cast);
  if constexpr (!T::kVectorized) {
#pragma unroll
    for (int i = 0; i < T::kVec; ++i) {
      const int64_t k = int64_t(v) * T::kVec + i;
      if (k < p.K) row[k] = uint8_t(q[i / 4] >> (8 * (i % 4)));
    }
  } else if constexpr (kWords == 2) {
    store_stream(reinterpret_cast<Vec8*>(row) + v, Vec8{{q[0], q[1]}});
  } else {
    store_stream(reinterpret_cast<uint32_t*>(row) + v, q[0]);
  }
}

// The largest magnitude of a vector, as a word of one or two elements.
template <class In>
MOE_DEVICE uint32_t max_vec(uint32_t amax, const Vec16& vec) {
#pragma unroll
  for (int i = 0; i < 4; ++i) amax = max_magnitude<In>(amax, vec.w[i]);
  return amax;
}
template <class In>
MOE_DEVICE uint32_t max_vec(const Vec16& vec) {
  return max_magnitude<In>(max_magnitude<In>(max_magnitude<In>(vec.w[0], vec.w[1]), vec.w[2]), vec.w[3]);
}

// The threads of a block that share a row: `count` threads, whole waves. The caller is number `rank`.
// wave_amax: a word of shared memory for each of these waves. It must stay untouched until the next row is finished.
struct RowTeam {
  int rank, count;
  uint32_t* wave_amax;

  MOE_DEVICE uint32_t max(uint32_t v) const { return row_reduce(v, rank, count, wave_amax, MaxU32{}); }
};

// kFits: the row fits in kVecs vectors per thread. kLong: vectors beyond them are read twice.
enum class Row { kFits, kLong };

template <class T, int kVecs, Row kRow>
MOE_DEVICE void quantize_row(const QuantizeParams& p, const RowTeam& team, const typename T::Bits* x, bool valid,
                             bool zero, uint8_t* q, float* scale) {
  using In = typename T::In;
  const int vecs = valid ? int(ceil_div<int64_t>(p.K, T::kVec)) : 0, loaded = zero ? 0 : vecs;
  Vec16 vectors[kVecs];
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int v = i * team.count + team.rank;
    vectors[i] = v < loaded ? load_vec<T>(p, x, v) : Vec16{};
  }
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) amax = max_vec<In>(amax, vectors[i]);
  const int rest = kVecs * team.count + team.rank;
  for (int v = rest; kRow == Row::kLong && v < loaded; v += team.count) amax = max_vec<In>(amax, load_vec<T>(p, x, v));

  const auto s = T::template scale_of<ScaleF32>(p, team.max(amax_bits<In>(amax)));

  T::with_cast(p, [&](auto cast) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const int v = i * team.count + team.rank;
      if (v < vecs) store_cast<T>(p, q, v, vectors[i], s.multiplier, cast);
    }
    for (int v = rest; kRow == Row::kLong && v < vecs; v += team.count)
      store_cast<T>(p, q, v, v < loaded ? load_vec<T>(p, x, v) : Vec16{}, s.multiplier, cast);
  });
  if (valid && team.rank == 0) *scale = s.stored();
}

// The same for a row in shared memory. It needs few registers and few threads for its bytes in flight, so that blocks
// of another kernel fit on the same multiprocessor. A thread reads only what it copied itself, so no barrier is needed.
template <class T>
MOE_DEVICE void quantize_staged_row(const QuantizeParams& p, const RowTeam& team, const typename T::Bits* x, bool zero,
                                    Vec16* vectors, uint8_t* q, float* scale) {
  using In = typename T::In;
  const int vecs = int(p.K / T::kVec);
#pragma unroll 4
  for (int v = team.rank; v < vecs; v += team.count) {
    if (zero) vectors[v] = Vec16{};
    else copy_words<T>(p, vectors + v, x + v * T::kVec, T::kVec);
  }
  commit_copies();
  wait_copies<0>();
  uint32_t amax = 0;
#pragma unroll 4
  for (int v = team.rank; v < vecs; v += team.count) amax = max_vec<In>(amax, vectors[v]);
  const auto s = T::template scale_of<ScaleF32>(p, team.max(amax_bits<In>(amax)));
  T::with_cast(p, [&](auto cast) {
#pragma unroll 4
    for (int v = team.rank; v < vecs; v += team.count) store_cast<T>(p, q, v, vectors[v], s.multiplier, cast);
  });
  if (team.rank == 0) *scale = s.stored();
}

}  // namespace moe_fp8
