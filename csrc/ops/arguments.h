// The table of tensor arguments, in the order of each op's schema. Calls in C++ (ops/checks.h) and the fake
// implementations in Python (_C.TABLES) first check every tensor against its row. A row holds the conditions on
// one argument alone; the op checks every condition that depends on the format or on other arguments.
#pragma once
#include <cstdint>
#include <string_view>

#include "numerics/groups.h"

namespace moe_fp8 {

constexpr int64_t kMaxRows = (int64_t(1) << 31) - 256;  // offsets are int32, and the last tile may reach past them
constexpr int kMaxDims = 7;                             // of tensors with leading dimensions

enum class Dtypes : uint8_t {
  kInput,    // float32, bfloat16, float16
  kFp8,
  kScale,    // the format's type
  kScores,   // float32, or the type of `like`
  kFloat32,
  kGates,    // kFp8 with scales, kInput without
  kTokens,   // kFp8 with scales, kBFloat16 without
  kInt32,
  kInts,
  kByte,     // any type of 1 byte
  kMovable,  // any type of 1, 2 or 4 bytes
  kProduct,  // a type of products
  kBFloat16,
};

// The dimension whose elements must be adjacent.
enum class Strides : uint8_t {
  kAny,
  kInner,       // the last dimension
  kSummed,      // the last dimension but one
  kContiguous,  // all dimensions
};

// The size of dimension `dim`, counted from the end, is at most `max`; `what` names its elements. kSlots: numel.
struct SizeLimit {
  static constexpr int kSlots = 0;
  const char* what = nullptr;
  int dim = 0;
  int64_t max = 0;
};

// An argument, as errors name it.
struct Name { const char *op, *arg; };

struct Argument {
  const char* op;
  const char* name;
  const char* like;  // must be on the same device as this argument; null: this argument sets the device
  Dtypes dtypes;
  int min_dims, max_dims;
  Strides strides;
  SizeLimit limits[3] = {};

