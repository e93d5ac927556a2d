// The rows of the teacher's kernels for the latent form (teacher.cuh).
#pragma once

#include <cuda_runtime_api.h>

#include "common/types.h"
#include "losses/losses.h"

namespace jax_dsa::teacher {

inline constexpr int kRows = 64;  // rows per head tile; a work tile has two

// Returns whether the kernels of either form can run this call.
inline bool is_valid(const TeacherParams& p) {
  const bool latent = p.dim == 576 || p.dim == 512;
  const bool multi_head = p.dim == 64 || p.dim == 128 || p.dim == 192 || p.dim == 256;
  return p.groups > 0 && p.heads % p.groups == 0 && p.keys <= INT32_MAX - 4096 &&
         (latent || multi_head);
}

// How the heads of a KV head group are mapped to rows.
struct Layout {
  int heads;       // heads per group
  int rows;        // rows per query, with padding: 16, 32, 64 or 128
  int queries;     // queries per work tile
  int row_passes;  // row passes, of 128 rows each

  __host__ __device__ explicit Layout(const TeacherParams& p)
      : heads(p.heads / p.groups),
        rows(heads <= 16   ? 16
             : heads <= 32 ? 32
             : heads <= 64 ? 64
                           : 128),
        queries(2 * kRows / rows),
        row_passes(ceil_div(heads, 2 * kRows)) {}

  // The query within the work tile, and the head within the group, of row r in a row pass.
  __device__ int query(int r) const { return r / rows; }
  __device__ int head(int r, int row_pass) const { return row_pass * 2 * kRows + r % rows; }
};

}  // namespace jax_dsa::teacher
