// Readers of h. Loads return raw words, so that many are in flight at once; decoding to float32 comes later.
#pragma once
#include "activations/activations.h"
#include "primitives/access_width.h"
#include "primitives/operand.h"

namespace moe_fp8 {

// True if the rows of a matrix can be read or written in vectors: F is a multiple of 8, and p and the distance of the
// rows are multiples of n elements of `bytes` bytes each.
inline bool rows_are_vectorizable(const void* p, int64_t stride, int64_t F, int64_t rows, int64_t bytes,
                                  int64_t n = 8) {
  const uint64_t row_distance = rows > 1 ? stride * bytes : 0;
  return F % 8 == 0 && (reinterpret_cast<uintptr_t>(p) | row_distance) % (n * bytes) == 0;
}

// True if no scaling block of `block` columns holds gates and ups in turn: ups begin with a block. Then the scales of a
// gate and of its up are at a fixed distance. An interleaved h, or an h without ups, has one part.
inline bool ups_begin_a_block(const GateRows& h, Activation activation, int block) {
  return !is_gated(activation) || h.interleaved || h.F % block == 0;
}

template <int n>
struct GateUp { float gate[n], up[n]; };

// The column of feature j of a projection, among the columns of h that hold n features. Columns are numbered as they
// lie in registers: vector 0, then vector 1.
template <int n, bool kInterleaved>
MOE_HD constexpr int column_of(int projection, int j) {
  return kInterleaved ? 2 * j + projection : projection * n + j;
}

// Columns of n gates and their n ups in a row of h: kVectors vectors of n columns each.
//
//   halves        [gates of v] ... [ups of v]     F columns apart: vector 0 holds gates, vector 1 ups
//   interleaved   [g u g u ...][g u g u ...]      adjacent: gates and ups alternate in both vectors
template <int n, bool kGated>
struct GateUpLayout {
  static constexpr int kVectors = kGated ? 2 : 1;
  bool interleaved;
  int step;               // columns from vector 0 of n features to vector 0 of the next n
  int64_t vector_stride;  // columns from vector 0 to vector 1

  explicit MOE_DEVICE GateUpLayout(const GateRows& h) : GateUpLayout(kGated && h.interleaved, h.F) {}
  MOE_DEVICE GateUpLayout(bool interleaved, int64_t F)
      : interleaved(interleaved), step(interleaved ? 2 * n : n), vector_stride(interleaved ? n : F) {}
  // Calls f with a copy in which `interleaved` is a compile-time constant. Hoists the branch out of loops over vectors.
  template <class F>
  MOE_DEVICE void with_static_order(F f) const {
    if (kGated && interleaved) f(GateUpLayout(true, 0));
    else f(GateUpLayout(false, vector_stride));
  }
  MOE_DEVICE int64_t column(int v, int vector) const { return int64_t(v) * step + vector * vector_stride; }

  // value_of(vector, i) decodes element i of a vector.
  template <class F>
  MOE_DEVICE GateUp<n> gather(F value_of) const {
    GateUp<n> g = {};
    const auto at = [&](int c) { return value_of(c / n, c % n); };
    if (interleaved) {
#pragma unroll
      for (int i = 0; i < n; ++i) {
        g.gate[i] = at(column_of<n, true>(0, i));
        g.up[i] = at(column_of<n, true>(1, i));
      }
    } else {
#pragma unroll
      for (int i = 0; i < n; ++i) {
        g.gate[i] = at(column_of<n, false>(0, i));
        if constexpr (kGated) g.up[i] = at(column_of<n, false>(1, i));
      }
    }
    return g;
  }
  template <class Access>
  MOE_DEVICE void store(const Access& access, void* row, int v, const GateUp<n>& g) const {
    if (interleaved) {
      float columns[2 * n];
#pragma unroll
      for (int i = 0; i < n; ++i) {
        columns[2 * i] = g.gate[i];
        columns[2 * i + 1] = g.up[i];
      }
      access.store(row, column(v, 0), columns);
      access.store(row, column(v, 1), columns + n);
    } else {
      access.store(row, column(v, 0), g.gate);
      if constexpr (kGated) access.store(row, column(v, 1), g.up);
    }
  }
};

// ---- readers: load(row(r), v) starts loading features n v to n v + n - 1, decode() waits for the loads --------------

// Reads an h of the type that Access loads.
template <class Access, bool kGated>
struct PlainReader {
  static constexpr int n = Access::kElements;
  using Layout = GateUpLayout<n, kGated>;
  struct Raw { typename Access::Raw vectors[Layout::kVectors]; };
  const GateRows& h;
  const Access access;
  const Layout layout;

