#include "kernels/swizzle_scales.h"

#include "ops/rows.h"

namespace moe_fp8 {
namespace {

// ---- checks --------------------------------------------------------------------------------------------------------
void check_byte(const char* op, const char* arg, const Tensor& t) {
  if (aoti_torch_dtype_element_size(t.dtype) != 1)
    fail(op, ": ", arg, " must have a dtype of 1 byte, got ", dtype_name(t.dtype));
}
void check_scales(const char* op, const Tensor& scale) {
  check_byte(op, "scale", scale);
  check_matrix(op, "scale", scale);
}
void check_blocked(const char* op, const Tensor& blocked, std::initializer_list<int64_t> sizes) {
  check_byte(op, "blocked", blocked);
  check_dim(op, "blocked", blocked, int64_t(sizes.size()));
  int64_t i = 0;
  for (const int64_t size : sizes) {
    if (blocked.sizes[i] != size)
      fail(op, ": blocked must have size ", size, " in dimension ", i, ", got ", blocked.sizes[i]);
    ++i;
  }
  check_contiguous(op, "blocked", blocked);
}
void check_counts(const char* op, int64_t rows, int64_t cols) {
  check_count(op, "rows", rows);
  check_count(op, "cols", cols);
}
// The blocked side of groups, `arg` being what its size follows from.
BlockedExtent check_groups(const char* op, const char* arg, const Tensor& t, const Tensor& offs, Groups groups,
                           int64_t R, int64_t C) {
  const bool of_rows = groups == Groups::kRows;
  check_offs(op, offs, arg, t, of_rows ? R : C, of_rows ? "rows" : "columns");
  const BlockedExtent extent = blocked_extent(groups, offs.sizes[0], R, C);
  check_size(op, arg, of_rows ? extent.rows : extent.columns, of_rows ? "rows with padding" : "columns with padding");
  return extent;
}

// ---- the CPU's loop ------------------------------------------------------------------------------------------------
struct RowBlock { int64_t plain, blocked, rows, columns; };  // up to 128 rows of a matrix; offsets of their bytes

// Of all matrices and groups; writes starts.
std::vector<RowBlock> row_blocks(const SwizzleScalesParams& p) {
  const BlockedExtent extent = blocked_extent(p.groups, p.E, p.R, p.C);
  std::vector<RowBlock> found;
  auto add = [&](int64_t plain, int64_t blocked, int64_t rows, int64_t columns) {
    for (int64_t r = 0; r < rows && columns > 0; r += kScaleRows) {
      found.push_back({plain + r * p.row_stride, blocked, std::min<int64_t>(kScaleRows, rows - r), columns});
      blocked += kScaleRows * padded_scale_columns(columns);
    }
  };
  if (p.groups == Groups::kNone) {
    for (int64_t e = 0; e < p.E; ++e)
      add(e * p.group_stride, e * padded_scale_rows(p.R) * extent.columns, p.R, p.C);
    return found;
  }
  const bool of_rows = p.groups == Groups::kRows;
  const std::vector<int> ends = safe_ends(p.offs, p.E, of_rows ? p.R : p.C);
  for (int64_t e = 0, start = 0, place = 0; e < p.E; start = ends[e++]) {
    const int64_t size = ends[e] - start;
    if (p.starts) p.starts[e] = int(place);
    if (of_rows) add(start * p.row_stride, place * extent.columns, size, p.C);
    else add(start, place * extent.rows, p.R, size);
    place += of_rows ? padded_scale_rows(size) : padded_scale_columns(size);
  }
  return found;
}

// move(a place of the blocked side, one of the other, bytes) for every run of columns that lie together in both.
template <class Move>
void for_each_run(const SwizzleScalesParams& p, Move move) {
  const std::vector<RowBlock> blocks = row_blocks(p);
  int64_t bytes = 0;
  for (const RowBlock& b : blocks) bytes += b.rows * b.columns;
  parallel(int64_t(blocks.size()), bytes, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const RowBlock b = blocks[i];
      const int64_t padded = padded_scale_columns(b.columns);
      for (int64_t r = 0; r < b.rows; ++r)
        for (int64_t c = 0; c < b.columns; c += kScaleColumns)
          move(b.blocked + blocked_offset(r, c, padded), b.plain + r * p.row_stride + c,
               std::min<int64_t>(kScaleColumns, b.columns - c));
    }
  });
}
void cpu_move(const SwizzleScalesParams& p, bool swizzle, int64_t out_bytes) {
  if (out_bytes) std::memset(p.to, 0, out_bytes);
  for_each_run(p, [&](int64_t blocked, int64_t plain, int64_t bytes) {
    uint8_t* to = p.to + (swizzle ? blocked : plain);
    const uint8_t* from = p.from + (swizzle ? plain : blocked);
    if (bytes == kScaleColumns) std::memcpy(to, from, kScaleColumns);  // of a size that is known: no call
    else std::memcpy(to, from, bytes);
  });
}

