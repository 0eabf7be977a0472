// Tuned constants of the quantizing kernels. Each says what it trades; all were measured on an H200. The measurements
// stand in docs/kernels/quantize.md.
#pragma once
#include <cstdint>

namespace moe_fp8 {

// ---- rows: one scale per row ----
constexpr int64_t kShortRow = 64;         // vectors: up to so many, a wave takes a row alone and waits for no other
constexpr int kThreadsOfShortRows = 128;  // threads of a block of several short rows
constexpr int kRowVecsOfTwo = 512;        // up to so many vectors a thread has two of them, beyond that four

// ---- rows concurrent with columns ----
constexpr int kOverlappedThreads = 64, kOverlappedBlocks = 16;   // per block, per multiprocessor: they leave room
constexpr int64_t kMinOverlappedBytes = 2048;                    // shorter rows run after the columns
constexpr int64_t kShortOverlappedBytes = 4096;                  // shorter rows have a wave each
constexpr int64_t kMinThrottledBytes = 1024;                     // of a row; shorter rows are not throttled
constexpr int64_t kMinThrottledRows = 1024;                      // of an average group
constexpr int kGroupsInL2 = 3;                                   // throttle only where the L2 holds so many groups
constexpr int kDriftL2s = 6;                                     // smaller x, in L2 sizes, does not drift apart
constexpr int kRowsPerPost = 32;                                 // rows between two posts of progress
constexpr int64_t kMaxLeadBytes = 1 << 20;                       // of x, by which one kernel may be ahead
constexpr int kMaxPolls = 256;  // of the peer's progress, some 100 us, until a wait ends

// ---- columns: one scale per column of a group, strip by strip ----
constexpr int kSmallThreadRows = 8, kLargeThreadRows = 16;  // of a block: small blocks for short groups
constexpr int kSmallBlocks = 4;                             // most small blocks of a multiprocessor
constexpr int kStripsHeld = 2;  // strips that such a block must hold: one in work, one to come
constexpr int kMaxCluster = 16;                             // blocks of a cluster
constexpr int kAlonePercent = 80;     // of a cluster's rows: longer groups are shared by a team of clusters
constexpr int kTogetherPercent = 70;  // of a cluster's rows that several short strips may fill together
constexpr int kCopiesBehind = 2;      // copies in flight behind those that the next lines need, in a long slice
constexpr int kSlicesAhead = 8;       // slices that are computed at once, one a lane
constexpr int kMaxMailboxPolls = 128;  // of a posted amax, some 0.2 us each, until a waiter recomputes it
constexpr int kRowsBack = 512;        // of rows that no block holds, read last to first: the L2 then keeps the first

// Columns whose rows run concurrently leave a part of the shared memory, in percent, to the rows.
constexpr int kBlocksWithRows = 2, kMaxSmallCluster = 8;
constexpr int64_t kMinSmallClusterBytes = 2048;  // of a row: from so many on, clusters of small blocks pay
struct ReservedShared { int64_t rows; int percent, percent_by_index; };  // for groups of up to so many rows
constexpr ReservedShared kReserved[] = {{192, 21, 18}, {384, 32, 28}, {2048, 35, 18},
                                        {6144, 32, 17}, {14336, 25, 17}, {INT64_MAX, 21, 14}};
constexpr int64_t kShortThrottledBytes = 4096;  // of a row
constexpr int kReservedThrottled = 28, kReservedThrottledShort = 20;  // throttled rows wait, so that they need less

// ---- tiles: scaling blocks along columns, or both ways ----
constexpr int kTileBlocks = 2, kTileBlocksOfShortGroups = 3;  // of a multiprocessor: few, so that stores stay close
constexpr int64_t kShortGroup = 2048;                         // rows
constexpr int kStack = 2;  // tiles, one below the other, whose columns are stored together: 256 bytes a column

// ---- batch columns: one scale per column of the batch ----
constexpr int kColumnBlocks = 4, kSourceBlocks = 4, kMoveBlocks = 3;  // of a multiprocessor
constexpr int64_t kLongestBatchRow = 8192;  // longer rows are quantized apart from the search for column maxima

}  // namespace moe_fp8
