// Conversion of masks to block masks: the kind of each tile (empty, full or partial), and one bit
// per key of the partial tiles.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "masked_attention/masked_attention.h"

namespace jax_dsa {

// The maximum number of queries, and of keys.
inline constexpr int64_t kBlockMaskMaxLength = int64_t{1} << 30;

// Describes the mask to convert and the tiles to produce. The results have `batch` batch entries
// and `heads` heads. The kernel reads the mask in aligned 16-byte chunks, including the bytes
// around it in the first and last chunk.
struct BlockMaskParams {
  // [mask_batch, mask_heads, mask_queries, keys], 0 or 1; null if all keys are visible.
  const uint8_t* mask;
  int64_t mask_batch;    // 1 or batch
  int mask_heads;        // divides heads
  int64_t mask_queries;  // 1 or queries
  AttentionMask others;  // further conditions for visibility; its block_k is a multiple of 8
  int64_t batch;
  int heads;
  int64_t queries;
  int64_t keys;
  int block_q;  // queries per tile of the results
  int block_k;  // keys per tile of the results, a multiple of 8
};

// The result tiles are [batch, heads, ceil(queries / block_q), ceil(keys / block_k)]. The functions
// return cudaErrorInvalidValue if a length exceeds kBlockMaskMaxLength or the number of tiles per
// map exceeds INT32_MAX.

// Computes which tiles contain a visible key (`occupied`) and which contain no masked key (`full`).
cudaError_t launch_block_mask_classify(const BlockMaskParams& params, bool* occupied, bool* full,
                                       cudaStream_t stream);

// Writes the bits of the tiles that have a slot, [batch, heads, slots, block_q, block_k / 8], the
// lowest bit first. Slots that no tile has are zero.
cudaError_t launch_block_mask_pack(const BlockMaskParams& params, const int32_t* tiles,
                                   uint8_t* bits, int64_t slots, cudaStream_t stream);

// Computes kinds and bits at once. Every tile has the slot with its own index: `tiles` is -2 for an
// empty tile, -1 for a full one, and otherwise the slot.
cudaError_t launch_block_mask_compress(const BlockMaskParams& params, int32_t* tiles, uint8_t* bits,
                                       cudaStream_t stream);

}  // namespace jax_dsa
