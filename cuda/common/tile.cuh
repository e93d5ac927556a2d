// Tiles in shared memory, and the wgmma descriptors for them.
//
// A tile consists of blocks of 64 columns. A row of a block has 128 bytes. The 16-byte chunk c of
// row r is stored at chunk c ^ (r % 8), so that the swizzle repeats every eight rows (1024 bytes,
// which is also the alignment). The same bytes can be read as
//   a K-major operand (the product sums over the 64 columns): the stride offset is the distance to
//     the next eight rows; 16 columns are 32 bytes;
//   an MN-major operand (the product sums over the rows): the leading offset is the distance to the
//     next 64 columns, the stride offset to the next eight rows; 16 rows are 2048 bytes.
// Narrower K-major tiles have rows of 32 or 64 bytes, swizzled over that width.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jax_dsa {

inline constexpr int kTile = 64;                 // rows of a tile
inline constexpr int kBlockBytes = kTile * 128;  // bytes of a block: 64 bf16 columns

inline constexpr uint64_t kSwizzle128B = uint64_t{1} << 62;

// Returns a descriptor for 128-byte swizzle. Adding bytes / 16 to a descriptor moves its start.
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
// Describes a K-major tile with rows of 32, 64 or 128 bytes. It is aligned to eight rows, after
// which the swizzle repeats.
template <int kRowBytes>
__host__ __device__ constexpr uint64_t k_major_rows_descriptor(uint32_t address) {
  constexpr uint64_t kSwizzle = kRowBytes == 128 ? 1 : kRowBytes == 64 ? 2 : 3;
  return kSwizzle << 62 | uint64_t{kRowBytes * 8 >> 4} << 32 | uint64_t{1} << 16 |
         (address & 0x3ffff) >> 4;
}

// Returns the descriptor of the data `bytes` further on. The addition cannot overflow the lower
// half for any shared-memory address.
__host__ __device__ constexpr uint64_t moved(uint64_t descriptor, uint32_t bytes) {
  return (descriptor & ~uint64_t{UINT32_MAX}) | (static_cast<uint32_t>(descriptor) + (bytes >> 4));
}

}  // namespace jax_dsa
