// The Python module jax_dsa._cuda: what there is to register with XLA, and which FFI version it was
// compiled against.

#include <cuda_runtime_api.h>
#include <nanobind/nanobind.h>

#include <algorithm>

#include "common/limits.h"
#include "ffi/targets.h"
#include "gated_pool/gated_pool.h"
#include "htree/htree.h"
#include "losses/losses.h"
#include "masked_attention/masked_attention.h"
#include "mqa_decode/mqa_decode.h"
#include "sparse_mla/sparse_mla.h"
#include "sparse_mla/sparse_mla_decode.h"

namespace nb = nanobind;

namespace {

nb::capsule capsule(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

// Target name -> handler.
nb::dict targets() {
  nb::dict out;
  out["jax_dsa.attn_dist_fwd.v1"] = capsule(AttnDistFwd);
  out["jax_dsa.block_mask_classify.v1"] = capsule(BlockMaskClassify);
  out["jax_dsa.block_mask_compress.v1"] = capsule(BlockMaskCompress);
  out["jax_dsa.block_mask_pack.v1"] = capsule(BlockMaskPack);
  out["jax_dsa.dense_indexer_kl_loss_fwd.v1"] = capsule(DenseIndexerKlLossFwd);
  out["jax_dsa.dequantize_fp8.v1"] = capsule(DequantizeFp8);
  out["jax_dsa.fp8_matmul.v1"] = capsule(Fp8Matmul);
  out["jax_dsa.gated_pool_bwd.v1"] = capsule(GatedPoolBwd);
  out["jax_dsa.gated_pool_fwd.v1"] = capsule(GatedPoolFwd);
  out["jax_dsa.htree_bwd.v1"] = capsule(HTreeBwd);
  out["jax_dsa.htree_decode.v1"] = capsule(HTreeDecode);
  out["jax_dsa.htree_fwd.v1"] = capsule(HTreeFwd);
  out["jax_dsa.indexer_kl_loss_bwd.v2"] = capsule(IndexerKlLossBwd);
  out["jax_dsa.indexer_kl_loss_fwd.v2"] = capsule(IndexerKlLossFwd);
  out["jax_dsa.indexer_logits_fwd.v1"] = capsule(IndexerLogitsFwd);
  out["jax_dsa.indexer_topk_bwd.v1"] = capsule(IndexerTopkBwd);
  out["jax_dsa.indexer_topk_fwd.v1"] = capsule(IndexerTopkFwd);
  out["jax_dsa.masked_attention_bwd.v1"] = capsule(MaskedAttentionBwd);
  out["jax_dsa.masked_attention_fwd.v1"] = capsule(MaskedAttentionFwd);
  out["jax_dsa.mqa_decode.v1"] = capsule(MqaDecode);
  out["jax_dsa.quantize_fp8.v1"] = capsule(QuantizeFp8);
  out["jax_dsa.quantize_fp8_columns.v1"] = capsule(QuantizeFp8Columns);
  out["jax_dsa.quantize_fp8_tiles.v1"] = capsule(QuantizeFp8Tiles);
  out["jax_dsa.quantize_fp8_tiles_transpose.v1"] = capsule(QuantizeFp8TilesTranspose);
  out["jax_dsa.quantize_fp8_transpose.v1"] = capsule(QuantizeFp8Transpose);
  out["jax_dsa.sparse_mla_bwd.v2"] = capsule(SparseMlaBwd);
  out["jax_dsa.sparse_mla_decode.v2"] = capsule(SparseMlaDecode);
  out["jax_dsa.sparse_mla_fwd.v1"] = capsule(SparseMlaFwd);
  out["jax_dsa.topk_fwd.v1"] = capsule(TopkFwd);
  return out;
}

// Bytes of the workspace of masked attention's kernels: of the forward one, of the backward ones.
// `bounded`: queries have ranges, segments or rows of a map; `segmented`: they have segments. The
// numbers of a bias are 0 if there is none.
nb::tuple masked_attention_workspaces(int64_t batch, int64_t queries, int64_t keys, int heads,
                                      int groups, int dim, int value_dim, bool bounded,
                                      bool segmented, int bias_batch, int bias_heads,
                                      int64_t bias_queries) {
  static const int32_t given = 0;  // all that is asked of what may be absent is whether it is
  const bool biased = bias_heads > 0;
  const auto sized = [&](auto p) {
    p.batch = batch, p.queries = queries, p.keys = keys;
    p.heads = heads, p.groups = groups, p.dim = dim, p.value_dim = value_dim;
    p.mask.ends = bounded ? &given : nullptr;
    p.mask.q_segments = p.mask.kv_segments = segmented ? &given : nullptr;
    p.bias = {biased ? &given : nullptr, bias_queries, bias_batch, bias_heads};
    return p;
  };
  return nb::make_tuple(
      jax_dsa::masked_attention_fwd_workspace_bytes(sized(jax_dsa::MaskedAttentionFwdParams{})),
      jax_dsa::masked_attention_bwd_workspace_bytes(sized(jax_dsa::MaskedAttentionBwdParams{})));
}

// The most parts that decode may make, which sizes its workspace. Asked while tracing, maybe on a
// machine without a GPU; the handler makes fewer on a device with fewer SMs, unless
// results must not depend on how many requests there are.
int sparse_mla_decode_splits(int64_t items, int slots, bool batch_invariant) {
  return batch_invariant ? jax_dsa::sparse_mla_decode_invariant_splits(slots)
                         : jax_dsa::sparse_mla_decode_splits(items, slots, jax_dsa::kMaxSms);
}

// Bytes of the backward pass's counters, images and order, for `count` queries at a time.
nb::tuple sparse_mla_bwd_workspace(int64_t batch, int64_t queries, int64_t keys, int heads,
                                   int groups, int slots, int dim, int64_t count, bool by_rows) {
  jax_dsa::SparseMlaBwdParams p = {};
  p.batch = batch, p.queries = queries, p.keys = keys, p.count = count;
  p.heads = heads, p.groups = groups, p.slots = slots, p.dim = dim, p.by_rows = by_rows;
  return nb::make_tuple(jax_dsa::sparse_mla_bwd_counter_bytes(p),
                        jax_dsa::sparse_mla_bwd_image_bytes(p),
                        jax_dsa::sparse_mla_bwd_order_bytes(p));
}

// Rows of the partial results of mqa_decode, and entries of its list of split work tiles.
nb::tuple mqa_decode_workspace(int64_t queries, int heads, int groups, int dim, bool records) {
  const jax_dsa::MqaDecodeWorkspace room =
      jax_dsa::mqa_decode_workspace(jax_dsa::mqa_decode_rows(queries, heads, groups, dim, records));
  return nb::make_tuple(room.rows, room.split_tiles);
}

// Bytes of the tree, of rotations, and of the workspaces of the build, of the attention and of its
// backward: for all queries at a time, or as many as `budget` bytes have room for, at least one.
nb::tuple htree_workspaces(int64_t batch, int64_t tokens, int64_t queries, int64_t heads,
                           int64_t groups, int64_t dim, int64_t compression, int64_t top_k,
                           int64_t budget) {
  jax_dsa::HTreeBuildParams build = {};
  build.batch = batch, build.tokens = tokens, build.groups = groups, build.dim = dim;
  build.compression = compression, build.top_k = top_k;
  jax_dsa::HTreeBwdParams bwd = {};
  jax_dsa::HTreeFwdParams& fwd = bwd.fwd;
  fwd.batch = batch, fwd.queries = queries, fwd.heads = heads, fwd.groups = groups;
  fwd.tokens = tokens, fwd.dim = dim, fwd.compression = compression, fwd.top_k = top_k;
  const auto within = [&](auto bytes, int64_t most) {
    return std::max(std::min(bytes(batch * queries * groups), most), bytes(groups));
  };
  const auto attending = [&](int64_t rows) { return jax_dsa::htree_fwd_workspace(fwd, rows); };
  const auto backward = [&](int64_t rows) { return jax_dsa::htree_bwd_workspace(bwd, rows); };
  // The backward's has the tree's gradients in float32, and for fewer queries: so the L2 keeps more
  // of their records.
  const int64_t tree = jax_dsa::htree_tree_bytes(build);
  return nb::make_tuple(tree, jax_dsa::htree_rotation_bytes(build),
                        jax_dsa::htree_build_workspace(build), within(attending, budget),
                        within(backward, 2 * tree + budget / 2));
}

int64_t htree_decode_workspace(int64_t batch, int64_t capacity, int64_t queries, int64_t heads,
                               int64_t groups, int64_t dim, int64_t compression, int64_t top_k) {
  jax_dsa::HTreeDecodeParams params = {};
  jax_dsa::HTreeFwdParams& fwd = params.fwd;
  fwd.batch = batch, fwd.queries = queries, fwd.heads = heads, fwd.groups = groups;
  fwd.tokens = capacity, fwd.dim = dim, fwd.compression = compression, fwd.top_k = top_k;
  return jax_dsa::htree_decode_workspace(params);
}

// (major, minor) of every GPU that this process sees, none without a driver: asked of the driver
// alone, so that no JAX backend starts.
nb::list compute_capabilities() {
  nb::list out;
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
  for (int device = 0; device < count; ++device) {
    int major = 0, minor = 0;
    const cudaError_t failed[] = {
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device),
    };
    if (failed[0] == cudaSuccess && failed[1] == cudaSuccess) {
      out.append(nb::make_tuple(major, minor));
    }
  }
  cudaGetLastError();  // what failed here is nobody else's error
  return out;
}

// CUDA's version that the kernels are of, and the newest that the driver takes, as 13000 for 13.0;
// 0 without a driver.
nb::tuple cuda_versions() {
  int driver = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess) driver = 0;
  cudaGetLastError();
  return nb::make_tuple(CUDART_VERSION, driver);
}

}  // namespace

NB_MODULE(_cuda, m) {
  m.attr("FFI_API_VERSION") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.def("compute_capabilities", &compute_capabilities);
  m.def("cuda_versions", &cuda_versions);
  m.def("dense_loss_bytes", &jax_dsa::dense_loss_bytes);
  m.def("gated_pool_parts", &jax_dsa::gated_pool_parts);
  m.def("gated_pool_tiles", &jax_dsa::gated_pool_tiles);
  m.def("htree_decode_workspace", &htree_decode_workspace);
  m.def("htree_workspaces", &htree_workspaces);
  m.def("masked_attention_workspaces", &masked_attention_workspaces);
  m.def("mqa_decode_workspace", &mqa_decode_workspace);
  m.def("sparse_mla_bwd_workspace", &sparse_mla_bwd_workspace);
  m.def("sparse_mla_decode_splits", &sparse_mla_decode_splits);
  m.def("targets", &targets);
}
