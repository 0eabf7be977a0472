// The context of a call: device and stream, allocation of outputs there, and the report of a failed launch.
#pragma once
#include <torch/csrc/stable/accelerator.h>

#include <cstdlib>
#include <cstring>

#include "ops/arguments.h"
#include "ops/tensor.h"
#include "platform/device.h"
#include "quantize/scale_shapes.h"

#if defined(MOE_FP8_CUDA) || defined(MOE_FP8_HIP)
#define MOE_FP8_GPU 1
#endif

// Runs kernel(arguments, stream) on a GPU, or the loop kernel_cpu(arguments), where the call runs. A build for the CPU
// has no kernels.
#if defined(MOE_FP8_GPU)
#define MOE_FP8_RUN(call, kernel, ...) \
  ((call).on_gpu() ? (call).check(kernel(__VA_ARGS__, (call).stream())) : kernel##_cpu(__VA_ARGS__))
#else
#define MOE_FP8_RUN(call, kernel, ...) ((void)(call), kernel##_cpu(__VA_ARGS__))
#endif

namespace moe_fp8 {

// Whether this build has kernels. Code that calls a kernel directly stands under `if constexpr (kGpuBuild)`.
#if defined(MOE_FP8_GPU)
constexpr bool kGpuBuild = true;
#else
constexpr bool kGpuBuild = false;
#endif

// Debugging switches are looked up in every call, so that os.environ can set them at run time.
inline bool flag_is_set(const char* name) {
  const char* value = std::getenv(name);
  return value && *value && std::strcmp(value, "0") != 0;
}

// The product of sizes that are not negative, or INT64_MAX if it overflows. This is the only place that multiplies
// sizes before something bounds them.
inline int64_t product(const int64_t* sizes, int64_t count) {
  int64_t product = 1;
  bool overflow = false;
  for (int64_t i = 0; i < count; ++i) {
    if (sizes[i] == 0) return 0;
    overflow |= __builtin_mul_overflow(product, sizes[i], &product);
  }
  return overflow ? INT64_MAX : product;
}

// A call of an op. It makes the argument's device current for its lifetime.
class Call {
 public:
  Call(const char* op, const char* arg, const Tensor& x)
      : op_(op), device_type_(x.device_type), device_index_(x.device_index), poison_(flag_is_set("MOE_FP8_POISON")) {
    if (!x.on_gpu()) return;
#if defined(MOE_FP8_GPU)
    if (!torch_has_streams())
      fail(op, ": ", arg, " must be on the CPU, this torch knows no GPU; got ", device_name(x));
    int32_t current = 0;
    check_torch(aoti_torch_get_current_device_index(&current));
    if (current != device_index_) guard_.emplace(device_index_);
    check_torch(torch_stream(device_index_, &stream_));
#else
    fail(op, ": ", arg, " must be on the CPU, all that this moe_fp8_ext was built for; got ", device_name(x));
#endif
  }

  bool on_gpu() const { return device_type_ == kCuda; }
  void* stream() const { return stream_; }
  // Raises if a kernel launch has failed.
  void check(int code) const {
#if defined(MOE_FP8_GPU)
    if (code != 0) fail(op_, ": kernel launch failed: ", error_string(code));
#else
    (void)code;
#endif
  }

  Handle empty(const int64_t* sizes, int64_t dim, int32_t dtype) const {
    const int64_t numel = product(sizes, dim), element = element_size(dtype);
    if (numel > INT64_MAX / element) fail_size(sizes, dim, element);
    uint64_t stride = 1;  // as torch: every size counts as at least 1, and an empty tensor may wrap around
    int64_t strides[kMaxDims + 1];
    for (int64_t i = dim - 1; i >= 0; --i) {
      strides[i] = int64_t(stride);
      stride *= uint64_t(sizes[i] > 1 ? sizes[i] : 1);
    }
    AtenTensorHandle handle = nullptr;
    check_torch(aoti_torch_empty_strided(dim, sizes, strides, dtype, device_type_, device_index_, &handle));
    Handle out(handle);
    if (poison_ && numel) poison(data(out), numel * element);
    return out;
  }
  Handle empty(std::initializer_list<int64_t> sizes, int32_t dtype) const {
    return empty(sizes.begin(), int64_t(sizes.size()), dtype);
  }
  Handle empty(std::initializer_list<int64_t> sizes, Fp8Type dtype) const {
    return empty(sizes, kFp8Dtypes[int(dtype)]);
  }
  // Column-major scales own the memory between their columns.
  Handle empty(const ScaleShape& shape, ScaleType type) const {
    const int64_t* sizes = shape.sizes;
    if (shape.column_stride < 0) return empty(sizes, shape.dims, scale_dtype(type));
    return view(empty({sizes[1], shape.column_stride}, scale_dtype(type)), {sizes[0], sizes[1]},
                {1, shape.column_stride});
  }

  // The device's own FP8 type.
  Fp8Type default_fp8() const {
#if defined(MOE_FP8_GPU)
    if (on_gpu() && native_fnuz()) return Fp8Type::kE4M3FNUZ;
#endif
    return Fp8Type::kE4M3FN;
  }

 private:
  [[noreturn, gnu::cold]] void fail_size(const int64_t* sizes, int64_t dim, int64_t element) const {
    std::string text;
    for (int64_t i = 0; i < dim; ++i) text += (i ? ", " : "") + std::to_string(sizes[i]);
    fail(op_, ": a result must have at most ", INT64_MAX, " bytes, got [", text, "] of ", element, " bytes each");
  }
  // For tests: a byte that no kernel writes shows as 0xff.
  void poison(void* p, int64_t bytes) const {
#if defined(MOE_FP8_GPU)
    if (on_gpu()) return check(fill_bytes_async(p, 0xff, bytes, stream_));
#endif
    std::memset(p, 0xff, bytes);
  }

  const char* op_;
  int32_t device_type_, device_index_;
  bool poison_;
  void* stream_ = nullptr;
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

}  // namespace moe_fp8
