// The quantizers take the same steps with the same numerics as the kernels. Their loops are written so that compilers
// vectorize them for any x86-64 or Arm CPU.
#include "quantize/quantize.h"

#include "cpu/groups.h"
#include "cpu/parallel.h"
#include "cpu/quantize_parts.h"
#include "numerics/dispatch.h"
#include "quantize/scale_shapes.h"

namespace moe_fp8 {
namespace {

// ---- along rows ----------------------------------------------------------------------------------------------------
// Maps rows of x to rows of blocked scales, where every group of rows is a matrix.
class ScaleRows {
 public:
  ScaleRows(const int* offs, int64_t E, int64_t rows) : grouped_(offs != nullptr) {
    if (!grouped_) return;
    ends_ = safe_ends(offs, E, rows);
    int64_t scale_start = 0;
    for_each_group(ends_, [&](int64_t, int64_t start, int64_t size) {
      shift_.push_back(scale_start - start);
      scale_start += padded_scale_rows(size);
    });
  }
  // The row of scales of row r, or -1 if r is in no group. g: the group of the previous call, 0 at first; r never
  // falls.
  int64_t row_of(int64_t r, size_t& g) const {
    if (!grouped_) return r;
    while (g < ends_.size() && r >= ends_[g]) ++g;
    return g < ends_.size() ? r + shift_[g] : -1;
  }

 private:
  bool grouped_;
  std::vector<int> ends_;
  std::vector<int64_t> shift_;
};

template <class In, Fp8Type kOut, class Scale>
void along_rows(const QuantizeParams& p, const Rows<typename In::Bits>& row_of, bool second) {
  const Format& f = format_of(p.format);
  auto* scale = static_cast<typename Scale::Stored*>(p.scale);
  const int64_t K = p.K, rows = rows_of(p), blocks = f.blocks(K);
  if (f.block == 0) {
    return parallel(rows, rows * std::max<int64_t>(K, 1), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const auto* x = p.weight ? row_of(i / p.rows, i % p.rows) : row_of(0, i);
        scale[i] = quantize_row<In, kOut, Scale>(x, K, second, p.q + i * K).stored();
      }
    });
  }
  if (K == 0) return;
  const ScaleRows scale_rows(f.blocked() && !p.weight ? p.offs : nullptr, p.E, p.rows);
  const int64_t columns = padded_scale_columns(blocks), expert_bytes = padded_scale_rows(p.rows) * columns;
  const bool column_major = f.order == ScaleOrder::kColumnMajor;
  const int64_t row_stride = column_major ? 1 : blocks, block_stride = column_major ? scale_stride(rows) : 1;
  parallel(rows, rows * K, [&](int64_t begin, int64_t end) {
    size_t g = 0;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t e = p.weight ? i / p.rows : 0, r = p.weight ? i % p.rows : i;
      const auto* x = row_of(e, r);
      const int64_t scale_row = f.blocked() ? scale_rows.row_of(r, g) : i;
      for (int64_t b = 0, k = 0; b < blocks; ++b, k += f.block) {
        const int64_t n = std::min<int64_t>(f.block, K - k);
        const auto s = quantize_row<In, kOut, Scale>(x + k, n, second, p.q + i * K + k).stored();
        if (!f.blocked()) scale[scale_row * row_stride + b * block_stride] = s;
        else if (scale_row >= 0) scale[e * expert_bytes + blocked_offset(scale_row, b, columns)] = s;
      }
    }
  });
}

// ---- along tokens: panels of 64 columns -----------------------------------------------------------------------------
// Returns the multipliers of columns over the batch, and stores their scales for every group.
template <class In, Fp8Type kOut>
std::vector<float> scale_batch(const QuantizeParams& p, const Rows<typename In::Bits>& row_of, bool second) {
  const int64_t rows = safe_ends(p.offs, p.E, p.rows).back();
  std::vector<float> m(p.K);
  parallel(ceil_div<int64_t>(p.K, kPanel), rows * p.K, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin * kPanel; k < std::min(end * kPanel, p.K); k += kPanel)
      scale_panel<In, kOut, BatchScale>([&](int64_t r) { return row_of(0, r) + k; }, rows,
                                        int(std::min<int64_t>(kPanel, p.K - k)), second, m.data() + k,
                                        [&](int c, float scale) {
        for (int64_t e = 0; e < p.E; ++e) static_cast<float*>(p.scale_t)[e * p.K + k + c] = scale;
      });
  });
  return m;
}

// A group of tokens, or an expert of a weight. Its scaling blocks belong to no other.
struct Group {
  int64_t expert, first, rows;       // rows of x: `rows` of them from row `first` of the expert on
  int64_t q_t;                       // offset of its first byte in row 0 of q_t
  int64_t scale_t;                   // offset of its first scale
  int64_t row_stride, block_stride;  // elements of its scales; blocked: row_stride is the padded columns
  int64_t blocks_before;             // scaling blocks of the groups before it
};

