// The way of a tile's 64 records to bf16 in shared memory (common/tile.cuh), by a warpgroup of
// producers. See records.cuh.
#pragma once

#include "common/ptx.cuh"
#include "common/tile.cuh"
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

}  // namespace jax_dsa::sparse_mla
