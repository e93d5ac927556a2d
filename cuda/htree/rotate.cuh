// RoPE of the fragments of 16 rows, by rotations that differ from one block of the tree to the
// next.
//
// In f32 (`rotate`) it takes 240 instructions for 128 dimensions. The tensor cores (`rotate_pairs`)
// do it in 80: for 4 pairs of dimensions (d, d + D / 2) it is a product of 8 columns with a matrix
// that has four blocks of 2 x 2. cos and sin are two bf16 each, of which the second has what the
// first leaves, hence two such products: nothing is lost that the result has room for.
#pragma once

#include <cstdint>

#include "common/mma.cuh"
#include "common/ptx.cuh"

namespace jax_dsa::htree {

// cos and sin of a warp's rotations, one after the other: each is loaded one ahead, a part a lane,
// and shared through `buffer`.
template <int kD>
struct RotationLoader {
  static constexpr int kBytes = kD / 2 * 8;  // of a rotation
  const float4* table;                       // this lane's part
  uint32_t buffer;
  float4 upcoming = {};

  __device__ RotationLoader(const float* rotations, const uint8_t* buffer)
      : table(reinterpret_cast<const float4*>(rotations) + threadIdx.x % 32),
        buffer(smem_address(buffer)) {}

  // Loads the one by `position`.
  __device__ __forceinline__ void load(int position) {
    if (position >= 0 && is_loader()) upcoming = __ldg(table + int64_t{position} * (kBytes / 16));
  }
  // Where the one is that was loaded; loads the next.
  __device__ __forceinline__ uint32_t next(int position) {
    const uint32_t bits[4] = {__float_as_uint(upcoming.x), __float_as_uint(upcoming.y),
                              __float_as_uint(upcoming.z), __float_as_uint(upcoming.w)};
    __syncwarp();  // all have read the one before
    if (is_loader()) store_shared_16(buffer + threadIdx.x % 32 * 16, bits);
    __syncwarp();
    load(position);
    return buffer;
  }

  __device__ static bool is_loader() { return static_cast<int>(threadIdx.x % 32) < kBytes / 16; }
};

// Fragments j and j + D / 32 of 16 rows, rotated in place, or back.
template <int kD, bool kBack = false>
__device__ __forceinline__ void rotate(uint32_t (&low)[4], uint32_t (&high)[4], uint32_t rotation,
                                       int j) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t bits[4];  // cos, sin, cos, sin
    load_shared_16(rotation + (j * 16 + half * 8 + threadIdx.x % 4 * 2) * 8, bits);
    const float cs[4] = {__uint_as_float(bits[0]), __uint_as_float(bits[1]),
                         __uint_as_float(bits[2]), __uint_as_float(bits[3])};
#pragma unroll
    for (int i = 2 * half; i < 2 * half + 2; ++i) {
      const float2 x = unpack_bf16(low[i]), y = unpack_bf16(high[i]);
      const float sin[2] = {kBack ? -cs[1] : cs[1], kBack ? -cs[3] : cs[3]};
      low[i] = pack_bf16(x.x * cs[0] - y.x * sin[0], x.y * cs[2] - y.y * sin[1]);
      high[i] = pack_bf16(y.x * cs[0] + x.x * sin[0], y.y * cs[2] + x.y * sin[1]);
    }
  }
}

// The same as matrices for the tensor cores. Of 8 dimensions of each half the eight lanes whose
// part of the matrices is on the diagonal, lane / 4 = 2 * (lane % 4) + {0, 1}, have 16 bytes each.
// The others read zeros.
template <int kD>
struct RotationMatrices {
  static constexpr int kBytes = kD / 2 * 16;  // of a rotation; of the zeros, too
  RotationLoader<kD> loader;
  uint32_t from;  // where this lane reads

  __device__ RotationMatrices(const float* rotations, uint8_t (&buffer)[kBytes],
                              const uint8_t (&zeros)[kBytes])
      : loader(rotations, buffer) {
    const int lane = threadIdx.x % 32;
    // Zeros from banks that no lane of these eight has.
    from = lane % 4 == lane / 8 ? smem_address(buffer) + lane / 4 * 16
                                : smem_address(zeros) + (lane / 8 + 1) % 4 * 32;
  }

  // As those of Turns.
  __device__ __forceinline__ void load(int position) { loader.load(position); }
  __device__ __forceinline__ uint32_t next(int position) {
    // This lane has two pairs. A matrix has the columns (cos, -sin) and (sin, cos).
    const float cs[2][2] = {{loader.upcoming.x, loader.upcoming.y},
                            {loader.upcoming.z, loader.upcoming.w}};
    uint32_t first[4], second[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t most = pack_bf16(cs[i][0], cs[i][1]);
      const float2 has = unpack_bf16(most);
      const uint32_t rest = pack_bf16(cs[i][0] - has.x, cs[i][1] - has.y);
      first[2 * i] = most ^ 0x80000000u, first[2 * i + 1] = rest ^ 0x80000000u;
      second[2 * i] = __byte_perm(most, 0, 0x1032);
      second[2 * i + 1] = __byte_perm(rest, 0, 0x1032);
    }
    __syncwarp();  // all have read the one before
    if (loader.is_loader()) {
      // Computed anew, so that no register holds it from one block to the next.
      const uint32_t to = loader.buffer + opaque(threadIdx.x) % 32 * 32;
      store_shared_16(to, first), store_shared_16(to + 16, second);
    }
    __syncwarp();
    load(position);
    return from;
  }
};

// By all threads of a block, before they meet.
template <int kBytes>
__device__ __forceinline__ void clear_zeros(uint8_t (&bytes)[kBytes]) {
  for (int i = threadIdx.x; i < kBytes / 4; i += blockDim.x) reinterpret_cast<int*>(bytes)[i] = 0;
}

// Fragments j and j + D / 32 with the pairs of dimensions in a register, the even ones in `low`.
__device__ __forceinline__ void pair_up(uint32_t (&low)[4], uint32_t (&high)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t even = __byte_perm(low[i], high[i], 0x5410);
    high[i] = __byte_perm(low[i], high[i], 0x7632);
    low[i] = even;
  }
}

// From these pairs to fragments j and j + D / 32 of rotated rows, in their place.
__device__ __forceinline__ void rotate_pairs(uint32_t (&low)[4], uint32_t (&high)[4],
                                             uint32_t matrices, int j) {
#pragma unroll
  for (int half = 0; half < 4; half += 2) {
    uint32_t b[4];
    load_shared_16(matrices + (j * 4 + half) * 64, b);
    const uint32_t even[2] = {low[half], low[half + 1]}, odd[2] = {high[half], high[half + 1]};
    float x[4] = {}, y[4] = {};
    mma_8<DType::kBF16>(x, even, b[0]);
    mma_8<DType::kBF16>(y, odd, b[2]);
    mma_8<DType::kBF16>(x, even, b[1]);
    mma_8<DType::kBF16>(y, odd, b[3]);
    low[half] = pack_bf16(x[0], y[0]), high[half] = pack_bf16(x[1], y[1]);
    low[half + 1] = pack_bf16(x[2], y[2]), high[half + 1] = pack_bf16(x[3], y[3]);
  }
}

}  // namespace jax_dsa::htree
