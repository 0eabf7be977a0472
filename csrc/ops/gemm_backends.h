// Who multiplies: the table of GEMMs in the order in which they are tried, and what each takes.
#pragma once
#include <string_view>
#include <vector>

#include "numerics/format.h"

struct AtenTensorOpaque;

namespace moe_fp8 {

class Call;
struct Product;  // ops/gemm_product.h

// What a backend asks of a product beyond its format. The defaults ask for nothing.
struct Needs {
  int least_sm = 0, most_sm = 0;  // compute capability, 90 for Hopper; 0: of any GPU
  // Multiples: of K; of N, and in 2D x 2D of the rows of a; of all offs in 2D x 2D, as the caller promises them.
  int sum = 1, columns = 1, offs = 1;
  int most_experts = kMaxExperts;
  bool e4m3 = false;      // operands of float8_e4m3fn
  bool bfloat16 = false;  // an output or a total of bfloat16: the product has no float32 digits to give
  bool chunks = false;    // operands whose rows begin at multiples of 16 bytes, a total that does
  bool packed = false;    // contiguous operands, scales that begin at a multiple of 16 bytes
};

struct Backend {
  const char* name;
  const char* what;
  bool gpu;
  std::vector<const char*> builds;  // that have it: "cuda", "rocm", "cpu"
  bool (*multiplies)(const Format&);
  bool optional;  // torch may have been built without it, and the call then raises, every time
  Needs needs;
  bool (*also)(const Product&);  // whether it takes the product in all that `needs` does not say; null: yes
  // out, which may be the total, owned by the caller; null where it was not built
  AtenTensorOpaque* (*run)(const Call&, const Product&);
  // Whether it takes the rows of a where they lie; null: by index, they are moved before.
  bool (*by_index)(const Product&) = nullptr;

  bool takes(const Product& product) const;
};

// The whole table, for the documents.
const std::vector<Backend>& all_backends();
// Those of this build that this torch has. The first call, the module's while it loads, says how torch was built.
const std::vector<Backend>& backends(std::string_view torch_config = {});

}  // namespace moe_fp8
