// Pooling of blocks of tokens: element by element a softmax over the tokens' gates.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/types.h"

namespace jax_dsa {

// A document's blocks begin with it, `ratio` tokens each; block i of one that begins at row s has
// the slot s / ratio + i. With two halves a key is pooled from the block's second halves and from
// the first halves of the block before. Tokens of a block that is not whole make none, and a slot
// without a block gets zeros. In all: ratio * halves <= kMostPooled, dim a multiple of 4,
// everything 16-byte aligned.
struct GatedPoolParams {
  const void* values;     // [batch, tokens, halves, dim], of `dtype`
  const void* gates;      // [batch, tokens, halves, dim], of `dtype`
  const float* bias;      // [batch, ratio, halves, dim], of the gates
  const int32_t* starts;  // [batch, tokens], each document's first row, >= 0; null: one, from 0
  int64_t batch;
  int64_t tokens;
  int ratio;
  int halves;  // 1 or 2
  int dim;
  DType dtype;
};

struct GatedPoolFwdParams {
  GatedPoolParams in;
  void* out;  // [batch, tokens / ratio, dim], of `dtype`
};

struct GatedPoolBwdParams {
  GatedPoolParams in;
  const void* dout;  // [batch, tokens / ratio, dim], of `dtype`
  void* dvalues;     // as values
  void* dgates;      // as gates
  float* dbias;      // [batch, parts, ratio, halves, dim]: their sum over parts is the gradient
  int64_t parts;     // >= 1, which share out a batch entry's keys
};

inline constexpr int kMostPooled = 128;

cudaError_t launch_gated_pool_fwd(const GatedPoolFwdParams& params, cudaStream_t stream);
cudaError_t launch_gated_pool_bwd(const GatedPoolBwdParams& params, cudaStream_t stream);

// Parts that keep a GPU busy and make few sums.
int64_t gated_pool_parts(int64_t batch, int64_t tokens, int ratio, int halves, int dim);

}  // namespace jax_dsa
