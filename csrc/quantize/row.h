// A row, quantized by the threads of a block while it stays in their registers or in shared memory.
#pragma once
#include "platform/waves.h"
#include "quantize/sources.h"

namespace moe_fp8 {

// The 16 bytes of words number v of a row, and those of its output.
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

// Largest magnitude of a vector, as a word.
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
template <class In>
MOE_DEVICE uint32_t amax_bits(uint32_t word) {
  const uint32_t lo = magnitude_bits<In>(word, 0), hi = magnitude_bits<In>(word, kPerWord<In> - 1);
  return lo > hi ? lo : hi;
}

// The threads of a block that share a row: `count` of them, a multiple of a wave, of which the caller is `rank`.
// of_wave: a word of shared memory for each of their waves, free until the next row is done.
struct RowTeam {
  int rank, count;
  uint32_t* of_wave;

  MOE_DEVICE uint32_t max(uint32_t v) const {
    v = warp_max(v);
    if (count <= kWarpSize) return v;
    if (rank % kWarpSize == 0) of_wave[rank / kWarpSize] = v;
    __syncthreads();
    v = of_wave[0];
    for (int i = 1; i < count / kWarpSize; ++i) v = v > of_wave[i] ? v : of_wave[i];
    return v;
  }
};

enum class Row { kFits, kLong };  // in kVecs vectors a thread; what a long row has beyond them is read twice

template <class T, int kVecs, Row kRow>
MOE_DEVICE void quantize_row(const QuantizeParams& p, const RowTeam& team, const typename T::Bits* x, bool live,
                             bool zero, uint8_t* q, float* scale) {
  using In = typename T::In;
  const int vecs = live ? int(ceil_div<int64_t>(p.K, T::kVec)) : 0, loaded = zero ? 0 : vecs;
  Vec16 held[kVecs];
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int v = i * team.count + team.rank;
    held[i] = v < loaded ? load_vec<T>(p, x, v) : Vec16{};
  }
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) amax = max_vec<In>(amax, held[i]);
  const int rest = kVecs * team.count + team.rank;
  for (int v = rest; kRow == Row::kLong && v < loaded; v += team.count) amax = max_vec<In>(amax, load_vec<T>(p, x, v));

  const auto s = T::template scale_of<ScaleF32>(p, team.max(amax_bits<In>(amax)));

  T::with_cast(p, [&](auto cast) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const int v = i * team.count + team.rank;
      if (v < vecs) store_cast<T>(p, q, v, held[i], s.multiplier, cast);
    }
    for (int v = rest; kRow == Row::kLong && v < vecs; v += team.count)
      store_cast<T>(p, q, v, v < loaded ? load_vec<T>(p, x, v) : Vec16{}, s.multiplier, cast);
  });
  if (live && team.rank == 0) *scale = s.dequant();
}

// The same of a row in shared memory, `held`: few registers and few threads for the bytes under way, so that blocks fit
// beside those of another kernel. A thread reads what it copied itself.
template <class T>
MOE_DEVICE void quantize_staged_row(const QuantizeParams& p, const RowTeam& team, const typename T::Bits* x, bool zero,
                                    Vec16* held, uint8_t* q, float* scale) {
  using In = typename T::In;
  const int vecs = int(p.K / T::kVec);
#pragma unroll 4
  for (int v = team.rank; v < vecs; v += team.count) {
    if (zero) held[v] = Vec16{};
    else copy_words<T>(p, held + v, x + v * T::kVec, T::kVec);
  }
  commit_copies();
  wait_copies<0>();
  uint32_t amax = 0;
#pragma unroll 4
  for (int v = team.rank; v < vecs; v += team.count) amax = max_vec<In>(amax, held[v]);
  const auto s = T::template scale_of<ScaleF32>(p, team.max(amax_bits<In>(amax)));
  T::with_cast(p, [&](auto cast) {
#pragma unroll 4
    for (int v = team.rank; v < vecs; v += team.count) store_cast<T>(p, q, v, held[v], s.multiplier, cast);
  });
  if (team.rank == 0) *scale = s.dequant();
}

}  // namespace moe_fp8
