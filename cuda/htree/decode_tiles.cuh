// A warp's fragments of a key tile: keys that are rotated in registers, and values.
//
// Keys and values go straight from global memory to registers. A lane loads 16 bytes of a row. The
// 8 adjacent dimensions in them serve as columns of two MMAs, whose order along D does not matter
// as long as Q follows it. The 8 dimensions of a value are columns of 8 MMAs.
#pragma once

#include "common/mma.cuh"
#include "htree/decode_plan.cuh"

namespace jax_dsa::htree {

// Keys of a tile: the lane holds 16-byte chunks lane % 4 + 4 j of row i * 8 + lane / 4.
template <int kD, int kRows>
struct KeyTile {
  uint32_t x[kRows / 8][kD / 32][4];

  __device__ __forceinline__ void load(const uint8_t* block, int64_t stride) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kRows / 8; ++i) {
#pragma unroll
      for (int j = 0; j < kD / 32; ++j) {
        const uint4 y = load_chunk(block + (i * 8 + lane / 4) * stride + (lane % 4 + 4 * j) * 16);
        x[i][j][0] = y.x, x[i][j][1] = y.y, x[i][j][2] = y.z, x[i][j][3] = y.w;
      }
    }
  }

  // Rotates row i by `offset + i` positions.
  template <typename Shared>
  __device__ __forceinline__ void rotate(int offset, Shared& shared) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    auto& rotations = shared.rotations[warp];
    __syncwarp();  // all lanes have read the previous rotations
#pragma unroll
    for (int pair = lane; pair < kD / 2; pair += 32) {
      double revolutions = offset * shared.frequencies[pair];
      revolutions -= rint(revolutions);
      rotations[pair_slot(pair)] = cosine_and_sine(static_cast<float>(revolutions));
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kD / 64; ++j) {
#pragma unroll
      for (int quarter = 0; quarter < 4; ++quarter) {  // two pairs of the lane's eight
        const int at = (j * 4 + quarter) * 8 + lane % 4 * 2;
        const float4 a = *reinterpret_cast<const float4*>(&rotations[at]);
#pragma unroll
        for (int i = 0; i < kRows / 8; ++i) {
          // The product of the tile's rotation and the row's.
          const float4 b = *reinterpret_cast<const float4*>(&shared.slots[i * 8 + lane / 4][at]);
          const float cos0 = a.x * b.x - a.y * b.y, sin0 = a.y * b.x + a.x * b.y;
          const float cos1 = a.z * b.z - a.w * b.w, sin1 = a.w * b.z + a.z * b.w;
          uint32_t &low = x[i][j][quarter], &high = x[i][j + kD / 64][quarter];
          const float2 y = unpack_bf16(low), z = unpack_bf16(high);
          low = pack_bf16(y.x * cos0 - z.x * sin0, y.y * cos1 - z.y * sin1);
          high = pack_bf16(z.x * cos0 + y.x * sin0, z.y * cos1 + y.y * sin1);
        }
      }
    }
  }

  // s [16 heads, rows] = Q K^T for the head tile at `queries` in shared memory.
  __device__ __forceinline__ void multiply(uint32_t queries, float (&s)[kRows / 8][4]) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kRows / 8; ++i) s[i][0] = s[i][1] = s[i][2] = s[i][3] = 0.f;
#pragma unroll
    for (int j = 0; j < kD / 32; ++j) {
      uint32_t a[4], b[4];
      load_shared_16(queries + swizzled<kD>(lane / 4, lane % 4 + 4 * j), a);
      load_shared_16(queries + swizzled<kD>(lane / 4 + 8, lane % 4 + 4 * j), b);
      const uint32_t first[4] = {a[0], b[0], a[1], b[1]}, second[4] = {a[2], b[2], a[3], b[3]};
#pragma unroll
      for (int i = 0; i < kRows / 8; ++i) {
        mma_16<DType::kBF16>(s[i], first, x[i][j][0], x[i][j][1]);
        mma_16<DType::kBF16>(s[i], second, x[i][j][2], x[i][j][3]);
      }
    }
  }
};

// Values of a tile: of rows 2 (lane % 4), the next one, and both 8 further on, the lane holds chunk
// lane / 4 and, for D = 128, also chunk lane / 4 + 8.
template <int kD, int kRows>
struct ValueTile {
  static constexpr int kSteps = ceil_div(kRows, 16), kRowsPerLane = kRows == 8 ? 2 : 4;
  uint4 x[kSteps][kD / 64][kRowsPerLane];

  // Rows from `rows` on become zeros.
  __device__ __forceinline__ void load(const uint8_t* block, int64_t stride, int rows) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int r = 0; r < kRowsPerLane; ++r) {
        const int row = step * 16 + r / 2 * 8 + lane % 4 * 2 + r % 2;
#pragma unroll
        for (int half = 0; half < kD / 64; ++half) {
          x[step][half][r] = make_uint4(0, 0, 0, 0);
          if (row < rows) {
            x[step][half][r] = load_chunk(block + row * stride + (half * 8 + lane / 4) * 16);
          }
        }
      }
    }
  }

  // o += P V. Column lane / 4 of MMA tile 8 half + j is dimension 64 half + 8 (lane / 4) + j.
  __device__ __forceinline__ void multiply(float (&o)[kD / 8][4],
                                           const float (&s)[kRows / 8][4]) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t a[4] = {};
#pragma unroll
      for (int i = 0; i < kRowsPerLane / 2; ++i) {
        a[2 * i] = pack_bf16(s[2 * step + i][0], s[2 * step + i][1]);
        a[2 * i + 1] = pack_bf16(s[2 * step + i][2], s[2 * step + i][3]);
      }
#pragma unroll
      for (int half = 0; half < kD / 64; ++half) {
        const auto word = [&](int r, int i) {
          const uint4& y = x[step][half][r];
          return i == 0 ? y.x : i == 1 ? y.y : i == 2 ? y.z : y.w;
        };
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const uint32_t which = j % 2 ? 0x7632 : 0x5410;
          uint32_t b[2] = {};
#pragma unroll
          for (int i = 0; i < kRowsPerLane / 2; ++i) {
            b[i] = __byte_perm(word(2 * i, j / 2), word(2 * i + 1, j / 2), which);
          }
          mma_16<DType::kBF16>(o[half * 8 + j], a, b[0], b[1]);
        }
      }
    }
  }
};

}  // namespace jax_dsa::htree
