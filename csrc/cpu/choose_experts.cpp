#include "tokens/choose_experts.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <vector>

#include "cpu/parallel.h"
#include "numerics/floats.h"
#include "numerics/groups.h"

namespace moe_fp8 {
namespace {

// A value for each expert, and zeros behind them up to a power of two of at least four.
using Row = std::vector<float>;
size_t padded_size(int E) {
  size_t size = 4;
  while (size < size_t(E)) size *= 2;
  return size;
}

// Adds in an order that does not depend on the device: fours of neighbours, then these by halves.
float sum_of(const Row& x) {
  float fours[kMaxExperts / 4];
  const size_t n = x.size() / 4;
  for (size_t i = 0; i < n; ++i) fours[i] = (x[4 * i] + x[4 * i + 1]) + (x[4 * i + 2] + x[4 * i + 3]);
  for (size_t half = n / 2; half > 0; half /= 2)
    for (size_t i = 0; i < half; ++i) fours[i] += fours[i + half];
  return fours[0] + 0.f;  // turns -0 into 0
}
// The sum of term(e) over the chosen experts, each once. -1 is no expert. terms: memory that calls share.
template <class F>
float sum_of(const std::vector<int>& chosen, Row& terms, F term) {
  std::fill(terms.begin(), terms.end(), 0.f);
  for (const int e : chosen)
    if (e >= 0) terms[e] = term(e);
  return sum_of(terms);
}

MOE_FMA_CLONES void softmax_terms(const float* logits, int E, float max_logit, float* terms) {
  for (int e = 0; e < E; ++e) terms[e] = softmax_term(logits[e], max_logit);
}
template <Scoring kScoring>
MOE_FMA_CLONES void score_each(const float* logits, int E, float* score, float* slope) {
  for (int e = 0; e < E; ++e) {
    const Point s = score_at<kScoring>(logits[e]);
    score[e] = s.value;
    slope[e] = s.slope;
  }
}

// The scores of one token. slope: their derivatives, which softmax does not write. Neither is written beyond E.
void score_row(Scoring scoring, const float* logits, int E, Row& score, Row& slope) {
  if (scoring == Scoring::kSigmoid) return score_each<Scoring::kSigmoid>(logits, E, score.data(), slope.data());
  if (scoring == Scoring::kSqrtSoftplus)
    return score_each<Scoring::kSqrtSoftplus>(logits, E, score.data(), slope.data());
  uint32_t max_key = 0;
  for (int e = 0; e < E; ++e) max_key = std::max(max_key, ordered_key(logits[e]));
  softmax_terms(logits, E, from_ordered_key(max_key), score.data());
  const float scale = 1.f / sum_of(score);
  for (int e = 0; e < E; ++e) score[e] *= scale;
}

// A key and its index in one integer. Among equal keys, the smaller index makes the larger integer.
uint64_t keyed_index(uint32_t key, int index) { return uint64_t(key) << 32 | uint32_t(~index); }
int index_of(uint64_t keyed_index) { return int(~uint32_t(keyed_index)); }

// The indices of the `count` largest keys, the largest first. sorted: memory that calls share.
void top_indices(const std::vector<uint32_t>& keys, int count, std::vector<uint64_t>& sorted,
                 std::vector<int>& indices) {
  sorted.resize(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) sorted[i] = keyed_index(keys[i], int(i));
  std::partial_sort(sorted.begin(), sorted.begin() + count, sorted.end(), std::greater<>());
  indices.resize(count);
  for (int i = 0; i < count; ++i) indices[i] = index_of(sorted[i]);
}

class Chooser {
 public:
  explicit Chooser(const ChooseExpertsParams& p)
      : p_(p), group_size_(p.E / p.num_groups), keys_(p.E), group_keys_(p.num_groups) {}

  void choose(const Row& score, std::vector<int>& chosen) {
    for (int e = 0; e < p_.E; ++e) keys_[e] = ordered_key(score[e] + (p_.bias ? p_.bias[e] : 0.f));
    if (p_.top_groups < p_.num_groups) exclude_groups();
    top_indices(keys_, p_.top_k, sorted_, chosen);
  }

 private:
  // Sets the keys of all experts outside of the top groups to kNever.
  void exclude_groups() {
    for (int g = 0; g < p_.num_groups; ++g) {
      uint32_t first = 0, second = 0;
      for (int e = g * group_size_; e < (g + 1) * group_size_; ++e) {
        second = std::max(second, std::min(first, keys_[e]));
        first = std::max(first, keys_[e]);
      }
      group_keys_[g] = group_key(p_.group_score, group_size_, first, second);
    }
    top_indices(group_keys_, p_.top_groups, sorted_, top_groups_);
    std::sort(top_groups_.begin(), top_groups_.end());
    for (int g = 0; g < p_.num_groups; ++g)
      if (!std::binary_search(top_groups_.begin(), top_groups_.end(), g))
        std::fill_n(keys_.begin() + g * group_size_, group_size_, kNever);
  }

  const ChooseExpertsParams& p_;
  int group_size_;
  std::vector<uint32_t> keys_, group_keys_;
  std::vector<uint64_t> sorted_;
  std::vector<int> top_groups_;
};

void read_given(const ChooseExpertsParams& p, int64_t t, std::vector<int>& chosen) {
  chosen.resize(p.top_k);
  for (int slot = 0; slot < p.top_k; ++slot) chosen[slot] = expert_of(p.given_ids.at(t, slot), p.E);
}

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
    Row score(padded_size(p.E)), slope(score), terms(score);
    std::vector<int> chosen;  // an expert, or -1, for each slot
    Chooser chooser(p);
    for (int64_t t = begin; t < end; ++t) {
      score_row(p.scoring, p.logits + t * p.stride, p.E, score, slope);
      if (p.given_ids.ids) read_given(p, t, chosen);
      else chooser.choose(score, chosen);
      const float sum = p.normalize ? sum_of(chosen, terms, [&](int e) { return score[e]; }) + kSumEpsilon : 1.f;
      for (int slot = 0; slot < p.top_k; ++slot) {
        const int expert = chosen[slot];
        float slot_score = 0, logit = 0;
        if (expert >= 0) {
          slot_score = (p.normalize ? score[expert] / sum : score[expert]) * p.factor;
          logit = p.logits[t * p.stride + expert];
        }
        p.ids[t * p.top_k + slot] = expert;
        p.scores[t * p.top_k + slot] = as_float(F32::from_float(slot_score));
        p.topk_logits[t * p.top_k + slot] = as_float(F32::from_float(logit + 0.f * slot_score));
      }
    }
  });
}

void choose_experts_backward_cpu(const ChooseExpertsBackwardParams& p) {
  const int width = int(p.width());
  parallel(p.T, 16 * p.T * p.E, [&](int64_t begin, int64_t end) {
    Row score(padded_size(width)), slope(score), terms(score), w(score), logits(width), dlogits(p.E);
    std::vector<int> chosen, slot_of(width), expert(width);  // an id is read once: another thread may write it
    for (int64_t t = begin; t < end; ++t) {
      std::copy_n(p.logits + t * p.stride, width, logits.begin());
      std::fill(slot_of.begin(), slot_of.end(), -1);
      for (int64_t slot = 0; slot < p.top_k; ++slot) {
        const int64_t id = p.ids.at(t, slot);
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
