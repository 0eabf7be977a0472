#include "ops/gemm_backends.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "gemm/mma/grouped_gemm.h"
#include "gemm/sm90/grouped_gemm.h"
#include "ops/call.h"
#include "ops/gemm_product.h"
#include "scales/dequantize.h"
#include "scales/expand_scales.h"
#include "scales/swizzle_scales.h"

namespace moe_fp8 {
namespace {

Handle output_of(const Call& call, const Product& product) {
  if (product.total) return share(product.total->handle);
  const ScaledGroupedMmParams& p = product.p;
  const int32_t dtype = p.out_float32 ? kFloat32 : kBFloat16;
  if (p.out_transposed) return transposed_out(call, product);
  return p.k_grouped ? call.empty({p.E, p.M, p.N}, dtype) : call.empty({p.M, p.N}, dtype);
}

#if defined(MOE_FP8_CUDA)
// Runs a GEMM that trusts its offsets, leaves tail rows unwritten and adds to no total. multiply(offs [E]) returns the
// product. Its offsets are safe, in 2D x 2D rounded down to multiples of `multiple`. Without a total, tail rows and
// empty groups are zeroed. With a total, the product is added to it; empty groups leave the total unchanged.
template <class Multiply>
AtenTensorHandle with_safe_offs(const Call& call, const Product& product, int multiple, Multiply multiply,
                               bool product_float32 = false) {
  const ScaledGroupedMmParams& p = product.p;
  const Handle safe = call.empty({p.E + 1}, kInt32);
  int* offs = data<int>(safe);
  const int limit = int(p.k_grouped ? p.K : p.M);
  call.check(prepare_offs(p.offs, offs, int(p.E), limit, p.k_grouped ? multiple : 1, call.stream()));
  Handle out = multiply(view(safe, {p.E}, {1}));
  if (product.total) {
    Handle total = output_of(call, product);
    call.check(add_groups(data(total), p.out_float32, data(out), product_float32, offs, int(p.E), p.M * p.N,
                          call.stream()));
    return total.release();
  }
  if (p.k_grouped) call.check(zero_empty_groups(data(out), offs, int(p.E), p.M * p.N * 2, call.stream()));
  else call.check(zero_rows(data(out), offs + p.E, p.M, p.N * 2, call.stream()));
  return out.release();
}

Handle torch_scaled_grouped_mm(const Product& product, Handle scale_a, Handle scale_b, Handle offs) {
  const auto none = to_word(std::nullopt);
  StableIValue stack[] = {to_word(share(product.a.handle)), to_word(share(product.b.handle)),
                          to_word(std::move(scale_a)), to_word(std::move(scale_b)), to_optional_word(std::move(offs)),
                          none, none, to_word(std::optional(kBFloat16)), to_word(product.use_fast_accum)};
  return call_torch("aten::_scaled_grouped_mm", "", stack);
}

template <int kMultiple>
AtenTensorHandle torch_scaled(const Call& call, const Product& product) {
  const ScaledGroupedMmParams& p = product.p;
  const Handle &scale_a = product.scale_a.handle, &scale_b = product.scale_b.handle;
  const bool flat = p.k_grouped && p.scale_a.block_size == 0;  // scales of the rows of all groups, in one dimension
  return with_safe_offs(call, product, kMultiple, [&](Handle offs) {
    return torch_scaled_grouped_mm(product, flat ? view(scale_a, {p.E * p.M}, {1}) : share(scale_a),
                                   flat ? view(scale_b, {p.E * p.N}, {1}) : share(scale_b), std::move(offs));
  });
}
constexpr auto torch_scaled_rows = torch_scaled<16>, torch_scaled_blocks = torch_scaled<kMxBlock>;

// Blocks of 128 whose scales are powers of two are four MX blocks each. Groups are read from the safe offs, so that
// scales lie where the product looks for them.
AtenTensorHandle torch_scaled_expanded(const Call& call, const Product& product) {
  const ScaledGroupedMmParams& p = product.p;
  const auto expanded = [&](const OperandScales& scale, const int* ends, int64_t rows, Groups groups) {
    const BlockedExtent extent = blocked_extent(groups, p.E, rows, ceil_div<int64_t>(p.K, kMxBlock));
    const bool experts = groups == Groups::kNone;  // torch wants the bytes of each in one dimension
    Handle out = experts ? call.empty({p.E, extent.rows / p.E * extent.columns}, kE8M0)
                         : call.empty({extent.rows, extent.columns}, kE8M0);
    call.check(expand_scales({scale, experts ? nullptr : ends, data<uint8_t>(out), p.E, rows, p.K, groups},
                             call.stream()));
    return out;
  };
  return with_safe_offs(call, product, kMxBlock, [&](Handle offs) {
    const int* ends = data<int>(offs);
    Handle scale_a = expanded(p.scale_a, ends, p.M, p.k_grouped ? Groups::kColumns : Groups::kRows);
    Handle scale_b = expanded(p.scale_b, ends, p.N, p.k_grouped ? Groups::kColumns : Groups::kNone);
    return torch_scaled_grouped_mm(product, std::move(scale_a), std::move(scale_b), std::move(offs));
  });
}

AtenTensorHandle torch_bfloat16(const Call& call, const Product& product) {
  const ScaledGroupedMmParams& p = product.p;
  const int64_t experts = p.k_grouped ? 1 : p.E;
  const Groups b_groups = p.k_grouped ? Groups::kColumns : Groups::kNone;
  const Groups a_groups = p.scale_a.layout == ScaleLayout::kBlocked && !p.k_grouped ? Groups::kRows : b_groups;
  return with_safe_offs(call, product, 8, [&](Handle offs) {
    const int* ends = data<int>(offs);
    const Handle a = call.empty({p.M, p.K}, kBFloat16), b = call.empty({experts, p.N, p.K}, kBFloat16);
    call.check(dequantize({p.a, p.scale_a, ends, data(a), 1, p.M, p.K, 0, p.a_stride, int(p.E), a_groups, p.a_type,
                           InType::kBF16}, call.stream()));
    call.check(dequantize({p.b, p.scale_b, ends, data(b), experts, p.N, p.K, p.b_group_stride, p.b_stride, int(p.E),
                           b_groups, p.b_type, InType::kBF16}, call.stream()));
    const auto none = to_word(std::nullopt);
    StableIValue stack[] = {to_word(share(a)), to_word(p.k_grouped ? view(b, {p.K, p.N}, {1, p.K})
                                                                 : view(b, {p.E, p.K, p.N}, {p.N * p.K, 1, p.K})),
                            to_optional_word(std::move(offs)), none, none};
    return call_torch("aten::_grouped_mm", "", stack);
  });
}
#else
constexpr std::nullptr_t torch_scaled_rows = nullptr, torch_scaled_blocks = nullptr, torch_scaled_expanded = nullptr,
                         torch_bfloat16 = nullptr;
#endif

// Runs a GEMM of ours. multiply(p) returns 0, or the runtime's error code.
template <class Multiply>
AtenTensorHandle native_gemm(const Call& call, const Product& product, Multiply multiply) {
  ScaledGroupedMmParams p = product.p;
  Handle out = output_of(call, product);
  p.out = data(out);
  call.check(multiply(p));
  return out.release();
}

AtenTensorHandle cpu_gemm(const Call& call, const Product& product) {
  return native_gemm(call, product, [&](const ScaledGroupedMmParams& p) { return scaled_grouped_mm_cpu(call, p), 0; });
}

#if defined(MOE_FP8_GPU)
AtenTensorHandle mma_gemm(const Call& call, const Product& product) {
  return native_gemm(call, product, [&](const ScaledGroupedMmParams& p) {
    return mma::grouped_gemm(p, product.use_fast_accum, call.stream());
  });
}
#else
constexpr std::nullptr_t mma_gemm = nullptr;
#endif

#if defined(MOE_FP8_CUDA)
bool sm90_supports(const Product& product) { return sm90::supports(product.p); }
bool sm90_can_transpose(const Product& product) { return sm90::can_transpose(product.p); }
bool sm90_can_gather_rows(const Product& product) { return sm90::can_gather_rows(product.p, product.use_fast_accum); }
bool sm90_can_add_low_rank(const Product& product) { return sm90::can_add_low_rank(product.p, product.use_fast_accum); }
AtenTensorHandle sm90_multiply(const Call& call, const Product& product) {
  return native_gemm(call, product, [&](const ScaledGroupedMmParams& p) {
    const bool dynamic = sm90::prefers_dynamic_scheduler(p);
    const int64_t bytes = sm90::scratch_bytes(p, dynamic);
    const Handle scratch = bytes ? call.empty({bytes}, kUInt8) : Handle();
    return sm90::grouped_gemm(p, product.use_fast_accum, dynamic, bytes ? data(scratch) : nullptr, call.stream());
  });
}
AtenTensorHandle sm90_gemm(const Call& call, const Product& product) {
  if (!product.total || sm90::can_accumulate(product.p, product.use_fast_accum)) return sm90_multiply(call, product);
  Product plain = product;
  plain.total = nullptr;
  plain.p.accumulate = false;
  plain.p.out_float32 = true;
  return with_safe_offs(call, product, sm90::kOffsAlign, [&](const Handle&) {
    return Handle(sm90_multiply(call, plain));
  }, true);
}
#else
constexpr std::nullptr_t sm90_supports = nullptr, sm90_can_gather_rows = nullptr, sm90_can_transpose = nullptr,
                         sm90_can_add_low_rank = nullptr, sm90_gemm = nullptr;
#endif

bool always(const Product&) { return true; }
bool any_format(const Format&) { return true; }
bool has_float_scales(const Format& f) { return f.scale_type == ScaleType::kF32; }
bool has_scales_of_rows(const Format& f) { return f.block == 0; }
bool has_scales_of_blocks(const Format& f) { return f.block != 0; }
bool has_blocked_scales(const Format& f) { return f.blocked(); }
bool has_float_scales_of_blocks(const Format& f) { return has_float_scales(f) && has_scales_of_blocks(f); }

Needs sm90_needs() {
  Needs needs;
  needs.min_sm = needs.max_sm = 90;
  needs.sum = needs.columns = 16;
  needs.offs = sm90::kOffsAlign;
  needs.chunks = true;
  return needs;
}
Needs torch_needs() {
  Needs needs;
  needs.min_sm = 90;
  needs.max_sm = 109;
  needs.sum = needs.columns = needs.offs = 16;
  needs.max_experts = 1023;
  needs.bfloat16 = needs.chunks = true;
  return needs;
}
Needs torch_rows_needs() {
  Needs needs = torch_needs();
  needs.e4m3 = true;
  needs.max_sm = 90;  // torch compiles it for sm_90a alone, and lets sm_100 call it
  return needs;
}
Needs torch_blocks_needs() {
  Needs needs = torch_rows_needs();
  needs.min_sm = needs.max_sm = 100;
  needs.sum = needs.offs = kMxBlock;
  needs.packed = true;
  return needs;
}
Needs torch_expanded_needs() {
  Needs needs = torch_blocks_needs();
  needs.rounding = Rounding::kPow2;
  return needs;
}
Needs torch_bfloat16_needs() {
  Needs needs = torch_needs();
  needs.columns = needs.offs = 8;
  return needs;
}

}  // namespace

const std::vector<Backend>& all_backends() {
  // name, what it runs, on a GPU, builds, formats, optional, needs, further conditions, run, rows of a by index,
  // out transposed, low-rank term
  static const std::vector<Backend> all = {
      {"sm90", "Hopper's tensor cores", true, {"cuda"}, has_float_scales, false, sm90_needs(), sm90_supports,
       sm90_gemm, sm90_can_gather_rows, sm90_can_transpose, sm90_can_add_low_rank},
      {"sm90_mxfp8", "dequantize of b + Hopper's tensor cores, in BF16", true, {"cuda"}, has_blocked_scales, false,
       sm90_needs(), sm90_supports, sm90_gemm, nullptr, sm90_can_transpose},
      {"torch_fp8", "aten::_scaled_grouped_mm", true, {"cuda"}, has_scales_of_rows, false, torch_rows_needs(), nullptr,
       torch_scaled_rows},
      {"torch_mxfp8", "aten::_scaled_grouped_mm", true, {"cuda"}, has_blocked_scales, true, torch_blocks_needs(),
       nullptr, torch_scaled_blocks},
      {"torch_mxfp8_expanded", "expand_scales + aten::_scaled_grouped_mm", true, {"cuda"}, has_float_scales_of_blocks,
       true, torch_expanded_needs(), nullptr, torch_scaled_expanded},
      {"torch_bfloat16", "dequantize + aten::_grouped_mm", true, {"cuda"}, has_scales_of_blocks, false,
       torch_bfloat16_needs(), nullptr, torch_bfloat16},
      {"mma", "tensor cores of any GPU", true, {"cuda", "rocm"}, any_format, false, {}, nullptr, mma_gemm,
       nullptr, always},
      {"cpu", "dequantize + aten::mm of each group, in float32", false, {"cuda", "rocm", "cpu"}, any_format, false,
       {}, nullptr, cpu_gemm, nullptr, always, always},
  };
  return all;
}

const std::vector<Backend>& backends(std::string_view torch_config) {
  static const std::vector<Backend> usable = [&] {
    const auto has = [&](std::string_view option) { return torch_config.find(option) != torch_config.npos; };
    const bool has_optional = has("USE_MSLK") || has("USE_FBGEMM_GENAI");  // two names of one option
    const char* only = std::getenv("MOE_FP8_GEMM");  // the only GEMM on GPUs; for tests and benchmarks
    bool is_name = only == nullptr;
    std::vector<Backend> found;
    for (const Backend& backend : all_backends()) {
      if (!backend.run || (backend.optional && !has_optional)) continue;
      const bool wanted = only == nullptr || std::string_view(only) == backend.name;
      if (wanted || !backend.gpu) found.push_back(backend);
      is_name |= wanted;
    }
    if (!is_name) throw std::invalid_argument(std::string("MOE_FP8_GEMM must name a GEMM of this build, got ") + only);
    return found;
  }();
  return usable;
}

bool Backend::takes(const Product& product) const {
  const ScaledGroupedMmParams& p = product.p;
  if (gpu != product.a.on_gpu() || p.E > needs.max_experts) return false;
  if (!multiplies(format_of(product.format))) return false;
  if (needs.min_sm == 0) return true;
#if defined(MOE_FP8_GPU)
  const int sm = compute_capability();
  if (sm < needs.min_sm || sm > needs.max_sm) return false;
#endif
  if (needs.rounding && product.rounding != needs.rounding) return false;
  if (p.E == 0 || p.M == 0 || p.N == 0 || p.K == 0) return false;
  if (needs.bfloat16 && p.out_float32) return false;  // out is the output or the total
  if (needs.e4m3 && (p.a_type != Fp8Type::kE4M3FN || p.b_type != Fp8Type::kE4M3FN)) return false;
  if (p.K % needs.sum || p.N % needs.columns) return false;
  if (p.k_grouped && (p.M % needs.columns || product.align % needs.offs)) return false;
  const auto at_16_bytes = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; };
  if (needs.chunks) {
    if (!at_16_bytes(p.a) || !at_16_bytes(p.b) || p.a_stride % 16 || p.b_stride % 16 || p.b_group_stride % 16)
      return false;
    if (p.a_stride < p.K || p.b_stride < p.K) return false;
    if (product.total && !at_16_bytes(product.total->data)) return false;
  }
  if (needs.packed) {
    if (!at_16_bytes(p.scale_a.data) || !at_16_bytes(p.scale_b.data)) return false;
    if (p.a_stride != p.K || p.b_stride != p.K || (!p.k_grouped && p.b_group_stride != p.N * p.K)) return false;
  }
  return supports == nullptr || supports(product);
}

}  // namespace moe_fp8
