// Handlers of hierarchical tree attention.

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

// What both handlers have; the last ones are workspaces in bytes, as `htree_workspaces` says.
struct Arrays {
  const BF16& q;         // [B, T, N, D]
  const BF16& k;         // [B, S, G, D]
  const BF16& v;         // the same
  const S32& positions;  // [B, T]
  const BF16& out;       // [B, T, N, D]
  const F32& lse;        // [B, T, N]
  const S16& selected;   // [B, T, G, layers - 1, K]
  const U8& tree;
  const U8& rotations;
  const U8& building;
  const U8& attending;
};
struct Numbers {
  int64_t compression, top_k;
  float scale;
  double rope_base;
};

// Checks them and builds the tree.
ffi::Error prepare(const char* op, cudaStream_t stream, const Arrays& x, const Numbers& numbers,
                   HTreeFwdParams* params) {
  const auto [compression, top_k, scale, rope_base] = numbers;
  const auto q_dims = x.q.dimensions(), k_dims = x.k.dimensions();
  if (q_dims.size() != 4) return invalid_argument(op, "q is not of rank 4");
  if (k_dims.size() != 4) return invalid_argument(op, "k is not of rank 4");
  const int64_t batch = q_dims[0], queries = q_dims[1], heads = q_dims[2], dim = q_dims[3];
  const int64_t tokens = k_dims[1], groups = k_dims[2];
  if (compression < 2 || top_k < 1 || top_k > kHTreeMaxTopK) {
    return invalid_argument(op, "compression is below 2, or top_k is not in 1 .. 1024");
  }
  if (groups < 1 || heads % groups != 0 || heads / groups > kHTreeMaxGroupHeads) {
    return invalid_argument(op, "N is no multiple of G, or a group has more than 192 heads");
  }
  DSA_FFI_RETURN_IF_ERROR(check_shape(op, "k", k_dims, {}, {batch, tokens, groups, dim}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(op, "v", x.v.dimensions(), k_dims, {}));
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(op, "positions", x.positions.dimensions(), {}, {batch, queries}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(op, "out", x.out.dimensions(), q_dims, {}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(op, "lse", x.lse.dimensions(), {}, {batch, queries, heads}));
  const int64_t layers = htree_layers(tokens, compression, top_k).count;
  DSA_FFI_RETURN_IF_ERROR(check_shape(op, "selected", x.selected.dimensions(), {},
                                      {batch, queries, groups, layers - 1, top_k}));
  const HTreeBuildParams build = {
      .k = x.k.untyped_data(),
      .v = x.v.untyped_data(),
      .tree = x.tree.untyped_data(),
      .rotations = static_cast<float*>(x.rotations.untyped_data()),
      .workspace = x.building.untyped_data(),
      .batch = batch,
      .tokens = tokens,
      .groups = groups,
      .dim = dim,
      .compression = compression,
      .top_k = top_k,
      .rope_base = rope_base,
  };
  if (static_cast<int64_t>(x.tree.element_count()) < htree_tree_bytes(build) ||
      static_cast<int64_t>(x.rotations.element_count()) < htree_rotation_bytes(build) ||
      static_cast<int64_t>(x.building.element_count()) < htree_build_workspace(build)) {
    return invalid_argument(op, "a workspace is too small");
  }
  *params = {
      .q = x.q.untyped_data(),
      .positions = x.positions.typed_data(),
      .tree = build.tree,
      .rotations = build.rotations,
      .out = x.out.untyped_data(),
      .lse = x.lse.typed_data(),
      .selected = x.selected.typed_data(),
      .workspace = x.attending.untyped_data(),
      .workspace_bytes = static_cast<int64_t>(x.attending.element_count()),
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
  return launch_status(op, launch_htree_build(build, stream));
}

ffi::Error htree_fwd(cudaStream_t stream, BF16 q, BF16 k, BF16 v, S32 positions,
                     ffi::Result<BF16> out, ffi::Result<F32> lse, ffi::Result<S16> selected,
                     ffi::Result<U8> tree, ffi::Result<U8> rotations, ffi::Result<U8> building,
                     ffi::Result<U8> attending, int64_t compression, int64_t top_k, float scale,
                     double rope_base) {
  constexpr const char* kOp = "htree_fwd";
  HTreeFwdParams params;
  DSA_FFI_RETURN_IF_ERROR(
      prepare(kOp, stream,
              {q, k, v, positions, *out, *lse, *selected, *tree, *rotations, *building, *attending},
              {compression, top_k, scale, rope_base}, &params));
  return launch_status(kOp, launch_htree_fwd(params, stream));
}

// Also the cotangents of out and lse -> dq, dk, dv.
ffi::Error htree_bwd(cudaStream_t stream, BF16 q, BF16 k, BF16 v, S32 positions, BF16 out, F32 lse,
                     S16 selected, BF16 dout, F32 dlse, ffi::Result<BF16> dq, ffi::Result<BF16> dk,
                     ffi::Result<BF16> dv, ffi::Result<U8> tree, ffi::Result<U8> rotations,
                     ffi::Result<U8> building, ffi::Result<U8> attending, int64_t compression,
                     int64_t top_k, float scale, double rope_base) {
  constexpr const char* kOp = "htree_bwd";
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "dout", dout.dimensions(), q.dimensions(), {}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "dlse", dlse.dimensions(), lse.dimensions(), {}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "dq", dq->dimensions(), q.dimensions(), {}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "dk", dk->dimensions(), k.dimensions(), {}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "dv", dv->dimensions(), k.dimensions(), {}));
  HTreeBwdParams params = {
      .fwd = {},
      .dout = dout.untyped_data(),
      .dlse = dlse.typed_data(),
      .dq = dq->untyped_data(),
      .dk = dk->untyped_data(),
      .dv = dv->untyped_data(),
  };
  DSA_FFI_RETURN_IF_ERROR(
      prepare(kOp, stream,
              {q, k, v, positions, out, lse, selected, *tree, *rotations, *building, *attending},
              {compression, top_k, scale, rope_base}, &params.fwd));
  return launch_status(kOp, launch_htree_bwd(params, stream));
}

// Over a cache.
ffi::Error htree_decode(cudaStream_t stream, BF16 q, BF16 k, BF16 v, S32 positions,
                        ffi::Result<BF16> out, ffi::Result<F32> lse, ffi::Result<S16> selected,
                        ffi::Result<U8> workspace, int64_t capacity, int64_t compression,
                        int64_t top_k, float scale, double rope_base) {
  constexpr const char* kOp = "htree_decode";
  const auto q_dims = q.dimensions(), k_dims = k.dimensions();
  if (q_dims.size() != 4) return invalid_argument(kOp, "q is not of rank 4");
  if (k_dims.size() != 4) return invalid_argument(kOp, "k is not of rank 4");
  const int64_t batch = q_dims[0], queries = q_dims[1], heads = q_dims[2], dim = q_dims[3];
  const int64_t groups = k_dims[2];
  if (capacity < 1 || compression < 2 || top_k < 1 || top_k > kHTreeMaxTopK) {
    return invalid_argument(kOp, "capacity, compression or top_k is out of range");
  }
  if (groups < 1 || heads % groups != 0 || heads / groups > kHTreeMaxDecodeGroupHeads) {
    return invalid_argument(kOp, "N is no multiple of G, or a group has more than 128 heads");
  }
  const int64_t nodes = htree_cache_nodes(capacity, compression, top_k);
  const int64_t layers = htree_layers(capacity, compression, top_k).count;
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "k", k_dims, {}, {batch, nodes, groups, dim}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "v", v.dimensions(), k_dims, {}));
  DSA_FFI_RETURN_IF_ERROR(
      check_shape(kOp, "positions", positions.dimensions(), {}, {batch, queries}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "out", out->dimensions(), q_dims, {}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "lse", lse->dimensions(), {}, {batch, queries, heads}));
  DSA_FFI_RETURN_IF_ERROR(check_shape(kOp, "selected", selected->dimensions(), {},
                                      {batch, queries, groups, layers - 1, top_k}));
  const HTreeDecodeParams params = {
      .fwd =
          {
              .q = q.untyped_data(),
              .positions = positions.typed_data(),
              .tree = nullptr,
              .rotations = nullptr,
              .out = out->untyped_data(),
              .lse = lse->typed_data(),
              .selected = selected->typed_data(),
              .workspace = workspace->untyped_data(),
              .workspace_bytes = static_cast<int64_t>(workspace->element_count()),
              .batch = batch,
              .queries = queries,
              .heads = heads,
              .groups = groups,
              .tokens = capacity,
              .dim = dim,
              .compression = compression,
              .top_k = top_k,
              .scale = scale,
          },
      .k = k.untyped_data(),
      .v = v.untyped_data(),
      .rope_base = rope_base,
  };
  return launch_status(kOp, launch_htree_decode(params, stream));
}

}  // namespace
}  // namespace jax_dsa

