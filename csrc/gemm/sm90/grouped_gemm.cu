#include "gemm/sm90/grouped_gemm.h"

#include "gemm/sm90/args.h"
#include "gemm/sm90/policy.h"
#include "platform/launch.h"
#include "platform/memory.h"
#include "scales/dequantize.h"

namespace moe_fp8::sm90 {
namespace {

constexpr int64_t kMaxCount = int64_t(1) << 31;  // rows and strides of scales are 32-bit integers

bool at_16_bytes(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// Whether block scales are contiguous along the rows of the operand, or along its squares.
bool are_column_major(const OperandScales& s, int64_t rows) {
  return s.block_size == kBlock && s.row_stride == 1 && s.block_stride % 4 == 0 &&
         s.block_stride >= ceil_div(rows, int64_t(1) << s.rows_log2) && s.block_stride < kMaxCount &&
         at_16_bytes(s.data);
}
bool are_squares(const OperandScales& s) { return 1 << s.rows_log2 == kBlock; }

bool is_mx(const ScaledGroupedMmParams& p) { return p.scale_a.layout == ScaleLayout::kBlocked; }

bool supports_scales(const ScaledGroupedMmParams& p) {
  const OperandScales &a = p.scale_a, &b = p.scale_b;
  if (is_mx(p)) return at_16_bytes(a.data);
  if (a.layout != ScaleLayout::kFloat) return false;
  if (a.block_size == 0) return at_16_bytes(b.data);
  if (!are_column_major(a, p.M) || are_squares(a)) return false;
  if (p.k_grouped && !are_squares(b)) return are_column_major(b, p.N);
  const int64_t rows = ceil_div<int64_t>(p.N, kBlock), expert_scales = rows * a.blocks;
  // Squares are loaded one by one, from any address. The stride of a dimension of size 1 has no meaning.
  if (p.k_grouped) return (rows == 1 || b.row_stride == 1) && b.block_stride < kMaxCount;
  return (a.blocks == 1 || b.block_stride == 1) && (rows == 1 || b.row_stride == a.blocks) &&
         (p.E == 1 || b.group_stride == expert_scales);
}

Scales scales_kind(const ScaledGroupedMmParams& p, bool fast) {
  if (is_mx(p)) return Scales::kMx;
  if (p.scale_a.block_size == 0) return fast ? Scales::kRows : Scales::kRowsPromoted;
  return p.k_grouped && are_squares(p.scale_b) ? Scales::kSquares : Scales::kBlocks;
}
// The usual recipes of training have Add kernels. Other products that accumulate are too rare for kernels of their own.
constexpr bool has_add_kernel(Scales scales) { return scales == Scales::kRows || scales == Scales::kSquares; }

// The recipe of frozen FP8 weights, which adapters train, has kernels that add a low-rank term.
constexpr bool has_low_rank_kernel(Scales scales) { return scales == Scales::kBlocks; }

template <Scales kScales, Fp8Type kA>
int launch_epilogue(const ScaledGroupedMmParams& p, int* unit_counter, void* stream) {
  if constexpr (has_add_kernel(kScales))
    if (p.accumulate) return launch_gemm<kScales, kA, Add>(p, unit_counter, stream);
  if constexpr (has_low_rank_kernel(kScales))
    if (p.low_rank.a) return launch_gemm<kScales, kA, StoreLowRank>(p, unit_counter, stream);
  return launch_gemm<kScales, kA, Store>(p, unit_counter, stream);
}
template <Fp8Type kA>
int launch_scales(const ScaledGroupedMmParams& p, bool fast, int* unit_counter, void* stream) {
  switch (scales_kind(p, fast)) {
    case Scales::kRows: return launch_epilogue<Scales::kRows, kA>(p, unit_counter, stream);
    case Scales::kRowsPromoted: return launch_epilogue<Scales::kRowsPromoted, kA>(p, unit_counter, stream);
    case Scales::kBlocks: return launch_epilogue<Scales::kBlocks, kA>(p, unit_counter, stream);
    default: return launch_epilogue<Scales::kSquares, kA>(p, unit_counter, stream);
  }
}

int64_t experts_of_b(const ScaledGroupedMmParams& p) { return p.k_grouped ? 1 : p.E; }
// Dequantizes b to bfloat16, in the order along K in which threads hold a: see in_quads().
int dequantize_b(const ScaledGroupedMmParams& p, void* to, void* stream) {
  const Groups groups = p.k_grouped ? Groups::kColumns : Groups::kNone;
  return dequantize({p.b, p.scale_b, p.offs, to, experts_of_b(p), p.N, p.K, p.b_group_stride, p.b_stride, int(p.E),
                     groups, p.b_type, InType::kBF16, true, kOffsAlign}, stream);
}

// Whether experts are whole rows apart, so that one tensor map describes all of b.
bool is_one_matrix(const ScaledGroupedMmParams& p) {
  if (p.E == 1) return true;
  return p.b_group_stride % p.b_stride == 0 && p.b_group_stride >= p.N * p.b_stride &&
         p.E * (p.b_group_stride / p.b_stride) < kMaxCount;
}

}  // namespace

bool supports(const ScaledGroupedMmParams& p) {
  const bool e4m3 = p.a_type == Fp8Type::kE4M3FN, mx = is_mx(p);
  if (!e4m3 && (mx || p.a_type != Fp8Type::kE5M2)) return false;
  if (!mx && p.b_type != Fp8Type::kE4M3FN) return false;
  if (mx && 2 * p.K >= kMaxCount) return false;  // bytes of a row of b
  const bool groups = p.k_grouped ? p.E * p.M < kMaxCount : p.E * p.N < kMaxCount && (mx || is_one_matrix(p));
  return groups && supports_scales(p);
}

// Not for promoted sums: the blocks of a cluster share the rows of their tiles by multicast. Blockwise products in
// which each block gathered these rows took 2.3 times as long (H200).
bool can_gather_rows(const ScaledGroupedMmParams& p, bool fast) {
  const bool fits = p.a_stride / 16 * p.index.limit < UINT32_MAX;  // SharedStorage::row_source counts chunks
  return fast && !is_mx(p) && p.scale_a.block_size == 0 && p.N <= kMaxGatherN && fits;
}

bool can_accumulate(const ScaledGroupedMmParams& p, bool fast) { return has_add_kernel(scales_kind(p, fast)); }

bool can_transpose(const ScaledGroupedMmParams& p) { return p.k_grouped && !p.accumulate && !p.out_float32; }

bool can_add_low_rank(const ScaledGroupedMmParams& p, bool fast) {
  const LowRankTerm& term = p.low_rank;
  const auto in_fours = [](const uint16_t* first, int64_t stride) {  // lanes load four elements at a time
    return reinterpret_cast<uintptr_t>(first) % sizeof(Vec8) == 0 && stride % 4 == 0;
  };
  return !p.k_grouped && has_low_rank_kernel(scales_kind(p, fast)) && term.rank % 4 == 0 &&
         in_fours(term.a, term.a_stride) && in_fours(term.b, term.b_stride) && term.b_group_stride % 4 == 0;
}

// Clusters in static rounds drift apart, and drift grows with K and with the number of rounds, until the L2 no longer
// holds the data that the clusters read at a time. If the L2 holds all of a, drift is harmless.
bool prefers_dynamic_scheduler(const ScaledGroupedMmParams& p) {
  if (p.k_grouped || p.index.at || is_mx(p)) return false;
  constexpr int64_t kTileSize = kFastTileM * kFastTileN;
  static_assert(kTileSize == kPromotedTileM * kPromotedTileN);
  const int64_t rounds = p.M * p.N / (kTileSize * device().multiprocessors);
  return p.K >= kMinDynamicK && rounds >= kMinDynamicRounds && p.M * p.K > device().l2_bytes;
}

constexpr int64_t kCounterBytes = 16;
int64_t scratch_bytes(const ScaledGroupedMmParams& p, bool dynamic) {
  return is_mx(p) ? experts_of_b(p) * p.N * p.K * 2 : dynamic ? kCounterBytes : 0;
}

int grouped_gemm(const ScaledGroupedMmParams& p, bool fast, bool dynamic, void* scratch, void* stream) {
  if (is_mx(p)) {
    if (const int e = dequantize_b(p, scratch, stream)) return e;
    ScaledGroupedMmParams dequantized = p;
    dequantized.b = static_cast<const uint8_t*>(scratch);
    dequantized.b_stride = p.K;
    dequantized.b_group_stride = p.N * p.K;
    return launch_gemm<Scales::kMx, Fp8Type::kE4M3FN, Store>(dequantized, nullptr, stream);
  }
  int* const unit_counter = dynamic ? static_cast<int*>(scratch) : nullptr;
  if (dynamic)
    if (const int e = fill_bytes(unit_counter, 0, sizeof(int), stream)) return e;
  return p.a_type == Fp8Type::kE5M2 ? launch_scales<Fp8Type::kE5M2>(p, fast, unit_counter, stream)
                                    : launch_scales<Fp8Type::kE4M3FN>(p, fast, unit_counter, stream);
}

}  // namespace moe_fp8::sm90
