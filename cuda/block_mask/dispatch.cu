// Launchers of the kernel that converts masks to block masks.

#include "block_mask/block_mask.h"
#include "block_mask/tiles.cuh"
#include "common/error.h"

namespace jax_dsa {
namespace {

using namespace block_mask;

constexpr int kWarps = 4;  // warps per CTA

int64_t tiles_per_map(const BlockMaskParams& p) {
  return ceil_div(p.queries, int64_t{p.block_q}) * ceil_div(p.keys, int64_t{p.block_k});
}

bool fits(const BlockMaskParams& p) {
  const AttentionMask& m = p.others;
  const bool block_sizes = p.block_q > 0 && p.block_q <= kBlockMaskMaxLength && p.block_k > 0 &&
                           p.block_k <= kBlockMaskMaxLength && p.block_k % 8 == 0;
  const bool mask = !p.mask || (p.mask_heads > 0 && p.heads % p.mask_heads == 0);
  const bool map = !m.map_rows || (m.block_q > 0 && m.block_k > 0 && m.block_k % 8 == 0 &&
                                   m.map_heads > 0 && p.heads % m.map_heads == 0);
  return block_sizes && mask && map && p.queries <= kBlockMaskMaxLength &&
         p.keys <= kBlockMaskMaxLength && tiles_per_map(p) <= INT32_MAX;
}

bool empty(const BlockMaskParams& p) {
  return p.batch == 0 || p.heads == 0 || p.queries == 0 || p.keys == 0;
}

template <typename Out>
cudaError_t launch_width(const BlockMaskParams& p, const Out& out, cudaStream_t stream) {
  const bool general = p.others.kv_segments || p.others.map_rows;
  if (p.block_k % 16 == 0) {
    return general ? launch<Traits<16, 4, kWarps, 4, true>>(p, out, stream)
                   : launch<Traits<16, 8, kWarps, 5, false>>(p, out, stream);
  }
  return general ? launch<Traits<8, 4, kWarps, 4, true>>(p, out, stream)
                 : launch<Traits<8, 8, kWarps, 5, false>>(p, out, stream);
}

}  // namespace

cudaError_t launch_block_mask_classify(const BlockMaskParams& p, bool* occupied, bool* full,
                                       cudaStream_t stream) {
  if (empty(p)) return cudaSuccess;
  if (!fits(p)) return cudaErrorInvalidValue;
  return launch_width(p, Classify{occupied, full}, stream);
}

cudaError_t launch_block_mask_pack(const BlockMaskParams& p, const int32_t* tiles, uint8_t* bits,
                                   int64_t slots, cudaStream_t stream) {
  if (p.batch == 0 || p.heads == 0) return cudaSuccess;
  if (!fits(p)) return cudaErrorInvalidValue;
  const int64_t bytes = p.batch * p.heads * slots * p.block_q * (p.block_k / 8);
  DSA_RETURN_IF_CUDA_ERROR(clear(bits, bytes, stream));
  if (empty(p)) return cudaSuccess;
  return launch_width(p, Pack{tiles, bits, slots}, stream);
}

cudaError_t launch_block_mask_compress(const BlockMaskParams& p, int32_t* tiles, uint8_t* bits,
                                       cudaStream_t stream) {
  if (empty(p)) return cudaSuccess;
  if (!fits(p)) return cudaErrorInvalidValue;
  return launch_width(p, Compress{tiles, bits, tiles_per_map(p)}, stream);
}

}  // namespace jax_dsa
