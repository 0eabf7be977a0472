#include "gemm/sm90/grouped_gemm.h"

#include "gemm/sm90/args.h"
#include "platform/launch.h"
#include "scales/dequantize.h"

namespace moe_fp8::sm90 {
namespace {

constexpr int64_t kMost = int64_t(1) << 31;  // rows and strides of scales are counted in 32 bits

bool at_16_bytes(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// Scales of blocks lie beside one another by the rows of the operand, or by its squares.
bool are_columns(const OperandScales& s, int64_t rows) {
  return s.block_size == kDepth && s.row_stride == 1 && s.block_stride % 4 == 0 &&
         s.block_stride >= ceil_div(rows, int64_t(1) << s.rows_log2) && s.block_stride < kMost && at_16_bytes(s.data);
}
bool are_squares(const OperandScales& s) { return 1 << s.rows_log2 == kDepth; }

bool is_mx(const ScaledGroupedMmParams& p) { return p.scale_a.layout == ScaleLayout::kBlocked; }

bool takes_scales(const ScaledGroupedMmParams& p) {
  const OperandScales &a = p.scale_a, &b = p.scale_b;
  if (is_mx(p)) return at_16_bytes(a.data);
  if (a.layout != ScaleLayout::kFloat) return false;
  if (a.block_size == 0) return at_16_bytes(b.data);
  if (!are_columns(a, p.M) || are_squares(a)) return false;
  if (p.groups_of_sum && !are_squares(b)) return are_columns(b, p.N);
  const int64_t rows = ceil_div<int64_t>(p.N, kDepth), of_expert = rows * a.blocks;
  // Squares are loaded one by one, from any address. The stride of a dimension of size 1 says nothing.
  if (p.groups_of_sum) return (rows == 1 || b.row_stride == 1) && b.block_stride < kMost;
  return (a.blocks == 1 || b.block_stride == 1) && (rows == 1 || b.row_stride == a.blocks) &&
         (p.E == 1 || b.group_stride == of_expert);
}

Scales scales_of(const ScaledGroupedMmParams& p, bool fast) {
  if (is_mx(p)) return Scales::kMx;
  if (p.scale_a.block_size == 0) return fast ? Scales::kRows : Scales::kRowsPromoted;
  return p.groups_of_sum && are_squares(p.scale_b) ? Scales::kSquares : Scales::kBlocks;
}
// Of a step of training, with recipes as they usually are. The others are rare enough not to have kernels of their own.
constexpr bool add_to_total(Scales scales) { return scales == Scales::kRows || scales == Scales::kSquares; }

template <Scales kScales, Fp8Type kA>
int launch_with(const ScaledGroupedMmParams& p, int* counter, void* stream) {
  if constexpr (add_to_total(kScales))
    if (p.adds) return launch_gemm<kScales, kA, true>(p, counter, stream);
  return launch_gemm<kScales, kA, false>(p, counter, stream);
}
template <Fp8Type kA>
int launch_with(const ScaledGroupedMmParams& p, bool fast, int* counter, void* stream) {
  switch (scales_of(p, fast)) {
    case Scales::kRows: return launch_with<Scales::kRows, kA>(p, counter, stream);
    case Scales::kRowsPromoted: return launch_with<Scales::kRowsPromoted, kA>(p, counter, stream);
    case Scales::kBlocks: return launch_with<Scales::kBlocks, kA>(p, counter, stream);
    default: return launch_with<Scales::kSquares, kA>(p, counter, stream);
  }
}

// b in bfloat16, in the order in which the tensor cores take a.
int64_t experts_of_b(const ScaledGroupedMmParams& p) { return p.groups_of_sum ? 1 : p.E; }
int dequantize_b(const ScaledGroupedMmParams& p, void* to, void* stream) {
  const Groups groups = p.groups_of_sum ? Groups::kColumns : Groups::kNone;
  return dequantize({p.b, p.scale_b, p.offs, to, experts_of_b(p), p.N, p.K, p.b_group_stride, p.b_stride, int(p.E),
                     groups, p.b_type, InType::kBF16, true, kSumAlign}, stream);
}

// Experts are whole rows apart, so that all of b is one matrix.
bool takes_experts(const ScaledGroupedMmParams& p) {
  if (p.E == 1) return true;
  return p.b_group_stride % p.b_stride == 0 && p.b_group_stride >= p.N * p.b_stride &&
         p.E * (p.b_group_stride / p.b_stride) < kMost;
}

}  // namespace

bool takes_operands(const ScaledGroupedMmParams& p) {
  const bool e4m3 = p.a_type == Fp8Type::kE4M3FN, mx = is_mx(p);
  if (!e4m3 && (mx || p.a_type != Fp8Type::kE5M2)) return false;
  if (!mx && p.b_type != Fp8Type::kE4M3FN) return false;
  if (mx && 2 * p.K >= kMost) return false;  // bytes of a row of b
  const bool groups = p.groups_of_sum ? p.E * p.M < kMost : p.E * p.N < kMost && (mx || takes_experts(p));
  return groups && takes_scales(p);
}

// Rows by index cost a product 2 to 10%, whatever its size; moving them before costs the time of a copy, the less of it
// the more columns there are. On an H200, of what moving takes: N = 512 0.75, 1536 0.97, 2048 0.98 to 1.01, 3072 1.005,
// 4096 1.04; where both are level, rows by index need no memory. Tiles of promoted sums share their rows of a between
// the blocks of a cluster: copied by each, blockwise products took 2.3 times as long.
constexpr int64_t kMostColumnsByIndex = 2560;
bool takes_index(const ScaledGroupedMmParams& p, bool fast) {
  const bool counted = p.a_stride / 16 * p.index.limit < UINT32_MAX;  // chunks of rows
  return fast && !is_mx(p) && p.scale_a.block_size == 0 && p.N <= kMostColumnsByIndex && counted;
}

bool takes_total(const ScaledGroupedMmParams& p, bool fast) { return add_to_total(scales_of(p, fast)); }

// Rounds drift apart, the further the longer sums are and the more rounds there are, until the L2 no longer holds what
// clusters read at a time; where it holds all of a, they may. A counter costs a launch, which zeroes it. By it and in
// rounds on an H200, TFLOPS of rows and blocks, sustained: [131072, 7168, 4096] E = 8 1,320 and 1,265, 1,184 and 1,073,
// of sizes as 1 / rank 1,264 and 1,246, 1,171 and 1,092; [131072, 5120, 8192] E = 16 1,256 and 1,235, 1,167 and 1,108;
// [16640, 5120, 8192] E = 8 1,196 and 1,190, 1,089 and 1,078. Of shorter sums [131072, 2048, 7168] E = 8 1,124 and
// 1,118, 1,079 and 1,068, of 1 / rank 1,122 and 1,124, 1,061 and 1,068; [65536, 1536, 1024] E = 40 965 and 977, 920 and
// 939. Of MXFP8 [131072, 7168, 4096] E = 8 657 and 695.
constexpr int64_t kLeastCountedSum = 4096, kLeastCountedRounds = 8;
bool wants_counter(const ScaledGroupedMmParams& p) {
  if (p.groups_of_sum || p.index.at || is_mx(p)) return false;
  constexpr int64_t kTile = 128 * 256;  // or 256 * 128
  const int64_t rounds = p.M * p.N / (kTile * device().multiprocessors);
  return p.K >= kLeastCountedSum && rounds >= kLeastCountedRounds && p.M * p.K > device().l2_bytes;
}

constexpr int64_t kCounterBytes = 16;
int64_t scratch_bytes(const ScaledGroupedMmParams& p, bool counter) {
  return is_mx(p) ? experts_of_b(p) * p.N * p.K * 2 : counter ? kCounterBytes : 0;
}

int grouped_gemm(const ScaledGroupedMmParams& p, bool fast, bool counter, void* scratch, void* stream) {
  if (is_mx(p)) {
    if (const int e = dequantize_b(p, scratch, stream)) return e;
    ScaledGroupedMmParams of_b = p;
    of_b.b = static_cast<const uint8_t*>(scratch);
    of_b.b_stride = p.K;
    of_b.b_group_stride = p.N * p.K;
    return launch_gemm<Scales::kMx, Fp8Type::kE4M3FN, false>(of_b, nullptr, stream);
  }
  int* const zero = counter ? static_cast<int*>(scratch) : nullptr;
  if (counter)
    if (const int e = fill_bytes(zero, 0, sizeof(int), stream)) return e;
  return p.a_type == Fp8Type::kE5M2 ? launch_with<Fp8Type::kE5M2>(p, fast, zero, stream)
                                    : launch_with<Fp8Type::kE4M3FN>(p, fast, zero, stream);
}

}  // namespace moe_fp8::sm90
