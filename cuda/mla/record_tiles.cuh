// The way of a tile's 64 records to bf16 in shared memory (common/tile.cuh), by a warpgroup of
// producers. See records.cuh.
#pragma once

#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "mla/plan.cuh"
#include "mla/records.cuh"

namespace jax_dsa::mla {

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
// the warpgroups that multiply (fwd.cuh), of every tile half by each. Codes come to four of the
// first eight blocks, 128 a block, scales to one of the others, and the last 64 values, bf16
// already, to the ninth for good.
class RecordsInPlace {
  static constexpr int kTileBytes = 9 * kBlockBytes, kHalfBytes = 4096;

  uint32_t keys;

  // Where a chunk of one of the warp's eight rows of a half lies in a block.
  __device__ static uint32_t place(uint32_t row, uint32_t chunk) {
    const uint32_t thread = thread_index();
    return thread / 32 % 4 * 1024 + row * 128 + (chunk ^ row) * 16;
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
    // Where there is no record, codes and scales are zeros.
    if (lane % 8 / 2 == half) {
      cp_async_16_alone(whole_sum(to, place(lane / 8 + lane % 2 * 4, 0)), record(max(row, 0)) + 512,
                        row >= 0, policy);
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

  // Where, in 16 rows, the first of a thread's chunks of codes is and, in the upper half of the
  // result, the first of its chunks of values. A warp has four rows for itself, a lane one chunk of
  // each block of a row's codes. Lanes 8 i .. 8 i + 7 have four chunks side by side of two rows
  // whose numbers differ in bits 0 and 2, and so find different banks both for codes and for
  // values.
  __device__ static uint32_t places() {
    const uint32_t thread = thread_index(), odd = thread / 4 % 2, upper = thread / 8 % 2;
    const uint32_t swizzle = (thread / 32 % 4 * 2 + odd) ^ odd * 4, chunk = thread % 4;
    const uint32_t row = (thread / 16 % 2 * 8 + swizzle) * 128;
    const uint32_t codes = row + 4 * kBlockBytes + ((chunk + upper * 4) ^ swizzle) * 16;
    const uint32_t values = row + upper * kBlockBytes + ((chunk * 2) ^ swizzle) * 16;
    return opaque(codes | values << 16);
  }

  // Unpacks the warpgroup's 16 rows from `first` on.
  __device__ __forceinline__ void unpack(int parity, int first, uint32_t places) const {
    const uint32_t thread = thread_index(), chunk = thread % 4;
    const uint32_t tile = keys + parity * kTileBytes + first * 128;
    const uint32_t codes = tile + places % 65536, values = tile + places / 65536;
    const uint32_t scales_at = tile + (places & 0x780) + (places >> 3 & 0x70);
    uint32_t scales[4], x[4][4];
    load_shared_16(scales_at, scales);
    const Factors factors = Factors::opaque();
    uint32_t nan_bits[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      load_shared_16(codes + i * kBlockBytes, x[i]);
#pragma unroll
      for (int j = 0; j < 4; ++j) nan_bits[j % 2] |= nan_bits_e4m3(x[i][j], factors);
    }
    const auto unpack_by = [&](auto values_of) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          uint32_t y[4];
          values_of(i, x[i][2 * j], y[0], y[1]);
          values_of(i, x[i][2 * j + 1], y[2], y[3]);
          store_shared_16((values ^ (j * 16)) + i * (2 * kBlockBytes), y);
        }
      }
    };
    // The lanes of a row share its scales.
    const uint32_t low = thread % 2 ? scales[1] : scales[0];
    const uint32_t high = thread % 2 ? scales[3] : scales[2];
    const bool plain = is_plain_scale(__uint_as_float(chunk < 2 ? low : high));
    // All lanes have their codes in registers then, and values may replace them.
    __syncwarp();
    if (__all_sync(~0u, plain && !any_nan(nan_bits[0] | nan_bits[1]))) {
      uint32_t factor[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) factor[i] = scale_factor(__uint_as_float(scales[i]));
      unpack_by([&](int i, uint32_t codes, uint32_t& low, uint32_t& high) {
        plain_values(codes, factor[i], factors, low, high);
      });
    } else {
      unpack_by([&](int i, uint32_t codes, uint32_t& low, uint32_t& high) {
        any_values(codes, __uint_as_float(scales[i]), low, high);
      });
    }
  }
};

// Unpacks warpgroup kSide's half of a tile when it is there.
template <int kSide, typename Shared>
__device__ __forceinline__ void unpack_half(Shared& shared, int parity, uint32_t phase,
                                            uint32_t places) {
  const RecordsInPlace records(shared.keys[0][0]);
  mbarrier_wait(&shared.key_full[parity][kSide], phase);
#pragma unroll 1
  for (int first = kSide * 32; first < kSide * 32 + 32; first += 16) {
    records.unpack(parity, first, places);
  }
  fence_async_proxy();  // ordinary stores, which wgmma reads
}

}  // namespace jax_dsa::mla
