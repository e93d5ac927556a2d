// Propagation of CUDA errors from launchers.
#pragma once

#include <cuda_runtime_api.h>

// Evaluates an expression of type cudaError_t and returns it from the calling function on failure.
#define DSA_RETURN_IF_CUDA_ERROR(...)                                          \
  do {                                                                         \
    if (cudaError_t error = (__VA_ARGS__); error != cudaSuccess) return error; \
  } while (false)
