#include "scales/dequantize.h"

#include "numerics/dispatch.h"
#include "platform/launch.h"
#include "platform/memory.h"
#include "primitives/elements.h"
#include "primitives/operand.h"

namespace moe_fp8 {
namespace {

// blockDim.x threads share a row, blockDim.y rows a block. A thread stays at its columns, looks their scaling
// block up once and takes kRows rows at a time, so that their loads are under way together.
constexpr int kThreads = 256, kRows = 4;
constexpr int kMaxGridY = 65535;
constexpr int64_t kMaxBlocks = 1 << 23;  // HIP has fewer than 2^32 threads a launch

// What a thread takes of a row at a time: 16 bytes of out, or an element of a type known at run time.
template <class Out>
struct Pieces {
  static constexpr int kElements = 16 / sizeof(typename Out::Bits);

  static MOE_DEVICE Vec8 load(const uint8_t* q) {
    if constexpr (kElements == 8) return load_stream(reinterpret_cast<const Vec8*>(q));
    else return Vec8{{load_stream(reinterpret_cast<const uint32_t*>(q)), 0}};
  }
  static MOE_DEVICE void store(const DequantizeParams& p, int64_t at, const float (&v)[kElements]) {
    Vec16 piece;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kElements == 4) piece.w[i] = Out::from_float(v[i]);
      else piece.w[i] = packed<Out>(v[2 * i], v[2 * i + 1]);
    }
    if constexpr (std::is_same_v<Out, BF16>) {
      if (p.for_quads) {
        auto* out = static_cast<typename Out::Bits*>(p.out) + at;
        store_stream(reinterpret_cast<Vec8*>(out), Vec8{{piece.w[0], piece.w[2]}});
        store_stream(reinterpret_cast<Vec8*>(out + in_quads(2)), Vec8{{piece.w[1], piece.w[3]}});
        return;
      }
    }
    store_stream(reinterpret_cast<Vec16*>(static_cast<typename Out::Bits*>(p.out) + at), piece);
  }
};
struct Elements {
  static constexpr int kElements = 1;

  static MOE_DEVICE Vec8 load(const uint8_t* q) { return Vec8{{load_stream(q), 0}}; }
  static MOE_DEVICE void store(const DequantizeParams& p, int64_t at, const float (&v)[1]) {
    store_element(p.out, p.out_type, at, v[0]);
  }
};
// Where column k lies in a row of out.
MOE_DEVICE int64_t place_of(const DequantizeParams& p, int64_t k) {
  return p.for_quads ? k - k % 16 + in_quads(int(k % 16)) : k;
}

struct Column {
  ColumnBlock block;
  bool live;  // belongs to a group, where columns are grouped
};
MOE_DEVICE Column column_at(const DequantizeParams& p, const GroupTable& table, int k) {
  if (p.groups != Groups::kColumns) return {p.scale.block(0, int(p.K), k), true};
  const int g = GroupTable::find(table.row, p.num_groups, k);
  if (g >= p.num_groups) return {{}, false};
  return {block_of_group(p.scale, table, g, k - table.row[g]), true};
}

struct Line {
  int64_t e, row;
};
// Row `ahead` of matrix e, counted on into the matrices behind it: mostly there is nothing to divide.
MOE_DEVICE Line line_at(const DequantizeParams& p, int64_t e, int64_t ahead) {
  if (ahead < p.rows) return {e, ahead};
  const int64_t whole = ahead / p.rows;
  return {e + whole, ahead - whole * p.rows};
}

struct ScaleRow {
  int64_t row;
  bool live;  // belongs to a group, where rows are grouped
};
MOE_DEVICE ScaleRow scale_row_of(const DequantizeParams& p, const GroupTable& table, int64_t row) {
  if (p.groups != Groups::kRows) return {row, true};
  const int g = GroupTable::find(table.row, p.num_groups, int(row));
  return {row + table.pos[g] - table.row[g], g < p.num_groups};
}

// Columns that are not all of one block.
MOE_DEVICE void one_by_one(const DequantizeParams& p, const GroupTable& table, const float* values, int k, int k_end) {
  const int64_t lines = p.E * p.rows, step = gridDim.y * blockDim.y;
  for (; k < k_end; ++k) {
    const Column c = column_at(p, table, k);
    for (int64_t i = blockIdx.y * blockDim.y + threadIdx.y; i < lines; i += step) {
      const Line line = line_at(p, 0, i);
      const ScaleRow scale = scale_row_of(p, table, line.row);
      float v[1] = {};
      if (scale.live && c.live)
        v[0] = values[p.q[line.e * p.group_stride + line.row * p.row_stride + k]] *
               p.scale.at(line.e, scale.row, c.block);
      Elements::store(p, i * p.K + place_of(p, k), v);
    }
  }
}

