#include "tokens/combine.h"

#include <cstring>
#include <vector>

#include "cpu/parallel.h"
#include "numerics/dispatch.h"
#include "tokens/invert.h"

namespace moe_fp8 {
namespace {

bool is_row(int64_t row, int64_t rows) { return row >= 0 && row < rows; }

template <class In>
void combine(const CombineParams& p) {
  using Bits = typename In::Bits;
  if (p.K == 0) return;
  parallel(p.T, p.T * p.top_k * p.K, [&](int64_t begin, int64_t end) {
    std::vector<float> sum(p.K);
    for (int64_t t = begin; t < end; ++t) {
      std::fill(sum.begin(), sum.end(), 0.f);
      for (int64_t slot = t * p.top_k; slot < (t + 1) * p.top_k; ++slot) {
        const int64_t row = p.inverse[slot];
        if (!is_row(row, p.P)) continue;
        const Bits* y = static_cast<const Bits*>(p.y) + row * p.y_stride;
        const float score = score_of<In>(p.scores, p.scores_f32, slot);
        for (int64_t k = 0; k < p.K; ++k) sum[k] += score * In::to_float(y[k]);
      }
      Bits* out = static_cast<Bits*>(p.out) + t * p.K;
      for (int64_t k = 0; k < p.K; ++k) out[k] = In::from_float(sum[k]);
    }
  });
}

template <class In>
void store_grad_score(const CombineBackwardParams& p, int64_t slot, int64_t row) {
  using Bits = typename In::Bits;
  const Bits* grad = static_cast<const Bits*>(p.grad) + slot / p.top_k * p.grad_stride;
  const Bits* y = static_cast<const Bits*>(p.y) + row * p.y_stride;
  float dot = 0;
  for (int64_t k = 0; k < p.K; ++k) dot += In::to_float(grad[k]) * In::to_float(y[k]);
  if (p.scores_f32) static_cast<uint32_t*>(p.grad_scores)[slot] = F32::from_float(dot);
  else static_cast<Bits*>(p.grad_scores)[slot] = In::from_float(dot);
}

template <class In>
void combine_backward(const CombineBackwardParams& p) {
  using Bits = typename In::Bits;
  const int64_t slots = p.T * p.top_k;
  if (p.grad_scores && slots) std::memset(p.grad_scores, 0, slots * (p.scores_f32 ? 4 : sizeof(Bits)));
  if (p.K == 0) return;
  if (p.grad_y == nullptr) {
    if (p.grad_scores == nullptr) return;
    parallel(slots, slots * p.K, [&](int64_t begin, int64_t end) {
      for (int64_t slot = begin; slot < end; ++slot)
        if (const int64_t row = p.inverse[slot]; is_row(row, p.P)) store_grad_score<In>(p, slot, row);
    });
    return;
  }
  std::vector<int> slot_of(p.P);
  invert_indices_cpu(p.inverse, slots, slot_of.data(), p.P);
  parallel(p.P, p.P * p.K, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      Bits* grad_y = static_cast<Bits*>(p.grad_y) + r * p.K;
      const int64_t slot = slot_of[r];
      if (slot < 0) {
        std::memset(grad_y, 0, p.K * sizeof(Bits));
        continue;
      }
      const Bits* grad = static_cast<const Bits*>(p.grad) + slot / p.top_k * p.grad_stride;
      const float score = score_of<In>(p.scores, p.scores_f32, slot);
      for (int64_t k = 0; k < p.K; ++k) grad_y[k] = In::from_float(score * In::to_float(grad[k]));
      if (p.grad_scores) store_grad_score<In>(p, slot, r);
    }
  });
}

}  // namespace

void combine_cpu(const CombineParams& p) {
  dispatch_in(p.in, [&](auto in) { combine<decltype(in)>(p); });
}
void combine_backward_cpu(const CombineBackwardParams& p) {
  dispatch_in(p.in, [&](auto in) { combine_backward<decltype(in)>(p); });
}

}  // namespace moe_fp8
