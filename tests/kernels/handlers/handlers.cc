// Calls the FFI handlers on a CPU, with launchers that only record their parameters: which shapes
// do handlers refuse, with what message, and what do they pass on? Every handler is in this
// translation unit, because handlers are local to their files.
//
// Prints the targets, and then "all good" or what is wrong.

#include <cuda_runtime_api.h>

#include <cstdio>
#include <string>
#include <vector>

#include "ffi/attn_dist.cc"
#include "ffi/block_mask.cc"
#include "ffi/common.cc"
#include "ffi/fp8.cc"
#include "ffi/fp8_matmul.cc"
#include "ffi/gated_pool.cc"
#include "ffi/htree.cc"
#include "ffi/indexer.cc"
#include "ffi/losses.cc"
#include "ffi/masked_attention.cc"
#include "ffi/masked_attention_bwd.cc"
#include "ffi/mqa_decode.cc"
#include "ffi/sparse_attention.cc"
#include "ffi/sparse_attention_decode.cc"
#include "ffi/sparse_mla.cc"
#include "ffi/sparse_mla_bwd.cc"
#include "ffi/sparse_mla_decode.cc"
#include "ffi/topk.cc"

// The functions of CUDA's runtime that handlers call, for a machine without it.
const char* cudaGetErrorString(cudaError_t) { return "an error"; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
int compute_capability = 90;
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor   ? compute_capability / 10
           : attribute == cudaDevAttrComputeCapabilityMinor ? compute_capability % 10
                                                            : 132;
  return cudaSuccess;
}

namespace jax_dsa {

// The parameters of the last launch.
template <typename Params>
Params launched = {};

constexpr int64_t kWorkspaceBytes = 64;

#define RECORD(launcher, Params)                             \
  cudaError_t launcher(const Params& params, cudaStream_t) { \
    launched<Params> = params;                               \
    return cudaSuccess;                                      \
  }

RECORD(launch_attn_dist_fwd, AttnDistFwdParams)
RECORD(launch_block_topk, BlockTopkParams)
RECORD(launch_dense_loss, DenseLossParams)
RECORD(launch_dequantize, DequantizeParams)
RECORD(launch_fp8_matmul, Fp8MatmulParams)
RECORD(launch_gated_pool_bwd, GatedPoolBwdParams)
RECORD(launch_gated_pool_fwd, GatedPoolFwdParams)
RECORD(launch_htree_build, HTreeBuildParams)
RECORD(launch_htree_bwd, HTreeBwdParams)
RECORD(launch_htree_decode, HTreeDecodeParams)
RECORD(launch_htree_fwd, HTreeFwdParams)
RECORD(launch_indexer_block_topk, IndexerBlockTopkParams)
RECORD(launch_indexer_bwd, IndexerBwdParams)
RECORD(launch_indexer_candidates, IndexerCandidatesParams)
RECORD(launch_indexer_fwd, IndexerFwdParams)
RECORD(launch_indexer_selected, IndexerSelectedParams)
RECORD(launch_indexer_topk, IndexerTopkParams)
RECORD(launch_kl_rows, KlRowsParams)
RECORD(launch_mean_pool_bwd, MeanPoolParams)
RECORD(launch_mean_pool_fwd, MeanPoolParams)
RECORD(launch_masked_attention_bwd, MaskedAttentionBwdParams)
RECORD(launch_masked_attention_fwd, MaskedAttentionFwdParams)
RECORD(launch_mqa_decode, MqaDecodeParams)
RECORD(launch_quantize, QuantizeParams)
RECORD(launch_quantize_columns, QuantizeColumnsParams)
RECORD(launch_quantize_tiles, QuantizeTilesParams)
RECORD(launch_quantize_transpose, QuantizeTransposeParams)
RECORD(launch_scale_rows, ScaleRowsParams)
RECORD(launch_sparse_attention_bwd, SparseAttentionBwdParams)
RECORD(launch_sparse_attention_decode, SparseAttentionDecodeParams)
RECORD(launch_sparse_attention_fwd, SparseAttentionFwdParams)
RECORD(launch_sparse_mla_bwd, SparseMlaBwdParams)
RECORD(launch_sparse_mla_decode, SparseMlaDecodeParams)
RECORD(launch_sparse_mla_fwd, SparseMlaFwdParams)
RECORD(launch_topk, TopkParams)

cudaError_t launch_mqa_decode_plan(const MqaDecodeParams& params, MqaDecodeRange*, cudaStream_t) {
  launched<MqaDecodeParams> = params;
  return cudaSuccess;
}
cudaError_t launch_block_mask_classify(const BlockMaskParams& params, bool*, bool*, cudaStream_t) {
  launched<BlockMaskParams> = params;
  return cudaSuccess;
}
cudaError_t launch_block_mask_compress(const BlockMaskParams& params, int32_t*, uint8_t*,
                                       cudaStream_t) {
  launched<BlockMaskParams> = params;
  return cudaSuccess;
}
cudaError_t launch_block_mask_pack(const BlockMaskParams& params, const int32_t*, uint8_t*, int64_t,
                                   cudaStream_t) {
  launched<BlockMaskParams> = params;
  return cudaSuccess;
}

int gated_pool_tiles(int, int, int) { return 1; }
int64_t htree_bwd_workspace(const HTreeBwdParams&, int64_t) { return kWorkspaceBytes; }
int64_t htree_decode_workspace(const HTreeDecodeParams&) { return kWorkspaceBytes; }
int64_t htree_fwd_workspace(const HTreeFwdParams&, int64_t) { return kWorkspaceBytes; }
int64_t masked_attention_bwd_workspace_bytes(const MaskedAttentionBwdParams&) {
  return kWorkspaceBytes;
}
int64_t masked_attention_fwd_workspace_bytes(const MaskedAttentionFwdParams&) {
  return kWorkspaceBytes;
}
int64_t sparse_attention_bwd_workspace_bytes(const SparseAttentionBwdParams&) {
  return kWorkspaceBytes;
}
int64_t sparse_attention_fwd_workspace_bytes(const SparseAttentionFwdParams&) {
  return kWorkspaceBytes;
}
int64_t sparse_mla_bwd_counter_bytes(const SparseMlaBwdParams&) { return kWorkspaceBytes; }
int64_t sparse_mla_bwd_p_ds_bytes(const SparseMlaBwdParams&) { return kWorkspaceBytes; }
int64_t sparse_mla_bwd_order_bytes(const SparseMlaBwdParams&) { return kWorkspaceBytes; }

namespace {

// An operand or result. Its data is never read.
class Array {
 public:
  Array(DataType dtype, std::vector<int64_t> dims)
      : dims_(std::move(dims)),
        buffer_{sizeof(XLA_FFI_Buffer),
                nullptr,
                static_cast<XLA_FFI_DataType>(dtype),
                this,  // any address but null
                static_cast<int64_t>(dims_.size()),
                dims_.data()} {}
  Array() : Array(DataType::F32, {0}) {}  // an absent one
  Array(const Array& x) : Array(static_cast<DataType>(x.buffer_.dtype), x.dims_) {}
  Array& operator=(const Array& x) {
    dims_ = x.dims_;
    buffer_.dtype = x.buffer_.dtype, buffer_.rank = x.buffer_.rank, buffer_.dims = dims_.data();
    return *this;
  }

