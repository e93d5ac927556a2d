// Launchers of the portable kernels of forward passes, and their variants for bf16.
#include "indexer/portable_launch.cuh"

namespace jax_dsa {

namespace indexer {
extern template struct Portable<IndexerDType::kE4M3>;
using PortableBF16 = Portable<IndexerDType::kBF16>;
using PortableE4M3 = Portable<IndexerDType::kE4M3>;
}  // namespace indexer

namespace portable {

using namespace indexer;

cudaError_t launch_indexer_fwd(const IndexerFwdParams& p, const Device& device,
                               cudaStream_t stream) {
  return (p.dtype == IndexerDType::kBF16 ? PortableBF16::fwd : PortableE4M3::fwd)(p, device,
                                                                                  stream);
}

cudaError_t launch_candidate_logits(const IndexerFwdParams& p, const CandidateRows& x,
                                    const Device& device, cudaStream_t stream) {
  return (p.dtype == IndexerDType::kBF16 ? PortableBF16::candidates : PortableE4M3::candidates)(
      p, x, device, stream);
}

cudaError_t launch_block_max(const BlockMaxParams& p, const Device& device, cudaStream_t stream) {
  return (p.in.dtype == IndexerDType::kBF16 ? PortableBF16::blocks : PortableE4M3::blocks)(
      p, device, stream);
}

}  // namespace portable
}  // namespace jax_dsa
