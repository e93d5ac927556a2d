// The Python module jax_dsa._cuda: the handlers to register with XLA, the FFI version that they
// were compiled against, the kernels' limits, and the sizes of workspaces.
//
// Sizes are asked for while a program is traced, perhaps on a machine without a GPU, so they hold
// for every device. These functions take keyword arguments only: a size that is wrong because two
// integers were swapped would show only on a GPU.

#include <cuda_runtime_api.h>
#include <nanobind/nanobind.h>

#include <algorithm>
#include <string>

#include "common/limits.h"
#include "common/tier.h"
#include "ffi/handler.h"
#include "ffi/limits.h"
#include "gated_pool/gated_pool.h"
#include "htree/htree.h"
#include "losses/losses.h"
#include "masked_attention/masked_attention.h"
#include "mqa_decode/mqa_decode.h"
#include "sparse_attention/sparse_attention.h"
#include "sparse_mla/sparse_mla.h"
#include "sparse_mla/sparse_mla_decode.h"
#include "topk/topk.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

// Target name -> handler, sorted by name.
nb::dict targets() {
  std::vector<jax_dsa::Target> sorted = jax_dsa::registered_targets();
  std::sort(sorted.begin(), sorted.end(),
            [](const auto& a, const auto& b) { return a.name < b.name; });
  nb::dict out;
  for (const auto& [name, handler, portable_since] : sorted) {
    const nb::str key(name.data(), name.size());
    if (out.contains(key)) {
      throw nb::value_error(("two handlers have the target " + std::string(name)).c_str());
    }
    out[key] = nb::capsule(reinterpret_cast<void*>(handler));
  }
  return out;
}

// Returns the tiers that this build contains.
nb::tuple tiers() {
  nb::list out;
  if (jax_dsa::kHasHopperTier) out.append("hopper");
  if (jax_dsa::kHasPortableTier) out.append("portable");
  return nb::tuple(out);
}

// Target name -> (major, minor), the least compute capability of its portable kernels. A target
// without portable kernels is missing.
nb::dict portable_since() {
  nb::dict out;
  for (const auto& [name, handler, since] : jax_dsa::registered_targets()) {
    if (since == jax_dsa::kHopperOnly) continue;
    out[nb::str(name.data(), name.size())] = nb::make_tuple(since / 10, since % 10);
  }
  return out;
}

template <size_t kCount>
nb::tuple values(const int64_t (&list)[kCount]) {
  nb::list out;
  for (const int64_t x : list) out.append(x);
  return nb::tuple(out);
}

