// What the ops of the MXFP8 recipe share: the CPU's loops, and one function for tokens as they lie and by index.
#pragma once
#include "kernels/quantize_mx.h"
#include "numerics/scale_layout.h"
#include "ops/common.h"
#include "ops/cpu_loops.h"

namespace moe_fp8 {

// A matrix of scales; `stride`: its columns, of a blocked one with their padding.
struct ScaleMatrix {
  uint8_t* data;
  int64_t stride;
  bool blocked;
  uint8_t& at(int64_t row, int64_t column) const {
    return data[blocked ? blocked_offset(row, column, stride) : row * stride + column];
  }
};

// store(row, block, scale) of every row's blocks.
template <class In, Fp8Type kOut, class RowOf, class StoreScale>
void loop_1x32(RowOf row_of, int64_t rows, int64_t K, bool floor, uint8_t* q, StoreScale store) {
  parallel(rows, rows * K, [=](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      for (int64_t k = 0; k < K; k += kMxBlock) {
        const int64_t n = std::min<int64_t>(kMxBlock, K - k);
        store(r, k / kMxBlock, quantize_row<In, kOut, ScaleE8M0>(row_of(r) + k, n, floor, q + r * K + k).stored());
      }
  });
}

// Blocks of 32 rows of many groups, each with its group's matrix of scales and its column there.
struct MxColumns {
  struct Place {
    ScaleMatrix scale_t;
    int64_t column;
  };
  std::vector<GroupRows> blocks;  // scale_t: number of its place
  std::vector<Place> places;

