// Matrix instructions of one wave: mma.sync on NVIDIA's chips since sm_80, MFMA on AMD's gfx942 and gfx950.
//
// A patch is the unit that a wave multiplies at a time, on both vendors' chips: 16 rows of a, 32 columns (rows of b)
// and 32 elements along K.
//
// THREAD MAP. A lane holds eight elements of each of its rows of a and b, and the sums of eight neighbouring columns:
//
//              rows of a           rows of b, by position      elements along K                 columns of sums
//   mma.sync   lane / 4 + {0, 8}   lane / 4 + {0, 8, 16, 24}   4 * slice + {0 .. 3, 16 .. 19}   8 * slice + {0 .. 7}
//   MFMA       lane % 16           lane % 16 + {0, 16}         8 * slice + {0 .. 7}             8 * slice + {0 .. 7}
//
// The slice of a lane is lane % 4 for mma.sync, lane / 16 for MFMA. The vendors document another assignment of elements
// and columns to lanes. This one is equivalent: any order along K is right if a and b use the same, and a row of b may
// lie at any position.
//
// gfx950 has one more MFMA, over 128 elements along K, which takes E8M0 scales of blocks of 32. Rows, positions and
// sums are as above, but the assignment of elements to lanes is fixed. A lane holds elements 16 * slice + {0 .. 15} of
// both halves, and the scale of block number `slice` of its rows. Other lanes hold most elements of that block. Source:
// the output of AMD's probe of that chip, test/mx_mfma_op/scale_mapping_16x16x128.txt in ROCm/composable_kernel.
#pragma once
#include "platform/convert.h"
#include "platform/memory.h"
#include "platform/waves.h"

// Without these instructions every product would be zero. gfx90a also has MFMA, but flushes subnormal 16-bit floats to
// zero, and subnormal E5M2 values become such floats.
#if (defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800) || \
    (defined(__HIP_DEVICE_COMPILE__) && !defined(__gfx942__) && !defined(__gfx950__))
#error "moe_fp8_ext multiplies on sm_80 and newer, gfx942 and gfx950 only"
#endif

namespace moe_fp8 {

// Whether instructions of one wave multiply fp8. Elsewhere values become 16-bit floats first, which hold them exactly.
// Hopper and Blackwell's data center chips multiply fp8 by other instructions only (see wgmma.h).
#if (defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)) || \
    (defined(MOE_HIP) && (defined(__gfx942__) || defined(__gfx950__) || defined(MOE_SIMT)))
constexpr bool kMultipliesFp8 = true;
#else
constexpr bool kMultipliesFp8 = false;
#endif

// The emulation has NVIDIA's instructions at wave size 32, AMD's at 64.
#if defined(MOE_CUDA) || (defined(MOE_SIMT) && SIMT_WARP == 32)
#define MOE_MMA_SYNC 1
constexpr int kPatchWave = 32;
constexpr int kPatchLaneRows = 2, kPatchFragments = 4;  // rows of a, and of b, that a lane holds
constexpr bool kMayHaveScaledMma = false;               // whether a chip that has Scaled, see below, may run this build
// The lane's first row of a, and of b; further ones are kFragmentRows apart.
MOE_DEVICE int patch_row(int lane) { return lane / 4; }
MOE_DEVICE int patch_slice(int lane) { return lane % 4; }
#else
constexpr int kPatchWave = 64;
constexpr int kPatchLaneRows = 1, kPatchFragments = 2;
constexpr bool kMayHaveScaledMma = true;
MOE_DEVICE int patch_row(int lane) { return lane % 16; }
MOE_DEVICE int patch_slice(int lane) { return lane / 16; }
#endif
constexpr int kPatchRows = 16, kPatchColumns = 32, kPatchDepth = 32;
constexpr int kFragmentRows = kPatchColumns / kPatchFragments;

// The kinds of instruction: elements along K at a time, and whether it takes scales of blocks of 32.
struct Unscaled {
  static constexpr bool kTakesScales = false, kSupported = true;
  static constexpr int kDepth = kPatchDepth;
};
struct Scaled {
  static constexpr bool kTakesScales = true;
  static constexpr int kDepth = 128;
  // Whether the compile target has it. device().has_scaled_mfma is about the chip that runs the code.
#if defined(__gfx950__)
  static constexpr bool kSupported = true;
#else
  static constexpr bool kSupported = false;
#endif
};

struct Halves4 { uint32_t w[2]; };  // four 16-bit floats
struct Bytes32 { Vec16 half[2]; };  // a lane's elements of a row of 128
using PatchSums = float[kPatchLaneRows][8];

// The column whose row of b lies at this position.
MOE_DEVICE int column_of_position(int position) {
  constexpr int kColumns = 8 / kPatchFragments;  // columns of a fragment whose sums a lane holds
  const int fragment = position / kFragmentRows, row = position % kFragmentRows;
  return row / kColumns * 8 + fragment * kColumns + row % kColumns;
}

#if defined(MOE_MMA_SYNC)

// Loads four matrices of 8 rows of 16 bytes from shared memory. Each lane gives the address of one row: lane l of row
// l % 8 of matrix l / 8. Word i of a lane then is bytes [lane % 4 * 4, + 4) of row lane / 4 of matrix i.
#if defined(MOE_SIMT)
MOE_DEVICE void load_matrices(uint32_t (&word)[4], const Vec16* row) { simt::load_matrices(word, row); }
#else
MOE_DEVICE void load_matrices(uint32_t (&word)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3]) : "r"(row) : "memory");
}
MOE_DEVICE void load_matrices(uint32_t (&word)[4], const Vec16* row) {
  load_matrices(word, shared_address(row));
}
#endif

