// The limits of the kernels: handlers check them, and `_cuda.limits()` shows them to Python, where
// a test compares them with those of jax_dsa/ops/*/cuda.py. A limit that the code of a kernel or of
// a workspace needs, too, is defined in the kernel's header and only named here.
#pragma once

#include <cstdint>

#include "block_mask/block_mask.h"
#include "fp8/quantize.h"
#include "gated_pool/gated_pool.h"
#include "htree/htree.h"
#include "indexer/indexer.h"
#include "mla/layout.h"
#include "mqa_decode/mqa_decode.h"
#include "sparse_attention/decode.h"
#include "sparse_attention/sparse_attention.h"
#include "sparse_mla/sparse_mla_decode.h"
#include "topk/topk.h"

namespace jax_dsa::limits {

inline constexpr int64_t kInt32Max = INT32_MAX;

namespace attn_dist {
inline constexpr int64_t kDims[] = {576, 512, 256, 192, 128, 64};
}

namespace block_mask {
inline constexpr int64_t kMaxLength = kBlockMaskMaxLength;
inline constexpr int64_t kMaxTiles = kInt32Max;
}  // namespace block_mask

namespace fp8_matmul {
inline constexpr int64_t kMaxSize = kInt32Max - 4096;  // the last tile of an axis ends below 2^31
inline constexpr int64_t kRowBytes = 16;               // TMA copies rows of a multiple of this
}  // namespace fp8_matmul

namespace gated_pool {
inline constexpr int64_t kMaxPooled = kGatedPoolMaxPooled;
inline constexpr int64_t kMaxDim = int64_t{1} << 22;
inline constexpr int64_t kMaxTokens = kInt32Max - 4 * kGatedPoolMaxPooled;
inline constexpr int64_t kMaxBlocks = kInt32Max;  // of the whole batch
inline constexpr int64_t kDimMultiple = 4;
}  // namespace gated_pool

namespace htree {
inline constexpr int64_t kDims[] = {64, 128};
inline constexpr int64_t kCompressions[] = {8, 16, 32};
inline constexpr int64_t kMaxTopK = kHTreeMaxTopK;
inline constexpr int64_t kMaxGroupHeads = kHTreeMaxGroupHeads;
inline constexpr int64_t kMaxBwdGroupHeads = kHTreeMaxBwdGroupHeads;
inline constexpr int64_t kMaxDecodeGroupHeads = kHTreeMaxDecodeGroupHeads;
}  // namespace htree

namespace indexer {
inline constexpr int64_t kChannels[] = {32, 64, 128};
inline constexpr int64_t kMaxCandidateBlocks = kIndexerMaxCandidateBlocks;
inline constexpr int64_t kMaxHeads = kIndexerMaxHeads;
inline constexpr int64_t kMaxKeys = kInt32Max - 4096;
inline constexpr int64_t kMaxSlots = kIndexerBwdMaxSlots;
inline constexpr int64_t kPageMultiple = kIndexerPageMultiple;
inline constexpr int64_t kMaxBlocks = kIndexerMaxBlocks;
inline constexpr int64_t kMaxLists = kInt32Max - 4096;
}  // namespace indexer

namespace losses {
inline constexpr int64_t kDims[] = {576, 512, 256, 192, 128, 64};
inline constexpr int64_t kChannels[] = {32, 64, 128};
inline constexpr int64_t kMaxIndexHeads = kIndexerMaxHeads;
inline constexpr int64_t kMaxSlots = kInt32Max - 16384;
inline constexpr int64_t kMaxRows = kInt32Max;
}  // namespace losses

namespace masked_attention {
inline constexpr int64_t kMaxDim = 256;
inline constexpr int64_t kDimMultiple = 8;
inline constexpr int64_t kBlockKMultiple = 128;
inline constexpr int64_t kMaxLength = kInt32Max - 4096;
}  // namespace masked_attention

namespace mqa_decode {
inline constexpr int64_t kLatentDims[] = {576, 512};  // of keys whose first values are the values
inline constexpr int64_t kValueDim = kMlaValueDim;
inline constexpr int64_t kDims[] = {64, 128, 256};  // of keys, and of values of their own
inline constexpr int64_t kMaxRows = kInt32Max - 64;
inline constexpr int64_t kPlanFields = sizeof(MqaDecodeRange) / sizeof(int32_t);
}  // namespace mqa_decode

namespace sparse_attention {
inline constexpr int64_t kBlockSizes[] = {1, 4, 16, 32, 64, 128};
inline constexpr int64_t kMaxDim = masked_attention::kMaxDim;
inline constexpr int64_t kDimMultiple = masked_attention::kDimMultiple;
inline constexpr int64_t kMaxLength = masked_attention::kMaxLength;
inline constexpr int64_t kMaxGroupHeads = 32;
inline constexpr int64_t kMaxSlots = kSparseAttentionMaxSlots;
inline constexpr int64_t kDecodeDims[] = {64, 128, 256};
inline constexpr int64_t kMaxDecodeRows = kInt32Max / kSparseDecodeMaxSplits;
// Keys of a request, and of a list. The kernel numbers keys up to a few tiles past the end of a
// list.
inline constexpr int64_t kMaxDecodeKeys = kInt32Max - 256;
}  // namespace sparse_attention

namespace sparse_mla {
inline constexpr int64_t kDims[] = {576, 512};
inline constexpr int64_t kValueDim = kMlaValueDim;
inline constexpr int64_t kTileSlots = 64;
inline constexpr int64_t kRecordDim = 576;
inline constexpr int64_t kRecordBytes = kMlaRecordBytes;
inline constexpr int64_t kPageRecordBytes = kMlaPageRecordBytes;
// The decode kernel numbers slots up to a few tiles past the end of a row.
inline constexpr int64_t kMaxDecodeSlots = kInt32Max - 8 * kTileSlots * kSparseMlaMaxSplits;
}  // namespace sparse_mla

namespace topk {
inline constexpr int64_t kMaxSelected = kTopkMaxSelected;
inline constexpr int64_t kMaxSize = kTopkMaxSize;
inline constexpr int64_t kMaxRows = kInt32Max / 8;  // a cluster of up to 8 CTAs searches a row
inline constexpr int64_t kMaxBlocks = kIndexerMaxBlocks;
}  // namespace topk

}  // namespace jax_dsa::limits
