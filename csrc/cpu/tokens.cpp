// Every id, index and offset is read once, because another thread may write to it meanwhile.
#include <cstring>

#include "cpu/groups.h"
#include "cpu/parallel.h"
#include "tokens/invert.h"
#include "tokens/permute.h"
#include "tokens/permute_quantized.h"
#include "tokens/sort_tokens.h"
#include "tokens/token_groups.h"
#include "tokens/tokens_by_rank.h"

namespace moe_fp8 {
namespace {

void copy_column(const PackTokensParams& p, const MessageColumn& c, int64_t source, char* row) {
  const char* from = static_cast<const char*>(c.from) + source * c.row_stride;
  const int bytes = bytes_of(c.unit);
  const bool is_id = c.unit == CopyUnit::kInt32Id || c.unit == CopyUnit::kInt64Id;
  if (!is_id && c.unit_stride == bytes) {
    if (c.units) std::memcpy(row + c.offset, from, c.units * bytes);  // without units, from may be null
    return;
  }
  for (int64_t u = 0; u < c.units; ++u) {
    const char* unit = from + u * c.unit_stride;
    uint32_t id = 0;
    if (c.unit == CopyUnit::kInt32Id) id = one_based_id(*reinterpret_cast<const int*>(unit), p.num_experts);
    if (c.unit == CopyUnit::kInt64Id) id = one_based_id(*reinterpret_cast<const int64_t*>(unit), p.num_experts);
    std::memcpy(row + c.offset + u * bytes, is_id ? reinterpret_cast<const char*>(&id) : unit, bytes);
  }
}

}  // namespace

void sort_tokens_cpu(const SortTokensParams& p) {
  int* const expert = p.inverse;  // inverse holds the experts of slots, until it gets their positions
  std::vector<int> next(p.E + 1);
  for (int64_t slot = 0; slot < p.N; ++slot) {
    expert[slot] = expert_of(p.ids.at(slot / p.top_k, slot % p.top_k), p.E);
    ++next[expert[slot] + 1];
  }
  next[0] = 0;  // it counted the slots of no expert
  for (int e = 0; e < p.E; ++e) p.offs[e] = next[e + 1] += next[e];
  std::fill(p.permutation + next[p.E], p.permutation + p.N, -1);
  for (int64_t slot = 0; slot < p.N; ++slot) {
    const int e = expert[slot], position = e < 0 ? -1 : next[e]++;
    p.inverse[slot] = position;
    if (position >= 0) p.permutation[position] = int(slot);
  }
}

void tokens_by_rank_cpu(const TokensByRankParams& p) {
  std::fill_n(p.counts, 2 * p.R, 0);
  std::vector<int> slots(p.R);
  for (int64_t t = 0; t < p.T; ++t) {
    std::fill(slots.begin(), slots.end(), 0);
    for (int64_t j = 0; j < p.top_k; ++j) {
      const int e = expert_of(p.ids.at(t, j), int64_t(p.R) * p.L);
      if (e >= 0) ++slots[e / p.L];
    }
    for (int r = 0; r < p.R; ++r) {
      p.by_rank[t * p.R + r] = slots[r] ? r : -1;
      p.counts[2 * r] += slots[r] > 0;
      p.counts[2 * r + 1] += slots[r];
    }
  }
}

void permute_indices_cpu(const PermuteIndicesParams& p) {
  const int64_t n = p.R * p.E;
  std::vector<int64_t> end(n + 1);  // end[i + 1]: the end of the tokens of (rank, expert) number i
  for (int64_t i = 0; i < n; ++i) end[i + 1] = std::min(p.M, end[i] + p.count(i));
  std::fill_n(p.indices, p.P, -1);
  for (int64_t e = 0, start = 0; e < p.E; ++e) {
    int* next = p.indices + start;
    for (int64_t i = e; i < n; i += p.E)
      for (int64_t token = end[i]; token < end[i + 1]; ++token) *next++ = int(token);
    const int64_t tokens = next - (p.indices + start);
    start += tokens ? round_up<int64_t>(tokens, p.align) : p.empty;
    p.tokens_per_expert[e] = int(tokens);
    p.padded_offs[e] = int(start);
  }
}

void invert_indices_cpu(const int* indices, int64_t count, int* inverse, int64_t size) {
  std::fill_n(inverse, size, -1);
  for (int64_t p = 0; p < count; ++p)
    if (const int64_t i = indices[p]; i >= 0 && i < size) inverse[i] = int(p);
}

void pad_sources_cpu(const TokenGroupsParams& p) {
  const std::vector<int> ends = safe_ends(p.offs, p.E, p.M);
  int64_t position = 0;
  std::vector<int64_t> padded_starts(p.E + 1, p.P);
  for_each_group(ends, [&](int64_t e, int64_t, int64_t size) {
    if (p.starts) position = std::max<int64_t>(position, clamp_offset(p.starts[e], int(p.P)));
    padded_starts[e] = position;
    if (p.starts) return;
    p.padded_starts[e] = int(position);
    position += round_up<int64_t>(size, p.align);
    p.padded_offs[e] = int(position);
  });
  if (!p.source) return;
  std::fill_n(p.source, p.P, -1);
  for_each_group(ends, [&](int64_t e, int64_t start, int64_t size) {
    // Given starts may leave too little room: a group then ends where the next one begins.
    for (int64_t i = 0; i < size && padded_starts[e] + i < padded_starts[e + 1]; ++i)
      p.source[padded_starts[e] + i] = int(start + i);
  });
}

void unpad_sources_cpu(const TokenGroupsParams& p) {
  std::fill_n(p.source, p.M, -1);
  for_each_group(safe_ends(p.offs, p.E, p.M), [&](int64_t e, int64_t start, int64_t size) {
    const int64_t first = p.starts[e];
    for (int64_t i = 0; i < size; ++i)
      if (first + i >= 0 && first + i < p.P) p.source[start + i] = int(first + i);
  });
}

void copy_rows_cpu(const CopyRowsParams& p) {
  if (p.row_bytes == 0) return;
  parallel(p.rows, p.rows * p.row_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t from = p.source.row(r);
      char* to = static_cast<char*>(p.to) + r * p.row_bytes;
      if (from < 0) std::memset(to, 0, p.row_bytes);
      else std::memcpy(to, static_cast<const char*>(p.from) + from * p.from_stride, p.row_bytes);
    }
  });
}

