#include "gemm/sm90/grouped_gemm.h"

#include "gemm/sm90/kernel.h"

namespace moe_fp8::sm90 {
namespace {

bool at_16_bytes(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

bool takes_scales(const ScaledGroupedMmParams& p) {
  const OperandScales &a = p.scale_a, &b = p.scale_b;
  if (a.layout != ScaleLayout::kFloat) return false;
  if (a.block_size == 0) return at_16_bytes(b.data);
  const bool column_major = a.row_stride == 1 && a.block_stride % 4 == 0 && a.block_stride >= p.M;
  if (a.block_size != kDepth || p.groups_of_sum || !column_major || !at_16_bytes(a.data)) return false;
  const int64_t blocks = ceil_div<int64_t>(p.K, kDepth), of_expert = ceil_div<int64_t>(p.N, kDepth) * blocks;
  return b.block_stride == 1 && b.row_stride == blocks && (p.E == 1 || b.group_stride == of_expert) &&
         p.E * of_expert % 4 == 0 && at_16_bytes(b.data);
}

}  // namespace

bool takes_operands(const ScaledGroupedMmParams& p) {
  constexpr int64_t kMost = int64_t(1) << 31;  // rows are counted in 32 bits
  const bool groups = p.groups_of_sum ? p.E * p.M < kMost
                                      : (p.E == 1 || p.b_group_stride == p.N * p.b_stride) && p.E * p.N < kMost;
  return groups && takes_scales(p);
}

int grouped_gemm(const ScaledGroupedMmParams& p, void* stream) {
  Args args = {};
  args.scale_a = static_cast<const float*>(p.scale_a.data);
  args.scale_b = static_cast<const float*>(p.scale_b.data);
  args.offs = p.offs;
  args.out = p.out;
  args.M = int(p.M);
  args.N = int(p.N);
  args.K = int(p.K);
  args.E = int(p.E);
  args.scale_a_stride = int(p.scale_a.block_stride);
  const int64_t rows_of_b = p.groups_of_sum ? p.N : p.E * p.N;
  if (const int e = describe_matrix(&args.a, p.a, p.M, p.K, p.a_stride, kTileRows)) return e;
  if (const int e = describe_matrix(&args.a_half, p.a, p.M, p.K, p.a_stride, kTileRows / 2)) return e;
  if (const int e = describe_matrix(&args.b_half, p.b, rows_of_b, p.K, p.b_stride, kTileColumns / 2)) return e;
  return p.scale_a.block_size ? launch_block_scales(args, p.out_float32, stream)
                              : launch_row_scales(args, p.groups_of_sum, p.out_float32, stream);
}

}  // namespace moe_fp8::sm90
