#include "kernels/token_groups.h"

#include "ops/rows.h"

namespace moe_fp8 {
namespace {

void check_starts(const char* op, const Tensor& starts, const Tensor& offs) {
  check_index(op, "padded_starts", starts, "offs", offs);
  const int64_t E = offs.sizes[0];
  if (starts.sizes[0] != E) fail(op, ": padded_starts must have the ", E, " entries of offs, got ", starts.sizes[0]);
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

// f(e, first row, size) for the groups that offs describe.
template <class F>
void for_each_group(const TokenGroupsParams& p, F f) {
  const std::vector<int> ends = safe_ends(p.offs, p.E, p.M);
  for (int64_t e = 0, start = 0; e < p.E; start = ends[e++]) f(e, start, ends[e] - start);
}

void cpu_pad_sources(const TokenGroupsParams& p) {
  std::fill_n(p.source, p.P, -1);
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
    for (int64_t i = 0; i < size && places[e] + i < places[e + 1]; ++i) p.source[places[e] + i] = int(start + i);
  });
}
void cpu_unpad_sources(const TokenGroupsParams& p) {
  std::fill_n(p.source, p.M, -1);
  for_each_group(p, [&](int64_t e, int64_t start, int64_t size) {
    for (int64_t i = 0; i < size; ++i) {
      const int64_t at = int64_t(p.starts[e]) + i;
      if (at >= 0 && at < p.P) p.source[start + i] = int(at);
    }
  });
}

// The rows of x in the other layout, `rows` of them.
enum class Way { kPad, kUnpad };
Handle move_groups(const Call& call, Way way, const Tensor& x, const Tensor& offs, TokenGroupsParams p) {
  const int64_t rows = way == Way::kPad ? p.P : p.M;
  Handle out = call.empty({rows, x.sizes[1]}, x.dtype), source = call.empty({rows}, kInt32);
  p.offs = offs.as<int>();
  p.E = offs.sizes[0];
  p.source = data<int>(source);
  auto find = [&] {
#if defined(MOE_FP8_GPU)
    if (x.on_gpu())
      return call.check(way == Way::kPad ? pad_sources(p, call.stream()) : unpad_sources(p, call.stream()));
#endif
    way == Way::kPad ? cpu_pad_sources(p) : cpu_unpad_sources(p);
  };
  find();
  copy_rows(call, x, out, RowIndex(p.source, x.sizes[0], 1), rows);
  return out;
}

}  // namespace

Results<3> pad_token_groups_op(const Tensor& x, const Tensor& offs, int64_t align) {
  constexpr const char* kOp = "pad_token_groups";
  check_rows(kOp, "x", x);
  const int64_t M = x.sizes[0];
  check_offs(kOp, offs, "x", x, M);
  const int64_t E = offs.sizes[0], P = check_align(kOp, align, "x", M, E);
  const Call call(kOp, "x", x);
  Handle padded_starts = call.empty({E}, kInt32), padded_offs = call.empty({E}, kInt32);
  TokenGroupsParams p = {};
  p.M = M;
  p.P = P;
  p.align = int(align);
  p.padded_starts = data<int>(padded_starts);
  p.padded_offs = data<int>(padded_offs);
  Handle x_padded = move_groups(call, Way::kPad, x, offs, p);
  return results(x_padded, padded_starts, padded_offs);
}

Results<1> pad_token_groups_to_op(const Tensor& x, const Tensor& offs, const Tensor& padded_starts,
                                  int64_t num_padded) {
  constexpr const char* kOp = "pad_token_groups_to";
  check_rows(kOp, "x", x);
  check_offs(kOp, offs, "x", x, x.sizes[0]);
  check_starts(kOp, padded_starts, offs);
  check_count(kOp, "num_padded", num_padded);
  validate_starts(kOp, padded_starts, offs, num_padded, true);
  const Call call(kOp, "x", x);
  TokenGroupsParams p = {};
  p.M = x.sizes[0];
  p.P = num_padded;
  p.align = 1;
  p.starts = padded_starts.as<int>();
  Handle x_padded = move_groups(call, Way::kPad, x, offs, p);
  return results(x_padded);
}

Results<1> unpad_token_groups_op(const Tensor& y, const Tensor& offs, const Tensor& padded_starts,
                                 int64_t num_tokens) {
  constexpr const char* kOp = "unpad_token_groups";
  check_rows(kOp, "y", y);
  check_count(kOp, "num_tokens", num_tokens);
  check_offs(kOp, offs, "y", y, num_tokens, "tokens");
  check_starts(kOp, padded_starts, offs);
  validate_starts(kOp, padded_starts, offs, y.sizes[0], false);
  const Call call(kOp, "y", y);
  TokenGroupsParams p = {};
  p.M = num_tokens;
  p.P = y.sizes[0];
  p.align = 1;
  p.starts = padded_starts.as<int>();
  Handle x = move_groups(call, Way::kUnpad, y, offs, p);
  return results(x);
}

}  // namespace moe_fp8

MOE_FP8_REGISTER(pad_token_groups)
MOE_FP8_REGISTER(pad_token_groups_to)
MOE_FP8_REGISTER(unpad_token_groups)
