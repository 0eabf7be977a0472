// The ids of experts at the slots of a router's choice.
#pragma once
#include <cstdint>

#include "platform/compiler.h"

namespace moe_fp8 {

// Ids [T, top_k], int32 or int64, or null. Rows are `stride` elements apart.
struct SlotIds {
  const void* ids;
  int64_t stride;
  bool is_int64;

  MOE_HD int64_t at(int64_t token, int64_t slot) const {
    const int64_t i = token * stride + slot;
    return is_int64 ? static_cast<const int64_t*>(ids)[i] : static_cast<const int*>(ids)[i];
  }
};

template <class Id>
MOE_HD int expert_of(Id id, int64_t E) { return id >= 0 && id < E ? int(id) : -1; }  // -1: no expert

}  // namespace moe_fp8
