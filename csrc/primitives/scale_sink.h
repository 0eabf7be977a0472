// The scale sink: stores the scale of (row, block) of a quantized operand where its format wants it.
//
// A row of the sink is a vector that was quantized: a row of x along rows, a column of x along tokens. Its blocks are
// the scaling blocks of this vector, in order. With one scale per column of a group, block e is group e.
//
//   order          element of (row, block)              stride
//   kRowMajor      row * stride + block                 blocks of a row
//   kColumnMajor   block * stride + row                 scale_stride(rows); K for scales [E, K]; any for scales [rows]
//   kBlocked       blocked_offset(row, block, stride)   padded_scale_columns(blocks): see numerics/scale_layout.h
//
// Scales of M-groups in the blocked layout have places: a caller passes the place of a row, from place_rows() of
// quantize/quantize.h, in its stead.
#pragma once
#include "numerics/format.h"
#include "numerics/scale.h"
#include "platform/memory.h"

namespace moe_fp8 {

template <class Scale_, ScaleOrder kOrder_>
struct ScaleSink {
  using Scale = Scale_;
  using Stored = typename Scale::Stored;
  static constexpr ScaleOrder kOrder = kOrder_;

  Stored* scales;
  int64_t stride;  // elements

  MOE_DEVICE ScaleSink(void* scales, int64_t stride) : scales(static_cast<Stored*>(scales)), stride(stride) {}

  MOE_DEVICE Stored* at(int64_t row, int64_t block) const {
    if constexpr (kOrder == ScaleOrder::kRowMajor) return scales + row * stride + block;
    else if constexpr (kOrder == ScaleOrder::kColumnMajor) return scales + block * stride + row;
    else return scales + blocked_offset(row, block, stride);
  }

  // Stores the scales of `count` of the blocks [block, block + 4) of a row of bytes: the first `count` bytes of a word.
  MOE_DEVICE void store_four(int64_t row, int64_t block, int count, uint32_t bytes) const {
    static_assert(kOrder == ScaleOrder::kRowMajor && sizeof(Stored) == 1);
    Stored* first = at(row, block);
    if (count == 4 && (stride | block) % 4 == 0) {
      store_stream(reinterpret_cast<uint32_t*>(first), bytes);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (i < count) store_stream(first + i, Stored(bytes >> (8 * i)));
    }
  }

  // Stores word `word` of the 128x4 block number `atom`: the four scales of row row_of_word(word) of the atom.
  MOE_DEVICE void store_word(int64_t atom, int word, uint32_t bytes) const {
    static_assert(kOrder == ScaleOrder::kBlocked);
    store_stream(reinterpret_cast<uint32_t*>(scales + atom * kScaleBytes) + word, bytes);
  }
  static MOE_DEVICE int row_of_word(int word) {
    static_assert(kOrder == ScaleOrder::kBlocked);
    return word % 4 * 32 + word / 4;
  }
};

// One scale per row, [rows], or per column of a group, [E, K].
using WholeRowSink = ScaleSink<ScaleF32, ScaleOrder::kColumnMajor>;

// Zeroes the bytes [from, to) of blocked scales, shared by `threads` threads. `from` is a multiple of 16, `to` of 4.
MOE_DEVICE void clear_scales(uint8_t* scale, int64_t from, int64_t to, int64_t thread, int64_t threads) {
  for (int64_t i = from + 16 * thread; i + 16 <= to; i += 16 * threads)
    store_stream(reinterpret_cast<Vec16*>(scale + i), Vec16{});
  const int64_t rest = to - (to - from) % 16 + 4 * thread;
  if (rest < to) store_stream(reinterpret_cast<uint32_t*>(scale + rest), 0u);
}

}  // namespace moe_fp8
