// Hopper's copy engine, barriers and warpgroup products, as platform/tma.h and platform/wgmma.h call them.
//
// Box copies run when they are issued. Products and chunk copies run when they are waited for. The launch ends if: an
// operand in shared memory or registers changes between issue and wait; warps of a warpgroup multiply differently; a
// product has no fence after the previous wait; or an address is misaligned, out of bounds, or in a block that has
// ended. Which writes the copy engine and the tensor cores see without a fence is not modelled.
#pragma once
#include "matrix.h"

struct CUtensorMap {
  const uint8_t* base;
  int64_t rows, columns, row_stride;
  int box_rows, box_columns;
};

namespace moe_fp8 {

using simt::current;
using simt::Site;

// ---- barriers ------------------------------------------------------------------------------------------------------

// 8 bytes hold: bytes still to arrive, arrivals still to come, arrivals per phase, and the parity of the current phase.
struct PhaseBarrier {
  int32_t bytes;
  uint16_t arrivals, of : 15, phase : 1;
};
static_assert(sizeof(PhaseBarrier) == 8);

inline uint32_t shared_address(const void* p) { return current->shared_address(p); }
inline uint32_t cluster_address(uint32_t shared, uint32_t rank) { return (shared & 0xffffff) | (rank + 1) << 24; }

// The memory of other blocks may only receive arrivals and copies.
inline uint32_t own(uint32_t shared) {
  if (shared >> 24) current->fail("an address of the cluster where one of the block belongs");
  return shared;
}

inline PhaseBarrier* barrier_at(uint32_t address) {
  return reinterpret_cast<PhaseBarrier*>(current->at(address, sizeof(PhaseBarrier), alignof(uint64_t)));
}
inline void barrier_update(uint32_t address, int arrivals, int32_t bytes) {
  bool too_many = false;
  simt::atomic_update(reinterpret_cast<uint64_t*>(barrier_at(address)), [&](uint64_t old) {
    auto b = __builtin_bit_cast(PhaseBarrier, old);
    too_many = arrivals > b.arrivals;
    b.arrivals = uint16_t(b.arrivals - arrivals);
    b.bytes += bytes;
    if (b.arrivals == 0 && b.bytes == 0) {
      b.arrivals = b.of;
      b.phase ^= 1;
    }
    return __builtin_bit_cast(uint64_t, b);
  });
  if (too_many) current->fail("more arrivals at a barrier than it is made for");
}

inline void barrier_init(uint32_t barrier, int arrivals) {
  *barrier_at(own(barrier)) = {0, uint16_t(arrivals), uint16_t(arrivals), 0};
}
inline void fence_barrier_init() { __threadfence(); }
inline void barrier_arrive(uint32_t barrier) { barrier_update(own(barrier), 1, 0); }
// Other threads go on for a while, so a stage that is released too early is refilled before its reader is done.
inline void barrier_arrive_in_cluster(uint32_t barrier) {
  barrier_update(barrier, 1, 0);
  for (int i = 0; i < 3; ++i) current->relax();
}
inline void barrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  barrier_update(own(barrier), 1, int32_t(bytes));
}
inline void barrier_wait(uint32_t barrier, uint32_t phase) {
  const auto* at = reinterpret_cast<const uint64_t*>(barrier_at(own(barrier)));
  while (__builtin_bit_cast(PhaseBarrier, __atomic_load_n(at, __ATOMIC_SEQ_CST)).phase == phase) current->relax();
}
inline void barrier_wait_for_cluster(uint32_t barrier, uint32_t phase) { barrier_wait(barrier, phase); }
inline void store_async(uint32_t shared, uint32_t word, uint32_t barrier) {
  memcpy(current->at(shared, sizeof word, alignof(uint32_t)), &word, sizeof word);
  barrier_update(barrier, 0, -int32_t(sizeof word));
}
inline void fence_async_proxy() {}

inline float load_shared(uint32_t address) { return *reinterpret_cast<float*>(current->at(own(address), 4, 4)); }
inline void load_shared(uint32_t address, float& f0, float& f1) {
  const auto* at = reinterpret_cast<float*>(current->at(own(address), 8, 8));
  f0 = at[0];
  f1 = at[1];
}

// ---- copies --------------------------------------------------------------------------------------------------------

// Returns the position of a byte in rows of 128 or 64 bytes whose 16-byte chunks are swizzled.
inline uint32_t swizzled(uint32_t address, int row_bytes = 128) {
  return address ^ (address >> 7 & (row_bytes / 16 - 1)) << 4;
}

