#include "kernels/token_groups.h"

#include "ops/common.h"
#include "ops/cpu_loops.h"

namespace moe_fp8 {
namespace {

// Rows of any dtype of 1, 2 or 4 bytes; returns the bytes of an element.
int64_t check_rows(const char* op, const char* arg, const Tensor& x) {
  const int64_t bytes = int64_t(aoti_torch_dtype_element_size(x.dtype));
  if (bytes != 1 && bytes != 2 && bytes != 4)
    fail(op, ": ", arg, " must have a dtype of 1, 2 or 4 bytes, got ", dtype_name(x.dtype));
  check_dim(op, arg, x, 2);
  check_inner_stride(op, arg, x);
  check_size(op, arg, x.sizes[0], "rows");
  check_size(op, arg, x.sizes[1], "columns");
  return bytes;
}
void check_starts(const char* op, const Tensor& starts, const Tensor& offs) {
  check_dim(op, "padded_starts", starts, 1);
  if (starts.dtype != kInt32) fail(op, ": padded_starts must be int32, got ", dtype_name(starts.dtype));
  const int64_t E = offs.sizes[0];
  if (starts.sizes[0] != E) fail(op, ": padded_starts must have the ", E, " entries of offs, got ", starts.sizes[0]);
  if (E > 1 && starts.strides[0] != 1) fail(op, ": padded_starts must have stride 1, got stride ", starts.strides[0]);
  check_same_device(op, "padded_starts", starts, "offs", offs);
}
void check_count(const char* op, const char* arg, int64_t rows) {
  if (rows < 0 || rows > kMaxRows) fail(op, ": ", arg, " must be from 0 to ", kMaxRows, ", got ", rows);
}

// Contents; waits for the device. Called after check_offs. Places that are written to must not overlap.
void validate_starts(const char* op, const Tensor& starts, const Tensor& offs, int64_t padded, bool written) {
  if (!flag_is_set("MOE_FP8_VALIDATE")) return;
  const std::vector<int> of_starts = contents(starts), of_offs = contents(offs);
  int64_t end = 0;
  for (size_t e = 0; e < of_starts.size(); ++e) {
    if (written && of_starts[e] >= 0 && of_starts[e] < end)
      fail(op, ": padded_starts must leave every group its rows, got padded_starts[", e, "] = ", of_starts[e],
           " where the group before ends at ", end);
    end = int64_t(of_starts[e]) + of_offs[e] - (e ? of_offs[e - 1] : 0);
    if (of_starts[e] < 0 || end > padded)
      fail(op, ": padded_starts must leave every group within the ", padded, " padded rows, got padded_starts[", e,
           "] = ", of_starts[e]);
  }
}

// Row r of `to` is row source[r] of `from`, or zeros where that is -1.
void copy_rows(const CopyTokenGroupsParams& p, const std::vector<int64_t>& source) {
  const int64_t rows = int64_t(source.size());
  parallel(rows, rows * p.row_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      char* to = static_cast<char*>(p.to) + r * p.row_bytes;
      if (source[r] < 0) std::memset(to, 0, p.row_bytes);
      else std::memcpy(to, static_cast<const char*>(p.from) + source[r] * p.from_stride, p.row_bytes);
    }
  });
}

// f(e, first row, size) for the groups that offs describe.
template <class F>
void for_each_group(const CopyTokenGroupsParams& p, F f) {
  const std::vector<int> ends = safe_ends(p.offs, p.E, p.M);
  for (int64_t e = 0, start = 0; e < p.E; start = ends[e++]) f(e, start, ends[e] - start);
}

void cpu_pad(const CopyTokenGroupsParams& p) {
  std::vector<int64_t> source(p.P, -1);
  int64_t place = 0;
  std::vector<int64_t> places(p.E + 1, p.P);
  for_each_group(p, [&](int64_t e, int64_t, int64_t size) {
    if (p.starts) place = std::max<int64_t>(place, clamp_offset(p.starts[e], int(p.P)));
    places[e] = place;
    if (p.starts) return;
    p.padded_starts[e] = int(place);
    place += round_up<int64_t>(size, p.align);
    p.padded_offs[e] = int(place);
  });
  for_each_group(p, [&](int64_t e, int64_t start, int64_t size) {  // a group ends where the next one begins
    for (int64_t i = 0; i < size && places[e] + i < places[e + 1]; ++i) source[places[e] + i] = start + i;
  });
  copy_rows(p, source);
}
void cpu_unpad(const CopyTokenGroupsParams& p) {
  std::vector<int64_t> source(p.M, -1);
  for_each_group(p, [&](int64_t e, int64_t start, int64_t size) {
    for (int64_t i = 0; i < size; ++i) {
      const int64_t at = int64_t(p.starts[e]) + i;
      if (at >= 0 && at < p.P) source[start + i] = at;
    }
  });
  copy_rows(p, source);
}

