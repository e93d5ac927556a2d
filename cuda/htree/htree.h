// Hierarchical tree attention (docs/ops/htree.md): the tree's layout and what the launchers take.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/types.h"

namespace jax_dsa {

inline constexpr int kHTreeMaxLayers = 12;

// Layer 0 is the tokens, the last one has at most compression * top_k nodes. A block is
// `compression` siblings. Of every layer the first top_k blocks lie in memory, then, but of the
// last layer, all blocks, each layer from block `first` on: whose candidates begin a layer, as of
// queries that are early enough, or in the last layer of all, has them at ordinals that are the
// nodes' own numbers.
struct HTreeLayers {
  int count;
  int64_t size[kHTreeMaxLayers];   // in nodes
  int64_t first[kHTreeMaxLayers];  // in blocks
  int64_t
      prefix_blocks[kHTreeMaxLayers];  // how many blocks there are by ordinal; the others follow
  int64_t blocks;                      // of all layers
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
  const void* k;  // [B, T, G, D], bf16
  const void* v;  // the same
  // [B, G, blocks, 2, compression, D]: a block's keys, then its values; a row's 16-byte chunk c
  // lies at c ^ (row % 8). Keys are rotated, in the early blocks by the nodes' numbers, in the
  // others by their slots in the block.
  void* tree;
  float* rotations;  // [compression * top_k, D / 2, 2]: cos and sin by ordinal
  void* workspace;   // of htree_build_workspace
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
// Bytes: layers 2, 4, ... as [B, G, nodes, 2, D], not rotated.
constexpr int64_t htree_build_workspace(const HTreeBuildParams& p) {
  const HTreeLayers layers = htree_layers(p.tokens, p.compression, p.top_k);
  int64_t nodes = 0;
  for (int i = 2; i < layers.count; i += 2) nodes += layers.size[i];
  return p.batch * p.groups * nodes * 2 * p.dim * 2;
}

struct HTreeFwdParams {
  const void* q;             // [B, T, N, D], bf16
  const int32_t* positions;  // [B, T], the tokens that queries stand at; below 0: none
  const void* tree;
  const float* rotations;
  void* out;   // [B, T, N, D], bf16
  float* lse;  // [B, T, N]
  // [B, T, G, layers - 1, top_k], ordinals, ascending, then -1; null: not wanted. Ordinals are
  // below compression * top_k, at most 2^15.
  int16_t* selected;
  void* workspace;  // 256-byte aligned
  int64_t workspace_bytes;
  int64_t batch, queries, heads, groups, tokens, dim, compression, top_k;
  float scale;
};

// Of a cache: `tree` and `rotations` of `fwd` are not read, its tokens are the capacity; `selected`
// is wanted.
struct HTreeDecodeParams {
  HTreeFwdParams fwd;
  const void* k;  // [B, htree_cache_nodes, G, D], bf16, all layers, each in whole blocks
  const void* v;  // the same
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
  HTreeFwdParams fwd;  // the forward pass's; out, lse and selected are read
  const void* dout;    // as out
  const float* dlse;   // as lse
  void* dq;            // as q
  void* dk;            // [B, S, G, D], bf16, of the tokens
  void* dv;            // the same
};

inline constexpr int64_t kHTreeMaxTopK = 1024;
inline constexpr int64_t kHTreeMaxGroupHeads = 192;
inline constexpr int64_t kHTreeMaxBwdGroupHeads = 128;
inline constexpr int64_t kHTreeMaxDecodeGroupHeads = 128;

// cudaErrorInvalidValue for what is not there: D is 64 or 128, compression 8, 16 or 32; and for a
// workspace that is too small for a query.
cudaError_t launch_htree_build(const HTreeBuildParams& params, cudaStream_t stream);
cudaError_t launch_htree_fwd(const HTreeFwdParams& params, cudaStream_t stream);
// The same bits on every run.
cudaError_t launch_htree_bwd(const HTreeBwdParams& params, cudaStream_t stream);
// The same bits on every run.
cudaError_t launch_htree_decode(const HTreeDecodeParams& params, cudaStream_t stream);

// Bytes that the workspace has to have for so many queries of a group at a time.
int64_t htree_fwd_workspace(const HTreeFwdParams& params, int64_t rows);
int64_t htree_bwd_workspace(const HTreeBwdParams& params, int64_t rows);
// Bytes that the workspace has to have.
int64_t htree_decode_workspace(const HTreeDecodeParams& params);

}  // namespace jax_dsa