  operator AnyBuffer() const { return AnyBuffer(&buffer_); }
  template <DataType kDtype>
  operator ffi::Buffer<kDtype>() const {
    return ffi::Buffer<kDtype>(&buffer_);
  }
  template <typename Buffer>
  operator Result<Buffer>() const {
    return Result<Buffer>(static_cast<Buffer>(*this));
  }

 private:
  std::vector<int64_t> dims_;
  XLA_FFI_Buffer buffer_;
};

using Shape = std::vector<int64_t>;
Array bf16(Shape dims) { return {DataType::BF16, std::move(dims)}; }
Array f32(Shape dims) { return {DataType::F32, std::move(dims)}; }
Array s32(Shape dims) { return {DataType::S32, std::move(dims)}; }
Array u8(Shape dims) { return {DataType::U8, std::move(dims)}; }

const Array kAbsent;

int failures = 0;

void check_true(const char* what, bool holds) {
  if (!holds) ++failures, printf("%s: does not hold\n", what);
}

// Expects this message, or success if it is empty.
void expect(const char* what, const ffi::Error& error, const std::string& message = "") {
  const std::string got = error.success() ? "" : error.message();
  if (got != message) {
    ++failures;
    printf("%s:\n  got      \"%s\"\n  expected \"%s\"\n", what, got.c_str(), message.c_str());
  }
}

// A call of masked attention's two handlers.
struct Attention {
  int64_t batch = 2, queries = 5, keys = 256, heads = 12, groups = 4, dim = 64;
  Array starts, ends, q_segments, kv_segments, rows, tiles, bits, bias, sinks;
  int64_t workspace = kWorkspaceBytes;
  bool deterministic = false;

  Array q() const { return bf16({batch, queries, heads, dim}); }
  Array k() const { return bf16({batch, keys, groups, dim}); }
  Array row() const { return f32({batch, queries, heads}); }

  // A block mask with so many heads, of one tile row and a column for each 128 keys.
  void set_map(int64_t map_batch, int64_t map_heads, int64_t block_k = 128) {
    rows = s32({map_batch, queries});
    tiles = s32({map_batch, map_heads, 1, ceil_div(keys, block_k)});
    bits = u8({map_batch, map_heads, 3, 128, block_k / 8});
  }