XLA_FFI_DEFINE_HANDLER_SYMBOL(HTreeDecode, jax_dsa::htree_decode,
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
                                  .Attr<int64_t>("capacity")
                                  .Attr<int64_t>("compression")
                                  .Attr<int64_t>("top_k")
                                  .Attr<float>("scale")
                                  .Attr<double>("rope_base"),
                              {xla::ffi::Traits::kCmdBufferCompatible});

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

XLA_FFI_DEFINE_HANDLER_SYMBOL(HTreeBwd, jax_dsa::htree_bwd,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<jax_dsa::BF16>()
                                  .Arg<jax_dsa::BF16>()
                                  .Arg<jax_dsa::BF16>()
                                  .Arg<jax_dsa::S32>()
                                  .Arg<jax_dsa::BF16>()
                                  .Arg<jax_dsa::F32>()
                                  .Arg<jax_dsa::S16>()
                                  .Arg<jax_dsa::BF16>()
                                  .Arg<jax_dsa::F32>()
                                  .Ret<jax_dsa::BF16>()
                                  .Ret<jax_dsa::BF16>()
                                  .Ret<jax_dsa::BF16>()
                                  .Ret<jax_dsa::U8>()
                                  .Ret<jax_dsa::U8>()
                                  .Ret<jax_dsa::U8>()
                                  .Ret<jax_dsa::U8>()
                                  .Attr<int64_t>("compression")
                                  .Attr<int64_t>("top_k")
                                  .Attr<float>("scale")
                                  .Attr<double>("rope_base"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
