// Launcher of sparse attention over caches, for Hopper.

#include <bit>
#include <climits>

#include "common/launch.cuh"
#include "sparse_attention/decode.cuh"
#include "sparse_attention/decode.h"

namespace jax_dsa {
namespace sparse_attention {
namespace {

// In key tiles: the time of a CTA without its key tiles, and that of combining partial results.
constexpr int kCtaCost = 3, kCombineCost = 1;
// With `batch_invariant` a cluster has a CTA for so many key tiles.
constexpr int kInvariantTiles = 8;

// Returns the logarithm of the number of CTAs that divide the key tiles of a work tile.
int log_num_splits(const Decode& p, int64_t work_tiles, int64_t ctas_at_once) {
  if (p.splits > 0) return std::countr_zero(static_cast<unsigned>(p.splits));
  const int key_tiles = ceil_div(p.slots * p.block_size, kTile);
  int best = 0;
  int64_t least = INT64_MAX;
  for (int log = 0; 1 << log <= kSparseDecodeMaxSplits; ++log) {
    const int splits = 1 << log;
    if (p.batch_invariant) {
      best = log;
      if (splits * kInvariantTiles >= key_tiles) break;
      continue;
    }
    const int64_t rounds = ceil_div(work_tiles * splits, ctas_at_once);
    const int64_t cost =
        rounds * (ceil_div(key_tiles, splits) + kCtaCost + (splits > 1 ? kCombineCost : 0));
    if (cost < least) least = cost, best = log;
  }
  return best;
}

template <int kD, int kN, bool kFp8>
cudaError_t launch_rows(Decode p, cudaStream_t stream) {
  using Tr = DecodeTraits<kD, kN, kFp8>;
  using Shared = DecodeShared<Tr, kFp8>;
  static_assert(shared_memory_fits(kDecodeCtasPerSm, sizeof(Shared)));
  Device device;
  DSA_RETURN_IF_CUDA_ERROR(current_device(&device));
  p.row_tiles = ceil_div(p.per_group, kN);
  const int64_t work_tiles = p.batch * p.queries * p.groups * p.row_tiles;
  p.log_splits = log_num_splits(p, work_tiles, kDecodeCtasPerSm * device.num_sms);
  if (work_tiles * p.num_splits() > INT_MAX) return cudaErrorInvalidValue;
  const auto kernel = decode_kernel<Tr, kFp8>;
  bool fits;
  DSA_RETURN_IF_CUDA_ERROR(
      cluster_fits(kernel, p.num_splits(), kDecodeThreads, sizeof(Shared), &fits));
  if (!fits) p.log_splits = std::countr_zero(unsigned{kPortableClusterSize});
  return launch_clusters(kernel, work_tiles, p.num_splits(), kDecodeThreads, sizeof(Shared), stream,
                         p);
}

template <int kD, bool kFp8>
cudaError_t launch_dim(const Decode& p, cudaStream_t stream) {
  return p.per_group <= 16 ? launch_rows<kD, 16, kFp8>(p, stream)
                           : launch_rows<kD, 32, kFp8>(p, stream);
}

template <bool kFp8>
cudaError_t launch(const Decode& p, cudaStream_t stream) {
  switch (p.dim) {
    case 64:
      return launch_dim<64, kFp8>(p, stream);
    case 128:
      return launch_dim<128, kFp8>(p, stream);
    case 256:
      return launch_dim<256, kFp8>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace
}  // namespace sparse_attention

cudaError_t hopper::launch_sparse_attention_decode(const SparseAttentionDecodeParams& params,
                                                   cudaStream_t stream) {
  const sparse_attention::Decode p(params);
  return p.fp8 ? sparse_attention::launch<true>(p, stream)
               : sparse_attention::launch<false>(p, stream);
}

}  // namespace jax_dsa