void move(const Call& call, const Tensor& from, bool swizzle, const SwizzleScalesParams& p) {
#if defined(MOE_FP8_GPU)
  if (from.on_gpu())
    return call.check(swizzle ? swizzle_scales(p, call.stream()) : unswizzle_scales(p, call.stream()));
#endif
  const BlockedExtent extent = blocked_extent(p.groups, p.E, p.R, p.C);
  const int64_t matrices = p.groups == Groups::kNone ? p.E : 1;
  cpu_move(p, swizzle, swizzle ? extent.rows * extent.columns : matrices * p.R * p.C);
}

// ---- what ops with and without groups share ------------------------------------------------------------------------
Results<2> swizzle_groups(const char* op, const Tensor& scale, const Tensor& offs, Groups groups) {
  check_scales(op, scale);
  const int64_t R = scale.sizes[0], C = scale.sizes[1];
  const BlockedExtent extent = check_groups(op, "scale", scale, offs, groups, R, C);
  const int64_t E = offs.sizes[0];
  const Call call(op, "scale", scale);
  Handle blocked = call.empty({extent.rows, extent.columns}, scale.dtype), starts = call.empty({E}, kInt32);
  move(call, scale, true, {scale.as<uint8_t>(), data<uint8_t>(blocked), offs.as<int>(), E ? data<int>(starts) : nullptr,
                           E, R, C, scale.strides[0], 0, groups});
  return results(blocked, starts);
}
Results<1> unswizzle_groups(const char* op, const Tensor& blocked, const Tensor& offs, int64_t rows, int64_t cols,
                            Groups groups) {
  check_counts(op, rows, cols);
  const BlockedExtent extent = check_groups(op, "blocked", blocked, offs, groups, rows, cols);
  check_blocked(op, blocked, {extent.rows, extent.columns});
  const Call call(op, "blocked", blocked);
  Handle scale = call.empty({rows, cols}, blocked.dtype);
  move(call, blocked, false, {blocked.as<uint8_t>(), data<uint8_t>(scale), offs.as<int>(), nullptr, offs.sizes[0],
                              rows, cols, cols, 0, groups});
  return results(scale);
}

}  // namespace

