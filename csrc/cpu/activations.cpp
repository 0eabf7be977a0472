#include "activations/activations.h"

#include "cpu/dequantize.h"
#include "cpu/parallel.h"
#include "numerics/dispatch.h"

namespace moe_fp8 {
namespace {

// Gates and ups of a row in float32. The ups are zeros if the activation has none.
struct Row {
  explicit Row(int64_t F) : gate(F), up(F) {}
  std::vector<float> gate, up;
};

// Reads rows of h, which is FP8 with scales or a float type.
class Reader {
 public:
  Reader(const GateRows& h, bool gated) : h_(h), gated_(gated), columns_(gated ? 2 * h.F : h.F) {
    if (h.scale.data == nullptr) return;
    values_ = decoded(h.fp8);
    add_segments(segments_, h.scale, 0, columns_, 0);
  }
  // bits: memory that calls share.
  void read(int64_t row, std::vector<uint32_t>& bits, Row& out) const {
    bits.resize(columns_);
    if (h_.scale.data) {
      const uint8_t* q = static_cast<const uint8_t*>(h_.h) + row * h_.stride;
      dequantize_row<F32>(values_, h_.scale, 0, row, segments_, q, bits.data());
    } else {
      dispatch_in(h_.in, [&](auto in) {
        using In = decltype(in);
        const auto* from = static_cast<const typename In::Bits*>(h_.h) + row * h_.stride;
        for (int64_t k = 0; k < columns_; ++k) bits[k] = as_bits(In::to_float(from[k]));
      });
    }
    const int64_t step = gated_ && h_.interleaved ? 2 : 1, first_up = h_.interleaved ? 1 : h_.F;
    for (int64_t f = 0; f < h_.F; ++f) out.gate[f] = as_float(bits[step * f]);
    for (int64_t f = 0; gated_ && f < h_.F; ++f) out.up[f] = as_float(bits[first_up + step * f]);
  }

 private:
  const GateRows& h_;
  bool gated_;
  int64_t columns_;
  std::array<float, 256> values_;
  std::vector<Segment> segments_;
};

template <Activation kActivation>
MOE_FMA_CLONES void activate_row(const Row& h, Clamp clamp, float* a) {
  const float *gate = h.gate.data(), *up = h.up.data();
  for (size_t f = 0, F = h.gate.size(); f < F; ++f) a[f] = activated<kActivation>(gate[f], up[f], clamp);
}

// Replaces h by its gradient. a: the activation times the score. terms: their sum is the gradient of the score.
template <Activation kActivation>
MOE_FMA_CLONES void differentiate_row(Row& h, Clamp clamp, const float* da, float score, float* a, float* terms) {
  float *gate = h.gate.data(), *up = h.up.data();
  for (size_t f = 0, F = h.gate.size(); f < F; ++f) {
    const ActivationGradient g = activation_gradient<kActivation>(gate[f], up[f], score * da[f], clamp);
    a[f] = score * g.a;
    terms[f] = da[f] * g.a;
    gate[f] = g.gate;
    up[f] = g.up;
  }
}

template <class In>
void store(const float* from, int64_t count, typename In::Bits* to, int64_t step = 1) {
  for (int64_t f = 0; f < count; ++f) to[step * f] = In::from_float(from[f]);
}

template <class In, Activation kActivation>
void activate(const ActivateParams& p) {
  const Reader reader(p.h, is_gated(kActivation));
  const int64_t F = p.h.F;
  if (F == 0) return;
  parallel(p.P, 8 * p.P * F, [&](int64_t begin, int64_t end) {
    Row row(F);
    std::vector<uint32_t> bits;
    std::vector<float> a(F);
    for (int64_t r = begin; r < end; ++r) {
      reader.read(r, bits, row);
      activate_row<kActivation>(row, p.h.clamp, a.data());
      store<In>(a.data(), F, static_cast<typename In::Bits*>(p.a) + r * F);
    }
  });
}

template <class In, Activation kActivation>
void activate_backward(const ActivateBackwardParams& p) {
  using Bits = typename In::Bits;
  constexpr bool kGated = is_gated(kActivation);
  const Reader reader(p.h, kGated);
  const int64_t F = p.h.F;
  if (p.slots.at || F == 0) std::fill_n(p.dscores, p.num_slots(), 0.f);
  if (F == 0) return;
  parallel(p.P, 16 * p.P * F, [&](int64_t begin, int64_t end) {
    Row row(F);
    std::vector<uint32_t> bits;
    std::vector<float> da(F), a(F), terms(F);
    for (int64_t r = begin; r < end; ++r) {
      reader.read(r, bits, row);
      for (int64_t f = 0; f < F; ++f) da[f] = In::to_float((static_cast<const Bits*>(p.da) + r * p.da_stride)[f]);
      differentiate_row<kActivation>(row, p.h.clamp, da.data(), p.score(r), a.data(), terms.data());
      store<In>(a.data(), F, static_cast<Bits*>(p.a) + r * F);
      float sum = 0;
      for (const float term : terms) sum += term;
      if (const int slot = p.slot(r); slot >= 0) p.dscores[slot] = as_float(F32::from_float(sum));
      Bits* dh = static_cast<Bits*>(p.dh) + r * (kGated ? 2 * F : F);
      const int64_t step = kGated && p.h.interleaved ? 2 : 1;
      store<In>(row.gate.data(), F, dh, step);
      if (kGated) store<In>(row.up.data(), F, dh + (p.h.interleaved ? 1 : F), step);
    }
  });
}

// Calls f(input type, constant of the activation).
template <int kFirst = 0, class F>
void dispatch(InType in, Activation activation, F f) {
  if constexpr (kFirst < kNumActivations) {
    constexpr std::integral_constant<Activation, Activation(kFirst)> kConstant;
    if (activation == kConstant) dispatch_in(in, [&](auto type) { f(type, kConstant); });
    else dispatch<kFirst + 1>(in, activation, f);
  }
}

}  // namespace

void activate_cpu(const ActivateParams& p) {
  dispatch(p.h.in, p.activation, [&](auto in, auto a) { activate<decltype(in), decltype(a)::value>(p); });
}
void activate_backward_cpu(const ActivateBackwardParams& p) {
  dispatch(p.in, p.activation, [&](auto in, auto a) { activate_backward<decltype(in), decltype(a)::value>(p); });
}

}  // namespace moe_fp8