void pack_tokens_cpu(const PackTokensParams& p) {
  if (p.row_bytes == 0) return;
  parallel(p.rows, p.rows * p.row_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t source = p.token(r);
      char* row = static_cast<char*>(p.to) + r * p.row_bytes;
      std::memset(row, 0, p.row_bytes);
      for (int i = 0; source >= 0 && i < p.num_columns; ++i) copy_column(p, p.columns[i], source, row);
    }
  });
}

void permute_quantized_cpu(const CopyRowsParams& rows, const PermuteScalesParams& p) {
  copy_rows_cpu(rows);
  const auto* from = static_cast<const char*>(p.from);
  auto* to = static_cast<uint32_t*>(p.to);
  std::fill_n(to, p.extent(), 0);
  const auto move_row = [&](int64_t row, int64_t line) {
    const int64_t source = p.source.row(row);
    if (source < 0) return;
    for (int64_t w = 0; w < p.words; ++w)
      std::memcpy(to + p.word_of_to(line, w), from + p.word_of_from(source, w) * int64_t(sizeof *to), sizeof *to);
  };
  if (!p.offs) {
    for (int64_t row = 0; row < p.P; ++row) move_row(row, row);
    return;
  }
  int64_t first_line = 0;
  for_each_group(safe_ends(p.offs, p.E, p.P), [&](int64_t, int64_t start, int64_t size) {
    for (int64_t i = 0; i < size; ++i) move_row(start + i, first_line + i);
    first_line += padded_scale_rows(size);
  });
}

}  // namespace moe_fp8
