// The sources of quantized rows: rows of x in place, or by index. Every read of x goes through here. This file also
// stores the scales of whole rows.
#pragma once
#include "platform/memory.h"
#include "primitives/scale_sink.h"
#include "quantize/types.h"

namespace moe_fp8 {

enum class Source { kInPlace, kByIndex };

// The sinks of formats with one scale per row and per column of a group.
MOE_DEVICE WholeRowSink row_scales(const QuantizeParams& p) { return {p.scale, p.rows}; }
MOE_DEVICE WholeRowSink column_scales(const QuantizeParams& p) { return {p.scale_t, p.K}; }

// The address of an element of x.
template <class T>
MOE_DEVICE const typename T::Bits* find_element(const QuantizeParams& p, int64_t element) {
  return T::advance(p, static_cast<const typename T::Bits*>(p.x), element);
}

// Loads words of elements from x on. `count` elements are left in the row; only Generic types look at it. Words is
// Vec16, Vec8 or uint32_t.
template <class T, class Words, Reuse kReuse = Reuse::kSoon>
MOE_DEVICE Words load_words(const QuantizeParams& p, const typename T::Bits* x, int64_t count) {
  if constexpr (T::kVectorized) {
    return load_stream<kReuse>(reinterpret_cast<const Words*>(x));
  } else if constexpr (std::is_same_v<Words, uint32_t>) {
    return count > 0 ? T::element_bits(p, x, 0) : 0u;
  } else {
    Words words = {};
#pragma unroll
    for (int i = 0; i < int(sizeof(Words) / 4); ++i)
      if (i < count) words.w[i] = T::element_bits(p, x, i);
    return words;
  }
}

// The same as an asynchronous copy to shared memory: see copy_to_shared().
template <class T, Reuse kReuse = Reuse::kSoon>
MOE_DEVICE void copy_words(const QuantizeParams& p, Vec16* shared, const typename T::Bits* x, int64_t count) {
  if constexpr (T::kVectorized) copy_to_shared<kReuse>(shared, reinterpret_cast<const Vec16*>(x));
  else *shared = load_words<T, Vec16>(p, x, count);
}

}  // namespace moe_fp8
