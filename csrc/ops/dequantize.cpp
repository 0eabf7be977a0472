#include "kernels/dequantize.h"

#include "ops/dequantize.h"
#include "ops/leading.h"

namespace moe_fp8 {
namespace {

constexpr const char* kOp = "dequantize";

enum class Layout { kRowwise, kColwise, k1x128, k128x1, k128x128, k1x32, k1x32Blocked, k32x1Blocked };
constexpr const char* kLayouts[] = {"rowwise",  "colwise", "1x128",        "128x1",
                                    "128x128",  "1x32",    "1x32_blocked", "32x1_blocked"};

Layout layout_of(const std::string& name) {
  for (int i = 0; i < 8; ++i)
    if (name == kLayouts[i]) return Layout(i);
  fail(kOp, ": layout must be rowwise, colwise, 1x128, 128x1, 128x128, 1x32, 1x32_blocked or 32x1_blocked, got ", name);
}

void check_size_of_scale(const Tensor& scale, int64_t dim, int64_t size) {
  if (scale.sizes[dim] != size)
    fail(kOp, ": scale must have size ", size, " in dimension ", dim, ", got ", scale.sizes[dim]);
}
void check_sizes_of_scale(const Tensor& scale, const std::vector<int64_t>& sizes) {
  check_dim(kOp, "scale", scale, int64_t(sizes.size()));
  for (int64_t i = 0; i < scale.dim; ++i) check_size_of_scale(scale, i, sizes[i]);
}

// Everything that the layout says of the scales and the groups; sizes and strides of q are there.
void set_scales(DequantizeParams& p, Layout layout, const Tensor& q, const Tensor& scale) {
  const bool e8m0 = layout >= Layout::k1x32, blocked = layout >= Layout::k1x32Blocked;
  const int block = e8m0 ? kMxBlock : layout >= Layout::k1x128 ? kBlock : 0;
  const int64_t blocks = block ? ceil_div<int64_t>(p.K, block) : 1;
  const int64_t padded_rows = padded_scale_rows(p.rows), padded_columns = padded_scale_columns(blocks);
  if (scale.dtype != (e8m0 ? kE8M0 : kFloat32))
    fail(kOp, ": scale must be ", e8m0 ? "float8_e8m0fnu" : "float32", ", got ", dtype_name(scale.dtype));
  std::vector<int64_t> leading(q.sizes, q.sizes + q.dim - 1);
  const bool any_strides = layout >= Layout::k1x128 && layout <= Layout::k128x128;
  OperandScales& s = p.scale;
  s = {scale.data, 0, 0, 1, int(blocks), block};
  s.layout = blocked ? ScaleLayout::kBlocked : e8m0 ? ScaleLayout::kE8M0 : ScaleLayout::kFloat;
  switch (layout) {
    case Layout::k1x32: leading.push_back(blocks); [[fallthrough]];
    case Layout::kRowwise:
      check_sizes_of_scale(scale, leading);
      s.group_stride = p.rows * blocks;
      s.row_stride = blocks;
      break;
    case Layout::kColwise:
      check_sizes_of_scale(scale, {p.num_groups, p.rows});
      s.row_stride = 1;
      s.block_stride = p.rows;
      s.blocks = p.num_groups;
      break;
    case Layout::k128x1:  // as many blocks as the quantizer made room for
      check_dim(kOp, "scale", scale, 2);
      check_size_of_scale(scale, 0, p.rows);
      if (scale.sizes[1] < blocks)
        fail(kOp, ": scale must have at least ", blocks, " blocks in dimension 1, got ", scale.sizes[1]);
      check_size(kOp, "scale", scale.sizes[1], "blocks");
      s.blocks = int(scale.sizes[1]);
      s.row_stride = scale.strides[0];
      s.block_stride = scale.strides[1];
      break;
    case Layout::k1x128: case Layout::k128x128: {
      const bool squares = layout == Layout::k128x128;
      if (squares) check_sizes_of_scale(scale, {p.E, ceil_div<int64_t>(p.rows, kBlock), blocks});
      else check_sizes_of_scale(scale, {p.rows, blocks});
      if (squares) s.group_stride = scale.strides[0];
      s.row_stride = scale.strides[squares];
      s.block_stride = scale.strides[squares + 1];
      s.rows_log2 = squares ? 7 : 0;
      break;
    }
    case Layout::k1x32Blocked:
      s.group_stride = padded_rows * padded_columns;
      if (p.groups == Groups::kRows)
        check_sizes_of_scale(scale, {grouped_scale_rows(p.rows, p.num_groups), padded_columns});
      else if (q.dim == 3) check_sizes_of_scale(scale, {p.E, s.group_stride});
      else check_sizes_of_scale(scale, {padded_rows, padded_columns});
      break;
    case Layout::k32x1Blocked:
      check_sizes_of_scale(scale, {padded_rows, grouped_scale_columns(blocks, p.num_groups)});
      s.block_stride = padded_rows;
  }
  if (!any_strides) check_contiguous(kOp, "scale", scale);
  check_same_device(kOp, "scale", scale, "q", q);
}

template <class Out>
void dequantize_loop(const DequantizeParams& p) {
  const int64_t extent = p.groups == Groups::kNone ? p.K : p.groups == Groups::kRows ? p.rows : p.K;
  const std::vector<int> ends = safe_ends(p.offs, p.num_groups, extent);
  std::vector<int64_t> starts, scale_starts;  // of groups
  std::vector<Segment> segments;
  int64_t live_columns = p.K, start = 0, at = 0;
  for (size_t g = 0; g < ends.size(); start = ends[g++]) {
    starts.push_back(start);
    scale_starts.push_back(at);
    if (p.groups == Groups::kColumns)
      add_segments(segments, p.scale, start, ends[g], int(p.scale.block_size ? at / p.scale.block_size : g));
    at += round_up<int64_t>(ends[g] - start, kGroupScales);
  }
  if (p.groups == Groups::kColumns) live_columns = start;
  else add_segments(segments, p.scale, 0, p.K, 0);
  const std::array<float, 256> values = decoded(p.type);
  parallel(p.E * p.rows, p.E * p.rows * p.K, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t e = i / p.rows, row = i % p.rows;
      int64_t scale_row = row, columns = live_columns;
      if (p.groups == Groups::kRows) {
        const size_t g = std::upper_bound(ends.begin(), ends.end(), row) - ends.begin();
        if (g == ends.size()) columns = 0;
        else scale_row = row - starts[g] + scale_starts[g];
      }
      auto* out = static_cast<typename Out::Bits*>(p.out) + i * p.K;
      const uint8_t* q = p.q + e * p.group_stride + row * p.row_stride;
      if (columns) dequantize_row<Out>(values, p.scale, e, scale_row, segments, q, out);
      std::memset(out + columns, 0, (p.K - columns) * sizeof *out);
    }
  });
}

}  // namespace

