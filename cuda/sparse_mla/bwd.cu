// Launcher of the sparse MLA backward kernel.

#include "common/error.h"
#include "common/launch.cuh"
#include "sparse_mla/bwd.cuh"
#include "sparse_mla/bwd_order.cuh"
#include "sparse_mla/bwd_pack.cuh"
#include "sparse_mla/sparse_mla.h"
#include "sparse_mla/sum_rows.cuh"

namespace jax_dsa {
namespace {

template <int kD>
cudaError_t launch(const SparseMlaBwdParams& p, const sparse_mla::BwdWork& work,
                   cudaStream_t stream) {
  const auto kernel = p.by_rows       ? sparse_mla::bwd_kernel<kD, true, false>
                      : p.member_bits ? sparse_mla::bwd_kernel<kD, false, true>
                                      : sparse_mla::bwd_kernel<kD, false, false>;
  return launch_persistent<sparse_mla::BwdShared<kD>>(kernel, work.tickets, sparse_mla::kThreads,
                                                      stream, p, work);
}

// The queries at hand: dq, and dkv by reductions or as rows.
cudaError_t launch_part(const SparseMlaBwdParams& unpacked, cudaStream_t stream) {
  const int n = sparse_mla::packed_queries(unpacked);
  SparseMlaBwdParams p = sparse_mla::packed(unpacked, n);
  Device device;
  DSA_RETURN_IF_CUDA_ERROR(current_device(&device));
  const sparse_mla::BwdWork work(p, device);
  if (work.tickets > INT32_MAX - 4096) return cudaErrorInvalidValue;
  DSA_RETURN_IF_CUDA_ERROR(clear(p.counters, sparse_mla::counter_bytes(work), stream));
  if (n > 1) {
    const int room = sparse_mla::order_room(unpacked.slots);
    int32_t* const slots = sparse_mla::packed_slots(p, work);
    int32_t* const lengths = slots + p.count * p.slots;
    DSA_RETURN_IF_CUDA_ERROR(launch_blocks(
        sparse_mla::pack_kernel, p.count, sparse_mla::kOrderThreads,
        sparse_mla::pack_shared_bytes(n * room), stream, unpacked, n, room, slots, lengths));
    p.indices = slots;
    p.topk_length = lengths;
  }
  if (work.shares(p)) {
    const int room = sparse_mla::order_room(p.slots);
    DSA_RETURN_IF_CUDA_ERROR(
        launch_blocks(sparse_mla::order_kernel, work.steps, sparse_mla::kOrderThreads,
                      sparse_mla::order_shared_bytes(room), stream, p, work, room));
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

// Adds the rows of the queries at hand, which are part `part` of all, to the keys of their batch
// entries.
cudaError_t launch_sum_rows(const SparseMlaBwdParams& p, int64_t part, cudaStream_t stream) {
  const int64_t before = p.first * sparse_mla_bwd_query_rows(p);
  const int64_t rows = p.count * sparse_mla_bwd_query_rows(p), entry = p.keys * p.groups;
  const int64_t from = p.first / p.queries, to = ceil_div(p.first + p.count, p.queries);
  const int64_t keys = (to - from) * entry;
  if (rows == 0 || keys == 0) return cudaSuccess;
  const int64_t blocks = ceil_div(keys, int64_t{sparse_mla::kSumKeys});
  if (blocks > INT32_MAX || rows > INT32_MAX) return cudaErrorInvalidValue;
  const sparse_mla::SumRowsParams sum = {
      .rows = p.rows,
      .order = p.row_order + before,
      .key = p.row_key + before,
      .dkv = p.dkv + from * entry * p.dim,
      .first_key = part * (p.batch * entry + 1) + from * entry,
      .keys = keys,
      .row_count = static_cast<int>(rows),
  };
  const auto kernel =
      p.dim == 576 ? sparse_mla::sum_rows_kernel<576> : sparse_mla::sum_rows_kernel<512>;
  return launch_blocks(kernel, blocks, sparse_mla::kSumKeys * p.dim / 8, 0, stream, sum);
}

SparseMlaBwdParams packed(const SparseMlaBwdParams& p) {
  return sparse_mla::packed(p, sparse_mla::packed_queries(p));
}

}  // namespace

int64_t sparse_mla_bwd_counter_bytes(const SparseMlaBwdParams& p) {
  return sparse_mla::counter_bytes(sparse_mla::BwdWork(packed(p)));
}

int64_t sparse_mla_bwd_order_bytes(const SparseMlaBwdParams& p) {
  const SparseMlaBwdParams at = packed(p);
  const sparse_mla::BwdWork work(at);
  return (sparse_mla::order_words(at, work) + sparse_mla::packed_words(at)) * 4;
}

int64_t sparse_mla_bwd_query_rows(const SparseMlaBwdParams& p) {
  const sparse_mla::BwdWork work(p);
  return int64_t{p.groups} * work.row_sums() * work.slot_tiles * kTile;
}

int64_t sparse_mla_bwd_image_bytes(const SparseMlaBwdParams& p) {
  return sparse_mla::BwdWork(packed(p)).image_blocks() * kBlockBytes;
}

cudaError_t launch_sparse_mla_bwd(const SparseMlaBwdParams& p, cudaStream_t stream) {
  if (p.groups <= 0 || p.heads % p.groups != 0 || !(p.scale > 0.f)) return cudaErrorInvalidValue;
  const int64_t dkv = p.batch * p.keys * p.groups * p.dim, queries = p.batch * p.queries;
  DSA_RETURN_IF_CUDA_ERROR(clear(p.dkv, dkv * sizeof(float), stream));
  if (queries == 0 || p.heads == 0) return cudaSuccess;
  if (p.count <= 0 || (!p.by_rows && p.count != queries)) return cudaErrorInvalidValue;
  for (int64_t first = 0; first < queries; first += p.count) {
    SparseMlaBwdParams part = p;
    part.first = first;
    part.count = p.count < queries - first ? p.count : queries - first;
    DSA_RETURN_IF_CUDA_ERROR(launch_part(part, stream));
    if (!p.by_rows) continue;
    DSA_RETURN_IF_CUDA_ERROR(launch_sum_rows(part, first / p.count, stream));
  }
  return cudaSuccess;
}

}  // namespace jax_dsa
