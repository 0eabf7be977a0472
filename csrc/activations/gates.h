// Gates and ups on their way from h: words as they lie, so that many can be under way, then values in float32.
#pragma once
#include "activations/activations.h"
#include "primitives/operand.h"
#include "primitives/access_width.h"

namespace moe_fp8 {

template <int n>
struct Gates { float gate[n], up[n]; };

// Where n gates and their ups lie in a row: in two parts of n columns. The parts hold gates and ups, or, where these
// are interleaved, the first and the other half of them.
template <int n, bool kGated>
struct GateColumns {
  static constexpr int kParts = kGated ? 2 : 1;
  bool interleaved;
  int step;       // from the first part of n gates to that of the next n
  int64_t apart;  // from a part to the other

  explicit MOE_DEVICE GateColumns(const GateRows& h) : GateColumns(kGated && h.interleaved, h.F) {}
  MOE_DEVICE GateColumns(bool interleaved, int64_t F)
      : interleaved(interleaved), step(interleaved ? 2 * n : n), apart(interleaved ? n : F) {}
  // f(the same, of which the compiler knows whether it is interleaved): of loops over vectors, which need not ask then.
  template <class F>
  MOE_DEVICE void known(F f) const {
    if (kGated && interleaved) f(GateColumns(true, 0));
    else f(GateColumns(false, apart));
  }
  MOE_DEVICE int64_t at(int v, int part) const { return int64_t(v) * step + part * apart; }

  // value_of(part, i): number i of a part.
  template <class F>
  MOE_DEVICE Gates<n> gates(F value_of) const {
    Gates<n> g = {};
    if (interleaved) {
#pragma unroll
      for (int i = 0; i < n; ++i) {
        g.gate[i] = value_of(2 * i / n, 2 * i % n);
        g.up[i] = value_of((2 * i + 1) / n, (2 * i + 1) % n);
      }
    } else {
#pragma unroll
      for (int i = 0; i < n; ++i) {
        g.gate[i] = value_of(0, i);
        if constexpr (kGated) g.up[i] = value_of(1, i);
      }
    }
    return g;
  }
  template <class Access>
  MOE_DEVICE void store(const Access& part, void* row, int v, const Gates<n>& g) const {
    if (interleaved) {
      float columns[2 * n];
#pragma unroll
      for (int i = 0; i < n; ++i) {
        columns[2 * i] = g.gate[i];
        columns[2 * i + 1] = g.up[i];
      }
      part.store(row, at(v, 0), columns);
      part.store(row, at(v, 1), columns + n);
    } else {
      part.store(row, at(v, 0), g.gate);
      if constexpr (kGated) part.store(row, at(v, 1), g.up);
    }
  }
};

// ---- sources: load(row(r), v) has number v of the n gates and ups of a row under way, values() waits for them -------

// Of an h of the type that a Part is of.
template <class Access, bool kGated>
struct PlainGates {
  static constexpr int n = Access::kElements;
  using Columns = GateColumns<n, kGated>;
  struct Held { typename Access::Held part[Columns::kParts]; };
  const GateRows& h;
  const Access part;
  const Columns columns;

  explicit MOE_DEVICE PlainGates(const GateRows& h) : PlainGates(h, Columns(h)) {}
  MOE_DEVICE PlainGates(const GateRows& h, const Columns& columns) : h(h), part(h.in), columns(columns) {}
  template <class F>
  MOE_DEVICE void known(F f) const {
    columns.known([&](const Columns& c) { f(PlainGates(h, c)); });
  }
  using Row = const void*;
  MOE_DEVICE Row row(int64_t r) const { return part.advanced(h.h, r * h.stride); }
  MOE_DEVICE Row next(Row row) const { return part.advanced(row, h.stride); }
  MOE_DEVICE Held load(Row row, int v) const {
    Held held;
#pragma unroll
    for (int i = 0; i < Columns::kParts; ++i) held.part[i] = part.load_once(row, columns.at(v, i));
    return held;
  }
  MOE_DEVICE Gates<n> values(Row, const Held& held) const {
    return columns.gates([&](int p, int i) { return part.element(held.part[p], i); });
  }
};

// Of an fp8 one with its scales: 8, of a type that the hardware has, or one of any type.
template <int n_, bool kGated>
struct Fp8Gates {
  static constexpr int n = n_;
  using Columns = GateColumns<n, kGated>;
  struct Held {
    Vec8 part[Columns::kParts];
    uint32_t scale[Columns::kParts];
  };
  struct Row {
    const uint8_t* q;
    RowScales scales;
  };
  const GateRows& h;
  const Columns columns;
  int block_log2;  // columns of a scaling block

