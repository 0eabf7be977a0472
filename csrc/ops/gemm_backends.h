// The table of GEMM backends. The first backend that takes a product runs it.
//
// Digits: a float32 output gets a float32 product, and so does a float32 total. A backend whose product is bfloat16
// takes bfloat16 outputs and totals only. So adding to zeros gives the backend's plain product in the dtype of the
// total, byte for byte, except that -0 becomes +0.
#pragma once
#include <optional>
#include <string_view>
#include <vector>

#include "numerics/format.h"

struct AtenTensorOpaque;

namespace moe_fp8 {

class Call;
struct Product;  // ops/gemm_product.h

// The requirements of a backend on a product, beyond its format. The defaults require nothing.
struct Needs {
  int min_sm = 0, max_sm = 0;  // compute capability, 90 for Hopper; 0: any GPU
  int sum = 1;      // K is a multiple of it
  int columns = 1;  // N is; in 2D x 2D, so is the number of rows of a
  int offs = 1;     // in 2D x 2D, `align` is, which the caller promises of all offs
  int max_experts = kMaxExperts;
  bool e4m3 = false;      // operands are float8_e4m3fn
  bool bfloat16 = false;  // the output or the total is bfloat16, because the backend's product is
  bool chunks = false;    // rows of operands, and a total, begin at multiples of 16 bytes
  bool packed = false;    // operands are contiguous, scales begin at a multiple of 16 bytes
  std::optional<Rounding> rounding = {};  // of the scales, which the caller must promise; null: any
};

struct Backend {
  const char* name;
  const char* what;
  bool gpu;
  std::vector<const char*> builds;  // builds that have it: "cuda", "rocm", "cpu"
  bool (*multiplies)(const Format&);
  bool optional;  // an option of torch's build; without it, every call would raise
  Needs needs;
  bool (*supports)(const Product&);  // conditions beyond `needs`; null: none
  // Returns out, which may be the total; the caller owns it. Null if the backend was not built.
  AtenTensorOpaque* (*run)(const Call&, const Product&);
  // Whether the backend gathers rows of a by index. If null or false, permute_quantized moves the rows first.
  bool (*can_gather_rows)(const Product&) = nullptr;
  // Whether the backend writes a new 2D x 2D out transposed. If null or false, the op copies it.
  bool (*can_transpose)(const Product&) = nullptr;
  // Whether the backend adds a low-rank term itself, and rounds once. If null or false, the op adds it to the out.
  bool (*can_add_low_rank)(const Product&) = nullptr;

  bool takes(const Product& product) const;
};

// The whole table, for the documents.
const std::vector<Backend>& all_backends();
// The backends of this build that this torch has. The first call passes torch's build options, as the module loads.
const std::vector<Backend>& backends(std::string_view torch_config = {});

}  // namespace moe_fp8
