// Handler of hierarchical tree attention.

#include "htree/htree.h"

#include "ffi/common.h"
#include "ffi/targets.h"

namespace jax_dsa {
namespace {

using BF16 = ffi::Buffer<ffi::BF16>;
using F32 = ffi::Buffer<ffi::F32>;
using S16 = ffi::Buffer<ffi::S16>;
using S32 = ffi::Buffer<ffi::S32>;
using U8 = ffi::Buffer<ffi::U8>;

// q [B, T, N, D], k and v [B, S, G, D], positions [B, T]
// -> out [B, T, N, D], lse [B, T, N], selected [B, T, G, layers - 1, K]; and workspaces in bytes:
// the tree, rotations, the build's and the attention's, all as `htree_workspace` says
ffi::Error htree_fwd(cudaStream_t stream, BF16 q, BF16 k, BF16 v, S32 positions,
                     ffi::Result<BF16> out, ffi::Result<F32> lse, ffi::Result<S16> selected,
                     ffi::Result<U8> tree, ffi::Result<U8> rotations, ffi::Result<U8> building,
                     ffi::Result<U8> attending, int64_t compression, int64_t top_k, float scale,
                     double rope_base) {
  constexpr const char* kOp = "htree_fwd";
  const auto q_dims = q.dimensions(), k_dims = k.dimensions();
  if (q_dims.size() != 4) return invalid_argument(kOp, "q is not of rank 4");
  if (k_dims.size() != 4) return invalid_argument(kOp, "k is not of rank 4");
  const int64_t batch = q_dims[0], queries = q_dims[1], heads = q_dims[2], dim = q_dims[3];
  const int64_t tokens = k_dims[1], groups = k_dims[2];
  if (compression < 2 || top_k < 1 || top_k > kHTreeMaxTopK) {
    return invalid_argument(kOp, "compression is below 2, or top_k is not in 1 .. 1024");
  }
  if (groups < 1 || heads % groups != 0 || heads / groups > kHTreeMaxGroupHeads) {
    return invalid_argument(kOp, "N is no multiple of G, or a group has more than 192 heads");
  }
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "k", k_dims, {}, {batch, tokens, groups, dim}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "v", v.dimensions(), k_dims, {}));
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(kOp, "positions", positions.dimensions(), {}, {batch, queries}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "out", out->dimensions(), q_dims, {}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "lse", lse->dimensions(), {}, {batch, queries, heads}));
  const int64_t layers = htree_layers(tokens, compression, top_k).count;
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "selected", selected->dimensions(), {},
                                      {batch, queries, groups, layers - 1, top_k}));
  const HTreeBuildParams build = {
      .k = k.untyped_data(),
      .v = v.untyped_data(),
      .tree = tree->untyped_data(),
      .rotations = static_cast<float*>(rotations->untyped_data()),
      .workspace = building->untyped_data(),
      .batch = batch,
      .tokens = tokens,
      .groups = groups,
      .dim = dim,
      .compression = compression,
      .top_k = top_k,
      .rope_base = rope_base,
  };
  if (static_cast<int64_t>(tree->element_count()) < htree_tree_bytes(build) ||
      static_cast<int64_t>(rotations->element_count()) < htree_rotation_bytes(build) ||
      static_cast<int64_t>(building->element_count()) < htree_build_workspace(build)) {
    return invalid_argument(kOp, "a workspace is too small");
  }
  const HTreeFwdParams params = {
      .q = q.untyped_data(),
      .positions = positions.typed_data(),
      .tree = build.tree,
      .rotations = build.rotations,
      .out = out->untyped_data(),
      .lse = lse->typed_data(),
      .selected = selected->typed_data(),
      .workspace = attending->untyped_data(),
      .workspace_bytes = static_cast<int64_t>(attending->element_count()),
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
  DSA_FFI_RETURN_IF_ERROR(launch_status(kOp, launch_htree_build(build, stream)));
  return launch_status(kOp, launch_htree_fwd(params, stream));
}

}  // namespace
}  // namespace jax_dsa

XLA_FFI_DEFINE_HANDLER_SYMBOL(HTreeFwd, jax_dsa::htree_fwd,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<jax_dsa::BF16>()
                                  .Arg<jax_dsa::BF16>()
                                  .Arg<jax_dsa::BF16>()
                                  .Arg<jax_dsa::S32>()
                                  .Ret<jax_dsa::BF16>()
                                  .Ret<jax_dsa::F32>()
                                  .Ret<jax_dsa::S16>()
                                  .Ret<jax_dsa::U8>()
                                  .Ret<jax_dsa::U8>()
                                  .Ret<jax_dsa::U8>()
                                  .Ret<jax_dsa::U8>()
                                  .Attr<int64_t>("compression")
                                  .Attr<int64_t>("top_k")
                                  .Attr<float>("scale")
                                  .Attr<double>("rope_base"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
