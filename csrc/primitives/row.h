// A row, quantized by the threads of a block while it stays in their registers or in shared memory.
#pragma once
#include "numerics/groups.h"
#include "primitives/cast.h"

namespace moe_fp8 {

template <class In>
constexpr int kVecElements = 4 * kPerWord<In>;  // in a 16-byte vector

template <class In, bool kAligned, Reuse kReuse = Reuse::kSoon>
MOE_DEVICE Vec16 load_vec(const typename In::Bits* row, int v, int64_t K) {
  if constexpr (kAligned) {
    return load_stream<kReuse>(reinterpret_cast<const Vec16*>(row) + v);
  } else {
    const volatile typename In::Bits* one_by_one = row;  // volatile: else the loads of several vectors spill registers
    Vec16 vec = {};
#pragma unroll
    for (int i = 0; i < kVecElements<In>; ++i) {
      const int64_t k = int64_t(v) * kVecElements<In> + i;
      if (k < K) vec.w[i / kPerWord<In>] |= uint32_t(one_by_one[k]) << (16 * (i % kPerWord<In>));
    }
    return vec;
  }
}

template <class In, Fp8Type kOut, bool kAligned>
MOE_DEVICE void store_cast(uint8_t* row, int v, int64_t K, const Vec16& vec, float multiplier) {
  uint32_t q[kVecElements<In> / 4];
#pragma unroll
  for (int i = 0; i < kVecElements<In> / 4; ++i) q[i] = cast4_words<In, kOut>(vec.w + i * 4 / kPerWord<In>, multiplier);
  if constexpr (!kAligned) {
#pragma unroll
    for (int i = 0; i < kVecElements<In>; ++i) {
      const int64_t k = int64_t(v) * kVecElements<In> + i;
      if (k < K) row[k] = uint8_t(q[i / 4] >> (8 * (i % 4)));
    }
  } else if constexpr (kVecElements<In> == 8) {
    store_stream(reinterpret_cast<Vec8*>(row) + v, Vec8{{q[0], q[1]}});
  } else {
    store_stream(reinterpret_cast<uint32_t*>(row) + v, q[0]);
  }
}

// Where rows come from: as they lie in x, or taken by index.
enum class Rows { kInPlace, kByIndex };

// Largest magnitude of a vector, as a word.
template <class In>
MOE_DEVICE uint32_t max_vec(uint32_t amax, const Vec16& vec) {
#pragma unroll
  for (int i = 0; i < 4; ++i) amax = max_magnitude<In>(amax, vec.w[i]);
  return amax;
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
    if (rank % kWarpSize == 0) of_wave[rank / kWarpSize] = v;
    __syncthreads();
    v = of_wave[0];
    for (int i = 1; i < count / kWarpSize; ++i) v = v > of_wave[i] ? v : of_wave[i];
    return v;
  }
};

enum class Row { kFits, kLong };  // in kVecs vectors a thread; what a long row has beyond them is read twice

template <class In, Fp8Type kOut, int kVecs, Row kRow, bool kAligned>
MOE_DEVICE void quantize_row(const RowTeam& team, const typename In::Bits* x, int64_t K, bool live, bool zero,
                             bool pow2, uint8_t* q, float* scale) {
  const int vecs = live ? int(ceil_div<int64_t>(K, kVecElements<In>)) : 0, loaded = zero ? 0 : vecs;
  Vec16 held[kVecs];
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int v = i * team.count + team.rank;
    held[i] = v < loaded ? load_vec<In, kAligned>(x, v, K) : Vec16{};
  }
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) amax = max_vec<In>(amax, held[i]);
  const int rest = kRow == Row::kFits ? vecs : kVecs * team.count + team.rank;
  for (int v = rest; v < loaded; v += team.count) amax = max_vec<In>(amax, load_vec<In, kAligned>(x, v, K));

  const ScaleF32 s = ScaleF32::from_amax<kOut>(team.max(amax_bits<In>(amax)), pow2);

#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int v = i * team.count + team.rank;
    if (v < vecs) store_cast<In, kOut, kAligned>(q, v, K, held[i], s.multiplier);
  }
  for (int v = rest; v < vecs; v += team.count)
    store_cast<In, kOut, kAligned>(q, v, K, v < loaded ? load_vec<In, kAligned>(x, v, K) : Vec16{}, s.multiplier);
  if (live && team.rank == 0) *scale = s.dequant();
}

// The same of an aligned row in shared memory, `held`: few registers and few threads for the bytes under way, so that
// blocks fit beside those of another kernel. A thread reads what it copied itself.
template <class In, Fp8Type kOut>
MOE_DEVICE void quantize_staged_row(const RowTeam& team, const typename In::Bits* x, int64_t K, bool zero, bool pow2,
                                    Vec16* held, uint8_t* q, float* scale) {
  const int vecs = int(K / kVecElements<In>);
#pragma unroll 4
  for (int v = team.rank; v < vecs; v += team.count) {
    if (zero) held[v] = Vec16{};
    else copy_to_shared(held + v, reinterpret_cast<const Vec16*>(x) + v);
  }
  commit_copies();
  wait_copies<0>();
  uint32_t amax = 0;
#pragma unroll 4
  for (int v = team.rank; v < vecs; v += team.count) amax = max_vec<In>(amax, held[v]);
  const ScaleF32 s = ScaleF32::from_amax<kOut>(team.max(amax_bits<In>(amax)), pow2);
#pragma unroll 4
  for (int v = team.rank; v < vecs; v += team.count) store_cast<In, kOut, true>(q, v, K, held[v], s.multiplier);
  if (team.rank == 0) *scale = s.dequant();
}

}  // namespace moe_fp8
