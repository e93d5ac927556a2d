// Tiles in shared memory, and the descriptors by which wgmma reads them.
//
// Tiles are made of blocks of 64 columns: a block's row is 128 bytes, row r's 16-byte chunk c lies
// at chunk c ^ (r % 8), and eight rows (1024 bytes, so aligned) are the swizzle's period. The same
// bytes serve as
//   K-major operand (the 64 columns are contracted): the stride offset leads to the next eight
//     rows, 16 columns are 32 bytes;
//   MN-major operand (the rows are contracted): the leading offset leads to the next 64 columns,
//     the stride offset to the next eight rows, 16 rows are 2048 bytes.
// Narrower K-major tiles have rows of 32 or 64 bytes, swizzled over that width.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jax_dsa {

inline constexpr int kTile = 64;                 // rows
inline constexpr int kBlockBytes = kTile * 128;  // of 64 columns in bf16

inline constexpr uint64_t kSwizzle128B = uint64_t{1} << 62;

// Adding bytes / 16 to a descriptor moves its start.
__host__ __device__ constexpr uint64_t wgmma_descriptor(uint32_t address, uint32_t leading_bytes,
                                                        uint32_t stride_bytes) {
  return kSwizzle128B | uint64_t{stride_bytes >> 4} << 32 | uint64_t{leading_bytes >> 4} << 16 |
         (address & 0x3ffff) >> 4;
}
__host__ __device__ constexpr uint64_t k_major_descriptor(uint32_t address) {
  return wgmma_descriptor(address, 16, 1024);  // the leading offset is not used
}
__host__ __device__ constexpr uint64_t mn_major_descriptor(uint32_t address, uint32_t block_bytes) {
  return wgmma_descriptor(address, block_bytes, 1024);
}
// K-major, rows of 32, 64 or 128 bytes; eight of them, so aligned, are the swizzle's period.
template <int kRowBytes>
__host__ __device__ constexpr uint64_t k_major_rows_descriptor(uint32_t address) {
  constexpr uint64_t kSwizzle = kRowBytes == 128 ? 1 : kRowBytes == 64 ? 2 : 3;
  return kSwizzle << 62 | uint64_t{kRowBytes * 8 >> 4} << 32 | uint64_t{1} << 16 |
         (address & 0x3ffff) >> 4;
}

// The descriptor of what lies `bytes` further on. Its lower half has room for any shared-memory
// address.
__host__ __device__ constexpr uint64_t moved(uint64_t descriptor, uint32_t bytes) {
  return (descriptor & ~uint64_t{UINT32_MAX}) | (static_cast<uint32_t>(descriptor) + (bytes >> 4));
}

}  // namespace jax_dsa
