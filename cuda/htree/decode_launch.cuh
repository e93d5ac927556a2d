// Decode's launches, and how they share the workspace.
#pragma once

#include "common/error.h"
#include "htree/decode.cuh"
#include "htree/launch.cuh"

namespace jax_dsa::htree {

inline int64_t decode_rows(const HTreeFwdParams& p) { return p.batch * p.groups * p.queries; }

// Takes the workspace apart, for `blocks` thread blocks; returns its size.
inline int64_t divide(const HTreeFwdParams& p, int64_t layers, int64_t blocks, DecodePass& x) {
  char* const start = static_cast<char*>(p.workspace);
  Parts parts = {start};
  const int64_t rows = decode_rows(p), width = p.compression * p.top_k;
  const int64_t heads = ceil_div(p.heads / p.groups, int64_t{kHeads}) * kHeads;
  if (layers > 1) {
    parts.take(x.importance, 2 * rows * width);
    parts.take(x.lists, (layers - 1) * rows * p.top_k);
    parts.take(x.bits, (layers - 1) * rows * ceil_div(width, int64_t{32}));
  }
  parts.take(x.sums, blocks * heads * p.dim);
  parts.take(x.references, blocks * heads);
  return parts.at - start;
}

// Of at least one row.
inline cudaError_t make_decode_pass(const HTreeDecodeParams& params, DecodePass& x) {
  const HTreeFwdParams& p = params.fwd;
  Device device;
  DSA_RETURN_IF_CUDA_ERROR(current_device(&device));
  x.pass = make_pass(p);
  x.k = static_cast<const uint8_t*>(params.k), x.v = static_cast<const uint8_t*>(params.v);
  for (int i = 0; i < x.pass.layers.count; ++i) {
    x.first[i] = x.nodes;
    x.nodes += ceil_div(x.pass.layers.size[i], p.compression) * p.compression;
  }
  x.frequencies = make_frequencies(p.dim, params.rope_base);
  x.rows = decode_rows(p);
  x.width = static_cast<int>(p.compression * p.top_k), x.words = ceil_div(x.width, 32);
  const int64_t most = std::min(device.num_sms, kMaxSms);
  x.splits = static_cast<int>(std::max<int64_t>(most / x.rows, 1));
  const int64_t teams = int64_t{x.splits} * (kDecodeWarps / x.pass.parts);
  x.few = x.pass.layers.count * p.top_k <= 2 * teams;
  divide(p, x.pass.layers.count, x.rows * x.splits, x);
  return x.rows * std::max(x.splits, 2 * x.pass.group_heads) > INT32_MAX ? cudaErrorInvalidValue
                                                                         : cudaSuccess;
}

// Thread blocks of a launch do not share a SM, or others would have none: they ask for
// half of its shared memory. With few blocks a warp only the middle launches do, and half of what
// is then preferred; the top one has all SMs, and the last one's registers keep it
// alone.
inline constexpr int kAlone = kMaxSharedBytes / 2 + 1024, kAloneOfFew = 98 * 1024;
constexpr int preferred_kib(int64_t layers) { return layers > 2 ? 196 : 132; }

template <int kD, int kR, bool kFew>
cudaError_t launch_layer(const DecodePass& x, int layer, cudaStream_t stream) {
  using Shared = DecodeShared<kD, kR, kUnit<kR, kFew>>;
  constexpr int kMost = kR * static_cast<int>(kHTreeMaxTopK);
  static_assert(shared_memory_fits(1, Shared::bytes(kDecodeWarps, kMost, true, true)));
  const bool first = layer + 1 == x.pass.layers.count;
  const auto kernel = layer == 0 ? decode_kernel<kD, kR, DecodeStep::kAttend, kFew>
                      : first    ? decode_kernel<kD, kR, DecodeStep::kTop, kFew>
                                 : decode_kernel<kD, kR, DecodeStep::kMiddle, kFew>;
  const auto launch = first ? launch_blocks<DecodePass, int> : launch_pdl<DecodePass, int>;
  int bytes = Shared::bytes(x.pass.parts, x.width, !first, layer == 0);
  if (!kFew) bytes = std::max(bytes, kAlone);
  if (kFew && layer > 0 && !first) bytes = std::max(bytes, kAloneOfFew);
  if (kFew) {
    const int kib = preferred_kib(x.pass.layers.count);
    DSA_RETURN_IF_CUDA_ERROR(prefer_shared_memory(kernel, kib));
  }
  return launch(kernel, x.rows * x.splits, kDecodeThreads, bytes, stream, x, layer);
}
template <int kD, int kR>
cudaError_t launch_layer(const DecodePass& x, int layer, cudaStream_t stream) {
  return x.few ? launch_layer<kD, kR, true>(x, layer, stream)
               : launch_layer<kD, kR, false>(x, layer, stream);
}

template <int kD>
cudaError_t launch_merge(const DecodePass& x, cudaStream_t stream) {
  return launch_pdl(merge_kernel<kD>, x.rows * x.pass.group_heads * 2, kMergeThreads,
                    static_cast<int>(sizeof(MergeShared<kD>)), stream, x);
}

}  // namespace jax_dsa::htree
