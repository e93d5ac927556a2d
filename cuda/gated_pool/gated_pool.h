// Gated pooling: pools each block of tokens into one key. Each channel is a mean of the tokens'
// values, weighted by a softmax over the tokens' gates. Mean pooling: the weights are equal.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/types.h"

namespace jax_dsa {

// Each document is divided into blocks of `ratio` tokens, starting at its first row. The key of
// block i of a document that begins at row s is stored in slot s / ratio + i. With two halves, a
// key is pooled from the second halves of its block's tokens and the first halves of the previous
// block's tokens. The remaining tokens at the end of a document form no block, and a slot without a
// block gets zeros.
//
// The kernels require ratio * halves <= kGatedPoolMaxPooled, a dim that is a multiple of 4, and
// 16-byte aligned arrays.
struct GatedPoolParams {
  const void* values;     // [batch, tokens, halves, dim], `dtype`
  const void* gates;      // [batch, tokens, halves, dim], `dtype`
  const float* bias;      // [batch, ratio, halves, dim], added to the gates
  const float* scale;     // [batch, dim], multiplies the keys; null: ones
  const int32_t* starts;  // [batch, tokens], first row of each token's document, >= 0; null:
                          // one document, from row 0 on
  int64_t batch;
  int64_t tokens;
  int ratio;
  int halves;  // 1 or 2
  int dim;
  DType dtype;
};

struct GatedPoolFwdParams {
  GatedPoolParams in;
  void* out;  // [batch, tokens / ratio, dim], `dtype`
  // With `scale`: [batch, gated_pool_tiles(), tokens / ratio]. The sum over tiles is the sum of
  // squares of a key's elements before they are multiplied by `scale`.
  float* squares;
};

struct GatedPoolBwdParams {
  GatedPoolParams in;
  const void* dout;       // [batch, tokens / ratio, dim], `dtype`
  const float* dsquares;  // with `scale`: [batch, tokens / ratio]
  void* dvalues;          // shape and dtype of `values`
  void* dgates;           // shape and dtype of `gates`
  // [batch, splits, rows, dim]. The sum over splits is the gradient of the bias in the first
  // ratio * halves rows and, with `scale`, that of `scale` in one more row.
  float* sums;
  int64_t splits;  // >= 1; the keys of a batch entry are divided among so many CTAs per tile
};

inline constexpr int kGatedPoolMaxPooled = 128;

cudaError_t launch_gated_pool_fwd(const GatedPoolFwdParams& params, cudaStream_t stream);
cudaError_t launch_gated_pool_bwd(const GatedPoolBwdParams& params, cudaStream_t stream);

// Mean pooling, with the blocks, slots and limits of gated pooling with one half.
struct MeanPoolParams {
  const void* from;       // values [batch, tokens, dim]; backward: gradient of the keys
  const int32_t* starts;  // as in GatedPoolParams
  void* to;               // keys [batch, tokens / ratio, dim]; backward: gradient of the values
  int64_t batch;
  int64_t tokens;
  int ratio;
  float factor;  // 1 / ratio
  int dim;
  DType dtype;
};

cudaError_t launch_mean_pool_fwd(const MeanPoolParams& params, cudaStream_t stream);
cudaError_t launch_mean_pool_bwd(const MeanPoolParams& params, cudaStream_t stream);

// Returns the number of channel tiles of a key. Each CTA processes one of them.
int gated_pool_tiles(int ratio, int halves, int dim);
// Returns the number of splits that fills the GPU with CTAs and still leaves few sums to add up.
int64_t gated_pool_bwd_splits(int64_t batch, int64_t tokens, int ratio, int halves, int dim);

}  // namespace jax_dsa
