// Unpacks the 64 FP8 records of a key tile to bf16 in shared memory (common/tile.cuh). See
// records.cuh.
#pragma once

#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "mla/plan.cuh"
#include "mla/records.cuh"

namespace jax_dsa::mla {

// A thread unpacks a quarter of two rows of a tile: the row lane / 4 of its warp's eight rows in
// either half of the tile, and of that row the 16-byte chunk lane % 4 of each block (64 values).
// One step unpacks the values of one scale, which are a chunk of two blocks.
struct RecordCodes {
  uint32_t codes[8];
};

inline constexpr int kUnpackSteps = 8, kStepsAhead = 3, kStepsHeld = kStepsAhead + 1;
static_assert(kUnpackSteps % kStepsHeld == 0);

// Calls step<kStep>() for each step of a tile.
template <int kStep = 0, typename Step>
__device__ __forceinline__ void for_each_step(const Step& step) {
  if constexpr (kStep < kUnpackSteps) {
    step.template operator()<kStep>();
    for_each_step<kStep + 1>(step);
  }
}

__host__ __device__ constexpr int record_row(int warp, int half, int lane) {
  return half * 32 + warp * 8 + lane / 4;
}

// Returns the validity bits of the warp's 16 rows. Lanes l and l + 1 of each four hold the `row` in
// halves 0 and 1. Bit r stands for row r % 8 of half r / 8.
__device__ __forceinline__ uint32_t record_valid_bits(int row) {
  const int lane = threadIdx.x % 32;
  return __ballot_sync(~0u, __shfl_sync(~0u, row, lane % 8 * 4 + lane / 8) >= 0) & 0xffff;
}

// Loads the records of a thread's rows into registers.
struct RecordLoader {
  const char* from;  // this thread's first chunk of the current record
  bool valid = false;
  float scales[2];  // this lane's scale of each of the thread's rows

  // Moves on to the record of `row` (-1: none) in half kHalf. The record lies at record(row).
  template <int kHalf, typename Record>
  __device__ __forceinline__ void seek(int row, Record record) {
    const int lane = threadIdx.x % 32, cache_row = __shfl_sync(~0u, row, kHalf, 4);
    valid = cache_row >= 0;
    const char* const at = record(max(cache_row, 0));
    from = at + lane % 4 * 16;
    scales[kHalf] = load_now(reinterpret_cast<const float*>(at + 512) + lane % 4, valid, 1.f);
  }
  // Loads the values of scale kScale.
  template <int kScale>
  __device__ __forceinline__ void load(RecordCodes& x) const {
    uint32_t (&low)[4] = reinterpret_cast<uint32_t (&)[4]>(x.codes[0]);
    uint32_t (&high)[4] = reinterpret_cast<uint32_t (&)[4]>(x.codes[4]);
    load_16_now<kScale * 128>(from, valid, low);
    load_16_now<kScale * 128 + 64>(from, valid, high);
  }
};

// Stores unpacked values. A chunk of 16 codes becomes two chunks of bf16. The chunks of neighboring
// rows fall on different banks.
struct UnpackedRows {
  uint32_t chunk[2];  // addresses in the first block, in the tile's first half

  __device__ explicit UnpackedRows(uint32_t keys) {
    const int lane = threadIdx.x % 32, row = record_row(threadIdx.x / 32 % 4, 0, lane);
    for (int i = 0; i < 2; ++i) chunk[i] = keys + row * 128 + ((lane % 4 * 2 + i) ^ row % 8) * 16;
  }

  // Stores half kHalf of two blocks, at offsets of `to` and `then` bytes.
  template <int kHalf>
  __device__ __forceinline__ void store(uint32_t to, uint32_t then, const RecordCodes& x,
                                        float scale) const {
    unpack_values(x.codes, scale, [&](int i, const uint32_t (&y)[4]) {
      store_shared_16(chunk[i % 2] + (i < 2 ? to : then) + kHalf * 4096, y);
    });
  }

  // Copies half kHalf of the last 64 values, which are bf16 already, to block kBlock at an offset
  // of `to` bytes.
  template <int kHalf, int kBlock, typename Record>
  __device__ __forceinline__ void copy_bf16_values(uint32_t to, int row, Record record,
                                                   uint64_t policy) const {
    const int cache_row = __shfl_sync(~0u, row, kHalf, 4);
    const char* last = record(max(cache_row, 0)) + 528 + threadIdx.x % 4 * 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      cp_async_16_alone(whole_sum(chunk[i], to) + kBlock * kBlockBytes + kHalf * 4096,
                        last + i * 16, cache_row >= 0, policy);
    }
  }
};

// ---- unpacking in place ------------------------------------------------------------------------

// Returns the address that the lane `from` of each eight holds.
__device__ __forceinline__ const char* shuffled(const char* address, int from) {
  return reinterpret_cast<const char*>(
      __shfl_sync(~0u, reinterpret_cast<uintptr_t>(address), from, 8));
}

// Copies records to shared memory and unpacks them where they arrive, so that no register waits for
// a copy in flight. The MMA warpgroups (consumer.cuh) do the unpacking, each of them half of every
// tile. Codes arrive in four of the first eight blocks, 128 codes per row and block, scales in
// another block, and the last 64 values, which are bf16 already, in the ninth block, where they
// stay.
class RecordsInPlace {
  static constexpr int kTileBytes = 9 * kBlockBytes, kHalfBytes = 4096;

  uint32_t keys;

