// Handlers of hierarchical tree attention.

#include "htree/htree.h"

#include <optional>

#include "ffi/common.h"
#include "ffi/limits.h"

namespace jax_dsa {
namespace {

struct Options {
  int64_t compression, top_k;
  float scale;
  double rope_base;
};

// The operands and results that all three handlers have.
struct Arrays {
  const BF16& q;         // [B, T, N, D]
  const BF16& k;         // [B, S, G, D]; of a cache [B, htree_cache_nodes, G, D]
  const BF16& v;         // the same
  const S32& positions;  // [B, T]
  const BF16& out;       // [B, T, N, D]
  const F32& max_logit;  // [B, T, N]
  const F32& log_sum;    // [B, T, N]
  const S16& selected;   // [B, T, G, layers - 1, K]
};

// The workspaces in which a handler builds the tree. The sizes come from `htree_workspaces`.
struct TreeArrays {
  const U8& tree;
  const U8& rotations;
  const U8& building;
};

// Checks the options and arrays, and gathers them in `params`, without a tree or a workspace. If
// there is a capacity, k and v are the nodes of a cache.
ffi::Error check(const char* op, const Arrays& x, const Options& options,
                 std::optional<int64_t> capacity, int64_t max_group_heads, HTreeFwdParams* params) {
  const auto [compression, top_k, scale, rope_base] = options;
  const Dims q_dims = x.q.dimensions(), k_dims = x.k.dimensions();
  DSA_FFI_RETURN_IF_ERROR(check_rank(op, "q", q_dims, {"B", "T", "N", "D"}));
  DSA_FFI_RETURN_IF_ERROR(check_rank(op, "k", k_dims, {"B", "S", "G", "D"}));
  const int64_t batch = q_dims[0], queries = q_dims[1], heads = q_dims[2], dim = q_dims[3];
  const int64_t groups = k_dims[2];
  DSA_FFI_RETURN_IF_ERROR(check_one_of(op, "D", dim, limits::htree::kDims));
  DSA_FFI_RETURN_IF_ERROR(
      check_one_of(op, "compression", compression, limits::htree::kCompressions));
  DSA_FFI_RETURN_IF_ERROR(check_range(op, "top_k", top_k, 1, limits::htree::kMaxTopK));
  DSA_FFI_RETURN_IF_ERROR(check_groups(op, heads, groups));
  DSA_FFI_RETURN_IF_ERROR(
      check_range(op, "the number of heads of a group", heads / groups, 0, max_group_heads));
  if (capacity && *capacity < 1) {
    return invalid_argument(op, "capacity is " + std::to_string(*capacity) + ", expected >= 1");
  }
  const int64_t tokens = capacity ? *capacity : k_dims[1];
  const int64_t rows = capacity ? htree_cache_nodes(tokens, compression, top_k) : tokens;
  const int64_t layers = htree_layers(tokens, compression, top_k).count;
  DSA_FFI_RETURN_IF_ERROR(check_shape(op, "k", k_dims, {batch, rows, groups, dim}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(op, "v", x.v.dimensions(), k_dims, {}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(op, "positions", x.positions.dimensions(), {batch, queries}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(op, "out", x.out.dimensions(), q_dims, {}));
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(op, "max_logit", x.max_logit.dimensions(), {batch, queries, heads}));
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(op, "log_sum", x.log_sum.dimensions(), {batch, queries, heads}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(op, "selected", x.selected.dimensions(),
                                      {batch, queries, groups, layers - 1, top_k}));
  *params = {
      .q = x.q.untyped_data(),
      .positions = x.positions.typed_data(),
      .tree = nullptr,
      .rotations = nullptr,
      .out = x.out.untyped_data(),
      .max_logit = x.max_logit.typed_data(),
      .log_sum = x.log_sum.typed_data(),
      .selected = x.selected.typed_data(),
      .workspace = nullptr,
      .workspace_bytes = 0,
      .batch = batch,
      .queries = queries,
      .heads = heads,
      .groups = groups,
      .tokens = tokens,
      .dim = dim,
      .compression = compression,
      .top_k = top_k,
      .scale = scale,
  };
  return ffi::Error::Success();
}

// Launches the build of the tree from k and v, and makes `params` refer to it.
ffi::Error build_tree(const char* op, cudaStream_t stream, const BF16& k, const BF16& v,
                      const TreeArrays& x, double rope_base, HTreeFwdParams* params) {
  const HTreeBuildParams build = {
      .k = k.untyped_data(),
      .v = v.untyped_data(),
      .tree = x.tree.untyped_data(),
      .rotations = static_cast<float*>(x.rotations.untyped_data()),
      .workspace = x.building.untyped_data(),
      .batch = params->batch,
      .tokens = params->tokens,
      .groups = params->groups,
      .dim = params->dim,
      .compression = params->compression,
      .top_k = params->top_k,
      .rope_base = rope_base,
  };
  DSA_FFI_RETURN_IF_ERROR(
      check_workspace(op, "tree", x.tree.size_bytes(), htree_tree_bytes(build)));
  DSA_FFI_RETURN_IF_ERROR(
      check_workspace(op, "rotations", x.rotations.size_bytes(), htree_rotation_bytes(build)));
  DSA_FFI_RETURN_IF_ERROR(
      check_workspace(op, "building", x.building.size_bytes(), htree_build_workspace(build)));
  params->tree = build.tree;
  params->rotations = build.rotations;
  return launch_status(op, launch_htree_build(build, stream));
}

// Sets the workspace of the attention kernels. They process as many queries at a time as it has
// space for, and need space for `least` bytes.
ffi::Error set_workspace(const char* op, const U8& workspace, int64_t least,
                         HTreeFwdParams* params) {
  const auto bytes = static_cast<int64_t>(workspace.size_bytes());
  params->workspace = workspace.untyped_data();
  params->workspace_bytes = bytes;
  return check_workspace(op, "attending", bytes, least);
}

// q, k, v, positions -> out, max_logit, log_sum, selected, and the workspaces tree, rotations,
// building, attending
ffi::Error htree_fwd(cudaStream_t stream, BF16 q, BF16 k, BF16 v, S32 positions, Result<BF16> out,
                     Result<F32> max_logit, Result<F32> log_sum, Result<S16> selected,
                     Result<U8> tree, Result<U8> rotations, Result<U8> building,
                     Result<U8> attending, Attr<int64_t, "compression"> compression,
                     Attr<int64_t, "top_k"> top_k, Attr<float, "scale"> scale,
                     Attr<double, "rope_base"> rope_base) {
  constexpr const char* kOp = "htree_fwd";
  HTreeFwdParams params;
  DSA_FFI_RETURN_IF_ERROR(check(kOp, {q, k, v, positions, *out, *max_logit, *log_sum, *selected},
                                {compression, top_k, scale, rope_base}, std::nullopt,
                                limits::htree::kMaxGroupHeads, &params));
  DSA_FFI_RETURN_IF_ERROR(
      set_workspace(kOp, *attending, htree_fwd_workspace(params, params.groups), &params));
  DSA_FFI_RETURN_IF_ERROR(
      build_tree(kOp, stream, k, v, {*tree, *rotations, *building}, rope_base, &params));
  return launch_status(kOp, launch_htree_fwd(params, stream));
}

// q, k, v, positions, out, max_logit, log_sum, selected, dout, dlse
// -> dq, dk, dv, and the workspaces tree, rotations, building, attending
ffi::Error htree_bwd(cudaStream_t stream, BF16 q, BF16 k, BF16 v, S32 positions, BF16 out,
                     F32 max_logit, F32 log_sum, S16 selected, BF16 dout, F32 dlse, Result<BF16> dq,
                     Result<BF16> dk, Result<BF16> dv, Result<U8> tree, Result<U8> rotations,
                     Result<U8> building, Result<U8> attending,
                     Attr<int64_t, "compression"> compression, Attr<int64_t, "top_k"> top_k,
                     Attr<float, "scale"> scale, Attr<double, "rope_base"> rope_base) {
  constexpr const char* kOp = "htree_bwd";
  HTreeBwdParams params = {
      .fwd = {},
      .dout = dout.untyped_data(),
      .dlse = dlse.typed_data(),
      .dq = dq->untyped_data(),
      .dk = dk->untyped_data(),
      .dv = dv->untyped_data(),
  };
  DSA_FFI_RETURN_IF_ERROR(check(kOp, {q, k, v, positions, out, max_logit, log_sum, selected},
                                {compression, top_k, scale, rope_base}, std::nullopt,
                                limits::htree::kMaxBwdGroupHeads, &params.fwd));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "dout", dout.dimensions(), q.dimensions(), {}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "dlse", dlse.dimensions(), log_sum.dimensions(), {}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "dq", dq->dimensions(), q.dimensions(), {}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "dk", dk->dimensions(), k.dimensions(), {}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "dv", dv->dimensions(), k.dimensions(), {}));
  DSA_FFI_RETURN_IF_ERROR(
      set_workspace(kOp, *attending, htree_bwd_workspace(params, params.fwd.groups), &params.fwd));
  DSA_FFI_RETURN_IF_ERROR(
      build_tree(kOp, stream, k, v, {*tree, *rotations, *building}, rope_base, &params.fwd));
  return launch_status(kOp, launch_htree_bwd(params, stream));
}

// The forward pass over a cache, whose nodes k and v hold: q, k, v, positions -> out,
// max_logit, log_sum, selected, workspace
ffi::Error htree_decode(cudaStream_t stream, BF16 q, BF16 k, BF16 v, S32 positions,
                        Result<BF16> out, Result<F32> max_logit, Result<F32> log_sum,
                        Result<S16> selected, Result<U8> workspace,
                        Attr<int64_t, "capacity"> capacity,
                        Attr<int64_t, "compression"> compression, Attr<int64_t, "top_k"> top_k,
                        Attr<float, "scale"> scale, Attr<double, "rope_base"> rope_base) {
  constexpr const char* kOp = "htree_decode";
  HTreeDecodeParams params = {
      .fwd = {},
      .k = k.untyped_data(),
      .v = v.untyped_data(),
      .rope_base = rope_base,
  };
  DSA_FFI_RETURN_IF_ERROR(check(kOp, {q, k, v, positions, *out, *max_logit, *log_sum, *selected},
                                {compression, top_k, scale, rope_base}, capacity.value,
                                limits::htree::kMaxDecodeGroupHeads, &params.fwd));
  DSA_FFI_RETURN_IF_ERROR(
      set_workspace(kOp, *workspace, htree_decode_workspace(params), &params.fwd));
  return launch_status(kOp, launch_htree_decode(params, stream));
}

DSA_FFI_HANDLER("jax_dsa.htree_bwd.v2", htree_bwd, kEveryGpu);
DSA_FFI_HANDLER("jax_dsa.htree_decode.v2", htree_decode, kEveryGpu);
DSA_FFI_HANDLER("jax_dsa.htree_fwd.v2", htree_fwd, kEveryGpu);

}  // namespace
}  // namespace jax_dsa