  explicit MOE_DEVICE Fp8Gates(const GateRows& h) : h(h), columns(h), block_log2(h.scale.block_size ? 0 : 31) {
    while (block_log2 < 31 && 1 << block_log2 < h.scale.block_size) ++block_log2;
  }
  MOE_DEVICE Row row(int64_t r) const {
    return {static_cast<const uint8_t*>(h.h) + r * h.stride, h.scale.of_row(r)};
  }
  MOE_DEVICE Row next(Row row) const {  // of an even one
    row.q += h.stride;
    row.scales.first += h.scale.row_step();
    return row;
  }
  MOE_DEVICE Held load(const Row& row, int v) const {
    Held held;
#pragma unroll
    for (int i = 0; i < Columns::kParts; ++i) {
      const int64_t column = columns.at(v, i);
      if constexpr (n == 8) held.part[i] = load_stream(reinterpret_cast<const Vec8*>(row.q + column));
      else held.part[i] = Vec8{{load_stream(row.q + column), 0}};
      held.scale[i] = row.scales.bits(uint32_t(column) >> block_log2);
    }
    return held;
  }
  MOE_DEVICE Gates<n> values(const Row& row, const Held& held) const {
    float scale[Columns::kParts];
#pragma unroll
    for (int i = 0; i < Columns::kParts; ++i) scale[i] = row.scales.value(held.scale[i]);
    if constexpr (n == 1)
      return columns.gates([&](int p, int) { return decode(h.fp8, uint8_t(held.part[p].w[0])) * scale[p]; });
    else if (is_e5m2(h.fp8))
      return columns.gates([&](int p, int i) { return decode_native<true>(held.part[p].w[i / 4], i % 4) * scale[p]; });
    else
      return columns.gates([&](int p, int i) { return decode_native<false>(held.part[p].w[i / 4], i % 4) * scale[p]; });
  }
};

// ---- which activations a kernel computes ----------------------------------------------------------------------------

// with(activation, f): f(constant of it). A kernel asks once, outside of its loops.
template <Activation kFirst, Activation... kRest>
struct AnyOf {
  static constexpr bool kAlike = ((is_gated(kRest) == is_gated(kFirst)) && ...);
  static constexpr int kParts = is_gated(kFirst) ? 2 : 1;  // of h, where they are alike
  template <class F>
  static MOE_DEVICE void with(Activation activation, F f) {
    if constexpr (sizeof...(kRest) > 0)
      if (activation != kFirst) return AnyOf<kRest...>::with(activation, f);
    f(std::integral_constant<Activation, kFirst>{});
  }
};
using Gated = AnyOf<Activation::kSwiglu, Activation::kGeglu, Activation::kSwigluOai>;
using Ungated = AnyOf<Activation::kSilu, Activation::kGelu, Activation::kRelu2>;
using All = AnyOf<Activation::kSwiglu, Activation::kGeglu, Activation::kSwigluOai, Activation::kSilu, Activation::kGelu,
                  Activation::kRelu2>;
template <Activation kActivation>
constexpr bool kIsGated = is_gated(kActivation);  // in device code too

// f(Gated{} or Ungated{}).
template <class F>
int dispatch_gated(Activation activation, F f) {
  return is_gated(activation) ? f(Gated{}) : f(Ungated{});
}

// f(those that share a kernel of vectors): of gated ones each has its own, for together they spill.
template <class F>
int dispatch_activations(Activation activation, F f) {
  switch (activation) {
    case Activation::kSwiglu: return f(AnyOf<Activation::kSwiglu>{});
    case Activation::kGeglu: return f(AnyOf<Activation::kGeglu>{});
    case Activation::kSwigluOai: return f(AnyOf<Activation::kSwigluOai>{});
    default: return f(Ungated{});
  }
}

}  // namespace moe_fp8
