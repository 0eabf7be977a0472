#include <algorithm>
#include <functional>
#include <limits>
#include <vector>

#include "cpu/parallel.h"
#include "cpu/tokens.h"
#include "numerics/floats.h"
#include "numerics/groups.h"

namespace moe_fp8 {
namespace {

// Of all experts, and zeros to a power of two of fours, as sums want them.
using Row = std::vector<float>;
size_t room_for(int E) {
  size_t room = 4;
  while (room < size_t(E)) room *= 2;
  return room;
}

float sum_of(const Row& x) {
  float fours[kMaxExperts / 4];
  const size_t n = x.size() / 4;
  for (size_t i = 0; i < n; ++i) fours[i] = (x[4 * i] + x[4 * i + 1]) + (x[4 * i + 2] + x[4 * i + 3]);
  for (size_t half = n / 2; half > 0; half /= 2)
    for (size_t i = 0; i < half; ++i) fours[i] += fours[i + half];
  return fours[0] + 0.f;
}
template <class F>
float sum_of(const std::vector<int>& chosen, Row& terms, F term) {
  std::fill(terms.begin(), terms.end(), 0.f);
  for (const int e : chosen) terms[e] = term(e);
  return sum_of(terms);
}

MOE_FMA_CLONES void softmax_terms(const float* logits, int E, float most, float* terms) {
  for (int e = 0; e < E; ++e) terms[e] = softmax_term(logits[e], most);
}
MOE_FMA_CLONES void sigmoids_of(const float* logits, int E, float* score, float* slope) {
  for (int e = 0; e < E; ++e) {
    const Sigmoid s = sigmoid_scores(logits[e]);
    score[e] = s.value;
    slope[e] = s.value * s.complement;
  }
}

// Of one token; slope: the derivatives, of sigmoid alone. Both are zero beyond E.
void score_row(Scoring scoring, const float* logits, int E, Row& score, Row& slope) {
  if (scoring == Scoring::kSigmoid) return sigmoids_of(logits, E, score.data(), slope.data());
  uint32_t most = 0;
  for (int e = 0; e < E; ++e) most = std::max(most, ordered_key(logits[e]));
  softmax_terms(logits, E, from_ordered_key(most), score.data());
  const float scale = 1.f / sum_of(score);
  for (int e = 0; e < E; ++e) score[e] *= scale;
}

// A key and a number in one, so that of equal keys the smaller number is the larger.
uint64_t ranked(uint32_t key, int number) { return uint64_t(key) << 32 | uint32_t(~number); }
int number_of(uint64_t rank) { return int(~uint32_t(rank)); }

// The numbers of the `count` largest keys, the largest first.
void largest(const std::vector<uint32_t>& keys, int count, std::vector<uint64_t>& ranks, std::vector<int>& numbers) {
  ranks.resize(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) ranks[i] = ranked(keys[i], int(i));
  std::partial_sort(ranks.begin(), ranks.begin() + count, ranks.end(), std::greater<>());
  numbers.resize(count);
  for (int i = 0; i < count; ++i) numbers[i] = number_of(ranks[i]);
}

class Chooser {
 public:
  explicit Chooser(const ChooseExpertsParams& p)
      : p_(p), size_(p.E / p.num_groups), keys_(p.E), groups_(p.num_groups) {}

  void choose(const Row& score, std::vector<int>& chosen) {
    for (int e = 0; e < p_.E; ++e) keys_[e] = ordered_key(score[e] + (p_.bias ? p_.bias[e] : 0.f));
    if (p_.top_groups < p_.num_groups) leave_out_groups();
    largest(keys_, p_.top_k, ranks_, chosen);
  }

 private:
  void leave_out_groups() {
    for (int g = 0; g < p_.num_groups; ++g) {
      uint32_t first = 0, second = 0;
      for (int e = g * size_; e < (g + 1) * size_; ++e) {
        second = std::max(second, std::min(first, keys_[e]));
        first = std::max(first, keys_[e]);
      }
      groups_[g] = size_ == 1 ? first : ordered_key(from_ordered_key(first) + from_ordered_key(second));
    }
    largest(groups_, p_.top_groups, ranks_, kept_);
    std::sort(kept_.begin(), kept_.end());
    for (int g = 0; g < p_.num_groups; ++g)
      if (!std::binary_search(kept_.begin(), kept_.end(), g))
        std::fill_n(keys_.begin() + g * size_, size_, kNever);
  }

