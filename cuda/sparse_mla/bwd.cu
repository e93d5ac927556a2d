// Launcher of the sparse MLA backward kernels.

#include "common/error.h"
#include "common/launch.cuh"
#include "sparse_mla/bwd.cuh"
#include "sparse_mla/bwd_order.cuh"
#include "sparse_mla/bwd_pack.cuh"
#include "sparse_mla/sparse_mla.h"
#include "sparse_mla/sum_rows.h"

namespace jax_dsa::hopper {
namespace {

template <int kD>
cudaError_t launch(const SparseMlaBwdParams& p, const sparse_mla::BwdWork& work,
                   cudaStream_t stream) {
  const auto kernel = p.by_rows          ? sparse_mla::bwd_kernel<kD, true, false>
                      : p.head_mask_bits ? sparse_mla::bwd_kernel<kD, false, true>
                                         : sparse_mla::bwd_kernel<kD, false, false>;
  return launch_persistent<sparse_mla::BwdShared<kD>>(kernel, work.work_tiles, sparse_mla::kThreads,
                                                      stream, p, work);
}

// Computes dq of the next `queries_at_once` queries, and their dkv: by reductions or as stored
// rows.
cudaError_t launch_chunk(const SparseMlaBwdParams& unpacked, cudaStream_t stream) {
  const int n = sparse_mla::packed_queries(unpacked);
  SparseMlaBwdParams p = sparse_mla::packed(unpacked, n);
  Device device;
  DSA_RETURN_IF_CUDA_ERROR(current_device(&device));
  const sparse_mla::BwdWork work(p, device);
  if (work.work_tiles > INT32_MAX - 4096) return cudaErrorInvalidValue;
  DSA_RETURN_IF_CUDA_ERROR(clear(p.counters, sparse_mla::counter_bytes(work), stream));
  if (n > 1) {
    const int capacity = sparse_mla::padded_slots(unpacked.slots);
    int32_t* const slots = sparse_mla::packed_slots(p, work);
    int32_t* const lengths = slots + p.queries_at_once * p.slots;
    DSA_RETURN_IF_CUDA_ERROR(launch_blocks(sparse_mla::pack_kernel, p.queries_at_once,
                                           sparse_mla::kOrderThreads,
                                           sparse_mla::pack_shared_bytes(n * capacity), stream,
                                           unpacked, n, capacity, slots, lengths));
    p.indices = slots;
    p.topk_length = lengths;
  }
  if (work.shares_sums(p)) {
    const int capacity = sparse_mla::padded_slots(p.slots);
    DSA_RETURN_IF_CUDA_ERROR(
        launch_blocks(sparse_mla::order_kernel, work.steps, sparse_mla::kOrderThreads,
                      sparse_mla::order_shared_bytes(capacity), stream, p, work, capacity));
    p.indices = p.order;
  } else {
    p.order = nullptr;
  }
  switch (p.dim) {
    case 576:
      return launch<576>(p, work, stream);
    case 512:
      return launch<512>(p, work, stream);
  }
  return cudaErrorInvalidValue;
}

SparseMlaBwdParams packed(const SparseMlaBwdParams& p) {
  return sparse_mla::packed(p, sparse_mla::packed_queries(p));
}

}  // namespace

int64_t sparse_mla_bwd_counter_bytes(const SparseMlaBwdParams& p) {
  return sparse_mla::counter_bytes(sparse_mla::BwdWork(packed(p)));
}

int64_t sparse_mla_bwd_order_bytes(const SparseMlaBwdParams& p) {
  const SparseMlaBwdParams packed_params = packed(p);
  const sparse_mla::BwdWork work(packed_params);
  return (sparse_mla::order_words(packed_params, work) + sparse_mla::packed_words(packed_params)) *
         4;
}

int64_t sparse_mla_bwd_p_ds_bytes(const SparseMlaBwdParams& p) {
  return sparse_mla::BwdWork(packed(p)).p_ds_blocks() * kBlockBytes;
}

cudaError_t launch_sparse_mla_bwd(const SparseMlaBwdParams& p, cudaStream_t stream) {
  if (p.groups <= 0 || p.heads % p.groups != 0 || !(p.scale > 0.f)) return cudaErrorInvalidValue;
  const int64_t dkv = p.batch * p.keys * p.groups * p.dim, queries = p.batch * p.queries;
  DSA_RETURN_IF_CUDA_ERROR(clear(p.dkv, dkv * sizeof(float), stream));
  if (queries == 0 || p.heads == 0) return cudaSuccess;
  if (p.queries_at_once <= 0 || (!p.by_rows && p.queries_at_once != queries))
    return cudaErrorInvalidValue;
  for (int64_t first = 0; first < queries; first += p.queries_at_once) {
    SparseMlaBwdParams chunk = p;
    chunk.first_query = first;
    chunk.queries_at_once =
        p.queries_at_once < queries - first ? p.queries_at_once : queries - first;
    DSA_RETURN_IF_CUDA_ERROR(launch_chunk(chunk, stream));
    if (!p.by_rows) continue;
    DSA_RETURN_IF_CUDA_ERROR(sparse_mla::launch_sum_rows(chunk, first / p.queries_at_once, stream));
  }
  return cudaSuccess;
}

}  // namespace jax_dsa::hopper