CopyTokenGroupsParams params(const Tensor& from, int64_t bytes, const Handle& to, const Tensor& offs) {
  CopyTokenGroupsParams p = {};
  p.from = from.data;
  p.to = data(to);
  p.offs = offs.as<int>();
  p.E = offs.sizes[0];
  p.row_bytes = from.sizes[1] * bytes;
  p.from_stride = from.strides[0] * bytes;
  p.align = 1;
  return p;
}

void run_pad(const Call& call, const Tensor& x, const CopyTokenGroupsParams& p) {
#if defined(MOE_FP8_GPU)
  if (x.on_gpu()) return call.check(pad_token_groups(p, call.stream()));
#endif
  cpu_pad(p);
}

}  // namespace

Results<3> pad_token_groups_op(const Tensor& x, const Tensor& offs, int64_t align) {
  constexpr const char* kOp = "pad_token_groups";
  const int64_t bytes = check_rows(kOp, "x", x), M = x.sizes[0];
  check_offs(kOp, offs, "x", x, M);
  const int64_t E = offs.sizes[0], P = check_align(kOp, align, M, E);
  const Call call(kOp, "x", x);
  Handle x_padded = call.empty({P, x.sizes[1]}, x.dtype);
  Handle padded_starts = call.empty({E}, kInt32), padded_offs = call.empty({E}, kInt32);
  CopyTokenGroupsParams p = params(x, bytes, x_padded, offs);
  p.M = M;
  p.P = P;
  p.align = int(align);
  p.padded_starts = data<int>(padded_starts);
  p.padded_offs = data<int>(padded_offs);
  run_pad(call, x, p);
  return results(x_padded, padded_starts, padded_offs);
}

Results<1> pad_token_groups_to_op(const Tensor& x, const Tensor& offs, const Tensor& padded_starts,
                                  int64_t num_padded) {
  constexpr const char* kOp = "pad_token_groups_to";
  const int64_t bytes = check_rows(kOp, "x", x), M = x.sizes[0];
  check_offs(kOp, offs, "x", x, M);
  check_starts(kOp, padded_starts, offs);
  check_count(kOp, "num_padded", num_padded);
  validate_starts(kOp, padded_starts, offs, num_padded, true);
  const Call call(kOp, "x", x);
  Handle x_padded = call.empty({num_padded, x.sizes[1]}, x.dtype);
  CopyTokenGroupsParams p = params(x, bytes, x_padded, offs);
  p.M = M;
  p.P = num_padded;
  p.starts = padded_starts.as<int>();
  run_pad(call, x, p);
  return results(x_padded);
}

Results<1> unpad_token_groups_op(const Tensor& y, const Tensor& offs, const Tensor& padded_starts,
                                 int64_t num_tokens) {
  constexpr const char* kOp = "unpad_token_groups";
  const int64_t bytes = check_rows(kOp, "y", y);
  check_count(kOp, "num_tokens", num_tokens);
  check_offs(kOp, offs, "y", y, num_tokens, "tokens");
  check_starts(kOp, padded_starts, offs);
  validate_starts(kOp, padded_starts, offs, y.sizes[0], false);
  const Call call(kOp, "y", y);
  Handle x = call.empty({num_tokens, y.sizes[1]}, y.dtype);
  CopyTokenGroupsParams p = params(y, bytes, x, offs);
  p.M = num_tokens;
  p.P = y.sizes[0];
  p.starts = padded_starts.as<int>();
#if defined(MOE_FP8_GPU)
  if (y.on_gpu()) {
    call.check(unpad_token_groups(p, call.stream()));
    return results(x);
  }
#endif
  cpu_unpad(p);
  return results(x);
}

}  // namespace moe_fp8

MOE_FP8_REGISTER(pad_token_groups)
MOE_FP8_REGISTER(pad_token_groups_to)
MOE_FP8_REGISTER(unpad_token_groups)
