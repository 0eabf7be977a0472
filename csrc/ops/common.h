// What every op does around its kernel: check, find device and stream, allocate, report.
#pragma once
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/device.h>
#include <torch/csrc/stable/ops.h>

#include <cstdlib>
#include <cstring>
#include <vector>

#include "kernels/device.h"
#include "kernels/dispatch.h"
#include "numerics/groups.h"
#include "numerics/scale.h"
#include "ops/tensor.h"

#if defined(MOE_FP8_CUDA) || defined(MOE_FP8_HIP)
#define MOE_FP8_GPU 1
// Weak: a CPU-only torch has no such symbol, and the extension must load there too.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void**);
#endif

namespace moe_fp8 {

constexpr int64_t kMaxRows = (int64_t(1) << 31) - 256;  // int32 offsets, and tiles that reach beyond the last one

// ---- checks: the text names op, argument, what was expected and got; moe_fp8_ext/ops/checks.py words them alike ----
inline InType in_type(const char* op, const char* arg, const Tensor& x) {
  for (int i = 0; i < 3; ++i)
    if (x.dtype == kInputDtypes[i]) return InType(i);
  fail(op, ": ", arg, " must be bfloat16, float16 or float32, got ", dtype_name(x.dtype));
}
inline Fp8Type fp8_type(const char* op, const char* arg, int32_t dtype) {
  for (int i = 0; i < 4; ++i)
    if (dtype == kFp8Dtypes[i]) return Fp8Type(i);
  fail(op, ": ", arg, " must be float8_e4m3fn, float8_e5m2, float8_e4m3fnuz or float8_e5m2fnuz, got ",
       dtype_name(dtype));
}
inline void check_dim(const char* op, const char* arg, const Tensor& x, int64_t dim) {
  if (x.dim != dim) fail(op, ": ", arg, " must have ", dim, " dimensions, got ", x.dim);
}
inline void check_inner_stride(const char* op, const char* arg, const Tensor& x) {
  const int64_t last = x.dim - 1;
  if (x.strides[last] != 1 && x.sizes[last] > 1 && !x.empty())
    fail(op, ": ", arg, " must have stride 1 in its last dimension, got stride ", x.strides[last]);
}
inline void check_contiguous(const char* op, const char* arg, const Tensor& x) {
  for (int64_t d = x.dim - 1, stride = 1; d >= 0; stride *= x.sizes[d--])
    if (x.strides[d] != stride && x.sizes[d] > 1 && !x.empty())
      fail(op, ": ", arg, " must be contiguous, got stride ", x.strides[d], " in dimension ", d);
}
inline void check_size(const char* op, const char* arg, int64_t size, const char* what) {
  if (size > kMaxRows) fail(op, ": ", arg, " must have at most ", kMaxRows, " ", what, ", got ", size);
}
inline void check_matrix(const char* op, const char* arg, const Tensor& x) {
  check_dim(op, arg, x, 2);
  check_inner_stride(op, arg, x);
  check_size(op, arg, x.sizes[0], "rows");
  check_size(op, arg, x.sizes[1], "columns");
}
// [rows, columns] of a dtype that can be quantized.
inline InType check_tokens(const char* op, const char* arg, const Tensor& x) {
  const InType in = in_type(op, arg, x);
  check_matrix(op, arg, x);
  return in;
}
// [experts, rows, columns] likewise.
inline InType check_experts(const char* op, const char* arg, const Tensor& w) {
  const InType in = in_type(op, arg, w);
  check_dim(op, arg, w, 3);
  check_inner_stride(op, arg, w);
  check_size(op, arg, w.sizes[2], "columns");
  if (w.sizes[0] > kMaxExperts) fail(op, ": ", arg, " must hold at most ", kMaxExperts, " experts, got ", w.sizes[0]);
  check_size(op, arg, w.sizes[1], "rows an expert");
  return in;
}
inline void check_same_device(const char* op, const char* arg, const Tensor& t, const char* like, const Tensor& x) {
  if (t.device_type != x.device_type || (x.on_gpu() && t.device_index != x.device_index))
    fail(op, ": ", arg, " must be on the device of ", like, ", ", device_name(x), ", got ", device_name(t));
}
// An int32 vector on the device of `like`.
inline void check_index(const char* op, const char* arg, const Tensor& t, const char* like, const Tensor& x) {
  check_dim(op, arg, t, 1);
  if (t.dtype != kInt32) fail(op, ": ", arg, " must be int32, got ", dtype_name(t.dtype));
  if (t.sizes[0] > 1 && t.strides[0] != 1) fail(op, ": ", arg, " must have stride 1, got stride ", t.strides[0]);
  check_same_device(op, arg, t, like, x);
}
// Debugging switches are looked up on every call, so that os.environ sets them at run time: at most two a call.
inline bool flag_is_set(const char* name) {
  const char* value = std::getenv(name);
  return value && *value && std::strcmp(value, "0") != 0;
}
// Of integers, in logical order; waits for the device.
template <class T = int>
std::vector<T> contents(const Tensor& t) {
  const torch::stable::Tensor there(share(t.handle).release());
  const torch::stable::Tensor here = torch::stable::contiguous(torch::stable::to(there, torch::stable::Device("cpu")));
  const T* first = static_cast<const T*>(here.const_data_ptr());
  return {first, first + here.numel()};
}
inline void validate_offs(const char* op, const Tensor& offs, const char* like, int64_t limit,
                          const char* unit) {
  const std::vector<int> o = contents(offs);
  for (int64_t e = 0, previous = 0; e < offs.sizes[0]; previous = o[e++]) {
    if (o[e] < previous)
      fail(op, ": offs must be non-decreasing from 0, got offs[", e, "] = ", o[e], " after ", previous);
    if (o[e] > limit)
      fail(op, ": offs must not exceed the ", limit, " ", unit, " of ", like, ", got offs[", e, "] = ", o[e]);
  }
}
// offs: int32 [E], at most kMaxExperts, on the device of x; with MOE_FP8_VALIDATE=1 ends of groups up to `limit`.
inline void check_offs(const char* op, const Tensor& offs, const char* like, const Tensor& x, int64_t limit,
                       const char* unit = "rows") {
  check_index(op, "offs", offs, like, x);
  const int64_t E = offs.sizes[0];
  if (E > kMaxExperts) fail(op, ": offs must have at most ", kMaxExperts, " entries, got ", E);
  if (flag_is_set("MOE_FP8_VALIDATE")) validate_offs(op, offs, like, limit, unit);
}
// The padded extent P of groups of x's rows.
inline int64_t check_align(const char* op, int64_t align, const char* arg, int64_t rows, int64_t experts) {
  if (align < 1 || align > kMaxAlign || (align & (align - 1)) != 0)
    fail(op, ": align must be a power of two from 1 to ", kMaxAlign, ", got ", align);
  const int64_t extent = padded_extent(rows, experts, align);
  check_size(op, arg, extent, "rows with padding");
  return extent;
}

// ---- where a call runs ---------------------------------------------------------------------------------------------
// Makes the argument's device current for as long as it lives, knows its stream and makes results there.
class Call {
 public:
  Call(const char* op, const char* arg, const Tensor& x)
      : op_(op), device_type_(x.device_type), device_index_(x.device_index), poison_(flag_is_set("MOE_FP8_POISON")) {
    if (!x.on_gpu()) return;
#if defined(MOE_FP8_GPU)
    if (aoti_torch_get_current_cuda_stream == nullptr)
      fail(op, ": ", arg, " must be on the CPU, this torch knows no GPU; got ", device_name(x));
    int32_t current = 0;
    check_torch(aoti_torch_get_current_device_index(&current));
    if (current != device_index_) guard_.emplace(device_index_);
    check_torch(aoti_torch_get_current_cuda_stream(device_index_, &stream_));
#else
    fail(op, ": ", arg, " must be on the CPU, all that this moe_fp8_ext was built for; got ", device_name(x));
#endif
  }

