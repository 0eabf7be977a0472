// The Python module _C. Loading it registers torch.ops.moe_fp8.*. It exports the tables that Python and C++ share
// (formats, arguments, limits, activations, GEMM backends), and how it was built.
#include <pybind11/pybind11.h>

#include "numerics/activations.h"
#include "numerics/format.h"
#include "ops/arguments.h"
#include "ops/call.h"
#include "ops/gemm_backends.h"
#include "tokens/copy_rows.h"
#include "tokens/permute.h"

namespace py = pybind11;
using namespace py::literals;
using namespace moe_fp8;

namespace {

#if defined(MOE_FP8_CUDA)
constexpr const char* kBackend = "cuda";
#elif defined(MOE_FP8_HIP)
constexpr const char* kBackend = "rocm";
#else
constexpr const char* kBackend = "cpu";
#endif

py::list names(std::initializer_list<const char*> all) {
  py::list found;
  for (const char* name : all) found.append(name);
  return found;
}

py::list formats() {
  constexpr const char* kOrders[] = {"row_major", "column_major", "blocked"};
  py::list all;
  for (const Format& f : kFormats) {
    py::list roundings;
    for (const Rounding r : f.roundings) roundings.append(kRoundingNames[int(r)]);
    py::list amaxes = names({kAmaxNames[int(Amax::kGroup)]});
    if (f.wider_amax != Amax::kGroup) amaxes.append(kAmaxNames[int(f.wider_amax)]);
    all.append(py::dict("name"_a = f.name, "block"_a = f.block, "weight_rows"_a = f.weight_rows,
                        "scale_dtype"_a = f.scale_type == ScaleType::kF32 ? "float32" : "float8_e8m0fnu",
                        "order"_a = kOrders[int(f.order)], "min_align"_a = f.min_align,
                        "max_align"_a = f.max_align, "align"_a = f.align, "roundings"_a = roundings,
                        "amaxes"_a = amaxes));
  }
  return all;
}

// torch's names of dtypes, if they can be listed.
py::list dtype_names(Dtypes dtypes) {
  switch (dtypes) {
    case Dtypes::kInput: return names({"bfloat16", "float16", "float32"});
    case Dtypes::kFp8: return names({"float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"});
    case Dtypes::kScale: return names({"float32", "float8_e8m0fnu"});
    case Dtypes::kScores: case Dtypes::kFloat32: return names({"float32"});
    case Dtypes::kInt32: return names({"int32"});
    case Dtypes::kInts: return names({"int32", "int64"});
    case Dtypes::kProduct: return names({"bfloat16", "float32"});
    default: return names({});
  }
}
py::list dtype_bytes(Dtypes dtypes) {
  py::list bytes;
  for (int n = 1; n <= 4; n *= 2)
    if (dtypes == Dtypes::kMovable || (dtypes == Dtypes::kByte && n == 1)) bytes.append(n);
  return bytes;
}

py::list arguments_of_ops() {
  constexpr const char* kStrides[] = {"any", "inner", "summed", "contiguous"};
  py::list all;
  for (const Argument& row : arguments::kTable) {
    py::list limits;
    for (const SizeLimit& limit : row.limits) {
      if (limit.what == nullptr) continue;
      limits.append(py::dict("what"_a = limit.what, "dim"_a = limit.dim ? py::object(py::int_(limit.dim)) : py::none(),
                             "max"_a = limit.max));
    }
    all.append(py::dict("op"_a = row.op, "name"_a = row.name, "like"_a = row.like, "dtypes"_a = dtype_names(row.dtypes),
                        "dtype_bytes"_a = dtype_bytes(row.dtypes),
                        "dtype_of_like"_a = row.dtypes == Dtypes::kScores,
                        "dtype_of_format"_a = row.dtypes == Dtypes::kScale || row.dtypes == Dtypes::kGates,
                        "min_dims"_a = row.min_dims,
                        "max_dims"_a = row.max_dims, "strides"_a = kStrides[int(row.strides)], "limits"_a = limits));
  }
  return all;
}

py::list activations() {
  py::list all;
  for (const ActivationRule& rule : kActivations) all.append(py::dict("name"_a = rule.name, "gated"_a = rule.gated));
  return all;
}

py::dict limits() {
  return py::dict("MAX_ROWS"_a = kMaxRows, "MAX_DIMS"_a = kMaxDims, "MAX_EXPERTS"_a = kMaxExperts,
                  "MAX_COUNTS"_a = kMaxCounts, "MAX_ALIGN"_a = kMaxAlign, "BLOCK"_a = kBlock, "MX_BLOCK"_a = kMxBlock,
                  "SCALE_ROWS"_a = kScaleRows, "SCALE_COLUMNS"_a = kScaleColumns, "COLUMN_ALIGN"_a = kColumnAlign,
                  "ROW_ALIGN"_a = kRowAlign);
}

py::list described(const std::vector<Backend>& backends) {
  py::list all;
  for (const Backend& backend : backends) {
    const Needs& n = backend.needs;
    py::list formats, builds;
    for (const Format& format : kFormats)
      if (backend.multiplies(format)) formats.append(format.name);
    for (const char* build : backend.builds) builds.append(build);
    const py::object sm = n.min_sm ? py::object(py::make_tuple(n.min_sm, n.max_sm)) : py::none();
    all.append(py::dict("name"_a = backend.name, "what"_a = backend.what, "device"_a = backend.gpu ? "gpu" : "cpu",
                        "builds"_a = builds, "formats"_a = formats, "optional"_a = backend.optional,
                        "compute_capability"_a = sm,
                        "multiples"_a = py::dict("sum"_a = n.sum, "columns"_a = n.columns, "offs"_a = n.offs),
                        "max_experts"_a = n.max_experts, "e4m3"_a = n.e4m3, "bfloat16"_a = n.bfloat16,
                        "chunks"_a = n.chunks, "packed"_a = n.packed));
  }
  return all;
}
py::dict build_info() {
  return py::dict("version"_a = MOE_FP8_VERSION, "backend"_a = kBackend, "archs"_a = MOE_FP8_ARCHS,
                  "toolkit"_a = MOE_FP8_TOOLKIT, "torch_target"_a = "2.11", "compiler"_a = MOE_FP8_COMPILER,
                  "scaled_grouped_mm"_a = described(backends()));
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Compiled part of moe_fp8_ext: registers torch.ops.moe_fp8. Import torch first.";
  backends(py::module_::import("torch").attr("__config__").attr("show")().cast<std::string>());
  m.def("build_info", &build_info,
        "Version, backend, architectures and toolkit of this build; its GEMMs in the order in which they are tried.");
  m.def("gemms", [] { return described(all_backends()); }, "The GEMMs of every build: csrc/ops/gemm_backends.h.");
  m.def("formats", &formats, "Every Format, as a dict: csrc/numerics/format.h.");
  m.def("activations", &activations, "Every activation, as a dict: csrc/numerics/activations.h.");
  m.def("arguments", &arguments_of_ops, "Every tensor argument of every op, as a dict: csrc/ops/arguments.h.");
  m.def("limits", &limits, "Sizes that Python and C++ must agree on.");
  m.def("validates", [] { return flag_is_set("MOE_FP8_VALIDATE"); },
        "Whether the contents of offs and indices are checked too, which waits for the device.");
}
