// Checks of arguments. Every error names the op, the argument, the expectation and the given value.
#pragma once
#include <torch/csrc/stable/device.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "numerics/format.h"
#include "ops/arguments.h"
#include "ops/call.h"

namespace moe_fp8 {

// ---- one argument, by its row of the table of arguments.h ----------------------------------------------------------
template <size_t n>
bool is_one_of(const int32_t (&dtypes)[n], int32_t dtype) {
  return std::find(dtypes, dtypes + n, dtype) != dtypes + n;
}
constexpr const char* kAnInputDtype = "bfloat16, float16 or float32";
constexpr const char* kAnFp8Dtype = "float8_e4m3fn, float8_e5m2, float8_e4m3fnuz or float8_e5m2fnuz";
inline void check_dtype(Name arg, int32_t dtype, bool holds, const char* verb, std::string_view wanted) {
  if (!holds) fail(arg.op, ": ", arg.arg, " must ", verb, " ", wanted, ", got ", dtype_name(dtype));
}
inline void check_dtype(Name arg, int32_t dtype, int32_t wanted) {
  if (dtype != wanted) check_dtype(arg, dtype, false, "be", dtype_name(wanted).substr(6));
}
// Checks the dtype of a tensor, or an option that is a dtype.
inline void check_dtypes(Name arg, Dtypes dtypes, int32_t dtype) {
  const auto bytes = [&] { return element_size(dtype); };
  switch (dtypes) {
    case Dtypes::kInput: return check_dtype(arg, dtype, is_one_of(kInputDtypes, dtype), "be", kAnInputDtype);
    case Dtypes::kFp8: return check_dtype(arg, dtype, is_one_of(kFp8Dtypes, dtype), "be", kAnFp8Dtype);
    case Dtypes::kFloat32: return check_dtype(arg, dtype, kFloat32);
    case Dtypes::kInt32: return check_dtype(arg, dtype, kInt32);
    case Dtypes::kInts: return check_dtype(arg, dtype, dtype == kInt32 || dtype == kInt64, "be", "int32 or int64");
    case Dtypes::kByte: return check_dtype(arg, dtype, bytes() == 1, "have", "a dtype of 1 byte");
    case Dtypes::kMovable:
      return check_dtype(arg, dtype, bytes() == 1 || bytes() == 2 || bytes() == 4, "have",
                         "a dtype of 1, 2 or 4 bytes");
    case Dtypes::kProduct:
      return check_dtype(arg, dtype, dtype == kBFloat16 || dtype == kFloat32, "be", "bfloat16 or float32");
    case Dtypes::kBFloat16: return check_dtype(arg, dtype, kBFloat16);
    case Dtypes::kScale: case Dtypes::kScores: case Dtypes::kGates: case Dtypes::kTokens:
      return;  // depends on other arguments
  }
}
inline void check_dims(Name arg, const Tensor& t, int min, int max) {
  if (t.dim >= min && t.dim <= max) return;
  const std::string range = min == max       ? std::to_string(min)
                            : min + 1 == max ? std::to_string(min) + " or " + std::to_string(max)
                                                : std::to_string(min) + " to " + std::to_string(max);
  fail(arg.op, ": ", arg.arg, " must have ", range, " dimensions, got ", t.dim);
}
inline void check_strides(Name arg, Strides strides, const Tensor& t) {
  if (strides == Strides::kAny || t.empty()) return;
  if (strides == Strides::kContiguous) {
    for (int64_t d = t.dim - 1, stride = 1; d >= 0; stride *= t.sizes[d--])
      if (t.strides[d] != stride && t.sizes[d] > 1)
        fail(arg.op, ": ", arg.arg, " must be contiguous, got stride ", t.strides[d], " in dimension ", d);
    return;
  }
  const int64_t d = t.dim - (strides == Strides::kInner ? 1 : 2);
  if (t.strides[d] == 1 || t.sizes[d] == 1) return;
  if (strides == Strides::kInner)
    fail(arg.op, ": ", arg.arg, " must have stride 1 in its last dimension, got stride ", t.strides[d]);
  fail(arg.op, ": ", arg.arg, " must have stride 1 in dimension ", d, " (the summed one), got stride ", t.strides[d]);
}
inline void check_limit(const char* op, const char* arg, int64_t size, const char* what, int64_t max = kMaxRows) {
  if (size > max) fail(op, ": ", arg, " must have at most ", max, " ", what, ", got ", size);
}
inline void check(const Argument& arg, const Tensor& t) {
  if (!t.defined) fail(arg.op, ": ", arg.name, " must be a tensor, got None");
  check_dtypes(arg, arg.dtypes, t.dtype);
  check_dims(arg, t, arg.min_dims, arg.max_dims);
  check_strides(arg, arg.strides, t);
  for (const SizeLimit& limit : arg.limits) {
    if (limit.what == nullptr) break;
    const int64_t size = limit.dim == SizeLimit::kSlots ? product(t.sizes, t.dim) : t.sizes[t.dim + limit.dim];
    check_limit(arg.op, arg.name, size, limit.what, limit.max);
  }
}
// Checks an argument against `like`, which the table names.
inline void check_like(const Argument& arg, const Tensor& t, const Tensor& like) {
  if (arg.dtypes == Dtypes::kScores && t.dtype != kFloat32 && t.dtype != like.dtype)
    fail(arg.op, ": ", arg.name, " must be float32 or, like ", arg.like, ", ", dtype_name(like.dtype), ", got ",
         dtype_name(t.dtype));
  if (t.device_type != like.device_type || (like.on_gpu() && t.device_index != like.device_index))
    fail(arg.op, ": ", arg.name, " must be on the device of ", arg.like, ", ", device_name(like), ", got ",
         device_name(t));
}
// Checks the tensors of a call, and first the one that sets the device. kRow: the row of the op's first tensor.
template <int kRow>
void check_tensors(const GivenTensors& given) {
  const Argument* rows = &arguments::kTable[kRow];
  for (const bool sets_device : {true, false})
    for (int i = 0; i < given.count; ++i) {
      const Argument& arg = rows[i];
      if (given.at[i] == nullptr || sets_device != (arg.like == nullptr)) continue;
      check(arg, *given.at[i]);
      for (int j = 0; !sets_device && j < given.count; ++j)
        if (std::strcmp(rows[j].name, arg.like) == 0) check_like(arg, *given.at[i], *given.at[j]);
    }
}

// ---- an argument that depends on others ----------------------------------------------------------------------------
inline void check_size(Name arg, const Tensor& t, int64_t dim, int64_t size) {
  if (t.sizes[dim] != size)
    fail(arg.op, ": ", arg.arg, " must have size ", size, " in dimension ", dim, ", got ", t.sizes[dim]);
}
inline void check_sizes(Name arg, const Tensor& t, const int64_t* sizes, int64_t dims) {
  check_dims(arg, t, int(dims), int(dims));
  for (int64_t d = 0; d < dims; ++d) check_size(arg, t, d, sizes[d]);
}
inline void check_sizes(Name arg, const Tensor& t, std::initializer_list<int64_t> sizes) {
  check_sizes(arg, t, sizes.begin(), int64_t(sizes.size()));
}
// Scales of a format and shape. They must be contiguous, unless the format's scales are column-major.
inline void check_scales(Name arg, const Tensor& t, const Format& f, const int64_t* sizes, int64_t dims) {
  check_dtype(arg, t.dtype, scale_dtype(f.scale_type));
  check_sizes(arg, t, sizes, dims);
  if (f.order != ScaleOrder::kColumnMajor) check_strides(arg, Strides::kContiguous, t);
}
inline void check_dtype_of_like(Name arg, const Tensor& t, const Tensor& like) {
  if (t.dtype != like.dtype)
    fail(arg.op, ": ", arg.arg, " must be, like ", argument(arg).like, ", ", dtype_name(like.dtype), ", got ",
         dtype_name(t.dtype));
}
// Checks that two arguments are given together, or neither.
inline void check_both_or_none(const char* op, const char* first, bool has_first, const char* second, bool has_second) {
  if (has_first != has_second)
    fail(op, ": ", has_first ? second : first, " must be given with ", has_first ? first : second, ", got None");
}

// ---- types of checked dtypes ---------------------------------------------------------------------------------------
inline InType in_type(int32_t dtype) {
  return InType(std::find(kInputDtypes, kInputDtypes + 3, dtype) - kInputDtypes);
}
inline InType in_type(const Tensor& x) { return in_type(x.dtype); }
inline Fp8Type fp8_type(int32_t dtype) { return Fp8Type(std::find(kFp8Dtypes, kFp8Dtypes + 4, dtype) - kFp8Dtypes); }
inline Fp8Type fp8_type(const Tensor& q) { return fp8_type(q.dtype); }

// ---- options ------------------------------------------------------------------------------------------------------
inline void check_range(const char* op, const char* arg, int64_t value, int64_t min, int64_t max) {
  if (value < min || value > max) fail(op, ": ", arg, " must be from ", min, " to ", max, ", got ", value);
}
inline void check_count(const char* op, const char* arg, int64_t count) { check_range(op, arg, count, 0, kMaxRows); }
// The number of the choice that is called `name`. name_of(i) names choice i. If choices depend on a format, the error
// names it.
template <class NameOf>
int check_choice(const char* op, const char* arg, std::string_view name, int choices, NameOf name_of,
                 const Format* format = nullptr) {
  for (int i = 0; i < choices; ++i)
    if (name == name_of(i)) return i;
  std::string names;
  for (int i = 0; i < choices; ++i)
    names += (i == 0 ? "'" : i + 1 < choices ? ", '" : " or '") + std::string(name_of(i)) + "'";
  if (format) names += " with format '" + std::string(format->name) + "'";
  fail(op, ": ", arg, " must be ", names, ", got '", name, "'");
}
template <size_t n>
int check_choice(const char* op, const char* arg, std::string_view name, const char* const (&names)[n]) {
  return check_choice(op, arg, name, int(n), [&](int i) { return names[i]; });
}
inline FormatId check_format(const char* op, std::string_view name) {
  return FormatId(check_choice(op, "format", name, kNumFormats, [](int i) { return kFormats[i].name; }));
}
inline Rounding check_rounding(const char* op, const Format& f, std::optional<std::string_view> name) {
  if (!name) return f.roundings[0];
  const auto name_of = [&](int i) { return kRoundingNames[int(f.roundings[i])]; };
  return f.roundings[check_choice(op, "rounding", *name, 2, name_of, &f)];
}
inline Fp8Type check_fp8(const Call& call, const char* op, std::optional<int32_t> dtype, const char* arg = "dtype") {
  if (!dtype) return call.default_fp8();
  check_dtypes({op, arg}, Dtypes::kFp8, *dtype);
  return fp8_type(*dtype);
}
inline void check_align(const char* op, int64_t align, int min = 1, int max = kMaxAlign) {
  if (align < min || align > max || (align & (align - 1)) != 0)
    fail(op, ": align must be a power of two from ", min, " to ", max, ", got ", align);
}
// The padded extent P of `rows` rows of `arg` in groups of `experts` experts.
inline int64_t check_extent(const char* op, const char* arg, int64_t rows, int64_t experts, int64_t align,
                            const char* what = "rows with padding") {
  const int64_t extent = padded_extent(rows, experts, align);
  check_limit(op, arg, extent, what);
  return extent;
}

// ---- contents, if they are validated -------------------------------------------------------------------------------
// How many contexts of moe_fp8_ext.validate() are open. One count serves all threads, because backward runs in threads
// of autograd.
inline std::atomic<int> open_validations{0};
inline bool validates() {
  return open_validations.load(std::memory_order_relaxed) > 0 || flag_is_set("MOE_FP8_VALIDATE");
}
// The integers of t, in logical order. Waits for the device.
template <class T = int>
std::vector<T> contents(const Tensor& t) {
  const torch::stable::Device cpu("cpu");
  const auto on_cpu = torch::stable::contiguous(torch::stable::to(stable_tensor(t.handle), cpu));
  const T* first = static_cast<const T*>(on_cpu.const_data_ptr());
  return {first, first + on_cpu.numel()};
}
// Checks that offs are ends of groups that divide `limit` rows, or other units.
inline void validate_offs(const char* op, const Tensor& offs, int64_t limit, const char* unit = "rows") {
  if (!validates()) return;
  const std::vector<int> o = contents(offs);
  for (int64_t e = 0, previous = 0; e < offs.sizes[0]; previous = o[e++]) {
    if (o[e] < previous)
      fail(op, ": offs must be non-decreasing from 0, got offs[", e, "] = ", o[e], " after ", previous);
    if (o[e] > limit)
      fail(op, ": offs must not exceed the ", limit, " ", unit, " of ", argument({op, "offs"}).like, ", got offs[", e,
           "] = ", o[e]);
  }
}
// The integers of t. Never null, because a null pointer in parameters means that there are no groups, or no index.
inline const int* ints(const Tensor& t) {
  static const int kNone[1] = {};
  return t.empty() ? kNone : t.as<int>();
}
// Checks the caller's promise that all ends are multiples of align.
inline void validate_aligned(const char* op, const Tensor& offs, int64_t align) {
  if (align == 1 || !validates()) return;
  const std::vector<int> ends = contents(offs);
  for (size_t e = 0; e < ends.size(); ++e)
    if (ends[e] % align != 0)
      fail(op, ": offs must be multiples of align, ", align, ", got offs[", e, "] = ", ends[e]);
}
// Checks that every index is -1 or in [0, limit).
inline void validate_range(Name arg, const std::vector<int>& at, int64_t limit, const char* of) {
  for (size_t p = 0; p < at.size(); ++p)
    if (at[p] < -1 || at[p] >= limit)
      fail(arg.op, ": ", arg.arg, " must be -1 or one of the ", limit, " ", of, ", got ", at[p], " in place ", p);
}
inline void validate_range(Name arg, const Tensor& indices, int64_t limit, const char* of) {
  if (validates()) validate_range(arg, contents(indices), limit, of);
}
// Checks that every id is -1 or one of E experts.
template <class Id>
void validate_ids_as(Name arg, const Tensor& ids, int64_t E) {
  const std::vector<Id> all = contents<Id>(ids);
  for (size_t slot = 0; slot < all.size(); ++slot)
    if (all[slot] < -1 || all[slot] >= E)
      fail(arg.op, ": ", arg.arg, " must be -1 or from 0 to ", E - 1, ", got ", all[slot], " in slot ", slot);
}
inline void validate_ids(Name arg, const Tensor& ids, int64_t E) {
  if (!validates()) return;
  (ids.dtype == kInt64 ? validate_ids_as<int64_t> : validate_ids_as<int>)(arg, ids, E);
}
// Checks that no index stands twice, where one of its places would be lost.
inline void validate_distinct(Name arg, const Tensor& indices) {
  if (!validates()) return;
  std::vector<int> at = contents(indices);
  std::sort(at.begin(), at.end());
  for (size_t p = 1; p < at.size(); ++p)
    if (at[p] >= 0 && at[p] == at[p - 1]) fail(arg.op, ": ", arg.arg, " must be distinct, got ", at[p], " twice");
}

// ---- rows taken by index -------------------------------------------------------------------------------------------
// Indices of slots: `rows` rows have top_k slots each.
inline RowIndex check_indices(const char* op, const Tensor& indices, int64_t rows, int64_t top_k) {
  if (top_k < 1) fail(op, ": top_k must be at least 1, got ", top_k);
  if (top_k > kMaxRows || rows * top_k > kMaxRows)
    fail(op, ": top_k must give at most ", kMaxRows, " slots to ", rows, " rows, got ", top_k);
  validate_range({op, "indices"}, indices, rows * top_k, "slots");
  return RowIndex(ints(indices), rows, top_k);
}

// The rows of a call: tokens of x by index, or the rows of x themselves.
struct SortedRows {
  RowIndex source;  // source.at is null without indices
  int64_t count, slots;
};
inline SortedRows check_rows(const char* op, const Tensor& x, const std::optional<Tensor>& indices,
                             std::optional<int64_t> top_k) {
  check_both_or_none(op, "indices", indices.has_value(), "top_k", top_k.has_value());
  if (!indices) return {{}, x.sizes[0], x.sizes[0]};
  return {check_indices(op, *indices, x.sizes[0], *top_k), indices->sizes[0], x.sizes[0] * *top_k};
}

}  // namespace moe_fp8