  ffi::Error forward() const {
    return masked_attention_fwd(nullptr, q(), k(), k(), starts, ends, q_segments, kv_segments, rows,
                                tiles, bits, bias, sinks, q(), row(), row(), u8({workspace}), 1.f,
                                0.f);
  }
  ffi::Error backward() const {
    return masked_attention_bwd(nullptr, q(), k(), k(), starts, ends, q_segments, kv_segments, rows,
                                tiles, bits, bias, q(), row(), row(), q(), row(), q(), k(), k(),
                                bias, u8({workspace}), 1.f, 0.f, deterministic);
  }
  // Expects this message of both, after the operator's name.
  void expect_both(const char* what, const std::string& message = "") const {
    expect(what, forward(), message.empty() ? "" : "masked_attention_fwd: " + message);
    expect(what, backward(), message.empty() ? "" : "masked_attention_bwd: " + message);
  }
  const AttentionMask& mask_fwd() const { return launched<MaskedAttentionFwdParams>.mask; }
  const AttentionMask& mask_bwd() const { return launched<MaskedAttentionBwdParams>.mask; }
};

void test_ranges_of_masked_attention() {
  Attention x;
  x.expect_both("no masks");
  check_true("absent ranges are null", !x.mask_fwd().starts && !x.mask_bwd().ends);
  x.starts = x.ends = s32({2, 5});
  x.expect_both("ranges of each batch entry");
  check_true("their stride", x.mask_fwd().range_stride == 5 && x.mask_bwd().range_stride == 5);
  check_true("they are passed on", x.mask_fwd().starts && x.mask_bwd().ends);
  x.starts = x.ends = s32({1, 5});
  x.expect_both("ranges that the batch shares");
  check_true("their stride", x.mask_fwd().range_stride == 0 && x.mask_bwd().range_stride == 0);
  x.starts = s32({2, 5});
  x.expect_both("starts and ends of different batch sizes",
                "'ends' has shape (1, 5), expected (2, 5)");
  x.starts = x.ends = s32({3, 5});
  x.expect_both("ranges of another batch size",
                "the batch size of 'starts' and 'ends' is 3, expected 1 or 2");
  x.starts = Array(), x.ends = f32({2, 5});
  x.expect_both("ranges of another dtype", "'ends' has dtype float32, expected int32");
  x.ends = Array(), x.q_segments = s32({2, 5});
  x.expect_both("segments of the queries only",
                "'q_segments' and 'kv_segments' must be given together");
}

void test_block_masks_of_masked_attention() {
  Attention x;
  for (const int64_t heads : {1, 4, 12}) {
    x.set_map(2, heads);
    x.expect_both("a block mask of 1, G or N heads");
    check_true("its heads", x.mask_fwd().map_heads == heads && x.mask_bwd().map_heads == heads);
    check_true("its stride", x.mask_fwd().map_rows_stride == 5 && x.mask_fwd().map_batch == 2);
  }
  // The backward kernel would take 3 heads of 4 groups for one mask of each group.
  x.set_map(2, 3);
  x.expect_both("a block mask of 3 heads",
                "the number of heads of 'tiles' is 3, expected 1, 4 or 12");
  x.set_map(1, 4);
  x.expect_both("a block mask that the batch shares");
  check_true("its stride", x.mask_fwd().map_rows_stride == 0 && x.mask_bwd().map_batch == 1);
  x.set_map(2, 4, 64);
  x.expect_both("a block mask with blocks of 64 keys", "block_k is 64, expected a multiple of 128");
  x.set_map(2, 4), x.keys = 300;
  x.expect_both("a block mask with too few keys",
                "the block mask has 256 keys, expected at least S = 300");
}

void test_other_operands_of_masked_attention() {
  Attention x;
  x.bias = bf16({2, 3, 5, 256});
  x.expect_both("a bias of 3 heads", "the number of heads of 'bias' is 3, expected 1, 4 or 12");
  x.bias = bf16({2, 12, 5, 256}), x.deterministic = true;
  x.expect_both("a bias of each score");
  x.bias = bf16({1, 12, 5, 256});
  expect("a shared bias, deterministic", x.backward(),
         "masked_attention_bwd: the gradient of a bias that several scores share is summed in no "
         "fixed order, so deterministic must be false");
  x = {}, x.sinks = f32({2, 12});
  expect("sinks of each batch entry", x.forward());
  check_true("their stride", launched<MaskedAttentionFwdParams>.sinks_stride == 12);
  x.sinks = f32({2, 4});
  expect("sinks of 4 heads", x.forward(),
         "masked_attention_fwd: 'sinks' has shape (2, 4), expected (2, 12)");
  x = {}, x.dim = 264;
  x.expect_both("too many dimensions", "D is 264, expected 1 to 256");
  x.dim = 12;
  x.expect_both("12 dimensions", "D is 12, expected a multiple of 8");
  x = {}, x.groups = 5;
  x.expect_both("5 groups",
                "there are 12 heads and 5 groups, expected a number of heads that is a multiple of "
                "the number of groups");
  x = {}, x.workspace = 63;
  x.expect_both("a small workspace",
                "the workspace 'workspace' has 63 bytes, expected at least 64");
}

// A call of sparse attention's two handlers.
struct BlockLists {
  int64_t batch = 2, queries = 5, keys = 256, heads = 32, groups = 2, dim = 64, slots = 3;
  Array indices = s32({2, 5, 2, 3});
  Array topk_length, positions, starts, lengths, sinks;
  int block_size = 64, sink_blocks = 0, local_blocks = 0;
  bool tail_block = false;

  Array q() const { return bf16({batch, queries, heads, dim}); }
  Array k() const { return bf16({batch, keys, groups, dim}); }
  Array dk() const { return f32({batch, keys, groups, dim}); }
  Array row() const { return f32({batch, queries, heads}); }

  ffi::Error forward() const {
    return sparse_attention_fwd(nullptr, q(), k(), k(), indices, topk_length, positions, starts,
                                lengths, sinks, q(), row(), row(), u8({kWorkspaceBytes}), 1.f,
                                block_size, sink_blocks, local_blocks, tail_block);
  }
  ffi::Error backward() const {
    return sparse_attention_bwd(nullptr, q(), k(), k(), indices, topk_length, positions, starts,
                                lengths, q(), row(), row(), q(), row(), q(), dk(), dk(),
                                u8({kWorkspaceBytes}), 1.f, block_size, sink_blocks, local_blocks,
                                tail_block);
  }
  // Expects this message of both, after the operator's name.
  void expect_both(const char* what, const std::string& message = "") const {
    expect(what, forward(), message.empty() ? "" : "sparse_attention_fwd: " + message);
    expect(what, backward(), message.empty() ? "" : "sparse_attention_bwd: " + message);
  }
};

void test_sparse_attention() {
  BlockLists x;
  x.expect_both("lists only");
  const SparseAttentionLists& fwd = launched<SparseAttentionFwdParams>.lists;
  const SparseAttentionLists& bwd = launched<SparseAttentionBwdParams>.lists;
  check_true("absent operands are null", !fwd.positions && !fwd.starts && !bwd.lengths);
  check_true("the lists", fwd.indices && bwd.slots == 3 && bwd.block_size == 64);
  x.topk_length = x.positions = x.starts = x.lengths = s32({2, 5});
  x.sink_blocks = 1, x.local_blocks = 2, x.tail_block = true;
  x.expect_both("forced blocks");
  check_true("the operands", fwd.topk_length && fwd.positions && bwd.starts && bwd.lengths);
  check_true("forced blocks", fwd.sink_blocks == 1 && bwd.local_blocks == 2 && bwd.tail_block);
  x.local_blocks = 50000;
  x.expect_both("more local blocks than there are");
  x.local_blocks = -1;
  x.expect_both("a negative number", "local_blocks is -1, expected 0 to 2147483647");
  x = {}, x.sink_blocks = 1;
  x.expect_both("forced blocks without positions", "forced blocks need 'positions'");
  x = {}, x.positions = s32({2, 4});
  x.expect_both("too few positions", "'positions' has shape (2, 4), expected (2, 5)");
  x = {}, x.indices = s32({2, 5, 1, 3});
  x.expect_both("one list for all groups",
                "'indices' has shape (2, 5, 1, 3), expected (2, 5, 2, 3)");
  x = {}, x.block_size = 8;
  x.expect_both("blocks of 8", "block_size is 8, expected 1, 4, 16, 32, 64 or 128");
  x = {}, x.heads = 66;
  x.expect_both("33 heads in a group", "N / G is 33, expected 0 to 32");
  x = {}, x.indices = s32({2, 5, 2, 16384}), x.positions = s32({2, 5}), x.tail_block = true;
  x.expect_both("too many slots",
                "the number of slots, including forced blocks, is 16385, expected 0 to 16384");
  x = {}, x.dim = 264;
  x.expect_both("too many dimensions", "D is 264, expected 1 to 256");
  x = {}, x.sinks = f32({2, 32});
  expect("sinks of each batch entry", x.forward());
  check_true("their stride", launched<SparseAttentionFwdParams>.sinks_stride == 32);
}

// A call of sparse attention over caches.
struct CachedBlockLists {
  Array k = bf16({2, 96, 2, 64}), v = k;
  Array blocks = s32({2, 3, 2, 5});
  Array page_table, k_scale, v_scale;
  int block_size = 16, page_size = 1;
  int64_t dim = 64;

