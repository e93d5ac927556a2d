// Masks by tiles: which tiles are empty, full or partial, and a bit for each key of the partial
// ones.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "masked_attention/masked_attention.h"

namespace jax_dsa {

inline constexpr int64_t kBlockMaskMaxLength = int64_t{1} << 30;  // of queries, and of keys

// What tiles are made of. The results have all of `batch` and `heads`. Of the mask's memory, every
// 16 bytes of which any belong to it are read as a whole.
struct BlockMaskParams {
  const uint8_t* mask;   // [mask_batch, mask_heads, mask_queries, keys], 0 or 1; null hides nothing
  int64_t mask_batch;    // 1 or batch
  int mask_heads;        // divides heads
  int64_t mask_queries;  // 1 or queries
  AttentionMask others;  // what else has to let a query see a key; its block_k: a multiple of 8
  int64_t batch;
  int heads;
  int64_t queries;
  int64_t keys;
  int block_q;  // of the results
  int block_k;  // a multiple of 8
};

// The tiles of the results are [batch, heads, ceil(queries / block_q), ceil(keys / block_k)]. The
// functions return cudaErrorInvalidValue if a length is above its limit, or tiles are above 2^31.

// Which tiles hold any visible key, and which no hidden one.
cudaError_t launch_block_mask_classify(const BlockMaskParams& params, bool* occupied, bool* full,
                                       cudaStream_t stream);

// The bits of the tiles that have a slot, [batch, heads, slots, block_q, block_k / 8], the lowest
// bit first; zeros in slots that no tile has.
cudaError_t launch_block_mask_pack(const BlockMaskParams& params, const int32_t* tiles,
                                   uint8_t* bits, int64_t slots, cudaStream_t stream);

// Both at once, with a slot for every tile, its number: `tiles` has -2 for an empty tile, -1 for a
// full one, else the slot.
cudaError_t launch_block_mask_compress(const BlockMaskParams& params, int32_t* tiles, uint8_t* bits,
                                       cudaStream_t stream);

}  // namespace jax_dsa
