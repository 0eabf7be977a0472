// Hopper's warpgroup matrix instruction (WGMMA) for fp8: 64 rows of a by 96, 128 or 256 rows of b, 32 elements along K.
// Both operands are K-major in shared memory, in rows of 128 bytes, swizzled by 128 bytes. The registers of 128 threads
// accumulate the sums.
#pragma once
#include <cstdint>

#include "platform/compiler.h"

namespace moe_fp8 {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(SIMT_HOPPER)
constexpr bool kHasWgmma = true;
#else
constexpr bool kHasWgmma = false;  // the code below compiles, but never runs
#endif

constexpr int kWgmmaRows = 64, kWgmmaDepth = 32;

// THREAD MAP. Thread t of the warpgroup holds the rows wgmma_row(t) and wgmma_row(t) + 8, and two of every 8 columns:
// register 4 j + 2 h + i is the sum of row wgmma_row(t) + 8 h and column 8 j + 2 (t % 4) + i.
MOE_HD constexpr int wgmma_row(int thread) { return thread / 32 * 16 + thread % 32 / 4; }

// The low word of an operand's descriptor: its start address, in units of 16 bytes. kWgmmaStep further is the next 32
// bytes along K: 32 elements of fp8, or 16 of bfloat16.
MOE_DEVICE uint32_t wgmma_operand(uint32_t shared) { return ((shared & 0x3ffffu) >> 4) | 1u << 16; }
constexpr uint32_t kWgmmaStep = kWgmmaDepth / 16;

#if defined(MOE_CUDA)
constexpr uint32_t kWgmmaLayout = 0x40000040u;  // the high word: 128-byte swizzle, 1024 bytes per 8 rows

MOE_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
MOE_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
MOE_DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory"); }

#define MOE_F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MOE_F16(i) MOE_F4(i), MOE_F4(i + 4), MOE_F4(i + 8), MOE_F4(i + 12)
#define MOE_F64(i) MOE_F16(i), MOE_F16(i + 16), MOE_F16(i + 32), MOE_F16(i + 48)

#define MOE_WGMMA_OF(types, shape, registers, a_at, b_at, p_at, layout_at, ...)                         \
  asm volatile("{.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %" p_at ", 0;\n"                        \
               "mov.b64 a, {%" a_at ", %" layout_at "};\nmov.b64 b, {%" b_at ", %" layout_at "};\n"      \
               "wgmma.mma_async.sync.aligned." shape ".f32." types " {" registers "}, a, b, p, 1, 1;}"   \
               : __VA_ARGS__ : "r"(a), "r"(b), "r"(int(accumulate)), "n"(kWgmmaLayout))
#define MOE_WGMMA(count, ...)                                                                           \
  template <bool kE5M2>                                                                                 \
  MOE_DEVICE void wgmma(float (&d)[count], uint32_t a, uint32_t b, bool accumulate) {                   \
    if constexpr (kE5M2) MOE_WGMMA_OF("e5m2.e4m3", __VA_ARGS__);                                        \
    else MOE_WGMMA_OF("e4m3.e4m3", __VA_ARGS__);                                                        \
  }
#define MOE_R48                                                                                     \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
  "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, " \
  "%40, %41, %42, %43, %44, %45, %46, %47"
#define MOE_R64 \
  MOE_R48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MOE_R128                                                                                         \
  MOE_R64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "           \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, " \
  "%100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, "     \
  "%116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// d = a b^T, or d += a b^T if `accumulate`, for 96, 128 and 256 columns. a is E5M2 if kE5M2, else E4M3; b is E4M3.
MOE_WGMMA(48, "m64n96k32", MOE_R48, "48", "49", "50", "51", MOE_F16(0), MOE_F16(16), MOE_F16(32))
MOE_WGMMA(64, "m64n128k32", MOE_R64, "64", "65", "66", "67", MOE_F64(0))
MOE_WGMMA(128, "m64n256k32", MOE_R128, "128", "129", "130", "131", MOE_F64(0), MOE_F64(64))

// The same for bfloat16, over 16 elements along K. a comes from registers: word 2 g + h of thread t holds elements
// 2 (t % 4) + 8 g and the next, of row wgmma_row(t) + 8 h. b lies as above, in rows of 64 elements.
#define MOE_WGMMA_BF16(count, shape, registers, a0, a1, a2, a3, b_at, p_at, layout_at, ...)                  \
  MOE_DEVICE void wgmma_bf16(float (&d)[count], const uint32_t (&a)[4], uint32_t b, bool accumulate) {       \
    asm volatile("{.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %" p_at ", 0;\n"                             \
                 "mov.b64 b, {%" b_at ", %" layout_at "};\n"                                                 \
                 "wgmma.mma_async.sync.aligned." shape ".f32.bf16.bf16 {" registers "}, "                    \
                 "{%" a0 ", %" a1 ", %" a2 ", %" a3 "}, b, p, 1, 1, 0;}"                                     \
                 : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(int(accumulate)),   \
                   "n"(kWgmmaLayout));                                                                       \
  }
MOE_WGMMA_BF16(64, "m64n128k16", MOE_R64, "64", "65", "66", "67", "68", "69", "70", MOE_F64(0))
MOE_WGMMA_BF16(128, "m64n256k16", MOE_R128, "128", "129", "130", "131", "132", "133", "134", MOE_F64(0), MOE_F64(64))

#undef MOE_WGMMA_BF16
#undef MOE_R128
#undef MOE_R64
#undef MOE_R48
#undef MOE_WGMMA
#undef MOE_WGMMA_OF
#undef MOE_F64
#undef MOE_F16
#undef MOE_F4

// Keeps the compiler from moving reads and writes of these registers across this point.
template <int n>
MOE_DEVICE void pin_registers(float (&d)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Reads the thread's index in a one-dimensional block again, so that values derived from it need not stay in registers.
MOE_DEVICE int read_thread_index() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

MOE_DEVICE void pin_register(const uint8_t*& address) { asm volatile("" : "+l"(address)); }

// Takes or gives back registers of the multiprocessor. Called by all threads of a warpgroup.
template <int kRegisters>
MOE_DEVICE void warpgroup_reg_alloc() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters)); }
template <int kRegisters>
MOE_DEVICE void warpgroup_reg_dealloc() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters)); }

// Stores four 8 x 8 matrices of 16-bit values to shared memory. Called by a warp; each lane gives the address of 16
// bytes.
MOE_DEVICE void store_matrices(uint32_t shared, uint32_t w0, uint32_t w1, uint32_t w2, uint32_t w3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(shared), "r"(w0), "r"(w1), "r"(w2), "r"(w3) : "memory");
}
// The same, with each matrix transposed.
MOE_DEVICE void store_matrices_transposed(uint32_t shared, uint32_t w0, uint32_t w1, uint32_t w2, uint32_t w3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(shared), "r"(w0), "r"(w1), "r"(w2), "r"(w3) : "memory");
}
#endif

}  // namespace moe_fp8