// Loads a lane's elements of kRows rows of a or b, kFragmentRows apart, from shared memory. patch: which 32 elements
// along K. A row consists of chunks of 16 bytes: at(row, chunk, row_offset, chunk_offset) is the address of chunk chunk
// + chunk_offset of row row + row_offset. The offsets are constants once loops are unrolled.
template <bool kIsA, int kRows, class At>
MOE_DEVICE void load_rows(Vec8 (&rows)[kRows], int patch, At at) {
  const int lane = threadIdx.x % kPatchWave, chunk = kIsA ? lane / 16 : lane / 8 % 2;
#pragma unroll
  for (int i = 0; i < kRows; i += 2) {  // the operands of one instruction come into neighbouring registers
    uint32_t w[4];
    load_matrices(w, at(kIsA ? lane % 16 : lane / 16 * 8 + lane % 8, chunk, i * kFragmentRows, 2 * patch));
    rows[i] = {{w[0], w[kIsA ? 2 : 1]}};
    rows[i + 1] = {{w[kIsA ? 1 : 2], w[3]}};
  }
}

#define MOE_MMA(shape_and_types)                                                                              \
  asm("mma.sync.aligned." shape_and_types ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"        \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                        \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))

// d += a * b; a is 16 x 32 of E4M3 or E5M2, b is 32 x 8 of E4M3.
template <bool kE5M2>
MOE_DEVICE void mma_fp8(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if defined(MOE_SIMT)
  simt::mma_m16n8k32(d, a, b, kE5M2);
#elif __CUDA_ARCH__ >= 890
  if constexpr (kE5M2) MOE_MMA("m16n8k32.row.col.f32.e5m2.e4m3");
  else MOE_MMA("m16n8k32.row.col.f32.e4m3.e4m3");
#endif
}
// d += a * b; a is 16 x 16, b is 16 x 8, both of 16-bit floats.
MOE_DEVICE void mma_half(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if defined(MOE_SIMT)
  simt::mma_m16n8k16(d, a, b, simt::Held::kHalf);
#elif __CUDA_ARCH__ >= 800
  MOE_MMA("m16n8k16.row.col.f32.f16.f16");
#endif
}
// The same for bfloat16.
MOE_DEVICE void mma_bfloat16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if defined(MOE_SIMT)
  simt::mma_m16n8k16(d, a, b, simt::Held::kBfloat16);
#elif __CUDA_ARCH__ >= 800
  MOE_MMA("m16n8k16.row.col.f32.bf16.bf16");
#endif
}
#undef MOE_MMA

