// Constants, named barriers and shared memory of the kernels that process 64 heads at a time. See
// consumer.cuh.
#pragma once

#include <cstdint>

#include "common/gather.cuh"
#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "mla/layout.h"

namespace jax_dsa::mla {

inline constexpr int kHeads = 64;     // heads (rows of Q) per work tile
inline constexpr int kThreads = 384;  // three warpgroups
inline constexpr int kKeyBlocks = 9;
inline constexpr int kProbabilityBlock = 8;  // the block of a key tile that P replaces
inline constexpr float kLazyMargin = 8.f * kLn2;

// Barrier 0 is __syncthreads.
enum NamedBarrier {
  kEvenReady = 1,  // P and the running maxima of an even tile are in shared memory
  kOddReady,       // the same for an odd tile
  kPingPong,       // the even warpgroup has issued its scores, so the odd one may issue its own;
                   // this staggers their softmaxes
  kEvenScored,     // the even tile's scores have used its keys; kOddScored follows
  kOddScored,
  kEvenUnpacked,  // the records of an even tile are unpacked to bf16; kOddUnpacked follows
  kOddUnpacked,
};

// A key in global memory, or none. Only page records have `scales`, their distance from the key.
struct KeySource {
  const char* at = nullptr;
  int64_t scales = 0;

  __device__ bool exists() const { return at != nullptr; }
};

// What the producer tells the consumers about a work tile.
struct ProducerNotes {
  static constexpr bool kRecords = false;  // whether keys come as FP8 records
  int tiles;                               // key tiles of the work tile whose Q is in shared memory
};

// `Notes` must have the members of `ProducerNotes`.
template <int kD, typename Notes = ProducerNotes>
struct alignas(1024) Shared {
  uint8_t q[kD / 64][kBlockBytes];
  uint8_t keys[2][kKeyBlocks][kBlockBytes];
  float running_max[2][kHeads];  // by tile parity
  float2 sum[2][128];            // by tile parity, one entry per thread; written with a work tile's
                                 // last key tiles
  uint8_t staging[8][1024];      // per warp, for outputs
  ValidRows valid[2];            // by tile parity
  Notes notes;
  uint64_t q_full, q_free;
  // The first index of the following barriers is the tile's parity.
  uint64_t key_full[2][2];  // [0]: the owner's half of the value columns; [1]: all columns
  uint64_t key_free[2][2];  // [0]: rows 0..31 except in the ninth block; [1]: everything
};

}  // namespace jax_dsa::mla
