// How an operand is dealt out to blocks of threads: one launch function for each geometry and type of x.
#pragma once
#include "quantize/quantize.h"

namespace moe_fp8 {

inline int64_t row_bytes(const QuantizeParams& p) { return p.K * (p.in == InType::kF32 ? 4 : 2); }
inline int64_t rows_of(const QuantizeParams& p) { return p.weight ? p.E * p.rows : p.rows; }
inline int64_t average_rows(const QuantizeParams& p) { return p.weight ? p.rows : p.E ? p.rows / p.E : 0; }

// What fast kernels ask of an operand: an fp8 format that the chip casts to, 16-byte vectors of x's rows and of q.
bool rows_are_fast(const QuantizeParams& p);

// In: BF16, F16 or F32, of aligned operands and an fp8 format of the chip's own; or Any: see types.h. Each returns 0 or
// the runtime's error code.

// How the rows of x run that follow its columns in the stream: after them, or beside them, for x was there before; or
// beside them and in step (pace.h).
enum class Beside { kNo, kYes, kInStep };
Beside rows_beside(const QuantizeParams& p, bool columns_are_fast);  // of rows that are fast

// Scales of whole rows. Beside the kernel ahead in the stream, they end after it.
template <class In>
int launch_rows(const QuantizeParams& p, Beside beside, void* stream);

// Scales of whole columns of groups. Unless beside is kNo, launch_rows() comes next.
template <class In>
int launch_strips(const QuantizeParams& p, Beside beside, void* stream);

// Scales of whole columns of the batch.
template <class In>
int launch_columns(const QuantizeParams& p, void* stream);

// Scales of blocks along rows alone.
template <class In>
int launch_row_blocks(const QuantizeParams& p, void* stream);

// Scales of blocks along columns, or both ways.
template <ScaleType kScale, class In>
int launch_tiles(const QuantizeParams& p, void* stream);

}  // namespace moe_fp8
