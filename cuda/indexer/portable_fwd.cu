// Launchers of the portable kernels of forward passes, and their variants for bf16.
#include "indexer/portable_launch.cuh"

namespace jax_dsa {

namespace indexer {
extern template struct Portable<IndexerDType::kE4M3>;
using PortableBF16 = Portable<IndexerDType::kBF16>;
using PortableE4M3 = Portable<IndexerDType::kE4M3>;
}  // namespace indexer

cudaError_t portable::launch_indexer_fwd(const IndexerFwdParams& p, const Device& device,
                                         cudaStream_t stream) {
  using namespace indexer;
  return (p.dtype == IndexerDType::kBF16 ? PortableBF16::fwd : PortableE4M3::fwd)(p, device,
                                                                                  stream);
}

cudaError_t portable::launch_candidate_logits(const IndexerFwdParams& p,
                                              const indexer::CandidateRows& x, const Device& device,
                                              cudaStream_t stream) {
  using namespace indexer;
  return (p.dtype == IndexerDType::kBF16 ? PortableBF16::candidates : PortableE4M3::candidates)(
      p, x, device, stream);
}

cudaError_t portable::launch_block_max(const indexer::BlockMaxParams& p, const Device& device,
                                       cudaStream_t stream) {
  using namespace indexer;
  return (p.in.dtype == IndexerDType::kBF16 ? PortableBF16::blocks : PortableE4M3::blocks)(
      p, device, stream);
}

}  // namespace jax_dsa
