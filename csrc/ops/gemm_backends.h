// The table of GEMM backends. The first backend that takes a product runs it.
#pragma once
#include <string_view>
#include <vector>

#include "numerics/format.h"

struct AtenTensorOpaque;

namespace moe_fp8 {

class Call;
struct Product;  // ops/gemm_product.h

// What a backend requires of a product, beyond its format. The defaults require nothing.
struct Needs {
  int least_sm = 0, most_sm = 0;  // compute capability, 90 for Hopper; 0: any GPU
  // Multiples of K; of N, and in 2D x 2D of the rows of a; and of all offs in 2D x 2D, as the caller promises them.
  int sum = 1, columns = 1, offs = 1;
  int most_experts = kMaxExperts;
  bool e4m3 = false;      // operands are float8_e4m3fn
  bool bfloat16 = false;  // the output or the total is bfloat16: the backend's product is, too
  bool chunks = false;    // rows of operands, and a total, begin at multiples of 16 bytes
  bool packed = false;    // operands are contiguous, scales begin at a multiple of 16 bytes
};

struct Backend {
  const char* name;
  const char* what;
  bool gpu;
  std::vector<const char*> builds;  // builds that have it: "cuda", "rocm", "cpu"
  bool (*multiplies)(const Format&);
  bool optional;  // torch may have been built without it; its call would then raise every time
  Needs needs;
  bool (*also)(const Product&);  // whether it takes the product in all that `needs` does not say; null: yes
  // Returns out, which may be the total; the caller owns it. Null where the backend was not built.
  AtenTensorOpaque* (*run)(const Call&, const Product&);
  // Whether it gathers the rows of a itself, by index. Null or false: permute_quantized moves them before.
  bool (*by_index)(const Product&) = nullptr;

  bool takes(const Product& product) const;
};

// The whole table, for the documents.
const std::vector<Backend>& all_backends();
// The backends of this build that this torch has. The first call, while the module loads, says how torch was built.
const std::vector<Backend>& backends(std::string_view torch_config = {});

}  // namespace moe_fp8