// Operator -> name -> limit. The names are those of the constants in jax_dsa/ops/*/cuda.py.
nb::dict limits() {
  namespace l = jax_dsa::limits;
  nb::dict out;
  const auto add = [&](const char* op, const char* name, const auto& limit) {
    if (!out.contains(op)) out[op] = nb::dict();
    nb::cast<nb::dict>(out[op])[name] = limit;
  };
  add("attn_dist", "DIMS", values(l::attn_dist::kDims));
  add("block_mask", "MAX_LENGTH", l::block_mask::kMaxLength);
  add("block_mask", "MAX_TILES", l::block_mask::kMaxTiles);
  add("fp8_matmul", "MAX_SIZE", l::fp8_matmul::kMaxSize);
  add("fp8_matmul", "ROW_BYTES", l::fp8_matmul::kRowBytes);
  add("gated_pool", "DIM_MULTIPLE", l::gated_pool::kDimMultiple);
  add("gated_pool", "MAX_DIM", l::gated_pool::kMaxDim);
  add("gated_pool", "MAX_POOLED", l::gated_pool::kMaxPooled);
  add("gated_pool", "MAX_TOKENS", l::gated_pool::kMaxTokens);
  add("htree", "COMPRESSIONS", values(l::htree::kCompressions));
  add("htree", "DIMS", values(l::htree::kDims));
  add("htree", "MAX_BWD_GROUP_HEADS", l::htree::kMaxBwdGroupHeads);
  add("htree", "MAX_DECODE_GROUP_HEADS", l::htree::kMaxDecodeGroupHeads);
  add("htree", "MAX_GROUP_HEADS", l::htree::kMaxGroupHeads);
  add("htree", "MAX_TOP_K", l::htree::kMaxTopK);
  add("indexer", "CHANNELS", values(l::indexer::kChannels));
  add("indexer", "MAX_BLOCKS", l::indexer::kMaxBlocks);
  add("indexer", "MAX_CANDIDATE_BLOCKS", l::indexer::kMaxCandidateBlocks);
  add("indexer", "MAX_HEADS", l::indexer::kMaxHeads);
  add("indexer", "MAX_KEYS", l::indexer::kMaxKeys);
  add("indexer", "MAX_LISTS", l::indexer::kMaxLists);
  add("indexer", "MAX_SLOTS", l::indexer::kMaxSlots);
  add("indexer", "PAGE_MULTIPLE", l::indexer::kPageMultiple);
  add("losses", "CHANNELS", values(l::losses::kChannels));
  add("losses", "DIMS", values(l::losses::kDims));
  add("losses", "MAX_INDEX_HEADS", l::losses::kMaxIndexHeads);
  add("losses", "MAX_SLOTS", l::losses::kMaxSlots);
  add("masked_attention", "BLOCK_K_MULTIPLE", l::masked_attention::kBlockKMultiple);
  add("masked_attention", "DIM_MULTIPLE", l::masked_attention::kDimMultiple);
  add("masked_attention", "MAX_DIM", l::masked_attention::kMaxDim);
  add("masked_attention", "MAX_LENGTH", l::masked_attention::kMaxLength);
  add("mqa_decode", "DIMS", values(l::mqa_decode::kDims));
  add("mqa_decode", "LATENT_DIMS", values(l::mqa_decode::kLatentDims));
  add("mqa_decode", "MAX_ROWS", l::mqa_decode::kMaxRows);
  add("mqa_decode", "PLAN_FIELDS", l::mqa_decode::kPlanFields);
  add("mqa_decode", "PLAN_RANGES", int64_t{jax_dsa::kMqaDecodePlanRanges});
  add("mqa_decode", "VALUE_DIM", l::mqa_decode::kValueDim);
  add("quantize_fp8", "BLOCK", int64_t{jax_dsa::kQuantizeBlock});
  add("sparse_attention", "DECODE_DIMS", values(l::sparse_attention::kDecodeDims));
  add("sparse_attention", "DIM_MULTIPLE", l::sparse_attention::kDimMultiple);
  add("sparse_attention", "MAX_DECODE_KEYS", l::sparse_attention::kMaxDecodeKeys);
  add("sparse_attention", "MAX_DECODE_ROWS", l::sparse_attention::kMaxDecodeRows);
  add("sparse_attention", "MAX_DIM", l::sparse_attention::kMaxDim);
  add("sparse_attention", "MAX_GROUP_HEADS", l::sparse_attention::kMaxGroupHeads);
  add("sparse_attention", "MAX_LENGTH", l::sparse_attention::kMaxLength);
  add("sparse_attention", "MAX_SLOTS", l::sparse_attention::kMaxSlots);
  add("sparse_mla", "DIMS", values(l::sparse_mla::kDims));
  add("sparse_mla", "PAGE_RECORD_BYTES", l::sparse_mla::kPageRecordBytes);
  add("sparse_mla", "RECORD_BYTES", l::sparse_mla::kRecordBytes);
  add("sparse_mla", "TILE", l::sparse_mla::kTileSlots);
  add("sparse_mla", "VALUE_DIM", l::sparse_mla::kValueDim);
  add("topk", "MAX_BLOCKS", l::topk::kMaxBlocks);
  add("topk", "MAX_ROWS", l::topk::kMaxRows);
  add("topk", "MAX_SELECTED", l::topk::kMaxSelected);
  add("topk", "MAX_SIZE", l::topk::kMaxSize);
  return out;
}

