// Work items of the sparse MLA forward kernels. See fwd.cuh.
#pragma once

#include <cstdint>

#include "common/tile.cuh"
#include "common/types.h"
#include "mla/plan.cuh"
#include "sparse_mla/sparse_mla.h"

namespace jax_dsa::sparse_mla {

// The parameters, as a type of this namespace, in which mla/ finds the functions that it calls.
struct Forward : SparseMlaFwdParams {
  Forward(const SparseMlaFwdParams& p) : SparseMlaFwdParams(p) {}
};

struct Item {
  int64_t token;  // batch * queries + query
  int batch, group, head, heads;

  __device__ Item(const SparseMlaFwdParams& p, int number) {
    const int per_group = p.heads / p.groups;
    const int tiles = ceil_div(per_group, mla::kHeads);
    const int rest = number / tiles;
    group = rest % p.groups;
    token = rest / p.groups;
    batch = static_cast<int>(token) / static_cast<int>(p.queries);
    const int first = (number - rest * tiles) * mla::kHeads;
    head = group * per_group + first;
    heads = min(per_group - first, mla::kHeads);
  }
};

__host__ __device__ inline int64_t item_count(const SparseMlaFwdParams& p) {
  return p.batch * p.queries * p.groups * ceil_div(p.heads / p.groups, mla::kHeads);
}

// A block takes the items first_item, first_item + item_step, ... below item_count.
__device__ inline int first_item(const SparseMlaFwdParams&) { return blockIdx.x; }
__device__ inline int item_step(const SparseMlaFwdParams&) { return gridDim.x; }

// How far, in log2 units, scores may exceed their row's reference before it moves.
__device__ constexpr float lazy_margin(const SparseMlaFwdParams&) { return mla::kLazyMargin; }

}  // namespace jax_dsa::sparse_mla
