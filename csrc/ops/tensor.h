// Tensors of torch's stable C interface, and how ops are called through it.
// ops/stable.h says why ops use it in place of torch::stable::Tensor.
#pragma once
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <initializer_list>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "numerics/format.h"
#include "ops/stable.h"

namespace moe_fp8 {

// Raises a Python RuntimeError. Called under an `if`, so that its arguments cost nothing in valid calls.
template <class... Pieces>
[[noreturn, gnu::cold, gnu::noinline]] void fail(const Pieces&... pieces) {
  std::ostringstream text;
  (text << ... << pieces);
  throw std::runtime_error(text.str());
}

// Raises if a call into torch has failed, with torch's own message where torch can pass it on.
inline void check_torch(AOTITorchError code) {
  if (code == 0) return;
  const char* message = torch_error();
  fail(message ? message : "moe_fp8_ext: a call into torch failed, as printed above");
}

// ---- dtypes and devices: torch's codes are no part of the interface, so they are looked up once --------------------
inline const int32_t kBFloat16 = aoti_torch_dtype_bfloat16(), kFloat32 = aoti_torch_dtype_float32();
inline const int32_t kE8M0 = torch_dtype_float8_e8m0fnu();
inline const int32_t kInt32 = aoti_torch_dtype_int32(), kInt64 = aoti_torch_dtype_int64();
inline const int32_t kUInt8 = aoti_torch_dtype_uint8();
inline const int32_t kInputDtypes[] = {kBFloat16, aoti_torch_dtype_float16(), kFloat32};  // in the order of InType
inline const int32_t kFp8Dtypes[] = {                                                     // in the order of Fp8Type
    aoti_torch_dtype_float8_e4m3fn(), aoti_torch_dtype_float8_e5m2(), aoti_torch_dtype_float8_e4m3fnuz(),
    aoti_torch_dtype_float8_e5m2fnuz()};
inline int32_t scale_dtype(ScaleType type) { return type == ScaleType::kF32 ? kFloat32 : kE8M0; }
inline int64_t element_size(int32_t dtype) { return int64_t(aoti_torch_dtype_element_size(dtype)); }
inline const int32_t kCpu = aoti_torch_device_type_cpu(), kCuda = aoti_torch_device_type_cuda();

// The name that Python prints.
inline std::string dtype_name(int32_t dtype) {
  const std::pair<int32_t, const char*> names[] = {
      {kFp8Dtypes[0], "float8_e4m3fn"}, {kFp8Dtypes[1], "float8_e5m2"},
      {kFp8Dtypes[2], "float8_e4m3fnuz"}, {kFp8Dtypes[3], "float8_e5m2fnuz"},
      {kBFloat16, "bfloat16"}, {aoti_torch_dtype_float16(), "float16"},
      {kFloat32, "float32"}, {aoti_torch_dtype_float64(), "float64"},
      {aoti_torch_dtype_int8(), "int8"}, {aoti_torch_dtype_uint8(), "uint8"},
      {aoti_torch_dtype_int16(), "int16"}, {aoti_torch_dtype_uint16(), "uint16"},
      {kInt32, "int32"}, {aoti_torch_dtype_uint32(), "uint32"},
      {kInt64, "int64"}, {aoti_torch_dtype_uint64(), "uint64"},
      {aoti_torch_dtype_complex32(), "complex32"}, {aoti_torch_dtype_complex64(), "complex64"},
      {aoti_torch_dtype_complex128(), "complex128"}, {aoti_torch_dtype_bool(), "bool"},
      {kE8M0, "float8_e8m0fnu"}, {torch_dtype_float4_e2m1fn_x2(), "float4_e2m1fn_x2"},
  };
  for (const auto& [code, name] : names)
    if (code == dtype) return std::string("torch.") + name;
  return "another dtype";
}

// ---- tensors -------------------------------------------------------------------------------------------------------
struct DeleteTensor {
  void operator()(AtenTensorHandle tensor) const { aoti_torch_delete_tensor_object(tensor); }
};
using Handle = std::unique_ptr<AtenTensorOpaque, DeleteTensor>;

template <class T = void>
T* data(const Handle& tensor) {
  void* data = nullptr;
  check_torch(torch_get_mutable_data_ptr(tensor.get(), &data));
  return static_cast<T*>(data);
}
inline Handle share(AtenTensorHandle tensor) {
  AtenTensorHandle other = nullptr;
  check_torch(aoti_torch_new_tensor_handle(tensor, &other));
  return Handle(other);
}
inline Handle share(const Handle& tensor) { return share(tensor.get()); }
// The tensor as torch's C++ functions take it.
inline torch::stable::Tensor stable_tensor(const Handle& tensor) {
  return torch::stable::Tensor(share(tensor).release());
}
// A view of the first elements of a contiguous tensor, in another shape.
inline Handle view(const Handle& tensor, const int64_t* sizes, const int64_t* strides, int64_t dim) {
  AtenTensorHandle other = nullptr;
  check_torch(aoti_torch__reinterpret_tensor(tensor.get(), dim, sizes, strides, 0, &other));
  return Handle(other);
}
inline Handle view(const Handle& tensor, std::initializer_list<int64_t> sizes, std::initializer_list<int64_t> strides) {
  return view(tensor, sizes.begin(), strides.begin(), int64_t(sizes.size()));
}

// An argument. Its properties are read once, because every question is a call into torch.
struct Tensor {
  explicit Tensor(Handle tensor) : handle(std::move(tensor)) {
    int64_t *sizes_of = nullptr, *strides_of = nullptr;
    check_torch(aoti_torch_get_dim(handle.get(), &dim));
    if (dim <= 1) check_torch(aoti_torch_is_defined(handle.get(), &defined));  // an undefined tensor has one dimension
    if (!defined) return;
    check_torch(aoti_torch_get_sizes(handle.get(), &sizes_of));
    check_torch(aoti_torch_get_strides(handle.get(), &strides_of));
    check_torch(aoti_torch_get_dtype(handle.get(), &dtype));
    check_torch(aoti_torch_get_device_type(handle.get(), &device_type));
    check_torch(aoti_torch_get_device_index(handle.get(), &device_index));
    check_torch(torch_get_const_data_ptr(handle.get(), &data));
    sizes = sizes_of;
    strides = strides_of;
  }
  bool on_gpu() const { return device_type == kCuda; }
  bool empty() const {
    for (int64_t i = 0; i < dim; ++i)
      if (sizes[i] == 0) return true;
    return false;
  }
  template <class T>
  const T* as() const { return static_cast<const T*>(data); }

