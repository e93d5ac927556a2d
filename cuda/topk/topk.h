// Exact top-k of f32 rows: the k largest by (value descending, index ascending), in ascending index
// order, then -1.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jax_dsa {

inline constexpr int64_t kTopkMaxSelected = 4096;               // of min(k, size)
inline constexpr int kTopkLongRowsAtOnce = 2;                   // by a SM
inline constexpr int64_t kTopkMaxSize = INT32_MAX - (1 << 16);  // positions are int32

struct TopkParams {
  const float* logits;    // [rows, size]; NaN and -inf are never selected
  const int32_t* starts;  // [rows], first candidate, clipped to 0..size; null: 0
  const int32_t* ends;    // [rows], one past the last candidate, clipped; null: size
  int32_t* indices;       // [rows, k]
  float* values;          // [rows, k], -inf where the index is -1; null: not wanted
  int64_t rows;
  int64_t size;
  int64_t k;
};

// cudaErrorInvalidValue if min(k, size) or size is above the limits.
cudaError_t launch_topk(const TopkParams& params, cudaStream_t stream);

}  // namespace jax_dsa