inline void tma_load_box(uint32_t shared, const CUtensorMap& matrix, int c, int r, uint32_t barrier) {
  const int bytes = matrix.box_columns;
  current->at(shared, size_t(matrix.box_rows) * bytes, 128);
  for (int row = 0; row < matrix.box_rows; ++row)
    for (int chunk = 0; chunk < bytes; chunk += 16) {
      unsigned char* to = current->at(swizzled(shared + row * bytes + chunk, bytes), 16, 16);
      const int64_t from_row = int64_t(r) + row, from = int64_t(c) + chunk;
      const bool there = from_row >= 0 && from_row < matrix.rows;
      for (int i = 0; i < 16; ++i)
        to[i] = there && from + i >= 0 && from + i < matrix.columns
                    ? matrix.base[from_row * matrix.row_stride + from + i] : uint8_t(0);
    }
  barrier_update(barrier, 0, -matrix.box_rows * bytes);
}
inline void tma_load_box_multicast(uint32_t shared, const CUtensorMap& matrix, int c, int r, uint32_t barrier) {
  for (uint32_t rank = 0; rank < 2; ++rank)
    tma_load_box(cluster_address(shared, rank), matrix, c, r, cluster_address(barrier, rank));
}
inline void check_bytes(const void* global, uint32_t bytes) {
  if (reinterpret_cast<uintptr_t>(global) % 16 || bytes % 16) current->fail("a copy of no chunks of 16 bytes");
}
inline void bulk_copy(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier) {
  check_bytes(global, bytes);
  memcpy(current->at(shared, bytes, 16), global, bytes);
  barrier_update(barrier, 0, -int32_t(bytes));
}
inline void bulk_prefetch(const void* global, uint32_t bytes) {
  check_bytes(global, bytes);
  const auto* at = static_cast<const volatile uint8_t*>(global);
  for (uint32_t i = 0; i < bytes; i += 16) (void)at[i];  // faults if nothing is there
}
inline void copy_chunk(uint32_t shared, const void* global, bool there) {
  if (there) check_bytes(global, 16);
  current->copy_chunk(current->at(own(shared), 16, 16), there ? global : nullptr);
}
inline void barrier_arrive_after_copies(uint32_t barrier) {
  current->complete_group();
  current->wait_but_for(0);
  barrier_arrive(barrier);
}

inline int make_tensor_map(CUtensorMap* map, const void* base, int64_t rows, int64_t columns, int64_t row_stride,
                           int box_rows, int box_columns = 128) {
  const bool takes_box = box_rows <= 256 && (box_columns == 64 || box_columns == 128);
  if (reinterpret_cast<uintptr_t>(base) % 16 || row_stride % 16 || rows < 1 || columns < 1 || !takes_box)
    return simt::finish(hipErrorInvalidValue, "a matrix that the copy engine does not take");
  *map = {static_cast<const uint8_t*>(base), rows, columns, row_stride, box_rows, box_columns};
  return hipSuccess;
}

// ---- products ------------------------------------------------------------------------------------------------------

