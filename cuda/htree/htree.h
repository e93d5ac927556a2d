// Hierarchical tree attention (docs/ops/htree.md): layout of the tree and parameters of the
// launchers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/device.h"
#include "common/types.h"

namespace jax_dsa {

inline constexpr int kHTreeMaxLayers = 12;

// Layer 0 is the tokens; the last (top) layer has at most compression * top_k nodes. A block is
// `compression` siblings: keys, then values.
//
// The tree in memory consists of the layers one after another, layer l from block `first[l]` on.
// Each layer stores two kinds of blocks:
//   - Prefix blocks: the first top_k blocks of the layer, or all blocks of the top layer. Their
//   keys are
//     rotated by the nodes' numbers.
//   - All blocks of the layer, except for the top layer. Their keys are rotated by the slot in the
//   block.
// If the candidates of a query are the first nodes of the layer, because the query is early
// enough or because this is the top layer, then their ordinals are the nodes' numbers and the
// query reads the prefix blocks. Otherwise it reads the others.
struct HTreeLayers {
  int count;
  int64_t size[kHTreeMaxLayers];           // nodes
  int64_t first[kHTreeMaxLayers];          // block at which the layer begins
  int64_t prefix_blocks[kHTreeMaxLayers];  // number of prefix blocks; the others follow
  int64_t blocks;                          // of all layers together
};
constexpr HTreeLayers htree_layers(int64_t tokens, int64_t compression, int64_t top_k) {
  HTreeLayers x = {};
  for (int64_t size = tokens;; size = ceil_div(size, compression)) {
    const bool last = size <= compression * top_k;
    const int64_t blocks = ceil_div(size, compression);
    x.size[x.count] = size;
    x.first[x.count] = x.blocks;
    x.prefix_blocks[x.count] = last ? blocks : top_k;
    x.blocks += last ? blocks : top_k + blocks;
    ++x.count;
    if (last) return x;
  }
}

struct HTreeBuildParams {
  const void* k;  // [B, T, G, D], bfloat16
  const void* v;  // like k
  // [B, G, blocks, 2, compression, D], bfloat16: a block's keys, then its values. 16-byte
  // chunk c of a row is stored at chunk c ^ (row % 8). HTreeLayers says how keys are rotated.
  void* tree;
  float* rotations;  // [compression * top_k, D / 2, 2], float32: cos and sin by ordinal
  void* workspace;   // htree_build_workspace bytes
  int64_t batch, tokens, groups, dim, compression, top_k;
  double rope_base;
};
constexpr int64_t htree_tree_bytes(const HTreeBuildParams& p) {
  const HTreeLayers layers = htree_layers(p.tokens, p.compression, p.top_k);
  return p.batch * p.groups * layers.blocks * 2 * p.compression * p.dim * 2;
}
constexpr int64_t htree_rotation_bytes(const HTreeBuildParams& p) {
  return p.compression * p.top_k * p.dim * 4;
}
// Returns the bytes for layers 2, 4, ... as [B, G, nodes, 2, D], not rotated.
constexpr int64_t htree_build_workspace(const HTreeBuildParams& p) {
  const HTreeLayers layers = htree_layers(p.tokens, p.compression, p.top_k);
  int64_t nodes = 0;
  for (int i = 2; i < layers.count; i += 2) nodes += layers.size[i];
  return p.batch * p.groups * nodes * 2 * p.dim * 2;
}

struct HTreeFwdParams {
  const void* q;             // [B, T, N, D], bfloat16
  const int32_t* positions;  // [B, T], token of each query; negative: none
  const void* tree;
  const float* rotations;
  void* out;  // [B, T, N, D], bfloat16
  // Both are [B, T, N]. The log-sum-exp of the scores is their sum. `max_logit` is a score next to
  // the largest one, at most log(2^8) smaller; -inf for a query without a token.
  float* max_logit;
  float* log_sum;  // log(sum(exp(score - max_logit))); 0 for a query without a token
  // [B, T, G, layers - 1, top_k]: selected ordinals of layers 1, 2, ..., ascending, then -1.
  // Ordinals are below compression * top_k, which is at most 2^15. May be null for the forward
  // pass.
  int16_t* selected;
  void* workspace;  // aligned to 256 bytes
  int64_t workspace_bytes;
  int64_t batch, queries, heads, groups, tokens, dim, compression, top_k;
  float scale;
};

// Attention over an HTreeCache. `fwd.tree` and `fwd.rotations` are not used, `fwd.tokens` is the
// cache's capacity, and `fwd.selected` must not be null.
struct HTreeDecodeParams {
  HTreeFwdParams fwd;
  const void* k;  // [B, htree_cache_nodes, G, D], bfloat16; layers are padded to whole blocks
  const void* v;  // like k
  double rope_base;
};
constexpr int64_t htree_cache_nodes(int64_t capacity, int64_t compression, int64_t top_k) {
  const HTreeLayers layers = htree_layers(capacity, compression, top_k);
  int64_t nodes = 0;
  for (int i = 0; i < layers.count; ++i) {
    nodes += ceil_div(layers.size[i], compression) * compression;
  }
  return nodes;
}

struct HTreeBwdParams {
  HTreeFwdParams fwd;  // of the forward pass; its results are inputs
  const void* dout;    // like out
  const float* dlse;   // like log_sum
  void* dq;            // like q
  void* dk;            // [B, S, G, D], bfloat16, of the tokens
  void* dv;            // like dk
};

inline constexpr int64_t kHTreeMaxTopK = 1024;
inline constexpr int64_t kHTreeMaxGroupHeads = 192;
inline constexpr int64_t kHTreeMaxBwdGroupHeads = 128;
inline constexpr int64_t kHTreeMaxDecodeGroupHeads = 128;

// The launchers return cudaErrorInvalidValue unless D is 64 or 128 and compression is 8, 16 or
// 32, and if the workspace does not suffice for a single query. Their results are the same bits
// on every run.
cudaError_t launch_htree_build(const HTreeBuildParams& params, cudaStream_t stream);
cudaError_t launch_htree_fwd(const HTreeFwdParams& params, cudaStream_t stream);
cudaError_t launch_htree_bwd(const HTreeBwdParams& params, cudaStream_t stream);
cudaError_t launch_htree_decode(const HTreeDecodeParams& params, cudaStream_t stream);

namespace hopper {
cudaError_t launch_htree_fwd(const HTreeFwdParams& params, cudaStream_t stream);
cudaError_t launch_htree_bwd(const HTreeBwdParams& params, cudaStream_t stream);
}  // namespace hopper
namespace portable {
cudaError_t launch_htree_fwd(const HTreeFwdParams& params, const Device& device,
                             cudaStream_t stream);
cudaError_t launch_htree_bwd(const HTreeBwdParams& params, const Device& device,
                             cudaStream_t stream);
}  // namespace portable

// Workspace bytes for processing `rows` rows, (query, KV head group) pairs, at a time.
int64_t htree_fwd_workspace(const HTreeFwdParams& params, int64_t rows);
int64_t htree_bwd_workspace(const HTreeBwdParams& params, int64_t rows);
// Workspace bytes.
int64_t htree_decode_workspace(const HTreeDecodeParams& params);
// The shared memory that a CTA of decode needs at least. The launcher returns cudaErrorNotSupported
// on a GPU that has less.
int htree_decode_shared_bytes(int group_heads, int dim, int compression, int top_k);

}  // namespace jax_dsa
