// Top-k of a few long rows, without clusters. Each of `ranks` CTAs per row streams its split into a
// list, as the Latency variant of fwd.cuh does, and writes its k largest entries to global memory.
// A second kernel, with one CTA per row, appends the lists in the order of the splits and cuts them
// once more. It starts under programmatic dependent launch where the GPU has that. If the lists
// have fewer than k entries because the first threshold was too high, it streams the whole row
// again.
#pragma once

#include "topk/fwd.cuh"

namespace jax_dsa::topk {

// The lists of all splits, in the workspace.
struct SplitLists {
  float2* entries;  // [rows, ranks, size]
  int2* counts;     // [rows, ranks]: the number of entries, and whether there was a threshold
  int size;         // the most entries of a list
  int ranks;        // at most one per lane

  __device__ __forceinline__ float2* list(int64_t row, int rank) const {
    return entries + (row * ranks + rank) * size;
  }
};

template <typename T>
__global__ void __launch_bounds__(T::kThreads, T::kCtasPerSm)
    split_kernel(const __grid_constant__ TopkParams p, const __grid_constant__ SplitLists lists,
                 int capacity) {
  using L = List<T::kThreads>;
  launch_dependents();
  const int rank = blockIdx.x % lists.ranks;
  const int64_t row = p.rows - 1 - blockIdx.x / lists.ranks;
  int wanted;
  const RowRange whole = range_of(p, row, &wanted), split = split_of(whole, rank, lists.ranks);
  int count = 0, above = kLowestKey;
  if (wanted > 0) {
    if (prefetches_block_l2()) prefetch(split, split.first / 4 * 4, T::kPrefetchLogits);
    L::init();
    if (whole.size() > capacity) above = guess<T>(whole, wanted);
    count = stream<T>(split, above, wanted, capacity);
    if (count > wanted) {
      L::cut_to(count, wanted);
      count = wanted;
    }
  }
  __syncthreads();  // The list is complete.
  float2* const list = lists.list(row, rank);
  for (int i = threadIdx.x; i < count; i += T::kThreads) list[i] = L::entries()[i];
  if (threadIdx.x == 0) lists.counts[row * lists.ranks + rank] = {count, above != kLowestKey};
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads, T::kCtasPerSm)
    combine_kernel(const __grid_constant__ TopkParams p, const __grid_constant__ SplitLists lists,
                   int capacity) {
  using L = List<T::kThreads>;
  const int64_t row = blockIdx.x;
  int wanted;
  const RowRange whole = range_of(p, row, &wanted);
  L::init();
  __syncthreads();
  grid_dependency_wait();
  const int lane = threadIdx.x % 32;
  int2 counts = {};  // those of split `lane`
  if (lane < lists.ranks) counts = lists.counts[row * lists.ranks + lane];
  const int all = __reduce_add_sync(kAllLanes, counts.x);
  int count = 0;
  if (all < wanted && __shfl_sync(kAllLanes, counts.y, 0)) {
    count = stream<T>(whole, kLowestKey, wanted, capacity);
  } else {
    const auto list_of = [&](int r) { return lists.list(row, r); };
    count = gather<T, 0>(list_of, lists.ranks, all, counts.x, wanted, capacity);
  }
  if (count > wanted) {
    L::cut_to(count, wanted);
    count = wanted;
  }
  __syncthreads();  // The list is complete.
  write_out<T::kThreads>(p, row, count);
}

// Returns the bytes of the lists of `ranks` splits per row.
inline int64_t split_bytes(int64_t rows, int64_t wanted, int ranks) {
  return rows * ranks * (wanted + 1) * static_cast<int64_t>(sizeof(float2));
}

// Launches both kernels. p.workspace has split_bytes.
template <typename T>
cudaError_t launch_splits(const TopkParams& p, int capacity, int ranks, cudaStream_t stream) {
  const int64_t size = std::min(p.k, p.size);
  SplitLists lists = {};
  lists.entries = static_cast<float2*>(p.workspace);
  lists.counts = reinterpret_cast<int2*>(lists.entries + p.rows * ranks * size);
  lists.size = static_cast<int>(size), lists.ranks = ranks;
  const int bytes = T::shared_bytes(capacity);
  DSA_RETURN_IF_CUDA_ERROR(launch_blocks(split_kernel<T>, p.rows * ranks, T::kThreads, bytes,
                                         stream, p, lists, capacity));
  return launch_pdl(combine_kernel<T>, p.rows, T::kThreads, bytes, stream, p, lists, capacity);
}

}  // namespace jax_dsa::topk