  void* stream() const { return stream_; }
  // Of a kernel launch.
  void check(int code) const {
#if defined(MOE_FP8_GPU)
    if (code != 0) fail(op_, ": kernel launch failed: ", error_string(code));
#else
    (void)code;
#endif
  }

  Handle empty(const int64_t* sizes, int64_t dim, int32_t dtype) const {
    int64_t strides[8], numel = 1;
    for (int64_t i = dim - 1, s = 1; i >= 0; --i) {  // torch counts every size as at least 1 in strides
      strides[i] = s;
      s *= sizes[i] > 1 ? sizes[i] : 1;
      numel *= sizes[i];
    }
    AtenTensorHandle handle = nullptr;
    check_torch(aoti_torch_empty_strided(dim, sizes, strides, dtype, device_type_, device_index_, &handle));
    Handle out(handle);
    if (poison_ && numel) poison(data(out), numel * int64_t(aoti_torch_dtype_element_size(dtype)));
    return out;
  }
  Handle empty(std::initializer_list<int64_t> sizes, int32_t dtype) const {
    return empty(sizes.begin(), int64_t(sizes.size()), dtype);
  }
  // Column-major scales [rows, columns]; the memory between their columns is part of them.
  Handle empty_scales(int64_t rows, int64_t columns) const {
    const int64_t stride = scale_stride(rows);
    return view(empty({columns, stride}, kFloat32), {rows, columns}, {1, stride});
  }
  Handle empty(std::initializer_list<int64_t> sizes, Fp8Type dtype) const {
    return empty(sizes, kFp8Dtypes[int(dtype)]);
  }

  // The format asked for, or the device's own.
  Fp8Type out_type(std::optional<int32_t> dtype) const {
    if (dtype) return fp8_type(op_, "dtype", *dtype);
#if defined(MOE_FP8_GPU)
    if (device_type_ == kCuda && native_fnuz()) return Fp8Type::kE4M3FNUZ;
#endif
    return Fp8Type::kE4M3FN;
  }

 private:
  // Tests: a byte that nobody writes shows.
  void poison(void* p, int64_t bytes) const {
#if defined(MOE_FP8_GPU)
    if (device_type_ == kCuda) return check(fill_bytes_async(p, 0xff, bytes, stream_));
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
