// The way of a tile's 64 records to bf16 in shared memory (common/tile.cuh), by a warpgroup of
// producers. See records.cuh.
#pragma once

#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "sparse_mla/fwd_plan.cuh"
#include "sparse_mla/records.cuh"
#include "sparse_mla/sparse_mla_decode.h"

namespace jax_dsa::sparse_mla {

// A thread has a quarter of two rows of a tile of records: of 16-byte chunk lane % 4 of each block
// (64 values) the row lane / 4 of its warp's eight, in either half of the tile. The values of one
// scale are a step: a chunk of two blocks.
struct Unpacking {
  uint32_t codes[8];
};

inline constexpr int kSteps = 8, kStepsAhead = 3, kStepsHeld = kStepsAhead + 1;
static_assert(kSteps % kStepsHeld == 0);

// Calls step<kStep>() for each step of a tile.
template <int kStep = 0, typename Step>
__device__ __forceinline__ void each_step(const Step& step) {
  if constexpr (kStep < kSteps) {
    step.template operator()<kStep>();
    each_step<kStep + 1>(step);
  }
}

__host__ __device__ constexpr int record_row(int warp, int half, int lane) {
  return half * 32 + warp * 8 + lane / 4;
}

// Of a warp's 16 rows, lanes l and l + 1 of each four have those of the halves 0 and 1. Bit r is
// that of row r % 8 of half r / 8 of the warp's.
__device__ __forceinline__ uint32_t bits_of_records(int row) {
  const int lane = threadIdx.x % 32;
  return __ballot_sync(~0u, __shfl_sync(~0u, row, lane % 8 * 4 + lane / 8) >= 0) & 0xffff;
}

// The records that a thread loads from.
struct Records {
  const char* from;  // this thread's first chunk of the one that is being loaded
  bool valid = false;
  float scales[2];  // one of those of the thread's rows

  // Goes on to the record of `row` (-1: none) in half kHalf, which lies at record(row).
  template <int kHalf, typename Record>
  __device__ __forceinline__ void aim(int row, Record record) {
    const int lane = threadIdx.x % 32, its = __shfl_sync(~0u, row, kHalf, 4);
    valid = its >= 0;
    const char* const at = record(max(its, 0));
    from = at + lane % 4 * 16;
    scales[kHalf] = load_now(reinterpret_cast<const float*>(at + 512) + lane % 4, valid, 1.f);
  }
  // Loads the values of scale kScale.
  template <int kScale>
  __device__ __forceinline__ void load(Unpacking& x) const {
    uint32_t (&low)[4] = reinterpret_cast<uint32_t (&)[4]>(x.codes[0]);
    uint32_t (&high)[4] = reinterpret_cast<uint32_t (&)[4]>(x.codes[4]);
    load_16_now<kScale * 128>(from, valid, low);
    load_16_now<kScale * 128 + 64>(from, valid, high);
  }
};

// A chunk of 16 values becomes two in bf16. Those of neighbouring rows fall on different banks.
struct Unpacked {
  uint32_t chunk[2];  // in the first block, of the tile's first half

  __device__ explicit Unpacked(uint32_t keys) {
    const int lane = threadIdx.x % 32, row = record_row(threadIdx.x / 32 % 4, 0, lane);
    for (int i = 0; i < 2; ++i) chunk[i] = keys + row * 128 + ((lane % 4 * 2 + i) ^ row % 8) * 16;
  }

  // Half kHalf of two blocks, `to` bytes on and `then` bytes on.
  template <int kHalf>
  __device__ __forceinline__ void store(uint32_t to, uint32_t then, const Unpacking& x,
                                        float scale) const {
    unpack_values(x.codes, scale, [&](int i, const uint32_t (&y)[4]) {
      store_shared_16(chunk[i % 2] + (i < 2 ? to : then) + kHalf * 4096, y);
    });
  }

  // Half kHalf of the last 64 values, which are bf16 already, to block kBlock, `to` bytes on.
  template <int kHalf, int kBlock, typename Record>
  __device__ __forceinline__ void copy_last(uint32_t to, int row, Record record,
                                            uint64_t policy) const {
    const int its = __shfl_sync(~0u, row, kHalf, 4);
    const char* last = record(max(its, 0)) + 528 + threadIdx.x % 4 * 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      cp_async_16_alone(whole_sum(chunk[i], to) + kBlock * kBlockBytes + kHalf * 4096,
                        last + i * 16, its >= 0, policy);
    }
  }
};

// ---- in place ----------------------------------------------------------------------------------