// The start of an operand, as its descriptor says. It is in the first row of the swizzle pattern, because the
// descriptors of platform/wgmma.h have no base offset.
inline uint32_t operand_begin(uint32_t operand) {
  const uint32_t address = (operand & 0x3fff) << 4;
  if (address >> 7 & 7) current->fail("an operand that does not begin with 8 swizzled rows");
  return address;
}
// 32 elements of a row, as 8 words.
inline void read_operand(uint32_t operand, int row, uint64_t (&words)[4]) {
  const uint32_t address = operand_begin(operand) + uint32_t(row) * 128;
  for (uint32_t i = 0; i < 2; ++i) memcpy(words + 2 * i, current->at(swizzled(address + 16 * i), 16, 16), 16);
}
inline void read_operand(uint32_t operand, int row, const simt::ElementAccess& is, float* to) {
  uint64_t words[4];
  read_operand(operand, row, words);
  for (int i = 0; i < 4; ++i) is.read(words[i], 8, to + 8 * i);
}
// 16 bfloat16 elements, as the upper halves of floats.
inline void read_bf16(uint32_t operand, int row, float (&to)[16]) {
  uint64_t words[4];
  read_operand(operand, row, words);
  for (int k = 0; k < 16; ++k) to[k] = __builtin_bit_cast(float, uint32_t(words[k / 4] >> (16 * (k % 4))) << 16);
}
// The rows that a thread of a warpgroup reads: row h of a, and rows of b by its registers.
inline int row_of_a(int t, int h) { return t / 32 * 16 + t % 32 / 4 + 8 * h; }
inline int row_of_b(int t, int j, int i) { return 8 * j + 2 * (t % 4) + i; }
inline uint64_t mix_operand(uint64_t digest, uint32_t operand, int row) {
  uint64_t words[4];
  read_operand(operand, row, words);
  for (const uint64_t word : words) digest = simt::mix(digest, word);
  return digest;
}
inline uint64_t digest_b(uint32_t b, int t, int eights) {
  uint64_t digest = uint64_t(eights);  // fewer rows of zeros have another digest
  for (int j = 0; j < eights; ++j)
    for (int i = 0; i < 2; ++i) digest = mix_operand(digest, b, row_of_b(t, j, i));
  return digest;
}
inline uint64_t digest_a(uint32_t a, int t) {
  return mix_operand(mix_operand(0, a, row_of_a(t, 0)), a, row_of_a(t, 1));
}
// Four neighbours in d: the sum of row h of a and row i of b is at 2 h + i, for h and i of 0 and 1.
using Four __attribute__((vector_size(16))) = float;
// Factors of four sums: elements of the two rows of b as {0, 1, 0, 1}, with element k of pair j at j * depth + k.
struct OfB {
  Four rows;
};
// 32 threads of a warpgroup read the same rows, which a digest identifies. read(row, to) reads one row.
template <int n, int depth, class Read>
const OfB* rows_of_b(int t, uint64_t digest, Read read) {
  return current->made_for<OfB>(simt::mix(digest, depth), [&] {
    std::vector<OfB> rows(n / 4 * depth);
    for (int j = 0; j < n / 4; ++j) {
      float of[2][depth];
      for (int i = 0; i < 2; ++i) read(row_of_b(t, j, i), of[i]);
      for (int k = 0; k < depth; ++k) rows[j * depth + k].rows = Four{of[0][k], of[1][k], of[0][k], of[1][k]};
    }
    return rows;
  });
}
// Adds (or sets) a b^T to a thread's d, for its two rows of a. It computes four sums at once, because additions to one
// sum wait for each other.
template <int n, int depth>
SIMT_UNCHECKED void add_rows(float (&d)[n], const float (&of_a)[2][depth], const OfB* b, bool accumulate) {
  static_assert(n % 16 == 0);
  for (int j = 0; j < n / 4; j += 4) {
    Four sums[4] = {};
    if (accumulate) memcpy(sums, d + 4 * j, sizeof sums);
    for (int k = 0; k < depth; ++k) {
      const Four a{of_a[0][k], of_a[0][k], of_a[1][k], of_a[1][k]};
#pragma GCC unroll 4
      for (int next = 0; next < 4; ++next) sums[next] += a * b[(j + next) * depth + k].rows;
    }
    memcpy(d + 4 * j, sums, sizeof sums);
  }
}
inline void check_fence(const Site& site) {
  if (!current->fenced()) current->fail(site.text() + " without a fence since the wait before");
}
constexpr const char* kChanged = "an operand that changed while it was multiplied";

// Thread t of a warpgroup has rows t / 32 * 16 + t % 32 / 4 and 8 more. Of every 8 columns it has 2 (t % 4) and the
// next.
template <bool kE5M2, int n>
void wgmma(float (&d)[n], uint32_t a, uint32_t b, bool accumulate, Site site = Site::here("wgmma")) {
  const int t = int(current->thread_index().x) % 128;
  check_fence(site);
  current->do_in_team(simt::mix(uint64_t(a) << 32 | b, uint64_t(n) << 1 | accumulate));
  const uint64_t of_a = digest_a(a, t), of_b = digest_b(b, t, n / 4);
  current->begin([&d, a, b, accumulate, t, of_a, of_b] {
    if (digest_a(a, t) != of_a || digest_b(b, t, n / 4) != of_b) current->fail(kChanged);
    const simt::ElementAccess a_is(kE5M2 ? simt::Held::kE5M2 : simt::Held::kE4M3), b_is(simt::Held::kE4M3);
    float rows[2][32];
    for (int h = 0; h < 2; ++h) read_operand(a, row_of_a(t, h), a_is, rows[h]);
    const auto read = [&](int row, float* to) { read_operand(b, row, b_is, to); };
    add_rows(d, rows, rows_of_b<n, 32>(t, of_b, read), accumulate);
  });
  current->wave_barrier(site);
}
// Lane q of a quad holds, in both of its rows of a, elements 2 q and 2 q + 1, and the two that are 8 further. The
// registers stay valid until the wait. A thread's sums need whole rows, so lanes exchange their elements when the
// product begins.
struct RowsOfQuad {
  float of[2][16];