  Handle handle;
  bool defined = true;  // torch passes None as an undefined tensor where the schema wants one
  int64_t dim;
  const int64_t* sizes = nullptr;
  const int64_t* strides = nullptr;
  const void* data = nullptr;
  int32_t dtype = 0, device_type = 0, device_index = 0;
};
inline std::string device_name(const Tensor& t) {
  return t.on_gpu() ? "cuda:" + std::to_string(t.device_index) : t.device_type == kCpu ? "cpu" : "another device";
}

// ---- calls of torch's ops: arguments, then results, are 64-bit words on one stack that own their tensors -----------
inline StableIValue to_word(Handle tensor) { return to_word(tensor.release()); }
inline StableIValue to_optional_word(Handle tensor) {
  return to_word(std::optional<AtenTensorHandle>(tensor.release()));
}

// Calls an op with one result.
template <size_t kWords>
Handle call_torch(const char* op, const char* overload, StableIValue (&stack)[kWords]) {
  check_torch(torch_call_dispatcher(op, overload, stack, TORCH_ABI_VERSION));
  return Handle(from_word<AtenTensorHandle>(stack[0]));
}

// ---- owners of the words on the stack ------------------------------------------------------------------------------
template <class T>
struct Owner {
  explicit Owner(StableIValue word) : value(from_word<T>(word)) {}
  T argument() const { return value; }
  T value;
};
template <>
struct Owner<Tensor> {
  explicit Owner(StableIValue word) : tensor(from_word<AtenTensorHandle>(word)) {}
  Tensor argument() { return Tensor(std::move(tensor)); }
  Handle tensor;
};
template <>
struct Owner<std::optional<Tensor>> {
  explicit Owner(StableIValue word)
      : tensor(from_word<std::optional<AtenTensorHandle>>(word).value_or(nullptr)) {}
  std::optional<Tensor> argument() {
    return tensor ? std::optional<Tensor>(std::in_place, std::move(tensor)) : std::nullopt;
  }
  Handle tensor;
};
struct DeleteString {
  void operator()(StringHandle string) const { torch_delete_string(string); }
};
using String = std::unique_ptr<StringOpaque, DeleteString>;
inline std::string_view text_of(const String& string) {
  const char* first = nullptr;
  size_t length = 0;
  check_torch(torch_string_c_str(string.get(), &first));
  check_torch(torch_string_length(string.get(), &length));
  return {first, length};
}
template <>
struct Owner<std::string_view> {
  explicit Owner(StableIValue word) : string(from_word<StringHandle>(word)) {}
  std::string_view argument() const { return text_of(string); }
  String string;
};
template <>
struct Owner<std::optional<std::string_view>> {
  explicit Owner(StableIValue word) : string(from_word<std::optional<StringHandle>>(word).value_or(nullptr)) {}
  std::optional<std::string_view> argument() const { return string ? std::optional(text_of(string)) : std::nullopt; }
  String string;
};

// ---- ops -----------------------------------------------------------------------------------------------------------
// The results of an op. The caller owns them from here on.
template <int n>
using Results = std::array<AtenTensorHandle, n>;
template <class... Handles>
Results<sizeof...(Handles)> results(Handles&... handles) { return {handles.release()...}; }

// The tensors among the arguments of a call, in the order of the schema. Null: an optional one that is None.
struct GivenTensors {
  static constexpr int kMax = 8;
  void add(const Tensor& t) { at[count++] = &t; }
  void add(const std::optional<Tensor>& t) { at[count++] = t ? &*t : nullptr; }
  template <class T>
  void add(const T&) {}

