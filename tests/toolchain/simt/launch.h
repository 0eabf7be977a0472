// Runs a grid: a pool of OS threads takes its blocks in order.
#pragma once
#include "block.h"

namespace simt {

// `body(argument)` runs in every thread of every block. Returns the error, or an empty string.
std::string run(dim3 grid, dim3 block, size_t shared_bytes, void (*body)(const void*), const void* argument,
                unsigned cluster);

template <class F>
std::string run(dim3 grid, dim3 block, size_t shared_bytes, const F& function, unsigned cluster) {
  return run(grid, block, shared_bytes, [](const void* f) { (*static_cast<const F*>(f))(); }, &function, cluster);
}

}  // namespace simt
