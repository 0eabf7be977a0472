#include "kernels/scaled_grouped_mm.h"

#include "ops/common.h"
#include "ops/cpu_loops.h"

namespace moe_fp8 {
namespace {

constexpr const char* kOp = "scaled_grouped_mm";

void check_scale(const char* arg, const Tensor& s, std::initializer_list<int64_t> sizes, const Tensor& a,
                 bool any_strides) {
  if (s.dtype != kFloat32) fail(kOp, ": ", arg, " must be float32, got ", dtype_name(s.dtype));
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
  p.scale_a = {scale_a.as<float>(), p.M, 1, 0, 1, 0};
  p.scale_b = {scale_b.as<float>(), p.N, 1, 0, 1, 0};
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
    p.scale_a = {scale_a.as<float>(), 0, scale_a.strides[0], scale_a.strides[1], 1, int(blocks)};
    p.scale_b = {scale_b.as<float>(), 0, scale_b.strides[1], scale_b.strides[0], 1, int(blocks)};
  } else {
    check_scale("scale_a", scale_a, {p.M, of_sum}, a, true);
    check_scale("scale_b", scale_b, {p.E, of_sum, ceil_div<int64_t>(p.N, kBlock)}, a, true);
    const int64_t* b = scale_b.strides;
    p.scale_a = {scale_a.as<float>(), 0, scale_a.strides[0], scale_a.strides[1], 1, int(of_sum)};
    p.scale_b = {scale_b.as<float>(), b[0], b[2], b[1], kBlock, int(of_sum)};
  }
  if (p.scale_a.blocks == 0) p.scale_a.blocks = p.scale_b.blocks = 1;  // nothing to sum: no scale is read
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
// What torch's own fp8 grouped GEMM takes, and what its bfloat16 one; everything else goes to the portable kernel.
bool torch_takes(const ScaledGroupedMmParams& p) {
  if (p.scale_a.blocks > 0) return are_aligned(p, 8);
  return are_aligned(p, 16) && p.a_type == Fp8Type::kE4M3FN && p.b_type == Fp8Type::kE4M3FN;
}

// The fp8 GEMM: out [M, N] or [E, M, N].
Handle fp8_gemm(const ScaledGroupedMmParams& p, const Handle& offs, const Tensor& a, const Tensor& b,
                const Tensor& scale_a, const Tensor& scale_b, bool use_fast_accum) {
  const auto none = word(std::nullopt);
  const int64_t rows = p.groups_of_sum ? p.E * p.M : p.M;
  StableIValue stack[] = {word(share(a.handle)), word(share(b.handle)), word(view(scale_a.handle, {rows}, {1})),
                          word(p.groups_of_sum ? view(scale_b.handle, {p.E * p.N}, {1}) : share(scale_b.handle)),
                          optional_word(view(offs, {p.E}, {1})), none, none, word(std::optional(kBFloat16)),
                          word(use_fast_accum)};
  return call_torch("aten::_scaled_grouped_mm", "", stack);
}
// The bfloat16 GEMM of operands that are dequantized first.
Handle bf16_gemm(const Call& call, const ScaledGroupedMmParams& p, const Handle& offs) {
  const int64_t experts = p.groups_of_sum ? 1 : p.E;
  const int* groups = p.groups_of_sum ? data<int>(offs) : nullptr;
  const Handle a = call.empty({p.M, p.K}, kBFloat16), b = call.empty({experts, p.N, p.K}, kBFloat16);
  call.check(dequantize_blocks({p.a, p.scale_a, groups, data<uint16_t>(a), 1, p.M, p.K, 0, p.a_stride, int(p.E),
                                p.a_type}, call.stream()));
  call.check(dequantize_blocks({p.b, p.scale_b, groups, data<uint16_t>(b), experts, p.N, p.K, p.b_group_stride,
                                p.b_stride, int(p.E), p.b_type}, call.stream()));
  const auto none = word(std::nullopt);
  StableIValue stack[] = {word(share(a)), word(p.groups_of_sum ? view(b, {p.K, p.N}, {1, p.K})
                                                              : view(b, {p.E, p.K, p.N}, {p.N * p.K, 1, p.K})),
                          optional_word(view(offs, {p.E}, {1})), none, none};
  return call_torch("aten::_grouped_mm", "", stack);
}

// torch trusts the offsets and leaves tail rows unwritten: hand it safe offsets, then zero. In the 2D x 2D form it
// needs multiples of 16 bytes; only the device knows whether the caller's are, and if not, the portable kernel has the
// say.
Handle torch_grouped_mm(const Call& call, ScaledGroupedMmParams p, const Tensor& a, const Tensor& b,
                        const Tensor& scale_a, const Tensor& scale_b, bool use_fast_accum) {
  const bool blockwise = p.scale_a.blocks > 0;
  const Handle safe = call.empty({p.E + 1}, kInt32);
  int* safe_offs = data<int>(safe);
  const int multiple = !p.groups_of_sum ? 1 : blockwise ? 8 : 16, limit = int(p.groups_of_sum ? p.K : p.M);
  call.check(prepare_offs(p.offs, safe_offs, int(p.E), limit, multiple, call.stream()));
  Handle out = blockwise ? bf16_gemm(call, p, safe) : fp8_gemm(p, safe, a, b, scale_a, scale_b, use_fast_accum);
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
// such, from `block` on.
Handle dequantize(const Call& call, Fp8Type type, const uint8_t* q, const OperandScales& scales, int64_t group,
                  int block, int64_t stride, int64_t rows, int64_t n) {
  std::array<float, 256> values;
  dispatch_fp8<F32>(type, [&](auto, auto tag) {
    for (int i = 0; i < 256; ++i) values[i] = fp8_to_float<decltype(tag)::value>(uint8_t(i));
    return 0;
  });
  Handle out = call.empty({rows, n}, kFloat32);
  parallel(rows, rows * n, [&, to = data<float>(out)](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      for (int64_t k = 0; k < n; k += kBlock) {
        const float scale = scales.blocks > 0 ? scales.at(group, r, block + int(k / kBlock)) : 1.f;
        const int64_t stop = std::min<int64_t>(n, k + kBlock);
        for (int64_t i = k; i < stop; ++i) to[r * n + i] = values[q[r * stride + i]] * scale;
      }
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
  int block = 0;  // first of the group, along the sum
  for (int64_t e = 0, start = 0, blocks = 0; e < p.E; start = ends[e++], block += int(blocks)) {
    blocks = p.groups_of_sum ? ceil_div<int64_t>(ends[e] - start, kBlock) : 0;
    const int64_t size = ends[e] - start, rows = p.groups_of_sum ? p.M : size, n = p.groups_of_sum ? size : p.K;
    if (rows == 0 || p.N == 0 || (p.groups_of_sum && n == 0)) continue;
    const uint8_t* of_a = p.a + start * (p.groups_of_sum ? 1 : p.a_stride);
    const uint8_t* of_b = p.b + (p.groups_of_sum ? start : e * p.b_group_stride);
    OperandScales scale_of_a = p.scale_a;
    if (!p.groups_of_sum) scale_of_a.data += start * scale_of_a.row_stride;
    const Handle a = dequantize(call, p.a_type, of_a, scale_of_a, e, block, p.a_stride, rows, n);
    const Handle b = dequantize(call, p.b_type, of_b, p.scale_b, e, block, p.b_stride, p.N, n);
    const Handle sum = multiply(call, a, b, rows, p.N, n);
    const int64_t first = p.groups_of_sum ? e * p.M : start;  // of the group's rows in out and scale_a
    parallel(rows, rows * p.N, [&, from = data<float>(sum), N = p.N](int64_t begin, int64_t end) {
      const bool rowwise = p.scale_a.blocks == 0;
      const float* scale_b = p.scale_b.data + e * N;
      for (int64_t r = begin; r < end; ++r) {
        const float scale_a = rowwise ? p.scale_a.data[first + r] : 1.f;
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
  if (block_size && *block_size != kBlock) fail(kOp, ": block_size must be None or ", kBlock, ", got ", *block_size);
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
  if (block_size) set_block_scales(p, scale_a, scale_b, a, offs);
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
  if (a.on_gpu() && torch_takes(p)) {
    out = torch_grouped_mm(call, p, a, b, scale_a, scale_b, use_fast_accum);
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