// Returns the bytes of the workspaces of masked attention's forward and backward kernels.
// `bounded`: the queries have ranges, segments or a block mask. `segmented`: they have segments.
// The sizes of a bias are 0 if there is none.
nb::tuple masked_attention_workspaces(int64_t batch, int64_t queries, int64_t keys, int heads,
                                      int groups, int dim, int value_dim, bool bounded,
                                      bool segmented, int bias_batch, int bias_heads,
                                      int64_t bias_queries) {
  static const int32_t given = 0;  // the sizes depend on whether a pointer is null, not on its data
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

// Returns the bytes of the workspaces of sparse attention's forward and backward kernels.
// `causal`: the queries have positions. `packed`: they have starts.
nb::tuple sparse_attention_workspaces(int64_t batch, int64_t queries, int64_t keys, int heads,
                                      int groups, int dim, int value_dim, int slots, int block_size,
                                      int sink_blocks, int local_blocks, bool tail_block,
                                      bool causal, bool packed) {
  static const int32_t given = 0;  // the sizes depend on whether a pointer is null, not on its data
  const auto sized = [&](auto p) {
    p.batch = batch, p.queries = queries, p.keys = keys;
    p.heads = heads, p.groups = groups, p.dim = dim, p.value_dim = value_dim;
    p.lists.positions = causal ? &given : nullptr;
    p.lists.starts = packed ? &given : nullptr;
    p.lists.slots = slots, p.lists.block_size = block_size;
    p.lists.sink_blocks = sink_blocks, p.lists.local_blocks = local_blocks;
    p.lists.tail_block = tail_block;
    return p;
  };
  return nb::make_tuple(
      jax_dsa::sparse_attention_fwd_workspace_bytes(sized(jax_dsa::SparseAttentionFwdParams{})),
      jax_dsa::sparse_attention_bwd_workspace_bytes(sized(jax_dsa::SparseAttentionBwdParams{})));
}

// Returns the largest number of KV splits of sparse MLA decode, which sizes its workspace. On a
// device with fewer SMs the handler uses fewer, unless results must not depend on the number of
// requests.
int sparse_mla_decode_splits(int64_t items, int slots, bool batch_invariant) {
  return batch_invariant ? jax_dsa::sparse_mla_decode_invariant_splits(slots)
                         : jax_dsa::sparse_mla_decode_splits(items, slots, jax_dsa::kMaxSms);
}

// Returns the bytes of the counters, P and dS tiles, and order of sparse MLA's backward pass, for
// `queries_at_once` queries at a time.
nb::tuple sparse_mla_bwd_workspace(int64_t batch, int64_t queries, int64_t keys, int heads,
                                   int groups, int slots, int dim, int64_t queries_at_once,
                                   bool by_rows) {
  jax_dsa::SparseMlaBwdParams p = {};
  p.batch = batch, p.queries = queries, p.keys = keys;
  p.queries_at_once = queries_at_once;
  p.heads = heads, p.groups = groups, p.slots = slots, p.dim = dim, p.by_rows = by_rows;
  return nb::make_tuple(jax_dsa::sparse_mla_bwd_counter_bytes(p),
                        jax_dsa::sparse_mla_bwd_p_ds_bytes(p),
                        jax_dsa::sparse_mla_bwd_order_bytes(p));
}

// Returns the number of rows of mqa_decode's partial results, and of entries of its list of split
// work tiles.
nb::tuple mqa_decode_workspace(int64_t queries, int heads, int groups, int dim, bool records) {
  const jax_dsa::MqaDecodeWorkspace workspace =
      jax_dsa::mqa_decode_workspace(jax_dsa::mqa_decode_rows(queries, heads, groups, dim, records));
  return nb::make_tuple(workspace.rows, workspace.split_tiles);
}

// Returns the bytes of the tree, of the rotations, and of the workspaces of the build, of the
// attention and of its backward pass. The last two have space for all queries at a time, or for as
// many as fit into `budget` bytes, but for at least one.
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
  // The backward pass also keeps the gradients of the tree in float32. It gets half of the budget
  // for its queries: with fewer of them at a time, more of their records stay in the L2 cache.
  const int64_t tree = jax_dsa::htree_tree_bytes(build);
  return nb::make_tuple(tree, jax_dsa::htree_rotation_bytes(build),
                        jax_dsa::htree_build_workspace(build), within(attending, budget),
                        within(backward, 2 * tree + budget / 2));
}

