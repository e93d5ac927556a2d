// Launcher of the portable sparse MLA backward kernel.

#include "common/error.h"
#include "common/launch.cuh"
#include "sparse_mla/portable_bwd.cuh"
#include "sparse_mla/sum_rows.h"

namespace jax_dsa::portable {
namespace {

using namespace sparse_mla;

template <typename Tr>
cudaError_t launch_kernel(const SparseMlaBwdParams& p, cudaStream_t stream) {
  const int set = p.by_rows ? kRowHeads : Tr::kHeads;
  const int64_t work_tiles = p.queries_at_once * p.groups * ceil_div(p.heads / p.groups, set);
  if (work_tiles > INT32_MAX) return cudaErrorInvalidValue;
  const auto kernel = portable_bwd_kernel<Tr>;
  DSA_RETURN_IF_CUDA_ERROR(prefer_shared_memory(kernel, kMaxSharedBytes / 1024));
  return launch_blocks(kernel, work_tiles, Tr::kThreads, sizeof(PortableBwdShared<Tr>), stream, p);
}

template <int kD>
cudaError_t launch_heads(const SparseMlaBwdParams& p, const Device& device, cudaStream_t stream) {
  using Most = PortableBwdTraits<kD, 64, 2, false>;
  using Few = PortableBwdTraits<kD, 32, 2, false>;
  using Least = PortableBwdTraits<kD, 32, 1, true>;
  static_assert(sizeof(PortableBwdShared<Least>) <= kMinSharedBytes);
  const auto fits = [&](size_t bytes) { return bytes <= static_cast<size_t>(device.shared_bytes); };
  if (p.heads / p.groups > 32 && fits(sizeof(PortableBwdShared<Most>))) {
    return launch_kernel<Most>(p, stream);
  }
  return fits(sizeof(PortableBwdShared<Few>)) ? launch_kernel<Few>(p, stream)
                                              : launch_kernel<Least>(p, stream);
}

}  // namespace

cudaError_t launch_sparse_mla_bwd(const SparseMlaBwdParams& p, const Device& device,
                                  cudaStream_t stream) {
  if (p.groups <= 0 || p.heads % p.groups != 0 || !(p.scale > 0.f)) return cudaErrorInvalidValue;
  if (p.dim != 576 && p.dim != 512) return cudaErrorInvalidValue;
  const int64_t dkv = p.batch * p.keys * p.groups * p.dim, queries = p.batch * p.queries;
  DSA_RETURN_IF_CUDA_ERROR(clear(p.dkv, dkv * sizeof(float), stream));
  if (queries == 0 || p.heads == 0) return cudaSuccess;
  if (p.queries_at_once <= 0 || (!p.by_rows && p.queries_at_once != queries)) {
    return cudaErrorInvalidValue;
  }
  for (int64_t first = 0; first < queries; first += p.queries_at_once) {
    SparseMlaBwdParams chunk = p;
    chunk.first_query = first;
    chunk.queries_at_once = std::min(p.queries_at_once, queries - first);
    DSA_RETURN_IF_CUDA_ERROR(p.dim == 576 ? launch_heads<576>(chunk, device, stream)
                                          : launch_heads<512>(chunk, device, stream));
    if (!p.by_rows) continue;
    DSA_RETURN_IF_CUDA_ERROR(launch_sum_rows(chunk, first / p.queries_at_once, stream));
  }
  return cudaSuccess;
}

}  // namespace jax_dsa::portable
