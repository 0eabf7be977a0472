// The Python module _C. Loading it registers torch.ops.moe_fp8.*; what it exports itself is how it was built.
#include <pybind11/pybind11.h>

#include "ops/scaled_grouped_mm.h"

namespace py = pybind11;

namespace {

#if defined(MOE_FP8_CUDA)
constexpr const char* kBackend = "cuda";
constexpr const char* k2D3D =
    "sm90, sm100: aten::_scaled_grouped_mm for float8_e4m3fn to bfloat16 with K and N multiples of 16, E < 1024; "
    "otherwise: portable kernel";
constexpr const char* k2D2D =
    "sm90, sm100: aten::_scaled_grouped_mm for float8_e4m3fn to bfloat16 with N, K, P and offs multiples of 16, "
    "E < 1024; otherwise: portable kernel";
constexpr const char* kBlockwise =
    "sm90, sm100: dequantize + aten::_grouped_mm in bfloat16 for K (2D x 2D: P) a multiple of 16, N (2D x 2D: rows of "
    "a and offs too) of 8, E < 1024; otherwise: portable kernel";
constexpr const char* kMx =
    "sm100, where torch was built with it: aten::_scaled_grouped_mm for contiguous float8_e4m3fn to bfloat16 with K "
    "(2D x 2D: P and offs) multiples of 32, N (2D x 2D: rows of a too) of 16, E < 1024; otherwise as blockwise";
#elif defined(MOE_FP8_HIP)
constexpr const char* kBackend = "rocm";
constexpr const char* k2D3D = "portable kernel";
constexpr const char* k2D2D = "portable kernel";
constexpr const char* kBlockwise = "portable kernel";
constexpr const char* kMx = "portable kernel";
#else
constexpr const char* kBackend = "cpu";
constexpr const char* k2D3D = "dequantize + float32 matmul per group";
constexpr const char* k2D2D = "dequantize + float32 matmul per group";
constexpr const char* kBlockwise = "dequantize + float32 matmul per group";
constexpr const char* kMx = "dequantize + float32 matmul per group";
#endif

py::dict build_info() {
  using namespace py::literals;
  return py::dict("version"_a = MOE_FP8_VERSION, "backend"_a = kBackend, "archs"_a = MOE_FP8_ARCHS,
                  "toolkit"_a = MOE_FP8_TOOLKIT, "torch_target"_a = "2.11", "compiler"_a = MOE_FP8_COMPILER,
                  "scaled_grouped_mm"_a = py::dict("2d_3d"_a = k2D3D, "2d_2d"_a = k2D2D, "blockwise"_a = kBlockwise,
                                                    "mxfp8"_a = kMx));
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Compiled part of moe_fp8_ext: registers torch.ops.moe_fp8. Import torch first.";
  m.def("build_info", &build_info,
        "Version, backend, architectures and toolkit of this build, and what each scaled_grouped_mm path resolves to.");
  m.def("set_torch_has_mx_gemm", [](bool has) { moe_fp8::torch_has_mx_gemm = has; },
        "Whether this torch was built with the grouped GEMM for E8M0 scales.");
}