  ffi::Error operator()() const {
    return sparse_attention_decode(nullptr, bf16({2, 3, 8, dim}), k, v, blocks, s32({2, 3}),
                                   f32({1, 8}), page_table, k_scale, v_scale, bf16({2, 3, 8, dim}),
                                   f32({2, 3, 8}), f32({2, 3, 8}), 1.f, block_size, page_size,
                                   true);
  }
};

void test_sparse_attention_decode() {
  const auto fails = [](const char* what, const CachedBlockLists& x, const std::string& message) {
    expect(what, x(), "sparse_attention_decode: " + message);
  };
  const SparseAttentionDecodeParams& p = launched<SparseAttentionDecodeParams>;
  const Array codes(DataType::F8E4M3FN, {1, 96, 2, 64});
  CachedBlockLists x;
  expect("flat caches", x());
  check_true("their rows", p.batch_rows == 96 && p.keys == 96 && !p.fp8 && !p.page_table);
  check_true("the lists", p.slots == 5 && p.block_size == 16 && p.batch_invariant);
  check_true("sinks that the batch shares", p.sinks && p.sinks_stride == 0);
  x.k = x.v = codes, x.k_scale = f32({1, 96, 2}), x.page_table = s32({2, 7}), x.page_size = 12;
  expect("pages of FP8", x());
  check_true("their rows", p.batch_rows == 0 && p.keys == 84 && p.pages == 8 && p.fp8);
  check_true("factors of the keys", p.k_scale && !p.v_scale);
  x.page_size = 10;
  fails("pages of 10", x, "'k' has 96 rows, expected a multiple of page_size = 10 up to 2^31 - 1");
  x = {}, x.v_scale = f32({2, 96, 2});
  fails("factors of bfloat16", x, "'k_scale' and 'v_scale' are for FP8 caches only");
  x = {}, x.k = x.v = codes, x.v_scale = f32({1, 96, 1});
  fails("factors of one head", x, "'v_scale' has shape (1, 96, 1), expected (1, 96, 2)");
  x = {}, x.v = codes;
  fails("values in FP8 alone", x, "'v' has dtype float8_e4m3fn, expected bfloat16");
  x = {}, x.v = bf16({2, 95, 2, 64});
  fails("fewer values than keys", x, "'v' has shape (2, 95, 2, 64), expected (2, 96, 2, 64)");
  x = {}, x.blocks = s32({2, 3, 1, 5});
  fails("one list for all groups", x, "'blocks' has shape (2, 3, 1, 5), expected (2, 3, 2, 5)");
  x = {}, x.block_size = 2;
  fails("blocks of 2", x, "block_size is 2, expected 1, 4, 16, 32, 64 or 128");
  x = {}, x.block_size = 128, x.blocks = s32({2, 3, 2, 1 << 24});
  fails("too many keys in a list", x, "K is 16777216, expected 0 to 16777213");
  x = {}, x.dim = 96, x.k = x.v = bf16({2, 96, 2, 96});
  fails("96 dimensions", x, "D is 96, expected 64, 128 or 256");
}

void test_block_mask() {
  const auto compress = [](Array mask, int64_t map_heads, Array ranges = kAbsent) {
    const Array rows = s32({1, 130}), tiles = s32({1, map_heads, 2, 2});
    const Array bits = u8({1, map_heads, 3, 128, 16});
    return block_mask_compress(nullptr, mask, ranges, ranges, kAbsent, kAbsent, rows, tiles, bits,
                               s32({2, 12, 2, 2}), u8({2, 12, 4, 128, 16}), 130, 256);
  };
  // Unlike masked attention, making a block mask takes another one with any divisor of the heads.
  for (const int64_t heads : {1, 3, 4, 12}) {
    expect("another block mask", compress(Array(DataType::PRED, {1, 6, 1, 256}), heads));
    const BlockMaskParams& p = launched<BlockMaskParams>;
    check_true("its heads", p.others.map_heads == heads && p.others.map_rows_stride == 0);
    check_true("the mask", p.mask_batch == 1 && p.mask_heads == 6 && p.mask_queries == 1);
  }
  expect("ranges of each batch entry", compress(kAbsent, 1, s32({2, 130})));
  check_true("their stride", launched<BlockMaskParams>.others.range_stride == 130);
  expect("ranges that the batch shares", compress(kAbsent, 1, s32({1, 130})));
  check_true("their stride", launched<BlockMaskParams>.others.range_stride == 0);
  expect("another block mask of 5 heads", compress(kAbsent, 5),
         "block_mask_compress: the number of heads of 'tiles' is 5, expected a divisor of 12");
  expect("a mask of 5 heads", compress(Array(DataType::PRED, {2, 5, 130, 256}), 1),
         "block_mask_compress: 'mask' has shape (2, 5, 130, 256), expected (B or 1, a divisor of "
         "H, T or 1, S) with (B, H, T, S) = (2, 12, 130, 256)");
}

void test_sparse_mla() {
  const auto forward = [](int64_t dim, Array sinks, float scale = 1.f) {
    return sparse_mla_fwd(nullptr, bf16({2, 3, 8, dim}), bf16({2, 9, 1, dim}), s32({2, 3, 1, 4}),
                          kAbsent, kAbsent, sinks, bf16({2, 3, 8, 512}), f32({2, 3, 8}),
                          f32({2, 3, 8}), scale);
  };
  const SparseMlaFwdParams& p = launched<SparseMlaFwdParams>;
  expect("no sinks", forward(576, kAbsent));
  check_true("no sinks", p.sinks == nullptr);
  expect("sinks of each batch entry", forward(576, f32({2, 8})));
  check_true("their stride", p.sinks && p.sinks_stride == 8);
  expect("sinks that the batch shares", forward(512, f32({1, 8})));
  check_true("their stride", p.sinks && p.sinks_stride == 0);
  expect("128 dimensions", forward(128, kAbsent), "sparse_mla_fwd: D is 128, expected 576 or 512");
  expect("a negative scale", forward(576, kAbsent, -1.f),
         "sparse_mla_fwd: scale is -1.000000, expected a positive number");

  const auto decode = [](Array kv, Array page_table, int page_size, int64_t dim = 576,
                         Array extra_kv = kAbsent, Array extra_table = kAbsent) {
    const bool extra = present(AnyBuffer(extra_kv));
    return sparse_mla_decode(nullptr, bf16({2, 3, 8, dim}), kv, s32({2, 3, 1, 4}), kAbsent, kAbsent,
                             kAbsent, page_table, extra_kv, extra ? s32({2, 3, 1, 9}) : kAbsent,
                             extra ? s32({2, 3}) : kAbsent, kAbsent, extra_table,
                             bf16({2, 3, 8, 512}), f32({2, 3, 8}), f32({2, 3, 8}), kAbsent, kAbsent,
                             1.f, page_size, 8, 1, false);
  };
  const SparseMlaDecodeParams& d = launched<SparseMlaDecodeParams>;
  expect("keys of each request", decode(bf16({2, 9, 1, 576}), kAbsent, 1));
  check_true("their stride", d.batch_rows == 9 && d.keys == 9 && !d.records && d.splits == 1);
  expect("shared records in pages", decode(u8({1, 64, 1, 656}), s32({2, 3}), 16));
  check_true("their pages",
             d.batch_rows == 0 && d.keys == 48 && d.pages == 4 && d.records && d.page_slots == 3);
  expect("pages of 15", decode(u8({1, 64, 1, 656}), s32({2, 3}), 15),
         "sparse_mla_decode: 'kv' has 64 rows, expected a multiple of page_size = 15 up to 2^31 - "
         "1");
  expect("page records", decode(u8({2, 64, 1, 584}), s32({2, 3}), 16, 512));
  check_true("their pages", d.batch_rows == 64 && d.pages == 4 && d.records && d.extra.slots == 0);
  expect("page records without pages", decode(u8({2, 64, 1, 584}), kAbsent, 1, 512),
         "sparse_mla_decode: a page has 0 records of 584 bytes, expected an even number");
  expect("odd pages", decode(u8({2, 64, 1, 584}), s32({2, 3}), 1, 512),
         "sparse_mla_decode: a page has 1 records of 584 bytes, expected an even number");
  expect("two caches",
         decode(bf16({2, 9, 1, 576}), kAbsent, 1, 576, bf16({1, 64, 1, 576}), s32({2, 5})));
  check_true("the first one", d.batch_rows == 9 && d.keys == 9 && d.slots == 4);
  check_true("the second one", d.extra.batch_rows == 0 && d.extra.keys == 40 &&
                                   d.extra.slots == 9 && d.extra.pages == 8 && d.extra.ends &&
                                   !d.extra.topk_length && d.extra.page_slots == 5);
  expect("keys and records",
         decode(bf16({2, 9, 1, 576}), kAbsent, 1, 576, u8({1, 64, 1, 656}), s32({2, 5})),
         "sparse_mla_decode, second cache: 'kv' has another dtype or G than that of the first "
         "cache");
}

void test_attn_dist() {
  const auto forward = [](Array sinks, int64_t dim = 576) {
    return attn_dist_fwd(nullptr, bf16({2, 3, 8, dim}), bf16({2, 9, 1, dim}), s32({2, 3, 1, 4}),
                         f32({2, 3, 8}), kAbsent, kAbsent, sinks, kAbsent, f32({2, 3, 4}), 1.f);
  };
  expect("no sinks", forward(kAbsent));
  check_true("no sinks", launched<AttnDistFwdParams>.sinks == nullptr);
  expect("sinks of each batch entry", forward(f32({2, 8})));
  check_true("their stride", launched<AttnDistFwdParams>.sinks_stride == 8);
  expect("sinks that the batch shares", forward(f32({1, 8})));
  check_true("their stride", launched<AttnDistFwdParams>.sinks_stride == 0);
  expect("small dims", forward(kAbsent, 192));
  check_true("their size", launched<AttnDistFwdParams>.dim == 192);
  expect("other dims", forward(kAbsent, 96),
         "attn_dist_fwd: D is 96, expected 576, 512, 256, 192, 128 or 64");
}

void test_mqa_decode() {
  const auto decode = [](Array k, Array v, int64_t dim, DataType type, Array table = kAbsent,
                         Array plan = kAbsent) {
    const int64_t value_dim = present(AnyBuffer(v)) ? dim : 512;
    const MqaDecodeWorkspace w = mqa_decode_workspace(mqa_decode_rows(1, 8, 1, dim, false));
    return mqa_decode(nullptr, bf16({2, 1, 8, dim}), k, v, s32({2, 1}), s32({2, 1}), kAbsent, table,
                      plan, Array(type, {2, 1, 8, value_dim}), f32({2, 1, 8}), f32({2, 1, 8}),
                      f32({w.rows, value_dim}), f32({w.rows, 2}), s32({w.split_tiles, 2}), 1.f, 1,
                      true);
  };
  expect("latent keys", decode(bf16({2, 9, 1, 576}), kAbsent, 576, DataType::BF16));
  check_true("their stride", launched<MqaDecodeParams>.batch_rows == 9);
  check_true("their output", !launched<MqaDecodeParams>.out_float);
  expect("shared keys", decode(bf16({1, 9, 1, 64}), bf16({1, 9, 1, 64}), 64, DataType::F32));
  check_true("their stride", launched<MqaDecodeParams>.batch_rows == 0);
  check_true("their output", launched<MqaDecodeParams>.out_float);
  const Array rows = bf16({1, 9, 2, 64});
  expect("pages", decode(rows, rows, 64, DataType::BF16, s32({2, 5})));
  check_true("their number", launched<MqaDecodeParams>.pages == 9);
  expect("page tables of other requests", decode(rows, rows, 64, DataType::BF16, s32({1, 5})),
         "mqa_decode: 'page_table' has shape (1, 5), expected (2, 5)");
  expect("96 dimensions", decode(bf16({1, 9, 1, 96}), bf16({1, 9, 1, 96}), 96, DataType::BF16),
         "mqa_decode: D of keys with values is 96, expected 64, 128 or 256");
  expect("integers", decode(bf16({2, 9, 1, 576}), kAbsent, 576, DataType::S32),
         "mqa_decode: 'out' has dtype int32, expected bfloat16 or float32");
  const auto planned = [&](Array plan) {
    return decode(bf16({2, 9, 1, 576}), kAbsent, 576, DataType::BF16, kAbsent, plan);
  };
  expect("a plan", planned(s32({1, 264, 8})));
  check_true("its ranges", launched<MqaDecodeParams>.plan != nullptr);
  expect("plans of several calls", planned(s32({2, 264, 8})),
         "mqa_decode: 'plan' has shape (2, 264, 8), expected (1, 264, 8)");
  const auto plan = [](int64_t queries, int64_t heads, int64_t groups) {
    return mqa_decode_plan(nullptr, s32({2, 3, queries}), s32({2, 3, 4}), s32({2, 264, 8}), heads,
                           groups, 576, false);
  };
  expect("two plans", plan(4, 16, 2));
  check_true("their calls", launched<MqaDecodeParams>.batch == 3);
  expect("other queries", plan(5, 16, 2),
         "mqa_decode_plan: 'ends' has shape (2, 3, 4), expected (2, 3, 5)");
  expect("heads of a part of a group", plan(4, 16, 3),
         "mqa_decode_plan: there are 16 heads and 3 groups, expected a number of heads that is a "
         "multiple of the number of groups");
}

void test_htree() {
  const auto forward = [](int64_t heads, int64_t compression, int64_t top_k, int64_t building) {
    const int64_t tokens = 300;
    const HTreeBuildParams build = {.batch = 1,
                                    .tokens = tokens,
                                    .groups = 1,
                                    .dim = 64,
                                    .compression = compression,
                                    .top_k = top_k};
    const bool valid = compression > 1 && top_k > 0;
    const int64_t layers = valid ? htree_layers(tokens, compression, top_k).count : 1;
    const Array q = bf16({1, 3, heads, 64}), k = bf16({1, tokens, 1, 64});
    return htree_fwd(nullptr, q, k, k, s32({1, 3}), q, f32({1, 3, heads}), f32({1, 3, heads}),
                     Array(DataType::S16, {1, 3, 1, layers - 1, top_k}),
                     u8({valid ? htree_tree_bytes(build) : 0}),
                     u8({valid ? htree_rotation_bytes(build) : 0}), u8({building}), u8({64}),
                     compression, top_k, 1.f, 10000.);
  };
  launched<HTreeBuildParams> = {};
  expect("193 heads", forward(193, 8, 4, 1 << 20),
         "htree_fwd: the number of heads of a group is 193, expected 0 to 192");
  expect("compression 4", forward(16, 4, 4, 1 << 20),
         "htree_fwd: compression is 4, expected 8, 16 or 32");
  expect("top_k 0", forward(16, 8, 0, 1 << 20), "htree_fwd: top_k is 0, expected 1 to 1024");
  check_true("nothing is built after an error", launched<HTreeBuildParams>.tokens == 0);
  expect("a tree", forward(16, 8, 4, 1 << 20));
  check_true("it is built", launched<HTreeBuildParams>.tokens == 300);
  expect("a small workspace", forward(16, 8, 4, 0),
         "htree_fwd: the workspace 'building' has 0 bytes, expected at least 1280");
}

void test_indexer_candidates() {
  const auto select = [](int64_t keys, Array page_table, Array candidates, int64_t block_size,
                         int64_t k, int64_t words) {
    const Array q = bf16({2, 3, 40, 128}),
                pool = bf16({present(AnyBuffer(page_table)) ? 1 : 2, keys, 128});
    return indexer_candidates_fwd(nullptr, q, pool, f32({2, 3, 40}), kAbsent, s32({2, 3}),
                                  s32({2, 3}), page_table, candidates, s32({2, 3, k}),
                                  f32({2, 3, k}), f32({words}), true, 64, block_size);
  };
  const IndexerCandidatesParams& p = launched<IndexerCandidatesParams>;
  expect("blocks of 8", select(500, kAbsent, s32({2, 3, 10}), 8, 20, 91));
  check_true("the blocks", p.candidates && p.slots == 10 && p.block_size == 8 && p.capacity == 91);
  check_true("the keys", p.logits.keys == 500 && p.k == 20);
  expect("pages", select(256, s32({2, 3}), s32({2, 3, 10}), 8, 20, 91));
  check_true("their keys", p.logits.keys == 192 && p.logits.pages == 4 && p.logits.pools == 1);
  expect("a small workspace", select(500, kAbsent, s32({2, 3, 10}), 8, 20, 90),
         "indexer_candidates_fwd: the workspace 'workspace' has 360 bytes, expected at least 364");
  expect("candidates of one query", select(500, kAbsent, s32({2, 1, 10}), 8, 20, 91),
         "indexer_candidates_fwd: 'candidates' has shape (2, 1, 10), expected (2, 3, 10)");
  expect("blocks of no keys", select(500, kAbsent, s32({2, 3, 10}), 0, 20, 91),
         "indexer_candidates_fwd: block_size is 0, expected 1 to 2147483647");
  expect("many blocks", select(1 << 21, kAbsent, s32({2, 3, 10}), 1, 20, 91),
         "indexer_candidates_fwd: S / block_size is 2097152, expected 0 to 1048576");
  expect("many keys", select(9000, kAbsent, s32({2, 3, 1000}), 8, 5000, 1 << 20),
         "indexer_candidates_fwd: min(K, M * block_size) is 5000, expected 0 to 4096");
}

void test_indexer_selected() {
  const auto logits_of = [](Array k, Array weights, Array k_scale, Array indices, Array logits) {
    return indexer_selected_fwd(nullptr, bf16({2, 3, 40, 128}), k, weights, k_scale, indices,
                                logits, true);
  };
  const Array k = bf16({2, 500, 128}), weights = f32({2, 3, 40}), some = s32({2, 3, 70});
  const IndexerSelectedParams& p = launched<IndexerSelectedParams>;
  expect("selected keys", logits_of(k, weights, f32({2, 500}), some, f32({2, 3, 70})));
  check_true("their slots", p.indices && p.slots == 70 && p.logits.out && p.logits.relu);
  check_true("their keys", p.logits.keys == 500 && p.logits.heads == 40 && p.logits.k_scale);
  check_true("no ranges", !p.logits.starts && !p.logits.ends && !p.logits.page_table);
  expect("weights of one query", logits_of(k, f32({2, 1, 40}), kAbsent, some, f32({2, 3, 70})),
         "indexer_selected_fwd: 'weights' has shape (2, 1, 40), expected (2, 3, 40)");
  expect("selected keys of one query", logits_of(k, weights, kAbsent, s32({2, 1, 70}), f32({})),
         "indexer_selected_fwd: 'indices' has shape (2, 1, 70), expected (2, 3, 70)");
  expect("too few logits", logits_of(k, weights, kAbsent, some, f32({2, 3, 69})),
         "indexer_selected_fwd: 'logits' has shape (2, 3, 69), expected (2, 3, 70)");
}

void test_mean_pool() {
  const auto forward = [](Array values, Array starts, Array keys, int64_t ratio) {
    return mean_pool_fwd(nullptr, values, starts, keys, ratio);
  };
  const MeanPoolParams& p = launched<MeanPoolParams>;
  expect("pools of 4", forward(bf16({2, 43, 1, 12}), kAbsent, bf16({2, 10, 12}), 4));
  check_true("their sizes", p.batch == 2 && p.tokens == 43 && p.ratio == 4 && p.dim == 12);
  check_true("their factor", p.factor == 0.25f && !p.starts && p.dtype == DType::kBF16);
  expect("documents", forward(bf16({2, 43, 1, 12}), s32({2, 43}), bf16({2, 14, 12}), 3));
  check_true("their starts", p.starts && p.factor == 1.f / 3);
  expect("pools of 200", forward(bf16({2, 43, 1, 12}), kAbsent, bf16({2, 0, 12}), 200),
         "mean_pool_fwd: R is 200, expected 1 to 128");
  expect("two halves", forward(bf16({2, 43, 2, 12}), kAbsent, bf16({2, 10, 12}), 4),
         "mean_pool_fwd: H is 2, expected 1");
  expect("other keys", forward(bf16({2, 43, 1, 12}), kAbsent, bf16({2, 11, 12}), 4),
         "mean_pool_fwd: 'keys' has shape (2, 11, 12), expected (2, 10, 12)");
  expect("gradients of the keys",
         mean_pool_bwd(nullptr, kAbsent, f32({1, 2, 8}), f32({1, 9, 1, 8}), 4));
  check_true("their sizes", p.tokens == 9 && p.dim == 8 && p.dtype == DType::kF32);
  expect("gradients of another dtype",
         mean_pool_bwd(nullptr, kAbsent, bf16({1, 2, 8}), f32({1, 9, 1, 8}), 4),
         "mean_pool_bwd: 'dkeys' has dtype bfloat16, expected float32");
}

// A call of the indexer's selection of blocks: 2 requests of 3 queries, with 4 heads that select
// for themselves.
struct BlockTopk {
  int64_t groups = 4, heads = 1, keys = 600, block_size = 128, page_size = 0, top_k = 2;
  int64_t score_pairs = 4 * 5 * 3, floats = 0;
  Array weights, starts, page_table;