// Returns all groups. Writes p.padded_offs.
std::vector<Group> groups_of(const QuantizeParams& p) {
  const Format& f = format_of(p.format);
  std::vector<int> ends;
  if (!p.weight) ends = safe_ends(p.offs, p.E, p.rows);
  std::vector<Group> groups(p.E);
  int64_t start = 0, position = 0, block = 0, column = 0, before = 0;
  for (int64_t e = 0; e < p.E; ++e) {
    Group& g = groups[e];
    g.rows = p.weight ? p.rows : ends[e] - start;
    g.expert = p.weight ? e : 0;
    g.first = p.weight ? 0 : start;
    g.q_t = p.weight ? e * p.K * p.rows : position;
    g.blocks_before = before;
    const int64_t blocks = f.blocks(g.rows), columns = padded_scale_columns(blocks);
    before += blocks;
    if (f.block == 0) {
      g.scale_t = e * p.K;
      g.row_stride = 1;
    } else if (f.order == ScaleOrder::kColumnMajor) {
      g.row_stride = 1;
      g.block_stride = scale_stride(scales_of_columns(f, p.K, p.amax));
      g.scale_t = block * g.block_stride;
    } else if (f.blocked()) {
      g.scale_t = p.weight ? e * padded_scale_rows(p.K) * columns : column * padded_scale_rows(p.K);
      g.row_stride = columns;
    } else {
      g.scale_t = p.weight ? e * p.K * blocks : position / f.block;
      g.row_stride = p.weight ? blocks : p.positions / f.block;
      g.block_stride = 1;
    }
    if (p.weight) continue;
    start = ends[e];
    position += round_up<int64_t>(g.rows, p.align);
    block += round_up<int64_t>(g.rows, std::max(p.align, kBlock)) / kBlock;
    column += columns;
    p.padded_offs[e] = int(position);
  }
  return groups;
}

// A work unit is a scaling block of a panel. Panels are the outer index, so that threads share even a single group.
// Does not write bytes of q_t that are no row.
template <class In, Fp8Type kOut, class Scale>
void along_tokens(const QuantizeParams& p, const Rows<typename In::Bits>& row_of, const std::vector<Group>& groups,
                  bool second) {
  const Format& f = format_of(p.format);
  auto* scale_t = static_cast<typename Scale::Stored*>(p.scale_t);
  const int64_t stride = p.positions, elements = rows_of(p) * p.K;
  std::vector<float> batch_multipliers;
  if (p.has_batch_amax() && p.E) batch_multipliers = scale_batch<In, kOut>(p, row_of, second);
  const int64_t blocks = groups.empty() ? 0 : groups.back().blocks_before + f.blocks(groups.back().rows);
  parallel(ceil_div<int64_t>(p.K, kPanel) * blocks, elements, [&](int64_t begin, int64_t end) {
    size_t group = 0;
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t k = unit / blocks * kPanel, i = unit % blocks;
      if (i == 0) group = 0;
      while (group + 1 < groups.size() && i >= groups[group + 1].blocks_before) ++group;
      const Group& g = groups[group];
      const int64_t b = i - g.blocks_before, first = b * f.block;
      const int64_t rows = f.block ? std::min<int64_t>(f.block, g.rows - first) : g.rows;
      const int columns = int(std::min<int64_t>(kPanel, p.K - k));
      const PanelRows<typename In::Bits> row_of_panel{row_of, g.expert, g.first + first, k};
      uint8_t* q_t = p.q_t + g.q_t + first + k * stride;
      if (p.has_batch_amax()) {
        cast_panel<In, kOut, BatchScale>(row_of_panel, rows, columns, batch_multipliers.data() + k, q_t, stride);
        continue;
      }
      float m[kPanel] = {};
      const auto store = [&](int64_t row, auto scale) {
        const int64_t at = f.blocked() ? blocked_offset(row, b, g.row_stride)
                                       : row * g.row_stride + b * g.block_stride;
        scale_t[g.scale_t + at] = scale;
      };
      if (p.has_square_amax()) {  // a square has two panels, and both compute its amax
        const int64_t square = k / kBlock, skipped = k - square * kBlock;
        const auto amax = amax_of_square<In>([&](int64_t r) { return row_of_panel(r) - skipped; }, rows,
                                             std::min<int64_t>(kBlock, p.K - square * kBlock));
        const auto s = scale_of<In, kOut, Scale>(amax, second);
        std::fill_n(m, kPanel, s.multiplier);
        if (skipped == 0) store(square, s.stored());
      } else {
        scale_panel<In, kOut, Scale>(row_of_panel, rows, columns, second, m,
                                     [&](int c, auto scale) { store(k + c, scale); });
      }
      cast_panel<In, kOut, Scale>(row_of_panel, rows, columns, m, q_t, stride);
    }
  });
}

