// Decode: workspace layout and launches.
#pragma once

#include "common/error.h"
#include "htree/chunks.cuh"
#include "htree/decode.cuh"

namespace jax_dsa::htree {

inline int64_t decode_rows(const HTreeFwdParams& p) { return p.batch * p.groups * p.queries; }

// Assigns the arrays for `ctas` CTAs in the workspace; returns its size in bytes.
inline int64_t assign_workspace(const HTreeFwdParams& p, int64_t layers, int64_t ctas,
                                DecodePlan& x) {
  char* const start = static_cast<char*>(p.workspace);
  WorkspaceAllocator workspace = {start};
  const int64_t rows = decode_rows(p), width = p.compression * p.top_k;
  const int64_t heads = ceil_div(p.heads / p.groups, int64_t{kTileHeads}) * kTileHeads;
  if (layers > 1) {
    workspace.allocate(x.importance, 2 * rows * width);
    workspace.allocate(x.lists, (layers - 1) * rows * p.top_k);
    workspace.allocate(x.bits, (layers - 1) * rows * ceil_div(width, int64_t{32}));
  }
  workspace.allocate(x.outputs, ctas * heads * p.dim);
  workspace.allocate(x.max_and_sum, ctas * heads);
  return workspace.next - start;
}

// Fills in the plan, which must have at least one row.
inline cudaError_t make_decode_plan(const HTreeDecodeParams& params, DecodePlan& x) {
  const HTreeFwdParams& p = params.fwd;
  Device device;
  DSA_RETURN_IF_CUDA_ERROR(current_device(&device));
  x.plan = make_plan(p);
  x.k = static_cast<const uint8_t*>(params.k), x.v = static_cast<const uint8_t*>(params.v);
  for (int i = 0; i < x.plan.layers.count; ++i) {
    x.first_node[i] = x.nodes;
    x.nodes += ceil_div(x.plan.layers.size[i], p.compression) * p.compression;
  }
  x.frequencies = make_frequencies(p.dim, params.rope_base);
  x.rows = decode_rows(p);
  x.width = static_cast<int>(p.compression * p.top_k), x.words = ceil_div(x.width, 32);
  const int64_t most = std::min(device.num_sms, kMaxSms);
  x.splits = static_cast<int>(std::max<int64_t>(most / x.rows, 1));
  const int64_t workers = int64_t{x.splits} * (kDecodeWarps / x.plan.head_tiles);
  x.few_tiles = x.plan.layers.count * p.top_k <= 2 * workers;
  assign_workspace(p, x.plan.layers.count, x.rows * x.splits, x);
  return x.rows * std::max(x.splits, 2 * x.plan.group_heads) > INT32_MAX ? cudaErrorInvalidValue
                                                                         : cudaSuccess;
}

// CTAs of one launch must not share an SM while other SMs are idle, so each requests more than
// half of an SM's shared memory. If there are few key tiles, CTAs of two launches share an SM
// instead. Then only those of the middle layers request a size, half of the shared memory that
// `preferred_shared_kib` asks for: the top launch has all SMs to itself, and the registers of
// the last one keep its CTAs apart. On GPUs with less shared memory than Hopper these request none.
inline constexpr int kExclusiveBytesFewTiles = 98 * 1024;
constexpr int preferred_shared_kib(int64_t layers) { return layers > 2 ? 196 : 132; }

template <int kD, int kR, bool kFewTiles>
cudaError_t launch_layer(const DecodePlan& x, int layer, cudaStream_t stream) {
  using Shared = DecodeShared<kD, kR, kDecodeTileRows<kR, kFewTiles>>;
  constexpr int kMost = kR * static_cast<int>(kHTreeMaxTopK);
  static_assert(shared_memory_fits(1, Shared::bytes(kDecodeWarps, kMost, true, true)));
  Device device;
  DSA_RETURN_IF_CUDA_ERROR(current_device(&device));
  const bool first = layer + 1 == x.plan.layers.count;
  const auto kernel = layer == 0 ? decode_kernel<kD, kR, DecodeStep::kAttend, kFewTiles>
                      : first    ? decode_kernel<kD, kR, DecodeStep::kTop, kFewTiles>
                                 : decode_kernel<kD, kR, DecodeStep::kMiddle, kFewTiles>;
  const auto launch = first ? launch_blocks<DecodePlan, int> : launch_pdl<DecodePlan, int>;
  DecodePlan y = x;
  int bytes = Shared::bytes(x.plan.head_tiles, x.width, !first, layer == 0);
  if (bytes > device.shared_bytes) {
    y.overlaps = true;
    bytes = Shared::bytes(x.plan.head_tiles, x.width, !first, layer == 0, y.overlaps);
    if (bytes > device.shared_bytes) return cudaErrorNotSupported;
  }
  if (!kFewTiles) bytes = std::max(bytes, device.shared_bytes / 2 + 1024);
  if (kFewTiles && device.shared_bytes >= kMaxSharedBytes) {
    if (layer > 0 && !first) bytes = std::max(bytes, kExclusiveBytesFewTiles);
    const int kib = preferred_shared_kib(x.plan.layers.count);
    DSA_RETURN_IF_CUDA_ERROR(prefer_shared_memory(kernel, kib));
  }
  return launch(kernel, x.rows * x.splits, kDecodeThreads, bytes, stream, y, layer);
}
template <int kD, int kR>
cudaError_t launch_layer(const DecodePlan& x, int layer, cudaStream_t stream) {
  return x.few_tiles ? launch_layer<kD, kR, true>(x, layer, stream)
                     : launch_layer<kD, kR, false>(x, layer, stream);
}

template <int kD>
cudaError_t launch_combine(const DecodePlan& x, cudaStream_t stream) {
  return launch_pdl(combine_kernel<kD>, x.rows * x.plan.group_heads * 2, kCombineThreads,
                    static_cast<int>(sizeof(CombineShared<kD>)), stream, x);
}

}  // namespace jax_dsa::htree
