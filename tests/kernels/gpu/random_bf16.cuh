// Random bf16 numbers for the timings of check programs.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "gpu/check.cuh"

__global__ void fill_normal(uint16_t* x, int64_t n, uint64_t seed) {
  for (int64_t i = blockIdx.x * int64_t{256} + threadIdx.x; i < n; i += int64_t{gridDim.x} * 256) {
    const uint64_t bits = mix(seed * 0x100000001b3ull + i);
    float sum = 0;  // sum of four uniform numbers, close to a normal one
    for (int j = 0; j < 4; ++j) sum += float(bits >> (16 * j) & 0xffff) * (1.f / 65536) - 0.5f;
    x[i] = __bfloat16_as_ushort(__float2bfloat16(sum * 1.732f));
  }
}

// Fills n bf16 numbers in device memory with about normally distributed numbers.
inline uint16_t* fill_random_bf16(uint16_t* x, int64_t n, uint64_t seed) {
  fill_normal<<<2048, 256>>>(x, n, seed);
  CHECK(cudaGetLastError());
  return x;
}