template <class Part>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, 1) dequantize_kernel(MOE_GRID_CONSTANT const DequantizeParams p) {
  constexpr int kElements = Part::kElements;
  __shared__ float values[256];
  __shared__ int table_words[GroupTable::words(kMaxExperts)];
  static_assert(kThreads == 256);
  const int t = threadIdx.y * blockDim.x + threadIdx.x;
  values[t] = decode(p.type, uint8_t(t));
  wait_for_previous_kernel();
  const GroupTable table(table_words, p.num_groups);
  const int extent = int(p.groups == Groups::kRows ? p.rows : p.K);
  if (p.groups != Groups::kNone)
    build_group_table(table, p.offs, p.num_groups, extent, extent, kGroupScales, p.multiple);
  __syncthreads();

  const int64_t k = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * kElements;
  if (k >= p.K) return;
  const Column first = column_at(p, table, int(k)), last = column_at(p, table, int(k) + kElements - 1);
  const bool one_block = first.live == last.live && first.block.first == last.block.first &&
                         first.block.at == last.block.at;
  if (!one_block) return one_by_one(p, table, values, int(k), int(k) + kElements);
  const ColumnScales scales = p.scale.of_column(first.block);
  const int64_t lines = p.E * p.rows, at_once = kRows * blockDim.y, place = place_of(p, k);
  for (int64_t begin = blockIdx.y * at_once + threadIdx.y; begin < lines; begin += gridDim.y * at_once) {
    Vec8 q[kRows];
    uint32_t scale_bits[kRows];
    Line line = line_at(p, 0, begin);
#pragma unroll
    for (int r = 0; r < kRows; ++r, line = line_at(p, line.e, line.row + blockDim.y)) {
      q[r] = {};
      scale_bits[r] = 0;
      if (begin + r * blockDim.y >= lines || !first.live) continue;
      const ScaleRow scale = scale_row_of(p, table, line.row);
      if (!scale.live) continue;
      q[r] = Part::load(p.q + line.e * p.group_stride + line.row * p.row_stride + k);
      scale_bits[r] = scales.bits(line.e, scale.row);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t line = begin + r * blockDim.y;
      if (line >= lines) break;
      const float scale = scales.value(scale_bits[r]);
      float v[kElements];
#pragma unroll
      for (int i = 0; i < kElements; ++i) v[i] = values[q[r].w[i / 4] >> (8 * (i % 4)) & 0xffu] * scale;
      Part::store(p, line * p.K + place, v);
    }
  }
}

template <class Part>
int launch_with(const DequantizeParams& p, void* stream) {
  const int64_t pieces = ceil_div<int64_t>(p.K, Part::kElements), most = kThreads / (Part::kElements == 1 ? 1 : 2);
  int x = 1;
  while (x < most && x < pieces) x *= 2;
  const int y = kThreads / x;
  // Blocks that fill the device, and more of them while each still has some turns for the tables that it makes.
  const int64_t chunks = ceil_div<int64_t>(pieces, x), turns = ceil_div<int64_t>(p.E * p.rows, kRows * y);
  const int64_t filling = ceil_div<int64_t>(16 * device().multiprocessors, chunks);
  int64_t along_y = ceil_div<int64_t>(turns, p.groups == Groups::kNone ? 4 : 16);
  if (along_y < filling) along_y = turns < filling ? turns : filling;
  if (along_y > kMaxGridY) along_y = kMaxGridY;
  if (along_y > kMaxBlocks / chunks) along_y = kMaxBlocks / chunks;
  return launch(dequantize_kernel<Part>, {dim3(unsigned(chunks), unsigned(along_y)), dim3(x, y), stream}, p);
}

}  // namespace

int dequantize(const DequantizeParams& p, void* stream) {
  if (p.E * p.rows * p.K == 0) return 0;
  return dispatch_in(p.out_type, [&](auto out) {
    using Part = Pieces<decltype(out)>;
    const uint64_t bits = p.K | p.row_stride | p.group_stride | reinterpret_cast<uintptr_t>(p.q);
    const bool aligned = bits % Part::kElements == 0 && reinterpret_cast<uintptr_t>(p.out) % 16 == 0;
    return aligned ? launch_with<Part>(p, stream) : launch_with<Elements>(p, stream);
  });
}

}  // namespace moe_fp8