  void add(const GroupRows& g, ScaleMatrix scale_t) {
    for (int64_t r = 0; r < g.rows; r += kMxBlock) {
      blocks.push_back({g.first + r, std::min<int64_t>(kMxBlock, g.rows - r), g.q_t + r, int64_t(places.size())});
      places.push_back({scale_t, r / kMxBlock});
    }
  }
};
template <class In, Fp8Type kOut, class RowOf>
void loop_32x1(RowOf row_of, const MxColumns& columns, int64_t K, bool floor, uint8_t* q_t, int64_t positions) {
  transposed_loop<In, kOut, ScaleE8M0>(row_of, columns.blocks, K, floor, q_t, positions,
                                       [&](const GroupRows& block, int64_t k, uint8_t scale) {
                                         const MxColumns::Place& place = columns.places[block.scale_t];
                                         place.scale_t.at(k, place.column) = scale;
                                       });
}

inline bool is_floor(const char* op, const std::string& scaling) {
  if (scaling != "rceil" && scaling != "floor") fail(op, ": scaling must be 'rceil' or 'floor', got '", scaling, "'");
  return scaling == "floor";
}
inline bool is_blocked(const char* op, const std::string& layout) {
  if (layout != "rowmajor" && layout != "blocked")
    fail(op, ": layout must be 'rowmajor' or 'blocked', got '", layout, "'");
  return layout == "blocked";
}
[[noreturn]] inline void fail_groups_of_rowmajor(const char* op) {
  fail(op, ": offs must be None with layout 'rowmajor', which knows no groups, got a tensor");
}

// Parameters of `rows` rows of outputs from tokens x, which have been checked.
inline QuantizeMxParams mx_tokens(const char* op, const Tensor& x, InType in, int64_t rows, const std::string& scaling,
                                  const std::string& layout) {
  QuantizeMxParams p = {};
  p.in = in;
  p.x = x.data;
  p.rows = rows;
  p.K = x.sizes[1];
  p.row_stride = x.strides[0];
  p.align = kMxBlock;
  p.floor = is_floor(op, scaling);
  p.blocked = is_blocked(op, layout);
  return p;
}
// Those of groups of the rows; `arg` has them.
inline void mx_groups(const char* op, QuantizeMxParams& p, const char* arg, const Tensor& x, const Tensor& offs,
                      int64_t align) {
  if (align != 32 && align != 64 && align != 128) fail(op, ": align must be 32, 64 or 128, got ", align);
  check_offs(op, offs, "x", x, p.rows, std::strcmp(arg, "x") ? arg : "rows");
  p.offs = offs.as<int>();
  p.E = offs.sizes[0];
  p.positions = check_align(op, align, arg, p.rows, p.E);
  check_align(op, kScaleRows, arg, p.rows, p.E);
  p.align = int(align);
}

// The outputs of tokens' rows, columns or both, in the order in which ops return them.
struct MxOutputs {
  Handle q, scale, q_t, scale_t, padded_offs;
};
// p: x, offs, E, rows (those of the outputs), K, row_stride, positions, align, blocked, floor, in, out and index.
// grouped: blocked scales of rows go by groups. rows_of(In) gives the CPU's rows.
template <class RowsOf>
MxOutputs quantize_mx_tokens(const Call& call, QuantizeMxParams& p, bool rowwise, bool columnwise, bool grouped,
                             bool on_gpu, RowsOf rows_of) {
  const int64_t M = p.rows, K = p.K, blocks = ceil_div<int64_t>(K, kMxBlock), blocks_t = p.positions / kMxBlock;
  const int64_t columns = p.blocked ? padded_scale_columns(blocks) : blocks;
  const int64_t rows = !p.blocked ? M : grouped ? grouped_scale_rows(M, p.E) : padded_scale_rows(M);
  const int64_t rows_t = p.blocked ? padded_scale_rows(K) : K;
  const int64_t columns_t = p.blocked ? grouped_scale_columns(blocks_t, p.E) : blocks_t;
  MxOutputs o;
  if (rowwise) {
    p.q = data<uint8_t>(o.q = call.empty({M, K}, p.out));
    p.scale = data<uint8_t>(o.scale = call.empty({rows, columns}, kE8M0));
  }
  if (columnwise) {
    p.q_t = data<uint8_t>(o.q_t = call.empty({K, p.positions}, p.out));
    p.scale_t = data<uint8_t>(o.scale_t = call.empty({rows_t, columns_t}, kE8M0));
    p.padded_offs = data<int>(o.padded_offs = call.empty({p.E}, kInt32));
  }
#if defined(MOE_FP8_GPU)
  if (on_gpu) {
    Handle places;
    p.by_groups = p.blocked && grouped;
    if (!columnwise && p.by_groups) p.places = data<int>(places = call.empty({M}, kInt32));
    auto launch = !columnwise ? quantize_mx_1x32 : !rowwise ? quantize_mx_32x1 : quantize_mx_1x32_32x1;
    call.check(launch(p, call.stream()));
    return o;
  }
#endif
  std::vector<int> padded(p.E);
  const auto groups = token_groups(p.offs, p.E, M, p.align, K, columnwise ? p.padded_offs : padded.data());
  if (rowwise) std::memset(p.scale, 0, rows * columns);
  if (columnwise) {
    std::memset(p.q_t, 0, K * p.positions);
    std::memset(p.scale_t, 0, rows_t * columns_t);
  }
  const ScaleMatrix scale = {p.scale, columns, p.blocked};
  std::vector<int64_t> places(rowwise ? M : 0, -1);  // of rows among the scales
  MxColumns of_groups;
  int64_t at = 0, at_t = 0;
  for (const GroupRows& g : groups) {
    if (rowwise && grouped && p.blocked)
      for (int64_t r = 0; r < g.rows; ++r) places[g.first + r] = at + r;
    const int64_t columns_of_group = padded_scale_columns(ceil_div<int64_t>(g.rows, kMxBlock));
    if (columnwise)
      of_groups.add(g, p.blocked ? ScaleMatrix{p.scale_t + at_t * rows_t, columns_of_group, true}
                                 : ScaleMatrix{p.scale_t + g.q_t / kMxBlock, columns_t, false});
    at += padded_scale_rows(g.rows);
    at_t += columns_of_group;
  }
  if (rowwise && !(grouped && p.blocked))
    for (int64_t r = 0; r < M; ++r) places[r] = r;
  dispatch(p.in, p.out, [&](auto in_tag, auto out_tag) {
    using In = decltype(in_tag);
    constexpr Fp8Type kOut = decltype(out_tag)::value;
    const auto row_of = rows_of(in_tag);
    const int64_t* place = places.data();
    if (rowwise)
      loop_1x32<In, kOut>(row_of, M, K, p.floor, p.q, [=](int64_t row, int64_t block, uint8_t e) {
        if (place[row] >= 0) scale.at(place[row], block) = e;
      });
    if (columnwise) loop_32x1<In, kOut>(row_of, of_groups, K, p.floor, p.q_t, p.positions);
    return 0;
  });
  return o;
}

}  // namespace moe_fp8