  ffi::Error forward() const {
    const int64_t batch = page_size ? 1 : 2;
    const Shape out = {2, 3, groups, top_k};
    return indexer_block_topk_fwd(nullptr, bf16({2, 3, groups, heads, 64}), bf16({batch, keys, 64}),
                                  weights, kAbsent, starts, s32({2, 3}), page_table, s32(out),
                                  f32(out), s32(out), f32({score_pairs, 2}), f32({floats}), false,
                                  page_size, block_size, 1, 2);
  }
  void expect_error(const char* what, const std::string& message) const {
    expect(what, forward(), "indexer_block_topk_fwd: " + message);
  }
};

void test_indexer_block_topk() {
  using Params = IndexerBlockTopkParams;
  const BlockTopk rows;
  expect("heads that select", rows.forward());
  check_true("heads that select", launched<Params>.capacity == 3 && launched<Params>.k == 2 &&
                                      launched<Params>.logits.heads == 4 &&
                                      launched<Params>.logits.weights == nullptr &&
                                      launched<Params>.logits.starts == nullptr);
  BlockTopk x = rows;
  x.heads = 2;
  x.expect_error("no weights", "J without weights is 2, expected 1");
  x = rows, x.score_pairs = 19;
  x.expect_error("few scores", "the workspace 'scores' has 152 bytes, expected at least 160");
  x = rows, x.block_size = 601;
  x.expect_error("a large block", "block_size is 601, expected 1 to 600");
  x = rows, x.keys = 20000, x.block_size = 1;
  x.expect_error("many blocks", "the number of blocks is 20000, expected 0 to 16384");

  BlockTopk pages = rows;
  pages.keys = 1024, pages.page_size = 64, pages.page_table = s32({2, 7});
  pages.score_pairs = 4 * 4;
  expect("pages", pages.forward());
  check_true("pages", launched<Params>.logits.pages == 16 && launched<Params>.logits.keys == 448 &&
                          launched<Params>.capacity == 1);
  pages.starts = s32({2, 3});
  pages.expect_error("pages and starts",
                     "'starts' is given, expected none with pages without weights");
  pages.starts = kAbsent, pages.block_size = 100;
  pages.expect_error("pages and odd blocks",
                     "block_size with pages is 100, expected a multiple of 64");

  BlockTopk together = rows;
  together.groups = 1, together.heads = 4, together.weights = f32({2, 3, 1, 4});
  together.score_pairs = 5 * 6, together.floats = 600 * 2;
  together.expect_error("no starts", "'starts' has shape (0,), expected (B, T)");
  together.starts = s32({2, 3});
  expect("heads together", together.forward());
  check_true("heads together",
             launched<Params>.capacity == 2 && launched<Params>.logits.weights != nullptr);
  together.floats = 599;
  together.expect_error("few logits",
                        "the workspace 'logits' has 2396 bytes, expected at least 2400");
  together.floats = 600, together.groups = 2;
  together.expect_error("two groups", "G with weights is 2, expected 1");
}

void test_topk() {
  const auto topk = [](Array x, int64_t size, int64_t k, Array values) {
    return topk_fwd(nullptr, x, s32({2, 3}), s32({2, 3}), s32({2, 3, k}), values, f32({0}));
  };
  expect("no values", topk(f32({2, 3, 50}), 50, 4, kAbsent));
  check_true("no values", launched<TopkParams>.values == nullptr && launched<TopkParams>.rows == 6);
  expect("values", topk(f32({2, 3, 50}), 50, 4, f32({2, 3, 4})));
  check_true("values", launched<TopkParams>.values != nullptr);
  expect("too many", topk(f32({2, 3, 5000}), 5000, 4097, kAbsent),
         "topk_fwd: min(K, S) is 4097, expected 0 to 4096");
  expect("a matrix", topk(f32({3, 50}), 50, 4, kAbsent),
         "topk_fwd: 'x' has shape (3, 50), expected (B, T, S)");
}

void test_block_topk() {
  const auto select = [](int64_t keys, Array starts, int64_t block_size, int64_t words) {
    return block_topk_fwd(nullptr, f32({2, 3, keys}), starts, s32({2, 3}), s32({2, 3, 4}),
                          f32({words}), block_size, 1, 2);
  };
  const BlockTopkParams& p = launched<BlockTopkParams>;
  expect("blocks of 8", select(100, kAbsent, 8, 60));
  check_true("their sizes", p.rows == 6 && p.keys == 100 && p.block_size == 8 && p.k == 4);
  check_true("two rows at a time", p.capacity == 2 && !p.starts && p.ends);
  check_true("forced blocks", p.sink_blocks == 1 && p.local_blocks == 2);
  expect("starts", select(100, s32({2, 3}), 8, 60));
  check_true("the starts", p.starts != nullptr);
  expect("no keys", select(0, kAbsent, 1, 2));
  expect("a small workspace", select(100, kAbsent, 8, 25),
         "block_topk_fwd: the workspace 'scores' has 100 bytes, expected at least 104");
  expect("starts of one row", select(100, s32({1, 3}), 8, 60),
         "block_topk_fwd: 'starts' has shape (1, 3), expected (2, 3)");
  expect("large blocks", select(100, kAbsent, 101, 60),
         "block_topk_fwd: block_size is 101, expected 1 to 100");
  expect("many blocks", select(16385, kAbsent, 1, 60),
         "block_topk_fwd: the number of blocks is 16385, expected 0 to 16384");
}

// Which GPUs a handler accepts, by the compute capability since which it has portable kernels.
void test_gpus() {
  const auto refused = [](int on, int since) {
    compute_capability = on;
    const ffi::Error error = check_gpu("jax_dsa.topk_fwd.v2", since);
    compute_capability = 90;
    return error.success() ? "" : error.message();
  };
  for (const int on : {80, 86, 89, 90, 100, 103, 120}) {
    check_true("a kernel for every GPU", refused(on, kEveryGpu).empty());
    check_true("a kernel for Hopper", refused(on, kHopperOnly).empty() == (on == 90));
    check_true("a kernel since sm_89", refused(on, 89).empty() == (on >= 89));
  }
  const auto expect_refusal = [&](int on, int since, const std::string& gpu) {
    const std::string got = refused(on, since);
    const std::string expected =
        "topk_fwd: there is no kernel for this GPU of compute capability " + gpu +
        "; trace and compile the program on a machine with the same GPU, or use "
        "implementation='xla'";
    if (got != expected) ++failures, printf("got \"%s\"\n", got.c_str());
  };
  expect_refusal(75, kEveryGpu, "7.5");
  expect_refusal(86, kHopperOnly, "8.6");
  expect_refusal(120, kHopperOnly, "12.0");
  expect("a call that no kernel covers", launch_status("topk_fwd", cudaErrorNotSupported),
         "topk_fwd: no kernel for this GPU covers the call; trace and compile the program on a "
         "machine with the same GPU, or use implementation='xla'");
}

}  // namespace
}  // namespace jax_dsa

int main() {
  using namespace jax_dsa;
  for (const Target& target : registered_targets()) {
    printf("target %s\n", std::string(target.name).c_str());
  }
  test_ranges_of_masked_attention();
  test_block_masks_of_masked_attention();
  test_other_operands_of_masked_attention();
  test_sparse_attention();
  test_sparse_attention_decode();
  test_block_mask();
  test_sparse_mla();
  test_attn_dist();
  test_mqa_decode();
  test_htree();
  test_indexer_candidates();
  test_indexer_selected();
  test_mean_pool();
  test_indexer_block_topk();
  test_topk();
  test_block_topk();
  test_gpus();
  printf(failures == 0 ? "all good\n" : "%d failures\n", failures);
  return failures != 0;
}