  constexpr operator Name() const { return {op, name}; }
};

namespace arguments {

inline constexpr SizeLimit kColumns = {"columns", -1, kMaxRows}, kRows = {"rows", -2, kMaxRows};

constexpr Argument vector(const char* op, const char* name, const char* like, const char* what, int64_t max) {
  return {op, name, like, Dtypes::kInt32, 1, 1, Strides::kInner, {{what, -1, max}}};
}
constexpr Argument offs(const char* op, const char* like) { return vector(op, "offs", like, "entries", kMaxExperts); }
constexpr Argument starts(const char* op) { return vector(op, "padded_starts", "offs", "entries", kMaxExperts); }
constexpr Argument indices(const char* op, const char* like) {
  return vector(op, "indices", like, "entries", kMaxRows);
}
constexpr Argument matrix(const char* op, const char* name, const char* like, Dtypes dtypes) {
  return {op, name, like, dtypes, 2, 2, Strides::kInner, {kRows, kColumns}};
}
constexpr Argument logits(const char* op, const char* like) {
  return {op, "logits", like, Dtypes::kFloat32, 2, 2, Strides::kInner, {kRows, {"experts", -1, kMaxExperts}}};
}
constexpr Argument inverse(const char* op, const char* like) {
  return {op, "inverse", like, Dtypes::kInt32, 2, 2, Strides::kContiguous,
          {kRows, {"slots", SizeLimit::kSlots, kMaxRows}}};
}
constexpr Argument scores(const char* op, const char* like) {
  return {op, "topk_scores", like, Dtypes::kScores, 2, 2, Strides::kContiguous};
}

inline constexpr Argument kTable[] = {
    {"quantize_rows", "x", nullptr, Dtypes::kInput, 1, kMaxDims, Strides::kInner, {kColumns}},
    offs("quantize_rows", "x"),
    indices("quantize_rows", "x"),
    matrix("quantize_tokens", "x", nullptr, Dtypes::kInput),
    offs("quantize_tokens", "x"),
    indices("quantize_tokens", "x"),
    matrix("quantize_both", "x", nullptr, Dtypes::kInput),
    offs("quantize_both", "x"),
    indices("quantize_both", "x"),
    {"quantize_weight", "w", nullptr, Dtypes::kInput, 3, 3, Strides::kInner,
     {{"experts", -3, kMaxExperts}, {"rows an expert", -2, kMaxRows}, kColumns}},
    {"transpose_weight", "q", nullptr, Dtypes::kFp8, 3, 3, Strides::kInner,
     {{"experts", -3, kMaxExperts}, {"rows an expert", -2, kMaxRows}, kColumns}},

    {"dequantize", "q", nullptr, Dtypes::kFp8, 1, kMaxDims, Strides::kInner, {kColumns}},
    {"dequantize", "scale", "q", Dtypes::kScale, 0, kMaxDims, Strides::kAny},
    offs("dequantize", "q"),

    {"swizzle_scales", "scale", nullptr, Dtypes::kByte, 2, 3, Strides::kInner, {kRows, kColumns}},
    offs("swizzle_scales", "scale"),
    {"unswizzle_scales", "blocked", nullptr, Dtypes::kByte, 2, 2, Strides::kContiguous},
    offs("unswizzle_scales", "blocked"),
    {"expand_scales", "q", nullptr, Dtypes::kFp8, 2, 3, Strides::kInner, {kRows, kColumns}},
    {"expand_scales", "scale", "q", Dtypes::kFloat32, 2, 3, Strides::kAny},
    offs("expand_scales", "q"),

    logits("choose_experts", nullptr),
    {"choose_experts", "bias", "logits", Dtypes::kFloat32, 1, 1, Strides::kInner},
    matrix("choose_experts", "given_ids", "logits", Dtypes::kInts),
    matrix("choose_experts_backward", "grad", nullptr, Dtypes::kFloat32),
    logits("choose_experts_backward", "grad"),
    matrix("choose_experts_backward", "topk_ids", "grad", Dtypes::kInts),
    {"sort_tokens", "topk_ids", nullptr, Dtypes::kInts, 1, 2, Strides::kInner,
     {{"slots", SizeLimit::kSlots, kMaxRows}}},
    {"tokens_by_rank", "topk_ids", nullptr, Dtypes::kInts, 2, 2, Strides::kInner,
     {{"slots", SizeLimit::kSlots, kMaxRows}}},
    {"permute_indices", "tokens_per_rank_expert", nullptr, Dtypes::kInts, 1, 2, Strides::kContiguous},
    matrix("permute_pad", "x", nullptr, Dtypes::kMovable),
    indices("permute_pad", "x"),
    matrix("permute_quantized", "q", nullptr, Dtypes::kFp8),
    {"permute_quantized", "scale", "q", Dtypes::kScale, 1, 2, Strides::kAny},
    indices("permute_quantized", "q"),
    offs("permute_quantized", "q"),
    matrix("pack_tokens", "x", nullptr, Dtypes::kMovable),
    matrix("pack_tokens", "topk_ids", "x", Dtypes::kInts),
    matrix("pack_tokens", "topk_scores", "x", Dtypes::kMovable),
    {"pack_tokens", "scale", "x", Dtypes::kMovable, 1, 2, Strides::kAny, {kColumns}},
    indices("pack_tokens", "x"),
    matrix("quantize_and_pack", "x", nullptr, Dtypes::kInput),
    matrix("quantize_and_pack", "topk_ids", "x", Dtypes::kInts),
    matrix("quantize_and_pack", "topk_scores", "x", Dtypes::kMovable),
    indices("quantize_and_pack", "x"),
    inverse("quantize_and_pack", "x"),
    matrix("unpermute", "y", nullptr, Dtypes::kMovable),
    indices("unpermute", "y"),
    matrix("activate", "h", nullptr, Dtypes::kInput),
    matrix("quantize_activated", "h", nullptr, Dtypes::kInput),
    {"quantize_activated", "bias", "h", Dtypes::kInput, 2, 2, Strides::kContiguous},
    offs("quantize_activated", "h"),
    matrix("add_bias", "x", nullptr, Dtypes::kInput),
    {"add_bias", "bias", "x", Dtypes::kInput, 2, 2, Strides::kContiguous},
    offs("add_bias", "x"),
    matrix("sum_groups", "x", nullptr, Dtypes::kInput),
    offs("sum_groups", "x"),
    {"sum_groups", "scores", "x", Dtypes::kFloat32, 1, 1, Strides::kInner},
    indices("sum_groups", "x"),
    matrix("activate_backward", "grad", "h", Dtypes::kInput),
    matrix("activate_backward", "h", nullptr, Dtypes::kGates),
    {"activate_backward", "scores", "h", Dtypes::kFloat32, 1, 1, Strides::kInner, {{"slots", -1, kMaxRows}}},
    {"activate_backward", "h_scale", "h", Dtypes::kScale, 1, 2, Strides::kAny},
    indices("activate_backward", "h"),
    matrix("quantize_activated_backward", "grad", "h", Dtypes::kInput),
    matrix("quantize_activated_backward", "h", nullptr, Dtypes::kGates),
    offs("quantize_activated_backward", "h"),
    {"quantize_activated_backward", "scores", "h", Dtypes::kFloat32, 1, 1, Strides::kInner, {{"slots", -1, kMaxRows}}},
    {"quantize_activated_backward", "h_scale", "h", Dtypes::kScale, 1, 2, Strides::kAny},
    indices("quantize_activated_backward", "h"),
    matrix("quantize_activated_backward_rows", "grad", "h", Dtypes::kInput),
    matrix("quantize_activated_backward_rows", "h", nullptr, Dtypes::kGates),
    offs("quantize_activated_backward_rows", "h"),
    {"quantize_activated_backward_rows", "scores", "h", Dtypes::kFloat32, 1, 1, Strides::kInner,
     {{"slots", -1, kMaxRows}}},
    {"quantize_activated_backward_rows", "h_scale", "h", Dtypes::kScale, 1, 2, Strides::kAny},
    indices("quantize_activated_backward_rows", "h"),

    matrix("combine", "y", nullptr, Dtypes::kInput),
    inverse("combine", "y"),
    scores("combine", "y"),
    matrix("combine_backward", "grad", nullptr, Dtypes::kInput),
    matrix("combine_backward", "y", "grad", Dtypes::kInput),
    scores("combine_backward", "grad"),
    inverse("combine_backward", "grad"),
    matrix("narrow_tokens", "x", nullptr, Dtypes::kTokens),
    {"narrow_tokens", "m", "x", Dtypes::kBFloat16, 3, 3, Strides::kInner,
     {{"experts", -3, kMaxExperts}, {"rows an expert", -2, kMaxRows}, kColumns}},
    offs("narrow_tokens", "x"),
    {"narrow_tokens", "x_scale", "x", Dtypes::kFloat32, 1, 2, Strides::kAny},
    indices("narrow_tokens", "x"),
    matrix("outer_tokens", "u", nullptr, Dtypes::kBFloat16),
    matrix("outer_tokens", "x", "u", Dtypes::kTokens),
    offs("outer_tokens", "u"),
    {"outer_tokens", "scores", "u", Dtypes::kFloat32, 1, kMaxDims, Strides::kContiguous,
     {{"slots", SizeLimit::kSlots, kMaxRows}}},
    {"outer_tokens", "x_scale", "u", Dtypes::kFloat32, 1, 2, Strides::kAny},
    indices("outer_tokens", "u"),
    {"cast_factor", "m", nullptr, Dtypes::kInput, 2, 3, Strides::kAny, {kRows, kColumns}},
    matrix("pad_token_groups", "x", nullptr, Dtypes::kMovable),
    offs("pad_token_groups", "x"),
    matrix("pad_token_groups_to", "x", nullptr, Dtypes::kMovable),
    offs("pad_token_groups_to", "x"),
    starts("pad_token_groups_to"),
    matrix("unpad_token_groups", "y", nullptr, Dtypes::kMovable),
    offs("unpad_token_groups", "y"),
    starts("unpad_token_groups"),

    {"scaled_grouped_mm", "a", nullptr, Dtypes::kFp8, 2, 2, Strides::kInner, {kRows, kColumns}},
    {"scaled_grouped_mm", "b", "a", Dtypes::kFp8, 2, 3, Strides::kSummed, {kRows, kColumns}},
    {"scaled_grouped_mm", "scale_a", "a", Dtypes::kScale, 1, 2, Strides::kAny},
    {"scaled_grouped_mm", "scale_b", "a", Dtypes::kScale, 2, 3, Strides::kAny},
    offs("scaled_grouped_mm", "a"),
    indices("scaled_grouped_mm", "a"),
    matrix("scaled_grouped_mm", "low_rank_a", "a", Dtypes::kBFloat16),
    {"scaled_grouped_mm", "low_rank_b", "a", Dtypes::kBFloat16, 3, 3, Strides::kSummed, {kRows, kColumns}},
    {"add_scaled_grouped_mm", "total", "a", Dtypes::kProduct, 3, 3, Strides::kContiguous},
    {"add_scaled_grouped_mm", "a", nullptr, Dtypes::kFp8, 2, 2, Strides::kInner, {kRows, kColumns}},
    {"add_scaled_grouped_mm", "b", "a", Dtypes::kFp8, 2, 2, Strides::kSummed, {kRows, kColumns}},
    {"add_scaled_grouped_mm", "scale_a", "a", Dtypes::kScale, 1, 2, Strides::kAny},
    {"add_scaled_grouped_mm", "scale_b", "a", Dtypes::kScale, 2, 2, Strides::kAny},
    offs("add_scaled_grouped_mm", "a"),
};

}  // namespace arguments

// The number of an op's first row, and the row of an argument.
constexpr int first_row(std::string_view op) {
  int row = 0;
  while (op != arguments::kTable[row].op) ++row;
  return row;
}
inline const Argument& argument(Name arg) {
  const Argument* row = &arguments::kTable[first_row(arg.op)];
  while (std::string_view(arg.arg) != row->name) ++row;
  return *row;
}

}  // namespace moe_fp8
