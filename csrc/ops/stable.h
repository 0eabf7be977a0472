// Names of libtorch that its stable interface does not promise for TORCH_TARGET_VERSION. No other file uses one.
//
//   torch::stable::detail::from, to
//       What: they convert C++ values to the 64-bit words of a boxed call, and back.
//       Public: TORCH_BOX(op), for an op of torch::stable::Tensor and std::string. A tensor then costs an allocated
//       control block, reference counts and, as a result, a second handle: about an eighth of an op's host time. A
//       str argument is copied, and headers of torch before 2.14 may leak the copy. For calls of torch's own ops
//       there is no public name: torch's headers recommend these two.
//       If they change: both are templates of headers. A build would fail, a binary that exists would not.
//   aoti_torch_get_current_cuda_stream
//       What: the stream of the current device. torch's headers declare it for builds with CUDA alone, and a torch for
//       the CPU lacks it. The extension must load there, too, so the symbol is weak.
//       Public: torch::stable::accelerator::getCurrentStream(i).nativeHandle(), from target 2.13 on. It allocates in
//       every call.
//   torch_exception_get_what_without_backtrace
//       What: the message of the last error behind the C interface. torch has it from 2.13 on: the symbol is weak.
//       Public: STABLE_TORCH_ERROR_CODE_CHECK. It appends a file and a line of C++ to the message, and prints a
//       backtrace to stderr. With target 2.13 the symbol needs no weak declaration.
#pragma once
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/library.h>

extern "C" __attribute__((weak)) const char* torch_exception_get_what_without_backtrace();
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void**);

namespace moe_fp8 {

// The word of a value. A handle within it is then the word's.
template <class T>
StableIValue to_word(const T& value) { return torch::stable::detail::from(value); }
// The value of a word. A handle within it is then the caller's.
template <class T>
T from_word(StableIValue word) { return torch::stable::detail::to<T>(word); }

// The message of the last error of torch's. Null: this torch cannot say it.
inline const char* torch_error() {
  return torch_exception_get_what_without_backtrace ? torch_exception_get_what_without_backtrace() : nullptr;
}

// Whether this torch knows GPUs; only then is there a stream.
inline bool torch_has_streams() { return aoti_torch_get_current_cuda_stream != nullptr; }
inline AOTITorchError torch_stream(int32_t device_index, void** stream) {
  return aoti_torch_get_current_cuda_stream(device_index, stream);
}

}  // namespace moe_fp8