// Returns the bytes of the workspace of htree_decode.
int64_t htree_decode_workspace(int64_t batch, int64_t capacity, int64_t queries, int64_t heads,
                               int64_t groups, int64_t dim, int64_t compression, int64_t top_k) {
  jax_dsa::HTreeDecodeParams params = {};
  jax_dsa::HTreeFwdParams& fwd = params.fwd;
  fwd.batch = batch, fwd.queries = queries, fwd.heads = heads, fwd.groups = groups;
  fwd.tokens = capacity, fwd.dim = dim, fwd.compression = compression, fwd.top_k = top_k;
  return jax_dsa::htree_decode_workspace(params);
}

// Returns (major, minor) of every GPU that this process sees, and an empty list without a driver.
// It asks the driver only, so that no JAX backend starts.
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
  cudaGetLastError();  // clears the error, which nobody else should see
  return out;
}

// Returns the CUDA version of the kernels, and the newest that the driver supports, as 13000 for
// 13.0. The latter is 0 without a driver.
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
  m.def("dense_loss_bytes", &jax_dsa::dense_loss_bytes, nb::kw_only(), "batch"_a, "queries"_a,
        "keys"_a, "channels"_a, "heads"_a);
  m.def("gated_pool_bwd_splits", &jax_dsa::gated_pool_bwd_splits, nb::kw_only(), "batch"_a,
        "tokens"_a, "ratio"_a, "halves"_a, "dim"_a);
  m.def("gated_pool_tiles", &jax_dsa::gated_pool_tiles, nb::kw_only(), "ratio"_a, "halves"_a,
        "dim"_a);
  m.def("htree_decode_shared_bytes", &jax_dsa::htree_decode_shared_bytes, nb::kw_only(),
        "group_heads"_a, "dim"_a, "compression"_a, "top_k"_a);
  m.def("htree_decode_workspace", &htree_decode_workspace, nb::kw_only(), "batch"_a, "capacity"_a,
        "queries"_a, "heads"_a, "groups"_a, "dim"_a, "compression"_a, "top_k"_a);
  m.def("htree_workspaces", &htree_workspaces, nb::kw_only(), "batch"_a, "tokens"_a, "queries"_a,
        "heads"_a, "groups"_a, "dim"_a, "compression"_a, "top_k"_a, "budget"_a);
  m.def("limits", &limits);
  m.def("masked_attention_workspaces", &masked_attention_workspaces, nb::kw_only(), "batch"_a,
        "queries"_a, "keys"_a, "heads"_a, "groups"_a, "dim"_a, "value_dim"_a, "bounded"_a,
        "segmented"_a, "bias_batch"_a, "bias_heads"_a, "bias_queries"_a);
  m.def("mqa_decode_workspace", &mqa_decode_workspace, nb::kw_only(), "queries"_a, "heads"_a,
        "groups"_a, "dim"_a, "records"_a);
  m.def("sparse_attention_workspaces", &sparse_attention_workspaces, nb::kw_only(), "batch"_a,
        "queries"_a, "keys"_a, "heads"_a, "groups"_a, "dim"_a, "value_dim"_a, "slots"_a,
        "block_size"_a, "sink_blocks"_a, "local_blocks"_a, "tail_block"_a, "causal"_a, "packed"_a);
  m.def("sparse_mla_bwd_workspace", &sparse_mla_bwd_workspace, nb::kw_only(), "batch"_a,
        "queries"_a, "keys"_a, "heads"_a, "groups"_a, "slots"_a, "dim"_a, "queries_at_once"_a,
        "by_rows"_a);
  m.def("sparse_mla_decode_splits", &sparse_mla_decode_splits, nb::kw_only(), "items"_a, "slots"_a,
        "batch_invariant"_a);
  m.def("force_portable_tier", [](bool forced) { jax_dsa::portable_tier_forced() = forced; });
  m.def("portable_since", &portable_since);
  m.def("targets", &targets);
  m.def("tiers", &tiers);
  m.def("topk_workspace_bytes", &jax_dsa::topk_workspace_bytes, nb::kw_only(), "rows"_a, "size"_a,
        "k"_a);
}
