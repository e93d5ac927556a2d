// What the warpgroups of the MLA kernels for 64 heads at a time share. See consumer.cuh.
#pragma once

#include <cstdint>

#include "common/gather.cuh"
#include "common/tile.cuh"
#include "mla/layout.h"

namespace jax_dsa::mla {

inline constexpr int kHeads = 64;     // heads of an item
inline constexpr int kThreads = 384;  // three warpgroups
inline constexpr int kKeyBlocks = 9;
inline constexpr int kProbabilities = 8;  // the block of a key tile that P replaces
inline constexpr float kLazyMargin = 8.f;

// 0 is __syncthreads.
enum NamedBarrier {
  kEvenReady = 1,  // P and the references of an even tile are in shared memory
  kOddReady,       // ... of an odd tile
  kTurn,           // the even warpgroup has issued its scores; the odd one may issue its own
                   // (staggers the softmaxes)
  kEvenScored,     // the even tile's scores have used its keys; an odd tile's: the next number
  kOddScored,
  kEvenUnpacked,  // records of an even tile are bf16; of an odd one: the next number
  kOddUnpacked,
};

// What the producer tells of an item.
struct Tiles {
  static constexpr bool kRecords = false;  // whether keys come as FP8 records
  int tiles;                               // of the item whose Q is here
};

// `Notes` has what `Tiles` has.
template <int kD, typename Notes = Tiles>
struct alignas(1024) Shared {
  uint8_t q[kD / 64][kBlockBytes];
  uint8_t keys[2][kKeyBlocks][kBlockBytes];
  float reference[2][kHeads];  // by owner of the tile, log2 units
  float2 sum[2][128];          // by owner, of every thread; written with an item's last tiles
  uint8_t stage[8][1024];      // each warp's, for its output
  ValidRows valid[2];          // by tile parity
  Notes notes;
  uint64_t q_full, q_free;
  // By tile parity, and
  uint64_t key_full[2][2];  // the owner's half of the value columns; all columns
  uint64_t key_free[2][2];  // rows 0..31 but for the ninth block; everything
};

}  // namespace jax_dsa::mla