  explicit MOE_DEVICE PlainReader(const GateRows& h) : PlainReader(h, Layout(h)) {}
  MOE_DEVICE PlainReader(const GateRows& h, const Layout& layout) : h(h), access(h.in), layout(layout) {}
  template <class F>
  MOE_DEVICE void with_static_order(F f) const {
    layout.with_static_order([&](const Layout& static_layout) { f(PlainReader(h, static_layout)); });
  }
  using Row = const void*;
  MOE_DEVICE Row row(int64_t r) const { return access.address(h.h, r * h.stride); }
  MOE_DEVICE Row next(Row row) const { return access.address(row, h.stride); }
  MOE_DEVICE Raw load(Row row, int v) const {
    Raw raw;
#pragma unroll
    for (int i = 0; i < Layout::kVectors; ++i) raw.vectors[i] = access.load_once(row, layout.column(v, i));
    return raw;
  }
  MOE_DEVICE GateUp<n> decode(Row, const Raw& raw) const {
    return layout.gather([&](int vector, int i) { return access.element(raw.vectors[vector], i); });
  }
};

// Shifts words kFirst to kEnd - 1 down by kBytes, an even number. The upper bytes lose their meaning.
template <int kBytes, int kFirst, int kEnd, int kWords>
MOE_DEVICE void shift_bytes(uint32_t (&w)[kWords]) {
#pragma unroll
  for (int i = kFirst; i + kBytes / 4 < kEnd; ++i) {
    if constexpr (kBytes % 4 == 0) w[i] = w[i + kBytes / 4];
    else w[i] = i + 1 < kEnd ? permute_bytes(w[i], w[i + 1], 0x5432) : w[i] >> 16;
  }
}

// Reads eight features of a row of an fp8 h, of a type that the hardware has: raw words, without scales. It has two
// users. Fp8Reader below learns the order of columns, the type and the kind of scales at run time. Gradients in
// backward/gradients.h knows them at compile time; it keeps many features in registers and decodes them one by one.
template <bool kGated>
struct Fp8Features {
  static constexpr int kColumns = kGated ? 16 : 8;
  uint32_t words[kColumns / 4];

  // Starts to load vector i of the columns.
  template <class Vector, Reuse kReuse>
  MOE_DEVICE void load(int i, const Vector* from) {
    const Vector v = load_stream<kReuse>(from);
#pragma unroll
    for (int w = 0; w < int(sizeof(Vector)) / 4; ++w) words[i * int(sizeof(Vector)) / 4 + w] = v.w[w];
  }
  // Shifts the words so that feature n becomes feature 0.
  template <bool kInterleaved, int n>
  MOE_DEVICE void advance() {
    if constexpr (kInterleaved) {
      shift_bytes<2 * n, 0, 4>(words);
    } else {
      shift_bytes<n, 0, 2>(words);
      if constexpr (kGated) shift_bytes<n, 2, 4>(words);
    }
  }
  MOE_DEVICE uint32_t byte(int c) const { return words[c / 4] >> c % 4 * 8 & 0xff; }
  template <bool kE5M2>
  MOE_DEVICE float value(int c) const { return decode_native<kE5M2>(words[c / 4], c % 4); }
};

// Reads an fp8 h with its scales: 8 features of a type that the hardware has (n = 8), or one of any type (n = 1).
template <int n_, bool kGated>
struct Fp8Reader {
  static constexpr int n = n_;
  using Layout = GateUpLayout<n, kGated>;
  struct Raw {
    std::conditional_t<n == 8, Fp8Features<kGated>, uint8_t[Layout::kVectors]> h;
    uint32_t scale_bits[Layout::kVectors];
  };
  struct Row {
    const uint8_t* q;
    RowScales scales;
  };
  const GateRows& h;
  const Layout layout;
  int block_log2;  // columns of a scaling block

