// Launcher of the sparse MLA decode kernels.

#include "common/error.h"
#include "common/launch.cuh"
#include "sparse_mla/decode.cuh"

namespace jax_dsa::hopper {
namespace {

template <int kD, bool kRecords, typename Params>
cudaError_t launch(const Params& p, cudaStream_t stream) {
  return launch_persistent<sparse_mla::DecodeShared<kD, kRecords>>(
      sparse_mla::decode_kernel<kD, kRecords, Params>, work_tile_count(p), mla::kThreads, stream,
      p);
}

template <typename Params>
cudaError_t launch_kernel(const Params& p, cudaStream_t stream) {
  if (p.dim == 576) return p.records ? launch<576, true>(p, stream) : launch<576, false>(p, stream);
  return p.records ? launch<512, true>(p, stream) : launch<512, false>(p, stream);
}

}  // namespace

cudaError_t launch_sparse_mla_decode(const SparseMlaDecodeParams& params, cudaStream_t stream) {
  if (params.batch == 0 || params.queries == 0 || params.heads == 0) return cudaSuccess;
  const sparse_mla::Decode p(params);
  if (!is_valid(p) || work_tile_count(p) > INT32_MAX - 4096) return cudaErrorInvalidValue;
  if (p.splits == 1) return launch_kernel(p, stream);
  DSA_RETURN_IF_CUDA_ERROR(launch_kernel(sparse_mla::SplitDecode(params), stream));
  return sparse_mla::launch_combine(p, stream);
}

}  // namespace jax_dsa::hopper