Results<1> dequantize_op(const Tensor& input, const Tensor& scale, const std::string& name,
                         const std::optional<Tensor>& offs, std::optional<int32_t> out_dtype) {
  const Layout layout = layout_of(name);
  DequantizeParams p = {};
  p.type = fp8_type(kOp, "q", input.dtype);
  const bool any_dim = layout == Layout::kRowwise || layout == Layout::k1x32;
  if (any_dim && (input.dim < 1 || input.dim > 7)) fail(kOp, ": q must have 1 to 7 dimensions, got ", input.dim);
  if (layout == Layout::k1x32Blocked && input.dim != 2 && input.dim != 3)
    fail(kOp, ": q must have 2 or 3 dimensions, got ", input.dim);
  if (!any_dim && layout != Layout::k1x32Blocked) check_dim(kOp, "q", input, layout == Layout::k128x128 ? 3 : 2);
  check_inner_stride(kOp, "q", input);
  p.K = input.sizes[input.dim - 1];
  check_size(kOp, "q", p.K, "columns");
  if (!any_dim) check_size(kOp, "q", input.sizes[input.dim - 2], "rows");

  const bool along_columns = layout == Layout::kColwise || layout == Layout::k128x1 || layout == Layout::k32x1Blocked;
  if (along_columns && !offs) fail(kOp, ": offs must be given for layout ", name, ", got None");
  if (offs && !along_columns && (layout != Layout::k1x32Blocked || input.dim == 3))
    fail(kOp, ": offs must be None for layout ", name, " of ", input.dim, " dimensions, got a tensor");
  if (offs) {
    p.groups = along_columns ? Groups::kColumns : Groups::kRows;
    const int64_t extent = input.sizes[along_columns];
    check_offs(kOp, *offs, "q", input, extent, along_columns ? "columns" : "rows");
    p.offs = offs->as<int>();
    p.num_groups = int(offs->sizes[0]);
    check_size(kOp, "q", padded_extent(extent, p.num_groups, kGroupScales),
               along_columns ? "columns with padding" : "rows with padding");
  }

  std::optional<LeadingRows> rows;
  std::optional<Tensor> copy;
  if (any_dim) {
    rows = as_rows(input);
    if (!rows) rows = as_rows(copy.emplace(contiguous(input)));
    if (input.empty() && p.K > 0) rows = LeadingRows{1, 0, 0, 0};
  } else {
    const int64_t d = input.dim - 2;
    rows = LeadingRows{d ? input.sizes[0] : 1, input.sizes[d], d ? input.strides[0] : 0, input.strides[d]};
  }
  const Tensor& q = copy ? *copy : input;
  p.E = rows->outer;
  p.rows = rows->rows;
  p.group_stride = rows->outer_stride;
  p.row_stride = rows->row_stride;
  set_scales(p, layout, input, scale);
  p.out_type = InType::kBF16;
  if (out_dtype) {
    const auto* found = std::find(kInputDtypes, kInputDtypes + 3, *out_dtype);
    if (found == kInputDtypes + 3)
      fail(kOp, ": out_dtype must be bfloat16, float16 or float32, got ", dtype_name(*out_dtype));
    p.out_type = InType(found - kInputDtypes);
  }

  const Call call(kOp, "q", input);
  Handle out = call.empty(input.sizes, input.dim, kInputDtypes[int(p.out_type)]);
  p.q = q.as<uint8_t>();
  p.out = data(out);
#if defined(MOE_FP8_GPU)
  if (q.on_gpu()) {
    call.check(dequantize(p, call.stream()));
    return results(out);
  }
#endif
  if (!input.empty()) dispatch_in(p.out_type, [&](auto tag) { return dequantize_loop<decltype(tag)>(p), 0; });
  return results(out);
}

}  // namespace moe_fp8

MOE_FP8_REGISTER(dequantize)
