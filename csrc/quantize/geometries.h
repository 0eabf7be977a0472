// How an operand is dealt out to blocks of threads: one launch function for each geometry and type of x.
#pragma once
#include "quantize/quantize.h"

namespace moe_fp8 {

// In: BF16, F16 or F32, of aligned operands and an fp8 format of the chip's own; or Any: see types.h. Each returns 0 or
// the runtime's error code.

// Scales of whole rows. beside: x was there before the kernel ahead in the stream began, so run beside that one and end
// after it.
template <class In>
int launch_rows(const QuantizeParams& p, bool beside, void* stream);
bool can_run_beside(const QuantizeParams& p);  // of rows that are fast

// Scales of whole columns of groups. rows_beside: launch_rows() comes next, and may run beside it.
template <class In>
int launch_strips(const QuantizeParams& p, bool rows_beside, void* stream);

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
