#include "kernels/scaled_grouped_mm.h"

#include "ops/common.h"
#include "ops/cpu_loops.h"

namespace moe_fp8 {
namespace {

constexpr const char* kOp = "scaled_grouped_mm";

void check_scale(const char* arg, const Tensor& s, std::initializer_list<int64_t> sizes, const Tensor& a) {
  if (s.dtype != kFloat32) fail(kOp, ": ", arg, " must be float32, got ", dtype_name(s.dtype));
  const int64_t dim = int64_t(sizes.size());
  check_dim(kOp, arg, s, dim);
  for (int64_t i = 0; i < dim; ++i)
    if (s.sizes[i] != sizes.begin()[i])
      fail(kOp, ": ", arg, " must have size ", sizes.begin()[i], " in dimension ", i, ", got ", s.sizes[i]);
  for (int64_t i = dim - 1, stride = 1; i >= 0; stride *= s.sizes[i--])
    if (s.sizes[i] > 1 && s.strides[i] != stride && !s.empty())
      fail(kOp, ": ", arg, " must be contiguous, got stride ", s.strides[i], " in dimension ", i);
  check_same_device(kOp, arg, s, "a", a);
}
void check_k_major(const char* arg, const Tensor& t, int64_t dim) {
  if (t.strides[dim] != 1 && t.sizes[dim] > 1 && !t.empty())
    fail(kOp, ": ", arg, " must have stride 1 in dimension ", dim, " (the summed one), got stride ", t.strides[dim]);
}

#if defined(MOE_FP8_GPU)
// What torch's own fp8 grouped GEMM takes; everything else goes to the portable kernel.
bool torch_takes(const ScaledGroupedMmParams& p) {
  const int sm = compute_capability();
  const bool strides = p.a_stride % 16 == 0 && p.b_stride % 16 == 0 && p.b_group_stride % 16 == 0 &&
                       p.a_stride >= p.K && p.b_stride >= p.K;
  const bool pointers = reinterpret_cast<uintptr_t>(p.a) % 16 == 0 && reinterpret_cast<uintptr_t>(p.b) % 16 == 0;
  const bool sizes = p.N % 16 == 0 && p.K % 16 == 0 && (!p.groups_of_sum || p.M % 16 == 0) && p.M * p.N * p.K > 0;
  return sm >= 90 && sm < 110 && strides && pointers && sizes && p.E >= 1 && p.E < 1024 && !p.out_float32 &&
         p.a_type == Fp8Type::kE4M3FN && p.b_type == Fp8Type::kE4M3FN;
}

// torch trusts the offsets and leaves tail rows unwritten: hand it safe offsets, then zero. In the 2D x 2D form it
// needs multiples of 16; only the device knows whether the caller's are, and if not, the portable kernel has the say.
Handle torch_grouped_mm(const Call& call, ScaledGroupedMmParams p, const Tensor& a, const Tensor& b,
                        const Tensor& scale_a, const Tensor& scale_b, bool use_fast_accum) {
  const Handle safe = call.empty({p.E + 1}, kInt32);
  int* safe_offs = data<int>(safe);
  const int multiple = p.groups_of_sum ? 16 : 1, limit = int(p.groups_of_sum ? p.K : p.M);
  call.check(prepare_offs(p.offs, safe_offs, int(p.E), limit, multiple, call.stream()));

  const auto none = word(std::nullopt);
  const int64_t rows = p.groups_of_sum ? p.E * p.M : p.M;
  StableIValue stack[] = {word(share(a.handle)), word(share(b.handle)), word(view(scale_a.handle, {rows}, {1})),
                          word(p.groups_of_sum ? view(scale_b.handle, {p.E * p.N}, {1}) : share(scale_b.handle)),
                          optional_word(view(safe, {p.E}, {1})), none, none, word(std::optional(kBFloat16)),
                          word(use_fast_accum)};
  Handle out = call_torch("aten::_scaled_grouped_mm", "", stack);
  if (!p.groups_of_sum) {
    call.check(zero_rows(data(out), safe_offs + p.E, rows, p.N * 2, call.stream()));
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
// Rows [0, rows) and sum indices [0, n) of an operand as float32 [rows, n].
Handle dequantize(const Call& call, Fp8Type type, const uint8_t* q, int64_t stride, int64_t rows, int64_t n) {
  std::array<float, 256> values;
  dispatch_fp8<F32>(type, [&](auto, auto tag) {
    for (int i = 0; i < 256; ++i) values[i] = fp8_to_float<decltype(tag)::value>(uint8_t(i));
    return 0;
  });
  Handle out = call.empty({rows, n}, kFloat32);
  parallel(rows, rows * n, [&values, q, stride, n, to = data<float>(out)](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      for (int64_t i = 0; i < n; ++i) to[r * n + i] = values[q[r * stride + i]];
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
  for (int64_t e = 0, start = 0; e < p.E; start = ends[e++]) {
    const int64_t size = ends[e] - start, rows = p.groups_of_sum ? p.M : size, n = p.groups_of_sum ? size : p.K;
    if (rows == 0 || p.N == 0 || (p.groups_of_sum && n == 0)) continue;
    const uint8_t* of_a = p.a + start * (p.groups_of_sum ? 1 : p.a_stride);
    const uint8_t* of_b = p.b + (p.groups_of_sum ? start : e * p.b_group_stride);
    const Handle a = dequantize(call, p.a_type, of_a, p.a_stride, rows, n);
    const Handle b = dequantize(call, p.b_type, of_b, p.b_stride, p.N, n);
    const Handle sum = multiply(call, a, b, rows, p.N, n);
    const int64_t first = p.groups_of_sum ? e * p.M : start;  // of the group's rows in out and scale_a
    parallel(rows, rows * p.N, [&, from = data<float>(sum), N = p.N](int64_t begin, int64_t end) {
      const float* scale_b = p.scale_b + e * N;
      for (int64_t r = begin; r < end; ++r) {
        const float scale_a = p.scale_a[first + r];
        const int64_t row = (first + r) * N;
        auto scaled = [=](int64_t c) { return from[r * N + c] * scale_a * scale_b[c]; };
        if (p.out_float32) for (int64_t c = 0; c < N; ++c) static_cast<float*>(p.out)[row + c] = scaled(c);
        else for (int64_t c = 0; c < N; ++c) static_cast<uint16_t*>(p.out)[row + c] = BF16::from_float(scaled(c));
      }
    });
  }
}

}  // namespace

Results<1> scaled_grouped_mm_op(const Tensor& a, const Tensor& b, const Tensor& scale_a, const Tensor& scale_b,
                                const Tensor& offs, std::optional<int32_t> out_dtype, bool use_fast_accum) {
  ScaledGroupedMmParams p = {};
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
  if (p.groups_of_sum) {
    check_scale("scale_a", scale_a, {p.E, p.M}, a);
  } else {
    if (b.sizes[0] != p.E)
      fail(kOp, ": b must hold one expert for each of the ", p.E, " entries of offs, got ", b.sizes[0]);
    check_scale("scale_a", scale_a, {p.M}, a);
    p.b_group_stride = b.strides[0];
  }
  check_scale("scale_b", scale_b, {p.E, p.N}, a);
  const int32_t dtype = out_dtype.value_or(kBFloat16);
  if (dtype != kBFloat16 && dtype != kFloat32)
    fail(kOp, ": out_dtype must be bfloat16 or float32, got ", dtype_name(dtype));
  p.out_float32 = dtype == kFloat32;
  p.a = a.as<uint8_t>();
  p.b = b.as<uint8_t>();
  p.scale_a = scale_a.as<float>();
  p.scale_b = scale_b.as<float>();
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
