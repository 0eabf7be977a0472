// Matrix instructions of one wave: mma.sync of NVIDIA's chips since sm_80, MFMA of AMD's gfx942 and gfx950.
//
// Both are dealt with by patches: 16 rows of a, 32 columns (rows of b), 32 elements of the sum. A lane holds eight
// elements of each of its rows of a and of b, and the sums of eight neighbouring columns:
//
//              rows of a           rows of b, by position      elements                        columns of sums
//   mma.sync   lane / 4 + {0, 8}   lane / 4 + {0, 8, 16, 24}   4 * part + {0 .. 3, 16 .. 19}   8 * part + {0 .. 7}
//   MFMA       lane % 16           lane % 16 + {0, 16}         8 * part + {0 .. 7}             likewise
//
// The lane's part is lane % 4 or lane / 16. The instructions deal elements and columns out otherwise, but the order of
// a sum is free as long as a and b agree, and any row of b may lie at any position.
//
// gfx950 has one more MFMA, of 128 elements, that takes the E8M0 scales of blocks of 32. Rows, positions and sums are
// those above; whose the elements are is not free there. A lane holds elements 16 * part + {0 .. 15} of both halves,
// and of its rows the scale of block number `part`, most of whose elements lie in other lanes. Source: what AMD's probe
// of that chip printed, test/mx_mfma_op/scale_mapping_16x16x128.txt of ROCm/composable_kernel.
#pragma once
#include "platform/convert.h"
#include "platform/memory.h"
#include "platform/waves.h"

// Without them every product would be zero. gfx90a has MFMA too, but takes subnormal 16-bit floats for zeros, and those
// of E5M2 are such.
#if (defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800) || \
    (defined(__HIP_DEVICE_COMPILE__) && !defined(__gfx942__) && !defined(__gfx950__))
#error "moe_fp8_ext multiplies on sm_80 and newer, gfx942 and gfx950 only"
#endif

namespace moe_fp8 {

// Whether fp8 is multiplied as it is. Elsewhere values become 16-bit floats first, which hold them exactly: Hopper and
// its data center successor multiply fp8 by instructions of their own alone.
#if (defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)) || \
    (defined(MOE_HIP) && (defined(__gfx942__) || defined(__gfx950__) || defined(MOE_SIMT)))
constexpr bool kMultipliesFp8 = true;
#else
constexpr bool kMultipliesFp8 = false;
#endif

// The emulation has one vendor's instructions at one of its wave sizes, the other's at the other.
#if defined(MOE_CUDA) || (defined(MOE_SIMT) && SIMT_WARP == 32)
#define MOE_MMA_SYNC 1
constexpr int kPatchWave = 32;
constexpr int kPatchLaneRows = 2, kPatchFragments = 4;  // rows of a of a lane, rows of b
#else
constexpr int kPatchWave = 64;
constexpr int kPatchLaneRows = 1, kPatchFragments = 2;
#endif
constexpr int kPatchRows = 16, kPatchColumns = 32, kPatchDepth = 32;
constexpr int kFragmentRows = kPatchColumns / kPatchFragments;

// What multiplies: how many elements of the sum at once, and whether it takes the scales of blocks of 32.
struct Unscaled {
  static constexpr bool kTakesScales = false, kThere = true;
  static constexpr int kDepth = kPatchDepth;
};
struct Scaled {
  static constexpr bool kTakesScales = true;
  static constexpr int kDepth = 128;
  // On the chip that this is compiled for; device().scales_blocks is on the chip that runs it.
#if defined(__gfx950__)
  static constexpr bool kThere = true;
#else
  static constexpr bool kThere = false;
#endif
};
// Whether a build may be run by a chip that has Scaled.
#if defined(MOE_MMA_SYNC)
constexpr bool kMayTakeScales = false;
#else
constexpr bool kMayTakeScales = true;
#endif

struct Halves4 { uint32_t w[2]; };  // four 16-bit floats
struct Bytes32 { Vec16 half[2]; };  // what a lane has of 128 elements
using PatchSums = float[kPatchLaneRows][8];

// The lane's first row of a and of b; the others are 8 further, kFragmentRows.
MOE_DEVICE int patch_row(int lane) {
#if defined(MOE_MMA_SYNC)
  return lane / 4;
#else
  return lane % 16;
#endif
}
MOE_DEVICE int patch_part(int lane) {
#if defined(MOE_MMA_SYNC)
  return lane % 4;
#else
  return lane / 16;
#endif
}
// The column whose row of b belongs at a position.
MOE_DEVICE int column_of_position(int position) {
  constexpr int kColumns = 8 / kPatchFragments;  // of a fragment, whose sums one lane has
  const int fragment = position / kFragmentRows, row = position % kFragmentRows;
  return row / kColumns * 8 + fragment * kColumns + row % kColumns;
}

#if defined(MOE_MMA_SYNC)

// Of four matrices of 8 rows of 16 bytes, of which a lane names a row each: word i of a lane is of matrix i, row
// lane / 4, bytes lane % 4 * 4 and on.
#if defined(MOE_SIMT)
MOE_DEVICE void load_matrices(uint32_t (&word)[4], const Vec16* row) { simt::load_matrices(word, row); }
#else
MOE_DEVICE void load_matrices(uint32_t (&word)[4], uint32_t row) {  // in shared memory
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3]) : "r"(row) : "memory");
}
MOE_DEVICE void load_matrices(uint32_t (&word)[4], const Vec16* row) {
  load_matrices(word, static_cast<uint32_t>(__cvta_generic_to_shared(row)));
}
#endif

