// Steps that quantizing ops share: parameters of a launch, outputs, and the run on the CPU or on the GPU.
#pragma once
#include "numerics/operand_scales.h"
#include "ops/checks.h"
#include "quantize/quantize.h"

namespace moe_fp8 {

// Puts the rows of `arg` in groups that end at offs, padded to multiples of `align` along tokens.
inline void set_groups(QuantizeParams& p, const char* op, const char* arg, const Tensor& offs,
                       std::optional<int64_t> align) {
  const Format& f = format_of(p.format);
  p.E = offs.sizes[0];
  p.offs = ints(offs);
  const int64_t multiple = align.value_or(f.align);
  check_align(op, multiple, f.min_align, f.max_align);
  p.align = int(multiple);
  p.positions = check_extent(op, arg, p.rows, p.E, multiple);
  if (f.block) check_extent(op, arg, p.rows, p.E, std::max(p.align, kGroupScales));
}

inline Amax check_amax(const char* op, const Format& f, std::string_view amax) {
  const Amax choices[] = {Amax::kGroup, f.wider_amax};
  const auto name_of = [&](int i) { return kAmaxNames[int(choices[i])]; };
  return choices[check_choice(op, "amax", amax, f.wider_amax == Amax::kGroup ? 1 : 2, name_of, &f)];
}

// The outputs of quantize(), in the order in which ops return them. outputs_of() allocates them and sets p's pointers.
// If p has the padded_offs of another operand of the same groups already, it allocates none.
struct Outputs {
  Handle q, scale, q_t, scale_t, padded_offs;
};
inline Outputs outputs_of(const Call& call, QuantizeParams& p) {
  const Format& f = format_of(p.format);
  Outputs o;
  if (p.along_rows) {
    const int64_t rows = p.has_batch_amax() ? p.x_rows : p.rows;
    p.q = data<uint8_t>(o.q = call.empty({rows, p.K}, p.out));
    p.scale = data(o.scale = call.empty(scales_along_rows(f, rows, p.K, p.offs ? p.E : kNoGroups), f.scale_type));
  }
  if (p.along_tokens) {
    const int64_t blocks = block_extent(p.rows, p.E, p.align);
    p.q_t = data<uint8_t>(o.q_t = call.empty({p.K, p.positions}, p.out));
    p.scale_t = data(o.scale_t = call.empty(scales_along_tokens(f, p.K, p.positions, p.E, blocks, p.amax),
                                           f.scale_type));
    if (!p.padded_offs) p.padded_offs = data<int>(o.padded_offs = call.empty({p.E}, kInt32));
  }
  return o;
}

// Allocates the scratch memory that p needs, and sets p.scratch.
inline Handle scratch_of(const Call& call, QuantizeParams& p) {
  const int64_t words = call.on_gpu() ? scratch_words(p) : 0;
  if (words == 0) return {};
  Handle scratch = call.empty({words}, kInt32);
  p.scratch = data<int>(scratch);
  return scratch;
}

// Quantizes into outputs that p points at.
inline void run_quantize(const Call& call, QuantizeParams& p) {
  const Handle scratch = scratch_of(call, p);
  MOE_FP8_RUN(call, quantize, p);
}

}  // namespace moe_fp8
