// Launcher of the top-k kernel with clusters.
#pragma once

#include "topk/topk.h"

namespace jax_dsa::hopper {

// Processes each row by a cluster of `ranks` CTAs with lists of `capacity` entries.
cudaError_t launch_topk_clusters(const TopkParams& p, int capacity, int ranks, cudaStream_t stream);

}  // namespace jax_dsa::hopper
