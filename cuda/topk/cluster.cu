// Top-k of a few long rows on Hopper, with one cluster per row.

#include "topk/cluster.h"
#include "topk/fwd.cuh"

cudaError_t jax_dsa::hopper::launch_topk_clusters(const TopkParams& p, int capacity, int ranks,
                                                  cudaStream_t stream) {
  return topk::launch<topk::Latency>(p, capacity, ranks, stream);
}
