// Unpacks the 64 page records of a key tile to bf16 in shared memory, as RecordsInPlace does with
// records of 656 bytes.
//
// Where the bytes of a record arrive in the row's part of the tile (blocks of 128 bytes per row):
//   block 0     the scales, in the first 8 bytes
//   block 3..5  the codes of dims 0..383, 128 codes per block
//   block 6     the codes of dims 384..447, in the first 64 bytes
//   block 7     dims 448..511, which are bf16 already and stay
#pragma once

#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "mla/plan.cuh"
#include "mla/record_tiles.cuh"
#include "mla/records.cuh"

namespace jax_dsa::mla {

class PageRecordsInPlace {
  static constexpr int kTileBytes = kKeyBlocks * kBlockBytes, kHalfBytes = 4096;
  static constexpr int kCodeBlock = 3, kLastCodeBlock = 6, kValueBlock = 7;

  uint32_t keys;

  // Returns the offset of a chunk within a block. `row` is one of the warp's eight rows of a half.
  __device__ static uint32_t chunk_offset(uint32_t row, uint32_t chunk) {
    return thread_index() / 32 % 4 * 1024 + row * 128 + (chunk ^ row) * 16;
  }

 public:
  __device__ explicit PageRecordsInPlace(const uint8_t* keys_of_tiles)
      : keys(smem_address(keys_of_tiles)) {}

  // Copies this lane's chunks of one half of a tile. Lane 8 * sub + i, i < 4, holds the record of
  // the warp's Gather::row(i, sub). The lane copies chunks i, i + 8, i + 16 and i + 24 of rows sub
  // and sub + 4, and one of the last four chunks of one of them. Where there is no record, values
  // and scales become zeros.
  __device__ __forceinline__ void copy(int parity, int half, KeySource record,
                                       uint64_t policy) const {
    const uint32_t lane = thread_index() % 32, sub = lane / 8, chunk = lane % 8;
    const bool low = chunk < 4;
    const uint32_t to = keys + parity * kTileBytes + half * kHalfBytes;
    const char* last = nullptr;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const char* const from = shuffled(record.at, half * 2 + i);
      if (low == (i == 0)) last = from;
      const uint32_t at = whole_sum(to, chunk_offset(sub + i * 4, chunk));
#pragma unroll
      for (int j = 0; j < 3; ++j) {
        cp_async_16_alone(at + (kCodeBlock + j) * kBlockBytes, from + chunk * 16 + j * 128,
                          from != nullptr, policy);
      }
      // Chunks 24..27 have codes, and chunks 28..31 the first values.
      const uint32_t block = low ? kLastCodeBlock * kBlockBytes : kValueBlock * kBlockBytes;
      const uint32_t place = chunk_offset(sub + i * 4, chunk % 4) + block;
      cp_async_16_alone(whole_sum(to, place), from + chunk * 16 + 384, from != nullptr, policy);
    }
    const uint32_t place = chunk_offset(sub + (low ? 0 : 4), chunk % 4 + 4);
    cp_async_16_alone(whole_sum(to, place) + kValueBlock * kBlockBytes, last + 512 + chunk % 4 * 16,
                      last != nullptr, policy);
    if (chunk / 2 == half) {
      cp_async_8(whole_sum(to, chunk_offset(sub + chunk % 2 * 4, 0)), record.at + record.scales,
                 record.exists());
    }
  }

  // Returns the offsets within 16 rows of a thread's first chunk of codes (lower half of the
  // result) and first chunk of values (upper half), as RecordsInPlace does.
  __device__ static uint32_t unpack_offsets() {
    const uint32_t thread = thread_index(), odd = thread / 4 % 2, upper = thread / 8 % 2;
    const uint32_t swizzle = (thread / 32 % 4 * 2 + odd) ^ odd * 4, chunk = thread % 4;
    const uint32_t row = (thread / 16 % 2 * 8 + swizzle) * 128;
    const uint32_t codes = row + ((chunk + upper * 4) ^ swizzle) * 16;
    const uint32_t values = row + upper * kBlockBytes + ((chunk * 2) ^ swizzle) * 16;
    return opaque(codes | values << 16);
  }

  // Unpacks half of a tile, 16 rows at a time. A warp unpacks four of these rows, and a lane one
  // chunk of each of the first three blocks of a row's codes. Together with the first 16 rows,
  // which are those of lanes with upper = 0, it unpacks the codes of block 6 of all 32 rows: a lane
  // with upper = 1 takes those of the row that it has 16 rows further on.
  __device__ __forceinline__ void unpack(int parity, int half, uint32_t offsets) const {
    const uint32_t thread = thread_index(), upper = thread / 8 % 2;
#pragma unroll 1
    for (int first = 0; first < 32; first += 16) {
      const bool with_last = first == 0;
      const uint32_t tile = keys + parity * kTileBytes + half * kHalfBytes + first * 128;
      const uint32_t codes = tile + offsets % 65536, values = tile + offsets / 65536;
      const uint32_t scales_at = tile + (offsets & 0x780) + (offsets >> 3 & 0x70);
      uint32_t scale[4], x[4][4] = {};  // of the lane's chunks
      scale[3] = 127;
      if (with_last) {
        scale[3] = load_shared_byte(scales_at + upper * 2048 + 6);
        load_shared_16((codes ^ upper * 64) + upper * 2048 + kLastCodeBlock * kBlockBytes, x[3]);
      }
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        scale[i] = load_shared_byte(scales_at + upper + i * 2);
        load_shared_16(codes + (kCodeBlock + i) * kBlockBytes, x[i]);
      }
      const OpaqueFactors factors = OpaqueFactors::opaque();
      uint32_t nan_bits[2] = {0, 0};
      bool fast = true;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        fast &= is_fast_page_record_scale(scale[i]);
#pragma unroll
        for (int j = 0; j < 4; ++j) nan_bits[j % 2] |= nan_bits_e4m3(x[i][j], factors);
      }
      const auto unpack_with = [&](auto values_of) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (i == 3 && !with_last) continue;
          const uint32_t to =
              i < 3 ? values + i * (2 * kBlockBytes)
                    : values - upper * (kBlockBytes - 2048) + kLastCodeBlock * kBlockBytes;
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            uint32_t y[4];
            values_of(i, x[i][2 * j], y[0], y[1]);
            values_of(i, x[i][2 * j + 1], y[2], y[3]);
            store_shared_16(to ^ (j * 16), y);
          }
        }
      };
      // After this all lanes have their codes in registers, so values may replace the codes.
      __syncwarp();
      if (__all_sync(~0u, fast && !any_nan(nan_bits[0] | nan_bits[1]))) {
        uint32_t factor[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) factor[i] = page_record_factor(scale[i]);
        unpack_with([&](int i, uint32_t codes, uint32_t& low, uint32_t& high) {
          values_by_power_of_two(codes, factor[i], factors, low, high);
        });
      } else {
        unpack_with([&](int i, uint32_t codes, uint32_t& low, uint32_t& high) {
          values_by_any_scale(codes, page_record_scale(scale[i]), low, high);
        });
      }
    }
  }
};

}  // namespace jax_dsa::mla
