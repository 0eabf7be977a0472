// Copies the columns of a message, unit by unit, from the tensors that hold them.
#pragma once
#include "platform/memory.h"
#include "tokens/copy_rows.h"
#include "tokens/policy.h"

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
    return one_based_id(*reinterpret_cast<const Id*>(p), num_experts);
  }
};

// Calls f with the loader of a unit of the column.
template <class F>
MOE_DEVICE void dispatch_unit(const PackTokensParams& p, const MessageColumn& c, F f) {
  switch (c.unit) {
    case CopyUnit::k16: return f(LoadUnit<Vec16>{});
    case CopyUnit::k4: return f(LoadUnit<uint32_t>{});
    case CopyUnit::k2: return f(LoadUnit<uint16_t>{});
    case CopyUnit::k1: return f(LoadUnit<uint8_t>{});
    case CopyUnit::kInt32Id: return f(LoadId<int>{p.num_experts});
    case CopyUnit::kInt64Id: return f(LoadId<int64_t>{p.num_experts});
  }
}

// Copies the units first, first + step, ... below `end` of a column of a row. They come from token `source`; behind the
// token's units, or if source is -1, they are zeros.
template <class Load>
MOE_DEVICE void copy_units(const PackTokensParams& p, const MessageColumn& c, int64_t row, int64_t source,
                           int64_t first, int64_t end, int step, Load load) {
  using T = typename Load::Type;
  const int64_t units = source < 0 ? 0 : c.units;
  const char* from = static_cast<const char*>(c.from) + source * c.row_stride;
  T* to = reinterpret_cast<T*>(static_cast<char*>(p.to) + row * p.row_bytes + c.offset);
#pragma unroll 1
  for (; first < end; first += kUnitsInFlight * step) {
    T loaded[kUnitsInFlight];
#pragma unroll
    for (int i = 0; i < kUnitsInFlight; ++i) {
      const int64_t unit = first + i * step;
      loaded[i] = unit < end && unit < units ? load(from + unit * c.unit_stride) : T{};
    }
#pragma unroll
    for (int i = 0; i < kUnitsInFlight; ++i)
      if (first + i * step < end) store_stream(to + first + i * step, loaded[i]);
  }
}

}  // namespace moe_fp8
