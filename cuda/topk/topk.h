// Exact top-k of float32 rows: the indices of the k largest values, in ascending order, then -1. Of
// equal values, those with the lowest indices are selected.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jax_dsa {

inline constexpr int64_t kTopkMaxSelected = 4096;               // limit of min(k, size)
inline constexpr int kTopkWideCtasPerSm = 2;                    // CTAs per SM for long rows
inline constexpr int64_t kTopkMaxSize = INT32_MAX - (1 << 16);  // Positions are int32.

struct TopkParams {
  const float* logits;    // [rows, size]; NaN and -inf are never selected
  const int32_t* starts;  // [rows], first candidate, clipped to 0..size; null for 0
  const int32_t* ends;    // [rows], one past the last candidate, clipped; null for size
  int32_t* indices;       // [rows, k]
  float* values;          // [rows, k], -inf where the index is -1; null if not needed
  int64_t rows;
  int64_t size;
  int64_t k;
  // Lists of the splits of long rows. GPUs without clusters process a few long rows by several CTAs
  // each if there are topk_workspace_bytes, and by one CTA each otherwise.
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;
};

// Returns the bytes of the workspace, sufficient for every device. There are none for many or short
// rows.
int64_t topk_workspace_bytes(int64_t rows, int64_t size, int64_t k);

// Returns cudaErrorInvalidValue if min(k, size) or size exceeds its limit.
cudaError_t launch_topk(const TopkParams& params, cudaStream_t stream);

}  // namespace jax_dsa