// Records are unpacked where they arrive, so that no register waits for what is under way, and by
// the warpgroups that multiply (fwd.cuh): of every tile the left one the first half of the rows,
// the right one the second. A warp has 8 rows, and their part of each block for itself. Codes come
// to four of the first eight blocks, 128 a block, scales to one of the others, and the last 64
// values, bf16 already, to the ninth for good.
class RecordsInPlace {
  static constexpr int kTileBytes = 9 * kBlockBytes, kHalfBytes = 4096;

  uint32_t keys;

  // Where a chunk of one of the warp's eight rows of a half lies in a block.
  __device__ static uint32_t place(int row, int chunk) {
    return thread_index() / 32 % 4 * 1024 + row * 128 + (chunk ^ row) * 16;
  }

 public:
  __device__ explicit RecordsInPlace(const uint8_t* keys_of_tiles)
      : keys(smem_address(keys_of_tiles)) {}

  // Lane 8 * sub + i, i < 4, has the `row` of the warp's Gather::row(i, sub), -1 for none; it lies
  // at record(row). The lane copies chunk i of rows sub and sub + 4.
  template <typename Record>
  __device__ __forceinline__ void copy(int parity, int half, int row, Record record,
                                       uint64_t policy) const {
    const int lane = thread_index() % 32;
    const uint32_t tile = keys + parity * kTileBytes, to = tile + half * kHalfBytes;
    const uint32_t chunk[2] = {place(lane / 8, lane % 8), place(lane / 8 + 4, lane % 8)};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int its = __shfl_sync(~0u, row, half * 2 + i, 8);
      const char* const from = record(max(its, 0)) + lane % 8 * 16;
      const uint32_t at = whole_sum(to + 4 * kBlockBytes, chunk[i]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        cp_async_16_alone(at + j * kBlockBytes, from + j * 128, its >= 0, policy);
      }
    }
    if (lane % 8 / 2 == half) {
      const uint32_t at = whole_sum(to, place(lane / 8 + lane % 2 * 4, 0));
      if (row >= 0) {
        cp_async_16_alone(at, record(row) + 512, true, policy);
      } else {
        constexpr uint32_t kOne = 0x3f800000;
        store_shared_16(at, {kOne, kOne, kOne, kOne});
      }
    }
    if (half == 0) return;
    // The ninth block is freed with the second half.
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int its = __shfl_sync(~0u, row, i, 8);
      cp_async_16_alone(whole_sum(tile, chunk[i % 2]) + 8 * kBlockBytes + i / 2 * kHalfBytes,
                        record(max(its, 0)) + 528 + lane % 8 * 16, its >= 0, policy);
    }
  }

  // A lane has a quarter of row lane / 4: of a block of codes chunk lane % 4 and the fourth after
  // it, in odd rows the latter first, so that neighbouring rows fall on different banks.
  __device__ __forceinline__ void unpack(int parity, int half) const {
    const int lane = thread_index() % 32, row = lane / 4, odd = row % 2;
    const uint32_t to = keys + parity * kTileBytes + half * kHalfBytes;
    const uint32_t from = to + 4 * kBlockBytes, codes = place(row, lane % 4 + odd * 4);
    uint32_t values[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[i] = place(row, lane % 4 * 2 + i % 2) + (i / 2 ^ odd) * kBlockBytes;
    }
    uint32_t scales[4];
    __syncwarp();
    load_shared_16(to + place(row, 0), scales);
    // Values of the first two blocks of codes replace none, those of the others only codes that are
    // in registers.
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      uint32_t x[2][8];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t block = from + (part * 2 + i) * kBlockBytes;
        load_shared_16(block + codes, reinterpret_cast<uint32_t (&)[4]>(x[i][0]));
        load_shared_16(block + (codes ^ 64), reinterpret_cast<uint32_t (&)[4]>(x[i][4]));
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t into = to + (part * 2 + i) * (2 * kBlockBytes);
        unpack_values(x[i], __uint_as_float(scales[part * 2 + i]),
                      [&](int j, const uint32_t (&y)[4]) { store_shared_16(into + values[j], y); });
      }
    }
  }
};

// Unpacks half `half` of a tile when it is there.
template <typename Shared>
__device__ __forceinline__ void unpack_half(Shared& shared, int parity, int half, uint32_t phase) {
  mbarrier_wait(&shared.key_full[parity][half], phase);
  RecordsInPlace(shared.keys[0][0]).unpack(parity, half);
  fence_async_proxy();  // ordinary stores, which wgmma reads
}

}  // namespace jax_dsa::sparse_mla
