// Internal: constants of how the mqa_decode kernels divide work (plan.cuh), for tests and
// benchmarks that want other values.
#pragma once

#include "mqa_decode/mqa_decode.h"

namespace jax_dsa::mqa_decode {

// The defaults are the fastest that were measured.
struct Tuning {
  int combine_cost = 6;     // cost of splitting a few work tiles, in key tiles; nothing is split to
                            // save less
  int min_range_tiles = 3;  // the fewest key tiles of a work range, if there are enough for one
};

cudaError_t launch(const MqaDecodeParams& params, const Tuning& tuning, cudaStream_t stream);

}  // namespace jax_dsa::mqa_decode