  RowsOfQuad(const uint32_t (&a)[4], const Site& site) {
    for (int h = 0; h < 2; ++h) {
      const uint64_t* quad = current->share(a[h] | uint64_t(a[2 + h]) << 32, site) + (current->lane() & ~3u);
      for (int k = 0; k < 16; ++k) {
        const unsigned bits = quad[k % 8 / 2] >> (32 * (k / 8) + 16 * (k % 2)) & 0xffff;
        of[h][k] = __builtin_bit_cast(float, bits << 16);
      }
    }
  }
};
template <int n>
void wgmma_bf16(float (&d)[n], const uint32_t (&a)[4], uint32_t b, bool accumulate,
                Site site = Site::here("wgmma_bf16")) {
  static_assert(n == 64 || n == 128);
  const int t = int(current->thread_index().x) % 128;
  check_fence(site);
  current->do_in_team(simt::mix(b, uint64_t(n) << 1 | accumulate));
  const uint64_t of_b = digest_b(b, t, n / 4);
  const RowsOfQuad rows(a, site);
  const std::vector<uint32_t> was(a, a + 4);
  current->begin([&d, &a, b, accumulate, t, of_b, rows, was] {
    if (!std::equal(a, a + 4, was.begin()))
      current->fail("registers of an operand that changed while they were multiplied");
    if (digest_b(b, t, n / 4) != of_b) current->fail(kChanged);
    const auto read = [b](int row, float(&to)[16]) { read_bf16(b, row, to); };
    add_rows(d, rows.of, rows_of_b<n, 16>(t, of_b, read), accumulate);
  });
}
inline void wgmma_fence(Site site = Site::here("wgmma_fence")) {
  current->fence(true);
  current->wave_barrier(site);
}
inline void wgmma_commit() { current->complete_group(); }
template <int kPending>
void wgmma_wait(Site site = Site::here("wgmma_wait")) {
  current->wait_but_for(kPending);
  current->fence(false);  // registers may be read and written again
  current->wave_barrier(site);  // no lane goes on before all products are complete
}

// Rounds two numbers to bfloat16, to nearest even. A NaN has all bits set.
inline uint32_t to_bf16(float f) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, f);
  return f != f ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline uint32_t to_bf16x2(float lo, float hi) { return to_bf16(lo) | to_bf16(hi) << 16; }

template <int n>
void pin_registers(float (&)[n]) {}
inline void pin_register(const uint8_t*&) {}
inline int read_thread_index() { return int(current->thread_index().x); }
template <int kRegisters>
void warpgroup_reg_alloc() {}
template <int kRegisters>
void warpgroup_reg_dealloc() {}

// Stores to the block's own memory, with the lane layout of simt::load_matrices.
inline void load_matrices(uint32_t (&w)[4], uint32_t shared, Site site = Site::here("load_matrices")) {
  simt::load_matrices(w, current->at(own(shared), 16, 16), site);
}
// Lane 8 m + r has the address of row r of matrix m. Word m of lane t is columns 2 (t % 4) and the next of row t / 4.
inline void store_matrices(uint32_t shared, uint32_t w0, uint32_t w1, uint32_t w2, uint32_t w3,
                           Site site = Site::here("store_matrices")) {
  const unsigned t = current->lane();
  if (t == 0) current->relax();  // producers go on while a tile is stored
  const uint32_t words[] = {w0, w1, w2, w3};
  const uint64_t* rows = current->share(own(shared), site);
  for (unsigned m = 0; m < 4; ++m)
    memcpy(current->at(uint32_t(rows[8 * m + t / 4]), 16, 16) + t % 4 * 4, &words[m], 4);
}
// A row of a matrix is a column of the lanes: word m of lane t is rows 2 (t % 4) and the next, at column t / 4.
inline void store_matrices_transposed(uint32_t shared, uint32_t w0, uint32_t w1, uint32_t w2, uint32_t w3,
                                      Site site = Site::here("store_matrices_transposed")) {
  const unsigned t = current->lane();
  if (t == 0) current->relax();
  const uint32_t words[] = {w0, w1, w2, w3};
  const uint64_t* rows = current->share(own(shared), site);
  for (unsigned m = 0; m < 4; ++m)
    for (unsigned i = 0; i < 2; ++i) {
      const auto element = uint16_t(words[m] >> (16 * i));
      memcpy(current->at(uint32_t(rows[8 * m + t % 4 * 2 + i]), 16, 16) + t / 4 * 2, &element, 2);
    }
}

}  // namespace moe_fp8
