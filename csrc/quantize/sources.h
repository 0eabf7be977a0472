// Where the rows that are quantized come from: the rows of x as they lie, or taken by index. Every read of x is here.
#pragma once
#include "platform/memory.h"
#include "quantize/types.h"

namespace moe_fp8 {

enum class Source { kInPlace, kByIndex };

// Which row of x is row `row`; -1: it is a row of zeros.
MOE_DEVICE int64_t source_row(const QuantizeParams& p, int64_t row) { return p.index.at ? p.index.row(row) : row; }

// Element `element` of x.
template <class T>
MOE_DEVICE const typename T::Bits* find_element(const QuantizeParams& p, int64_t element) {
  return T::advance(p, static_cast<const typename T::Bits*>(p.x), element);
}

// Words of the elements from x on, of which so many are in the row: all, unless T is Any. Words: Vec16, Vec8, uint32_t.
template <class T, class Words, Reuse kReuse = Reuse::kSoon>
MOE_DEVICE Words load_words(const QuantizeParams& p, const typename T::Bits* x, int64_t there) {
  if constexpr (T::kVectorized) {
    return load_stream<kReuse>(reinterpret_cast<const Words*>(x));
  } else if constexpr (std::is_same_v<Words, uint32_t>) {
    return there > 0 ? T::element_bits(p, x, 0) : 0u;
  } else {
    Words words = {};
#pragma unroll
    for (int i = 0; i < int(sizeof(Words) / 4); ++i)
      if (i < there) words.w[i] = T::element_bits(p, x, i);
    return words;
  }
}

// The same on their way to shared memory: see copy_to_shared().
template <class T, Reuse kReuse = Reuse::kSoon>
MOE_DEVICE void copy_words(const QuantizeParams& p, Vec16* shared, const typename T::Bits* x, int64_t there) {
  if constexpr (T::kVectorized) copy_to_shared<kReuse>(shared, reinterpret_cast<const Vec16*>(x));
  else *shared = load_words<T, Vec16>(p, x, there);
}

}  // namespace moe_fp8