  const Tensor* at[kMax];
  int count = 0;
};

// An op as torch calls it. Dtypes are torch's codes, strings are std::string_view. The words on the stack own tensors
// and strings: all are taken over before anything can fail. `check` is called with the tensors, then the op.
template <auto op, void (*check)(const GivenTensors&)>
struct Boxed;
template <size_t kResults, class... Args, std::array<AtenTensorHandle, kResults> (*op)(Args...),
          void (*check)(const GivenTensors&)>
struct Boxed<op, check> {
  static void call(StableIValue* stack, uint64_t, uint64_t) { unbox(stack, std::index_sequence_for<Args...>()); }

 private:
  template <class T>
  static constexpr bool kIsTensor = std::is_same_v<T, Tensor> || std::is_same_v<T, std::optional<Tensor>>;
  static_assert((0 + ... + kIsTensor<std::decay_t<Args>>) <= GivenTensors::kMax);

  template <size_t... i>
  static void unbox(StableIValue* stack, std::index_sequence<i...>) {
    std::tuple<Owner<std::decay_t<Args>>...> owners{Owner<std::decay_t<Args>>(stack[i])...};
    const std::tuple<std::decay_t<Args>...> arguments{std::get<i>(owners).argument()...};
    GivenTensors tensors;
    (tensors.add(std::get<i>(arguments)), ...);
    check(tensors);
    const auto handles = op(std::get<i>(arguments)...);
    for (size_t r = 0; r < kResults; ++r) stack[r] = to_word(handles[r]);
  }
};

}  // namespace moe_fp8

// CPU and GPU share one function, in which MOE_FP8_RUN chooses the loop or the kernel. torch calls AMD's GPUs CUDA.
#define MOE_FP8_BOXED(op) \
  moe_fp8::Boxed<&moe_fp8::op##_op, &moe_fp8::check_tensors<moe_fp8::first_row(#op)>>::call
#define MOE_FP8_REGISTER(op)                                                                \
  STABLE_TORCH_LIBRARY_IMPL(MOE_FP8_NAMESPACE, CPU, m) { m.impl(#op, MOE_FP8_BOXED(op)); }  \
  STABLE_TORCH_LIBRARY_IMPL(MOE_FP8_NAMESPACE, CUDA, m) { m.impl(#op, MOE_FP8_BOXED(op)); }
