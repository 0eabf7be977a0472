// Tuned constants of the quantizing kernels, by kernel, each with its trade-off. They were tuned on an H200, and no
// result depends on them. docs/kernels/quantize.md has the figures. "No figure": none is on record.
#pragma once
#include <cstdint>

namespace moe_fp8 {

// ---- rows: one scale per row ----
constexpr int64_t kShortRow = 64;         // vectors; a shorter row has one wave, which waits for no other wave
constexpr int kThreadsOfShortRows = 128;  // threads of a block of several short rows
constexpr int kRowVecsOfTwo = 512;        // vectors; a shorter row has two a thread, a longer one four: bytes in flight

// ---- rows concurrent with columns ----
constexpr int kOverlappedThreads = 64;            // of a block; with kOverlappedBlocks, few enough to leave registers
constexpr int kOverlappedBlocks = 16;             // of a multiprocessor
constexpr int64_t kMinOverlappedBytes = 2048;     // of a row; shorter rows run after the columns
constexpr int64_t kShortOverlappedBytes = 4096;   // of a row; a shorter row has one wave
constexpr int64_t kMinThrottledBytes = 1024;      // of a row; shorter rows are not throttled
constexpr int64_t kMinThrottledRows = 1024;       // of an average group; smaller groups are not throttled
constexpr int kGroupsInL2 = 3;                    // throttle only if the L2 holds so many groups
constexpr int kDriftL2s = 6;                      // L2 sizes of x, from which on the kernels would drift apart
constexpr int kRowsPerPost = 32;                  // rows between two posts of progress; no figure
constexpr int64_t kMaxLeadBytes = 1 << 20;        // of x, by which one kernel may be ahead; with more, x leaves the L2
constexpr int kMaxPolls = 256;                    // of the peer's progress, some 100 us, until a wait ends; no figure

// ---- columns: one scale per column of a group, strip by strip ----
constexpr int kSmallThreadRows = 8;     // rows of threads of a small block: several fit, for short groups
constexpr int kLargeThreadRows = 16;    // rows of threads of a large block: one fits, for long groups
constexpr int kSmallBlocks = 4;         // small blocks of a multiprocessor, at most
constexpr int kMinStripsInRing = 2;     // strips that a small block must hold: one in work, one in flight
constexpr int kMaxCluster = 16;         // blocks of a cluster
constexpr int kUnsplitPercent = 80;     // of a cluster's rows; a longer strip is split, to leave room for the next one
constexpr int kPackedPercent = 70;      // of a cluster's rows that several short strips may fill: latency is per strip
constexpr int kPendingCopies = 2;       // copies in flight beyond the next lines' copies, in a long slice; no figure
constexpr int kSlicesAhead = 8;         // slices that are computed at once, one per lane
constexpr int kMaxMailboxPolls = 128;   // of a posted amax, some 0.2 us each, until a waiter recomputes it
constexpr int kReversedRows = 512;      // rows beyond the ring, read last to first: the L2 keeps the first; no figure
constexpr int kLargeThreadsBound = 640;  // caps a large block's threads at 96 registers, so that concurrent rows fit

// Columns whose rows run concurrently leave a part of the shared memory, in percent, to the rows: the columns' bytes in
// flight against the rows' progress.
constexpr int kBlocksWithRows = 2;               // small blocks of a multiprocessor
constexpr int kMaxSmallCluster = 8;              // small blocks of a cluster
constexpr int64_t kMinSmallClusterBytes = 2048;  // of a row, from which on clusters of small blocks pay
struct ReservedShared { int64_t rows; int percent, percent_by_index; };  // for average groups of at most so many rows
constexpr ReservedShared kReserved[] = {{192, 21, 18}, {384, 32, 28}, {2048, 35, 18},
                                        {6144, 32, 17}, {14336, 25, 17}, {INT64_MAX, 21, 14}};
constexpr int64_t kShortThrottledBytes = 4096;   // of a row
constexpr int kReservedThrottled = 28;           // percent; throttled rows wait, so that they need less
constexpr int kReservedThrottledShort = 20;      // percent, for rows of at most kShortThrottledBytes

// ---- row blocks: scaling blocks along rows only ----
constexpr int kRowBlocks16Bit = 5;  // blocks of a multiprocessor for 16-bit x: bytes in flight against registers

// ---- tiles: scaling blocks along columns, or both ways ----
constexpr int kTileBlocks = 2;               // of a multiprocessor: few, so that neighbours are written close in time
constexpr int kTileBlocksOfShortGroups = 3;  // faster where groups end in small tiles
constexpr int64_t kShortGroup = 2048;        // rows
constexpr int kStack = 2;                    // tiles whose columns are stored together: 256 bytes a column

// ---- batch columns: one scale per column of the batch; no figures ----
constexpr int kColumnBlocks = 4, kSourceBlocks = 4, kMoveBlocks = 3;  // of a multiprocessor
constexpr int64_t kLongestBatchRow = 8192;  // elements; a longer row is read once more, for the column maxima

}  // namespace moe_fp8