  const ChooseExpertsParams& p_;
  int size_;
  std::vector<uint32_t> keys_, groups_;
  std::vector<uint64_t> ranks_;
  std::vector<int> kept_;
};

void store_row(const ChooseExpertsBackwardParams& p, int64_t t, const float* dlogits) {
  if (p.parts == 1) {
    uint32_t* const out = static_cast<uint32_t*>(p.dlogits) + t * p.E;
    for (int e = 0; e < p.E; ++e) out[e] = F32::from_float(dlogits[e]);
    return;
  }
  uint16_t *const first = static_cast<uint16_t*>(p.dlogits) + 2 * t * p.E, *const second = first + p.E;
  for (int e = 0; e < p.E; ++e) {
    first[e] = BF16::from_float(dlogits[e]);
    second[e] = BF16::from_float(dlogits[e] - BF16::to_float(first[e]));
  }
}

}  // namespace

void choose_experts_cpu(const ChooseExpertsParams& p) {
  parallel(p.T, 16 * p.T * p.E, [&](int64_t begin, int64_t end) {
    Row score(room_for(p.E)), slope(score), terms(score);
    std::vector<int> chosen;
    Chooser chooser(p);
    for (int64_t t = begin; t < end; ++t) {
      score_row(p.scoring, p.logits + t * p.stride, p.E, score, slope);
      chooser.choose(score, chosen);
      const float sum = p.normalize ? sum_of(chosen, terms, [&](int e) { return score[e]; }) + kSumEpsilon : 1.f;
      for (int slot = 0; slot < p.top_k; ++slot) {
        const float s = score[chosen[slot]], share = p.normalize ? s / sum : s;
        const float logit = p.logits[t * p.stride + chosen[slot]], of_slot = share * p.factor;
        p.ids[t * p.top_k + slot] = chosen[slot];
        p.scores[t * p.top_k + slot] = as_float(F32::from_float(of_slot));
        p.topk_logits[t * p.top_k + slot] = as_float(F32::from_float(logit + 0.f * of_slot));
      }
    }
  });
}

void choose_experts_backward_cpu(const ChooseExpertsBackwardParams& p) {
  const int width = int(p.width());
  parallel(p.T, 16 * p.T * p.E, [&](int64_t begin, int64_t end) {
    Row score(room_for(width)), slope(score), terms(score), w(score), logits(width), dlogits(p.E);
    std::vector<int> chosen, slot_of(width), expert(width);  // an id is read once: another thread may write it
    for (int64_t t = begin; t < end; ++t) {
      std::copy_n(p.logits + t * p.stride, width, logits.begin());
      std::fill(slot_of.begin(), slot_of.end(), -1);
      for (int64_t slot = 0; slot < p.top_k; ++slot) {
        const int64_t id = p.id(t, slot);
        if (id >= 0 && id < p.E) slot_of[p.chosen_only ? slot : id] = int(slot);
        else if (p.chosen_only) logits[slot] = -std::numeric_limits<float>::infinity();
        if (p.chosen_only) expert[slot] = int(id);
      }
      score_row(p.scoring, logits.data(), width, score, slope);
      chosen.clear();
      std::fill(w.begin(), w.end(), 0.f);
      for (int e = 0; e < width; ++e) {
        if (slot_of[e] < 0) continue;
        chosen.push_back(e);
        w[e] = p.grad[t * p.grad_stride + slot_of[e]] * p.factor;
      }
      if (p.normalize) {
        const float sum = sum_of(chosen, terms, [&](int e) { return score[e]; }) + kSumEpsilon;
        const float mean = sum_of(chosen, terms, [&](int e) { return w[e] * (score[e] / sum); });
        for (const int e : chosen) w[e] = (w[e] - mean) / sum;
      }
      if (p.scoring == Scoring::kSoftmax) {
        const float mean = sum_of(chosen, terms, [&](int e) { return w[e] * score[e]; });
        for (int e = 0; e < width; ++e) w[e] = score[e] * (w[e] - mean);
      } else {
        for (const int e : chosen) w[e] *= slope[e];
      }
      if (p.chosen_only) {
        std::fill(dlogits.begin(), dlogits.end(), 0.f);
        for (const int slot : chosen)
          if (logits[slot] != -std::numeric_limits<float>::infinity()) dlogits[expert[slot]] = w[slot];
      }
      store_row(p, t, (p.chosen_only ? dlogits : w).data());
    }
  });
}

}  // namespace moe_fp8
