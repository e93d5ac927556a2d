// Launcher of the sparse MLA forward kernels.

#include <algorithm>

#include "sparse_mla/fwd.cuh"
#include "sparse_mla/sparse_mla.h"

namespace jax_dsa {
namespace {

template <int kD>
cudaError_t launch(const SparseMlaFwdParams& p, cudaStream_t stream) {
  int device = 0, processors = 0;
  if (cudaError_t e = cudaGetDevice(&device); e != cudaSuccess) return e;
  if (cudaError_t e = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
      e != cudaSuccess) {
    return e;
  }
  const auto kernel = sparse_mla::fwd_kernel<kD>;
  constexpr int kBytes = sizeof(sparse_mla::Shared<kD>);
  static_assert(kBytes <= 227 * 1024);
  if (cudaError_t e =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
      e != cudaSuccess) {
    return e;
  }
  const int64_t items = sparse_mla::item_count(p);
  if (items > INT32_MAX - 4096) return cudaErrorInvalidValue;
  const auto grid = static_cast<unsigned>(std::min<int64_t>(items, processors));
  kernel<<<grid, sparse_mla::kThreads, kBytes, stream>>>(p);
  return cudaGetLastError();
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

}  // namespace jax_dsa
