// Token movement on the CPU; the headers of tokens/ define it.
#pragma once
#include "tokens/choose_experts.h"
#include "tokens/combine.h"
#include "tokens/copy_rows.h"
#include "tokens/permute.h"
#include "tokens/permute_quantized.h"
#include "tokens/sort_tokens.h"
#include "tokens/token_groups.h"
#include "tokens/tokens_by_rank.h"

namespace moe_fp8 {

void choose_experts_cpu(const ChooseExpertsParams& p);
void choose_experts_backward_cpu(const ChooseExpertsBackwardParams& p);
void sort_tokens_cpu(const SortTokensParams& p);
void tokens_by_rank_cpu(const TokensByRankParams& p);
void permute_indices_cpu(const PermuteIndicesParams& p);
void invert_indices_cpu(const int* indices, int64_t count, int* inverse, int64_t size);
void pad_sources_cpu(const TokenGroupsParams& p);
void unpad_sources_cpu(const TokenGroupsParams& p);
void copy_rows_cpu(const CopyRowsParams& p);
void pack_tokens_cpu(const PackTokensParams& p);
void permute_scales_cpu(const PermuteScalesParams& p);
void combine_cpu(const CombineParams& p);
void combine_backward_cpu(const CombineBackwardParams& p);

}  // namespace moe_fp8
