// The columns of a message on their way, unit by unit, from where each lies of its token.
#pragma once
#include "platform/memory.h"
#include "tokens/copy_rows.h"

namespace moe_fp8 {

template <class T>
struct LoadUnit {
  using Type = T;
  MOE_DEVICE T operator()(const char* p) const { return load_stream<Reuse::kSoon>(reinterpret_cast<const T*>(p)); }
};
template <class Id>
struct LoadId {
  using Type = uint32_t;
  int num_experts;
  MOE_DEVICE uint32_t operator()(const char* p) const {
    return id_from_one(*reinterpret_cast<const Id*>(p), num_experts);
  }
};

// f(what loads a unit of the column).
template <class F>
MOE_DEVICE void with_units(const PackTokensParams& p, const Column& c, F f) {
  switch (c.unit) {
    case Unit::k16: return f(LoadUnit<Vec16>{});
    case Unit::k4: return f(LoadUnit<uint32_t>{});
    case Unit::k2: return f(LoadUnit<uint16_t>{});
    case Unit::k1: return f(LoadUnit<uint8_t>{});
    case Unit::kInt32Id: return f(LoadId<int>{p.num_experts});
    case Unit::kInt64Id: return f(LoadId<int64_t>{p.num_experts});
  }
}

constexpr int kUnitsHeld = 2;  // of a thread at once: copy_rows.cu says what that gives

// Units first, first + step, ... below end of the column in a row: those of token `source`, zeros behind them, and
// where that is none.
template <class Load>
MOE_DEVICE void copy_units(const PackTokensParams& p, const Column& c, int64_t row, int64_t source, int64_t first,
                           int64_t end, int step, Load load) {
  using T = typename Load::Type;
  const int64_t units = source < 0 ? 0 : c.units;
  const char* from = static_cast<const char*>(c.from) + source * c.row_stride;
  T* to = reinterpret_cast<T*>(static_cast<char*>(p.to) + row * p.row_bytes + c.offset);
#pragma unroll 1
  for (; first < end; first += kUnitsHeld * step) {
    T held[kUnitsHeld];
#pragma unroll
    for (int i = 0; i < kUnitsHeld; ++i) {
      const int64_t unit = first + i * step;
      held[i] = unit < end && unit < units ? load(from + unit * c.unit_stride) : T{};
    }
#pragma unroll
    for (int i = 0; i < kUnitsHeld; ++i)
      if (first + i * step < end) store_stream(to + first + i * step, held[i]);
  }
}

}  // namespace moe_fp8
