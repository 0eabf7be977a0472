// Launch functions of the quantizing kernels: one for each geometry (how scales cover x) and type of x.
#pragma once
#include "quantize/quantize.h"

namespace moe_fp8 {

inline int64_t average_rows(const QuantizeParams& p) { return p.weight ? p.rows : p.E ? p.rows / p.E : 0; }

// Whether the vectorized kernels take an operand: the chip casts to its fp8 format, and rows of x and q are whole
// 16-byte vectors.
bool can_vectorize_rows(const QuantizeParams& p);

// In is BF16, F16 or F32 for the vectorized kernels, or Generic (types.h). Each function returns 0, or the runtime's
// error code.

// How the kernel along rows follows the kernel along columns in the stream: after it, concurrently with it, or
// concurrently and throttled, so that both read the same part of x at about the same time (progress.h).
enum class RowOverlap { kNone, kConcurrent, kThrottled };
RowOverlap row_overlap_of(const QuantizeParams& p, bool columns_are_vectorized);  // for vectorized rows

// One scale per row. An overlapped kernel ends after the kernel ahead of it in the stream.
template <class In>
int launch_rows(const QuantizeParams& p, RowOverlap overlap, void* stream);

// One scale per column of each group. Unless overlap is kNone, the caller launches launch_rows() next.
template <class In>
int launch_columns(const QuantizeParams& p, RowOverlap overlap, void* stream);

// One scale per column of the whole batch.
template <class In>
int launch_batch_columns(const QuantizeParams& p, void* stream);

// Scaling blocks along rows only.
template <class In>
int launch_row_blocks(const QuantizeParams& p, void* stream);

// Scaling blocks along columns, or along rows and columns.
template <ScaleType kScale, class In>
int launch_tiles(const QuantizeParams& p, void* stream);

}  // namespace moe_fp8
