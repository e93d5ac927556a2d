// Launcher of the sparse MLA forward kernels.

#include "common/launch.cuh"
#include "sparse_mla/fwd.cuh"
#include "sparse_mla/fwd_few.cuh"
#include "sparse_mla/sparse_mla.h"

namespace jax_dsa::hopper {
namespace {

template <int kD, int kN>
cudaError_t launch_few(const SparseMlaFwdParams& p, cudaStream_t stream) {
  using Shared = mla::FewShared<mla::FewTraits<kD, kN>>;
  return launch_persistent<Shared, mla::kFewCtasPerSm>(sparse_mla::fwd_few_kernel<kD, kN>,
                                                       sparse_mla::work_tile_count(p),
                                                       mla::kFewThreads, stream, p);
}

template <int kD>
cudaError_t launch(const SparseMlaFwdParams& p, cudaStream_t stream) {
  const int64_t work_tiles = sparse_mla::work_tile_count(p);
  if (work_tiles > INT32_MAX - 4096) return cudaErrorInvalidValue;
  const int heads = p.heads / p.groups;
  if (heads <= 16) return launch_few<kD, 16>(p, stream);
  if (heads <= 32) return launch_few<kD, 32>(p, stream);
  return launch_persistent<mla::Shared<kD>>(sparse_mla::fwd_kernel<kD>, work_tiles, mla::kThreads,
                                            stream, p);
}

}  // namespace

cudaError_t launch_sparse_mla_fwd(const SparseMlaFwdParams& p, cudaStream_t stream) {
  if (p.batch == 0 || p.queries == 0 || p.heads == 0) return cudaSuccess;
  if (p.groups <= 0 || p.heads % p.groups != 0 || !(p.scale > 0.f)) return cudaErrorInvalidValue;
  switch (p.dim) {
    case 576:
      return launch<576>(p, stream);
    case 512:
      return launch<512>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jax_dsa::hopper
