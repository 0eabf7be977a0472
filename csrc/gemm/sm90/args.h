// The arguments of the kernel, and the choices that tell its instances apart.
#pragma once
#include "gemm/sm90/grouped_gemm.h"
#include "numerics/groups.h"
#include "platform/tma.h"

namespace moe_fp8::sm90 {

// The dimension that groups divide: M, rows of a and out (2D x 3D), or K, with one out per group (2D x 2D).
enum class Grouped { kM, kK };

// Granularity and type of the scales, which decide the main loop:
//
//   kRows          fast: the tensor cores accumulate all of K, and the epilogue scales the sums
//   kRowsPromoted  the sums of every stage are promoted, that is, added in float32 to sums in other registers
//   kBlocks        promoted, times the scales of the stage. b has one scale per 128 x 128 square; in a K-grouped
//                  product one per column of the tile
//   kSquares       K-grouped: like kBlocks, but b has one scale per 128 x 128 square
//   kMx            E8M0 scales of 32 elements: consumers convert a, times its scales, to bfloat16; b is bfloat16
enum class Scales { kRows, kRowsPromoted, kBlocks, kSquares, kMx };

struct Args {
  CUtensorMap a_map, b_map;  // boxes of 64 rows of a, unused if rows are gathered; of kBoxN rows of b
  const float* scale_a;      // kMx: bytes in the blocked layout
  const float* scale_b;
  const uint8_t* a_rows;     // a, if its rows are gathered by index
  int64_t a_row_stride;
  RowIndex row_index;
  const int* offs;
  void* out;
  int M, N, K, E;
  int b_expert_rows;  // rows of b_map from one expert to the next
  int out_bytes;      // of an element: 4, float32, or 2, bfloat16
  bool out_transposed;  // K-grouped, in bfloat16
  // Block scales: elements between the scale blocks of a row of a, and of a row or square of b; scale blocks in a row.
  // kMx: the padded rows of a take the place of scale_a_stride.
  int scale_a_stride, scale_b_stride, scale_blocks;
  int* unit_counter;  // starts at 0 and serves a DynamicScheduler; null selects the static scheduler of the traits
};

// An epilogue policy, such as Store or Add, may have its own arguments. See docs/kernels/gemm.md.
template <class Epilogue>
struct KernelArgs : Args {
  typename Epilogue::Args epilogue;
};
struct Store;
struct StoreLowRank;
struct Add;

// Launches one instance. instances/ has a file for both types of a, but two for fast sums, which take longest to
// compile. Returns 0 or the runtime's error code.
template <Scales kScales, Fp8Type kA, class Epilogue>
int launch_gemm(const ScaledGroupedMmParams& p, int* unit_counter, void* stream);

}  // namespace moe_fp8::sm90