template <bool kE5M2>
MOE_DEVICE void multiply_step(float (&d)[4], const Vec8 (&a)[2], const Vec8& b) {
  mma_fp8<kE5M2>(d, {a[0].w[0], a[1].w[0], a[0].w[1], a[1].w[1]}, {b.w[0], b.w[1]});
}
template <bool kE5M2>
MOE_DEVICE void multiply_step(float (&d)[4], const Halves4 (&a)[2], const Halves4& b) {
  mma_half(d, {a[0].w[0], a[1].w[0], a[0].w[1], a[1].w[1]}, {b.w[0], b.w[1]});
}

#else

// Loads the same rows without ldmatrix.
template <bool kIsA, int kRows, class At>
MOE_DEVICE void load_rows(Vec8 (&rows)[kRows], int patch, At at) {
  const int lane = threadIdx.x % kPatchWave, slice = patch_slice(lane);
#pragma unroll
  for (int i = 0; i < kRows; ++i)
    rows[i] = reinterpret_cast<const Vec8*>(at(patch_row(lane), slice / 2, i * kFragmentRows, 2 * patch))[slice % 2];
}

typedef float Float4 __attribute__((vector_size(16)));
#if defined(MOE_SIMT)
using Half4 = Vec8;
#else
typedef _Float16 Half4 __attribute__((vector_size(8)));
#endif

template <bool kE5M2>
MOE_DEVICE void multiply_step(float (&d)[4], const Vec8 (&a)[1], const Vec8& b) {
  Float4 sums = {d[0], d[1], d[2], d[3]};
#if defined(__gfx942__) || defined(__gfx950__)
  const long a_bits = __builtin_bit_cast(long, a[0]), b_bits = __builtin_bit_cast(long, b);
  sums = kE5M2 ? __builtin_amdgcn_mfma_f32_16x16x32_fp8_bf8(b_bits, a_bits, sums, 0, 0, 0)
               : __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(b_bits, a_bits, sums, 0, 0, 0);
#endif
  for (int i = 0; i < 4; ++i) d[i] = sums[i];
}
template <bool kE5M2>
MOE_DEVICE void multiply_step(float (&d)[4], const Halves4 (&a)[1], const Halves4& b) {
  Float4 sums = {d[0], d[1], d[2], d[3]};
#if defined(__GFX9__)
  sums = __builtin_amdgcn_mfma_f32_16x16x16f16(__builtin_bit_cast(Half4, b), __builtin_bit_cast(Half4, a[0]), sums,
                                               0, 0, 0);
#endif
  for (int i = 0; i < 4; ++i) d[i] = sums[i];
}

#endif

// Instructions along K for one patch: one of fp8, of which a lane has a Vec8, or two of 16-bit floats (Halves4).
template <class Operand>
constexpr int kPatchSteps = std::is_same_v<Operand, Vec8> ? 1 : 2;

// Calls act(d) with the lane's sums for a fragment of b, and stores d back.
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

// Adds the products of one step along K with a fragment of b. kE5M2: a is E5M2, if operands are fp8. The order in which
// an instruction adds is undocumented, but always the same.
template <bool kE5M2, class Operand>
MOE_DEVICE void multiply_fragment(PatchSums& sums, int fragment, const Operand (&a)[kPatchLaneRows], const Operand& b) {
  with_fragment(sums, fragment, [&](float (&d)[4]) { multiply_step<kE5M2>(d, a, b); });
}

// The same over 128 elements along K. Every product is multiplied by the scales of its blocks: byte kByteA of scales_a
// and byte kByteB of scales_b.
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
    // Keeps the product in front of the next barrier. Behind it, the operands would stay in registers until there.
    asm volatile("" : "+v"(after));
#endif
    for (int i = 0; i < 4; ++i) d[i] = after[i];
  });
#endif
}

}  // namespace moe_fp8