// What a lane has of rows of a patch or more, kFragmentRows apart, from shared memory. A row lies there in chunks of 16
// bytes: at(row, chunk, further, first) is chunk first + chunk of row further + row, where further and first are
// constants of the code. patch: which 32 elements.
template <bool kOfA, int kRows, class At>
MOE_DEVICE void load_rows(Vec8 (&rows)[kRows], int patch, At at) {
  const int lane = threadIdx.x % kPatchWave, chunk = kOfA ? lane / 16 : lane / 8 % 2;
#pragma unroll
  for (int i = 0; i < kRows; i += 2) {  // what an instruction takes comes into neighbouring registers
    uint32_t w[4];
    load_matrices(w, at(kOfA ? lane % 16 : lane / 16 * 8 + lane % 8, chunk, i * kFragmentRows, 2 * patch));
    rows[i] = {{w[0], w[kOfA ? 2 : 1]}};
    rows[i + 1] = {{w[kOfA ? 1 : 2], w[3]}};
  }
}

// d += a * b: a 16 x 32 of E4M3 or E5M2, b 32 x 8 of E4M3.
template <bool kE5M2>
MOE_DEVICE void mma_fp8(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if defined(MOE_SIMT)
  simt::mma_m16n8k32(d, a, b, kE5M2);
#elif __CUDA_ARCH__ >= 890
  if constexpr (kE5M2)
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  else
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}
// Likewise, 16 of 16-bit floats.
MOE_DEVICE void mma_half(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if defined(MOE_SIMT)
  simt::mma_m16n8k16(d, a, b);
#elif __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
               "{%0,%1,%2,%3};" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

template <bool kE5M2>
MOE_DEVICE void multiply_part(float (&d)[4], const Vec8 (&a)[2], const Vec8& b) {
  mma_fp8<kE5M2>(d, {a[0].w[0], a[1].w[0], a[0].w[1], a[1].w[1]}, {b.w[0], b.w[1]});
}
template <bool kE5M2>
MOE_DEVICE void multiply_part(float (&d)[4], const Halves4 (&a)[2], const Halves4& b) {
  mma_half(d, {a[0].w[0], a[1].w[0], a[0].w[1], a[1].w[1]}, {b.w[0], b.w[1]});
}

#else

// As above.
template <bool kOfA, int kRows, class At>
MOE_DEVICE void load_rows(Vec8 (&rows)[kRows], int patch, At at) {
  const int lane = threadIdx.x % kPatchWave, part = patch_part(lane);
#pragma unroll
  for (int i = 0; i < kRows; ++i)
    rows[i] = reinterpret_cast<const Vec8*>(at(patch_row(lane), part / 2, i * kFragmentRows, 2 * patch))[part % 2];
}

typedef float Float4 __attribute__((vector_size(16)));
#if defined(MOE_SIMT)
using Half4 = Vec8;
#else
typedef _Float16 Half4 __attribute__((vector_size(8)));
#endif

template <bool kE5M2>
MOE_DEVICE void multiply_part(float (&d)[4], const Vec8 (&a)[1], const Vec8& b) {
  Float4 sums = {d[0], d[1], d[2], d[3]};
#if defined(__gfx942__) || defined(__gfx950__)
  const long of_a = __builtin_bit_cast(long, a[0]), of_b = __builtin_bit_cast(long, b);
  sums = kE5M2 ? __builtin_amdgcn_mfma_f32_16x16x32_fp8_bf8(of_b, of_a, sums, 0, 0, 0)
               : __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(of_b, of_a, sums, 0, 0, 0);
#endif
  for (int i = 0; i < 4; ++i) d[i] = sums[i];
}
template <bool kE5M2>
MOE_DEVICE void multiply_part(float (&d)[4], const Halves4 (&a)[1], const Halves4& b) {
  Float4 sums = {d[0], d[1], d[2], d[3]};
#if defined(__GFX9__)
  sums = __builtin_amdgcn_mfma_f32_16x16x16f16(__builtin_bit_cast(Half4, b), __builtin_bit_cast(Half4, a[0]), sums,
                                               0, 0, 0);
#endif
  for (int i = 0; i < 4; ++i) d[i] = sums[i];
}

#endif

// An instruction multiplies a part of a patch: all of fp8, of which a lane has Vec8, or half, Halves4.
template <class Part>
constexpr int kPatchParts = std::is_same_v<Part, Vec8> ? 1 : 2;

// Calls act(d) with a lane's sums of a fragment of b.
template <class Act>
MOE_DEVICE void with_fragment(PatchSums& sums, int fragment, Act act) {
  constexpr int kColumns = 8 / kPatchFragments;
  float d[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) d[i] = sums[i / kColumns][fragment * kColumns + i % kColumns];
  act(d);
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[i / kColumns][fragment * kColumns + i % kColumns] = d[i];
}

// Adds the products of a part of a fragment of b; of fp8, a may be E5M2. What an instruction adds up, it does in an
// order of its own, which is always the same.
template <bool kE5M2, class Part>
MOE_DEVICE void multiply_fragment(PatchSums& sums, int fragment, const Part (&a)[kPatchLaneRows], const Part& b) {
  with_fragment(sums, fragment, [&](float (&d)[4]) { multiply_part<kE5M2>(d, a, b); });
}

// Likewise of 128 elements, every product times the scales of its blocks: byte kByteA of scales_a, kByteB of scales_b.
template <bool kE5M2, int kByteA, int kByteB>
MOE_DEVICE void multiply_scaled_fragment([[maybe_unused]] PatchSums& sums, [[maybe_unused]] int fragment,
                                         [[maybe_unused]] const Bytes32& a, [[maybe_unused]] uint32_t scales_a,
                                         [[maybe_unused]] const Bytes32& b, [[maybe_unused]] uint32_t scales_b) {
#if defined(__gfx950__)
#if defined(MOE_SIMT)
  using Operand = Bytes32;
#else
  typedef int Operand __attribute__((vector_size(32)));
#endif
  constexpr int kE4M3Code = 0, kE5M2Code = 1;
  with_fragment(sums, fragment, [&](float (&d)[4]) {
    const Float4 before = {d[0], d[1], d[2], d[3]};
    Float4 after = __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(
        __builtin_bit_cast(Operand, b), __builtin_bit_cast(Operand, a), before, kE4M3Code,
        kE5M2 ? kE5M2Code : kE4M3Code, kByteB, scales_b, kByteA, scales_a);
#if !defined(MOE_SIMT)
    // Here, and not behind the next barrier: operands would stay in registers up to there.
    asm volatile("" : "+v"(after));
#endif
    for (int i = 0; i < 4; ++i) d[i] = after[i];
  });
#endif
}

}  // namespace moe_fp8