  // Returns the offset of a chunk within a block. `row` is one of the warp's eight rows of a half.
  __device__ static uint32_t chunk_offset(uint32_t row, uint32_t chunk) {
    const uint32_t thread = thread_index();
    return thread / 32 % 4 * 1024 + row * 128 + (chunk ^ row) * 16;
  }

 public:
  __device__ explicit RecordsInPlace(const uint8_t* keys_of_tiles)
      : keys(smem_address(keys_of_tiles)) {}

  // Copies this lane's chunks of one half of a tile. Lane 8 * sub + i, i < 4, holds the record of
  // the warp's Gather::row(i, sub). The lane copies chunk i of rows sub and sub + 4.
  __device__ __forceinline__ void copy(int parity, int half, KeySource record,
                                       uint64_t policy) const {
    const int lane = thread_index() % 32;
    const uint32_t tile = keys + parity * kTileBytes, to = tile + half * kHalfBytes;
    const uint32_t chunk[2] = {chunk_offset(lane / 8, lane % 8),
                               chunk_offset(lane / 8 + 4, lane % 8)};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const char* const from = shuffled(record.at, half * 2 + i);
      const uint32_t at = whole_sum(to + 4 * kBlockBytes, chunk[i]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        cp_async_16_alone(at + j * kBlockBytes, from + lane % 8 * 16 + j * 128, from != nullptr,
                          policy);
      }
    }
    // Where there is no record, codes and scales become zeros.
    if (lane % 8 / 2 == half) {
      cp_async_16_alone(whole_sum(to, chunk_offset(lane / 8 + lane % 2 * 4, 0)), record.at + 512,
                        record.exists(), policy);
    }
    if (half == 0) return;
    // The ninth block is freed with the second half.
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const char* const from = shuffled(record.at, i);
      cp_async_16_alone(whole_sum(tile, chunk[i % 2]) + 8 * kBlockBytes + i / 2 * kHalfBytes,
                        from + 528 + lane % 8 * 16, from != nullptr, policy);
    }
  }

  // Returns the offsets within 16 rows of a thread's first chunk of codes (lower half of the
  // result) and first chunk of values (upper half). Each warp unpacks four rows, each lane one
  // chunk of each block of a row's codes. Lanes 8 i .. 8 i + 7 have four neighboring chunks of two
  // rows whose numbers differ in bits 0 and 2, so they fall on different banks for codes and for
  // values.
  __device__ static uint32_t unpack_offsets() {
    const uint32_t thread = thread_index(), odd = thread / 4 % 2, upper = thread / 8 % 2;
    const uint32_t swizzle = (thread / 32 % 4 * 2 + odd) ^ odd * 4, chunk = thread % 4;
    const uint32_t row = (thread / 16 % 2 * 8 + swizzle) * 128;
    const uint32_t codes = row + 4 * kBlockBytes + ((chunk + upper * 4) ^ swizzle) * 16;
    const uint32_t values = row + upper * kBlockBytes + ((chunk * 2) ^ swizzle) * 16;
    return opaque(codes | values << 16);
  }

  // Unpacks half of a tile.
  __device__ __forceinline__ void unpack(int parity, int half, uint32_t offsets) const {
#pragma unroll 1
    for (int first = half * 32; first < half * 32 + 32; first += 16) {
      unpack_rows(parity, first, offsets);
    }
  }

 private:
  // Unpacks the warpgroup's 16 rows that start at `first`.
  __device__ __forceinline__ void unpack_rows(int parity, int first, uint32_t offsets) const {
    const uint32_t thread = thread_index(), chunk = thread % 4;
    const uint32_t tile = keys + parity * kTileBytes + first * 128;
    const uint32_t codes = tile + offsets % 65536, values = tile + offsets / 65536;
    const uint32_t scales_at = tile + (offsets & 0x780) + (offsets >> 3 & 0x70);
    uint32_t scales[4], x[4][4];
    load_shared_16(scales_at, scales);
    const OpaqueFactors factors = OpaqueFactors::opaque();
    uint32_t nan_bits[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      load_shared_16(codes + i * kBlockBytes, x[i]);
#pragma unroll
      for (int j = 0; j < 4; ++j) nan_bits[j % 2] |= nan_bits_e4m3(x[i][j], factors);
    }
    const auto unpack_with = [&](auto values_of) {
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
    const bool all_powers_of_two = is_power_of_two_scale(__uint_as_float(chunk < 2 ? low : high));
    // After this all lanes have their codes in registers, so values may replace the codes.
    __syncwarp();
    if (__all_sync(~0u, all_powers_of_two && !any_nan(nan_bits[0] | nan_bits[1]))) {
      uint32_t factor[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) factor[i] = scale_factor(__uint_as_float(scales[i]));
      unpack_with([&](int i, uint32_t codes, uint32_t& low, uint32_t& high) {
        values_by_power_of_two(codes, factor[i], factors, low, high);
      });
    } else {
      unpack_with([&](int i, uint32_t codes, uint32_t& low, uint32_t& high) {
        values_by_any_scale(codes, __uint_as_float(scales[i]), low, high);
      });
    }
  }
};

// Waits for warpgroup kSide's half of a tile and unpacks it.
template <typename Records, int kSide, typename Shared>
__device__ __forceinline__ void unpack_half(Shared& shared, int parity, uint32_t phase,
                                            uint32_t offsets) {
  const Records records(shared.keys[0][0]);
  mbarrier_wait(&shared.key_full[parity][kSide], phase);
  records.unpack(parity, kSide, offsets);
  fence_async_proxy();  // makes ordinary stores visible to wgmma
}

}  // namespace jax_dsa::mla