  explicit MOE_DEVICE Fp8Reader(const GateRows& h) : h(h), layout(h), block_log2(h.scale.block_size ? 0 : 31) {
    while (block_log2 < 31 && 1 << block_log2 < h.scale.block_size) ++block_log2;
  }
  MOE_DEVICE Row row(int64_t r) const {
    return {static_cast<const uint8_t*>(h.h) + r * h.stride, h.scale.scales_of_row(r)};
  }
  // The row behind an even row.
  MOE_DEVICE Row next(Row row) const {
    row.q += h.stride;
    row.scales.first += h.scale.row_step();
    return row;
  }
  MOE_DEVICE Raw load(const Row& row, int v) const {
    Raw raw;
#pragma unroll
    for (int i = 0; i < Layout::kVectors; ++i) {
      const int64_t column = layout.column(v, i);
      if constexpr (n == 8) raw.h.template load<Vec8, Reuse::kNone>(i, reinterpret_cast<const Vec8*>(row.q + column));
      else raw.h[i] = load_stream(row.q + column);
      raw.scale_bits[i] = row.scales.bits(uint32_t(column) >> block_log2);
    }
    return raw;
  }
  MOE_DEVICE GateUp<n> decode(const Row& row, const Raw& raw) const {
    float scale[Layout::kVectors];
#pragma unroll
    for (int i = 0; i < Layout::kVectors; ++i) scale[i] = row.scales.value(raw.scale_bits[i]);
    const auto gather = [&](auto e5m2) {
      return layout.gather([&](int vector, int i) {
        if constexpr (n == 1) return moe_fp8::decode(h.fp8, raw.h[vector]) * scale[vector];
        else return raw.h.template value<decltype(e5m2)::value>(vector * n + i) * scale[vector];
      });
    };
    return is_e5m2(h.fp8) && n > 1 ? gather(std::true_type{}) : gather(std::false_type{});
  }
};

// ---- the activations that one kernel computes -----------------------------------------------------------------------

template <Activation kFirst, Activation... kRest>
struct ActivationSet {
  static constexpr bool kUniform = ((is_gated(kRest) == is_gated(kFirst)) && ...);  // all are gated, or none is
  static constexpr int kProjections = is_gated(kFirst) ? 2 : 1;  // of h, if kUniform: gate and up, or the gate alone
  // Calls f with the activation as a constant. A kernel calls this once, outside of its loops.
  template <class F>
  static MOE_DEVICE void dispatch(Activation activation, F f) {
    if constexpr (sizeof...(kRest) > 0)
      if (activation != kFirst) return ActivationSet<kRest...>::dispatch(activation, f);
    f(std::integral_constant<Activation, kFirst>{});
  }
};
using GatedActivations = ActivationSet<Activation::kSwiglu, Activation::kGeglu, Activation::kClampedSwiglu>;
using UngatedActivations = ActivationSet<Activation::kSilu, Activation::kGelu, Activation::kRelu2>;
using AllActivations = ActivationSet<Activation::kSwiglu, Activation::kGeglu, Activation::kClampedSwiglu,
                                     Activation::kSilu, Activation::kGelu, Activation::kRelu2>;
template <Activation kActivation>
constexpr bool kIsGated = is_gated(kActivation);  // for device code, which cannot call is_gated()

// Calls f with GatedActivations or UngatedActivations.
template <class F>
int dispatch_gated(Activation activation, F f) {
  return is_gated(activation) ? f(GatedActivations{}) : f(UngatedActivations{});
}

// Calls f with the activations that share a vectorized kernel. Each gated activation has its own kernel, because in one
// kernel they spill.
template <class F>
int dispatch_activations(Activation activation, F f) {
  switch (activation) {
    case Activation::kSwiglu: return f(ActivationSet<Activation::kSwiglu>{});
    case Activation::kGeglu: return f(ActivationSet<Activation::kGeglu>{});
    case Activation::kClampedSwiglu: return f(ActivationSet<Activation::kClampedSwiglu>{});
    default: return f(UngatedActivations{});
  }
}

}  // namespace moe_fp8
