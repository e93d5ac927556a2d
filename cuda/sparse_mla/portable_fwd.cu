// Launchers of the portable sparse MLA forward kernel, for the forward pass and for decode.

#include "sparse_mla/portable_fwd_launch.h"

namespace jax_dsa::portable {
namespace {

using namespace sparse_mla;

// Launches with the first traits whose shared memory the GPU has. With `batch_invariant` they also
// fit records, so that keys have the same tiles as records.
template <bool kRecords, typename Tr, typename... Others>
cudaError_t launch_first(const Decode& p, const Device& device, cudaStream_t stream) {
  if constexpr (sizeof...(Others) > 0) {
    const size_t needed =
        p.batch_invariant ? sizeof(PortableShared<Tr, true>) : sizeof(PortableShared<Tr, kRecords>);
    if (needed > static_cast<size_t>(device.shared_bytes)) {
      return launch_first<kRecords, Others...>(p, device, stream);
    }
  } else {
    static_assert(sizeof(PortableShared<Tr, kRecords>) <= kMinSharedBytes);
  }
  return launch_portable<Tr, kRecords>(p, stream);
}

// The tile sizes by the number of heads: heads per group, groups, keys, keys per warp, slots and
// CTAs per SM. Records leave no room for the scores of four parts of the columns.
template <int kD, bool kRecords>
cudaError_t launch_heads(const Decode& p, const Device& device, cudaStream_t stream) {
  using Least = mla::PortableTraits<kD, 32, 1, 16, 16, 2, 2>;
  const int heads = p.heads / p.groups;
  if (heads <= 16) {
    return launch_first<kRecords, mla::PortableTraits<kD, 16, 1, 32, 16, 2, 2>, Least>(p, device,
                                                                                       stream);
  }
  if (heads <= 32) return launch_first<kRecords, Least>(p, device, stream);
  using Half = mla::PortableTraits<kD, 32, 2, 16, 16, 3, 1>;
  if (p.batch_invariant) return launch_first<kRecords, Half, Least>(p, device, stream);
  return launch_first<kRecords, mla::PortableTraits<kD, 32, 2, 32, kRecords ? 16 : 32, 3, 1>, Half,
                      Least>(p, device, stream);
}

}  // namespace

cudaError_t launch_sparse_mla_decode(const SparseMlaDecodeParams& params, const Device& device,
                                     cudaStream_t stream) {
  if (params.batch == 0 || params.queries == 0 || params.heads == 0) return cudaSuccess;
  const Decode p(params);
  if (!is_valid(p)) return cudaErrorInvalidValue;
  if (p.dim == 576) {
    return p.records ? launch_heads<576, true>(p, device, stream)
                     : launch_heads<576, false>(p, device, stream);
  }
  return p.records ? launch_heads<512, true>(p, device, stream)
                   : launch_heads<512, false>(p, device, stream);
}

// The keys of the forward pass are a flat cache.
cudaError_t launch_sparse_mla_fwd(const SparseMlaFwdParams& params, const Device& device,
                                  cudaStream_t stream) {
  SparseMlaDecodeParams p = {params};
  p.batch_rows = p.keys;
  p.splits = 1;
  return launch_sparse_mla_decode(p, device, stream);
}

}  // namespace jax_dsa::portable
