// Launcher of the sparse MLA decode kernels.

#include "common/error.h"
#include "common/launch.cuh"
#include "sparse_mla/decode.cuh"

namespace jax_dsa {
namespace {

template <int kD, bool kRecords, typename Params>
cudaError_t launch(const Params& p, cudaStream_t stream) {
  return launch_persistent<sparse_mla::DecodeShared<kD, kRecords>>(
      sparse_mla::decode_kernel<kD, kRecords, Params>, work_tile_count(p), mla::kThreads, stream,
      p);
}

template <typename Params>
cudaError_t launch_kernel(const Params& p, cudaStream_t stream) {
  if (p.records) return launch<576, true>(p, stream);
  return p.dim == 576 ? launch<576, false>(p, stream) : launch<512, false>(p, stream);
}

bool valid(const SparseMlaDecodeParams& p) {
  if (p.groups <= 0 || p.heads % p.groups != 0 || !(p.scale > 0.f)) return false;
  if (p.dim != 576 && (p.dim != 512 || p.records)) return false;
  if (p.splits < 1 || p.splits > kSparseMlaMaxSplits) return false;
  if (p.splits > 1 && (p.partial == nullptr || p.partial_rows == nullptr)) return false;
  // The producer computes slot numbers a few tiles past a row's end.
  if (p.slots > INT32_MAX - 8 * kTile * kSparseMlaMaxSplits) return false;
  if (p.page_table == nullptr) return true;
  return p.page_size > 0 && p.pages >= 0 && p.page_slots >= 0 &&
         int64_t{p.pages} * p.page_size <= INT32_MAX &&
         p.keys == int64_t{p.page_slots} * p.page_size;
}

}  // namespace

cudaError_t launch_sparse_mla_decode(const SparseMlaDecodeParams& params, cudaStream_t stream) {
  if (params.batch == 0 || params.queries == 0 || params.heads == 0) return cudaSuccess;
  if (!valid(params)) return cudaErrorInvalidValue;
  const sparse_mla::Decode p(params);
  const int64_t work_tiles = sparse_mla_decode_work_tiles(p.batch, p.queries, p.heads, p.groups);
  const int64_t combine_ctas = work_tiles * sparse_mla::row_strips(p) * sparse_mla::kCombineCtas;
  if (work_tile_count(p) > INT32_MAX - 4096 || combine_ctas > INT32_MAX)
    return cudaErrorInvalidValue;
  if (p.splits == 1) return launch_kernel(p, stream);
  DSA_RETURN_IF_CUDA_ERROR(launch_kernel(sparse_mla::SplitDecode(params), stream));
  return sparse_mla::launch_combine(p, combine_ctas, stream);
}

}  // namespace jax_dsa
