// Tuned constants of the activation kernels, forward and backward. docs/kernels/activations.md has the figures, all of
// an H200 (sm_90a). A constant without a figure is only known to keep every kernel free of spills. Where a constant
// depends on kCudaArch, the compiler takes more registers for that architecture; nothing was measured there.
#pragma once
#include "platform/compiler.h"

namespace moe_fp8 {

// ---- activate() and activate_backward(): blocks of 256 threads, a wave a row ----------------------------------------

constexpr int kActivateVecs = 4;            // loads in flight a lane, against registers
constexpr int kActivateBlocks = 4;          // resident blocks, against registers: at most 64 a thread
constexpr int kActivateBackwardVecs = 2;    // loads in flight a lane, of h and da each, against registers
// Resident blocks, against registers. With three, a thread has 80, and a clamped gate spills on sm_100a. With two, it
// takes 1,219 us instead of 1,140 on sm_90a, at [131072, 2880].
constexpr int activate_backward_blocks(bool clamped) { return clamped && kCudaArch / 100 == 10 ? 2 : 3; }

// ---- quantize_activated() -------------------------------------------------------------------------------------------

constexpr int kVecsPerLane = 4;             // loads in flight a lane, which share the cost of scales, against registers
constexpr int kMaxThreadsPerRow = 256;      // limits the row that registers hold (8192 features), against occupancy
constexpr int kTeamBlockThreads = 128;      // of a block of several row teams: fewer blocks, against idle teams
// Resident threads with h in registers, against registers: 80 a thread.
constexpr int kActivatedThreads = kCudaArch >= 1200 ? 512 : 768;
constexpr int kMxActivatedThreads = 1024;   // resident threads with h in shared memory: 396 us; 512 in registers 417

// ---- quantize_activated_backward(), scales of whole rows: a pass by rows, then a pass by columns --------------------

constexpr int kMaxRowTeam = 256;            // threads of a row in a block (2048 features), against occupancy
constexpr int kMaxRowCluster = 8;           // blocks that share a row: limits it to 16,384 features. Any GPU with
                                            // clusters has clusters of eight
constexpr int kRowPassBlockThreads = 128;   // of a block of several row teams: fewer blocks, against idle teams
constexpr int kRowPassBlocks = 2;           // resident blocks of kMaxRowTeam threads: at most 128 registers a thread
constexpr int kRowPassBound = kCudaArch >= 1000 ? 1 : kRowPassBlocks;  // of the kernels' launch bounds
// Rows in flight a team, against registers; a light curve takes fewer.
constexpr int kMaxRowPassRows = 4;
MOE_HD constexpr int row_pass_rows(bool light) { return light ? kMaxRowPassRows : 2; }
// Blocks of the grid: kRowPassRounds for each resident block, so that all end at about the same time. A block makes at
// least kMinRowPassSteps steps of kMaxRowPassRows rows, because it ends with an atomic maximum for every column.
constexpr int kRowPassResidentThreads = 512, kRowPassRounds = 12, kMinRowPassSteps = 4;

constexpr int kRowBlocksTeam = 256;         // threads of a block, scales of blocks along rows only
// Resident blocks: at most 128 registers a thread.
constexpr int kRowBlocksResident = kCudaArch == 890 || kCudaArch >= 1200 ? 1 : 2;

constexpr int kColumnPassLines = 2;         // lines of 128 positions a block: 256 bytes a store, against shared memory
constexpr int kColumnPassVecs = 8;          // of eight features a block: the length of reads, against shared memory
constexpr int kColumnPassBlocks = 2;        // resident blocks: 128 registers, which hold 32 activations a thread
// Features cast at once, against registers.
MOE_HD constexpr int column_pass_features(bool light) { return light ? 4 : 2; }

constexpr int kGradientPlaceThreads = 256;  // of the small kernels before and between the passes

// ---- sum_groups(), and the sums of quantize_activated_backward() ----------------------------------------------------

constexpr int kSumGroupsBlocks = 3;   // resident blocks that read x: 16 loads in flight a lane, against registers
constexpr int kSumGroupsRounds = 16;  // blocks of the grid for each multiprocessor: each one places the groups first
constexpr int kSumThreadRows = 8;     // sums of 256 rows that a block makes at once, against idle threads

// ---- quantize_activated_backward(), scales of blocks: one pass by tiles ---------------------------------------------

constexpr int kGradientTileBlocks = 2;      // resident blocks: one reads while the other stores
// Rows in flight a lane, against registers.
MOE_HD constexpr int tile_rows_in_flight(bool light) { return light ? 4 : 2; }
constexpr int kDscoresSumThreads = 128;     // of the kernel that sums dscores over tiles

}  // namespace moe_fp8
