// The tables that Python and C++ share (formats, arguments, limits, activations, GEMM backends), and how the library
// was built. moe_fp8_ext/_C.py reads them with ctypes, as JSON. So the library needs no Python, and one file serves
// every interpreter.
#include <exception>
#include <initializer_list>
#include <string>
#include <utility>

#include "numerics/activations.h"
#include "numerics/format.h"
#include "ops/arguments.h"
#include "ops/checks.h"
#include "ops/gemm_backends.h"
#include "tokens/copy_rows.h"
#include "tokens/permute.h"

#define MOE_FP8_EXPORT extern "C" __attribute__((visibility("default")))

namespace moe_fp8 {
namespace {

#if defined(MOE_FP8_CUDA)
constexpr const char* kBackend = "cuda";
#elif defined(MOE_FP8_HIP)
constexpr const char* kBackend = "rocm";
#else
constexpr const char* kBackend = "cpu";
#endif

// ---- JSON: a value is its text --------------------------------------------------------------------------------------

struct Json {
  std::string text = "null";

  Json() = default;
  Json(bool value) : text(value ? "true" : "false") {}
  Json(int value) : text(std::to_string(value)) {}
  Json(int64_t value) : text(std::to_string(value)) {}
  Json(const char* value) {
    if (value == nullptr) return;
    text = '"';
    for (const char* c = value; *c; ++c) {
      if (*c == '"' || *c == '\\') text += '\\';
      text += (unsigned char)*c < ' ' ? ' ' : *c;
    }
    text += '"';
  }
};

struct List : Json {
  List() { text = "[]"; }
  List(std::initializer_list<Json> items) : List() {
    for (const Json& item : items) append(item);
  }
  void append(const Json& item) { text.replace(text.size() - 1, 1, (text.size() > 2 ? "," : "") + item.text + "]"); }
};

struct Object : Json {
  Object(std::initializer_list<std::pair<const char*, Json>> fields) {
    text = "{";
    for (const auto& [name, value] : fields) text += (text.size() > 1 ? "," : "") + Json(name).text + ":" + value.text;
    text += "}";
  }
};

// ---- Tables ---------------------------------------------------------------------------------------------------------

List formats() {
  constexpr const char* kOrders[] = {"row_major", "column_major", "blocked"};
  List all;
  for (const Format& f : kFormats) {
    List roundings, amaxes = {kAmaxNames[int(Amax::kGroup)]};
    for (const Rounding r : f.roundings) roundings.append(kRoundingNames[int(r)]);
    if (f.wider_amax != Amax::kGroup) amaxes.append(kAmaxNames[int(f.wider_amax)]);
    all.append(Object{{"name", f.name}, {"block", f.block}, {"weight_rows", f.weight_rows},
                      {"scale_dtype", f.scale_type == ScaleType::kF32 ? "float32" : "float8_e8m0fnu"},
                      {"order", kOrders[int(f.order)]}, {"min_align", f.min_align}, {"max_align", f.max_align},
                      {"align", f.align}, {"roundings", roundings}, {"amaxes", amaxes}});
  }
  return all;
}

// torch's names of dtypes, if they can be listed.
List dtype_names(Dtypes dtypes) {
  switch (dtypes) {
    case Dtypes::kInput: return {"bfloat16", "float16", "float32"};
    case Dtypes::kFp8: return {"float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"};
    case Dtypes::kScale: return {"float32", "float8_e8m0fnu"};
    case Dtypes::kScores: case Dtypes::kFloat32: return {"float32"};
    case Dtypes::kInt32: return {"int32"};
    case Dtypes::kInts: return {"int32", "int64"};
    case Dtypes::kProduct: return {"bfloat16", "float32"};
    case Dtypes::kBFloat16: return {"bfloat16"};
    default: return {};
  }
}
List dtype_bytes(Dtypes dtypes) {
  List bytes;
  for (int n = 1; n <= 4; n *= 2)
    if (dtypes == Dtypes::kMovable || (dtypes == Dtypes::kByte && n == 1)) bytes.append(n);
  return bytes;
}

bool depends_on_format(Dtypes dtypes) {
  return dtypes == Dtypes::kScale || dtypes == Dtypes::kGates || dtypes == Dtypes::kTokens;
}

List arguments_of_ops() {
  constexpr const char* kStrides[] = {"any", "inner", "summed", "contiguous"};
  List all;
  for (const Argument& row : arguments::kTable) {
    List limits;
    for (const SizeLimit& limit : row.limits) {
      if (limit.what == nullptr) continue;
      limits.append(Object{{"what", limit.what}, {"dim", limit.dim ? Json(limit.dim) : Json()}, {"max", limit.max}});
    }
    all.append(Object{{"op", row.op}, {"name", row.name}, {"like", row.like}, {"dtypes", dtype_names(row.dtypes)},
                      {"dtype_bytes", dtype_bytes(row.dtypes)}, {"dtype_of_like", row.dtypes == Dtypes::kScores},
                      {"dtype_of_format", depends_on_format(row.dtypes)},
                      {"min_dims", row.min_dims}, {"max_dims", row.max_dims}, {"strides", kStrides[int(row.strides)]},
                      {"limits", limits}});
  }
  return all;
}

List activations() {
  List all;
  for (const ActivationRule& rule : kActivations) all.append(Object{{"name", rule.name}, {"gated", rule.gated}});
  return all;
}

Object limits() {
  return {{"MAX_ROWS", int64_t(kMaxRows)}, {"MAX_DIMS", kMaxDims}, {"MAX_EXPERTS", kMaxExperts},
          {"MAX_COUNTS", kMaxCounts}, {"MAX_ALIGN", kMaxAlign}, {"BLOCK", kBlock}, {"MX_BLOCK", kMxBlock},
          {"SCALE_ROWS", kScaleRows}, {"SCALE_COLUMNS", kScaleColumns}, {"COLUMN_ALIGN", kColumnAlign},
          {"ROW_ALIGN", kRowAlign}};
}

List described(const std::vector<Backend>& backends) {
  List all;
  for (const Backend& backend : backends) {
    const Needs& n = backend.needs;
    List formats, builds;
    for (const Format& format : kFormats)
      if (backend.multiplies(format)) formats.append(format.name);
    for (const char* build : backend.builds) builds.append(build);
    all.append(Object{{"name", backend.name}, {"what", backend.what}, {"device", backend.gpu ? "gpu" : "cpu"},
                      {"builds", builds}, {"formats", formats}, {"optional", backend.optional},
                      {"compute_capability", n.min_sm ? List{n.min_sm, n.max_sm} : Json()},
                      {"multiples", Object{{"sum", n.sum}, {"columns", n.columns}, {"offs", n.offs}}},
                      {"max_experts", n.max_experts}, {"e4m3", n.e4m3}, {"bfloat16", n.bfloat16},
                      {"chunks", n.chunks}, {"packed", n.packed},
                      {"rounding", n.rounding ? Json(kRoundingNames[int(*n.rounding)]) : Json()}});
  }
  return all;
}

Object build_info(const char* torch_config) {
  return {{"version", MOE_FP8_VERSION}, {"backend", kBackend}, {"archs", MOE_FP8_ARCHS},
          {"toolkit", MOE_FP8_TOOLKIT}, {"torch_target", "2.11"}, {"compiler", MOE_FP8_COMPILER},
          {"scaled_grouped_mm", described(backends(torch_config))}};
}

}  // namespace
}  // namespace moe_fp8

// Returns a JSON object of all tables, or one with a sentence under "error". torch_config is torch.__config__.show():
// it says which of torch's GEMMs exist. The first call counts. The text stays valid.
MOE_FP8_EXPORT const char* moe_fp8_tables(const char* torch_config) {
  using namespace moe_fp8;
  static const std::string text = [&] {
    try {
      return Object{{"build_info", build_info(torch_config)}, {"gemms", described(all_backends())},
                    {"formats", formats()}, {"activations", activations()}, {"arguments", arguments_of_ops()},
                    {"limits", limits()}}.text;
    } catch (const std::exception& error) {
      return Object{{"error", error.what()}}.text;
    }
  }();
  return text.c_str();
}

// Whether the contents of offs and indices are checked too, which waits for the device.
MOE_FP8_EXPORT bool moe_fp8_validates() { return moe_fp8::validates(); }
// Adds to the number of contexts that validate: moe_fp8_ext/validation.py.
MOE_FP8_EXPORT void moe_fp8_count_validations(int change) { moe_fp8::open_validations += change; }
