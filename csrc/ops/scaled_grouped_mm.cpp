#include "kernels/scaled_grouped_mm.h"

#include "kernels/dequantize.h"
#include "ops/dequantize.h"
#include "ops/scaled_grouped_mm.h"

namespace moe_fp8 {

bool torch_has_mx_gemm = false;

namespace {

constexpr const char* kOp = "scaled_grouped_mm";

void check_scale(const char* arg, const Tensor& s, std::initializer_list<int64_t> sizes, const Tensor& a,
                 bool any_strides, int32_t dtype = kFloat32) {
  if (s.dtype != dtype)
    fail(kOp, ": ", arg, " must be ", dtype_name(dtype).substr(6), ", got ", dtype_name(s.dtype));
  const int64_t dim = int64_t(sizes.size());
  check_dim(kOp, arg, s, dim);
  for (int64_t i = 0; i < dim; ++i)
    if (s.sizes[i] != sizes.begin()[i])
      fail(kOp, ": ", arg, " must have size ", sizes.begin()[i], " in dimension ", i, ", got ", s.sizes[i]);
  if (!any_strides) check_contiguous(kOp, arg, s);
  check_same_device(kOp, arg, s, "a", a);
}
void check_k_major(const char* arg, const Tensor& t, int64_t dim) {
  if (t.strides[dim] != 1 && t.sizes[dim] > 1 && !t.empty())
    fail(kOp, ": ", arg, " must have stride 1 in dimension ", dim, " (the summed one), got stride ", t.strides[dim]);
}

void set_row_scales(ScaledGroupedMmParams& p, const Tensor& scale_a, const Tensor& scale_b, const Tensor& a) {
  if (p.groups_of_sum) check_scale("scale_a", scale_a, {p.E, p.M}, a, false);
  else check_scale("scale_a", scale_a, {p.M}, a, false);
  check_scale("scale_b", scale_b, {p.E, p.N}, a, false);
  p.scale_a = {scale_a.data, p.M, 1, 0, 0};
  p.scale_b = {scale_b.data, p.N, 1, 0, 0};
}
void set_block_scales(ScaledGroupedMmParams& p, const Tensor& scale_a, const Tensor& scale_b, const Tensor& a,
                      const Tensor& offs) {
  const int64_t of_sum = ceil_div<int64_t>(p.K, kBlock);
  if (p.groups_of_sum) {  // as many blocks as the quantizer made room for
    check_dim(kOp, "scale_a", scale_a, 2);
    const int64_t blocks = scale_a.sizes[1];
    if (blocks < of_sum)
      fail(kOp, ": scale_a must have at least ", of_sum, " blocks in dimension 1, got ", blocks);
    check_size(kOp, "scale_a", blocks, "blocks");
    if (flag_is_set("MOE_FP8_VALIDATE")) {
      int64_t used = 0, start = 0;
      for (const int end : contents(offs)) {
        used += ceil_div<int64_t>(end - start, kBlock);
        start = end;
      }
      if (used > blocks)
        fail(kOp, ": scale_a must have ", used, " blocks in dimension 1, as offs has of them, got ", blocks);
    }
    check_scale("scale_a", scale_a, {p.M, blocks}, a, true);
    check_scale("scale_b", scale_b, {blocks, p.N}, a, true);
    check_size(kOp, "a", padded_extent(p.K, p.E, kBlock), "columns with padding");
    p.scale_a = {scale_a.data, 0, scale_a.strides[0], scale_a.strides[1], int(blocks), kBlock};
    p.scale_b = {scale_b.data, 0, scale_b.strides[1], scale_b.strides[0], int(blocks), kBlock};
  } else {
    check_scale("scale_a", scale_a, {p.M, of_sum}, a, true);
    check_scale("scale_b", scale_b, {p.E, of_sum, ceil_div<int64_t>(p.N, kBlock)}, a, true);
    const int64_t* b = scale_b.strides;
    p.scale_a = {scale_a.data, 0, scale_a.strides[0], scale_a.strides[1], int(of_sum), kBlock};
    p.scale_b = {scale_b.data, b[0], b[2], b[1], int(of_sum), kBlock, 7};
  }
}
void set_mx_scales(ScaledGroupedMmParams& p, const Tensor& scale_a, const Tensor& scale_b, const Tensor& a) {
  const int64_t of_sum = ceil_div<int64_t>(p.K, kMxBlock), columns = padded_scale_columns(of_sum);
  const int64_t rows_a = padded_scale_rows(p.M), rows_b = padded_scale_rows(p.N);
  if (p.groups_of_sum) {
    const int64_t of_groups = grouped_scale_columns(of_sum, p.E);
    check_scale("scale_a", scale_a, {rows_a, of_groups}, a, false, kE8M0);
    check_scale("scale_b", scale_b, {rows_b, of_groups}, a, false, kE8M0);
    check_size(kOp, "a", padded_extent(p.K, p.E, kGroupScales), "columns with padding");
  } else {
    check_scale("scale_a", scale_a, {grouped_scale_rows(p.M, p.E), columns}, a, false, kE8M0);
    check_scale("scale_b", scale_b, {p.E, rows_b * columns}, a, false, kE8M0);
    check_size(kOp, "a", padded_extent(p.M, p.E, kGroupScales), "rows with padding");
  }
  constexpr auto kBlocked = ScaleLayout::kBlocked;
  p.scale_a = {scale_a.data, 0, 0, p.groups_of_sum ? rows_a : 0, int(of_sum), kMxBlock, 0, kBlocked};
  p.scale_b = {scale_b.data, p.groups_of_sum ? 0 : rows_b * columns, 0, p.groups_of_sum ? rows_b : 0, int(of_sum),
               kMxBlock, 0, kBlocked};
}

#if defined(MOE_FP8_GPU)
// Operands and sizes that a grouped GEMM of torch's takes, at so many elements of the summed dimension to 16 bytes.
bool are_aligned(const ScaledGroupedMmParams& p, int64_t n) {
  const int sm = compute_capability();
  const bool strides = p.a_stride % 16 == 0 && p.b_stride % 16 == 0 && p.b_group_stride % 16 == 0 &&
                       p.a_stride >= p.K && p.b_stride >= p.K;
  const bool pointers = reinterpret_cast<uintptr_t>(p.a) % 16 == 0 && reinterpret_cast<uintptr_t>(p.b) % 16 == 0;
  const bool sizes = p.N % n == 0 && p.K % 16 == 0 && (!p.groups_of_sum || p.M % n == 0) && p.M * p.N * p.K > 0;
  return sm >= 90 && sm < 110 && strides && pointers && sizes && p.E >= 1 && p.E < 1024 && !p.out_float32;
}
// torch's own fp8 grouped GEMM, with float scales of rows or with blocked E8M0 ones; its bfloat16 one, for operands
// that are dequantized first; or ours.
enum class Gemm { kPortable, kFp8, kBF16 };
Gemm choose_gemm(const ScaledGroupedMmParams& p) {
  const bool e4m3 = p.a_type == Fp8Type::kE4M3FN && p.b_type == Fp8Type::kE4M3FN;
  const bool rowwise = p.scale_a.block_size == 0;
  const auto scale_bits = reinterpret_cast<uintptr_t>(p.scale_a.data) | reinterpret_cast<uintptr_t>(p.scale_b.data);
  const bool packed = p.a_stride == p.K && p.b_stride == p.K && (p.groups_of_sum || p.b_group_stride == p.N * p.K);
  const bool mx = p.scale_a.block_size == kMxBlock && torch_has_mx_gemm && compute_capability() == 100 &&
                  p.K % kMxBlock == 0 && packed && scale_bits % 16 == 0;
  if ((rowwise || mx) && e4m3 && are_aligned(p, 16)) return Gemm::kFp8;
  return !rowwise && are_aligned(p, 8) ? Gemm::kBF16 : Gemm::kPortable;
}

// The fp8 GEMM: out [M, N] or [E, M, N].
Handle fp8_gemm(const ScaledGroupedMmParams& p, const Handle& offs, const Tensor& a, const Tensor& b,
                const Tensor& scale_a, const Tensor& scale_b, bool use_fast_accum) {
  const auto none = word(std::nullopt);
  const int64_t rows = p.groups_of_sum ? p.E * p.M : p.M;
  const bool rowwise = p.scale_a.block_size == 0, flat_b = rowwise && p.groups_of_sum;
  StableIValue stack[] = {word(share(a.handle)), word(share(b.handle)),
                          word(rowwise ? view(scale_a.handle, {rows}, {1}) : share(scale_a.handle)),
                          word(flat_b ? view(scale_b.handle, {p.E * p.N}, {1}) : share(scale_b.handle)),
                          optional_word(view(offs, {p.E}, {1})), none, none, word(std::optional(kBFloat16)),
                          word(use_fast_accum)};
  return call_torch("aten::_scaled_grouped_mm", "", stack);
}
// The bfloat16 GEMM of operands that are dequantized first.
Handle bf16_gemm(const Call& call, const ScaledGroupedMmParams& p, const Handle& offs) {
  const int64_t experts = p.groups_of_sum ? 1 : p.E;
  const Groups of_b = p.groups_of_sum ? Groups::kColumns : Groups::kNone;
  const Groups of_a = p.scale_a.layout == ScaleLayout::kBlocked && !p.groups_of_sum ? Groups::kRows : of_b;
  const Handle a = call.empty({p.M, p.K}, kBFloat16), b = call.empty({experts, p.N, p.K}, kBFloat16);
  call.check(dequantize({p.a, p.scale_a, data<int>(offs), data(a), 1, p.M, p.K, 0, p.a_stride, int(p.E), of_a, p.a_type,
                         InType::kBF16}, call.stream()));
  call.check(dequantize({p.b, p.scale_b, data<int>(offs), data(b), experts, p.N, p.K, p.b_group_stride, p.b_stride,
                         int(p.E), of_b, p.b_type, InType::kBF16}, call.stream()));
  const auto none = word(std::nullopt);
  StableIValue stack[] = {word(share(a)), word(p.groups_of_sum ? view(b, {p.K, p.N}, {1, p.K})
                                                              : view(b, {p.E, p.K, p.N}, {p.N * p.K, 1, p.K})),
                          optional_word(view(offs, {p.E}, {1})), none, none};
  return call_torch("aten::_grouped_mm", "", stack);
}

// torch trusts the offsets and leaves tail rows unwritten: hand it safe offsets, then zero. In the 2D x 2D form it
// needs multiples of 16 bytes, or of 32 for E8M0 scales; only the device knows whether the caller's are, and if not,
// the portable kernel has the say.
Handle torch_grouped_mm(const Call& call, ScaledGroupedMmParams p, Gemm gemm, const Tensor& a, const Tensor& b,
                        const Tensor& scale_a, const Tensor& scale_b, bool use_fast_accum) {
  const Handle safe = call.empty({p.E + 1}, kInt32);
  int* safe_offs = data<int>(safe);
  const bool native = gemm == Gemm::kFp8;
  const int multiple = !p.groups_of_sum ? 1 : !native ? 8 : p.scale_a.block_size ? kMxBlock : 16;
  const int limit = int(p.groups_of_sum ? p.K : p.M);
  call.check(prepare_offs(p.offs, safe_offs, int(p.E), limit, multiple, call.stream()));
  Handle out = native ? fp8_gemm(p, safe, a, b, scale_a, scale_b, use_fast_accum) : bf16_gemm(call, p, safe);
  if (!p.groups_of_sum) {
    call.check(zero_rows(data(out), safe_offs + p.E, p.M, p.N * 2, call.stream()));
    return out;
  }
  call.check(zero_empty_groups(data(out), safe_offs, int(p.E), p.M * p.N * 2, call.stream()));
  p.out = data(out);
  p.done = safe_offs + p.E;
  call.check(scaled_grouped_mm(p, call.stream()));
  return out;
}
#endif

// ---- CPU -----------------------------------------------------------------------------------------------------------
// Rows [0, rows) and sum indices [0, n) of an operand as float32 [rows, n], times the scales of its blocks, if it has
// such: those of the rows from scale_row and of the columns from block number `first` on.
Handle dequantize(const Call& call, Fp8Type type, const uint8_t* q, const OperandScales& scales, int64_t group,
                  int64_t scale_row, int64_t first, int64_t stride, int64_t rows, int64_t n) {
  const OperandScales of_blocks = scales.block_size ? scales : OperandScales{};
  const std::array<float, 256> values = decoded(type);
  std::vector<Segment> segments;
  add_segments(segments, of_blocks, 0, n, int(first));
  Handle out = call.empty({rows, n}, kFloat32);
  parallel(rows, rows * n, [&, to = data<uint32_t>(out)](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      dequantize_row<F32>(values, of_blocks, group, scale_row + r, segments, q + r * stride, to + r * n);
  });
  return out;
}

// a [rows, n] times the transpose of b [columns, n]. An out variant, because autocast leaves those alone.
Handle multiply(const Call& call, const Handle& a, const Handle& b, int64_t rows, int64_t columns, int64_t n) {
  const Handle sum = call.empty({rows, columns}, kFloat32);
  StableIValue stack[] = {word(share(a)), word(view(b, {n, columns}, {1, n})), word(share(sum))};
  return call_torch("aten::mm", "out", stack);
}

void cpu_grouped_mm(const Call& call, const ScaledGroupedMmParams& p) {
  const std::vector<int> ends = safe_ends(p.offs, p.E, p.groups_of_sum ? p.K : p.M);
  const int64_t out_rows = p.groups_of_sum ? p.E * p.M : p.M;
  std::memset(p.out, 0, out_rows * p.N * (p.out_float32 ? 4 : 2));
  const bool blocked_rows = p.scale_a.layout == ScaleLayout::kBlocked && !p.groups_of_sum;
  int64_t at = 0;  // of the group's scales, in rows or columns
  for (int64_t e = 0, start = 0, next = 0; e < p.E; start = ends[e++], at = next) {
    const int64_t size = ends[e] - start, rows = p.groups_of_sum ? p.M : size, n = p.groups_of_sum ? size : p.K;
    next = at + round_up<int64_t>(size, kGroupScales);
    if (rows == 0 || p.N == 0 || (p.groups_of_sum && n == 0)) continue;
    const uint8_t* of_a = p.a + start * (p.groups_of_sum ? 1 : p.a_stride);
    const uint8_t* of_b = p.b + (p.groups_of_sum ? start : e * p.b_group_stride);
    const int64_t scale_row = blocked_rows ? at : p.groups_of_sum ? 0 : start;
    const int64_t block = p.groups_of_sum && p.scale_a.block_size ? at / p.scale_a.block_size : 0;
    const Handle a = dequantize(call, p.a_type, of_a, p.scale_a, e, scale_row, block, p.a_stride, rows, n);
    const Handle b = dequantize(call, p.b_type, of_b, p.scale_b, e, 0, block, p.b_stride, p.N, n);
    const Handle sum = multiply(call, a, b, rows, p.N, n);
    const int64_t first = p.groups_of_sum ? e * p.M : start;  // of the group's rows in out and scale_a
    parallel(rows, rows * p.N, [&, from = data<float>(sum), N = p.N](int64_t begin, int64_t end) {
      const bool rowwise = p.scale_a.block_size == 0;
      const float* scales_a = static_cast<const float*>(p.scale_a.data);
      const float* scale_b = static_cast<const float*>(p.scale_b.data) + (rowwise ? e * N : 0);
      for (int64_t r = begin; r < end; ++r) {
        const float scale_a = rowwise ? scales_a[first + r] : 1.f;
        const int64_t row = (first + r) * N;
        auto scaled = [=](int64_t c) { return rowwise ? from[r * N + c] * scale_a * scale_b[c] : from[r * N + c]; };
        if (p.out_float32) for (int64_t c = 0; c < N; ++c) static_cast<float*>(p.out)[row + c] = scaled(c);
        else for (int64_t c = 0; c < N; ++c) static_cast<uint16_t*>(p.out)[row + c] = BF16::from_float(scaled(c));
      }
    });
  }
}

}  // namespace

Results<1> scaled_grouped_mm_op(const Tensor& a, const Tensor& b, const Tensor& scale_a, const Tensor& scale_b,
                                const Tensor& offs, std::optional<int32_t> out_dtype, bool use_fast_accum,
                                std::optional<int64_t> block_size) {
  ScaledGroupedMmParams p = {};
  if (block_size && *block_size != kBlock && *block_size != kMxBlock)
    fail(kOp, ": block_size must be None, ", kMxBlock, " or ", kBlock, ", got ", *block_size);
  p.a_type = fp8_type(kOp, "a", a.dtype);
  p.b_type = fp8_type(kOp, "b", b.dtype);
  check_dim(kOp, "a", a, 2);
  if (b.dim != 2 && b.dim != 3) fail(kOp, ": b must have 2 or 3 dimensions, got ", b.dim);
  const int64_t k_dim = b.dim - 2, n_dim = b.dim - 1;
  p.groups_of_sum = b.dim == 2;
  check_k_major("a", a, 1);
  check_k_major("b", b, k_dim);
  check_same_device(kOp, "b", b, "a", a);
  p.M = a.sizes[0];
  p.K = a.sizes[1];
  p.N = b.sizes[n_dim];
  if (b.sizes[k_dim] != p.K)
    fail(kOp, ": b must have size ", p.K, " in dimension ", k_dim, " (the last of a), got ", b.sizes[k_dim]);
  check_size(kOp, "a", p.M, "rows");
  check_size(kOp, "a", p.K, "columns");
  check_offs(kOp, offs, "a", a, p.groups_of_sum ? p.K : p.M, p.groups_of_sum ? "columns" : "rows");
  p.E = offs.sizes[0];
  if (!p.groups_of_sum) {
    if (b.sizes[0] != p.E)
      fail(kOp, ": b must hold one expert for each of the ", p.E, " entries of offs, got ", b.sizes[0]);
    p.b_group_stride = b.strides[0];
  }
  if (block_size == kMxBlock) set_mx_scales(p, scale_a, scale_b, a);
  else if (block_size) set_block_scales(p, scale_a, scale_b, a, offs);
  else set_row_scales(p, scale_a, scale_b, a);
  const int32_t dtype = out_dtype.value_or(kBFloat16);
  if (dtype != kBFloat16 && dtype != kFloat32)
    fail(kOp, ": out_dtype must be bfloat16 or float32, got ", dtype_name(dtype));
  p.out_float32 = dtype == kFloat32;
  p.a = a.as<uint8_t>();
  p.b = b.as<uint8_t>();
  p.offs = offs.as<int>();
  p.a_stride = a.strides[0];
  p.b_stride = b.strides[n_dim];
  const Call call(kOp, "a", a);

  Handle out;
#if defined(MOE_FP8_GPU)
  const Gemm gemm = a.on_gpu() ? choose_gemm(p) : Gemm::kPortable;
  if (gemm != Gemm::kPortable) {
    out = torch_grouped_mm(call, p, gemm, a, b, scale_a, scale_b, use_fast_accum);
    return results(out);
  }
#endif
  out = p.groups_of_sum ? call.empty({p.E, p.M, p.N}, dtype) : call.empty({p.M, p.N}, dtype);
  p.out = data(out);
#if defined(MOE_FP8_GPU)
  if (a.on_gpu()) {
    call.check(scaled_grouped_mm(p, call.stream()));
    return results(out);
  }
#endif
  cpu_grouped_mm(call, p);
  return results(out);
}

}  // namespace moe_fp8

MOE_FP8_REGISTER(scaled_grouped_mm)