Results<1> swizzle_scales_2d_op(const Tensor& scale) {
  constexpr const char* kOp = "swizzle_scales_2d";
  check_scales(kOp, scale);
  const int64_t R = scale.sizes[0], C = scale.sizes[1];
  const Call call(kOp, "scale", scale);
  Handle blocked = call.empty({padded_scale_rows(R), padded_scale_columns(C)}, scale.dtype);
  move(call, scale, true, {scale.as<uint8_t>(), data<uint8_t>(blocked), nullptr, nullptr, 1, R, C, scale.strides[0], 0,
                           Groups::kNone});
  return results(blocked);
}
Results<1> swizzle_scales_3d_op(const Tensor& scale) {
  constexpr const char* kOp = "swizzle_scales_3d";
  check_byte(kOp, "scale", scale);
  check_dim(kOp, "scale", scale, 3);
  check_inner_stride(kOp, "scale", scale);
  check_size(kOp, "scale", scale.sizes[1], "rows an expert");
  check_size(kOp, "scale", scale.sizes[2], "columns");
  const int64_t E = scale.sizes[0], R = scale.sizes[1], C = scale.sizes[2];
  const Call call(kOp, "scale", scale);
  Handle blocked = call.empty({E, padded_scale_rows(R) * padded_scale_columns(C)}, scale.dtype);
  move(call, scale, true, {scale.as<uint8_t>(), data<uint8_t>(blocked), nullptr, nullptr, E, R, C, scale.strides[1],
                           scale.strides[0], Groups::kNone});
  return results(blocked);
}
Results<2> swizzle_scales_m_groups_op(const Tensor& scale, const Tensor& offs) {
  return swizzle_groups("swizzle_scales_m_groups", scale, offs, Groups::kRows);
}
Results<2> swizzle_scales_k_groups_op(const Tensor& scale, const Tensor& offs) {
  return swizzle_groups("swizzle_scales_k_groups", scale, offs, Groups::kColumns);
}

Results<1> unswizzle_scales_2d_op(const Tensor& blocked, int64_t rows, int64_t cols) {
  constexpr const char* kOp = "unswizzle_scales_2d";
  check_counts(kOp, rows, cols);
  check_blocked(kOp, blocked, {padded_scale_rows(rows), padded_scale_columns(cols)});
  const Call call(kOp, "blocked", blocked);
  Handle scale = call.empty({rows, cols}, blocked.dtype);
  move(call, blocked, false, {blocked.as<uint8_t>(), data<uint8_t>(scale), nullptr, nullptr, 1, rows, cols, cols, 0,
                              Groups::kNone});
  return results(scale);
}
Results<1> unswizzle_scales_3d_op(const Tensor& blocked, int64_t rows, int64_t cols) {
  constexpr const char* kOp = "unswizzle_scales_3d";
  check_counts(kOp, rows, cols);
  check_dim(kOp, "blocked", blocked, 2);
  const int64_t E = blocked.sizes[0];
  check_blocked(kOp, blocked, {E, padded_scale_rows(rows) * padded_scale_columns(cols)});
  const Call call(kOp, "blocked", blocked);
  Handle scale = call.empty({E, rows, cols}, blocked.dtype);
  move(call, blocked, false, {blocked.as<uint8_t>(), data<uint8_t>(scale), nullptr, nullptr, E, rows, cols, cols,
                              rows * cols, Groups::kNone});
  return results(scale);
}
Results<1> unswizzle_scales_m_groups_op(const Tensor& blocked, const Tensor& offs, int64_t rows, int64_t cols) {
  return unswizzle_groups("unswizzle_scales_m_groups", blocked, offs, rows, cols, Groups::kRows);
}
Results<1> unswizzle_scales_k_groups_op(const Tensor& blocked, const Tensor& offs, int64_t rows, int64_t cols) {
  return unswizzle_groups("unswizzle_scales_k_groups", blocked, offs, rows, cols, Groups::kColumns);
}

}  // namespace moe_fp8

MOE_FP8_REGISTER(swizzle_scales_2d)
MOE_FP8_REGISTER(swizzle_scales_3d)
MOE_FP8_REGISTER(swizzle_scales_m_groups)
MOE_FP8_REGISTER(swizzle_scales_k_groups)
MOE_FP8_REGISTER(unswizzle_scales_2d)
MOE_FP8_REGISTER(unswizzle_scales_3d)
MOE_FP8_REGISTER(unswizzle_scales_m_groups)
MOE_FP8_REGISTER(unswizzle_scales_k_groups)
