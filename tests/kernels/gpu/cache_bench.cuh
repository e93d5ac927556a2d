// Random caches and the copy rate of a GPU, for the benchmarks of decode kernels.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "gpu/check.cuh"
#include "mla/layout.h"

__global__ void fill_bf16(__nv_bfloat16* x, int64_t n, uint64_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    const uint64_t h = mix(seed + i);
    x[i] = __float2bfloat16(
        (float(h & 0xffff) + float(h >> 16 & 0xffff) + float(h >> 32 & 0xffff) - 98302.f) / 32768);
  }
}

// Fills records with e4m3 values in +-1.875, one scale for all, and bf16 values in the same range.
__global__ void fill_records(uint8_t* x, int64_t records, float scale, uint64_t seed) {
  for (int64_t r = blockIdx.x; r < records; r += gridDim.x) {
    uint8_t* record = x + r * jax_dsa::kMlaRecordBytes;
    for (int d = threadIdx.x; d < 512; d += blockDim.x) record[d] = mix(seed + r * 512 + d) & 0xbf;
    for (int i = threadIdx.x; i < 4; i += blockDim.x) {
      reinterpret_cast<float*>(record + 512)[i] = scale;
    }
    for (int i = threadIdx.x; i < 64; i += blockDim.x) {
      reinterpret_cast<uint16_t*>(record + 528)[i] = (mix(seed + r * 64 + i) & 0x807f) | 0x3f00;
    }
  }
}

// Fills pages of `size` page records in the same way, with scales of 1.
__global__ void fill_page_records(uint8_t* x, int64_t pages, int size, uint64_t seed) {
  for (int64_t i = blockIdx.x; i < pages * size; i += gridDim.x) {
    uint8_t* const page = x + i / size * size * jax_dsa::kMlaPageRecordBytes;
    uint8_t* const values = page + i % size * jax_dsa::kMlaPageRecordValues;
    uint8_t* const scales = page + size * jax_dsa::kMlaPageRecordValues + i % size * 8;
    for (int d = threadIdx.x; d < 448; d += blockDim.x) values[d] = mix(seed + i * 448 + d) & 0xbf;
    for (int d = threadIdx.x; d < 8; d += blockDim.x) scales[d] = 127;
    for (int d = threadIdx.x; d < 64; d += blockDim.x) {
      reinterpret_cast<uint16_t*>(values + 448)[d] = (mix(seed + i * 64 + d) & 0x807f) | 0x3f00;
    }
  }
}

// Fills a page table with a permutation of the pages if their number is a power of two (odd
// multiples modulo that number), and otherwise with the identity.
__global__ void fill_table(int32_t* x, int n) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    x[i] = (n & (n - 1)) ? i : static_cast<int>((i * 2654435761ull) & (n - 1));
  }
}

// Returns the bytes per second of a device-to-device copy, reads plus writes, in TB/s.
inline double copy_rate() {
  constexpr int64_t kBytes = int64_t{2} << 30;
  auto *a = device<uint8_t>(kBytes), *b = device<uint8_t>(kBytes);
  const float best =
      best_milliseconds([&] { CHECK(cudaMemcpyAsync(a, b, kBytes, cudaMemcpyDeviceToDevice)); });
  CHECK(cudaFree(a));
  CHECK(cudaFree(b));
  return 2. * kBytes / best * 1e-9;
}
