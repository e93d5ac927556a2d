// Launcher of the portable kernel of sparse attention over caches.

#include "common/launch.cuh"
#include "sparse_attention/portable_decode.cuh"

namespace jax_dsa::portable {
namespace {

using namespace sparse_attention;

template <typename Tr, bool kFp8>
cudaError_t launch_traits(const SparseAttentionDecodeParams& params, cudaStream_t stream) {
  using Shared = PortableDecodeShared<Tr, kFp8>;
  static_assert(sizeof(Shared) <= kMinSharedBytes);
  Decode p(params);
  p.row_tiles = ceil_div(p.per_group, Tr::kRows);
  const int64_t work_tiles = p.batch * p.queries * p.groups * p.row_tiles;
  if (work_tiles > INT32_MAX) return cudaErrorInvalidValue;
  const auto kernel = portable_decode_kernel<Tr, kFp8>;
  DSA_RETURN_IF_CUDA_ERROR(prefer_shared_memory(kernel, kMaxSharedBytes / 1024));
  return launch_blocks(kernel, work_tiles, Tr::kThreads, sizeof(Shared), stream, p);
}

// kKeys: keys of a tile. With fewer keys, a tile needs at least 32 heads.
template <int kD, bool kFp8, int kKeys, int kManyKeys, int kSlots>
cudaError_t launch_dim(const SparseAttentionDecodeParams& p, cudaStream_t stream) {
  using Few = mla::PortableTraits<kD, 16, 1, kKeys, 16, kSlots, 2, kD, true>;
  using Many = mla::PortableTraits<kD, 32, 1, kManyKeys, 16, kSlots, 2, kD, true>;
  return p.heads / p.groups <= 16 ? launch_traits<Few, kFp8>(p, stream)
                                  : launch_traits<Many, kFp8>(p, stream);
}

}  // namespace

// The tile sizes fit in the shared memory of every GPU.
cudaError_t launch_sparse_attention_decode(const SparseAttentionDecodeParams& p, const Device&,
                                           cudaStream_t stream) {
  switch (p.dim) {
    case 64:
      return p.fp8 ? launch_dim<64, true, 64, 64, 3>(p, stream)
                   : launch_dim<64, false, 64, 64, 3>(p, stream);
    case 128:
      return p.fp8 ? launch_dim<128, true, 32, 32, 3>(p, stream)
                   : launch_dim<128, false, 64, 64, 2>(p, stream);
    case 256:
      return p.fp8 ? launch_dim<256, true, 32, 16, 2>(p, stream)
                   : launch_dim<256, false, 32, 32, 2>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jax_dsa::portable
