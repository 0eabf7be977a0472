#include "tokens/token_groups.h"

#include "ops/rows.h"

namespace moe_fp8 {
namespace {

void check_starts(const char* op, const Tensor& starts, const Tensor& offs) {
  const int64_t E = offs.sizes[0];
  if (starts.sizes[0] != E)
    fail(op, ": padded_starts must have the ", E, " entries of offs, got ", starts.sizes[0]);
}

// Checks the contents of padded_starts, which waits for the device. Called after validate_offs. Groups that are written
// to must not overlap.
void validate_starts(const char* op, const Tensor& starts, const Tensor& offs, int64_t padded, bool written) {
  if (!validates()) return;
  const std::vector<int> first = contents(starts), ends = contents(offs);
  int64_t end = 0;
  for (size_t e = 0; e < first.size(); ++e) {
    if (written && first[e] >= 0 && first[e] < end)
      fail(op, ": padded_starts must leave every group its rows, got padded_starts[", e, "] = ", first[e],
           " where the group before ends at ", end);
    end = int64_t(first[e]) + ends[e] - (e ? ends[e - 1] : 0);
    if (first[e] < 0 || end > padded)
      fail(op, ": padded_starts must leave every group within the ", padded, " padded rows, got padded_starts[", e,
           "] = ", first[e]);
  }
}

enum class Direction { kPad, kUnpad };
// Moves the rows of x to the other layout. p lacks the source only.
Handle move_groups(const Call& call, Direction direction, const Tensor& x, TokenGroupsParams p) {
  const int64_t rows = direction == Direction::kPad ? p.P : p.M;
  Handle out = call.empty({rows, x.sizes[1]}, x.dtype);
  const bool copies = x.sizes[1] > 0;
  if (!copies && !p.padded_offs) return out;
  Handle source = call.empty({copies ? rows : 0}, kInt32);
  p.source = copies ? data<int>(source) : nullptr;
  if (direction == Direction::kPad) MOE_FP8_RUN(call, pad_sources, p);
  else MOE_FP8_RUN(call, unpad_sources, p);
  if (copies) gather_rows(call, x, out, RowIndex(p.source, x.sizes[0], 1), rows);
  return out;
}
Results<1> move_to_starts(const char* op, const char* arg, Direction direction, const Tensor& x, const Tensor& offs,
                          const Tensor& starts, int64_t tokens, int64_t padded) {
  validate_starts(op, starts, offs, padded, direction == Direction::kPad);
  const Call call(op, arg, x);
  Handle out = move_groups(call, direction, x, {offs.as<int>(), starts.as<int>(), nullptr, nullptr, nullptr,
                                                offs.sizes[0], tokens, padded, 1});
  return results(out);
}

}  // namespace

Results<3> pad_token_groups_op(const Tensor& x, const Tensor& offs, int64_t align) {
  constexpr const char* kOp = "pad_token_groups";
  const int64_t M = x.sizes[0];
  validate_offs(kOp, offs, M);
  check_align(kOp, align);
  const int64_t E = offs.sizes[0], P = check_extent(kOp, "x", M, E, align);
  const Call call(kOp, "x", x);
  Handle padded_starts = call.empty({E}, kInt32), padded_offs = call.empty({E}, kInt32);
  Handle x_padded = move_groups(call, Direction::kPad, x, {offs.as<int>(), nullptr, data<int>(padded_starts),
                                                           data<int>(padded_offs), nullptr, E, M, P, int(align)});
  return results(x_padded, padded_starts, padded_offs);
}

Results<1> pad_token_groups_to_op(const Tensor& x, const Tensor& offs, const Tensor& padded_starts,
                                  int64_t num_padded) {
  constexpr const char* kOp = "pad_token_groups_to";
  validate_offs(kOp, offs, x.sizes[0]);
  check_starts(kOp, padded_starts, offs);
  check_count(kOp, "num_padded", num_padded);
  return move_to_starts(kOp, "x", Direction::kPad, x, offs, padded_starts, x.sizes[0], num_padded);
}

Results<1> unpad_token_groups_op(const Tensor& y, const Tensor& offs, const Tensor& padded_starts,
                                 int64_t num_tokens) {
  constexpr const char* kOp = "unpad_token_groups";
  check_count(kOp, "num_tokens", num_tokens);
  validate_offs(kOp, offs, num_tokens, "tokens");
  check_starts(kOp, padded_starts, offs);
  return move_to_starts(kOp, "y", Direction::kUnpad, y, offs, padded_starts, num_tokens, y.sizes[0]);
}

}  // namespace moe_fp8

MOE_FP8_REGISTER(pad_token_groups)
MOE_FP8_REGISTER(pad_token_groups_to)
MOE_FP8_REGISTER(unpad_token_groups)