// ---- weights with square scaling blocks, which are the same along rows and along tokens ----------------------------
template <class In, Fp8Type kOut>
void squares(const QuantizeParams& p, const Rows<typename In::Bits>& row_of, bool second) {
  const int64_t N = p.rows, K = p.K;
  const int64_t row_squares = ceil_div<int64_t>(N, kBlock), column_squares = ceil_div<int64_t>(K, kBlock);
  if (K == 0) return;
  parallel(p.E * row_squares, p.E * N * K, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t e = unit / row_squares, first = unit % row_squares * kBlock;
      const int64_t rows = std::min<int64_t>(kBlock, N - first);
      for (int64_t k = 0; k < K; k += kBlock) {
        const int64_t columns = std::min<int64_t>(kBlock, K - k);
        const auto amax = amax_of_square<In>([&](int64_t r) { return row_of(e, first + r) + k; }, rows, columns);
        const ScaleF32 s = scale_of<In, kOut, ScaleF32>(amax, second);
        const int64_t square = k / kBlock;
        if (p.along_rows) static_cast<float*>(p.scale)[unit * column_squares + square] = s.stored();
        if (p.along_tokens)
          static_cast<float*>(p.scale_t)[(e * column_squares + square) * row_squares + first / kBlock] = s.stored();
        for (int64_t r = 0; r < rows && p.along_rows; ++r)
          cast_row<In, kOut, ScaleF32>(row_of(e, first + r) + k, columns, s.multiplier,
                                       p.q + (e * N + first + r) * K + k);
        float m[kPanel];
        std::fill_n(m, kPanel, s.multiplier);
        for (int64_t c = 0; c < columns && p.along_tokens; c += kPanel)
          cast_panel<In, kOut, ScaleF32>([&](int64_t r) { return row_of(e, first + r) + k + c; }, rows,
                                         int(std::min<int64_t>(kPanel, columns - c)), m,
                                         p.q_t + (e * K + k + c) * N + first, N);
      }
    }
  });
}

template <class In, Fp8Type kOut, class Scale>
void quantize(const QuantizeParams& p, const std::vector<Group>& groups, bool second) {
  const Rows<typename In::Bits> row_of(p);
  if constexpr (std::is_same_v<Scale, ScaleF32>)
    if (p.weight && format_of(p.format).weight_rows > 1) return squares<In, kOut>(p, row_of, second);
  if (p.along_rows && !p.has_batch_amax()) along_rows<In, kOut, Scale>(p, row_of, second);
  if (p.along_tokens) along_tokens<In, kOut, Scale>(p, row_of, groups, second);
}

// Writes zeros wherever padding may be.
void clear(const QuantizeParams& p) {
  const Format& f = format_of(p.format);
  auto zero = [](void* to, int64_t bytes) {
    if (bytes > 0) std::memset(to, 0, bytes);
  };
  auto zero_scales = [&](void* to, const ScaleShape& shape) {
    zero(to, f.block ? shape.extent() * (f.scale_type == ScaleType::kF32 ? 4 : 1) : 0);
  };
  if (p.weight) {
    if (!f.blocked()) return;
    if (p.along_rows) zero_scales(p.scale, scales_of_weight(f, p.E, p.rows, p.K));
    if (p.along_tokens) zero_scales(p.scale_t, scales_of_weight(f, p.E, p.K, p.rows));
    return;
  }
  if (p.along_rows) zero_scales(p.scale, scales_along_rows(f, p.rows, p.K, p.offs ? p.E : kNoGroups));
  if (!p.along_tokens) return;
  zero(p.q_t, p.K * p.positions);
  zero_scales(p.scale_t, scales_along_tokens(f, p.K, p.positions, p.E, block_extent(p.rows, p.E, p.align), p.amax));
}

}  // namespace

void quantize_cpu(const QuantizeParams& p) {
  if (p.has_batch_amax() && p.along_rows) quantize_cpu(rows_of_batch(p));
  const Format& f = format_of(p.format);
  const bool second = p.rounding == second_rounding(f.scale_type);
  std::vector<Group> groups;
  if (p.along_tokens) groups = groups_of(p);
  clear(p);
  dispatch_in(p.in, [&](auto in) {
    dispatch_fp8(p.out, [&](auto out) {
      using In = decltype(in);
      constexpr Fp8Type kOut = decltype(out)::value;
      f.scale_type == ScaleType::kF32 ? quantize<In, kOut, ScaleF32>(p, groups, second)
                                      : quantize<In, kOut, ScaleE8M0>(p, groups, second);
    });
  });
}

}  // namespace moe_fp8
