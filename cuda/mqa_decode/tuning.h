// Internal: constants of how the mqa_decode kernels divide work (plan.cuh), for tests and
// benchmarks that want other values.
#pragma once

#include "common/device.h"
#include "mla/layout.h"
#include "mqa_decode/mqa_decode.h"

namespace jax_dsa {
namespace mqa_decode {

// The defaults are the fastest that were measured.
struct Tuning {
  int combine_cost = 6;     // cost of splitting a few work tiles, in key tiles; nothing is split to
                            // save less
  int min_range_tiles = 3;  // the fewest key tiles of a work range, if there are enough for one
  int max_static_tiles = 6;   // work tiles are divided by static splits if these have at most this
                              // many key tiles more than necessary; -1: never
  int splits_per_tile = 10;   // combining this many static splits of 64 rows takes as long as a key
                              // tile; > 0
  int max_cluster_tiles = 3;  // clusters divide work tiles if a CTA then has at most this many key
                              // tiles, or a third of them where clusters save less; 0: never
};

cudaError_t launch(const MqaDecodeParams& params, const Tuning& tuning, cudaStream_t stream);
cudaError_t launch_plan(const MqaDecodeParams& params, const Tuning& tuning, MqaDecodeRange* plan,
                        cudaStream_t stream);

// Returns whether the kernels take these parameters.
inline bool is_valid(const MqaDecodeParams& p) {
  if (p.groups <= 0 || p.heads % p.groups != 0 || !(p.scale > 0.f)) return false;
  if (p.queries * p.batch * p.heads > INT32_MAX || p.keys > INT32_MAX - 64) return false;
  if (p.v ? p.value_dim != p.dim : p.value_dim != kMlaValueDim) return false;
  if (p.records && (p.v || p.dim != 576)) return false;
  if (p.page_table == nullptr) return true;
  return p.page_size > 0 && p.pages >= 0 && p.page_slots >= 0 &&
         int64_t{p.pages} * p.page_size <= INT32_MAX &&
         p.keys == int64_t{p.page_slots} * p.page_size &&
         (p.batch_rows == 0 || p.batch_rows == int64_t{p.pages} * p.page_size);
}

}  // namespace mqa_decode

namespace hopper {
cudaError_t launch_mqa_decode(const MqaDecodeParams& params, const mqa_decode::Tuning& tuning,
                              cudaStream_t stream);
cudaError_t launch_mqa_decode_plan(const MqaDecodeParams& params, const mqa_decode::Tuning& tuning,
                                   MqaDecodeRange* plan, cudaStream_t stream);
}  // namespace hopper
namespace portable {
cudaError_t launch_mqa_decode(const MqaDecodeParams& params, const mqa_decode::Tuning& tuning,
                              const Device& device, cudaStream_t stream);
}

}  // namespace jax_dsa
