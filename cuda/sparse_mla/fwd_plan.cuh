// Work tiles of the sparse MLA forward kernels. See fwd.cuh.
#pragma once

#include <cstdint>

#include "common/tile.cuh"
#include "common/types.h"
#include "mla/plan.cuh"
#include "sparse_mla/sparse_mla.h"

namespace jax_dsa::sparse_mla {

// The kernels' parameters. They have a type of this namespace so that the code of mla/ finds the
// functions that it calls (see mla/consumer.cuh) here.
struct Forward : SparseMlaFwdParams {
  Forward(const SparseMlaFwdParams& p) : SparseMlaFwdParams(p) {}
};

struct WorkTile {
  int64_t token;  // batch * queries + query
  int batch, group, head, heads;

  __device__ WorkTile(const SparseMlaFwdParams& p, int work_index) {
    const int per_group = p.heads / p.groups;
    const int tiles = ceil_div(per_group, mla::kHeads);
    const int rest = work_index / tiles;
    group = rest % p.groups;
    token = rest / p.groups;
    batch = static_cast<int>(token) / static_cast<int>(p.queries);
    const int first = (work_index - rest * tiles) * mla::kHeads;
    head = group * per_group + first;
    heads = min(per_group - first, mla::kHeads);
  }
};

__host__ __device__ inline int64_t work_tile_count(const SparseMlaFwdParams& p) {
  return p.batch * p.queries * p.groups * ceil_div(p.heads / p.groups, mla::kHeads);
}

// A CTA processes the work tiles first_work_tile, first_work_tile + work_tile_step, ... below
// work_tile_count.
__device__ inline int first_work_tile(const SparseMlaFwdParams&) { return blockIdx.x; }
__device__ inline int work_tile_step(const SparseMlaFwdParams&) { return gridDim.x; }

// By how much, in log2 units, a score may exceed its row's running maximum before that is raised.
__device__ constexpr float lazy_margin(const SparseMlaFwdParams&) { return mla::kLazyMargin; }

}  // namespace jax_dsa::sparse_mla
